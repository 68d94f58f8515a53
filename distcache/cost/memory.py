"""Device memory of a placement: slots or shards, and the buffers of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from distcache.cost.demand import Demand, GroupDemand
from distcache.cost.traffic import AT_HOME, ROW_WISE, TABLE_WISE, Exchange, splits_rows


class Sized(Protocol):
    """What memory needs to know of a run (see `predict.Settings`)."""

    @property
    def state(self) -> str:
        """Where the optimizer state of replicated rows lies."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        ...


def region_slots(
    hot: GroupDemand, cold: GroupDemand, slots: int, world_size: int
) -> tuple[int, int]:
    """The slots C of a rank split into those of its replicated and of its sharded rows.

    As training splits them: replicated rows get a slot each, a multiple of W, as long as half of
    the slots are left for the sharded ones, which need no more than a home has rows.
    """
    if not cold.rows:
        return slots, 0
    local = -(-(hot.rows + cold.rows) // world_size)
    first = 0
    if hot.rows:
        first = max(1, min(-(-hot.rows // world_size), slots // 2 // world_size)) * world_size
    return first, max(1, min(slots - first, local))


def cache_memory(
    hot: Sequence[GroupDemand],
    cold: Sequence[GroupDemand],
    regions: Sequence[tuple[int, int]],
    settings: Sized,
    world_size: int,
) -> float:
    """Bytes of slots with their state, and of the rows and gradients of a step.

    A step holds a copy of its rows and their gradients: of all ranks' rows where they are
    replicated, of the own ones and, at their home, those that come from others where they are
    sharded. Sizes have `DEVIATIONS` to spare.
    """
    floats = 0.0
    for near, far, (shared, own) in zip(hot, cold, regions, strict=True):
        dim, state = near.dim, near.state_width
        at_home = settings.state == AT_HOME
        floats += shared * (dim + state / (world_size if at_home else 1)) + own * (dim + state)
        _, world_rows, _ = near.buffers(world_size)
        rank_rows, _, home_rows = far.buffers(world_size)
        floats += 2 * dim * world_rows + 3 * dim * rank_rows + dim * home_rows
    return floats * settings.itemsize


def hybrid_rows(demand: Demand, layout: str) -> float:
    """Rows on the fullest rank."""
    return sum(_group_rows(group, layout, demand.world_size) for group in demand.groups)


def hybrid_memory(
    demand: Demand, layout: str, settings: Sized, exchanges: Sequence[Exchange]
) -> float:
    """Bytes of the fullest rank's shards with their state, and of what a step sends and receives.

    Whole tables go, the largest first, each to the rank that holds least.
    """
    world = demand.world_size
    shards = sum(
        _group_rows(group, layout, world) * (group.dim + group.state_width)
        for group in demand.groups
    )
    return shards * settings.itemsize + 2 * sum(e.nbytes * e.busiest for e in exchanges)


def _group_rows(group: GroupDemand, layout: str, world_size: int) -> float:
    cut, whole = 0.0, []
    for table in group.tables:
        row_wise = layout != TABLE_WISE
        if layout == ROW_WISE and not splits_rows(table.rows, world_size):
            row_wise = False
        if row_wise:
            cut += math.ceil(table.rows / world_size)
        else:
            whole.append(table.rows)
    load = [0] * min(world_size, max(len(whole), 1))
    for rows in sorted(whole, reverse=True):
        load[load.index(min(load))] += rows
    return cut + max(load)
