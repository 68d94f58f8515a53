"""What a rank says at the start of an exchange of the planners, and what all of them then agree on.

One header tells of a step that is asked for and of one that is decided, so that an end, a stop or
an error of one rank is known to all at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from distcache.errors import PeerError
from distcache.planner.assemble import Request
from distcache.planner.home import HomeDecision

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
