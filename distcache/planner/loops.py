"""The planner's loops over ids and rows, compiled by Numba.

Results go to arrays that the caller made; a loop allocates nothing. All that a loop needs stands in
this file, for its machine code is kept on disk until this file changes: beside it, or in the user's
cache folder, or where $NUMBA_CACHE_DIR says. Compiling takes about a second, once per installation,
when this file is imported and never while one plans; from then on the code is loaded in
milliseconds. Where nothing can be kept, each process compiles for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

log = logging.getLogger(__name__)

_compiler: Any = numba  # which has no type stubs
types = _compiler.types
Loop = TypeVar("Loop", bound=Callable[..., Any])


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
in1, out1 = array(types.uint8, False), array(types.uint8, True)
in44, out44 = array(i4, False, 2), array(i4, True, 2)

PINNED = 255
"""Popularity class of a row that leaves only where no other can."""

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


# -----------------------------------------------------------------------------
# Slots and their lists, first in, first out. A slot is in one list at most.
#
# `table` int32 `[slots + 1 + 2 n, 4]`, n a power of two: what comes after each slot in its list and
# what before, the step that used it last, and the step in the window that uses it next. A list has
# a node beyond the slots, which follows its last slot and precedes its first: one for all pinned
# rows; then one for each step in the window (at step & n - 1), whose list has the slots that it is
# the next to use; then one for each key (at key & n - 1), with the slots that no step in the window
# uses.

AFTER, BEFORE, LAST, NEXT = range(4)
"""Columns of `table`."""


@compiled(types.void(out44, i8))
def unlink(table: np.ndarray, slot: int) -> None:
    """Take a slot out of its list."""
    after, before = table[slot, AFTER], table[slot, BEFORE]
    table[before, AFTER], table[after, BEFORE] = after, before


@compiled(types.void(out44, i8, i8))
def append(table: np.ndarray, node: int, slot: int) -> None:
    """Put a slot, which is in no list, at the end of the list of `node`."""
    last = table[node, BEFORE]
    table[slot, AFTER], table[slot, BEFORE] = node, last
    table[last, AFTER], table[node, BEFORE] = slot, slot


@compiled(types.void(out44, i8, i8))
def hold(table: np.ndarray, slot: int, step: int) -> None:
    """Let `step` use a slot, which leaves its list.

    But for the list of those that the window said that it uses: that one goes as a whole.
    """
    if table[slot, NEXT] != step:
        unlink(table, slot)
    table[slot, LAST], table[slot, NEXT] = step, NEVER  # held: not a victim of its own step


@compiled(i8(in4, in4, i8, out44, out4, out4))
def look_up(
    local: np.ndarray,
    slot_of: np.ndarray,
    step: int,
    table: np.ndarray,
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
            hold(table, slot, step)
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
            evict_slots[leaving], evict_rows[leaving] = slot, old
            leaving += 1
        slot_of[row], row_of[slot], slots[fetch[i]] = slot, row, slot
    return leaving


@compiled(types.void(i8, i8, i8, in4, in1, i8, out44))
def tell(
    row: int,
    step: int,
    filed: int,
    slot_of: np.ndarray,
    classes: np.ndarray,
    lists: int,
    table: np.ndarray,
) -> None:
    """Tell a row, if it is cached, that `step` in the window uses it next.

    `filed`: whether its slot is in a list; `lists`: n. Pinned rows (`classes`, or none) are not
    told.
    """
    slot = slot_of[row]
    if slot >= 0 and not (len(classes) and classes[row] == PINNED):
        if filed:
            unlink(table, slot)
        table[slot, NEXT] = step
        append(table, len(table) - 2 * lists + (step & (lists - 1)), slot)


@compiled(i8(in4, in4, i8, i8, in4, in1, i8, out44, out4, out4))
def refer(
    rows: np.ndarray,
    previous: np.ndarray,
    planned: int,
    step: int,
    slot_of: np.ndarray,
    classes: np.ndarray,
    lists: int,
    table: np.ndarray,
    later: np.ndarray,
    ends: np.ndarray,
) -> int:
    """Tell those of `rows` (int32 `[U]`) that `previous` named by step `planned` or before that
    `step` uses them next.

    The others, in the order of the steps that named them, go to `later` (int32 `[U]`); those of
    step `planned` + 1 + g end at `ends[g]` (int32 `[step - planned - 1]`, zeros). Returns -1; or,
    having done nothing, a step in `previous` that does not come before `step`.
    """
    for i in range(len(previous)):
        if previous[i] >= step:
            return previous[i]
    for i in range(len(rows)):
        if previous[i] > planned:
            ends[previous[i] - planned - 1] += 1
        else:
            tell(rows[i], step, True, slot_of, classes, lists, table)
    before = 0
    for g in range(len(ends)):
        count, ends[g] = ends[g], before
        before += count
    for i in range(len(rows)):
        if previous[i] > planned:
            g = previous[i] - planned - 1
            later[ends[g]] = rows[i]
            ends[g] += 1
    return -1


@compiled(types.void(in4, in4, in4, in4, in1, i8, out44))
def tell_parts(
    rows: np.ndarray,
    steps: np.ndarray,
    ends: np.ndarray,
    slot_of: np.ndarray,
    classes: np.ndarray,
    lists: int,
    table: np.ndarray,
) -> None:
    """Tell `rows`, whose slots are in no list, of the steps that use them next.

    Those up to `ends[0]` of `steps[0]`, from there up to `ends[1]` of `steps[1]`, ...; all int32.
    """
    i = 0
    for part in range(len(steps)):
        while i < ends[part]:
            tell(rows[i], steps[part], False, slot_of, classes, lists, table)
            i += 1


@compiled(types.void(in4, in1, in4, out44))
def file_slots(slots: np.ndarray, levels: np.ndarray, nodes: np.ndarray, table: np.ndarray) -> None:
    """Put those of `slots` that no step in the window uses into the lists `nodes[levels]`, or
    `nodes[0]` where there are no `levels` (uint8, of each)."""
    for i in range(len(slots)):
        if table[slots[i], NEXT] == NEVER:
            append(table, nodes[levels[i] if len(levels) else 0], slots[i])


@compiled(types.UniTuple(i8, 2)(i8, i8, in4, i8, out44, out4))
def leave(
    step: int, before: int, nodes: np.ndarray, ordered: int, table: np.ndarray, out: np.ndarray
) -> tuple[int, int]:
    """At most `len(out)` slots of the lists of `nodes`, in this order, that were last used before
    `before`.

    They are used by `step` from now on, and leave their lists. `ordered`: slots lie in their lists
    by their last use. Returns how many there are, and their latest last use (-1: none).
    """
    count, latest = 0, -1
    for at in range(len(nodes)):
        slot = table[nodes[at], AFTER]
        while slot != nodes[at] and count < len(out):
            after, used = table[slot, AFTER], table[slot, LAST]
            if used < before:
                latest = max(latest, used)
                unlink(table, slot)
                table[slot, LAST], table[slot, NEXT] = step, NEVER
                out[count] = slot
                count += 1
            elif ordered:
                break
            slot = after
    return count, latest


# -----------------------------------------------------------------------------
# How often rows are used, what occurs where, and what is among what.


@compiled(types.void(in4, in4, in4, i8, i8, in8, in8, out1, out1, out1))
def count_uses(
    rows: np.ndarray,
    names: np.ndarray,
    previous: np.ndarray,
    step: int,
    rate: int,
    values: np.ndarray,
    factors: np.ndarray,
    counts: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
) -> None:
    """Count one use by `step` of each of `rows` (int32, distinct), last used by `previous`.

    `names`: what a row is called in the hash, or none: as it is numbered.

    `counts` uint8: each row's level, which was `before` and is `after` (uint8, of `rows`).
    `values` int64 `[256]`: what a level stands for, in 1 / 256 uses, ascending from 0. Counts lose
    `rate` / 2^32 octaves a step; `factors` int64 `[257]`: 2^28 * 2^(-i / 256). The sum lies between
    two levels, and a hash of (row, step) chooses one of them so that the expected value is the sum
    (Morris 1978).
    """
    for i in range(len(rows)):
        row = rows[i]
        age = np.int64(min(step - previous[i], _OLDEST)) * rate
        place, rest = (age >> 24) & 255, age & 0xFFFFFF
        factor = factors[place] - (((factors[place] - factors[place + 1]) * rest) >> 24)
        low = np.int64(counts[row])
        before[i] = low
        value = (((values[low] * factor) >> 28) >> min(age >> 32, 62)) + 256
        # To the highest level whose value is not above: a few away.
        while low < 255 and values[low + 1] <= value:
            low += 1
        while values[low] > value:
            low -= 1
        if low < 255:
            name = names[row] if len(names) else row
            key = (np.uint64(name) << _HALF) ^ np.uint64(step)
            key = (key ^ (key >> _HALF)) * _FIRST
            key = (key ^ (key >> _SOME)) * _SECOND
            chance = np.int64((key ^ (key >> _HALF)) >> _TOP)
            if (value - values[low]) << 24 > chance * (values[low + 1] - values[low]):
                low += 1
        counts[row] = after[i] = low


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


@compiled(types.void(in8, in8, in4, i8, out4))
def find_sorted(
    rows: np.ndarray, known: np.ndarray, starts: np.ndarray, shift: int, found: np.ndarray
) -> None:
    """Where each of `rows` (int64 `[n]`) is in `known` (int64, ascending), to `found` (int32
    `[n]`), -1 where it is not.

    `starts` int32 `[B + 1]`: how many of `known` are below b << `shift`, for b = 0 to B.
    """
    for i in range(len(rows)):
        row, place = rows[i], -1
        bucket = row >> shift
        if bucket >= 0 and bucket < len(starts) - 1:
            low, high = np.int64(starts[bucket]), np.int64(starts[bucket + 1])
            while low < high:
                middle = (low + high) >> 1
                if known[middle] < row:
                    low = middle + 1
                else:
                    high = middle
            if low < starts[bucket + 1] and known[low] == row:
                place = low
        found[i] = place
