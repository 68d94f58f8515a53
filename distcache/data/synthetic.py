"""A click stream of any shape, drawn from counters: unlimited, learnable, sliceable.

Everything about sample i is a hash of (seed, i, feature, position in the bag), so any rank draws
any slice by itself, in any order, from any thread, and nothing repeats unless asked to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.data.batch import Batch, JaggedIds
from distcache.data.hashing import (
    GOLDEN,
    hash_counters,
    key_of,
    keys_of,
    mix64,
    normal_from_bits,
    uniform_from_bits,
)
from distcache.data.samplers import SampleOrder
from distcache.data.slices import BatchSlice, SlicedSource
from distcache.data.subset import Subset
from distcache.data.teacher import Teacher
from distcache.data.zipf import ZipfTables
from distcache.errors import ConfigError

_HELD_OUT = 1 << 62
"""First counter of held-out samples: no training sample is ever so far."""
_SAMPLE, _BAG, _LENGTH, _VALUE, _WEIGHT, _DENSE, _LABEL, _ZIPF, _TEACHER, _ORDER = range(10)
"""Purposes: the second element of a key's path, after the seed."""


@dataclass(frozen=True)
class SyntheticSpec:
    """What the stream looks like. Raises ConfigError that names the key.

    `table_rows`: rows of each table, read by one feature each; `bag_size`: ids per bag, an int is
    fixed, a float the mean of Poisson lengths, a sequence gives one per table; `zipf`: exponent
    a >= 0 of the ids; `weighted`: a weight in [0.5, 1.5) per id; `samples` of an epoch and
    `eval_samples` held out (None: unlimited, never repeating); `global_batch_size`: B;
    `dtype`: torch.float32 or torch.float64, of dense features, labels and weights.
    """

    table_rows: Sequence[int]
    bag_size: float | Sequence[float] = 1
    zipf: float = 1.05
    weighted: bool = False
    samples: int | None = None
    eval_samples: int | None = None
    dense_features: int = 13
    global_batch_size: int = 2048
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.table_rows or any(rows < 1 for rows in self.table_rows):
            raise ConfigError(
                f"data.table_rows={list(self.table_rows)}: give the rows of each table, "
                "at least one table of at least 1 row"
            )
        for key in ("samples", "eval_samples"):
            number = getattr(self, key)
            if number is not None and number < 1:
                raise ConfigError(
                    f"data.{key}={number}: give at least 1, or null for an unlimited stream"
                )
        if self.dense_features < 0:
            raise ConfigError(f"data.dense_features={self.dense_features} is negative")
        if self.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"data comes in float32 or float64, not {self.dtype}")
        if len(self.bag_sizes) != len(self.table_rows):
            raise ConfigError(
                f"data.bag_size has {len(self.bag_sizes)} entries for {len(self.table_rows)} "
                "tables: give one number for all, or one per table"
            )
        for size in self.bag_sizes:
            number = isinstance(size, int | float) and not isinstance(size, bool)
            if not number or not math.isfinite(size) or size < 0:
                raise ConfigError(
                    f"data.bag_size: {size!r} is not a number >= 0 (an int is fixed, a float "
                    "is a mean)"
                )

    @property
    def bag_sizes(self) -> tuple[float, ...]:
        """Ids per bag of each table: an int is fixed, a float a mean."""
        if isinstance(self.bag_size, Sequence):
            return tuple(self.bag_size)
        return (self.bag_size,) * len(self.table_rows)


class SyntheticSource(SlicedSource):
    """The `BatchSource` of a `SyntheticSpec`; features are `cat_0`, `cat_1`, ...

    Held-out samples have counters of their own, which training never reaches.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        self.table_rows = tuple(int(rows) for rows in spec.table_rows)
        self.features = tuple(f"cat_{index}" for index in range(len(self.table_rows)))
        self.dense_features = spec.dense_features
        keys = ("bag_size", "zipf", "weighted", "samples", "dense_features")
        self.identity = {f"data.{key}": str(getattr(spec, key)) for key in keys}
        self.vocabulary = f"synthetic, zipf {spec.zipf}, seed {spec.seed}"  # fix which ids are hot
        super().__init__(spec.samples, spec.eval_samples, spec.global_batch_size)
        self._order = SampleOrder(spec.samples, key_of(spec.seed, _ORDER))
        self._tables = ZipfTables(self.table_rows, spec.zipf, key_of(spec.seed, _ZIPF))
        sizes = spec.bag_sizes
        self._teacher = Teacher(
            self._tables, sizes, spec.dense_features, spec.weighted, key_of(spec.seed, _TEACHER)
        )
        self._fixed = np.array([s if isinstance(s, int) else 0 for s in sizes], dtype=np.int64)
        self._poisson = {i: _poisson_cdf(s) for i, s in enumerate(sizes) if isinstance(s, float)}
        self._bag_keys = keys_of(len(sizes), spec.seed, _BAG)[:, None]
        self._length_keys = keys_of(len(sizes), spec.seed, _LENGTH)
        self._dense_keys = keys_of(spec.dense_features, spec.seed, _DENSE)

    def lookups_per_sample(self, table: int) -> float:
        """Mean ids that a sample looks up in `table`."""
        return float(self.spec.bag_sizes[table])

    def expected_distinct(self, table: int, lookups: int) -> float:
        """Expected distinct rows of `table` among `lookups` ids of it."""
        return self._tables.expected_distinct(table, lookups)

    def hottest(self, table: int, count: int) -> np.ndarray:
        """The `count` likeliest ids of a table, int64, the likeliest first."""
        return self._tables.ids_of_ranks(table, np.arange(count))

    def read(self, part: BatchSlice) -> Batch:
        """See `SlicedSource.read`."""
        if part.kind == "train":
            return self.take(self._order.positions(part.span.epoch, part.start, part.stop), part)
        return self.take(np.arange(part.start, part.stop, dtype=np.int64) + _HELD_OUT, part)

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """See `SlicedSource.take`."""
        keys = hash_counters(samples.view(np.uint64), key_of(self.spec.seed, _SAMPLE))
        dense = normal_from_bits(hash_counters(keys[:, None], self._dense_keys))
        lengths = self._lengths(keys)
        ids, weights = self._bags(keys, lengths)
        chances = self._teacher.probabilities(ids, lengths, weights, dense)
        draws = uniform_from_bits(hash_counters(keys, key_of(self.spec.seed, _LABEL)))
        jagged = self._jagged(ids, lengths, weights)
        return part.batch(self._floats(dense), jagged, self._floats(draws < chances))

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`; without weights."""
        keys = hash_counters(samples.view(np.uint64), key_of(self.spec.seed, _SAMPLE))
        lengths = self._lengths(keys)
        return self._jagged(self._bags(keys, lengths)[0], lengths, None)

    def order_of(self, chosen: Subset, which: int) -> SampleOrder:
        """See `SlicedSource.order_of`."""
        return SampleOrder(chosen.count, key_of(self.spec.seed, _ORDER, which))

    def _jagged(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
    ) -> JaggedIds:
        """Bags of `lengths` `[F, b]`."""
        offsets = np.zeros(lengths.size + 1, dtype=np.int64)
        np.cumsum(lengths.ravel(), out=offsets[1:])
        return JaggedIds(
            features=self.features,
            values=torch.from_numpy(ids),
            offsets=torch.from_numpy(offsets),
            weights=None if weights is None else self._floats(weights),
        )

    def _lengths(self, keys: np.ndarray) -> np.ndarray:
        """Ids of each bag, int64 `[F, b]`, from sample keys `[b]`."""
        lengths = np.repeat(self._fixed[:, None], len(keys), axis=1)
        for table, cdf in self._poisson.items():
            draws = uniform_from_bits(hash_counters(keys, self._length_keys[table]))
            lengths[table] = np.searchsorted(cdf, draws, side="right")
        return lengths

    def _bags(self, keys: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids int64 `[n]` and weights float64 `[n]` or None of the bags of `lengths` `[F, b]`."""
        flat = lengths.ravel()
        ends = np.cumsum(flat)
        bits = np.repeat(hash_counters(keys, self._bag_keys).ravel(), flat)
        place = np.arange(len(bits)) - np.repeat(ends - flat, flat)
        bits += place.view(np.uint64) * np.uint64(GOLDEN)
        mix64(bits)
        ids = self._tables.draw_ids(uniform_from_bits(bits), lengths.sum(axis=1))
        if not self.spec.weighted:
            return ids, None
        # 23 bits: the same exact numbers in float32 and float64, below 1.5 in both.
        draws = hash_counters(bits, key_of(self.spec.seed, _WEIGHT)) >> np.uint64(41)
        return ids, draws.view(np.int64) * 2.0**-23 + 0.5

    def _floats(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.spec.dtype)


def _poisson_cdf(mean: float) -> np.ndarray:
    """P(length <= k) for k = 0, 1, ..., far enough that the rest is beyond float64."""
    last = int(mean + 12 * math.sqrt(mean) + 30)
    logs = [
        k * math.log(mean) - mean - math.lgamma(k + 1) if mean > 0 else -k * math.inf
        for k in range(1, last + 1)
    ]
    return np.cumsum(np.exp([-mean, *logs]))
