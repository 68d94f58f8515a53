"""Sharded rows that several ranks of another node named: between nodes once, then on inside it.

A row's *carrier* is the first rank of the node that named it, counted round the node from
`Nodes.peer` of the row's home on. The home sends the row to it alone, and it hands the row to its
mates: the two levels of hierarchical all-to-alls (as Tutel's, arXiv 2206.03382), but only for rows
that several ranks named. So a row is sent as often as when each rank got it from its home, and a
row that one rank of a node named takes no second hop.

What a home tells is one mask for each row that a rank of such a node asked for: a bit for each rank
of the node that named it. Who carries a row and to whom it goes follows from that on all sides, and
rows go from mate to mate in the order of their numbers, which both know. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.comm.nodes import Nodes

MOST_RANKS = 64
"""Ranks of a node that a mask has bits for; larger nodes get every row from its home."""

_ANY = np.uint8(255)
"""In place of the carrier of a row that one rank named alone."""


@dataclass(frozen=True)
class Routes:
    """Which way sharded rows go from and to `rank` of `nodes`."""

    nodes: Nodes
    rank: int

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.nodes.of(self.rank)

    @property
    def local(self) -> int:
        """This rank among its node's."""
        return self.rank - self.nodes.firsts[self.node]

    @property
    def mates(self) -> int:
        """L: ranks of this node."""
        return self.nodes.sizes[self.node]

    @property
    def hands_on(self) -> bool:
        """Whether this node's ranks hand rows to one another."""
        return relays(self.mates)

    @property
    def runs(self) -> tuple[int, ...]:
        """As in `ShardPlan`: of this rank as a home."""
        found: list[int] = []
        for node, size in enumerate(self.nodes.sizes):
            found += [size] if self.reached_once(node) else [1] * size
        return tuple(found)

    def reached_once(self, node: int) -> bool:
        """Whether this home's rows go once to `node`."""
        return node != self.node and relays(self.nodes.sizes[node])

    def numbers(self, home: int, rows: int | np.ndarray) -> int | np.ndarray:
        """int32 numbers that `home` sends this rank for the masks of `rows` rows; see `pack`."""
        if self.nodes.of(home) == self.node or not self.hands_on:
            return 0 * rows
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
