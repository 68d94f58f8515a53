"""Warm start: the likeliest rows lie in the cache before the first step reads any.

They come as a step's rows do, each from its home to all ranks, and are clean; the planner then goes
on from what the slots hold. So a warm cache has the same numbers as a cold one, with fewer fetches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from distcache.comm.agreement import together
from distcache.comm.failure import record_failure
from distcache.comm.link import CollectiveCounters, Link
from distcache.engine.groups import TableGroup
from distcache.engine.movement import GroupRows, MoveCounts
from distcache.engine.planning import StreamPlanner
from distcache.step_plan import ShardPlan, StepPlan, Transfer
from distcache.store.memory import describe_bytes
from distcache.streams import COMPUTE, COPY_IN, Streams

log = logging.getLogger(__name__)

_BLOCK = 1 << 14
"""Rows of one home that are brought at a time."""


@dataclass(frozen=True)
class WarmStart:
    """`hot`: for each group, rows int64 `[K]` by the layout's numbers, the likeliest first (-1:
    none), or None; `share`: of each home's slots that they may fill, 0 to 1."""

    hot: Sequence[np.ndarray | None]
    share: float

    @property
    def wanted(self) -> bool:
        """Whether any row is asked for."""
        return self.share > 0 and any(rows is not None and len(rows) for rows in self.hot)


@torch.inference_mode(False)
@torch.no_grad()
def warm_up(
    warm: WarmStart,
    rows: Sequence[GroupRows],
    planner: StreamPlanner,
    link: Link,
    streams: Streams,
    step: int = -1,
) -> int:
    """Fill free caches, and have `planner` go on after `step`; called by all ranks.

    Nothing may be cached or on its way. Returns how many rows all homes brought, which count as no
    step's.
    """
    world, began = link.world, time.perf_counter()
    if not warm.wanted:
        return 0
    link = Link(world, link.group, CollectiveCounters(), "the device group (warm start)")
    counts = MoveCounts()
    try:
        _fill_all(warm, rows, link, streams, counts)
    except BaseException as error:  # the others wait for this rank's rows
        record_failure(world.store, world.rank, error)
        raise
    planner.restore(step, lambda group, slots: rows[group].held_rows(slots))
    brought = together(world, lambda: (counts.rows_fetched, counts.host_to_device_bytes))
    fetched, moved = (sum(values) for values in zip(*brought, strict=True))
    if world.is_first:
        log.info(
            "warm start: %d rows in %d slots, %s from host memory, %.2f s",
            fetched,
            sum(of.cache.slots for of in rows),
            describe_bytes(moved),
            time.perf_counter() - began,
        )
    return fetched


def _fill_all(
    warm: WarmStart, rows: Sequence[GroupRows], link: Link, streams: Streams, counts: MoveCounts
) -> None:
    """Bring the hot rows of all groups, and wait until they lie on the device."""
    streams.after(COPY_IN, (streams.mark(COMPUTE),))
    with streams.on(COPY_IN):
        for group, hot in zip(rows, warm.hot, strict=True):
            if hot is not None:
                _fill(group, hot[hot >= 0], warm.share, link, counts)
        streams.wait(streams.mark(COPY_IN))


def _fill(rows: GroupRows, hot: np.ndarray, share: float, link: Link, counts: MoveCounts) -> None:
    """Bring the first of `hot` that each home has room for, block by block."""
    group, rank, slots = rows.group, link.world.rank, rows.slots
    tail = hot[:0]
    if group.hot is not None:
        is_tail = ~np.isin(hot, group.hot)
        hot, tail = hot[~is_tail], hot[is_tail]
    plans = [warm_plans(group, hot, slots.replicated, share, rank)]
    if group.hot is not None:
        plans.append(warm_tail(group, tail, slots.own_sharded, share, rank))
    for plan in chain.from_iterable(plans):
        rows.fill(plan, rows.gather(plan, counts), link)


def warm_plans(
    group: TableGroup, hot: np.ndarray, slots: int, share: float, rank: int
) -> Iterator[StepPlan]:
    """Plans, as of a step that no id is looked up in, that put rows `hot` into free slots.

    Each home takes its first `share` * slots / W rows of `hot` (int64, by the layout's numbers, the
    likeliest first), the likeliest in its last slots: those of equal rank leave from the first.
    `rank`: whose plans; `fetch_rows` are its home's.
    """
    world = group.layout.world_size
    own, most = slots // world, int(share * (slots // world))
    homes = group.layout.home(hot)
    by_home = [hot[homes == home][:most] for home in range(world)]
    longest = max(len(rows) for rows in by_home)
    for start in range(0, longest, _BLOCK):
        parts = [rows[start : start + _BLOCK] for rows in by_home]
        numbers = [np.arange(start, start + len(part)) for part in parts]
        taken = [(home + 1) * own - 1 - number for home, number in enumerate(numbers)]
        yield _plan(np.concatenate(taken), [len(part) for part in parts], parts[rank])


def warm_tail(
    group: TableGroup, hot: np.ndarray, slots: slice, share: float, rank: int
) -> Iterator[StepPlan]:
    """The same for sharded rows: `hot` of rank's home into its `slots`."""
    own = slots.stop - slots.start
    rows = hot[group.layout.home(hot) == rank][: int(share * own)]
    world = group.layout.world_size
    longest = math.ceil(share * own)  # of any home: all bring as many blocks, if empty ones
    for start in range(0, longest, _BLOCK):
        part = rows[start : start + _BLOCK]
        at = torch.from_numpy(slots.stop - 1 - np.arange(start, start + len(part)))
        none, zeros = torch.empty(0, dtype=torch.int64), (0,) * world
        shard = ShardPlan(
            distinct=0,
            misses=0,
            counts=zeros,
            slots=at,
            source_rows=none,
            source_counts=zeros,
            early=None,
            late=Transfer(none, zeros, none, zeros),
            fetch_slots=at,
            fetch_rows=torch.from_numpy(part),
            evict_slots=none,
            evict_rows=none,
        )
        yield replace(_plan(np.empty(0, np.int64), zeros, part[:0]), shard=shard)


def _plan(slots: np.ndarray, counts: Sequence[int], rows: np.ndarray) -> StepPlan:
    none, zeros = torch.empty(0, dtype=torch.int64), (0,) * len(counts)
    return StepPlan(
        step=-1,
        kind="eval",
        positions=none,
        order=none,
        touched=none,
        segments=torch.zeros(1, dtype=torch.int64),
        touched_counts=zeros,
        slots=torch.from_numpy(slots),
        home_counts=tuple(counts),
        source_rows=none,
        source_counts=zeros,
        fetch=torch.arange(len(slots)),
        fetch_counts=tuple(counts),
        fetch_rows=torch.from_numpy(rows),
        evict_slots=none,
        evict_rows=none,
        move_after=-2,
        lookup_hits=0,
    )
