"""The planners' conversation: headers, requests to homes, decisions to all. CPU group, one thread.

Every exchange starts with a header from each rank, so that an end, a stop or an error of one rank
is known to all at the same step. All ranks make the same exchanges in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product

import numpy as np
import torch

from distcache.comm.counters import PLANNING
from distcache.comm.failure import describe
from distcache.comm.link import Link
from distcache.errors import PeerError
from distcache.planner.assemble import HomePart, Request
from distcache.planner.home import HomeDecision
from distcache.planner.regions import replies_to_all
from distcache.planner.relays import Routes, make_routes, masks_for_all, pack, unpack

REQUESTS, DECISIONS = 0, 1
"""The two kinds of exchange."""

KINDS = ("train", "eval")
"""Kinds of batches; any other is `KINDS[-1] + 1` in a header."""

_HEADER = 6
"""Numbers of a header: status, exchange, step, digest, kind of the batch and its index."""


class Status(IntEnum):
    """What a rank says at the start of an exchange; the largest value decides."""

    OK = 0
    END = 1
    STOP = 2
    TOO_LARGE = 3
    ERROR = 4


@dataclass(frozen=True)
class Verdict:
    """What the ranks agree on: the strongest status and the ranks that said it.

    `message`: with ERROR, what went wrong on the first of them.
    """

    status: Status
    ranks: tuple[int, ...]
    message: str = ""


@dataclass(frozen=True)
class Decided:
    """What all homes decided about a step. `rows` int64 `[W, G]`: distinct rows by home and group
    (also if the verdict is TOO_LARGE), `fetched`: those of them to fetch. If it is OK, for every
    group: `parts`, those of all homes, and `latest_use`, the latest last use among all victims.
    `routes`: which way sharded rows go.

    A group here is what is planned by itself: the replicated or the sharded rows of some tables."""

    verdict: Verdict
    rows: np.ndarray
    fetched: np.ndarray
    parts: list[list[HomePart]] = field(default_factory=list)
    latest_use: list[int] = field(default_factory=list)
    routes: Routes | None = None


class PlanExchange:
    """Requests and decisions of all groups over `link`; used by one thread on every rank.

    `fingerprint`: a number that must agree on all ranks (configuration). Each header carries it
    mixed with a digest of all decisions so far. `sharded`: groups whose homes keep their slots to
    themselves; of these a rank learns about its own rows alone (`replies_to_all`), and on a node
    that hands rows on which of its ranks named them, `relays.masks_for_all`.
    """

    def __init__(
        self, link: Link, groups: int, fingerprint: int, sharded: Sequence[int] = ()
    ) -> None:
        self._link, self._groups = link, groups
        self._digest = fingerprint & 0x7FFFFFFF
        self._sharded = frozenset(sharded)
        self._routes = make_routes(link.world.nodes, link.world.rank)

    def requests(
        self,
        status: Status,
        step: int,
        batch: tuple[str, int],
        requests: Sequence[Request],
        error: BaseException | None = None,
    ) -> tuple[Verdict, list[list[np.ndarray]]]:
        """Send each group's rows to their homes.

        `batch`: kind and index of the local batch; `requests`: by group, none if `status` is not
        OK; `error`: why, if it is ERROR. Returns the verdict and, if it is OK, for every group the
        rows that each rank names here.
        """
        size = self._link.world.size
        counts = np.zeros((self._groups, size), dtype=np.int64)
        if requests:
            counts[:] = [request.counts for request in requests]
        kind = KINDS.index(batch[0]) if batch[0] in KINDS else len(KINDS)
        about = [status, REQUESTS, step, self._digest, kind, batch[1]]
        headers = self._headers(about, counts)
        verdict = self._verdict(headers, error)
        if verdict.status is not Status.OK:
            return verdict, []
        incoming = headers[:, _HEADER : _HEADER + counts.size].reshape(size, self._groups, size)
        incoming = incoming[:, :, self._link.world.rank]
        parts = [request.rows[home] for home in range(size) for request in requests]
        received = self._all_to_all(
            parts, counts.sum(0), incoming.sum(1), np.int64, f"requests of step {step}"
        )
        by_rank = _split(received, incoming)
        return verdict, [[by_rank[rank][g] for rank in range(size)] for g in range(self._groups)]

    def decisions(
        self,
        status: Status,
        step: int,
        rows: Sequence[int],
        decisions: Sequence[HomeDecision],
        requests: Sequence[Request],
        error: BaseException | None = None,
    ) -> Decided:
        """Send this home's decisions to all ranks.

        `rows`: distinct rows of this home in each group; `decisions`: by group, none if `status`
        is not OK; `error`: why, if it is ERROR.
        """
        size = self._link.world.size
        numbers = np.zeros((self._groups, 3), dtype=np.int64)
        numbers[:, 0] = rows
        if decisions:
            numbers[:, 1:] = [(len(d.fetch), d.latest_use) for d in decisions]
        headers = self._headers([status, DECISIONS, step, self._digest, 0, 0], numbers)
        verdict = self._verdict(headers, error)
        numbers = headers[:, _HEADER : _HEADER + numbers.size].reshape(size, self._groups, 3)
        if verdict.status is not Status.OK:
            return Decided(verdict, numbers[:, :, 0], numbers[:, :, 1])
        parts, outgoing = [], []
        told = [self._for_ranks(group, decision) for group, decision in enumerate(decisions)]
        for to in range(size):
            mine = [part for of_group in told for part in of_group[to]]
            parts += mine
            outgoing.append(sum(len(part) for part in mine))
        asked = np.array([request.counts for request in requests])
        lengths = np.concatenate([numbers[:, :, :2], asked.T[:, :, None]], axis=2)
        lengths[:, list(self._sharded), :2] = 0
        if self._routes is not None:
            for group, home in product(self._sharded, range(size)):
                lengths[home, group, 2] += self._routes.numbers(home, asked[group, home])
        lengths = lengths.reshape(size, -1)
        received = self._all_to_all(
            parts, outgoing, lengths.sum(1), np.int32, f"decisions of step {step}"
        )
        by_home = _split(received, lengths)
        homes = [
            [self._part_of(group, by_home[home], asked[group, home]) for home in range(size)]
            for group in range(self._groups)
        ]
        self._extend_digest(homes, numbers)
        latest = numbers[:, :, 2].max(0).tolist()
        return Decided(verdict, numbers[:, :, 0], numbers[:, :, 1], homes, latest, self._routes)

    def _for_ranks(self, group: int, decision: HomeDecision) -> list[tuple[np.ndarray, ...]]:
        """This home's part of one group for each rank, the arrays of a `HomePart` in order."""
        if group in self._sharded:
            return [(reply,) for reply in self._with_masks(decision)]
        return [(decision.slots, decision.fetch, reply) for reply in decision.replies]

    def _with_masks(self, decision: HomeDecision) -> list[np.ndarray]:
        """The reply about sharded rows for each rank, followed by its masks, if any."""
        replies, routes = replies_to_all(decision), self._routes
        if routes is None:
            return replies
        masks = masks_for_all(decision.replies, len(decision.slots), routes)
        return [
            reply if of_rank is None else np.concatenate((reply, pack(of_rank)))
            for reply, of_rank in zip(replies, masks, strict=True)
        ]

    def _part_of(self, group: int, pieces: list[np.ndarray], asked: int) -> HomePart:
        """What a home told of a group; `pieces`: of all groups; `asked`: rows of its reply."""
        slots, fetch, reply = pieces[3 * group : 3 * group + 3]
        if len(reply) == asked or self._routes is None:
            return HomePart(slots, fetch, reply)
        masks = unpack(reply[asked:], asked, self._routes.mates)
        return HomePart(slots, fetch, reply[:asked], masks)

    def _headers(self, about: list[int], numbers: np.ndarray) -> np.ndarray:
        """Every rank's header, `about` and `numbers`; all exchanges' are of one length."""
        own = np.zeros(_HEADER + self._groups * max(3, self._link.world.size), dtype=np.int64)
        own[:_HEADER] = about
        own[_HEADER : _HEADER + numbers.size] = numbers.reshape(-1)
        what = f"header of step {about[2]}"
        gathered = self._link.all_gather(torch.from_numpy(own), PLANNING, what)
        return torch.stack(gathered).numpy()

    def _verdict(self, headers: np.ndarray, error: BaseException | None) -> Verdict:
        """The strongest status. Raises PeerError if the ranks are not at the same point."""
        status = Status(int(headers[:, 0].max()))
        ranks = tuple(np.flatnonzero(headers[:, 0] == status).tolist())
        if status is Status.ERROR:
            text = None if error is None else describe(error)
            texts = self._link.gather_objects(text, "errors of the planners")
            return Verdict(status, ranks, str(texts[ranks[0]]))
        mine = self._link.world.rank
        compared = slice(1, _HEADER) if status is Status.OK else slice(1, 3)
        for rank, other in enumerate(headers):
            if (other[compared] != headers[mine][compared]).any():
                raise PeerError(
                    f"rank {rank} plans {_point(other)}, but rank {mine} {_point(headers[mine])}: "
                    "the ranks run different configurations, data or package versions"
                )
        return Verdict(status, ranks)

    def _all_to_all(
        self,
        parts: list[np.ndarray],
        send: Sequence[int],
        receive: Sequence[int],
        dtype: type,
        what: str,
    ) -> np.ndarray:
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        flat = flat.astype(dtype, copy=False)
        out = self._link.all_to_all(
            torch.from_numpy(flat),
            [int(count) for count in send],
            [int(count) for count in receive],
            PLANNING,
            what,
        )
        return out.numpy()

    def _extend_digest(self, homes: list[list[HomePart]], numbers: np.ndarray) -> None:
        """Mix in what all ranks know of a step's decisions."""
        if self._link.world.size == 1:
            return
        self._digest = zlib.crc32(np.ascontiguousarray(numbers), self._digest)
        for parts in homes:
            for part in parts:
                self._digest = zlib.crc32(np.ascontiguousarray(part.slots), self._digest)


def _point(header: np.ndarray) -> str:
    """Where a rank stands, by its header."""
    exchange, step, digest, kind, index = header[1:_HEADER].tolist()
    if exchange == DECISIONS:
        return f"the decisions of step {step} with digest {digest:#x}"
    name = KINDS[kind] if kind < len(KINDS) else "other"
    return f"step {step} ({name} batch {index}) with digest {digest:#x}"


def _split(flat: np.ndarray, lengths: np.ndarray) -> list[list[np.ndarray]]:
    """Cut `flat` into `lengths[i][j]` long pieces, row by row."""
    pieces = np.split(flat, np.cumsum(lengths.reshape(-1))[:-1])
    width = lengths.shape[1]
    return [pieces[i : i + width] for i in range(0, len(pieces), width)]
