"""What rank 0 does for all: files and folders that the ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distcache.comm.world import World
from distcache.errors import DistcacheError


def on_first(world: World, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and hand its value (picklable) to every rank; all ranks call this.

    Where it raises, every rank raises: rank 0 the error itself, the others a DistcacheError that
    quotes it (of the same class where that class is one of this package's).
    """
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if world.is_first:
        try:
            outcome[1] = action()
        except Exception as caught:
            error = caught
            outcome[0] = (_public_type(caught), f"rank 0: {type(caught).__name__}: {caught}")
    dist.broadcast_object_list(outcome, src=0, group=world.host_group)
    if error is not None:
        raise error
    if outcome[0] is not None:
        kind, message = outcome[0]
        raise kind(message)
    return outcome[1]


def _public_type(error: Exception) -> type[DistcacheError]:
    return type(error) if isinstance(error, DistcacheError) else DistcacheError
