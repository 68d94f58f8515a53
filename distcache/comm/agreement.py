"""Work whose failure on one rank all ranks learn of, and values that all must have alike."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from distcache.comm.link import host_link
from distcache.comm.rendezvous import TIMEOUT_S, Place, linger, wait_until
from distcache.comm.world import World
from distcache.errors import ConfigError, DistcacheError, PeerError
from distcache.versions import DISTRIBUTIONS, FBGEMM_DISTRIBUTIONS, SOURCE, versions_here

# -----------------------------------------------------------------------------
# Work that every rank does and whose failure on one rank all ranks must learn of.

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


# -----------------------------------------------------------------------------
# What rank 0 does for all: files and folders that the ranks share.


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


# -----------------------------------------------------------------------------
# All ranks run the same packages by the same command line: compared before a job's first step.
#
# Where ranks would compute with other bits, or read each other's messages wrongly, it is an error;
# any other difference is a warning.

log = logging.getLogger(__name__)

ALWAYS = ("distcache", SOURCE, "torch", "numpy")
"""What has to be the same on all ranks whatever they do: plans and rows travel between ranks as
distcache lays them out, torch computes the steps, and NumPy draws each node's initial rows."""

HYBRID = ("torchrec", *FBGEMM_DISTRIBUTIONS)
"""What exchanges and updates rows where TorchRec shards the tables."""

_ARGUMENTS = "the command line"
"""Under which key a rank's arguments travel with its versions."""

_SIZE = "WORLD_SIZE"
"""Under which its number of ranks."""

CUDA = ("triton",)
"""What compiles the kernels of CUDA devices, where each rank updates its own copy of a row."""


def agree_on_versions(world: World, hybrid: bool = False) -> None:
    """Compare the versions of all ranks; called by all ranks before they build anything.

    Raises ConfigError on every rank for a difference that matters, with the values and their ranks;
    logs a warning on rank 0 for one that does not. `hybrid`: TorchRec shards the tables.
    """
    if world.size == 1:
        return
    needed = set(ALWAYS) | set(HYBRID if hybrid else ()) | set(CUDA if _cuda(world) else ())
    found = together(world, versions_here)
    _refuse([{k: v for k, v in seen.items() if k in needed} for seen in found])
    others = differences([{k: v for k, v in seen.items() if k not in needed} for seen in found])
    if others and world.is_first:
        log.warning("the ranks' versions differ: %s", "; ".join(others))


def agree_before_world(
    store: dist.Store | None,
    place: Place,
    timeout_s: float = TIMEOUT_S,
    arguments: Sequence[str] = (),
) -> None:
    """Compare what `ALWAYS` matters over the launch's store, before ranks read a configuration.

    Every rank calls it, with the `arguments` of its command line, whose order does not matter.
    Raises ConfigError on every rank; PeerError naming the ranks that do not come within `timeout_s`
    seconds.
    """
    if store is None:
        return
    own = {**versions_here(), _ARGUMENTS: list(arguments), _SIZE: str(place.world_size)}
    if place.rank:
        store.set(f"versions/{place.rank}", json.dumps(own))
        text = _wait(store, ["versions/all"], timeout_s, [0])[0]
    else:
        others = range(1, place.world_size)
        texts = _wait(store, [f"versions/{rank}" for rank in others], timeout_s, list(others))
        text = json.dumps([own, *map(json.loads, texts)])
        store.set("versions/all", text)
    found = json.loads(text)
    if place.rank:
        store.add("versions/read", 1)
    try:
        _compare(found)
    except ConfigError:
        if place.rank == 0:  # which may serve the store
            linger(store, "versions/read", place.world_size - 1)
        raise


def _compare(found: list[dict[str, Any]]) -> None:
    """ConfigError where the ranks' numbers, packages or arguments differ."""
    sizes = differences([{_SIZE: seen.get(_SIZE, "")} for seen in found])
    if sizes:
        raise ConfigError(f"the ranks differ: {'; '.join(sizes)}: start all with one number")
    _refuse([{k: v for k, v in seen.items() if k in ALWAYS} for seen in found])
    lines = differences([_by_key(seen.get(_ARGUMENTS, [])) for seen in found])
    if lines:
        raise ConfigError(
            f"the ranks' command lines differ: {'; '.join(lines)}; start all nodes with the same "
            "arguments, for those of rank 0 count for all"
        )


def _by_key(arguments: Sequence[str]) -> dict[str, str]:
    """Overrides by key; anything else stands for itself."""
    parts = (argument.partition("=") for argument in arguments)
    return {key: value if equals else key for key, equals, value in parts}


def _cuda(world: World) -> bool:
    return world.device.type == "cuda"


def _refuse(found: list[dict[str, str]]) -> None:
    lines = differences(found)
    if lines:
        raise ConfigError(
            f"the ranks differ: {'; '.join(lines)}; install the same packages on all nodes "
            f"(compared are {', '.join(('python', *DISTRIBUTIONS))})"
        )


def _wait(store: dist.Store, keys: list[str], timeout_s: float, ranks: list[int]) -> list[str]:
    """The values of `keys`, which `ranks` set."""

    def late() -> list[int]:
        return [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]

    # Rank 0 is there for those that wait for it, and waits for others itself.
    whom = None if ranks == [0] else lambda: f"ranks {late()} to start"
    try:
        wait_until(lambda: store.check(keys), timeout_s, whom)
    except TimeoutError:
        raise PeerError(f"ranks {late()} did not start within {timeout_s:.0f} s") from None
    return [store.get(key).decode() for key in keys]
