"""The NumPy twins of `loops`: same names, arguments and results, bit for bit.

They run where Numba does not, and tests compare the two. `table` is of no use here.
"""

from __future__ import annotations

import numpy as np

from distcache.planner.distinct import by_hash, by_index
from distcache.planner.loops import NEVER

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


def live(
    slots: np.ndarray, last_use: np.ndarray, next_use: np.ndarray, used_at: int, out: np.ndarray
) -> tuple[int, int]:
    """See `loops.live`."""
    found = np.flatnonzero((last_use[slots] == used_at) & (next_use[slots] == NEVER))
    count = min(len(found), len(out))
    out[:count] = slots[found[:count]]
    if len(out) == 0:
        return 0, 0
    return count, int(found[count - 1]) + 1 if count == len(out) else len(slots)


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


def _stable_order(keys: np.ndarray, limit: int) -> np.ndarray:
    """A stable argsort of `keys` (int64, in [0, limit)), 16 bits at a time."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = _DIGIT
    while limit > 1 << shift:
        digit = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += _DIGIT
    return order
