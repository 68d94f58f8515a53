"""The planners' conversation: headers, requests to homes, decisions of the homes.

One exchange takes a step's requests to their homes and the decisions on an earlier step to all
ranks: on one node in one message, which its header leads, through memory (`comm.mail`); else
in two collectives of the CPU's group, the headers, then both together. One header tells of both
steps, so that an end, a stop or an error of one rank is known to all at the same step. All ranks
make the same exchanges in the same order, one at a time.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from distcache.comm.link import PLANNING, Link
from distcache.comm.mail import Mail, Pieces
from distcache.comm.rendezvous import describe
from distcache.errors import PeerError
from distcache.planner.home import HomeDecision
from distcache.planner.loops import fold
from distcache.planner.rank import HomePart
from distcache.planner.shard import make_routes, masks_for_all, pack, replies_to_all, unpack

if TYPE_CHECKING:
    from distcache.engine.step import Flight

log = logging.getLogger(__name__)

KINDS = ("train", "eval")
"""Kinds of batches; any other is `len(KINDS)` in a header."""

ASKED, DECIDED, _ASKED_STEP, _DECIDED_STEP, _KIND, _INDEX, _DIGEST, SAMPLES, LEAD = range(9)
"""Places of a header's numbers: status of what is asked and of what is decided, their steps (-1
where there is none), kind and index of the local batch, digest, samples of the local batch; and how
many numbers these are. Rows asked for by group, home and shelf follow, then three numbers of each
group: rows, rows to fetch, latest use."""

_WIRE = np.int32
"""What travels."""

_NONE = np.empty(0, dtype=_WIRE)

Came = tuple[Pieces, Pieces]
"""What came from one rank: for this one alone, the rows of each group that it names of this home,
and its reply as a home for each; and for all, the slots of each."""

Lengths = tuple[list[int], list[int]]
"""How long the pieces of one rank are."""


class Status(IntEnum):
    """What a rank says of its part; the largest value decides."""

    OK = 0
    END = 1
    STOP = 2
    TOO_LARGE = 3
    ERROR = 4


_STATUSES = tuple(Status)


@dataclass(frozen=True)
class Verdict:
    """What the ranks agree on: the strongest status and the ranks that said it.

    `message`: with ERROR, what went wrong on the first of them.
    """

    status: Status
    ranks: tuple[int, ...]
    message: str = ""


@dataclass(frozen=True)
class Part:
    """One rank's part of a step that is asked for, or of one that is decided.

    `flight`: the step, if there is one, whose `asked` go to their homes when it is asked for;
    `error`: why, if `status` is ERROR. Of what is decided: `rows`, the distinct rows of this home
    in each group (also with TOO_LARGE), and, if `status` is OK, its `decisions` by group.
    """

    step: int
    status: Status = Status.OK
    flight: Flight | None = None
    error: BaseException | None = None
    rows: Sequence[int] = ()
    decisions: Sequence[HomeDecision] = ()


@dataclass
class Told:
    """What an exchange told; a group here is what is planned by itself: the replicated or the
    sharded rows of some tables.

    `asked`: what the ranks agree on (OK where none asked); if rows came, for every group `named`,
    those that each rank names here, with their `counts` int64 `[W, shelves]` (`rank.Asked`), and
    of each rank `samples`, those of its batch. `decided`:
    None where nothing was to decide, or a rank stops. Of what all homes decided: `rows` int64
    `[W, G]`, distinct rows by home and group (also if the verdict is TOO_LARGE), `fetched`, those
    of them to fetch, and, if it is OK, for every group `parts`, those of all homes, and
    `latest_use`, the latest last use among all victims. `decision_bytes`: of this rank's decisions
    to others; `sent`: all other bytes.
    """

    asked: Verdict
    decided: Verdict | None
    samples: list[int]
    rows: np.ndarray
    fetched: np.ndarray
    named: list[list[np.ndarray]] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    parts: list[list[HomePart]] = field(default_factory=list)
    latest_use: list[int] = field(default_factory=list)
    sent: int = 0
    decision_bytes: int = 0


class PlanExchange:
    """Requests and decisions of all groups over `link`, one exchange after the other.

    `shelves`: of each group's homes; `fingerprint`: a number that must agree on all ranks
    (configuration). Each header carries it mixed with a digest of all decisions so far. `sharded`:
    groups whose homes keep their slots to themselves; of these a rank learns about its own rows
    alone (`replies_to_all`), and on a node that hands rows on which of its ranks named them,
    `planner.shard.masks_for_all`.
    """

    def __init__(
        self, link: Link, shelves: Sequence[int], fingerprint: int, sharded: Sequence[int] = ()
    ) -> None:
        self._link, self._groups, self._shelves = link, len(shelves), list(shelves)
        self._size, self._rank = link.world.size, link.world.rank
        self._digest = fingerprint & 0x7FFFFFFF
        self._sharded = frozenset(sharded)
        self._mail: Mail | None = None
        if link.world.nodes.count == 1 and self._size > 1:
            try:
                self._mail = Mail(link.world, link.counters, link.name)
            except (OSError, PeerError) as error:  # on all ranks
                log.warning("planners exchange over gloo, which takes longer: %s", error)
        self.routes = make_routes(link.world.nodes, link.world.rank)
        """Which way sharded rows go."""

    def exchange(self, asking: Part | None, deciding: Part | None = None) -> Told:
        """Send each group's rows to their homes, and this home's decisions to all ranks.

        All ranks ask for the same step and decide the same one; all leave out either. Raises
        PeerError where they are not at the same point.
        """
        among_all = self._size > 1 or self._sharded
        return (self._among_all if among_all else self._alone)(asking, deciding)

    def close(self) -> None:
        """Let go of what ranks of a node share."""
        if self._mail is not None:
            self._mail.close()

    def _among_all(self, asking: Part | None, deciding: Part | None) -> Told:
        """`exchange` of several ranks, or about sharded rows."""
        before, size, at = self._link.counters.planning_bytes, self._size, _step(asking, deciding)
        header, came = self._header(asking, deciding), list[Came]()
        own, slots, told_bytes = self._outgoing(asking, deciding)
        if self._mail is not None:
            came = self._mail.swap(own, [header.view(_WIRE), *slots], f"plans of {at}")
            table = np.stack([common.pop(0) for _, common in came]).view(np.int64)
        else:
            sent = torch.from_numpy(header)
            table = self._link.start_all_gather(sent, PLANNING, f"header of {at}")().numpy()
        lead = table[:, :LEAD].tolist()
        asked, decided = self._verdict(lead, ASKED, asking), self._verdict(lead, DECIDED, deciding)
        self._compare(table, lead, asked, decided)
        ends = LEAD + sum(self._shelves) * size
        numbers = table[:, ends:].reshape(size, self._groups, 3)
        if Status.STOP in (asked and asked.status, decided and decided.status):
            decided = None  # nothing is decided any more: some rank does not go on
        samples = [of_rank[SAMPLES] for of_rank in lead]
        said = asked or Verdict(Status.OK, ())
        told = Told(said, decided, samples, numbers[:, :, 0], numbers[:, :, 1])
        brings = asked is not None and asked.status is Status.OK
        decides = decided is not None and decided.status is Status.OK
        if brings or decides:
            counts = self._counts(table)
            if self._mail is None:
                came = self._far(own, slots, self._lengths(table, lead, counts, deciding), at)
            if brings:
                told.counts = counts
                of_ranks = [alone[: self._groups] for alone, _ in came]
                told.named = [list(of_group) for of_group in zip(*of_ranks, strict=True)]
            if decides:
                told.decision_bytes = told_bytes
                self._take(told, numbers, deciding, came)
        told.sent = self._link.counters.planning_bytes - before - told.decision_bytes
        return told

    def _alone(self, asking: Part | None, deciding: Part | None) -> Told:
        """`exchange` of a rank that is all there are: nothing is sent, and no rows are sharded."""
        asked, decided = (
            part and self._verdict([[part.status]], 0, part) for part in (asking, deciding)
        )
        if Status.STOP in (asked and asked.status, decided and decided.status):
            decided = None
        rows = np.array([deciding.rows if deciding else ()])
        told = Told(asked or Verdict(Status.OK, ()), decided, [], rows, rows)
        if asking and asking.flight and told.asked.status is Status.OK:
            told.samples = [asking.flight.batch.ids.batch_size]
            told.named = [[asks.rows[0]] for asks in asking.flight.asked]
            told.counts = [asks.counts for asks in asking.flight.asked]
        if deciding and decided and decided.status is Status.OK:
            of = deciding.decisions
            told.parts = [[HomePart(own.slots, own.replies[0], len(own.fetch))] for own in of]
            told.latest_use = [own.latest_use for own in of]
        return told

    def _header(self, asking: Part | None, deciding: Part | None) -> np.ndarray:
        """This rank's header, int64 `[n]`: of one length whatever it tells of."""
        size, groups = self._size, self._groups
        ends = LEAD + size * sum(self._shelves)
        header = np.zeros(ends + groups * 3, dtype=np.int64)
        lead, numbers, start = [0] * LEAD, [0] * (groups * 3), LEAD
        lead[_ASKED_STEP] = lead[_DECIDED_STEP] = -1
        lead[_DIGEST] = self._digest
        if asking is not None:
            lead[ASKED], lead[_ASKED_STEP] = asking.status, asking.step
            if asking.flight is not None:
                batch = asking.flight.batch
                lead[_KIND] = KINDS.index(batch.kind) if batch.kind in KINDS else len(KINDS)
                lead[_INDEX], lead[SAMPLES] = batch.index, batch.ids.batch_size
                for shelves, asks in zip(self._shelves, asking.flight.asked, strict=True):
                    header[start : start + size * shelves] = asks.counts.reshape(-1)
                    start += size * shelves
        if deciding is not None:
            lead[DECIDED], lead[_DECIDED_STEP] = deciding.status, deciding.step
            if deciding.rows:
                numbers[::3] = deciding.rows
            for group, decision in enumerate(deciding.decisions):
                numbers[3 * group + 1] = len(decision.fetch)
                numbers[3 * group + 2] = decision.latest_use
        header[:LEAD], header[ends:] = lead, numbers
        return header

    def _verdict(self, lead: list[list[int]], what: int, part: Part | None) -> Verdict | None:
        """The strongest status of what all ranks have a `part` in, and who said it; `lead`: of the
        headers of all."""
        if part is None:
            return None
        said = [own[what] for own in lead]
        status = _STATUSES[max(said)]
        ranks = tuple([rank for rank, own in enumerate(said) if own == status])
        if status is not Status.ERROR:
            return Verdict(status, ranks)
        text = None if part.error is None else describe(part.error)
        texts = self._link.gather_objects(text, "errors of the planners")
        return Verdict(status, ranks, str(texts[ranks[0]]))

    def _compare(
        self,
        table: np.ndarray,
        lead: list[list[int]],
        asked: Verdict | None,
        decided: Verdict | None,
    ) -> None:
        """Raise PeerError if the ranks are not at the same point, with what went wrong on one of
        them, if anything did: then their configurations are no matter."""
        verdicts = [verdict for verdict in (asked, decided) if verdict is not None]
        failed = [verdict for verdict in verdicts if verdict.status is Status.ERROR]
        columns = [_ASKED_STEP, _DECIDED_STEP]
        if not failed and Status.OK in [verdict.status for verdict in verdicts]:
            columns.append(_DIGEST)
        if not failed and asked is not None and asked.status is Status.OK:
            columns += [_KIND, _INDEX]
        points = [[own[column] for column in columns] for own in lead]
        if points.count(points[self._rank]) < self._size:
            rank = next(rank for rank, at in enumerate(points) if at != points[self._rank])
            why = "".join(f"; rank {v.ranks[0]} failed: {v.message}" for v in failed)
            mine = _point(table[self._rank])
            raise PeerError(
                f"rank {rank} plans {_point(table[rank])}, but rank {self._rank} {mine}: "
                f"the ranks run different configurations, data or package versions{why}"
            )

    def _outgoing(
        self, asking: Part | None, deciding: Part | None
    ) -> tuple[list[Pieces], Pieces, int]:
        """By rank what it alone gets, the rows of each group that its home is asked for and the
        replies to it; the slots of each group, which all get; bytes of decisions to others."""
        requests, replies, slots = list[Pieces](), list[Pieces](), Pieces()
        if asking is not None and asking.flight is not None:
            requests = [asks.rows for asks in asking.flight.asked]
        told, others = 0, self._size - 1
        for group, decision in enumerate(deciding.decisions if deciding else ()):
            sharded = group in self._sharded
            slots.append(_NONE if sharded else decision.told)
            replies.append(self._with_masks(decision) if sharded else decision.replies)
            lengths = [len(reply) for reply in replies[-1]]
            told += sum(lengths) - lengths[self._rank] + others * len(slots[-1])
        alone = [list(of) for of in zip(*requests, *replies, strict=True)]
        return alone or [[]] * self._size, slots, _WIRE().itemsize * told

    def _with_masks(self, decision: HomeDecision) -> list[np.ndarray]:
        """The reply about sharded rows for each rank, followed by its masks, if any."""
        replies, routes = replies_to_all(decision), self.routes
        if routes is None:
            return replies
        masks = masks_for_all(decision.replies, len(decision.slots), routes)
        return [
            reply if of_rank is None else np.concatenate((reply, pack(of_rank)))
            for reply, of_rank in zip(replies, masks, strict=True)
        ]

    def _counts(self, table: np.ndarray) -> list[np.ndarray]:
        """Of each group, how many rows ranks ask this home for, int64 `[W, shelves]`; `table`: the
        headers of all."""
        size, start, counts = self._size, LEAD, list[np.ndarray]()
        for shelves in self._shelves:
            by_home = table[:, start : start + size * shelves].reshape(size, size, shelves)
            counts.append(by_home[:, self._rank])
            start += size * shelves
        return counts

    def _lengths(
        self,
        table: np.ndarray,
        lead: list[list[int]],
        counts: list[np.ndarray],
        deciding: Part | None,
    ) -> list[Lengths]:
        """How long what comes from each rank is."""
        start = LEAD + sum(self._shelves) * self._size
        requests = np.stack([of_group.sum(1) for of_group in counts], 1).tolist()
        rows, asked = table[:, start::3].tolist(), _asked(deciding) if deciding else []
        lengths = []
        for home, of_home in enumerate(requests):
            replies, slots = list[int](), list[int]()
            if deciding is not None and lead[home][DECIDED] == Status.OK:
                for group, of_group in enumerate(asked):
                    count, there = of_group[home], rows[home][group]
                    if group in self._sharded:
                        there = 0
                        count += 0 if self.routes is None else self.routes.numbers(home, count)
                    replies.append(count)
                    slots.append(there)
            lengths.append(([*of_home, *replies], slots))
        return lengths

    def _far(self, own: list[Pieces], slots: Pieces, lengths: list[Lengths], at: str) -> list[Came]:
        """What `Mail.swap` brings but for headers, by a collective, for ranks without a mail."""
        outgoing = [[*parts, *slots] for parts in own]
        flat = np.concatenate([_NONE, *[part for parts in outgoing for part in parts]], dtype=_WIRE)
        sends, sent = [sum(map(len, parts)) for parts in outgoing], torch.from_numpy(flat)
        receives, what = [sum(map(sum, of_rank)) for of_rank in lengths], f"plans of {at}"
        received = self._link.start_all_to_all(sent, sends, receives, PLANNING, what)().numpy()
        ends = accumulate([n for of_rank in lengths for of in of_rank for n in of], initial=0)
        pieces = (received[first:last] for first, last in pairwise(ends))
        return [([*islice(pieces, len(a))], [*islice(pieces, len(b))]) for a, b in lengths]

    def _take(
        self,
        told: Told,
        numbers: np.ndarray,
        deciding: Part,
        came: list[Came],
    ) -> None:
        """What all homes decided, from the pieces of each; mixed into the digest of them all."""
        fetched = told.fetched.T.tolist()
        told.parts = [
            [
                HomePart(slots[group], alone[group - self._groups], count)  # after any requests
                for (alone, slots), count in zip(came, of_group, strict=True)
            ]
            for group, of_group in enumerate(fetched)
        ]
        if self.routes is not None:
            for of_group, homes in zip(_asked(deciding), told.parts, strict=True):
                for home, (count, part) in enumerate(zip(of_group, homes, strict=True)):
                    if len(part.reply) > count:
                        masks = unpack(part.reply[count:], count, self.routes.mates)
                        homes[home] = replace(part, reply=part.reply[:count], masks=masks)
        self._digest = zlib.crc32(np.ascontiguousarray(numbers), self._digest)
        slots = [fold(part.told) for homes in told.parts for part in homes]
        self._digest = zlib.crc32(np.array(slots), self._digest)
        told.latest_use = [max(of) for of in zip(*numbers[:, :, 2].tolist(), strict=True)]


def _asked(part: Part) -> list[list[int]]:
    """How many rows this rank asked for, by group and home, `[G][W]`."""
    return [asks.counts.sum(1).tolist() for asks in part.flight.asked]


def _step(asking: Part | None, deciding: Part | None) -> str:
    """Where an exchange stands, for errors."""
    part = asking or deciding
    return "no step" if part is None else f"step {part.step}"


def _point(header: np.ndarray) -> str:
    """Where a rank stands, by its header."""
    places = [_ASKED_STEP, _DECIDED_STEP, _KIND, _INDEX, _DIGEST]
    asked, decided, kind, index, digest = header[places].tolist()
    status, points = Status(int(header[ASKED])), []
    if asked >= 0:
        name = f"{KINDS[kind] if kind < len(KINDS) else 'other'} batch {index}"
        name = name if status is Status.OK else status.name.lower()
        points.append(f"step {asked} ({name})")
    if decided >= 0:
        points.append(f"the decisions of step {decided}")
    return f"{' and '.join(points)} with digest {digest:#x}"
