"""The planted teacher of the synthetic stream: what the labels depend on.

Every (table, id) has a hidden effect, a hash, and every dense feature a hidden slope; their sum is
a logit, and a label is drawn with its probability. A model that learnt all of it would reach an
AUC of about 0.79; most of it hangs on dense features and popular ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcache.data.hashing import NORMAL_STD, hash_counters, key_of, keys_of, normal_from_bits
from distcache.data.zipf import ZipfTables

DENSE_STD = 0.8
"""Standard deviation that the dense features bring to the logit."""
IDS_STD = 1.0
"""Standard deviation that all ids together bring to the logit."""
BASE_RATE = 0.27
"""Share of positive labels."""
_MEAN_SQUARE_WEIGHT = 13 / 12


class Teacher:
    """Logits of samples from their ids and dense features.

    `bag_sizes`: fixed or mean ids per bag of each table; `weighted`: whether ids have weights
    (uniform in [0.5, 1.5)), which then multiply the effects.
    """

    def __init__(
        self,
        tables: ZipfTables,
        bag_sizes: Sequence[float],
        dense_features: int,
        weighted: bool,
        seed: int,
    ) -> None:
        count = len(bag_sizes)
        self._keys = keys_of(count, seed, 0)
        self._centre = np.zeros(count)
        self._scale = np.zeros(count)
        for table, size in enumerate(bag_sizes):
            centre, variance = self._moments(tables, table)
            variance *= size * (_MEAN_SQUARE_WEIGHT if weighted else 1.0)
            self._centre[table] = centre
            if variance > 1e-6:
                self._scale[table] = IDS_STD / np.sqrt(count * variance)
        slopes = normal_from_bits(keys_of(dense_features, seed, 1))
        norm = float(np.sqrt(np.sum(slopes**2))) * NORMAL_STD
        self._slopes = slopes * (DENSE_STD / norm if norm > 0 else 0.0)
        ids_variance = IDS_STD**2 * np.count_nonzero(self._scale) / count
        dense_variance = DENSE_STD**2 if norm > 0 else 0.0
        self._bias = _bias_for(BASE_RATE, float(np.sqrt(ids_variance + dense_variance)))
        self._label_key = key_of(seed, 2)

    def probabilities(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None, dense: np.ndarray
    ) -> np.ndarray:
        """Probability float64 `[b]` of a positive label.

        `ids` int64 `[n]` lie feature-major in bags of `lengths` int64 `[F, b]`; `weights` float64
        `[n]` or None; `dense` float64 `[b, F_dense]`.
        """
        counts = lengths.sum(axis=1)
        effects = self._effects(ids, np.repeat(self._keys, counts))
        effects -= np.repeat(self._centre, counts)
        if weights is not None:
            effects *= weights
        # Effects and weights are multiples of powers of two, so bag sums are exact in any order;
        # features are added one by one, so that a sample's bits do not depend on its slice.
        bags = _bag_sums(effects, lengths)
        logits = np.full(lengths.shape[1], self._bias)
        for scale, bag in zip(self._scale, bags, strict=True):
            logits += scale * bag
        for slope, column in zip(self._slopes, np.ascontiguousarray(dense.T), strict=True):
            logits += slope * column
        return 1.0 / (1.0 + np.exp(-logits))

    def _effects(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Hidden effects float64 `[n]` of ids int64 `[n]`, before centring and scaling."""
        return normal_from_bits(hash_counters(ids.view(np.uint64), keys))

    def _moments(self, tables: ZipfTables, table: int) -> tuple[float, float]:
        """Mean (a multiple of 2^-15) and variance of a table's effect over its lookups."""
        mass = tables.head(table)
        head = self._effects(
            tables.ids_of_ranks(table, np.arange(len(mass))), self._keys[table : table + 1]
        )
        tail = max(0.0, 1.0 - float(mass.sum()))
        mean = round(float(mass @ head) * 2**15) / 2**15
        return mean, float(mass @ (head - mean) ** 2) + tail * NORMAL_STD**2


def _bag_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums float64 `[F, b]` of `values` `[n]` over bags of `lengths` `[F, b]`."""
    if values.size == lengths.size and np.all(lengths == 1):
        return values.reshape(lengths.shape)
    bags = np.repeat(np.arange(lengths.size), lengths.ravel())
    return np.bincount(bags, weights=values, minlength=lengths.size).reshape(lengths.shape)


def _bias_for(rate: float, std: float) -> float:
    """The bias at which a normal logit of deviation `std` has the mean probability `rate`."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    low, high = -20.0, 20.0
    for _ in range(60):
        bias = (low + high) / 2
        mean = float(weights @ (1.0 / (1.0 + np.exp(-(bias + std * nodes)))))
        low, high = (bias, high) if mean < rate else (low, bias)
    return (low + high) / 2
