"""The NumPy twins of `loops` and `region_loops`: same names, arguments and results, bit for bit.

They run where Numba does not, and tests compare the two. `table` is of no use here.
"""

from __future__ import annotations

import numpy as np

from distcache.planner.distinct import by_hash, by_index
from distcache.planner.loops import _FIRST, _HALF, _OLDEST, _SECOND, _SOME, _TOP, NEVER

_DIGIT = 16
"""Bits that NumPy's stable sort takes by radix."""


def name_rows(
    local: np.ndarray,
    position: np.ndarray,
    step: int,
    distinct: np.ndarray,
    previous: np.ndarray,
    labels: np.ndarray,
) -> int:
    """See `loops.name_rows`."""
    outside = (local < 0) | (local >= len(position))
    if outside.any():
        return -1 - int(outside.argmax())
    before = position[local]
    first, labels[:] = by_index(local, position)
    count = len(first)
    distinct[:count] = local[first]
    previous[:count] = before[first]
    position[distinct[:count]] = step
    return count


def find_rows(rows: np.ndarray, table: np.ndarray, distinct: np.ndarray, labels: np.ndarray) -> int:
    """See `loops.find_rows`."""
    first, labels[:] = by_hash(rows)
    distinct[: len(first)] = rows[first]
    return len(first)


def group(keys: np.ndarray, low: int, order: np.ndarray, starts: np.ndarray) -> int:
    """See `loops.group`."""
    groups = len(starts) - 1
    of = np.maximum(keys.astype(np.int64) - low, 0)
    if (of >= groups).any():
        return -1 - int((of >= groups).argmax())
    order[:] = _stable_order(of, groups)
    starts[0] = 0
    np.cumsum(np.bincount(of, minlength=groups), out=starts[1:])
    return groups


def want(
    rows: np.ndarray, slot_of: np.ndarray, next_use: np.ndarray, step: int, slots: np.ndarray
) -> int:
    """See `loops.want`."""
    found = slot_of[rows]
    found = found[found >= 0]
    next_use[found] = step
    slots[: len(found)] = found
    return len(found)


def look_up(
    local: np.ndarray,
    slot_of: np.ndarray,
    last_use: np.ndarray,
    next_use: np.ndarray,
    step: int,
    slots: np.ndarray,
    fetch: np.ndarray,
) -> int:
    """See `loops.look_up`."""
    slots[:] = slot_of[local]
    cached = slots >= 0
    held = slots[cached]
    last_use[held] = step
    next_use[held] = NEVER
    missed = np.flatnonzero(~cached)
    fetch[: len(missed)] = missed
    return len(missed)


def fill(
    local: np.ndarray,
    fetch: np.ndarray,
    filled: np.ndarray,
    slot_of: np.ndarray,
    row_of: np.ndarray,
    slots: np.ndarray,
    evict_slots: np.ndarray,
    evict_rows: np.ndarray,
) -> int:
    """See `loops.fill`."""
    old, arriving = row_of[filled], local[fetch]
    leaves = old >= 0
    count = int(leaves.sum())
    evict_slots[:count] = filled[leaves]
    evict_rows[:count] = old[leaves]
    slot_of[old[leaves]] = -1
    slot_of[arriving] = filled
    row_of[filled] = arriving
    slots[fetch] = filled
    return count


def idle(slots: np.ndarray, next_use: np.ndarray, out: np.ndarray) -> int:
    """See `loops.idle`."""
    found = slots[next_use[slots] == NEVER]
    out[: len(found)] = found
    return len(found)


def live(
    slots: np.ndarray,
    steps: np.ndarray,
    last_use: np.ndarray,
    next_use: np.ndarray,
    before: int,
    out: np.ndarray,
) -> tuple[int, int]:
    """See `loops.live`."""
    held = steps >= before
    end = int(held.argmax()) if held.any() else len(slots)
    slots, steps = slots[:end], steps[:end]
    found = np.flatnonzero((last_use[slots] == steps) & (next_use[slots] == NEVER))
    count = min(len(found), len(out))
    out[:count] = slots[found[:count]]
    if len(out) == 0:
        return 0, 0
    return count, int(found[count - 1]) + 1 if count == len(out) else end


def count_uses(
    rows: np.ndarray,
    previous: np.ndarray,
    step: int,
    rate: int,
    values: np.ndarray,
    factors: np.ndarray,
    counts: np.ndarray,
) -> None:
    """See `loops.count_uses`."""
    age = np.minimum(step - previous.astype(np.int64), _OLDEST) * rate
    place, rest = (age >> 24) & 255, age & 0xFFFFFF
    factor = factors[place] - (((factors[place] - factors[place + 1]) * rest) >> 24)
    value = (((values[counts[rows]] * factor) >> 28) >> np.minimum(age >> 32, 62)) + 256
    low = np.searchsorted(values, value, side="right") - 1
    key = (rows.astype(np.uint64) << _HALF) ^ np.uint64(step)
    key = (key ^ (key >> _HALF)) * _FIRST
    key = (key ^ (key >> _SOME)) * _SECOND
    chance = ((key ^ (key >> _HALF)) >> _TOP).astype(np.int64)
    next_up = np.minimum(low + 1, 255)
    gap = values[next_up] - values[low]
    up = (low < 255) & ((value - values[low]) << 24 > chance * gap)
    counts[rows] = np.where(up, next_up, low)


def order_ids(
    labels: np.ndarray,
    lookup: np.ndarray,
    positions: np.ndarray,
    starts: np.ndarray,
    order: np.ndarray,
    touched: np.ndarray,
    segments: np.ndarray,
) -> int:
    """See `loops.order_ids`."""
    total = len(starts) - 2
    positions[:] = lookup[labels] if len(lookup) else labels
    outside = (positions < 0) | (positions >= total)
    if outside.any():
        return -1 - int(outside.argmax())
    order[:] = _stable_order(positions, total)
    occurrences = np.bincount(positions, minlength=total)
    starts[0] = 0
    np.cumsum(occurrences, out=starts[1 : total + 1])
    starts[total + 1] = starts[total]
    found = np.flatnonzero(occurrences)
    touched[: len(found)] = found
    segments[: len(found)] = starts[found]
    segments[len(found)] = len(labels)
    return len(found)


def find_sorted(
    rows: np.ndarray, known: np.ndarray, starts: np.ndarray, shift: int, found: np.ndarray
) -> int:
    """See `region_loops.find_sorted`."""
    if len(known) == 0:
        found[:] = -1
        return 0
    place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    there = known[place] == rows
    found[:] = np.where(there, place, -1)
    return int(there.sum())


def divide(
    values: np.ndarray,
    bound: int,
    index: np.ndarray,
    items: np.ndarray,
    ends: np.ndarray,
    above: np.ndarray,
    others: np.ndarray,
    counts: np.ndarray,
) -> int:
    """See `region_loops.divide`."""
    chosen = (values[index] if len(items) else values) > bound
    all_items = items[index] if len(items) else np.arange(len(chosen))
    count = int(chosen.sum())
    above[:count] = all_items[chosen]
    others[: len(chosen) - count] = all_items[~chosen]
    totals = np.concatenate(([0], np.cumsum(chosen)))
    counts[:] = np.diff(totals[np.concatenate(([0], ends))])
    return count


def _stable_order(keys: np.ndarray, limit: int) -> np.ndarray:
    """A stable argsort of `keys` (int64, in [0, limit)), 16 bits at a time."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = _DIGIT
    while limit > 1 << shift:
        digit = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += _DIGIT
    return order
