"""Work that every rank does and whose failure on one rank all ranks must learn of."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from distcache.comm.link import host_link
from distcache.comm.world import World
from distcache.errors import ConfigError, DistcacheError, PeerError

T = TypeVar("T")

_SHOWN = 3
"""Differences that an error names."""


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
    try:
        value = pickle.dumps(work())
    except Exception as error:
        caught = error
    what = getattr(work, "__qualname__", type(work).__name__).partition(".<locals>")[0]
    outcomes = host_link(world).gather_objects((value, _portable(caught)), what)
    if caught is not None:
        raise caught
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, message = failure
            raise _told(kind, rank, message)
    return [pickle.loads(value) for value, _ in outcomes]


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
    lines = differences(together(world, lambda: dict(values)))
    if lines:
        more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
        raise ConfigError(
            f"the ranks differ: {'; '.join(lines[:_SHOWN])}{more}; start all ranks with the same "
            "configuration, data and package versions"
        )


def differences(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each key on which ranks differ: `<key> is <value> on rank 0 and ... on ...`."""
    lines = []
    for key in dict.fromkeys(key for values in by_rank for key in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(_show(values, key), []).append(rank)
        if len(ranks) > 1:
            *first, last = [f"{value} on {_named(own)}" for value, own in ranks.items()]
            lines.append(f"{key} is {', '.join(first)} and {last}")
    return lines


def _named(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 2`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def _show(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not there"


def _portable(error: Exception | None) -> tuple[type[DistcacheError], str] | None:
    """An error as (class to raise elsewhere, message); a stranger's message names its class."""
    if error is None:
        return None
    if isinstance(error, DistcacheError):
        return type(error), str(error)
    return PeerError, f"{type(error).__name__}: {error}"
