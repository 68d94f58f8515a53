"""One rank's plan of the sharded rows of a step, and rows that go over the nodes once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from distcache.comm.world import Nodes
from distcache.layout import RowLayout
from distcache.planner.home import HomeDecision
from distcache.planner.victims import grouped
from distcache.step_plan import Relay, ShardPlan, Transfer

# -----------------------------------------------------------------------------
# Sharded rows that several ranks of another node named: between nodes once, then on inside it.
#
# A row's *carrier* is the first rank of the node that named it, counted round the node from
# `Nodes.peer` of the row's home on. The home sends the row to it alone, and it hands the row to
# its mates: the two levels of hierarchical all-to-alls (as Tutel's, arXiv 2206.03382), but only
# for rows that several ranks named. What a home tells is one mask for each row that a rank of such
# a node asked for: a bit for each rank of the node that named it. Who carries a row and to whom it
# goes follows from that on all sides; rows go from mate to mate in the order of their numbers.

MOST_RANKS = 64
"""Ranks of a node that a mask has bits for; larger nodes get every row from its home."""

_ANY = np.uint8(255)
"""In place of the carrier of a row that one rank named alone."""


class Routes:
    """Which way sharded rows go from and to `rank` of `nodes`.

    `node`: this rank's node; `local`: this rank among the `mates` ranks there, which hand rows to
    one another where `hands_on`; `runs`: as in `ShardPlan`, of this rank as a home.
    """

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self.nodes, self.rank, self.node = nodes, rank, nodes.of(rank)
        self.local, self.mates = rank - nodes.firsts[self.node], nodes.sizes[self.node]
        self.hands_on, sizes = relays(self.mates), enumerate(nodes.sizes)
        runs = [[size] if self.reached_once(node) else [1] * size for node, size in sizes]
        self.runs: tuple[int, ...] = tuple(chain(*runs))

    def reached_once(self, node: int) -> bool:
        """Whether this home's rows go once to `node`."""
        return node != self.node and relays(self.nodes.sizes[node])

    def numbers(self, home: int, rows: int) -> int:
        """int32 numbers that `home` sends this rank for the masks of `rows` rows; see `pack`."""
        if self.nodes.of(home) == self.node or not self.hands_on:
            return 0
        return -(-rows * mask_type(self.mates).itemsize // 4)


def make_routes(nodes: Nodes, rank: int) -> Routes | None:
    """The routes of `rank`; None where every row comes from its home: on one node, or where no node
    has several ranks."""
    return Routes(nodes, rank) if nodes.count > 1 and any(map(relays, nodes.sizes)) else None


def relays(size: int) -> bool:
    """Whether a node of `size` ranks hands rows on."""
    return 1 < size <= MOST_RANKS


def mask_type(size: int) -> np.dtype:
    """The smallest unsigned integer with a bit for each of `size` ranks."""
    return np.dtype(f"uint{max(8, 1 << (size - 1).bit_length())}")


def masks_for_all(
    replies: Sequence[np.ndarray], rows: int, routes: Routes
) -> list[np.ndarray | None]:
    """What a home tells each rank: for every row that it asked for, the ranks of its node that
    named it, a bit each, from bit 0 on by local rank; None for ranks that get no masks.

    `replies`: by rank, indices below `rows` of what it named (`HomeDecision.replies`).
    """
    found: list[np.ndarray | None] = []
    for node in range(routes.nodes.count):
        own = [replies[rank] for rank in routes.nodes.ranks(node)]
        if routes.reached_once(node):
            named = _named(own, rows)
            found += [named[reply] for reply in own]
        else:
            found += [None] * len(own)
    return found


def sent_by_home(replies: Sequence[np.ndarray], rows: int, routes: Routes) -> list[np.ndarray]:
    """Of every rank's `replies` those rows that this home sends to it, in their order."""
    found: list[np.ndarray] = []
    for node in range(routes.nodes.count):
        own = [replies[rank] for rank in routes.nodes.ranks(node)]
        if routes.reached_once(node):
            first = routes.nodes.peer(routes.rank, node) - routes.nodes.firsts[node]
            named, carrier = _named(own, rows), np.full(rows, _ANY)
            several = has_several(named)
            carrier[several] = carriers(named[several], first, len(own))
            taken = [carrier[reply] for reply in own]
            own = [
                reply[(by == local) | (by == _ANY)]
                for local, (reply, by) in enumerate(zip(own, taken, strict=True))
            ]
        found += own
    return found


def _named(replies: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """A mask for each of `rows` rows: the ranks of a node whose `replies` name it."""
    found = np.zeros(rows, mask_type(len(replies)))
    for local, reply in enumerate(replies):
        found[reply] |= found.dtype.type(1 << local)
    return found


def has_several(masks: np.ndarray) -> np.ndarray:
    """Which rows more than one rank named: indices, ascending."""
    return np.flatnonzero(masks & (masks - masks.dtype.type(1)))


def carriers(masks: np.ndarray, first: int | np.ndarray, size: int) -> np.ndarray:
    """The local rank, uint8, that carries each row that the ranks of `masks` (at least one) named.

    The first of them from local rank `first` (one, or one for each row) on, round the `size` ranks.
    """
    kind, start = masks.dtype, np.asarray(first, masks.dtype)
    left = masks << (kind.type(size) - start)  # shifts by all of the bits give 0
    turned = (masks >> start | left) & kind.type((1 << size) - 1)
    lowest = turned & (~turned + kind.type(1))
    steps = np.frexp(lowest.astype(np.float64))[1] - 1  # exact: powers of 2
    return ((np.asarray(first) + steps) % size).astype(np.uint8)


def pack(masks: np.ndarray) -> np.ndarray:
    """Masks as int32 numbers, `Routes.numbers` of them."""
    found = np.zeros(-(-masks.nbytes // 4) * 4, np.uint8)
    found[: masks.nbytes] = np.ascontiguousarray(masks).view(np.uint8)
    return found.view(np.int32)


def unpack(numbers: np.ndarray, rows: int, size: int) -> np.ndarray:
    """The masks of `rows` rows, of a node of `size` ranks, of what `pack` made."""
    kind = mask_type(size)
    return numbers.view(np.uint8)[: rows * kind.itemsize].copy().view(kind)


# -----------------------------------------------------------------------------
# The two regions of a cache: rows that every rank has, and rows that their homes alone have.
#
# A row is replicated when it is among the `hot` rows of its group, and sharded otherwise. Each
# home plans its rows of either region by themselves, in slots of their own. DESIGN, section 6;
# splitting replicated hot rows from a sharded tail is SCARS' idea (arXiv 2411.01611).

FETCHED = np.int32(1 << 30)
"""Flag of a reply: the row is fetched. The lower bits are one more than the step that named the row
before, 0 for none."""


class HotRows:
    """Rows, int64 `[K]`, ascending, and where to look for one among them (20 K to 36 K bytes); as a
    planner's layout, whose index then takes memory for these rows alone.

    Each home numbers its own 0, 1, ... in ascending order; `sizes` int64 `[W]`: how many each has.
    """

    def __init__(self, layout: RowLayout, rows: np.ndarray) -> None:
        self.rows, self.world_size = np.array(rows, dtype=np.int64), layout.world_size
        self.offsets = np.zeros(1, np.int64)  # they are of no table as a whole
        last = int(rows[-1]) if len(rows) else 0
        self._shift = max(0, last.bit_length() - len(rows).bit_length() - 2)
        edges = np.arange((last >> self._shift) + 2) << self._shift
        self._starts = np.searchsorted(self.rows, edges).astype(np.int32)
        order, self._begins = grouped(layout.home(self.rows), layout.world_size)
        self.sizes, self._by_home = np.diff(self._begins), self.rows[order]
        self._local = np.full(len(rows) + 1, -1, np.int32)
        """And, behind them, -1, which is that of place -1."""
        self._local[order] = np.arange(len(rows)) - np.repeat(self._begins[:-1], self.sizes)

    @property
    def most_rows(self) -> int:
        """Rows of the home that has most; 1 where none has any."""
        return max(1, *self.sizes.tolist())

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The place of each of `rows` int64 `[n]` among these, -1 where it is none; int32."""
        place = np.searchsorted(self.rows, rows)
        return np.where(np.append(self.rows, -1)[place] == rows, place, -1).astype(np.int32)

    def local(self, rows: np.ndarray) -> np.ndarray:
        """The number of each of `rows` at its home; -1 for one that is none of these."""
        return self._local[self.find(rows)]

    def row(self, home: int, local: np.ndarray) -> np.ndarray:
        """The row of each number: the inverse of `local`, at one home."""
        return self._by_home[self._begins[home] :][local]

    def rated(self, home: int, layout: RowLayout, classes: np.ndarray) -> np.ndarray:
        """The classes of a home's rows, uint8, of those by `layout`'s local indices there."""
        return classes[layout.local(self.row(home, np.arange(self.sizes[home])))]

    @property
    def known(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Those fields of `request_loops.Homes`."""
        return self.rows, self._local, self._starts, self._shift


@dataclass(frozen=True)
class ShardParts:
    """What one rank knows of the sharded rows of a step.

    `own`: its home's decision; `replies`: for each home, int32 for every row that this rank asked
    it for, see `replies_to_all`; `distinct`, `misses`: rows of all homes; `early`: whether rows may
    travel before the step; `routes`: where rows cross to a node once, and `masks`, what each home
    told of that.
    """

    own: HomeDecision
    replies: tuple[np.ndarray, ...]
    distinct: int
    misses: int
    early: bool
    routes: Routes | None = None
    masks: tuple[np.ndarray | None, ...] = ()

    @cached_property
    def joined(self) -> np.ndarray:
        """The replies of all homes, int32 `[N]`."""
        return np.concatenate(self.replies)


def replies_to_all(decision: HomeDecision) -> list[np.ndarray]:
    """What a home tells each rank about every sharded row that it asked for, int32; see
    `FETCHED`."""
    about = decision.previous + np.int32(1)
    about[decision.fetch] |= FETCHED
    return [about[reply] for reply in decision.replies]


def nothing(label: tuple[int, str], world: int) -> HomeDecision:
    """The decision about replicated rows where a group has none; `label`: step and kind."""
    none = np.empty(0, np.int32)
    return HomeDecision(*label, (none,) * world, *(none,) * 5, -1, none)


# -----------------------------------------------------------------------------
# One rank's plan of the sharded rows of a step: what it sends as a home, what it gets.

_BEFORE_ALL = -2
"""A step after which every row was named, as it were: all rows are late."""


def shard_plan(parts: ShardParts, asked: Sequence[np.ndarray], move_after: int) -> ShardPlan:
    """The plan from `parts`; `asked`: the sharded rows (int32, as parts number them) that this rank
    named, by home.

    A row that no step after `move_after` names before this one has its last value once movement may
    start, so it may travel then (BagPipe's rule, SOSP 2023, that only what the next step shares is
    urgent, turned around).
    """
    own, routes = parts.own, parts.routes
    counts, sources = [len(rows) for rows in asked], np.concatenate(own.replies)
    sent = own.replies if routes is None else sent_by_home(own.replies, len(own.slots), routes)
    sent_counts = [len(reply) for reply in sent]
    bound = move_after if parts.early else _BEFORE_ALL
    flat = sources if routes is None else np.concatenate(sent)
    arrivals = None  # each row comes from its home
    if routes is not None and routes.hands_on:
        arrivals = Arrivals(routes, parts.masks, asked)

    def transfer(goes: np.ndarray, comes: np.ndarray) -> Transfer:
        """That of the rows that are to go, and to come; bool, of all of them."""
        sends, places = goes.nonzero()[0], comes.nonzero()[0]
        slots, to = as_tensor(own.slots[flat[sends]]), by_piece(sends, sent_counts)
        if arrivals is None:
            return Transfer(slots, to, as_tensor(places), by_piece(places, counts))
        return Transfer(slots, to, as_tensor(places), *arrivals.divide(places))

    goes, comes = own.previous[flat] > bound, (parts.joined & ~FETCHED) > bound + 1
    return ShardPlan(
        distinct=parts.distinct,
        misses=parts.misses,
        counts=tuple(counts),
        slots=as_tensor(own.slots),
        source_rows=as_tensor(sources),
        source_counts=tuple(len(reply) for reply in own.replies),
        early=transfer(~goes, ~comes) if parts.early else None,
        late=transfer(goes, comes),
        fetch_slots=as_tensor(own.fetch_slots),
        fetch_rows=as_tensor(own.fetch_rows, np.int64),
        evict_slots=as_tensor(own.evict_slots),
        evict_rows=as_tensor(own.evict_rows, np.int64),
        runs=() if routes is None else routes.runs,
    )


def by_piece(places: np.ndarray, lengths: Sequence[int]) -> tuple[int, ...]:
    """How many of `places`, ascending, are in each of the pieces of `lengths` that follow one
    another."""
    return tuple(np.diff(np.searchsorted(places, np.cumsum(lengths)), prepend=0).tolist())


class Arrivals:
    """Which rank of the node brings each of this rank's N sharded rows, and to whom they go on."""

    def __init__(
        self, routes: Routes, masks: Sequence[np.ndarray | None], asked: Sequence[np.ndarray]
    ) -> None:
        """`masks`: what each home told (`masks_for_all`); `asked`: the rows, by home."""
        nodes, rows, counts = routes.nodes, np.concatenate(asked), [len(part) for part in asked]
        self._routes, self._counts = routes, counts
        none = [np.zeros(count, mask_type(routes.mates)) for count in counts]
        named = np.concatenate(
            [zeros if told is None else told for zeros, told in zip(none, masks, strict=True)]
        )
        several = has_several(named)
        several = several[np.argsort(rows[several])]
        first = [
            nodes.peer(home, routes.node) - nodes.firsts[routes.node] for home in range(len(counts))
        ]
        homes = np.searchsorted(np.cumsum(counts), several, side="right")
        by = carriers(named[several], np.array(first)[homes], routes.mates)
        brought = by != routes.local
        self._from_mate = np.zeros(len(rows), bool)
        self._from_mate[several] = brought
        order, _ = grouped(by, routes.mates)
        order, own = order[brought[order]], several[~brought]
        self._brought, self._by = several[order], by[order]
        """`[k]`: rows that mates bring, and who does; by mate, then ascending by number."""
        masks = named[own] & ~named.dtype.type(1 << routes.local)
        self._to, of = np.nonzero(
            masks >> np.arange(routes.mates, dtype=masks.dtype)[:, None] & masks.dtype.type(1)
        )
        self._passed = own[of]
        """`[p]`: rows that this rank hands on, those `_to` the same mate together, as above."""

    def divide(self, places: np.ndarray) -> tuple[tuple[int, ...], Relay]:
        """For the rows `places` of a transfer, ascending: how many each home sends here, and the
        second leg."""
        mates, total = self._routes.mates, len(self._from_mate)
        direct = places[~self._from_mate[places]]
        at, moves = np.full(total, -1), np.zeros(total, bool)
        at[direct], moves[places] = np.arange(len(direct)), True
        come, go = moves[self._brought], moves[self._passed]
        brought = self._brought[come]
        at[brought] = len(direct) + np.arange(len(brought))
        relay = Relay(
            as_tensor(at[self._passed[go]]),
            tuple(np.bincount(self._to[go], minlength=mates).tolist()),
            tuple(np.bincount(self._by[come], minlength=mates).tolist()),
            as_tensor(at[places]),
        )
        return by_piece(direct, self._counts), relay


def as_tensor(values: np.ndarray, dtype: type = np.int32) -> torch.Tensor:
    """Contiguous, without a copy where it is that already."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype))
