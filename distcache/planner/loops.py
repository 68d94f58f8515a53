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


@compiled(types.void(in4, out4, out4))
def group(keys: np.ndarray, order: np.ndarray, starts: np.ndarray) -> None:
    """Stable counting sort: `order[starts[g]:starts[g + 1]]` are the indices whose key is g.

    `keys` int32 `[n]`, all in [0, G); `order` int32 `[n]` and `starts` int32 `[G + 1]` are written.
    """
    groups = len(starts) - 1
    for g in range(groups + 1):
        starts[g] = 0
    for i in range(len(keys)):
        starts[keys[i]] += 1
    total = 0
    for g in range(groups):
        total += starts[g]
        starts[g] = total
    starts[groups] = total
    for back in range(len(keys)):  # from the last to the first: ends become starts
        i = len(keys) - 1 - back
        g = keys[i]
        starts[g] -= 1
        order[starts[g]] = i


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
            last_use[slot] = step  # held: not a victim of its own step
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


# -----------------------------------------------------------------------------
# The window: what the steps known beyond the one being decided will use.
#
# Step s has the place s & mask in `begin` (int64), `soon` and `again` (int32, a power of two of
# them): where its part of three rings of numbers starts (int32, a power of two each; places wrap),
# and how many of it are in use. `slots`: those whose row s is the next to use. `rows` and `steps`:
# rows of s that the window names again, and the step that does. No part is larger than the number
# of the step's distinct rows, for each of them has one step before and one after.


@compiled(i8(in4, in4, i8, i8, in4, in1, out4, in8, out4, out4, out4, out4, out4))
def refer(
    local: np.ndarray,
    previous: np.ndarray,
    planned: int,
    step: int,
    slot_of: np.ndarray,
    classes: np.ndarray,
    next_use: np.ndarray,
    begin: np.ndarray,
    soon: np.ndarray,
    again: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    steps: np.ndarray,
) -> int:
    """Tell the steps that named `local` before (`previous`; int32 `[U]`) of their use by `step`.

    Rows that a step up to `planned` named learn it now, if they are cached; the others when the
    step that names them before is planned (`look_ahead`). Pinned rows (`classes`, or none) are not
    told. Returns U; or -1 - i for a row i that `step` or a later one has named.
    """
    ring, mask = len(begin) - 1, len(slots) - 1
    for i in range(len(local)):
        before, row = previous[i], local[i]
        if before >= step:
            return -1 - i
        if before > planned:
            at = before & ring
            place = (begin[at] + again[at]) & mask
            rows[place] = row
            steps[place] = step
            again[at] += 1
        elif slot_of[row] >= 0 and not (len(classes) and classes[row] == PINNED):
            at = step & ring
            next_use[slot_of[row]] = step
            slots[(begin[at] + soon[at]) & mask] = slot_of[row]
            soon[at] += 1
    return len(local)


@compiled(types.void(i8, in4, in1, out4, in8, out4, out4, out4, in4, in4))
def look_ahead(
    step: int,
    slot_of: np.ndarray,
    classes: np.ndarray,
    next_use: np.ndarray,
    begin: np.ndarray,
    soon: np.ndarray,
    again: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    steps: np.ndarray,
) -> None:
    """Tell those rows of `step`, which has its slots, of the step that uses them next."""
    ring, mask = len(begin) - 1, len(slots) - 1
    own = step & ring
    for k in range(again[own]):
        place = (begin[own] + k) & mask
        row, use = rows[place], steps[place]
        if slot_of[row] >= 0 and not (len(classes) and classes[row] == PINNED):
            at = use & ring
            next_use[slot_of[row]] = use
            slots[(begin[at] + soon[at]) & mask] = slot_of[row]
            soon[at] += 1
    again[own] = 0


@compiled(types.UniTuple(i8, 2)(i8, i8, i8, out4, out4, in8, out4, out4, out4))
def leave_farthest(
    step: int,
    newest: int,
    before: int,
    last_use: np.ndarray,
    next_use: np.ndarray,
    begin: np.ndarray,
    soon: np.ndarray,
    slots: np.ndarray,
    out: np.ndarray,
) -> tuple[int, int]:
    """At most `len(out)` slots that were last used before `before`, the farthest next use first.

    They are used by `step` from now on. Returns how many there are, and their latest last use (-1:
    none). What is read of the window is cleared of slots that no longer wait for their step.
    """
    ring, mask = len(begin) - 1, len(slots) - 1
    count, latest = 0, -1
    for back in range(newest - step):
        if count == len(out):
            break
        use = newest - back
        at, kept = use & ring, 0
        for k in range(soon[at]):
            slot = slots[(begin[at] + k) & mask]
            if next_use[slot] != use:
                continue
            if count < len(out) and last_use[slot] < before:
                latest = max(latest, last_use[slot])
                last_use[slot] = step
                next_use[slot] = NEVER
                out[count] = slot
                count += 1
            else:
                slots[(begin[at] + kept) & mask] = slot
                kept += 1
        soon[at] = kept
    return count, latest


# -----------------------------------------------------------------------------
# Slots in the order in which their rows leave: a list for each key, first in, first out.
#
# `keys` int64, ascending, and `ends` int32 `[lists, 4]`: first chunk and place in it, last chunk
# and the place after its last entry. A chunk is `CHUNK` rows of `entries` int32 `[n, 2]`: a slot,
# and the step that used it last when it was filed. `link` int32: the chunk after each, of a list or
# among the free ones. `state` int64: how many lists there are, the first free chunk, how many are
# free, and how many entries there are. Entries are hints: one holds while its slot has neither been
# used nor wanted since.

CHUNK = 32
"""Entries of a chunk."""

LISTS, FREE, LEFT, HINTS = 0, 1, 2, 3
"""Places in `state`."""


@compiled(types.void(i8, out8, out44, out4, out8, out4))
def open_lists(
    base: int,
    keys: np.ndarray,
    ends: np.ndarray,
    link: np.ndarray,
    state: np.ndarray,
    where: np.ndarray,
) -> None:
    """The list of each key `base` + k with `where[k]` not -1, to `where`; made if need be."""
    low = state[LISTS]  # the lists before it have lower keys than any of these
    while low > 0 and keys[low - 1] >= base:
        low -= 1
    new, at = 0, low
    for k in range(len(where)):
        while at < state[LISTS] and keys[at] < base + k:
            at += 1
        if where[k] >= 0 and (at == state[LISTS] or keys[at] != base + k):
            new += 1
    at, to = state[LISTS] - 1, state[LISTS] + new - 1
    state[LISTS] += new
    for back in range(len(where)):  # from the highest key down, to make room for those between
        k = len(where) - 1 - back
        key, wanted = base + k, where[k] >= 0
        while at >= low and keys[at] >= key:
            keys[to] = keys[at]
            ends[to, 0], ends[to, 1] = ends[at, 0], ends[at, 1]
            ends[to, 2], ends[to, 3] = ends[at, 2], ends[at, 3]
            if keys[at] == key:
                where[k], wanted = to, False
            at -= 1
            to -= 1
        if wanted:
            chunk = state[FREE]
            state[FREE] = link[chunk]
            state[LEFT] -= 1
            keys[to] = key
            ends[to, 0], ends[to, 1], ends[to, 2], ends[to, 3] = chunk, 0, chunk, 0
            where[k] = to
            to -= 1


@compiled(types.void(in4, i8, i8, in4, in4, in1, in4, out8, out44, out44, out4, out8, out4, out4))
def file_slots(
    slots: np.ndarray,
    step: int,
    base: int,
    next_use: np.ndarray,
    row_of: np.ndarray,
    levels: np.ndarray,
    ranks: np.ndarray,
    keys: np.ndarray,
    ends: np.ndarray,
    entries: np.ndarray,
    link: np.ndarray,
    state: np.ndarray,
    where: np.ndarray,
    rank_of: np.ndarray,
) -> None:
    """File those of `slots`, last used by `step`, that no step in the window uses.

    Their keys are `base` + `ranks[levels[row]]`, or `base` where there are no `levels`; `where`
    and `rank_of`, int32, as many as there are ranks and slots, are scratch. There are chunks enough
    for all.
    """
    where[:] = -1
    for i in range(len(slots)):
        rank_of[i] = -1
        if next_use[slots[i]] == NEVER:
            rank = ranks[levels[row_of[slots[i]]]] if len(levels) else 0
            rank_of[i] = rank
            where[rank] = 0
    open_lists(base, keys, ends, link, state, where)
    for i in range(len(slots)):
        slot, rank = slots[i], rank_of[i]
        if rank < 0:
            continue
        at = where[rank]
        if ends[at, 3] == CHUNK:
            chunk = state[FREE]
            state[FREE] = link[chunk]
            state[LEFT] -= 1
            link[ends[at, 2]] = chunk
            ends[at, 2], ends[at, 3] = chunk, 0
        place = np.int64(ends[at, 2]) * CHUNK + ends[at, 3]
        entries[place, 0], entries[place, 1] = slot, step
        ends[at, 3] += 1
        state[HINTS] += 1


@compiled(types.UniTuple(i8, 2)(i8, i8, out4, in4, out8, out44, in44, out4, out8, out4))
def leave(
    step: int,
    before: int,
    last_use: np.ndarray,
    next_use: np.ndarray,
    keys: np.ndarray,
    ends: np.ndarray,
    entries: np.ndarray,
    link: np.ndarray,
    state: np.ndarray,
    out: np.ndarray,
) -> tuple[int, int]:
    """At most `len(out)` of the slots that were last used before `before`, the next to leave first.

    They are used by `step` from now on, and filed no longer. Returns how many there are, and their
    latest last use (-1: none). What is read is in proportion to what leaves, and to entries that
    hold no longer, which are dropped.
    """
    count, latest, at, kept = 0, -1, 0, 0
    while at < state[LISTS] and count < len(out):
        chunk, start, last, stop = ends[at, 0], ends[at, 1], ends[at, 2], ends[at, 3]
        while chunk != last or start != stop:
            if start == CHUNK:
                after = link[chunk]
                link[chunk] = state[FREE]
                state[FREE] = chunk
                state[LEFT] += 1
                chunk, start = after, 0
                continue
            place = np.int64(chunk) * CHUNK + start
            slot, used = entries[place, 0], entries[place, 1]
            if count == len(out) or used >= before:
                break
            if last_use[slot] == used and next_use[slot] == NEVER:
                latest = max(latest, used)
                last_use[slot] = step
                out[count] = slot
                count += 1
            start += 1
            state[HINTS] -= 1
        if chunk == last and start == stop:  # an empty list goes
            link[chunk] = state[FREE]
            state[FREE] = chunk
            state[LEFT] += 1
        else:
            keys[kept] = keys[at]
            ends[kept, 0], ends[kept, 1], ends[kept, 2], ends[kept, 3] = chunk, start, last, stop
            kept += 1
        at += 1
    if kept < at:
        for rest in range(at, state[LISTS]):
            keys[kept] = keys[rest]
            for k in range(4):
                ends[kept, k] = ends[rest, k]
            kept += 1
        state[LISTS] = kept
    return count, latest


@compiled(types.void(in4, in4, out8, out44, out44, out4, out8))
def tidy(
    last_use: np.ndarray,
    next_use: np.ndarray,
    keys: np.ndarray,
    ends: np.ndarray,
    entries: np.ndarray,
    link: np.ndarray,
    state: np.ndarray,
) -> None:
    """Drop every entry that holds no longer, and the lists that have none left."""
    lists = state[LISTS]
    state[LISTS] = state[HINTS] = 0
    for at in range(lists):
        chunk, start, last, stop = ends[at, 0], ends[at, 1], ends[at, 2], ends[at, 3]
        first, begin, goal, to = chunk, start, chunk, start
        while chunk != last or start != stop:
            if start == CHUNK:
                chunk, start = link[chunk], 0
                continue
            place = np.int64(chunk) * CHUNK + start
            slot, used = entries[place, 0], entries[place, 1]
            start += 1
            if last_use[slot] != used or next_use[slot] != NEVER:
                continue
            if to == CHUNK:
                goal, to = link[goal], 0
            place = np.int64(goal) * CHUNK + to
            entries[place, 0] = slot
            entries[place, 1] = used
            to += 1
            state[HINTS] += 1
        empty = goal == first and to == begin
        rest = goal if empty else link[goal]
        free = empty or goal != last
        while free:  # the chunks that nothing was written to
            after, free = link[rest], rest != last
            link[rest] = state[FREE]
            state[FREE] = rest
            state[LEFT] += 1
            rest = after
        if not empty:
            kept = state[LISTS]
            keys[kept] = keys[at]
            ends[kept, 0], ends[kept, 1], ends[kept, 2], ends[kept, 3] = first, begin, goal, to
            state[LISTS] += 1


# -----------------------------------------------------------------------------
# How often rows are used, what occurs where, and what is among what.


@compiled(types.void(in4, in4, in4, i8, i8, in8, in8, out1))
def count_uses(
    rows: np.ndarray,
    names: np.ndarray,
    previous: np.ndarray,
    step: int,
    rate: int,
    values: np.ndarray,
    factors: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Count one use by `step` of each of `rows` (int32, distinct), last used by `previous`.

    `names`: what a row is called in the hash, or none: as it is numbered.

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
            name = names[row] if len(names) else row
            key = (np.uint64(name) << _HALF) ^ np.uint64(step)
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
