"""The planners' conversation: headers, requests to homes, decisions to all. CPU group, one thread.

Every exchange starts with a header from each rank, so that an end, a stop or an error of one rank
is known to all at the same step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from distcache.comm.counters import PLANNING
from distcache.comm.link import Link
from distcache.errors import PeerError
from distcache.planner.assemble import HomePart, Request
from distcache.planner.home import HomeDecision


class Status(IntEnum):
    """What a rank says at the start of an exchange; the largest value decides."""

    OK = 0
    END = 1
    STOP = 2
    TOO_LARGE = 3
    ERROR = 4


@dataclass(frozen=True)
class Verdict:
    """What the ranks agree on: the strongest status and the ranks that said it."""

    status: Status
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Refusal:
    """Why one home refuses a step: its group, distinct rows and slots."""

    home: int
    group: int
    rows: int
    slots: int


class PlanExchange:
    """Requests and decisions of all groups over `link`; used by one thread on every rank.

    `fingerprint`: a number that must agree on all ranks (configuration). Each header carries it
    mixed with a digest of all decisions so far.
    """

    def __init__(self, link: Link, groups: int, fingerprint: int) -> None:
        self._link, self._groups = link, groups
        self._digest = fingerprint & 0x7FFFFFFF

    def requests(
        self, status: Status, step: int, requests: Sequence[Request] | None
    ) -> tuple[Verdict, list[list[np.ndarray]]]:
        """Send each group's rows to their homes.

        Returns the verdict and, if it is OK, for every group the rows that each rank names here.
        """
        size = self._link.world.size
        counts = np.zeros((self._groups, size), dtype=np.int64)
        if requests is not None:
            counts[:] = [request.counts for request in requests]
        headers = self._headers(status, step, counts.reshape(-1))
        verdict = self._verdict(headers, step)
        if verdict.status is not Status.OK or requests is None:
            return verdict, []
        incoming = headers[:, 3:].reshape(size, self._groups, size)[:, :, self._link.world.rank]
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
        decisions: Sequence[HomeDecision] | None,
        requests: Sequence[Request],
        refusal: Refusal | None = None,
    ) -> tuple[Verdict, list[list[HomePart]], list[int], Refusal | None]:
        """Send this home's decisions to all ranks.

        Returns the verdict; for every group the parts of all homes and the latest last use among
        all victims; and the largest refusal, if some home refused the step.
        """
        size = self._link.world.size
        numbers = np.full((self._groups, 3), -1, dtype=np.int64)
        if refusal is not None:
            numbers[refusal.group] = (refusal.rows, refusal.slots, refusal.group)
        elif decisions is not None:
            numbers[:] = [(len(d.slots), len(d.fetch), d.latest_use) for d in decisions]
        headers = self._headers(status, step, numbers.reshape(-1))
        verdict = self._verdict(headers, step)
        numbers = headers[:, 3:].reshape(size, self._groups, 3)
        if verdict.status is Status.TOO_LARGE:
            return verdict, [], [], _largest_refusal(numbers, verdict.ranks)
        if verdict.status is not Status.OK or decisions is None:
            return verdict, [], [], None
        parts, outgoing = [], []
        for to in range(size):
            mine = [part for d in decisions for part in (d.slots, d.fetch, d.replies[to])]
            parts += mine
            outgoing.append(sum(len(part) for part in mine))
        asked = np.array([request.counts for request in requests])
        lengths = np.concatenate([numbers[:, :, :2], asked.T[:, :, None]], axis=2)
        lengths = lengths.reshape(size, -1)
        received = self._all_to_all(
            parts, outgoing, lengths.sum(1), np.int32, f"decisions of step {step}"
        )
        by_home = _split(received, lengths)
        homes = [
            [HomePart(*by_home[home][3 * g : 3 * g + 3]) for home in range(size)]
            for g in range(self._groups)
        ]
        self._extend_digest(homes)
        return verdict, homes, numbers[:, :, 2].max(0).tolist(), None

    def _headers(self, status: Status, step: int, numbers: np.ndarray) -> np.ndarray:
        """Every rank's [status, step, digest, numbers...], `[W, 3 + len(numbers)]`."""
        own = torch.from_numpy(np.concatenate(([int(status), step, self._digest], numbers)))
        what = f"header of step {step}"
        return torch.stack(self._link.all_gather(own, PLANNING, what)).numpy()

    def _verdict(self, headers: np.ndarray, step: int) -> Verdict:
        status = Status(int(headers[:, 0].max()))
        ranks = tuple(np.flatnonzero(headers[:, 0] == status).tolist())
        if status is Status.OK:
            own = headers[self._link.world.rank]
            for rank, other in enumerate(headers):
                if (other[1:3] != own[1:3]).any():
                    raise PeerError(
                        f"rank {rank} plans step {other[1]} with digest {other[2]:#x}, rank "
                        f"{self._link.world.rank} step {own[1]} with {own[2]:#x}: the ranks run "
                        "different configurations, data or package versions"
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
        flat = np.concatenate(parts).astype(dtype, copy=False)
        out = self._link.all_to_all(
            torch.from_numpy(flat),
            [int(count) for count in send],
            [int(count) for count in receive],
            PLANNING,
            what,
        )
        return out.numpy()

    def _extend_digest(self, homes: list[list[HomePart]]) -> None:
        if self._link.world.size == 1:
            return
        for parts in homes:
            for part in parts:
                self._digest = zlib.crc32(np.ascontiguousarray(part.slots), self._digest)


def _split(flat: np.ndarray, lengths: np.ndarray) -> list[list[np.ndarray]]:
    """Cut `flat` into `lengths[i][j]` long pieces, row by row."""
    pieces = np.split(flat, np.cumsum(lengths.reshape(-1))[:-1])
    width = lengths.shape[1]
    return [pieces[i : i + width] for i in range(0, len(pieces), width)]


def _largest_refusal(numbers: np.ndarray, homes: Sequence[int]) -> Refusal:
    """The refusal with the most rows among the homes that refuse a step."""
    refusals = []
    for home in homes:
        group = int(np.flatnonzero(numbers[home, :, 2] >= 0)[0])
        rows, slots = numbers[home, group, :2].tolist()
        refusals.append(Refusal(home, group, rows, slots))
    return max(refusals, key=lambda refusal: refusal.rows)
