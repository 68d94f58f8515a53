"""What rank 0 does for all: files and folders that the ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distcache.comm.link import host_link
from distcache.comm.world import World
from distcache.errors import DistcacheError


def on_first(world: World, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and hand its value (picklable) to every rank; all ranks call this.

    Where it raises, every rank raises: rank 0 the error itself, the others a DistcacheError that
    quotes it (of the same class where that class is one of this package's).
    """
    outcome: tuple[Any, tuple[type[DistcacheError], str] | None] = (None, None)
    error: Exception | None = None
    if world.is_first:
        try:
            outcome = (action(), None)
        except Exception as caught:
            error = caught
            message = f"rank 0: {type(caught).__name__}: {caught}"
            outcome = (None, (_public_type(caught), message))
    what = getattr(action, "__qualname__", type(action).__name__).partition(".<locals>")[0]
    value, failure = host_link(world).gather_objects(outcome, what)[0]
    if error is not None:
        raise error
    if failure is not None:
        kind, message = failure
        raise kind(message)
    return value


def _public_type(error: Exception) -> type[DistcacheError]:
    return type(error) if isinstance(error, DistcacheError) else DistcacheError
