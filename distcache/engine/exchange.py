"""The planners' exchange: requests to homes, and decisions of the homes to all ranks.

One exchange takes a step's requests to their homes and the decisions on an earlier step to all
ranks, in two all-to-alls of the planning group: a header of fixed size, which tells how long the
rest is, then the rest. One header tells of both steps, so that an end, a stop or an error of one
rank is known to all at the same step. All ranks make the same exchanges in the same order, one at
a time. A rank that is alone takes the same way; nothing is sent then.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from distcache.comm.link import PLANNING, Link
from distcache.comm.rendezvous import describe
from distcache.errors import PeerError
from distcache.planner.home import HomeDecision
from distcache.planner.loops import fold
from distcache.planner.rank import HomePart
from distcache.planner.shard import replies_to_all

if TYPE_CHECKING:
    from distcache.engine.step import StepContext

KINDS = ("train", "eval")
"""Kinds of batches; any other is `len(KINDS)` in a header."""

NO_STEP = -1
"""Step of a header that asks for none, or decides none."""

_WIRE = np.dtype(np.int32)
"""Type of all that follows the headers."""

_NONE = np.empty(0, dtype=_WIRE)


def header_type(shelves: Sequence[int]) -> np.dtype:
    """The structured type of the header that each rank sends to each other one.

    int64 throughout: `asked` and `decided`, the `Status` of either part, with their steps (NO_STEP
    where there is none); `kind`, `index` and `samples` of the local batch; `digest`. `requests`
    `[sum(shelves)]`: rows that are requested from the receiver, by group and shelf. By group:
    `rows` of the sender as a home, how many of them are `fetched`, `latest_use` of its victims.
    """
    numbers = ("asked", "decided", "asked_step", "decided_step", "kind", "index", "samples")
    fields: list[tuple] = [(name, np.int64) for name in (*numbers, "digest")]
    fields.append(("requests", np.int64, (sum(shelves),)))
    fields += [(name, np.int64, (len(shelves),)) for name in ("rows", "fetched", "latest_use")]
    return np.dtype(fields)


class Status(IntEnum):
    """Status of one rank's part of an exchange; the largest value of all ranks decides."""

    OK = 0
    END = 1
    STOP = 2
    TOO_LARGE = 3
    ERROR = 4


_STATUSES = tuple(Status)


@dataclass(frozen=True)
class Verdict:
    """The strongest status of all ranks, and the ranks that sent it.

    `message`: with ERROR, the error of the first of them.
    """

    status: Status
    ranks: tuple[int, ...]
    message: str = ""


@dataclass(frozen=True)
class Part:
    """One rank's part of a step that is asked for, or of one that is decided.

    `context`: the step, if there is one, whose `asked` go to their homes when it is asked for;
    `error`: why, if `status` is ERROR. Of what is decided: `rows`, the distinct rows of this home
    in each group (also with TOO_LARGE), and, if `status` is OK, its `decisions` by group.
    """

    step: int
    status: Status = Status.OK
    context: StepContext | None = None
    error: BaseException | None = None
    rows: Sequence[int] = ()
    decisions: Sequence[HomeDecision] = ()


@dataclass
class ExchangeReply:
    """The messages that one exchange delivered to this rank.

    A group here is planned by itself: the replicated or the sharded rows of some tables.

    `asked`: the verdict on the step that is asked for (OK where none is). `samples`: of the batch
    of each rank. With OK, by group: `named`, the rows that each rank requests here, int32, and
    their `counts`, int64 `[W, shelves]` (`rank.Asked`).
    `decided`: the verdict on the step that is decided; None where none is, or where a rank stops.
    `rows` int64 `[W, G]`: distinct rows by home and group (also with TOO_LARGE); `fetched` `[W,
    G]`: how many of them to fetch. With OK, by group: `parts`, those of all homes, and
    `latest_use`, the latest last use among the victims of all homes.
    `decision_bytes`: bytes of this rank's decisions to others; `sent`: all other bytes to them.
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
    alone (`replies_to_all`).
    """

    def __init__(
        self, link: Link, shelves: Sequence[int], fingerprint: int, sharded: Sequence[int] = ()
    ) -> None:
        self._link = link
        self._size = link.world.size
        self._rank = link.world.rank
        self._groups = len(shelves)
        self._shelf_bounds = np.cumsum([0, *shelves]).tolist()
        self._header = header_type(shelves)
        self._digest = fingerprint & 0x7FFFFFFF
        self._sharded = frozenset(sharded)

    def exchange(self, asking: Part | None, deciding: Part | None = None) -> ExchangeReply:
        """Send each group's rows to their homes, and this home's decisions to all ranks.

        All ranks ask for the same step and decide the same one; all leave out either. Raises
        PeerError where they are not at the same point.
        """
        before = self._link.counters.planning_bytes
        step = _step(asking, deciding)
        headers = self._exchange_headers(self._encode(asking, deciding), step)
        asked = self._verdict(headers["asked"].tolist(), asking)
        decided = self._verdict(headers["decided"].tolist(), deciding)
        self._require_one_point(headers, asked, decided)
        if Status.STOP in (asked and asked.status, decided and decided.status):
            decided = None  # nothing is decided any more: some rank does not go on
        told = self._decode(headers, asked, decided)
        requesting = asking if asked is not None and asked.status is Status.OK else None
        sending = deciding if decided is not None and decided.status is Status.OK else None
        if requesting is not None or sending is not None:
            self._exchange_arrays(told, requesting, sending, step)
        if told.parts:
            told.latest_use = headers["latest_use"].max(0).tolist()
            self._mix_into_digest(headers, told)
        told.sent = self._link.counters.planning_bytes - before - told.decision_bytes
        return told

    # --- headers -----------------------------------------------------------------------------

    def _encode(self, asking: Part | None, deciding: Part | None) -> np.ndarray:
        """This rank's headers, one to each rank, `[W]`; they differ in `requests` alone."""
        headers = np.zeros(self._size, self._header)
        headers["asked_step"] = headers["decided_step"] = NO_STEP
        headers["digest"] = self._digest
        if asking is not None:
            headers["asked"] = asking.status
            headers["asked_step"] = asking.step
            if asking.context is not None:
                batch = asking.context.batch
                headers["kind"] = KINDS.index(batch.kind) if batch.kind in KINDS else len(KINDS)
                headers["index"] = batch.index
                headers["samples"] = batch.ids.batch_size
                counts = [asks.counts for asks in asking.context.asked]
                headers["requests"] = np.concatenate(counts, axis=1)
        if deciding is not None:
            headers["decided"] = deciding.status
            headers["decided_step"] = deciding.step
            if deciding.rows:
                headers["rows"] = deciding.rows
            if deciding.decisions:
                headers["fetched"] = [len(decision.fetch) for decision in deciding.decisions]
                headers["latest_use"] = [decision.latest_use for decision in deciding.decisions]
        return headers

    def _exchange_headers(self, headers: np.ndarray, step: str) -> np.ndarray:
        """Send `headers[r]` to each rank r; the header of each rank to this one, `[W]`."""
        numbers = torch.from_numpy(headers.view(np.int64).reshape(self._size, -1))
        one_each = [1] * self._size
        receive = self._link.start_all_to_all(
            numbers, one_each, one_each, PLANNING, f"headers of {step}"
        )
        return receive().numpy().reshape(-1).view(self._header)

    def _decode(
        self, headers: np.ndarray, asked: Verdict | None, decided: Verdict | None
    ) -> ExchangeReply:
        """Return what the headers of all ranks tell."""
        told = ExchangeReply(
            asked or Verdict(Status.OK, ()),
            decided,
            headers["samples"].tolist(),
            headers["rows"],
            headers["fetched"],
        )
        if asked is not None and asked.status is Status.OK:
            bounds = self._shelf_bounds
            requests = headers["requests"]
            told.counts = [requests[:, bounds[g] : bounds[g + 1]] for g in range(self._groups)]
        return told

    def _verdict(self, statuses: list[int], part: Part | None) -> Verdict | None:
        """The strongest of the `statuses` of all ranks, and the ranks that sent it.

        None where the ranks have no such `part`. Collective where a rank reports an error.
        """
        if part is None:
            return None
        status = _STATUSES[max(statuses)]
        ranks = tuple([rank for rank, sent in enumerate(statuses) if sent == status])
        if status is not Status.ERROR:
            return Verdict(status, ranks)
        text = None if part.error is None else describe(part.error)
        texts = self._link.gather_objects(text, "errors of the planners")
        return Verdict(status, ranks, str(texts[ranks[0]]))

    def _require_one_point(
        self, headers: np.ndarray, asked: Verdict | None, decided: Verdict | None
    ) -> None:
        """Raise PeerError if the ranks are not at the same point, with what went wrong on one of
        them, if anything did: then their configurations are no matter."""
        verdicts = [verdict for verdict in (asked, decided) if verdict is not None]
        failed = [verdict for verdict in verdicts if verdict.status is Status.ERROR]
        fields = ["asked_step", "decided_step"]
        if not failed and Status.OK in [verdict.status for verdict in verdicts]:
            fields.append("digest")
        if not failed and asked is not None and asked.status is Status.OK:
            fields += ["kind", "index"]
        points = list(zip(*[headers[name].tolist() for name in fields], strict=True))
        mine = points[self._rank]
        if points.count(mine) < self._size:
            rank = next(rank for rank, point in enumerate(points) if point != mine)
            why = "".join(f"; rank {v.ranks[0]} failed: {v.message}" for v in failed)
            raise PeerError(
                f"rank {rank} plans {_point(headers[rank])}, but rank {self._rank} "
                f"{_point(headers[self._rank])}: the ranks run different configurations, data or "
                f"package versions{why}"
            )

    # --- what follows the headers ------------------------------------------------------------

    def _exchange_arrays(
        self, told: ExchangeReply, asking: Part | None, deciding: Part | None, step: str
    ) -> None:
        """Exchange the rows that are asked for, and the decisions; all ranks leave out either.

        Each rank sends to each: of every group the rows that it requests there, then of every
        group its reply, then of every group its slots. Adds to `told` what came.
        """
        outgoing: list[list[np.ndarray]] = [[] for _ in range(self._size)]
        lengths: list[list[int]] = [[] for _ in range(self._size)]
        if asking is not None:
            for asks, counts in zip(asking.context.asked, told.counts, strict=True):
                for rank, count in enumerate(counts.sum(1).tolist()):
                    outgoing[rank].append(asks.rows[rank])
                    lengths[rank].append(count)
        if deciding is not None:
            self._add_decisions(outgoing, lengths, told, deciding)
        incoming = self._all_to_all(outgoing, lengths, step)
        if asking is not None:
            groups = range(self._groups)
            told.named = [[arrays[group] for arrays in incoming] for group in groups]
        if deciding is not None:
            # Of each home, its replies about all groups, then its slots of all groups.
            decisions = [arrays[-2 * self._groups :] for arrays in incoming]
            told.parts = [
                [
                    HomePart(arrays[self._groups + group], arrays[group], count)
                    for arrays, count in zip(decisions, fetched, strict=True)
                ]
                for group, fetched in enumerate(told.fetched.T.tolist())
            ]

    def _add_decisions(
        self,
        outgoing: list[list[np.ndarray]],
        lengths: list[list[int]],
        told: ExchangeReply,
        deciding: Part,
    ) -> None:
        """Add this home's replies and slots to what goes to each rank, and the `lengths` of those
        that come; count their bytes."""
        slots: list[np.ndarray] = []
        for group, decision in enumerate(deciding.decisions):
            replies = decision.replies
            if group in self._sharded:
                replies = replies_to_all(decision)
                slots.append(_NONE)
            else:
                # A rank alone has its slots, so it need not encode them.
                slots.append(decision.told if self._size > 1 else decision.slots)
            expected = deciding.context.asked[group].counts.sum(1).tolist()
            for rank in range(self._size):
                outgoing[rank].append(replies[rank])
                lengths[rank].append(expected[rank])
                if rank != self._rank:
                    told.decision_bytes += _WIRE.itemsize * (len(replies[rank]) + len(slots[-1]))
        for rank, rows in enumerate(told.rows.tolist()):
            outgoing[rank] += slots
            lengths[rank] += [
                0 if group in self._sharded else count for group, count in enumerate(rows)
            ]

    def _all_to_all(
        self, outgoing: list[list[np.ndarray]], lengths: list[list[int]], step: str
    ) -> list[list[np.ndarray]]:
        """Send the arrays `outgoing[r]`, int32, to each rank r; the arrays that each rank sent to
        this one, of `lengths[r]`. Those of this rank itself are not copied."""
        sends = [sum(map(len, arrays)) for arrays in outgoing]
        receives = [sum(counts) for counts in lengths]
        sends[self._rank] = 0
        receives[self._rank] = 0
        to_others = [
            array for rank, arrays in enumerate(outgoing) if rank != self._rank for array in arrays
        ]
        sent = torch.from_numpy(np.concatenate([_NONE, *to_others], dtype=_WIRE))
        receive = self._link.start_all_to_all(sent, sends, receives, PLANNING, f"plans of {step}")
        received = receive().numpy()
        incoming: list[list[np.ndarray]] = []
        start = 0
        for rank, counts in enumerate(lengths):
            if rank == self._rank:
                incoming.append(outgoing[rank])
                continue
            arrays: list[np.ndarray] = []
            for count in counts:
                arrays.append(received[start : start + count])
                start += count
            incoming.append(arrays)
        return incoming

    def _mix_into_digest(self, headers: np.ndarray, told: ExchangeReply) -> None:
        """Mix the decisions of all homes into the digest, which the next headers carry."""
        if self._size == 1:
            return  # there is nobody to compare it with
        names = ("rows", "fetched", "latest_use")
        numbers = np.stack([headers[name] for name in names])
        slots = [fold(part.told) for homes in told.parts for part in homes]
        self._digest = zlib.crc32(numbers, self._digest)
        self._digest = zlib.crc32(np.array(slots), self._digest)


def _step(asking: Part | None, deciding: Part | None) -> str:
    """The step of an exchange, for errors."""
    part = asking or deciding
    return "no step" if part is None else f"step {part.step}"


def _point(header: np.void) -> str:
    """The point that a rank has reached, by its header."""
    points = []
    if header["asked_step"] != NO_STEP:
        kind = int(header["kind"])
        status = Status(int(header["asked"]))
        name = f"{KINDS[kind] if kind < len(KINDS) else 'other'} batch {header['index']}"
        name = name if status is Status.OK else status.name.lower()
        points.append(f"step {header['asked_step']} ({name})")
    if header["decided_step"] != NO_STEP:
        points.append(f"the decisions of step {header['decided_step']}")
    return f"{' and '.join(points)} with digest {int(header['digest']):#x}"
