"""Loops over the ids of one rank, see `distcache.compiled`: the rows that it names, by home and
shelf, and where in a step's rows each id finds its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distcache.compiled import array, compiled, i4, i8, in4, in8, out1, out4, out8, types

in88, out44, out88 = array(i8, False, 2), array(i4, True, 2), array(i8, True, 2)
in1, out888 = array(types.uint8, False), array(i8, True, 3)

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _SOME, _TOP = np.uint64(32), np.uint64(29), np.uint64(40)
"""Multipliers and shifts of a 64-bit mix (Steele et al. 2014, SplitMix); `_TOP` leaves 24 bits."""

_GOLDEN, _OTHER, _LAST = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(33)
"""Those of `layout.mix`."""

at = np.uint64
"""Of an index that is not negative: any other one Numba first looks at, for it may count from the
end, and that is a fifth of these loops."""


# -----------------------------------------------------------------------------
# What a rank asks for: the distinct rows of its ids, by home and part.


@compiled(types.void(in4, i8, in8, in88, out88), types.void(in8, i8, in8, in88, out88))
def find_pieces(
    offsets: np.ndarray, batch: int, order: np.ndarray, of_table: np.ndarray, pieces: np.ndarray
) -> None:
    """The `pieces` of features of `batch` bags each, see `name_rows`, by table: feature `order[i]`,
    of a table of `of_table[:, i]` (the row of its id 0, and how many it has). `offsets`: where bags
    begin."""
    head = 0
    for i in range(len(order)):
        start, stop = offsets[order[i] * batch], offsets[(order[i] + 1) * batch]
        pieces[0, i], pieces[1, i], pieces[2, i] = start, stop, of_table[0, i]
        pieces[3, i], pieces[4, i] = of_table[1, i], 0
        if of_table[0, i] != of_table[0, head]:
            head = i
        pieces[4, head] += stop - start


@compiled(types.UniTuple(i8, 2)(in88, out88))
def cut_pieces(pieces: np.ndarray, spans: np.ndarray) -> tuple[int, int]:
    """Cut pieces (see `name_rows`) into at most as many `spans` as there are (see `Room`), of as
    many whole tables each; some tables without an id belong to none. How many spans these are, and
    the most ids of a table."""
    tables, most = 0, 0
    for piece in range(pieces.shape[1]):
        tables += pieces[4, piece] > 0
        most = max(most, pieces[4, piece])
    piece, table, start, found = 0, 0, 0, 0
    for nth in range(len(spans)):
        wanted, first, stop = tables * (nth + 1) // len(spans), -1, start
        while piece < pieces.shape[1] and (table < wanted or pieces[4, piece] == 0):
            if pieces[4, piece] > 0:
                table += 1
                first = first if first >= 0 else piece
            stop += pieces[4, piece]
            piece += 1
        if first >= 0:
            spans[found, 0], spans[found, 1] = first, piece
            spans[found, 2], spans[found, 3] = start, stop
            start = stop
            found += 1
    return found, most


@compiled(i8(in8, in88, i8, out4, i8, out8, out4, out4))
def name_direct(
    ids: np.ndarray,
    pieces: np.ndarray,
    piece: int,
    table: np.ndarray,
    count: int,
    distinct: np.ndarray,
    labels: np.ndarray,
    counts: np.ndarray,
) -> int:
    """`name_rows` of one piece, whose table has no more rows than `table`: the label of each."""
    offset, rows, start = pieces[2, piece], np.uint64(pieces[3, piece]), pieces[0, piece]
    ids, labels = ids[start : pieces[1, piece]], labels[start : pieces[1, piece]]
    for i in range(len(ids)):
        row = at(ids[i])
        if row >= rows:
            return -1 - (start + i)
        label = table[row]
        if label < 0:
            label = table[row] = count
            distinct[at(count)], counts[at(count)] = ids[i] + offset, 0
            count += 1
        counts[at(label)] += 1
        labels[i] = label
    return count


@compiled(i8(in8, in88, i8, out8, i8, i8, i8, out8, out4, out4))
def name_hashed(
    ids: np.ndarray,
    pieces: np.ndarray,
    piece: int,
    table: np.ndarray,
    bits: int,
    base: int,
    count: int,
    distinct: np.ndarray,
    labels: np.ndarray,
    counts: np.ndarray,
) -> int:
    """`name_rows` of one piece by a hash table of 2^`bits` entries: row << `bits` | label - `base`,
    -1 for none."""
    offset, rows, start = pieces[2, piece], np.uint64(pieces[3, piece]), pieces[0, piece]
    one, mask = np.uint64(1), np.uint64((1 << bits) - 1)
    ids, labels = ids[start : pieces[1, piece]], labels[start : pieces[1, piece]]
    for i in range(len(ids)):
        row = ids[i]
        if np.uint64(row) >= rows:
            return -1 - (start + i)
        key = np.uint64(row) * _FIRST
        place = (key ^ (key >> _HALF)) & mask
        entry = table[place]
        while entry >= 0 and entry >> bits != row:
            place = (place + one) & mask
            entry = table[place]
        label = base + (entry & np.int64(mask))
        if entry < 0:
            label = count
            table[place] = (row << bits) | (count - base)
            distinct[at(count)], counts[at(count)] = row + offset, 0
            count += 1
        counts[at(label)] += 1
        labels[i] = label
    return count


@compiled(i8(in8, in88, i8, i8, out4, out8, out8, out4, out4))
def name_rows(
    ids: np.ndarray,
    pieces: np.ndarray,
    first: int,
    last: int,
    direct: np.ndarray,
    hashed: np.ndarray,
    distinct: np.ndarray,
    labels: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Distinct rows of the pieces from `first` to `last` - 1, table by table by first occurrence.

    `ids` int64 `[n]`; `pieces` int64 `[5, P]`: where each begins and ends, the row of its id 0, how
    many rows its table has, and how many ids it and those pieces that follow on the same table
    have, 0 for these. `direct` int32 and `hashed` int64: scratch, a power of two >= 2 and >= 2 x
    the most of these: the labels of a table's rows where they fit, else a hash table of them.
    Writes `distinct`, int64, how often each occurs to `counts`, and each id's place among them to
    `labels`, int32; `[n]` all three. Returns how many rows are distinct; or -1 - i for an id i that
    its table has not.
    """
    count, base, bits = 0, 0, 1
    for piece in range(first, last):
        rows, room = pieces[3, piece], pieces[4, piece]
        if room > 0:
            base, bits = count, 1
            while 1 << bits < 2 * room:
                bits += 1
            if rows <= 1 << bits:
                direct[:rows] = -1
            else:
                hashed[: 1 << bits] = -1
        if rows <= 1 << bits:
            count = name_direct(ids, pieces, piece, direct, count, distinct, labels, counts)
        else:
            own = (hashed, bits, base, count, distinct, labels, counts)
            count = name_hashed(ids, pieces, piece, *own)
        if count < 0:
            break
    return count


@compiled(i8(i8, i8))
def shelf_of(local: int, bits: int) -> int:
    """On which of 2^`bits` shelves of its home a local row is, at place `local` >> `bits` there.

    Every run of 2^`bits` local rows visits every shelf once.
    """
    key = np.uint64(local >> bits) * _FIRST
    key = (key ^ (key >> _SOME)) * _SECOND
    return (local + np.int64(key >> _TOP)) & ((1 << bits) - 1)


@compiled(types.void(in8, in8, out8, out8))
def shelve(local: np.ndarray, shape: np.ndarray, shelves: np.ndarray, numbers: np.ndarray) -> None:
    """The shelf of each local row of a home of `shape` (see `Homes.shapes`), and how its part
    numbers it."""
    for i in range(len(local)):
        shelf = shelf_of(local[i], shape[0])
        shelves[i] = shelf
        numbers[i] = (shelf & ((1 << shape[1]) - 1)) * shape[2] + (local[i] >> shape[0])


class Homes(NamedTuple):
    """Where the rows of a group are at home, on one of `world` ranks (`layout.RowLayout`).

    `shapes` int64 `[2, 4]`, of the homes of replicated rows, and of those of sharded ones: each has
    2^b shelves, of which 2^i consecutive ones are a part; a shelf has so many places; and which
    number the first shelf of home 0 has, followed by those of home 1, ... Replicated, where some
    rows are `sharded`, are those `known` (int64, ascending), which their homes number `local`
    (int32); `starts` and `shift`: see `find_row`.
    """

    world: int
    sharded: bool
    shapes: np.ndarray
    known: np.ndarray
    local: np.ndarray
    starts: np.ndarray
    shift: int


_homes = types.NamedTuple([i8, types.boolean, out88, out8, out4, out4, i8], Homes)


class Room(NamedTuple):
    """Scratch for n ids in at most k spans, which share no table. `spans` int64 `[k, 4]`: from
    which piece on, up to which; from which of the rows below on, up to which, its distinct ones
    are.

    `direct` int32 and `hashed` int64, `[k, size]`: see `name_rows`. Of each row `[n]`: `rows`
    int64; `occurs`, how many ids it has; `numbers`, how its part numbers it, and its shelf,
    `shelves`, int32. `counts` and `firsts` int64 `[k, 2, S]`: how many rows of a span are on each
    shelf, and how many ids these have, and where both begin. `about` int32 `[n, 2]`: see
    `order_ids`.
    """

    spans: np.ndarray
    direct: np.ndarray
    hashed: np.ndarray
    rows: np.ndarray
    occurs: np.ndarray
    numbers: np.ndarray
    shelves: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    about: np.ndarray


_room = types.NamedTuple([out88, out44, out88, out8, out4, out4, out4, out888, out888, out44], Room)


@compiled(i8(i8, in8, in4, i8))
def find_row(row: int, known: np.ndarray, starts: np.ndarray, shift: int) -> int:
    """Where a row is in `known` (int64, ascending), -1 where it is not.

    `starts` int32 `[B + 1]`: how many of `known` are below b << `shift`, for b = 0 to B.
    """
    bucket = row >> shift
    if bucket < 0 or bucket >= len(starts) - 1:
        return -1
    low, high = np.int64(starts[bucket]), np.int64(starts[bucket + 1])
    while low < high:
        middle = (low + high) >> 1
        if known[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low if low < starts[bucket + 1] and known[low] == row else -1


@compiled(types.UniTuple(i8, 2)(i8, i8))
def home_of(row: int, world: int) -> tuple[int, int]:
    """The home of a row, and its local number there: those of `layout.RowLayout`."""
    block = np.uint64(row) // np.uint64(world)
    key = (block ^ (block >> _HALF)) * _GOLDEN
    key = (key ^ (key >> _HALF)) * _OTHER
    home = (np.uint64(row) + (key >> _LAST)) % np.uint64(world)
    return np.int64(home), np.int64(block)


@compiled(types.void(_homes, _room, i8))
def shelve_span(homes: Homes, room: Room, span: int) -> None:
    """How its part numbers each row of one of `room.spans`, its shelf, and the span's `counts`."""
    first, last = room.spans[span, 2], room.spans[span, 3]
    rows, occurs = room.rows[first:last], room.occurs[first:last]
    numbers, shelves = room.numbers[first:last], room.shelves[first:last]
    counts = room.counts[span]
    counts[:] = 0
    for i in range(len(rows)):
        home, local, region = np.int64(0), rows[i], 0
        if homes.world > 1:
            home, local = home_of(rows[i], homes.world)
        if homes.sharded:
            place = find_row(rows[i], homes.known, homes.starts, homes.shift)
            if place < 0:
                region = 1
            else:
                local = np.int64(homes.local[place])
        bits, inner = homes.shapes[region, 0], homes.shapes[region, 1]
        shelf = shelf_of(local, bits)
        numbers[i] = (shelf & ((1 << inner) - 1)) * homes.shapes[region, 2] + (local >> bits)
        shelf += homes.shapes[region, 3] + (home << bits)
        shelves[i] = shelf
        counts[0, at(shelf)] += 1
        counts[1, at(shelf)] += occurs[i]


@compiled(i8(in8, in88, i8, _homes, _room, out4))
def name_span(
    ids: np.ndarray, pieces: np.ndarray, span: int, homes: Homes, room: Room, labels: np.ndarray
) -> int:
    """`name_rows` of the pieces of one of `room.spans`, of which it then knows the end, and
    `shelve_span`."""
    first, last = room.spans[span, 0], room.spans[span, 1]
    start, stop = room.spans[span, 2], room.spans[span, 3]
    rows, occurs = room.rows[start:stop], room.occurs[start:stop]
    scratch = room.direct[span], room.hashed[span]
    count = name_rows(ids, pieces, first, last, scratch[0], scratch[1], rows, labels, occurs)
    if count >= 0:
        room.spans[span, 3] = start + count
        shelve_span(homes, room, span)
    return count


@compiled(types.void(out888, out888, out8, out8))
def order_shelves(
    counts: np.ndarray, firsts: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> None:
    """Where rows and ids of each span begin on each shelf, `firsts`, which has `counts` there (see
    `Room`); where each shelf does, `starts` int64 `[S + 1]`, which has `sizes` rows, int64
    `[S]`."""
    rows = ids = 0
    for shelf in range(counts.shape[2]):
        starts[shelf] = rows
        for span in range(len(counts)):
            firsts[span, 0, shelf], firsts[span, 1, shelf] = rows, ids
            rows += counts[span, 0, shelf]
            ids += counts[span, 1, shelf]
        sizes[shelf] = rows - starts[shelf]
    starts[counts.shape[2]] = rows


@compiled(types.void(_room, i8, i8, out4, out4, out4))
def divide_span(
    room: Room,
    span: int,
    start: int,
    divided: np.ndarray,
    places: np.ndarray,
    segments: np.ndarray,
) -> None:
    """Sort the rows of one of `room.spans` by shelf, stably; see `shelve_span`.

    `room.firsts`: where the first of these of each shelf is to be, and the first id, and then the
    places after the last. Writes `room.numbers` to `divided`, where the ids of each begin to
    `segments`, and where each row is now to `places` int32 `[R]`, from `start` on.
    """
    first, last = room.spans[span, 2], room.spans[span, 3]
    numbers, shelves = room.numbers[first:last], room.shelves[first:last]
    own, occurs = places[start : start + last - first], room.occurs[first:last]
    firsts = room.firsts[span]
    for i in range(len(shelves)):
        shelf = at(shelves[i])
        place, begin = firsts[0, shelf], firsts[1, shelf]
        firsts[0, shelf], firsts[1, shelf] = place + 1, begin + occurs[i]
        divided[at(place)], segments[at(place)], own[i] = numbers[i], begin, place


# -----------------------------------------------------------------------------
# What occurs where, and what is among what.


@compiled(i8(in88, i8, i8, i8, i8, in4, in4, in4, in4, in1, out44, out4, out4))
def order_ids(
    pieces: np.ndarray,
    first: int,
    last: int,
    begin: int,
    end: int,
    labels: np.ndarray,
    places: np.ndarray,
    canonical: np.ndarray,
    segments: np.ndarray,
    missing: np.ndarray,
    about: np.ndarray,
    positions: np.ndarray,
    order: np.ndarray,
) -> int:
    """Canonical indices of the ids, and the ids sorted by the rows that were asked for, stably.

    Of the pieces from `first` to `last` - 1 (see `name_rows`), `labels` int32 `[n]`: the distinct
    row of each id, which is the one at `places[begin + label]` that was asked for, whose ids begin
    at `segments`, and whose index is `canonical` there; `missing` uint8, by that: whether it is not
    cached. `about` int32 `[R, 2]`: scratch, as `places` from `begin` to `end` - 1 those of these
    pieces. Writes int32 `[n]`: `positions`, and the places of these ids in `order`. Returns how
    many ids are of rows that are missing.
    """
    missed, places, about = 0, places[begin:end], about[begin:end]
    for label in range(len(places)):
        place = at(places[label])
        row, begin = canonical[place], segments[place]
        about[label, 0], about[label, 1] = row, begin
        missed += (segments[place + at(1)] - begin) * missing[at(row)]
    for piece in range(first, last):
        start, stop = pieces[0, piece], pieces[1, piece]
        named, found = labels[start:stop], positions[start:stop]
        for i in range(len(named)):
            label = at(named[i])
            found[i], place = about[label, 0], about[label, 1]
            about[label, 1] = place + 1
            order[at(place)] = start + i
    return missed


@compiled(types.void(out4, out4, out1, out4))
def decode_slots(
    slots: np.ndarray, fetch: np.ndarray, missing: np.ndarray, fetched: np.ndarray
) -> None:
    """Make of `slots` as homes tell them (`HomeDecision.told`), int32 `[U]`, what they are. Those
    of rows to fetch go to `fetched` (int32 `[m]`), the rows to `fetch` (int32 `[m]`), and a one to
    `missing` (uint8) for each."""
    count = 0
    for i in range(len(slots)):
        if slots[i] < 0:
            slots[i] = ~slots[i]
            fetch[at(count)], fetched[at(count)], missing[i] = i, slots[i], 1
            count += 1


@compiled(types.void(in4, in4, out1, out4))
def mark(slots: np.ndarray, fetch: np.ndarray, missing: np.ndarray, fetched: np.ndarray) -> None:
    """The `slots` (int32) of the rows `fetch` (int32 `[m]`), to `fetched` (int32 `[m]`), and a one
    in `missing` (uint8) for each."""
    for i in range(len(fetch)):
        missing[at(fetch[i])], fetched[i] = 1, slots[at(fetch[i])]
