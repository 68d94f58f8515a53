"""Ids of many samples in compact arrays, from which a batch takes some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.data.batch import JaggedIds


@dataclass(frozen=True)
class BagColumn:
    """The bags of one feature for n samples.

    `values`: int32 or int64 `[m]`; `offsets`: int64 `[n + 1]`, or None where every bag has one id
    (m = n); `weights`: float64 `[m]` or None.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    def take(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Ids int64 `[k]`, bag lengths int64 `[b]` and weights `[k]` of some samples, in order."""
        if self.offsets is None:
            at, lengths = samples, np.ones(len(samples), dtype=np.int64)
        else:
            starts = self.offsets[samples]
            lengths = self.offsets[samples + 1] - starts
            ends = np.cumsum(lengths)
            at = np.arange(ends[-1] if len(ends) else 0)
            at += np.repeat(starts - (ends - lengths), lengths)
        weights = None if self.weights is None else self.weights[at]
        return self.values[at].astype(np.int64, copy=False), lengths, weights


def gather(
    groups: Sequence[tuple[BagColumn, np.ndarray]], places: Sequence[np.ndarray], samples: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """One feature of a batch whose samples lie in several columns.

    `groups`: columns, each with the samples to take of it; `places`: where those stand in the
    batch, int64, together all of [0, samples). Returns ids, lengths `[samples]` and weights.
    """
    parts = [column.take(wanted) for column, wanted in groups]
    if len(parts) == 1:
        return parts[0]  # one column has all samples, in the order of the batch
    lengths = np.zeros(samples, dtype=np.int64)
    for (_, own, _), where in zip(parts, places, strict=True):
        lengths[where] = own
    starts = np.cumsum(lengths) - lengths
    values = np.empty(int(lengths.sum()), dtype=np.int64)
    weighted = any(weights is not None for _, _, weights in parts)
    all_weights = np.ones(len(values)) if weighted else None
    for (ids, own, weights), where in zip(parts, places, strict=True):
        ends = np.cumsum(own)
        at = np.repeat(starts[where] - (ends - own), own) + np.arange(len(ids))
        values[at] = ids
        if all_weights is not None and weights is not None:
            all_weights[at] = weights
    return values, lengths, all_weights


def join(
    features: Sequence[str],
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    weights_dtype: torch.dtype | None,
) -> JaggedIds:
    """Features side by side: (ids, lengths, weights or None) of each.

    `weights_dtype`: None where ids have no weights; else ids without one have the weight 1.
    """
    lengths = np.concatenate([own for _, own, _ in parts])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    weights = None
    if weights_dtype is not None:
        filled = [np.ones(len(ids)) if own is None else own for ids, _, own in parts]
        weights = torch.from_numpy(np.concatenate(filled)).to(weights_dtype)
    values = torch.from_numpy(np.concatenate([ids for ids, _, _ in parts]))
    return JaggedIds(tuple(features), values, torch.from_numpy(offsets), weights)
