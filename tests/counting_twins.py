"""The slow NumPy twins of the compiled counting loops: same names, arguments and results.

`offer` may put keys in other places of its table, which no result depends on.
"""

from __future__ import annotations

import numpy as np


def count_rows(ids: np.ndarray, counts: np.ndarray) -> int:
    """See `loops.count_rows`."""
    outside = ids.view(np.uint64) >= np.uint64(len(counts))
    good = int(outside.argmax()) if outside.any() else len(ids)
    np.add.at(counts, ids[:good], counts.dtype.type(1))
    return good if good == len(ids) else -1 - good


def take_counts(part: np.ndarray, whole: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> int:
    """See `loops.take_counts`."""
    rows = np.flatnonzero(part)
    found = len(rows)
    ids[:found], counts[:found] = rows, part[rows]
    whole[rows] += part[rows].astype(whole.dtype)
    part[rows] = 0
    return found


def offer(
    ids: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    active: int,
    limit: int,
) -> tuple[int, int]:
    """See `loops.offer`."""
    if len(ids) == 0:
        return 0, active
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    places = _find(distinct, keys)
    new = np.flatnonzero(keys[places] < 0)
    if len(new) > limit - active:
        stop = int(np.sort(first[new])[limit - active])
        return offer(ids[:stop], weights[:stop], keys, values, active, limit)
    _insert(distinct[new], keys)
    added = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(added, inverse.reshape(-1), weights if len(weights) else np.int64(1))
    values[_find(distinct, keys)] += added
    return len(ids), active + len(new)


def mark(ids: np.ndarray, bits: np.ndarray) -> int:
    """See `loops.mark`."""
    distinct = np.unique(ids)
    masks = (1 << (distinct & 7)).astype(np.uint8)
    fresh = (bits[distinct >> 3] & masks) == 0
    np.bitwise_or.at(bits, distinct[fresh] >> 3, masks[fresh])
    return int(fresh.sum())


def observe(ids: np.ndarray, registers: np.ndarray) -> int:
    """See `loops.observe`."""
    bits = len(registers).bit_length() - 1
    width = 64 - 11 - bits
    hashed = _mixed(ids) >> np.uint64(11)
    rest = hashed & np.uint64((1 << width) - 1)
    length = np.frexp(rest.astype(np.float64))[1]  # bits up to the highest one; 0 has none
    ranks = (width - length + 1).astype(np.uint8)
    np.maximum.at(registers, (hashed >> np.uint64(width)).astype(np.int64), ranks)
    return len(ids)


def _mixed(ids: np.ndarray) -> np.ndarray:
    """The hash of `loops`, uint64."""
    key = ids.astype(np.uint64)
    with np.errstate(over="ignore"):
        key = (key ^ (key >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(32))


def _find(ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """For each of distinct `ids` the place of its key, or the free one at which its search ends."""
    mask = len(keys) - 1
    places = (_mixed(ids) & np.uint64(mask)).astype(np.int64)
    moving = np.arange(len(ids))
    while len(moving):
        found = keys[places[moving]]
        moving = moving[(found >= 0) & (found != ids[moving])]
        places[moving] = (places[moving] + 1) & mask
    return places


def _insert(ids: np.ndarray, keys: np.ndarray) -> None:
    """Put distinct `ids`, none of them there, into `keys`."""
    while len(ids):
        places = _find(ids, keys)
        keys[places] = ids  # of those that meet in one place the last wins
        ids = ids[keys[places] != ids]
