"""One clock for all ranks: what to add to a rank's `time.perf_counter` to have rank 0's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distcache.comm.agree import together
from distcache.comm.world import World

ROUNDS = 32
"""Questions to rank 0; the answer that came back fastest counts."""


@dataclass(frozen=True)
class SharedClock:
    """`offset_s` added to this rank's clock gives rank 0's, wrong by at most `error_s`; `start_s`:
    rank 0's clock when it was asked for."""

    start_s: float
    offset_s: float = 0.0
    error_s: float = 0.0

    def since_start(self, at: float) -> float:
        """Seconds from the start to `at` on this rank's clock."""
        return at + self.offset_s - self.start_s


def machine() -> str:
    """What processes have in common that share a monotonic clock: the boot, and its namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"process {os.getpid()} of {os.uname().nodename}"  # ask, whoever it is


def share_clock(
    world: World, now: Callable[[], float] = time.perf_counter, here: str | None = None
) -> SharedClock:
    """The clock of rank 0 as this rank sees it; called by all ranks, in the main thread.

    Ranks on rank 0's machine share its clock. The others ask for it over the host group and take
    the middle of the fastest round trip, as NTP does (Mills, 1991): wrong by at most half of it,
    and by what the two clocks drift apart later. `here`: what `machine` says.
    """
    place = here or machine()
    told = together(world, lambda: (place, now()))
    start = told[0][1]
    offset, error = 0.0, 0.0
    for rank, (other, _) in enumerate(told):
        if other == told[0][0]:
            continue
        if world.is_first:
            _answer(world, rank, now)
        elif world.rank == rank:
            offset, error = _ask(world, now)
    return SharedClock(start, offset, error)


def _answer(world: World, rank: int, now: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(message, src=rank, group=world.host_group)
        message[0] = now()
        dist.send(message, dst=rank, group=world.host_group)


def _ask(world: World, now: Callable[[], float]) -> tuple[float, float]:
    """Rank 0's clock less this rank's, and how wrong that may be, seconds."""
    message = torch.zeros(1, dtype=torch.float64)
    rounds = []
    for _ in range(ROUNDS):
        asked = now()
        dist.send(message, dst=0, group=world.host_group)
        dist.recv(message, src=0, group=world.host_group)
        heard = now()
        rounds.append((heard - asked, float(message) - (asked + heard) / 2))
    trip, offset = min(rounds)
    return offset, trip / 2
