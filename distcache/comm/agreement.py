"""Work whose failure on one rank all ranks learn of, and values that all must have alike."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from distcache.comm.link import host_link
from distcache.comm.rendezvous import compare_versions, require_equal
from distcache.comm.world import World
from distcache.errors import DistcacheError, PeerError
from distcache.versions import versions_here

T = TypeVar("T")


def together(world: World, work: Callable[[], T]) -> list[T]:
    """Run `work` on this rank and return what all ranks' calls returned, by rank.

    Called by all ranks, in the main thread; it ends when every rank's work has ended, so it is a
    barrier too. Where the work of some ranks raises, those ranks raise their own error and the
    others the first failing rank's (its class if it is a DistcacheError, else PeerError), so
    that nobody waits for a rank that gave up. Values must be picklable. Raises PeerError naming
    the ranks that do not come within `world.timeout_s`.
    """
    value = b""
    caught: Exception | None = None
    failure: tuple[type[DistcacheError], str] | None = None  # what others raise, and its message
    try:
        value = pickle.dumps(work())
    except Exception as error:
        caught, failure = error, (PeerError, f"{type(error).__name__}: {error}")
        if isinstance(error, DistcacheError):
            failure = type(error), str(error)
    outcomes = host_link(world).gather_objects((value, failure), _name_of(work))
    if caught is not None:
        raise caught
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, message = failure
            raise _told(kind, rank, message)
    return [pickle.loads(value) for value, _ in outcomes]


def _name_of(work: Callable[[], Any]) -> str:
    """What a rank that waits for the others' part of `work` says that it waits in."""
    return getattr(work, "__qualname__", type(work).__name__).partition(".<locals>")[0]


def _told(kind: type[DistcacheError], rank: int, message: str) -> DistcacheError:
    """The error of `rank`, for other ranks. Made here: a name for it in the frame that raises it
    would be a cycle, which keeps what the frames hold until the garbage is collected."""
    error = kind(f"rank {rank}: {message}")
    error.from_rank = rank
    return error


def agree_on(world: World, values: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank unless all ranks give equal `values`; called by all ranks.

    The error names the first few keys that differ, with every value and the ranks that have it.
    Values must be picklable; those with the same `repr` are equal.
    """
    way_out = "start all ranks with the same configuration, data and package versions"
    require_equal(together(world, lambda: dict(values)), way_out)


def on_first(world: World, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and hand its value (picklable) to every rank; all ranks call this.

    Where it raises, every rank raises, as in `together`.
    """

    def work() -> Any:
        return action() if world.is_first else None

    work.__qualname__ = _name_of(action)
    return together(world, work)[0]


def agree_on_versions(world: World, hybrid: bool = False) -> None:
    """Compare the package versions of all ranks; called by all ranks before they build anything.

    Raises ConfigError on every rank for a difference that matters, with the values and their ranks;
    logs a warning on rank 0 for one that does not. `hybrid`: TorchRec shards the tables.
    """
    if world.size > 1:
        found = together(world, versions_here)
        compare_versions(found, hybrid, world.device.type == "cuda", world.is_first)
