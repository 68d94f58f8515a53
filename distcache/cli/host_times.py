"""What the threads of a host take on this machine: its planner, timed at work, and its copies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from distcache.comm.link import CollectiveCounters, Link
from distcache.comm.world import World
from distcache.cost.cluster import HOST, HostTimes
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.gradients import packed
from distcache.engine.groups import RegionSlots, TableSettings, make_groups
from distcache.engine.planning import Region, StreamPlanner, home_regions, planner_threads
from distcache.layout import TableSpec
from distcache.ops.reference import put_rows, take_rows
from distcache.planner.home import ResidentPlanner
from distcache.planner.threads import Threads
from distcache.planner.victims import DEFAULT
from distcache.trainer.plan_cache import timed

AHEAD = (16, 1)
"""L and P of the planners that are timed."""

_WARM, _TIMED = 12, 8
"""Steps of a planner before those that are timed, and these: the first fill its slots."""

PLANNER = ("planning_s", "id_s", "named_s", "decided_s", "fetched_s", "placed_s")
"""The times of a planner that is alone."""

_TABLE_BYTES, _ROWS, _CALLS = 256 << 20, 20_000, 200

_PARCEL, _PIECES = 4 << 20, 16
"""Bytes of a step's index tensors, and how many these are."""


class Counted(Threads):
    """The thread that calls, and the seconds of its core in what several would share."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def each(self, call: Callable[..., object], arguments: Sequence[tuple]) -> list:
        """See `Threads.each`."""
        began = time.thread_time()
        found = super().each(call, arguments)
        self.seconds += time.thread_time() - began
        return found


def measure_host(world: World, table_rows: Sequence[int], batch: int, dim: int) -> HostTimes:
    """`HOST` with what this machine takes in its place, for steps of `batch` samples with one id of
    each table, and rows of `dim` elements. For this rank alone; takes some seconds.

    A planner's times are those of the table times one factor, by which its step takes longer here.
    Own work of the training thread, and of movement's but for packing indices, and what an exchange
    of planners takes, stay those of the table.
    """
    source = SyntheticSource(SyntheticSpec(table_rows, global_batch_size=batch))
    counts, seconds, serial = time_planner(world, source)
    factor = seconds / sum(getattr(HOST, name) * count for name, count in counts.items())
    value = torch.zeros(1, device=world.device)

    def launch() -> None:
        for _ in range(_CALLS):
            value.add_(1.0)  # a small kernel, which nobody waits for

    tensors = [torch.ones(_PARCEL // (4 * _PIECES), dtype=torch.int32) for _ in range(_PIECES)]
    return replace(
        HOST,
        **{name: factor * getattr(HOST, name) for name in PLANNER},
        serial=serial,
        planner_threads=planner_threads("auto", world),
        launch_s=timed(world, launch) / _CALLS,
        byte_s=timed(world, lambda: packed(tensors, pinned=False)) / _PARCEL,
        row_s=_row_seconds(world, dim),
        name="measured",
    )


def time_planner(
    world: World, source: SyntheticSource, room: int = 6
) -> tuple[dict[str, float], float, float]:
    """The planner of one home, which is all that there is, over the steps of `source`, with room
    for the rows of so many of them (0: no row comes or goes).

    How often a step takes each time of `PLANNER`, means of `_TIMED`; then its least seconds on its
    thread's core, and the share of them that several threads would not share.
    """
    batches = [source.train_batch(step, 0, 1) for step in range(_WARM + _TIMED)]
    tables = [
        TableSpec(f"t_{name}", rows, 1, (name,))
        for name, rows in zip(source.features, source.table_rows, strict=True)
    ]
    (group,) = make_groups(tables, source.features, 1)
    slots = group.layout.rows
    regions = [Region(0, ResidentPlanner(group.layout, 0))]
    if room:
        samples, each = room * batches[0].ids.batch_size, range(len(tables))
        distinct = sum(source.expected_distinct(table, samples) for table in each)
        slots = min(slots, round(1.05 * distinct))
        regions = home_regions([(group, RegionSlots(slots))], 0, AHEAD[1], DEFAULT, [None])
    threads = Counted()
    alone = replace(world, rank=0, size=1, local_rank=0, local_size=1, node_sizes=())
    planner = StreamPlanner(
        Link(alone, None, CollectiveCounters(), "a planner that is timed"),
        [group],
        regions,
        [slots],
        TableSettings(lookahead=AHEAD[0], prefetch=AHEAD[1]),
        threads=threads,
    )
    plans = planner.planned(itertools.cycle(batches), lambda: False)
    for _ in range(_WARM):
        next(plans)
    threads.seconds, steps = 0.0, []
    for _ in range(_TIMED):
        began = time.thread_time()
        flight = next(plans)
        taken = time.thread_time() - began
        (plan,) = flight.plans
        steps.append((taken, plan.all_distinct, plan.misses))
    seconds, rows, fetched = zip(*steps, strict=True)
    ids, serial = float(len(batches[0].ids.values)), 1.0 - threads.seconds / sum(seconds)
    mean = float(np.mean(rows))
    counts = (1.0, ids, mean, (room > 0) * mean, float(np.mean(fetched)), mean)
    return dict(zip(PLANNER, counts, strict=True)), min(seconds), serial


def _row_seconds(world: World, dim: int) -> float:
    """To gather or to scatter a row of host memory, the mean of both."""
    table = np.ones((max(1, _TABLE_BYTES // (4 * dim)), dim), dtype=np.float32)
    rows = np.random.default_rng(0).choice(len(table), min(_ROWS, len(table)), replace=False)
    some = np.empty((len(rows), dim), dtype=np.float32)
    gathered = timed(world, lambda: take_rows(table, rows, some))
    return (gathered + timed(world, lambda: put_rows(table, rows, some))) / (2 * len(rows))
