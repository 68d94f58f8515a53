"""The loops that count lookups, compiled by Numba as those of the planner are.

Nothing is allocated here. All that a loop needs stands in this file, for its machine code is kept
on disk until this file changes. Their slow NumPy twins are the tests' (`tests/counting_twins.py`).
"""

from __future__ import annotations

import numpy as np

from distcache.planner.loops import array, compiled, i8, in8, out1, out8, types

_out4 = array(types.uint32, True)

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _SOME = np.uint64(32), np.uint64(29)
"""The multipliers and shifts of a 64-bit mix (Steele et al. 2014, SplitMix)."""

_DROPPED = np.uint64(11)
"""Lowest bits of a hash that `observe` leaves out: what remains is exact in float64 too."""


@compiled(i8(in8, _out4), i8(in8, out8))
def count_rows(ids: np.ndarray, counts: np.ndarray) -> int:
    """Add one to `counts` (uint32 or int64 `[V]`) for each of `ids` (int64 `[n]`).

    Returns n; or, having counted those before it, -1 - i for the first id i outside the table.
    """
    rows = np.uint64(len(counts))
    for i in range(len(ids)):
        row = np.uint64(ids[i])  # a negative id lies beyond every table too
        if row >= rows:
            return -1 - i
        counts[row] += 1
    return len(ids)


@compiled(i8(_out4, _out4, out8, out8), i8(_out4, out8, out8, out8), i8(out8, out8, out8, out8))
def take_counts(part: np.ndarray, whole: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> int:
    """Move the counts of `part` to `whole` (uint32 or int64 `[V]` each).

    Writes the ids that `part` had counted, ascending, and their `counts`, int64 of enough entries
    each; returns how many.
    """
    found = 0
    for row in range(len(part)):
        count = part[row]
        if count:
            ids[found] = row
            counts[found] = count
            found += 1
            whole[row] += count
            part[row] = 0
    return found


@compiled(types.UniTuple(i8, 2)(in8, in8, out8, out8, i8, i8))
def offer(
    ids: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    active: int,
    limit: int,
) -> tuple[int, int]:
    """Add ids (int64 `[n]`, not negative) with their weights to a hash table of counters.

    `weights` int64 `[n]`, or empty: 1 each. `keys` int64, a power of two of them, -1 where free,
    and `values` int64, 0 there, are written; `active` keys are in use, at most `limit`. Stops
    before an id that would need one more. Returns how many ids were added, and the keys in use.
    """
    mask = np.uint64(len(keys) - 1)
    one = np.uint64(1)
    for i in range(len(ids)):
        key = np.uint64(ids[i])
        key = (key ^ (key >> _HALF)) * _FIRST
        key = (key ^ (key >> _SOME)) * _SECOND
        bucket = (key ^ (key >> _HALF)) & mask
        while keys[bucket] >= 0 and keys[bucket] != ids[i]:
            bucket = (bucket + one) & mask
        if keys[bucket] < 0:
            if active >= limit:
                return i, active
            keys[bucket] = ids[i]
            active += 1
        values[bucket] += weights[i] if len(weights) else 1
    return len(ids), active


@compiled(i8(in8, out1))
def mark(ids: np.ndarray, bits: np.ndarray) -> int:
    """Set the bit of each of `ids` (int64, within `bits`, uint8); returns how many were not set."""
    fresh = 0
    for i in range(len(ids)):
        place, bit = ids[i] >> 3, 1 << (ids[i] & 7)
        old = bits[place]
        if not old & bit:
            bits[place] = old | bit
            fresh += 1
    return fresh


@compiled(i8(in8, out1))
def observe(ids: np.ndarray, registers: np.ndarray) -> int:
    """Show `ids` (int64 `[n]`) to the `registers` of a HyperLogLog, uint8, a power of two of them.

    A hash's first bits name its register, which keeps the largest 1 + leading zeros of the rest.
    """
    bits = 0
    while 1 << bits < len(registers):
        bits += 1
    width = 64 - 11 - bits
    rest_mask = np.uint64((1 << width) - 1)
    for i in range(len(ids)):
        key = np.uint64(ids[i])
        key = (key ^ (key >> _HALF)) * _FIRST
        key = (key ^ (key >> _SOME)) * _SECOND
        key = (key ^ (key >> _HALF)) >> _DROPPED
        rest = key & rest_mask
        rank = 1
        probe = np.uint64(1) << np.uint64(width - 1)
        while probe and not rest & probe:
            probe = probe >> np.uint64(1)
            rank += 1
        register = key >> np.uint64(width)
        if rank > registers[register]:
            registers[register] = rank
    return len(ids)
