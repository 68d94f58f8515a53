"""From groups of tables to the parts that move their rows: stores, caches and planners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distcache.cache.device_cache import DeviceCache
from distcache.comm.agree import together
from distcache.comm.link import Link
from distcache.comm.world import World
from distcache.optim.rows import RowUpdate
from distcache.pipeline.groups import TableGroup
from distcache.pipeline.rows import GroupRows
from distcache.planner.home import HomePlanner
from distcache.planner.policy import Policy
from distcache.store.available import require_memory
from distcache.store.rows import RowStore, create_stores
from distcache.streams import Streams


def make_caches(
    world: World,
    groups: Sequence[TableGroup],
    slots: Sequence[int],
    update: RowUpdate,
    dtype: torch.dtype,
) -> list[DeviceCache]:
    """A cache of `slots[g]` slots for every group; called by all ranks, fails on all or none."""

    def make() -> list[DeviceCache]:
        if world.device.type == "cpu":  # pages come with their first touch: count all at once
            pairs = zip(slots, groups, strict=True)
            floats = sum(count * (g.dim + update.state_width(g.dim)) for count, g in pairs)
            require_memory(
                floats * dtype.itemsize * world.local_size,
                f"the slots of {world.local_size} local ranks",
                "lower cache.rows (or cache.ratio, cache.bytes), use fewer ranks or more memory",
            )
        return [
            DeviceCache(count, group.dim, update.state_width(group.dim), dtype, world.device)
            for count, group in zip(slots, groups, strict=True)
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
) -> list[RowStore]:
    """The node's store of every group with its initial rows and state; called by all ranks."""
    widths = [update.state_width(group.dim) for group in groups]
    stores = create_stores([group.layout for group in groups], widths, dtype, world)
    for group, store in zip(groups, stores, strict=True):
        store.initialise(seed, group.tables, update.initial_state(group.dim))
    return stores


def join_rows(
    groups: Sequence[TableGroup],
    caches: Sequence[DeviceCache],
    stores: Sequence[RowStore | None],
    update: RowUpdate,
    link: Link,
    streams: Streams,
    prefetch: int,
) -> list[GroupRows]:
    """Each group's cache over its store."""
    return [
        GroupRows(group, cache, store, update, link, streams, prefetch)
        for group, cache, store in zip(groups, caches, stores, strict=True)
    ]


def home_planners(
    rows: Sequence[GroupRows],
    rank: int,
    prefetch: int,
    policy: Policy,
    popularity: Sequence[np.ndarray | None],
) -> list[HomePlanner]:
    """The planners of this rank's homes: home h plans its own C / W slots of each group.

    `popularity`: for each group, the class of each row of this rank's home (uint8), or None.
    """
    return [
        HomePlanner(of.group.layout, rank, len(own_slots(of, rank)), prefetch, policy, classes)
        for of, classes in zip(rows, popularity, strict=True)
    ]


def own_slots(rows: GroupRows, rank: int) -> range:
    """The slots that this rank's home plans."""
    own = rows.cache.slots // rows.group.layout.world_size
    return range(rank * own, (rank + 1) * own)
