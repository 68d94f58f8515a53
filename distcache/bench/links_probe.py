"""What a link carries, as ranks see it: `bench.links` runs this at both ends.

The least of a few: a broadcast of 32 MiB, in one direction; the package's all-to-all of as much in
both directions at once, and of next to nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from distcache.comm.link import ROWS, CollectiveCounters, Link
from distcache.comm.world import World, close_world, open_world

MODULE = "distcache.bench.links_probe"
_REPEAT = 5
_SMALL, _LARGE = 4 << 10, 32 << 20
"""Bytes that a rank sends to its peer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and let rank 0 write JSON into the file that is the only argument."""
    out = (sys.argv[1:] if arguments is None else list(arguments))[0]
    world = open_world("cpu", "gloo", 60.0)
    try:
        buffer = torch.zeros(_LARGE // 4)
        one_way = _seconds(world, lambda: dist.broadcast(buffer, 0, group=world.device_group))
        both = _seconds(world, lambda: _exchange(world, _LARGE))
        latency = _seconds(world, lambda: _exchange(world, _SMALL))
        found = {
            "broadcast_bits_per_second": 8 * _LARGE / one_way,
            "all_to_all_bits_per_second": 8 * _LARGE / both,
            "latency_s": latency,
            "nodes": world.nodes.count,
        }
        if world.is_first:
            Path(out).write_text(json.dumps(found))
        close_world(world)
    finally:
        close_world(world, orderly=False)
    return 0


def _exchange(world: World, nbytes: int) -> None:
    """Every rank sends `nbytes` to each peer."""
    link = Link(world, world.device_group, CollectiveCounters(), "the device group")
    sent = torch.zeros(world.size * (nbytes // 4))
    splits = [nbytes // 4] * world.size
    link.all_to_all(sent, splits, splits, ROWS, "a measurement")


def _seconds(world: World, call: Callable[[], object]) -> float:
    """Least seconds until all ranks have made the call."""
    taken = []
    for _ in range(_REPEAT):
        dist.barrier(group=world.host_group)
        start = time.perf_counter()
        call()
        dist.barrier(group=world.host_group)
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    sys.exit(main())
