"""What one rank asks the homes for, and its plan of what they decide. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from distcache.errors import PlanError
from distcache.layout import RowLayout
from distcache.planner import request_loops as loops
from distcache.planner.home import HomeDecision, Parts
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.planner.shard import FETCHED, ShardParts, as_tensor, shard_plan
from distcache.planner.threads import ALONE, Threads
from distcache.step_plan import StepPlan


@dataclass(frozen=True)
class Asked:
    """The distinct rows of one region that a rank names in a step.

    `rows`: for each home, int32, as its parts number them, by shelf; `counts` int64 `[W, shelves]`:
    how many are on each.
    """

    rows: tuple[np.ndarray, ...]
    counts: np.ndarray


Spans = list[tuple[int, int, int, int]]
"""Spans of pieces that share no row: from which piece on, up to which, and the ranks of its rows,
from which on, up to which."""


@dataclass(frozen=True)
class RowRequest:
    """The R distinct rows that one rank names in a step, by home, then shelf, then first
    occurrence; those that are `replicated` before those that are `sharded`, if a group has any.

    The ids are in `pieces` (see `request_loops.name_rows`), and these in `spans`. `labels` int32
    `[n]`: the rank of each id's row in its span by first occurrence; `places` int32 `[R]`: where
    the row of each rank is among those asked for; `segments` int32 `[R + 1]`: where the ids of each
    that is asked for begin, sorted by these.
    """

    replicated: Asked
    sharded: Asked | None
    pieces: np.ndarray
    spans: Spans
    labels: np.ndarray
    places: np.ndarray
    segments: np.ndarray


@dataclass(frozen=True)
class HomePart:
    """What one home tells one rank about a step: its `HomeDecision.told` (of a rank alone, which
    has them, its slots), the canonical index of every row that the rank asked it for, and how many
    rows are `fetched`.

    Of sharded rows: nothing `told`, and as `reply` that of `replies_to_all`.
    """

    told: np.ndarray
    reply: np.ndarray
    fetched: int = 0


_ALIGNED = 128
"""Numbers at whose multiples the tensors of an arena begin: 512 bytes, as those of a device do."""

_ID_S = 1e-8
"""What both loops over ids take for one of them, about, seconds on a core."""

_MOST_BITS = 63
"""Bits of what a hash table says of a row: its number, and its label."""


def one_piece(count: int) -> np.ndarray:
    """The pieces of `count` ids that are rows themselves; see `request_loops.name_rows`."""
    rows = 1 << _MOST_BITS - (2 * max(count, 1)).bit_length()
    return np.array([[0], [count], [0], [rows], [count]])


class RankPlanner:
    """Plans what one rank does for one group: `request` in stream order, then `assemble`.

    `hot`: the replicated rows of a group with sharded ones; None: all are replicated. `parts` of
    homes, for replicated and for sharded rows; None: one. `pinned`: whether a device takes what is
    planned from where it lies. Scratch is kept from one call to the next.
    """

    def __init__(
        self,
        layout: RowLayout,
        hot: ReplicatedRows | None = None,
        parts: Sequence[Parts | None] = (None, None),
        threads: Threads = ALONE,
        pinned: bool = False,
    ) -> None:
        self._world, self._threads, self._pinned = layout.world_size, threads, pinned
        regions = parts[:1] if hot is None else parts
        both = [of or Parts(0, layout.most_rows) for of in regions]
        self._shelves = [1 << of.shelves for of in both]
        shapes = np.zeros((len(both), 4), np.int64)
        shapes[:, :3], shapes[1:, 3] = [of.shape for of in both], self._world * self._shelves[0]
        none = np.empty(0, np.int32)
        known = (np.empty(0, np.int64), none, none, 0) if hot is None else hot.known
        self._homes = loops.Homes(self._world, hot is not None, shapes, *known)
        self._room = self._make_room(0, 2)

    def _make_room(self, ids: int, table: int) -> loops.Room:
        """Scratch for so many ids, and tables of so many entries."""
        spans, shelves = self._threads.count, self._world * sum(self._shelves)
        cuts, hashed = np.empty((spans, 4), np.int64), np.empty((spans, table), np.int64)
        direct, about = (np.empty(shape, np.int32) for shape in ((spans, table), (ids, 2)))
        rows, three = np.empty(ids, np.int64), np.empty((3, ids), np.int32)
        counts = np.empty((2, spans, 2, shelves), np.int64)
        return loops.Room(cuts, direct, hashed, rows, *three, *counts, about)

    def _name(self, ids: np.ndarray, pieces: np.ndarray, labels: np.ndarray) -> Spans:
        """Find the distinct rows of the ids, and where these are at home, whole tables in each
        thread; the spans. Raises PlanError for an id that its table has not."""
        calls = self._threads.calls(self._threads.count, _ID_S * len(ids))
        spans, most = loops.cut_pieces(pieces, self._room.spans[:calls])
        size = 1 << (2 * max(int(most), 1) - 1).bit_length()
        held = len(self._room.rows), self._room.direct.shape[1]
        if len(ids) > held[0] or size > held[1]:  # requests before this one still need theirs
            self._room = self._make_room(max(len(ids), held[0]), max(size, held[1]))
            loops.cut_pieces(pieces, self._room.spans[:calls])
        room, found, begin = self._room, [], 0
        of = [(ids, pieces, span, self._homes, room, labels) for span in range(spans)]
        counts = self._threads.each(loops.name_span, of)
        for (first, last, *_), count in zip(room.spans.tolist(), counts, strict=False):
            if count < 0:
                at = -1 - count
                raise PlanError(f"id {at} is {ids[at]}: ids must lie within their tables")
            found.append((first, last, begin, begin + count))
            begin += count
        return found

    def request(self, ids: np.ndarray, pieces: np.ndarray | None = None) -> RowRequest:
        """What it asks for the ids (int64 `[n]`) of its local batch; `pieces`: see
        `request_loops.name_rows`; None: the ids are rows. Raises PlanError for an id that its table
        has not."""
        pieces = one_piece(len(ids)) if pieces is None else pieces
        ids, world = np.ascontiguousarray(ids, dtype=np.int64), self._world
        labels = np.empty(len(ids), np.int32)
        spans, room = self._name(ids, pieces, labels), self._room
        shelves = room.counts.shape[2]
        starts, sizes = np.empty(shelves + 1, np.int64), np.empty(shelves, np.int64)
        loops.order_shelves(room.counts[: len(spans)], room.firsts, starts, sizes)
        count = spans[-1][3] if spans else 0
        divided, places = np.empty((2, count), np.int32)
        segments = np.empty(count + 1, np.int32)
        segments[-1] = len(ids)
        out = divided, places, segments
        of_each = [(room, span, of[2], *out) for span, of in enumerate(spans)]
        self._threads.each(loops.divide_span, of_each)
        asked: list[Asked | None] = [None, None]
        first = 0
        for region, own in enumerate(self._shelves):
            last = first + world * own
            edges = starts[first : last + 1 : own].tolist()
            rows = tuple([divided[edges[home] : edges[home + 1]] for home in range(world)])
            asked[region] = Asked(rows, sizes[first:last].reshape(world, own))
            first = last
        return RowRequest(*asked, pieces, spans, labels, places, segments)

    def occurrences(
        self,
        request: RowRequest,
        canonical: np.ndarray,
        missing: np.ndarray,
        positions: np.ndarray,
        order: np.ndarray,
    ) -> int:
        """Fill `positions` and `order` of a `StepPlan`, int32; how many ids are `missing`.

        `canonical` int32 `[R]`: the canonical index of each row that was asked for; `missing`
        uint8, by that: whether it is not cached.
        """
        named = np.ascontiguousarray(canonical, np.int32), request.segments, missing
        about, labels, places = self._room.about, request.labels, request.places
        of_each = [
            (request.pieces, *span, labels, places, *named, about, positions, order)
            for span in request.spans
        ]
        return sum(self._threads.each(loops.order_ids, of_each))

    def _laid_out(self, sizes: Sequence[int]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """An arena for so many numbers each, and its parts."""
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        arena = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._pinned)
        whole = arena.numpy()
        return arena, [whole[at : at + size] for at, size in zip(starts, sizes, strict=False)]

    def assemble(
        self,
        request: RowRequest,
        parts: Sequence[HomePart],
        own: HomeDecision,
        move_after: int,
        sharded: ShardParts | None = None,
    ) -> StepPlan:
        """Its plan from its request, every home's part in rank order, and its own home's decision.

        `sharded`: what the homes said of the sharded rows, if the group has any.
        """
        home_counts = tuple([len(part.told) for part in parts])
        base = list(accumulate(home_counts, initial=0))
        total = leaf_rows = base[-1]
        asked, shard = [part.reply for part in parts], None
        if sharded is not None:
            shard = shard_plan(sharded, request.sharded.rows, move_after)
            leaf_rows = total + shard.rows
            asked.append(np.arange(total, leaf_rows, dtype=np.int32))
        fetch_counts = tuple([part.fetched for part in parts])
        count, sizes = len(request.labels), list[int]()
        if self._world > 1:  # else these are there, and are not copied
            sizes = [total, len(request.places), sum(map(len, own.replies))]
        arena, views = self._laid_out([count, count, sum(fetch_counts), *sizes])
        positions, order, fetched, *joined = views
        slots, touched, sources = joined or (None, None, None)
        touched = _joined(asked, [*base[:-1], 0], touched)
        sources = _joined(own.replies, out=sources)
        missing = np.zeros(leaf_rows, np.uint8)
        if slots is None:
            slots, fetch = (np.ascontiguousarray(of, np.int32) for of in (own.slots, own.fetch))
            loops.mark(slots, fetch, missing, fetched)
        else:
            _joined([part.told for part in parts], out=slots)
            fetch = np.empty(len(fetched), np.int32)
            loops.decode_slots(slots, fetch, missing, fetched)
        if sharded is not None:
            missing[total:] = (sharded.joined & FETCHED) != 0
        missed = self.occurrences(request, touched, missing, positions, order)
        return StepPlan(
            step=own.step,
            kind=own.kind,
            positions=torch.from_numpy(positions),
            order=torch.from_numpy(order),
            touched=as_tensor(touched),
            segments=torch.from_numpy(request.segments),
            touched_counts=tuple([len(part.reply) for part in parts]),
            slots=torch.from_numpy(slots),
            home_counts=home_counts,
            source_rows=as_tensor(sources),
            source_counts=tuple([len(reply) for reply in own.replies]),
            fetch=torch.from_numpy(fetch),
            fetch_slots=torch.from_numpy(fetched),
            fetch_counts=fetch_counts,
            fetch_rows=as_tensor(own.fetch_rows, np.int64),
            evict_slots=as_tensor(own.evict_slots),
            evict_rows=as_tensor(own.evict_rows, np.int64),
            move_after=move_after,
            arena=arena,
            lookup_hits=count - missed,
            shard=shard,
        )


def next_move_after(step: int, prefetch: int, latest_uses: Sequence[int], before: int) -> int:
    """The step after whose `apply` the movement of `step` may start (DESIGN: holds).

    `latest_uses`: latest last use among each home's victims; `before`: the value of the step
    before, since movement stays in order.
    """
    return max(step - prefetch - 1, before, -1, *latest_uses)


def _joined(
    parts: Sequence[np.ndarray],
    base: Sequence[int] | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The parts of all homes, in `out` where that is given, else without a copy where it is one;
    `base`: they are indices (int32) that each home counts from 0, and are counted from its own."""
    if out is None and len(parts) == 1:
        return parts[0]
    found, end = np.concatenate(parts, out=out, dtype=None if out is not None else np.int32), 0
    for part, start in zip(parts, base or (), strict=False):
        end += len(part)
        if start:
            found[end - len(part) : end] += np.int32(start)
    return found
