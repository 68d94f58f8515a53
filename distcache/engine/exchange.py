"""The planners' conversation: headers, requests to homes, decisions of the homes."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product

import numpy as np
import torch

from distcache.comm.failure import describe
from distcache.comm.link import PLANNING, CollectiveCounters, Link
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.errors import PeerError
from distcache.planner.assemble import HomePart, Request
from distcache.planner.home import HomeDecision
from distcache.planner.shard import Routes, make_routes, masks_for_all, pack, replies_to_all, unpack

# -----------------------------------------------------------------------------
# What a rank says at the start of an exchange of the planners, and what all of them then agree on.
#
# One header tells of a step that is asked for and of one that is decided, so that an end, a stop
# or
# an error of one rank is known to all at the same step.

KINDS = ("train", "eval")
"""Kinds of batches; any other is `len(KINDS)` in a header."""

ASKED, DECIDED, _ASKED_STEP, _DECIDED_STEP, _KIND, _INDEX, _DIGEST, SAMPLES, LEAD = range(9)
"""Places of a header's numbers: status of what is asked and of what is decided, their steps (-1
where there is none), kind and index of the local batch, digest, samples of the local batch; and how
many numbers these are. Rows asked for by group and home follow, then three numbers of each group:
rows, rows to fetch, latest use."""


class Status(IntEnum):
    """What a rank says of its part; the largest value decides."""

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
class Asking:
    """One rank's part of a step that is asked for. `kind`, `index` and `samples`: of its batch;
    `requests`: by group; none of them if `status` is not OK. `error`: why, if it is ERROR."""

    step: int
    status: Status = Status.OK
    kind: str = ""
    index: int = 0
    samples: int = 0
    requests: Sequence[Request] = ()
    error: BaseException | None = None


@dataclass(frozen=True)
class Deciding:
    """One rank's part of a step that is decided. `rows`: distinct rows of its home in each group;
    `decisions`: by group, none if `status` is not OK; `requests`: those that this rank asked with.
    `error`: why, if the status is ERROR."""

    step: int
    status: Status = Status.OK
    rows: Sequence[int] = ()
    decisions: Sequence[HomeDecision] = ()
    requests: Sequence[Request] = ()
    error: BaseException | None = None


@dataclass(frozen=True)
class Headers:
    """Those of all ranks, `table` int64 `[W, n]`; `rank`: the own one; `groups`: G."""

    table: np.ndarray
    rank: int
    groups: int

    @property
    def asked(self) -> np.ndarray:
        """Rows that each rank asks of each group of each home, `[W, G, W]`."""
        world = len(self.table)
        flat = self.table[:, LEAD : LEAD + self.groups * world]
        return flat.reshape(world, self.groups, world)

    @property
    def decided(self) -> np.ndarray:
        """Rows, rows to fetch and latest use of each home and group, `[W, G, 3]`."""
        world = len(self.table)
        return self.table[:, LEAD + self.groups * world :].reshape(world, self.groups, 3)

    def said(self, what: int) -> tuple[Status, tuple[int, ...]]:
        """The strongest status of `what`, `ASKED` or `DECIDED`, and who said it."""
        status = int(self.table[:, what].max())
        return Status(status), tuple(np.flatnonzero(self.table[:, what] == status).tolist())

    def compare(self, asked: Verdict | None, decided: Verdict | None) -> None:
        """Raise PeerError if the ranks are not at the same point, with what went wrong on one of
        them, if anything did: then their configurations are no matter."""
        verdicts = [verdict for verdict in (asked, decided) if verdict is not None]
        failed = [verdict for verdict in verdicts if verdict.status is Status.ERROR]
        columns = [_ASKED_STEP, _DECIDED_STEP]
        if not failed and any(verdict.status is Status.OK for verdict in verdicts):
            columns.append(_DIGEST)
        if not failed and asked is not None and asked.status is Status.OK:
            columns += [_KIND, _INDEX]
        why = "".join(f"; rank {verdict.ranks[0]} failed: {verdict.message}" for verdict in failed)
        mine = self.table[self.rank]
        for rank, other in enumerate(self.table):
            if (other[columns] != mine[columns]).any():
                raise PeerError(
                    f"rank {rank} plans {_point(other)}, but rank {self.rank} {_point(mine)}: "
                    f"the ranks run different configurations, data or package versions{why}"
                )


def make_header(
    asking: Asking | None, deciding: Deciding | None, digest: int, groups: int, world: int
) -> np.ndarray:
    """One rank's header, int64 `[n]`: of one length whatever it tells of."""
    header = np.zeros(LEAD + groups * (world + 3), dtype=np.int64)
    header[[_ASKED_STEP, _DECIDED_STEP, _DIGEST]] = -1, -1, digest
    if asking is not None:
        kind = KINDS.index(asking.kind) if asking.kind in KINDS else len(KINDS)
        about = asking.status, asking.step, kind, asking.index, asking.samples
        header[[ASKED, _ASKED_STEP, _KIND, _INDEX, SAMPLES]] = about
        for group, request in enumerate(asking.requests):
            header[LEAD + group * world :][:world] = request.counts
    if deciding is not None:
        header[[DECIDED, _DECIDED_STEP]] = deciding.status, deciding.step
        numbers = header[LEAD + groups * world :].reshape(groups, 3)
        if deciding.rows:
            numbers[:, 0] = deciding.rows
        for group, decision in enumerate(deciding.decisions):
            numbers[group, 1:] = len(decision.fetch), decision.latest_use
    return header


def _point(header: np.ndarray) -> str:
    """Where a rank stands, by its header."""
    asked, decided, kind, index, digest = header[
        [_ASKED_STEP, _DECIDED_STEP, _KIND, _INDEX, _DIGEST]
    ].tolist()
    status, points = Status(int(header[ASKED])), []
    if asked >= 0:
        name = f"{KINDS[kind] if kind < len(KINDS) else 'other'} batch {index}"
        name = name if status is Status.OK else status.name.lower()
        points.append(f"step {asked} ({name})")
    if decided >= 0:
        points.append(f"the decisions of step {decided}")
    return f"{' and '.join(points)} with digest {digest:#x}"


# -----------------------------------------------------------------------------
# The planners' conversation: headers, requests to homes, decisions to all. CPU group, one thread.
#
# One exchange takes a step's requests to their homes and the decisions on an earlier step to all
# ranks, in two collectives: the headers, then both together. All ranks make the same exchanges in
# the
# same order.

_WIRE, _WORDS = np.int32, 2
"""What travels, and how many of it a row (int64) is."""

_NONE = np.empty(0, dtype=_WIRE)


@dataclass(frozen=True)
class Decided:
    """What all homes decided about a step. `rows` int64 `[W, G]`: distinct rows by home and group
    (also if the verdict is TOO_LARGE), `fetched`: those of them to fetch. If it is OK, for every
    group: `parts`, those of all homes, and `latest_use`, the latest last use among all victims.
    `routes`: which way sharded rows go; `sent`: bytes of this rank's decisions.

    A group here is what is planned by itself: the replicated or the sharded rows of some tables."""

    verdict: Verdict
    rows: np.ndarray
    fetched: np.ndarray
    parts: list[list[HomePart]] = field(default_factory=list)
    latest_use: list[int] = field(default_factory=list)
    routes: Routes | None = None
    sent: int = 0


@dataclass(frozen=True)
class Told:
    """What an exchange told. `asked`: what the ranks agree on, None where none asked; if it is OK,
    for every group `named`, the rows that each rank names here, and of each rank `samples`, those
    of its batch. `decided`: None where nothing was to decide, or a rank stops. `sent`: bytes, but
    for those of this rank's decisions."""

    asked: Verdict | None
    named: list[list[np.ndarray]]
    samples: list[int]
    decided: Decided | None
    sent: int


class PlanExchange:
    """Requests and decisions of all groups over `link`; used by one thread on every rank.

    `fingerprint`: a number that must agree on all ranks (configuration). Each header carries it
    mixed with a digest of all decisions so far. `sharded`: groups whose homes keep their slots to
    themselves; of these a rank learns about its own rows alone (`replies_to_all`), and on a node
    that hands rows on which of its ranks named them, `masks_for_all`.
    """

    def __init__(
        self, link: Link, groups: int, fingerprint: int, sharded: Sequence[int] = ()
    ) -> None:
        self._link, self._groups = link, groups
        self._digest = fingerprint & 0x7FFFFFFF
        self._sharded = frozenset(sharded)
        self._routes = make_routes(link.world.nodes, link.world.rank)

    def exchange(self, asking: Asking | None, deciding: Deciding | None = None) -> Told:
        """Send each group's rows to their homes, and this home's decisions to all ranks.

        All ranks ask for the same step and decide the same one; all leave out either. Raises
        PeerError where they are not at the same point.
        """
        before = self._link.counters.planning_bytes
        headers = self._headers(asking, deciding)
        asked = self._verdict(headers, ASKED, asking)
        decided = self._verdict(headers, DECIDED, deciding)
        headers.compare(asked, decided)
        if asked is None or asked.status is not Status.OK:
            asking = None
        stops = any(v is not None and v.status is Status.STOP for v in (asked, decided))
        if stops or decided is None or decided.status is not Status.OK:
            deciding = None
        told = [] if deciding is None else self._told(deciding)
        named, by_home = self._deliver(headers, asking, deciding, told)
        own, result = self._sent(told), None
        if decided is not None and not stops:
            result = self._decided(headers.decided, decided, deciding, by_home, own)
        sent = self._link.counters.planning_bytes - before - own
        return Told(asked, named, headers.table[:, SAMPLES].tolist(), result, sent)

    def _headers(self, asking: Asking | None, deciding: Deciding | None) -> Headers:
        world = self._link.world
        own = make_header(asking, deciding, self._digest, self._groups, world.size)
        what = f"header of {_step(asking, deciding)}"
        table = self._link.all_gather(torch.from_numpy(own), PLANNING, what)
        return Headers(table.numpy(), world.rank, self._groups)

    def _verdict(
        self, headers: Headers, what: int, part: Asking | Deciding | None
    ) -> Verdict | None:
        """The strongest status of what all ranks have a `part` in."""
        if part is None:
            return None
        status, ranks = headers.said(what)
        if status is not Status.ERROR:
            return Verdict(status, ranks)
        text = None if part.error is None else describe(part.error)
        texts = self._link.gather_objects(text, "errors of the planners")
        return Verdict(status, ranks, str(texts[ranks[0]]))

    def _told(self, deciding: Deciding) -> list[list[np.ndarray]]:
        """What this home tells each rank: by group, the arrays of a `HomePart` in order."""
        of_groups = [self._for_ranks(*of_group) for of_group in enumerate(deciding.decisions)]
        return [[part for parts in to for part in parts] for to in zip(*of_groups, strict=True)]

    def _sent(self, told: list[list[np.ndarray]]) -> int:
        """Bytes of what this home tells other ranks."""
        mine = self._link.world.rank
        others = (part for rank, parts in enumerate(told) if rank != mine for part in parts)
        return _WIRE().itemsize * sum(len(part) for part in others)

    def _deliver(
        self,
        headers: Headers,
        asking: Asking | None,
        deciding: Deciding | None,
        told: list[list[np.ndarray]],
    ) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
        """The rows that each rank names here, by group; and pieces of each home's decisions."""
        size, groups = self._link.world.size, 0 if asking is None else self._groups
        outgoing: list[list[np.ndarray]] = [[] for _ in range(size)]
        lengths = np.zeros((size, 0), dtype=np.int64)
        if asking is not None:
            for home, parts in enumerate(outgoing):
                parts += [request.rows[home].view(_WIRE) for request in asking.requests]
            lengths = _WORDS * headers.asked[:, :, self._link.world.rank]
        if deciding is not None:
            for parts, of_rank in zip(outgoing, told, strict=True):
                parts += of_rank
            of_homes = self._lengths(headers.decided, deciding)
            lengths = np.concatenate((lengths, of_homes), axis=1)
        if asking is None and deciding is None:
            return [], []
        pieces = self._all_to_all(outgoing, lengths, f"plans of {_step(asking, deciding)}")
        named = [[of_rank[group].view(np.int64) for of_rank in pieces] for group in range(groups)]
        return named, [of_rank[groups:] for of_rank in pieces]

    def _lengths(self, numbers: np.ndarray, deciding: Deciding) -> np.ndarray:
        """Of the pieces of each home's decisions, `[W, 3 G]`."""
        size = self._link.world.size
        asked = np.array([request.counts for request in deciding.requests])
        lengths = np.concatenate([numbers[:, :, :2], asked.T[:, :, None]], axis=2)
        lengths[:, list(self._sharded), :2] = 0
        if self._routes is not None:
            for group, home in product(self._sharded, range(size)):
                lengths[home, group, 2] += self._routes.numbers(home, asked[group, home])
        return lengths.reshape(size, -1)

    def _decided(
        self,
        numbers: np.ndarray,
        verdict: Verdict,
        deciding: Deciding | None,
        by_home: list[list[np.ndarray]],
        sent: int,
    ) -> Decided:
        """What all homes decided; `deciding`: None where nothing was delivered."""
        rows, fetched = numbers[:, :, 0], numbers[:, :, 1]
        if deciding is None:
            return Decided(verdict, rows, fetched)
        homes = [
            [
                self._part_of(group, pieces, request.counts[home])
                for home, pieces in enumerate(by_home)
            ]
            for group, request in enumerate(deciding.requests)
        ]
        self._extend_digest(homes, numbers)
        latest = numbers[:, :, 2].max(0).tolist()
        return Decided(verdict, rows, fetched, homes, latest, self._routes, sent)

    def _for_ranks(self, group: int, decision: HomeDecision) -> list[tuple[np.ndarray, ...]]:
        """This home's part of one group for each rank, the arrays of a `HomePart` in order."""
        if group in self._sharded:
            return [(_NONE, _NONE, reply) for reply in self._with_masks(decision)]
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

    def _all_to_all(
        self, outgoing: list[list[np.ndarray]], lengths: np.ndarray, what: str
    ) -> list[list[np.ndarray]]:
        """Send each rank its parts (int32); from each the pieces of `lengths` `[W, n]`."""
        if len(outgoing) == 1:
            return [[part.astype(_WIRE, copy=False) for part in outgoing[0]]]
        flat = np.concatenate([part for parts in outgoing for part in parts], dtype=_WIRE)
        received = self._link.all_to_all(
            torch.from_numpy(flat),
            [sum(len(part) for part in parts) for parts in outgoing],
            lengths.sum(1).tolist(),
            PLANNING,
            what,
        )
        return _split(received.numpy(), lengths)

    def _extend_digest(self, homes: list[list[HomePart]], numbers: np.ndarray) -> None:
        """Mix in what all ranks know of a step's decisions."""
        if self._link.world.size == 1:
            return
        self._digest = zlib.crc32(np.ascontiguousarray(numbers), self._digest)
        for parts in homes:
            for part in parts:
                self._digest = zlib.crc32(np.ascontiguousarray(part.slots), self._digest)


def _step(asking: Asking | None, deciding: Deciding | None) -> str:
    """Where an exchange stands, for errors."""
    part = asking or deciding
    return "no step" if part is None else f"step {part.step}"


def _split(flat: np.ndarray, lengths: np.ndarray) -> list[list[np.ndarray]]:
    """Cut `flat` into `lengths[i][j]` long pieces, row by row."""
    pieces = np.split(flat, np.cumsum(lengths.reshape(-1))[:-1])
    width = lengths.shape[1]
    return [pieces[i : i + width] for i in range(0, len(pieces), width)]


# -----------------------------------------------------------------------------
# Global batches whose slices the ranks bring themselves: sizes are agreed step by step.

log = logging.getLogger(__name__)

_OK, _END, _ERROR = range(3)


def agreed_batches(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """The batches with their places among the slices of all ranks, until the first rank's end.

    For streams that nobody plans, from the main thread: one small exchange per batch. An error of
    one rank ends all.
    """
    link = Link(world, world.host_group, CollectiveCounters(), "the host group")
    iterator, number = iter(batches), 0
    while True:
        status, batch, error = _OK, None, None
        try:
            batch = next(iterator)
        except StopIteration:
            status = _END
        except Exception as caught:
            status, error = _ERROR, caught
        own = torch.tensor([status, 0 if batch is None else batch.ids.batch_size])
        headers = link.all_gather(own, PLANNING, f"sizes of batch {number}")
        worst = int(headers[:, 0].max())
        ranks = (headers[:, 0] == worst).nonzero().flatten().tolist()
        causes: list[str] = []
        if worst == _ERROR:  # told here, not left in the store: another run may follow this one
            what = "" if error is None else describe(error)
            causes = link.gather_objects(what, "why a rank stops")
        if error is not None:
            raise error
        if worst == _ERROR:
            raise PeerError(f"stopped because rank {ranks[0]} failed: {causes[ranks[0]]}")
        if worst == _END or batch is None:
            if batch is not None:
                log.warning(
                    "the data of rank %s ended at batch %d; this rank had more, which is left "
                    "unread",
                    ranks,
                    number,
                )
            return
        yield batch.among(headers[:, 1].tolist(), world.rank)
        number += 1
