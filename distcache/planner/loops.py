"""Loops over the rows of one home, see `distcache.compiled`: where they are, and which leave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distcache.compiled import array, compiled, fetch_early, i4, i8, in4, in8, out4, out8, types

out44, out444, out88 = array(i4, True, 2), array(i4, True, 3), array(i8, True, 2)
in88, in1, out1 = array(i8, False, 2), array(types.uint8, False), array(types.uint8, True)

PINNED = 255
"""Level, and popularity class, of a row that leaves only where no other can."""

NEVER = np.iinfo(np.int32).max
"""Next use of a row that no step in the window uses."""

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _SOME, _TOP = np.uint64(32), np.uint64(29), np.uint64(40)
"""Multipliers and shifts of a 64-bit mix (Steele et al. 2014, SplitMix); `_TOP` leaves 24 bits."""

_OLDEST = 1 << 30
"""Steps beyond which a row's last use is no further back."""

at = np.uint64
"""Of an index that is not negative: any other one Numba first looks at, for it may count from the
end, and that is a fifth of these loops."""


@compiled(i8(i8, i8, i8))
def local_of(shelf: int, place: int, bits: int) -> int:
    """The local row at `place` of `shelf`: the inverse of `shelf_of`."""
    key = np.uint64(place) * _FIRST
    key = (key ^ (key >> _SOME)) * _SECOND
    return (place << bits) | ((shelf - np.int64(key >> _TOP)) & ((1 << bits) - 1))


@compiled(i8(i8, i8, in8))
def row_in(part: int, row: int, shape: np.ndarray) -> int:
    """The local row that is `row` of `part`, of homes of `shape`; see `request_loops.Homes`."""
    bits, inner = shape[0], shape[1]
    if inner == 0:
        return local_of(part, row, bits)
    return local_of((part << inner) + row // shape[2], row % shape[2], bits)


# -----------------------------------------------------------------------------
# A home: its parts, and in each of them slots and their lists, first in, first out. A slot is in
# one list at most.


class Home(NamedTuple):
    """What a home keeps of its K parts, each with R rows (numbered in the part) and S slots, some
    of which may not be there.

    `index` int32 `[K, R, 2]`: of each row its slot (-1: none) and its level in the ranking, as
    slot * 256 + level, and the step that named it last; `row_of` int32 `[K, S]`: the row in each
    slot (-1: free). `table` int32 `[K, S + 1 + m + n, 4]`: what comes after each slot in its list
    and what before, the step that used it last, and the step in the window that uses it next. A
    list has a node beyond the slots, which follows its last slot and precedes its first: S has the
    free slots; then one for each of m steps in the window (at step & m - 1), whose list has the
    slots that it is the next to use; then one for each of n keys (at key & n - 1), with the slots
    that no step in the window uses. Both are powers of two. Slots of rows whose level is `PINNED`
    are in no list, and `table` says nothing of them. `keys` int64 `[K]`: no lower key has slots.

    Rows of a step in the window wait, until that is planned, for it to tell them who names them
    next: in `waiting` int32 `[K, Q, 2]`, Q a power of two, as rings of the row and the step that
    does. Those of step s begin at `begins[s & m - 1]`, where each of its rows has room, and are
    `waits[s & m - 1]` so far, by the step that names them (int64 `[K, m]`). `heads` int64 `[K]`:
    where those of the next step begin.
    """

    index: np.ndarray
    row_of: np.ndarray
    table: np.ndarray
    keys: np.ndarray
    waiting: np.ndarray
    begins: np.ndarray
    waits: np.ndarray
    heads: np.ndarray


HELD, NAMED = range(2)
"""Columns of `index`."""

LEVELS = 256
"""Levels there may be; a part has fewer than 2^31 / 256 slots."""

AFTER, BEFORE, LAST, NEXT = range(4)
"""Columns of `table`."""

FREE, STEPS = range(2)
"""Where lists begin beyond the slots."""

_home = types.NamedTuple([out444, out44, out444, out8, out444, out88, out88, out8], Home)


@compiled(types.UniTuple(i8, 2)(in8, in8, out8))
def sum_up(counts: np.ndarray, sizes: np.ndarray, firsts: np.ndarray) -> tuple[int, int]:
    """How many distinct rows all parts have together, of `counts` each, and how many parts have
    more than their `sizes`; to `firsts` those of the parts before each. int64 `[K]` all three."""
    before, over = 0, 0
    for part in range(len(counts)):
        firsts[part] = before
        before += counts[part]
        over += counts[part] > sizes[part]
    return before, over


_EARLY = 24
"""Rows ahead of the one that is looked at whose entries in `index` are on their way."""

_SPARSE, _LINE = 16, 4
"""See `read_all`; rows of a table that are brought at once."""


@compiled(types.void(out44, i8))
def unlink(table: np.ndarray, slot: int) -> None:
    """Take a slot out of its list."""
    after, before = table[at(slot), AFTER], table[at(slot), BEFORE]
    table[at(before), AFTER], table[at(after), BEFORE] = after, before


@compiled(types.void(out44, i8, i8))
def append(table: np.ndarray, node: int, slot: int) -> None:
    """Put a slot, which is in no list, at the end of the list of `node`."""
    last = table[at(node), BEFORE]
    table[at(slot), AFTER], table[at(slot), BEFORE] = node, last
    table[at(last), AFTER], table[at(node), BEFORE] = slot, slot


@compiled(types.void(_home, i8, i8, i8, types.boolean))
def tell(home: Home, part: int, row: int, step: int, filed: bool) -> None:
    """Tell a row that is not pinned, if it is cached, that `step` in the window uses it next.

    `filed`: whether its slot is in a list.
    """
    slot = np.int64(home.index[at(part), at(row), HELD]) // LEVELS
    if slot >= 0:
        table, slots = home.table[at(part)], home.row_of.shape[1]
        if filed:
            unlink(table, slot)
        table[at(slot), NEXT] = step
        append(table, slots + STEPS + (step & (home.begins.shape[1] - 1)), slot)


class Named(NamedTuple):
    """What all ranks name in `step` of a home's rows, and where `ingest` writes what follows.

    `rows` int32 `[N]`: rows in their parts, by rank, then by shelf: those of rank r and shelf s
    from `starts[r, s]` to `starts[r, s + 1]`; 2^`inner` shelves are a part. From `bases[p]` on, the
    `counts[p]` `distinct` rows of each part, by shelf, then first occurrence, and the steps that
    named them `previous` to this (-1: none), int32 `[N]`, and for each of `rows` its place among
    these of its part, `labels`. Where the policy `looks_ahead`, the window learns of the step;
    `planned`: the last step that is; `once`: no row is named twice, by whatever rank.
    """

    step: int
    planned: int
    looks_ahead: bool
    once: bool
    inner: int
    rows: np.ndarray
    starts: np.ndarray
    bases: np.ndarray
    distinct: np.ndarray
    previous: np.ndarray
    labels: np.ndarray
    counts: np.ndarray


_named = types.NamedTuple(
    [i8, i8, types.boolean, types.boolean, i8, out4, out88, out8, out4, out4, out4, out8], Named
)


@compiled(types.UniTuple(i8, 2)(_home, i8, _named, in88))
def spread_counts(home: Home, oldest: int, named: Named, counts: np.ndarray) -> tuple[int, int]:
    """Where rows that ranks name begin, of `counts[r, s]` (int64 `[W, S]`) of rank r on shelf s.

    Writes `starts` and `bases`. Returns the highest of the rows read without a sign, 0 for none, -1
    if the counts are not of so many rows; and how many would wait at most, of the part that has
    most, if all did, beside those of the step `oldest` and later ones, -1: there are none.
    """
    starts, bases, rows = named.starts, named.bases, named.rows
    begin, before, most, highest = 0, 0, 0, np.uint32(0)
    shelves, mask = counts.shape[1] // len(bases), home.begins.shape[1] - 1
    for rank in range(len(counts)):
        starts[rank, 0] = begin
        for shelf in range(counts.shape[1]):
            begin += counts[rank, shelf]
            starts[rank, shelf + 1] = begin
    for part in range(len(bases)):
        bases[part], waiting = before, 0
        for rank in range(len(counts)):
            before += starts[rank, (part + 1) * shelves] - starts[rank, part * shelves]
        if oldest >= 0:
            waiting = home.heads[part] - home.begins[part, oldest & mask]
        most = max(most, waiting + before - bases[part])
    for i in range(len(rows)):
        highest = max(highest, np.uint32(rows[i]))
    return np.int64(highest) if begin == len(rows) else -1, most


@compiled(types.void(_named, in8, out8))
def local_rows(named: Named, shape: np.ndarray, local: np.ndarray) -> None:
    """The local rows (int64) of the distinct ones, of a home of `shape`."""
    at = 0
    for part in range(len(named.counts)):
        for k in range(named.bases[part], named.bases[part] + named.counts[part]):
            local[at] = row_in(part, named.distinct[k], shape)
            at += 1


@compiled(i8(in4))
def fold(values: np.ndarray) -> int:
    """A number that another value, or another order, changes."""
    found = 0
    for i in range(len(values)):
        found += np.int64(values[i]) * (2 * i + 1)
    return found


@compiled(types.void(in4, in4, out4))
def encode_slots(slots: np.ndarray, fetch: np.ndarray, told: np.ndarray) -> None:
    """`told` (int32 `[U]`) are the `slots` (int32 `[U]`), of the rows `fetch` (int32) the
    complements."""
    for i in range(len(slots)):
        told[i] = slots[i]
    for i in range(len(fetch)):
        told[at(fetch[i])] = ~told[at(fetch[i])]


@compiled(types.void(in4, in8, in8, out4))
def join_parts(values: np.ndarray, bases: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """Those `values` of which each part has `counts` from `bases` on, without gaps."""
    place = 0
    for part in range(len(counts)):
        for k in range(bases[part], bases[part] + counts[part]):
            out[place] = values[k]
            place += 1


@compiled(i8(_home, i8, _named, i8, i8))
def tell_new(home: Home, part: int, named: Named, row: int, previous: int) -> int:
    """Where the policy looks ahead, tell a row of the step of this use, or, if a step in the window
    names it, the `previous` one, let it wait for that. Of a pinned row, which nobody has to tell,
    -2 - `previous` is returned; of any other `previous`."""
    if home.index[at(part), at(row), HELD] & (LEVELS - 1) == PINNED:
        return -2 - previous
    if named.looks_ahead and previous > named.planned:
        waiting, step = home.waiting[part], at(previous & (home.begins.shape[1] - 1))
        place = home.begins[part, step] + home.waits[part, step] & (len(waiting) - 1)
        waiting[at(place), 0], waiting[at(place), 1] = row, named.step
        home.waits[part, step] += 1
    elif named.looks_ahead:
        tell(home, part, row, named.step, True)
    return previous


@compiled(types.void(_home, i8, _named))
def name_part(home: Home, part: int, named: Named) -> None:
    """Find the distinct rows of one part; meanwhile, unless each is named once, `index` has -2 -
    the place of each among them."""
    index, base, count, once = home.index[part], named.bases[part], 0, named.once
    for shelf in range(part << named.inner, (part + 1) << named.inner):
        for rank in range(len(named.starts)):
            start, stop = named.starts[rank, shelf], named.starts[rank, shelf + 1]
            rows, labels = named.rows[start:stop], named.labels[start:stop]
            for i in range(len(rows)):
                if i + _EARLY < len(rows):
                    fetch_early(index, rows[i + _EARLY])
                row = np.int64(rows[i])
                seen = np.int64(index[at(row), NAMED])
                if seen < -1:
                    labels[i] = -2 - seen
                    continue
                named.distinct[at(base + count)] = row
                named.previous[at(base + count)] = tell_new(home, part, named, row, seen)
                index[at(row), NAMED] = named.step if once else -2 - count
                labels[i] = count
                count += 1
    named.counts[part] = count
    distinct = named.distinct[base : base + count]
    for k in range(0 if once else len(distinct)):
        index[at(distinct[k]), NAMED] = named.step


@compiled(types.void(_home, i8, _named))
def ingest_part(home: Home, part: int, named: Named) -> None:
    """Take in what all ranks name of one part."""
    name_part(home, part, named)
    step = named.step & (home.begins.shape[1] - 1)
    home.begins[part, step], home.waits[part, step] = home.heads[part], 0
    home.heads[part] += named.counts[part]


@compiled(types.void(_home, i8, i8))
def look_ahead(home: Home, part: int, step: int) -> None:
    """Tell which rows of `step`, whose slots are filled by now, are used again, and when."""
    waiting, now = home.waiting[part], step & (home.begins.shape[1] - 1)
    begin, room = home.begins[part, now], len(waiting) - 1
    for i in range(begin, begin + home.waits[part, now]):
        row, later = waiting[at(i & room), 0], waiting[at(i & room), 1]
        tell(home, part, np.int64(row), np.int64(later), False)


@compiled(types.UniTuple(i8, 2)(out44, i8, i8, i8, types.boolean, i8, out4, i8, i8))
def leave(
    table: np.ndarray,
    node: int,
    step: int,
    before: int,
    ordered: bool,
    latest: int,
    out: np.ndarray,
    count: int,
    wanted: int,
) -> tuple[int, int]:
    """Take slots out of the list of `node` that were last used before `before`, for `step` to use.

    They go to `out` from `count` on, up to `wanted`. `ordered`: slots lie in this list by their
    last use. Returns how many `out` has, and the latest last use among them, or `latest`.
    """
    slot = np.int64(table[node, AFTER])
    while slot != node and count < wanted:
        after, used = np.int64(table[at(slot), AFTER]), np.int64(table[at(slot), LAST])
        if used < before:
            latest = max(latest, used)
            unlink(table, slot)
            table[at(slot), LAST], table[at(slot), NEXT] = step, NEVER
            out[at(count)] = slot
            count += 1
        elif ordered:
            break
        slot = after
    return count, latest


@compiled(types.void(_home, i8, i8, i8))
def file(home: Home, part: int, slot: int, key: int) -> None:
    """Put the slot of a row, in no list, by its key where it belongs if no step in the window uses
    it."""
    table, slots = home.table[part], home.row_of.shape[1]
    if table[at(slot), NEXT] == NEVER:
        by_key = slots + STEPS + home.begins.shape[1]
        append(table, by_key + (key & (len(table) - by_key - 1)), slot)


@compiled(types.void(_home, in8, in8, i8, in4))
def file_slots(
    home: Home, parts: np.ndarray, slots: np.ndarray, base: int, ranks: np.ndarray
) -> None:
    """`file` each of `slots` of its part, in this order; free ones among the free, those of pinned
    rows nowhere."""
    for i in range(len(slots)):
        part, row = parts[i], home.row_of[parts[i], slots[i]]
        if row < 0:
            append(home.table[part], home.row_of.shape[1] + FREE, slots[i])
        else:
            level = home.index[part, row, HELD] & (LEVELS - 1)
            if level != PINNED:
                file(home, part, slots[i], base + ranks[level])


@compiled(i8(i8, i8, i8, i8, in8, in8, in1))
def count_use(
    level: int,
    age: int,
    name: int,
    step: int,
    values: np.ndarray,
    factors: np.ndarray,
    nearest: np.ndarray,
) -> int:
    """The level of a count, below `PINNED`, after one more use, by `step`, of the row `name`.

    `age`: how many octaves it has lost since its last use, in 1 / 2^32. `values` int64 `[256]`:
    what a level stands for, in 1 / 256 uses, ascending from 0; `factors` int64 `[257]`: 2^28 *
    2^(-i / 256); `nearest` uint8: the highest level with a value up to 2^(i // 32) * (1 + i % 32 /
    32), beyond which the next bucket i has one more at most. The sum lies between two levels, and a
    hash of (row, step) chooses one of them so that the expected value is the sum (Morris 1978).
    """
    place, rest = at((age >> 24) & 255), age & 0xFFFFFF
    factor = factors[place] - (((factors[place] - factors[place + at(1)]) * rest) >> 24)
    value = (((values[at(level)] * factor) >> 28) >> min(age >> 32, 62)) + 256
    # The highest level whose value is not above: that of the bucket's beginning, which exponent and
    # first digits of a float are, or the next one.
    level = np.int64(nearest[at((np.float64(value).view(np.int64) >> 47) - (1023 << 5))])
    level += level < PINNED - 1 and values[at(level + 1)] <= value
    if level < PINNED - 1:
        key = (np.uint64(name) << _HALF) ^ np.uint64(step)
        key = (key ^ (key >> _HALF)) * _FIRST
        key = (key ^ (key >> _SOME)) * _SECOND
        chance = np.int64((key ^ (key >> _HALF)) >> _TOP)
        low, high = values[at(level)], values[at(level + 1)]
        level += (value - low) << 24 > chance * (high - low)
    return level


class Due(NamedTuple):
    """A step that is decided, and where `plan` writes what is.

    `named`: what `ingest` wrote, whose `labels` become places among the home's rows; part p has
    rows `dense[p]` and up of these, and slots `own_slots[p]` and up of the device's; `shape`: of
    the home, see `request_loops.Homes`; `newest`: the last step that the window knows. Keys are
    `base` + `ranks` of levels; uses are counted at `rate` >= 0; `values`, `factors` and `nearest`:
    see `count_use`.

    Of the home's rows in canonical order: `slots`, the `levels` that they had, and those that they
    have, `counted` (both uint8). And of part p, from `dense[p]` on: `fetch`, which of the home's
    rows to fetch, `taken`, the slots that these fill, and `fetched`, their local rows;
    `evict_slots`, and `evicted`, the local rows that leave these. int32 `[U]` each, local rows
    int64. `done` int64 `[K, 3]`: how many are fetched, how many leave, and the latest last use of a
    slot that is filled, -2 where slots are too few.
    """

    named: Named
    newest: int
    prefetch: int
    rate: int
    base: int
    ranks: np.ndarray
    values: np.ndarray
    factors: np.ndarray
    nearest: np.ndarray
    dense: np.ndarray
    own_slots: np.ndarray
    shape: np.ndarray
    slots: np.ndarray
    levels: np.ndarray
    counted: np.ndarray
    fetch: np.ndarray
    taken: np.ndarray
    evict_slots: np.ndarray
    fetched: np.ndarray
    evicted: np.ndarray
    done: np.ndarray


_due = types.NamedTuple(
    [
        *(_named, i8, i8, i8, i8, out4, out8, out8, out1, out8, out8, out8),
        *(out4, out1, out1, out4, out4, out4, out8, out8, out88),
    ],
    Due,
)


@compiled(i8(_home, i8, _due))
def look_up(home: Home, part: int, due: Due) -> int:
    """Hold the slots of those rows of the step that are cached, and count the use of all. Writes
    each row's slot, or -1, and which of them are to be fetched; returns how many these are."""
    index, table, named, rate = home.index[part], home.table[part], due.named, due.rate
    start, size, base, step = due.dense[part], named.counts[part], named.bases[part], named.step
    distinct, previous = named.distinct[base : base + size], named.previous[base : base + size]
    slots, levels = due.slots[start : start + size], due.levels[start : start + size]
    counted, count = due.counted[start : start + size], start
    for k in range(len(distinct)):
        if k + _EARLY < len(distinct):
            fetch_early(index, distinct[k + _EARLY])
        row = np.int64(distinct[k])
        held = np.int64(index[at(row), HELD])
        slot, level = held // LEVELS, held & (LEVELS - 1)
        slots[k], levels[k] = slot, level
        if level == PINNED:
            previous[k] = -2 - previous[k]  # see `tell_new`
        elif rate >= 0:
            age = min(step - np.int64(previous[k]), _OLDEST) * rate
            level = count_use(level, age, row, step, due.values, due.factors, due.nearest)
            index[at(row), HELD] = slot * LEVELS + level
        counted[k] = level
        if slot < 0:
            due.fetch[at(count)] = start + k
            count += 1
        elif level != PINNED:
            if table[at(slot), NEXT] != step:  # those that are to be used now go as a whole list
                unlink(table, slot)
            # Held: it is no victim of its own step.
            table[at(slot), LAST], table[at(slot), NEXT] = step, NEVER
    return count - start


@compiled(types.void(_home, i8, i8))
def raise_keys(home: Home, part: int, base: int) -> None:
    """Raise the lowest key of a part that may have slots, to `base` at most."""
    by_key = home.row_of.shape[1] + STEPS + home.begins.shape[1]
    keys = home.table.shape[1] - by_key - 1
    while home.keys[part] < base:
        node = by_key + (home.keys[part] & keys)
        if home.table[part, node, AFTER] != node:
            break
        home.keys[part] += 1


@compiled(types.UniTuple(i8, 2)(_home, i8, _due, i8, i8, i8))
def take_pinned(
    home: Home, part: int, due: Due, latest: int, count: int, wanted: int
) -> tuple[int, int]:
    """`take` the slots of pinned rows, but for those that the step names: a scan, for nothing lists
    them. A row that the window names again may have been used by the step before."""
    index, row_of, table = home.index[part], home.row_of[part], home.table[part]
    step, start = due.named.step, due.dense[part]
    for slot in due.slots[start : start + due.named.counts[part]]:
        if slot >= 0:
            table[at(slot), LAST] = step
    for before in range(step - due.prefetch, step + 1):
        for slot in range(len(row_of)):
            row = np.int64(row_of[slot])
            if row < 0 or table[slot, LAST] == step:
                continue
            if index[at(row), HELD] != slot * LEVELS + PINNED:
                continue
            used = np.int64(index[at(row), NAMED])
            used = used if used < step else step - 1
            if used < before:
                latest = max(latest, used)
                table[slot, LAST], table[slot, NEXT] = step, NEVER
                due.taken[count] = slot
                count += 1
                if count == wanted:
                    return count, latest
    return count, latest


@compiled(i8(_home, i8, _due, i8))
def take(home: Home, part: int, due: Due, misses: int) -> int:
    """Slots of `part` for so many misses, to `due.taken`; they leave their lists. Returns the
    latest last use among them, -1 for none; -2 if there are too few.

    Free slots; then rows without a use in the window, lowest key first; then those whose next use
    is farthest; of both such as none of the last P steps used. Where these are short, holds are:
    oldest last use first. Last, pinned rows; those that the step names stay.
    """
    table, slots, mask = home.table[part], home.row_of.shape[1], home.begins.shape[1] - 1
    by_key, step, out = slots + STEPS + mask + 1, due.named.step, due.taken
    keys, highest = len(table) - by_key - 1, due.base + due.ranks[len(due.ranks) - 1]
    first, wanted = due.dense[part], due.dense[part] + misses
    count, latest = leave(table, slots + FREE, step, step, True, -1, out, first, wanted)
    for before in range(step - due.prefetch, step + 1):
        for key in range(home.keys[part], highest + 1):
            if count == wanted:
                return latest
            node = by_key + (key & keys)
            count, latest = leave(table, node, step, before, True, latest, out, count, wanted)
        for later in range(due.newest, step, -1):
            if count == wanted:
                return latest
            node = slots + STEPS + (later & mask)
            count, latest = leave(table, node, step, before, False, latest, out, count, wanted)
    if count < wanted:
        count, latest = take_pinned(home, part, due, latest, count, wanted)
    return latest if count == wanted else -2


@compiled(i8(_home, i8, _due, i8))
def fill(home: Home, part: int, due: Due, misses: int) -> int:
    """Give the slots of the part in `due.taken`, which then has those of the device, to the rows
    that are fetched; how many rows leave them, which go to `due.evicted`."""
    index, row_of, start = home.index[part], home.row_of[part], due.dense[part]
    shift, own, leaving = due.named.bases[part] - start, due.own_slots[part], start
    fetch, taken = due.fetch[start : start + misses], due.taken[start : start + misses]
    fetched = due.fetched[start : start + misses]
    for i in range(len(fetch)):
        if i + 2 * _EARLY < len(fetch):
            fetch_early(row_of, taken[i + 2 * _EARLY])
        if i + _EARLY < len(fetch):
            fetch_early(index, max(row_of[at(taken[i + _EARLY])], 0))
        slot, k = np.int64(taken[i]), np.int64(fetch[i])
        row, old = np.int64(due.named.distinct[at(shift + k)]), np.int64(row_of[at(slot)])
        if old >= 0:
            index[at(old), HELD] = -LEVELS + (index[at(old), HELD] & (LEVELS - 1))
            due.evict_slots[at(leaving)] = slot + own
            due.evicted[at(leaving)] = row_in(part, old, due.shape)
            leaving += 1
        index[at(row), HELD] = slot * LEVELS + due.counted[at(k)]
        row_of[at(slot)], due.slots[at(k)] = row, slot
        fetched[i], taken[i] = row_in(part, row, due.shape), slot + own
    return leaving - start


@compiled(types.void(_home, i8, _due))
def plan_part(home: Home, part: int, due: Due) -> None:
    """Decide a step in one part."""
    named, table, start = due.named, home.table[part], due.dense[part]
    step, size, misses = named.step, named.counts[part], look_up(home, part, due)
    node = home.row_of.shape[1] + STEPS + (step & (home.begins.shape[1] - 1))
    table[node, AFTER], table[node, BEFORE] = node, node
    slots, counted = due.slots[start : start + size], due.counted[start : start + size]
    latest = take(home, part, due, misses)
    due.done[part, 0], due.done[part, 1], due.done[part, 2] = misses, 0, latest
    if latest < -1:
        return
    due.done[part, 1] = fill(home, part, due, misses)
    look_ahead(home, part, step)
    for k in range(len(slots)):
        if counted[k] != PINNED:
            file(home, part, slots[k], due.base + due.ranks[at(counted[k])])
        slots[k] += due.own_slots[part]
    for rank in range(len(named.starts)):
        shelf, end = part << due.shape[1], (part + 1) << due.shape[1]
        labels = named.labels[named.starts[rank, shelf] : named.starts[rank, end]]
        for i in range(len(labels)):
            labels[i] += start
    raise_keys(home, part, due.base)


@compiled(i8(_home, i8, i8))
def read_all(home: Home, part: int, rows: int) -> int:
    """Bring the table of a part, of which `rows` rows are used, to the core's cache, if these are
    more than 1 / `_SPARSE` of it: a walk through a list waits for every slot that is not there.
    What is returned says nothing."""
    table, found = home.table[part], 0
    if rows * _SPARSE > len(table):
        for row in range(0, len(table), _LINE):
            found ^= table[row, 0]
    return found


@compiled(types.void(_home, i8, i8, _named))
def ingest(home: Home, first: int, last: int, named: Named) -> None:
    """Take in what all ranks name of the parts from `first` to `last` - 1."""
    for part in range(first, last):
        ingest_part(home, part, named)


@compiled(types.void(_home, i8, i8, _due))
def plan(home: Home, first: int, last: int, due: Due) -> None:
    """Decide a step in the parts from `first` to `last` - 1."""
    for part in range(first, last):
        due.done[part, 0] = read_all(home, part, due.named.counts[part])
        plan_part(home, part, due)


@compiled(types.void(_home, i8, i8, _named, _due))
def advance(home: Home, first: int, last: int, named: Named, due: Due) -> None:
    """`ingest` one step and `plan` another, while what a part has is in the core's cache."""
    for part in range(first, last):
        due.done[part, 0] = read_all(home, part, due.named.counts[part])
        ingest_part(home, part, named)
        plan_part(home, part, due)


@compiled(types.UniTuple(i8, 4)(in8, _due))
def gather(keys: np.ndarray, due: Due) -> tuple[int, int, int, int]:
    """What all parts fetch and evict without gaps, in their places (see `Due`, and `Home` for
    `keys`). How many these are, the latest last use of a slot that is filled, -2 where some part
    has too few, and the lowest key."""
    came, gone, latest, lowest = 0, 0, -1, keys[0]
    for part in range(len(keys)):
        misses, leaving, used = due.done[part, 0], due.done[part, 1], due.done[part, 2]
        first = due.dense[part]
        latest, lowest = max(latest, used), min(lowest, keys[part])
        if used < -1:
            return 0, 0, -2, lowest
        for i in range(misses if first > came else 0):
            due.fetch[came + i], due.taken[came + i] = due.fetch[first + i], due.taken[first + i]
            due.fetched[came + i] = due.fetched[first + i]
        for i in range(leaving if first > gone else 0):
            due.evict_slots[gone + i] = due.evict_slots[first + i]
            due.evicted[gone + i] = due.evicted[first + i]
        came, gone = came + misses, gone + leaving
    return came, gone, latest, lowest
