"""The planner's loops over ids and rows, compiled by Numba, and the calls that make their results.

Results go to arrays that the caller made; a loop allocates nothing. All that a loop needs stands in
this file, for its machine code is kept on disk until this file changes: beside it, or in the user's
cache folder, or where $NUMBA_CACHE_DIR says. Compiling takes about a second, once per installation,
when this file is imported and never while one plans; from then on the code is loaded in
milliseconds. Where nothing can be kept, each process compiles for itself. The slow NumPy twins are
the tests' (`tests/planner_twins.py`): same names, arguments and results.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numba
import numpy as np

from distcache.errors import PlanError

log = logging.getLogger(__name__)

_compiler: Any = numba  # which has no type stubs
types = _compiler.types
Loop = TypeVar("Loop", bound=Callable[..., Any])

_SETTING = "DISTCACHE_PLANNER"
if os.environ.get(_SETTING):
    log.warning(
        "$%s=%s is not read any more: the planner's loops are always compiled by Numba, and plans "
        "are the same; take it out of the environment",
        _SETTING,
        os.environ[_SETTING],
    )


def compiled(*signatures: Any) -> Callable[[Loop], Loop]:
    """Compile a loop for the only types that it is called with; it may allocate nothing."""

    def compile_loop(loop: Loop) -> Loop:
        options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
        try:
            return _compiler.njit(list(signatures), cache=True, **options)(loop)
        except Exception as error:  # no folder can be written, a damaged file, a full disk
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.info("the machine code of %s is not kept: %s", loop.__name__, first)
            return _compiler.njit(list(signatures), cache=False, **options)(loop)

    return compile_loop


def array(dtype: Any, written: bool, dimensions: int = 1) -> Any:
    """The type of a contiguous array, which the loop may write or only reads."""
    return types.Array(dtype, dimensions, "C", readonly=not written)


i4, i8 = types.int32, types.int64
in4, in8, out4, out8 = array(i4, False), array(i8, False), array(i4, True), array(i8, True)
out1 = array(types.uint8, True)

NEVER = np.iinfo(np.int32).max
"""Next use of a row that no step in the window uses."""

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _SOME, _TOP = np.uint64(32), np.uint64(29), np.uint64(40)
"""Multipliers and shifts of a 64-bit mix (Steele et al. 2014, SplitMix); `_TOP` leaves 24 bits."""

_OLDEST = 1 << 30
"""Steps beyond which a row's last use is no further back."""


@compiled(i8(in8, out4, i8, out4, out4, out4))
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


@compiled(i8(in8, out4, out8, out4))
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


@compiled(i8(in4, i8, out4, out4))
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


@compiled(i8(in4, in4, out4, i8, out4))
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


@compiled(i8(in4, in4, out4, out4, i8, out4, out4))
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


@compiled(i8(in4, in4, in4, out4, out4, out4, out4, out4))
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


@compiled(i8(in4, in4, out4))
def idle(slots: np.ndarray, next_use: np.ndarray, out: np.ndarray) -> int:
    """Those of `slots` that no step in the window uses, to `out` (int32); returns how many."""
    count = 0
    for i in range(len(slots)):
        if next_use[slots[i]] == NEVER:
            out[count] = slots[i]
            count += 1
    return count


@compiled(types.UniTuple(i8, 2)(in4, in4, in4, in4, i8, out4))
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


@compiled(types.void(in4, in4, i8, i8, in8, in8, out1))
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


@compiled(i8(in4, in4, out8, out4, out8, out8, out8))
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


@compiled(i8(in8, in8, in4, i8, out4))
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


@compiled(i8(in4, i8, in4, in4, in8, out8, out8, out8))
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


# -----------------------------------------------------------------------------
# The loops as the planner calls them: results made, cut to length, and what is wrong raised.


def distinct_rows(
    local: np.ndarray, position: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(distinct [U], previous [U], labels [n])`, int32, of local rows (int64 `[n]`).

    `position` int32: the step that named each row last, -1 for none; it becomes `step` for these.
    Raises PlanError for a row outside it, and leaves it as it was.
    """
    local = np.ascontiguousarray(local, dtype=np.int64)
    distinct, previous, labels = (np.empty(len(local), np.int32) for _ in range(3))
    count = name_rows(local, position, step, distinct, previous, labels)
    if count < 0:
        raise PlanError(
            f"step {step}: id {-1 - count} is row {local[-1 - count]} of a home that has "
            f"{len(position)}: ids must lie within their tables"
        )
    return distinct[:count].copy(), previous[:count].copy(), labels


def hashed_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(distinct rows int64 [U], labels int32 [n])` of rows int64 `[n]`, whatever their range."""
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    table = np.full(1 << max(1, (2 * len(rows) - 1).bit_length()), -1, np.int32)
    distinct, labels = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    count = find_rows(rows, table, distinct, labels)
    return distinct[:count].copy(), labels


def grouped(keys: np.ndarray, low: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`(order [n], starts [groups + 1])`, int32: a stable sort of integer keys by value - low.

    Keys below `low` count as `low`. Raises PlanError for one of `low + groups` or more.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int32)
    order, starts = np.empty(len(keys), np.int32), np.empty(max(groups, 0) + 1, np.int32)
    bad = group(keys, low, order, starts)
    if bad < 0:
        raise PlanError(f"{keys[-1 - bad]} is not below {low + groups}: steps come in order")
    return order, starts


def divided(
    values: np.ndarray,
    bound: int,
    lengths: Sequence[int],
    items: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """`(above, others, counts)`: which items have a value above `bound`, and which have not; int64.

    The items, in pieces of `lengths`, are 0, 1, ... of these `values` (int32 `[n]`), or, with
    `items` = (index int32 `[n]`, of int32 `[U]`), `of[index]` of `values[index]`. `counts`: those
    above in each piece.
    """
    none = np.empty(0, np.int32)
    index, of = (none, none) if items is None or not len(items[1]) else items
    index, of = (np.ascontiguousarray(part, dtype=np.int32) for part in (index, of))
    ends = np.cumsum(lengths, dtype=np.int64)
    count = int(ends[-1]) if len(ends) else 0
    above, others = np.empty(count, np.int64), np.empty(count, np.int64)
    counts = np.empty(len(ends), np.int64)
    values = np.ascontiguousarray(values, dtype=np.int32)
    high = divide(values, bound, index, of, ends, above, others, counts)
    return above[:high].copy(), others[: count - high].copy(), counts.tolist()


@dataclass(frozen=True)
class Occurrences:
    """Where the ids of a batch occur; see the fields of `StepPlan`. int64, but for `starts` int32
    `[U + 1]`: how many ids have a smaller canonical index."""

    positions: np.ndarray
    order: np.ndarray
    touched: np.ndarray
    segments: np.ndarray
    starts: np.ndarray


def occurrences(labels: np.ndarray, lookup: np.ndarray | None, total: int) -> Occurrences:
    """Canonical indices of the ids, below `total`, and the ids sorted by them.

    `labels` int32 `[n]`: those indices, or indices into `lookup`, which holds them. Raises
    PlanError for one outside.
    """
    count = len(labels)
    labels = np.ascontiguousarray(labels, dtype=np.int32)
    if lookup is None:
        lookup = np.empty(0, np.int32)
    lookup = np.ascontiguousarray(lookup, dtype=np.int32)
    positions, order = np.empty(count, np.int64), np.empty(count, np.int64)
    touched, segments = np.empty(total, np.int64), np.empty(total + 1, np.int64)
    starts = np.empty(total + 2, np.int32)
    found = order_ids(labels, lookup, positions, starts, order, touched, segments)
    if found < 0:
        raise PlanError(f"id {-1 - found} names none of the {total} rows of its step")
    touched, segments = touched[:found].copy(), segments[: found + 1].copy()
    return Occurrences(positions, order, touched, segments, starts[: total + 1])
