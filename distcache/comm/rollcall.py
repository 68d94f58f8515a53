"""Who is missing: what ranks that wait long write to the job's store, and read from it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from distcache.comm.failure import failure_of_others, first_line
from distcache.comm.liveness import has_ended
from distcache.comm.world import World
from distcache.errors import PeerError

ROLL_CALL_S = 3.0
"""How long a rank whose wait failed listens for the others before it names the missing."""

_POLL_S = 0.05


class Waiting:
    """One wait of this rank, for `what` in the conversation `link`; free while it is short."""

    def __init__(self, world: World, link: str, what: str) -> None:
        self._world, self._what = world, f"{link}: {what}"
        self._key = f"distcache/waiting/{link}"
        self._announced = False

    def announce(self) -> None:
        """Say in the store that this rank waits here.

        Raises PeerError if another rank has failed meanwhile.
        """
        if not self._announced:
            self._announced = True
            with suppress(RuntimeError):  # without its store, the wait itself must fail
                self._world.store.set(f"{self._key}/{self._world.rank}", self._what)
        failure = failure_of_others(self._world.store, self._world.rank)
        if failure is not None:
            raise PeerError(failure.message)

    def over(self) -> None:
        """The wait ended well."""
        if self._announced:
            with suppress(RuntimeError):
                self._world.store.set(f"{self._key}/{self._world.rank}", "")

    def explain(self, error: BaseException) -> PeerError:
        """The PeerError for a wait that ended with `error`: who failed, ended or did not come."""
        world, reason = self._world, first_line(error)
        where = f"rank {world.rank} waited in {self._what}"
        try:
            world.store.set(f"{self._key}/{world.rank}", self._what)
            found = self._call_roll(where, reason)
        except RuntimeError:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            host = "torchrun" if agent else "rank 0"
            found = f"{where}; {host} ended, and the job's store with it ({reason})"
        return PeerError(found)

    def _call_roll(self, where: str, reason: str) -> str:
        """What the store says about the other ranks, listening for a few seconds."""
        world, deadline = self._world, time.monotonic() + ROLL_CALL_S
        absent = [rank for rank in range(world.size) if rank != world.rank]
        while True:
            # In this order: what a rank records, it records before it ends.
            ended = [rank for rank in absent if has_ended(world.store, rank)]
            failure = failure_of_others(world.store, world.rank)
            absent = [rank for rank in absent if not self._waits_too(rank)]
            over = not absent or time.monotonic() > deadline
            if failure is not None and (over or ended or not failure.secondary):
                return failure.message
            if ended:
                return f"{where}; {_names(ended)} ended without a word ({reason})"
            if over:
                break
            time.sleep(_POLL_S)
        if absent:
            limit = f"trainer.timeout_s={world.timeout_s:g}"
            return f"{where}; {_names(absent)} did not come within {limit}, or ended ({reason})"
        return f"{where}, as did all others ({reason})"

    def _waits_too(self, rank: int) -> bool:
        key = f"{self._key}/{rank}"
        return self._world.store.check([key]) and bool(self._world.store.get(key))


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
