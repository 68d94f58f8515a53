"""The planner's loops over ids and rows, as plain Python that Numba compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# -----------------------------------------------------------------------------
# Loops of plain Python as machine code, kept on disk where that can be.

log = logging.getLogger(__name__)

Loops = Mapping[str, tuple[Callable[..., Any], list[Any]]]
"""By name: a loop, and the only types that it is called with."""


def compile_loops(loops: Loops, what: str) -> dict[str, Any]:
    """Each loop compiled by Numba; they may allocate nothing. `what` they are, for the log.

    Raises whatever Numba does where it cannot compile.
    """
    try:
        return {name: _compile(*loop, cache=True) for name, loop in loops.items()}
    except Exception as error:  # no folder can be written, a damaged file, a full disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.info("the machine code of %s is not kept: %s", what, first)
        return {name: _compile(*loop, cache=False) for name, loop in loops.items()}


def _compile(loop: Callable[..., Any], signatures: list[Any], cache: bool) -> Any:
    import numba

    compiler: Any = numba  # which has no type stubs
    return compiler.njit(
        signatures,
        nogil=True,
        cache=cache,
        error_model="numpy",
        no_cfunc_wrapper=True,
        _nrt=False,
    )(loop)


# -----------------------------------------------------------------------------
# The planner's loops over ids and rows, as plain Python that Numba compiles.
#
# Their NumPy twins, of the same names, arguments and results, are in `arrays`; `bodies` chooses.
# Results go to arrays that the caller made; nothing is allocated here. All that a loop needs
# stands
# in this file, for compiled code is kept on disk until this file changes.

NEVER = np.iinfo(np.int32).max
"""Next use of a row that no step in the window uses."""

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _SOME, _TOP = np.uint64(32), np.uint64(29), np.uint64(40)
"""Multipliers and shifts of a 64-bit mix (Steele et al. 2014, SplitMix); `_TOP` leaves 24 bits."""

_OLDEST = 1 << 30
"""Steps beyond which a row's last use is no further back."""


def name_rows(
    local: np.ndarray,
    position: np.ndarray,
    step: int,
    distinct: np.ndarray,
    previous: np.ndarray,
    labels: np.ndarray,
) -> int:
    """Distinct rows in first-occurrence order, by an index over all rows.

    `local` int64 `[n]`; `position` int32: the step that named each row last, -1 for none, written.
    Writes `distinct`, `previous` (the step before) and, for each id, `labels`: its row's rank
    among the distinct ones; int32 `[n]` each. Returns how many are distinct; or, having changed
    nothing in `position`, -1 - i for an id i outside it.
    """
    count, bad = 0, -1
    for i in range(len(local)):
        row = local[i]
        if row < 0 or row >= len(position):
            bad = i
            break
        seen = position[row]
        if seen >= -1:
            distinct[count] = row
            previous[count] = seen
            position[row] = -2 - count  # a label until the end of the loop
            labels[i] = count
            count += 1
        else:
            labels[i] = -2 - seen
    for k in range(count):
        position[distinct[k]] = step if bad < 0 else previous[k]
    return count if bad < 0 else -1 - bad


def find_rows(rows: np.ndarray, table: np.ndarray, distinct: np.ndarray, labels: np.ndarray) -> int:
    """The same by a hash table, whatever the number of rows.

    `rows` int64 `[n]`; `table` int32: all -1, a power of two >= 2 n and >= 2 entries; `distinct`
    int64 `[n]` and `labels` int32 `[n]` are written. Returns how many rows are distinct.
    """
    mask = np.uint64(len(table) - 1)
    one = np.uint64(1)
    count = 0
    for i in range(len(rows)):
        row = rows[i]
        key = np.uint64(row)
        key = (key ^ (key >> _HALF)) * _FIRST
        key = (key ^ (key >> _SOME)) * _SECOND
        bucket = (key ^ (key >> _HALF)) & mask
        label = table[bucket]
        while label >= 0 and distinct[label] != row:
            bucket = (bucket + one) & mask
            label = table[bucket]
        if label < 0:
            label = count
            table[bucket] = label
            distinct[label] = row
            count += 1
        labels[i] = label
    return count


def group(keys: np.ndarray, low: int, order: np.ndarray, starts: np.ndarray) -> int:
    """Stable counting sort: `order[starts[g]:starts[g + 1]]` are the indices whose key is low + g.

    `keys` int32 `[n]`, those below `low` counting as `low`; `order` int32 `[n]` and `starts` int32
    `[G + 1]` are written. Returns G, or -1 - i for a key i of low + G or more.
    """
    groups = len(starts) - 1
    for g in range(groups + 1):
        starts[g] = 0
    for i in range(len(keys)):
        g = max(keys[i] - low, 0)
        if g >= groups:
            return -1 - i
        starts[g] += 1
    total = 0
    for g in range(groups):
        total += starts[g]
        starts[g] = total
    starts[groups] = total
    for back in range(len(keys)):  # from the last to the first: ends become starts
        i = len(keys) - 1 - back
        g = max(keys[i] - low, 0)
        starts[g] -= 1
        order[starts[g]] = i
    return groups


def want(
    rows: np.ndarray, slot_of: np.ndarray, next_use: np.ndarray, step: int, slots: np.ndarray
) -> int:
    """Those of `rows` (local, int32) that are cached are next used by `step`.

    Writes `next_use` and, in order, their `slots` (int32 `[len(rows)]`); returns how many.
    """
    count = 0
    for i in range(len(rows)):
        slot = slot_of[rows[i]]
        if slot >= 0:
            next_use[slot] = step
            slots[count] = slot
            count += 1
    return count


def look_up(
    local: np.ndarray,
    slot_of: np.ndarray,
    last_use: np.ndarray,
    next_use: np.ndarray,
    step: int,
    slots: np.ndarray,
    fetch: np.ndarray,
) -> int:
    """Hold the slots of those rows of `step` that are cached.

    `local` int32 `[U]`; writes each row's slot (-1: not cached) to `slots`, the indices of those
    not cached to `fetch` (int32 `[U]` each), and returns their number.
    """
    misses = 0
    for k in range(len(local)):
        slot = slot_of[local[k]]
        slots[k] = slot
        if slot >= 0:
            last_use[slot] = step
            next_use[slot] = NEVER
        else:
            fetch[misses] = k
            misses += 1
    return misses


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
    """Give the slots `filled` to the rows `local[fetch]`, all int32; `slots[fetch]` is written.

    Writes which slots held a row that leaves, and that row (int32 `[len(fetch)]` each); returns
    how many do.
    """
    leaving = 0
    for i in range(len(fetch)):
        slot, row = filled[i], local[fetch[i]]
        old = row_of[slot]
        if old >= 0:
            slot_of[old] = -1
            evict_slots[leaving] = slot
            evict_rows[leaving] = old
            leaving += 1
        slot_of[row] = slot
        row_of[slot] = row
        slots[fetch[i]] = slot
    return leaving


def idle(slots: np.ndarray, next_use: np.ndarray, out: np.ndarray) -> int:
    """Those of `slots` that no step in the window uses, to `out` (int32); returns how many."""
    count = 0
    for i in range(len(slots)):
        if next_use[slots[i]] == NEVER:
            out[count] = slots[i]
            count += 1
    return count


def live(
    slots: np.ndarray,
    steps: np.ndarray,
    last_use: np.ndarray,
    next_use: np.ndarray,
    before: int,
    out: np.ndarray,
) -> tuple[int, int]:
    """The first `len(out)` of `slots` that were last used by their step of `steps`, and are not
    wanted; up to the first whose step is not below `before`.

    Writes them to `out` (int32); returns how many there are, and how many of `slots` were read.
    """
    count = read = 0
    while read < len(slots) and count < len(out) and steps[read] < before:
        slot = slots[read]
        if last_use[slot] == steps[read] and next_use[slot] == NEVER:
            out[count] = slot
            count += 1
        read += 1
    return count, read


def count_uses(
    rows: np.ndarray,
    previous: np.ndarray,
    step: int,
    rate: int,
    values: np.ndarray,
    factors: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Count one use by `step` of each of `rows` (int32, distinct), last used by `previous`.

    `counts` uint8: each row's level, `values` int64 `[256]`: what a level stands for, in 1 / 256
    uses, ascending from 0. Counts lose `rate` / 2^32 octaves a step; `factors` int64 `[257]`:
    2^28 * 2^(-i / 256). The sum lies between two levels, and a hash of (row, step) chooses one of
    them so that the expected value is the sum (Morris 1978).
    """
    for i in range(len(rows)):
        row = rows[i]
        age = np.int64(min(step - previous[i], _OLDEST)) * rate
        place, rest = (age >> 24) & 255, age & 0xFFFFFF
        factor = factors[place] - (((factors[place] - factors[place + 1]) * rest) >> 24)
        value = (((values[counts[row]] * factor) >> 28) >> min(age >> 32, 62)) + 256
        low = np.int64(counts[row])  # to the highest level whose value is not above: a few away
        while low < 255 and values[low + 1] <= value:
            low += 1
        while values[low] > value:
            low -= 1
        if low < 255:
            key = (np.uint64(row) << _HALF) ^ np.uint64(step)
            key = (key ^ (key >> _HALF)) * _FIRST
            key = (key ^ (key >> _SOME)) * _SECOND
            chance = np.int64((key ^ (key >> _HALF)) >> _TOP)
            if (value - values[low]) << 24 > chance * (values[low + 1] - values[low]):
                low += 1
        counts[row] = low


def order_ids(
    labels: np.ndarray,
    lookup: np.ndarray,
    positions: np.ndarray,
    starts: np.ndarray,
    order: np.ndarray,
    touched: np.ndarray,
    segments: np.ndarray,
) -> int:
    """Canonical indices of the ids, and the ids sorted by them, stably.

    `labels` int32 `[n]`: canonical indices, or indices into `lookup` (int32) unless that is empty.
    Writes int64 `positions` and `order` `[n]`; `starts` int32 `[U + 2]`: ids before each canonical
    index (the last is scratch); int64 `touched` `[U]` and `segments` `[U + 1]`: the indices that
    occur, and where each starts in `order`. Returns how many occur, or -1 - i for an id i whose
    index is none of the U.
    """
    total = len(starts) - 2
    for k in range(len(starts)):
        starts[k] = 0
    for i in range(len(labels)):
        position = lookup[labels[i]] if len(lookup) else labels[i]
        if position < 0 or position >= total:
            return -1 - i
        positions[i] = position
        starts[position + 2] += 1
    count = 0
    for k in range(total):
        here = starts[k + 2]
        starts[k + 2] += starts[k + 1]
        if here:
            touched[count] = k
            segments[count] = starts[k + 1]
            count += 1
    segments[count] = len(labels)
    for i in range(len(labels)):
        k = positions[i] + 1
        order[starts[k]] = i
        starts[k] += 1
    return count


# -----------------------------------------------------------------------------
# The loops of sharded and mixed placements, as plain Python that Numba compiles; see `loops`.
#
# Their NumPy twins are in `arrays`. All that a loop needs stands in this file.


def find_sorted(
    rows: np.ndarray, known: np.ndarray, starts: np.ndarray, shift: int, found: np.ndarray
) -> int:
    """Where each of `rows` (int64 `[n]`) is in `known` (int64, ascending), to `found` (int32
    `[n]`), -1 where it is not; returns how many are there.

    `starts` int32 `[B + 1]`: how many of `known` are below b << `shift`, for b = 0 to B.
    """
    count = 0
    for i in range(len(rows)):
        row, place = rows[i], -1
        bucket = row >> shift
        if bucket >= 0 and bucket < len(starts) - 1:
            low, high = np.int64(starts[bucket]), np.int64(starts[bucket + 1])
            if low < high:
                guess = low + row - known[low]  # the right one in a run of neighbours
                if guess >= low and guess < high and known[guess] == row:
                    place = guess
                else:
                    while low < high:
                        middle = (low + high) >> 1
                        if known[middle] < row:
                            low = middle + 1
                        else:
                            high = middle
                    if low < starts[bucket + 1] and known[low] == row:
                        place = low
        found[i] = place
        if place >= 0:
            count += 1
    return count


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
    """Those of n items whose value is above `bound`, and the others, in order.

    Item i is `items[index[i]]` with `values[index[i]]` (int32), or, with no `items`, i itself with
    `values[i]`, and `index` is not read. They come in pieces, of which p ends before `ends[p]`
    (int64). Writes `above` and `others` (int64 `[n]`), and to `counts` (int64) how many of each
    piece are above; returns how many of all are.
    """
    given = len(items) > 0
    high = low = i = 0
    for piece in range(len(ends)):
        before = high
        while i < ends[piece]:
            place = np.int64(index[i]) if given else i
            item = np.int64(items[place]) if given else i
            if values[place] > bound:
                above[high] = item
                high += 1
            else:
                others[low] = item
                low += 1
            i += 1
        counts[piece] = high - before
    return high
