"""All ranks run the same packages by the same command line: compared before a job's first step.

Where ranks would compute with other bits, or read each other's messages wrongly, it is an error;
any other difference is a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from distcache.comm.agree import differences, together
from distcache.comm.rendezvous import TIMEOUT_S, Place, linger, wait_until
from distcache.comm.world import World
from distcache.errors import ConfigError, PeerError
from distcache.versions import DISTRIBUTIONS, FBGEMM_DISTRIBUTIONS, SOURCE, versions_here

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
