"""How many threads torch computes with on each rank."""

from __future__ import annotations

import os

from distcache.comm.world import World
from distcache.config import Config

_VARIABLE = "OMP_NUM_THREADS"


def compute_threads(config: Config, world: World) -> int:
    """Threads of one torch operation on this rank, `trainer.threads` or, for `auto`, its choice.

    `auto`: $OMP_NUM_THREADS where it is set, unless to 1 for several local ranks, as torchrun does
    by itself; else the rank's share of the cores that the job may use. The planner and the movement
    of rows take one thread each beside these, and are at work for a small part of a step.
    """
    given = config.trainer.threads
    if given != "auto":
        return int(given)
    outside = os.environ.get(_VARIABLE, "").split(",")[0]
    if outside.isdigit() and (int(outside) > 1 or world.local_size == 1):
        return int(outside)
    return max(1, len(os.sched_getaffinity(0)) // world.local_size)
