"""From groups of tables to the parts that move their rows: stores, caches and planners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from distcache.cache import DeviceCache
from distcache.comm.agreement import together
from distcache.comm.world import World
from distcache.engine.groups import Placement, RegionSlots, TableGroup, make_groups, state_slots
from distcache.engine.room import Region
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.planner.home import HomePlanner
from distcache.planner.policy import Policy
from distcache.planner.shard import HotLayout
from distcache.popularity.statistics import GroupPopularity, Popularity, share_popularity
from distcache.store.memory import require_memory
from distcache.store.rows import ZERO_COPY, RowStore, create_stores


def popular_groups(
    world: World,
    tables: Sequence[TableSpec],
    features: Sequence[str],
    popularity: Popularity | None,
) -> tuple[list[TableGroup], list[GroupPopularity]]:
    """The groups of `tables`, and what each takes from `popularity`; called by all ranks."""
    groups = make_groups(tables, features, world.size)
    if popularity is None:
        return groups, [GroupPopularity() for _ in groups]
    layouts, members = [group.layout for group in groups], [group.tables for group in groups]
    shared = share_popularity(world, layouts, members, popularity)
    return groups, shared


def make_caches(
    world: World,
    groups: Sequence[TableGroup],
    slots: Sequence[RegionSlots],
    update: RowUpdate,
    dtype: torch.dtype,
    placement: Placement | None = None,
) -> list[DeviceCache]:
    """A cache of `slots[g]` for every group; called by all ranks, fails on all or none."""

    def make() -> list[DeviceCache]:
        stateful = [state_slots(count, world, placement or Placement()) for count in slots]
        if world.device.type == "cpu":  # pages come with their first touch: count all at once
            floats = 0
            for count, group, own in zip(slots, groups, stateful, strict=True):
                with_state = count.all if own is None else own.rows(count.all)
                floats += count.all * group.dim + with_state * update.state_width(group.dim)
            require_memory(
                floats * dtype.itemsize * world.local_size,
                f"the slots of {world.local_size} local ranks",
                "lower cache.rows (or cache.ratio, cache.bytes), use fewer ranks or more memory",
            )
        return [
            DeviceCache(
                count.all,
                group.dim,
                update.state_width(group.dim),
                dtype,
                world.device,
                state_slots=own,
            )
            for count, group, own in zip(slots, groups, stateful, strict=True)
        ]

    made: list[DeviceCache] = []
    together(world, lambda: made.extend(make()))
    return made


def make_stores(
    world: World,
    groups: Sequence[TableGroup],
    update: RowUpdate,
    dtype: torch.dtype,
    seed: int,
    access: str,
) -> list[RowStore]:
    """The node's store of every group with its initial rows and state; called by all ranks.

    `access`: as `store.access`; with `zero_copy` the device reads and writes them in place.
    Raises MemoryTooSmallError on every rank where some host does not hold, or lock, its rows.
    """
    widths = [update.state_width(group.dim) for group in groups]
    layouts = [group.layout for group in groups]
    stores = create_stores(layouts, widths, dtype, world)
    for group, store in zip(groups, stores, strict=True):
        store.initialise(seed, group.tables, update.initial_state(group.dim))
    if access == ZERO_COPY:

        def open_all() -> None:
            for store in stores:
                store.open_to(world.device)

        try:
            together(world, open_all)
        except BaseException:
            for store in stores:
                store.close()
            raise
    return stores


class Placed(Protocol):
    """A group of tables with its slots on each device."""

    @property
    def group(self) -> TableGroup: ...
    @property
    def slots(self) -> RegionSlots: ...


def home_regions(
    rows: Sequence[Placed],
    rank: int,
    prefetch: int,
    policy: Policy,
    popularity: Sequence[np.ndarray | None],
) -> list[Region]:
    """The regions of all groups, with the planners of this rank's homes.

    `popularity`: for each group, the class of each row of this rank's home (uint8), or None.
    """
    regions: list[Region] = []
    for place, (of, classes) in enumerate(zip(rows, popularity, strict=True)):
        layout, hot = of.group.layout, of.group.hot
        own = of.slots.own_replicated(rank, layout.world_size)
        shared = own.stop - own.start
        if hot is None:
            planner = HomePlanner(layout, rank, shared, prefetch, policy, classes)
            regions.append(Region(place, planner))
            continue
        if len(hot):
            narrow = HotLayout(layout, rank, hot)
            rated = None if classes is None else narrow.rated(layout, classes)
            planner = HomePlanner(narrow, rank, shared, prefetch, policy, rated, own.start)
            regions.append(Region(place, planner))
        tail = of.slots.own_sharded
        count = tail.stop - tail.start
        planner = HomePlanner(layout, rank, count, prefetch, policy, classes, tail.start)
        regions.append(Region(place, planner, sharded=True))
    return regions
