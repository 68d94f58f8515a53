"""Distinct rows of a batch in first-occurrence order, without sorting.

Write `arange(n)` to `position[row]` so that the first occurrence wins, read it back: an id that
reads its own index represents its row. `by_index` uses an array over all rows of a home, `by_hash`
a table that grows with the batch. `by_unique` is the slow twin that tests compare with. Compiled,
both are loops: `loops.name_rows` and `loops.find_rows`.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIER = np.uint64(0xD1342543DE82EF95)


def by_unique(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reference body: `(distinct rows [U], inverse [n])` by sorting."""
    values, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return values[order], rank[inverse.reshape(-1)]


def by_index(rows: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions by a scratch array `position` int32 `[>= max(rows) + 1]`, which it overwrites.

    Returns `(first [U], inverse [n])`: indices of first occurrences, ascending, and for each id
    the rank of its row among them. NumPy keeps the last of repeated assignments, so the batch is
    written back to front.
    """
    indices = np.arange(len(rows), dtype=np.int32)
    position[rows[::-1]] = indices[::-1]
    representative = position[rows]
    is_first = representative == indices
    rank = np.cumsum(is_first, dtype=np.int32)
    rank -= 1
    return np.flatnonzero(is_first), rank[representative]


def by_hash(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by a hash table of about 4 n entries, whatever the number of rows.

    Returns `(first [U], inverse [n])`. In each round the ids that are still open write their index
    to their bucket; those that find their own row there are done, the others (another row won the
    bucket) try another bucket in the next round.
    """
    count = len(rows)
    if count == 0:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    bits = max(4, int(4 * count - 1).bit_length())
    shift = np.uint64(64 - bits)
    table = np.empty(1 << bits, dtype=np.int32)
    representative = np.empty(count, dtype=np.int32)
    open_ids = np.arange(count, dtype=np.int32)
    multiplier = _MULTIPLIER
    while len(open_ids):
        keys = rows[open_ids]
        with np.errstate(over="ignore"):
            buckets = ((keys.astype(np.uint64) + np.uint64(1)) * multiplier) >> shift
            multiplier = multiplier * np.uint64(0x2545F4914F6CDD1D) | np.uint64(1)
        buckets = buckets.astype(np.int64)
        table[buckets[::-1]] = open_ids[::-1]
        winner = table[buckets]
        done = rows[winner] == keys
        representative[open_ids[done]] = winner[done]
        open_ids = open_ids[~done]
    is_first = representative == np.arange(count, dtype=np.int32)
    rank = np.cumsum(is_first, dtype=np.int32)
    rank -= 1
    return np.flatnonzero(is_first), rank[representative]
