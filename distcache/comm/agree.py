"""Work that every rank does and whose failure on one rank all ranks must learn of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from distcache.comm.world import World
from distcache.errors import DistcacheError, PeerError

T = TypeVar("T")


def together(world: World, work: Callable[[], T]) -> list[T]:
    """Run `work` on this rank and return what all ranks' calls returned, by rank.

    Called by all ranks, in the main thread; it ends when every rank's work has ended, so it is a
    barrier too. Where the work of some ranks raises, those ranks raise their own error and the
    others the first failing rank's (its class if it is a DistcacheError, else PeerError), so
    that nobody waits for a rank that gave up. Values must be picklable.
    """
    value: Any = None
    caught: Exception | None = None
    try:
        value = work()
    except Exception as error:
        caught = error
    outcomes: list[Any] = [(value, None)] * world.size
    if world.size > 1:
        dist.all_gather_object(outcomes, (value, _portable(caught)), group=world.host_group)
    if caught is not None:
        raise caught
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, message = failure
            raise kind(f"rank {rank}: {message}")
    return [value for value, _ in outcomes]


def _portable(error: Exception | None) -> tuple[type[DistcacheError], str] | None:
    """An error as (class to raise elsewhere, message); a stranger's message names its class."""
    if error is None:
        return None
    if isinstance(error, DistcacheError):
        return type(error), str(error)
    return PeerError, f"{type(error).__name__}: {error}"
