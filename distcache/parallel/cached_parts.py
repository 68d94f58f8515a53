"""What a cached mode is made of: its stores and slots, and its planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distcache.cache.device_cache import DeviceCache
from distcache.comm.counters import CollectiveCounters
from distcache.comm.link import Link
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.optim.rows import RowUpdate
from distcache.pipeline.build import home_regions, make_caches, make_stores
from distcache.pipeline.groups import TableGroup
from distcache.pipeline.placement import REPLICATED, Placement, region_slots
from distcache.pipeline.planned import PlanningSettings
from distcache.pipeline.planning import StreamPlanner
from distcache.pipeline.regions import Region
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.split import HotSamples
from distcache.planner.policy import DEFAULT, Policy
from distcache.planner.slot_free import PassThroughPlanner, ResidentPlanner
from distcache.popularity.node import GroupPopularity
from distcache.store.direct import STAGED
from distcache.store.initial import block_rows, initial_rows
from distcache.store.rows import RowStore
from distcache.streams import Streams


@dataclass(frozen=True)
class CachedSettings:
    """How a cached mode runs. `slots`: C of each group (only mode `data` reads it); `schedule`:
    `overlapped` or `serial`; `shake_ms`: longest random delay at hand-overs between threads;
    `result_delay`: steps after which a step's loss is read (None: 2 on CUDA, 0 on the CPU);
    `amp`: `off`, or `bf16` for the dense part; `placement`: of cached rows in mode `data`;
    `hot`: training steps are split into the samples that it names and the others (equal on all
    ranks; too large to compare); `access`: `staged` or `zero_copy`, as `store.access`."""

    mode: str
    slots: Sequence[int] = ()
    lookahead: int = 8
    prefetch: int = 1
    policy: Policy = DEFAULT
    reduction: str = "ordered"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    on_bad_id: str = "error"
    validate: bool = False
    fingerprint: int = 0
    schedule: str = "overlapped"
    shake_ms: float = 0.0
    result_delay: int | None = None
    amp: str = "off"
    placement: Placement = field(default_factory=Placement)
    hot: HotSamples | None = field(default=None, compare=False)
    access: str = STAGED


def make_rows(
    groups: Sequence[TableGroup],
    update: RowUpdate,
    link: Link,
    settings: CachedSettings,
    streams: Streams,
) -> list[GroupRows]:
    """Stores (one per node, initialised by its ranks) and device slots of every group."""
    world = link.world
    stores: Sequence[RowStore | None] = [None] * len(groups)
    slots, placement = settings.slots, placement_of(settings, world)
    if settings.mode == "resident":
        slots = [group.layout.rows for group in groups]
    else:
        stores = make_stores(world, groups, update, settings.dtype, settings.seed, settings.access)
    if settings.mode == "host":
        slots = [world.size] * len(groups)
    regions = [region_slots(group, count) for group, count in zip(groups, slots, strict=True)]
    caches = make_caches(world, groups, regions, update, settings.dtype, placement)
    if settings.mode == "resident":
        for group, cache in zip(groups, caches, strict=True):
            initialise_resident(group, cache, settings.seed, update.initial_state(group.dim))
    common = (update, link, streams, settings.prefetch)
    return [
        GroupRows(group, cache, store, *common, count)
        for group, cache, store, count in zip(groups, caches, stores, regions, strict=True)
    ]


def placement_of(settings: CachedSettings, world: World) -> Placement:
    """How rows lie; the modes without a cache have them on every rank."""
    return settings.placement.on(world) if settings.mode == "data" else Placement()


def shares_early(settings: CachedSettings, world: World) -> bool:
    """Whether sharded rows may travel before the step that reads them."""
    placement = placement_of(settings, world)
    return placement.kind != REPLICATED and placement.early and settings.prefetch > 0


def initialise_resident(group: TableGroup, cache: DeviceCache, seed: int, state: float) -> None:
    """Every row in the slot of its own number, from the bits that a store would have."""
    size = block_rows(group.dim)
    for place, table in enumerate(group.tables):
        rows, offset = group.layout.tables[place].rows, int(group.layout.offsets[place])
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            block = initial_rows(seed, table, rows, group.dim, start, stop)
            cache.weight[offset + start : offset + stop] = block.to(cache.weight)
    if cache.state is not None:
        cache.state.fill_(state)
    cache.slot_row[:] = np.arange(group.layout.rows)


def make_planner(
    world: World,
    rows: Sequence[GroupRows],
    counters: CollectiveCounters,
    settings: CachedSettings,
    prepare: Callable[[Batch], Batch],
    popular: Sequence[GroupPopularity],
) -> StreamPlanner:
    """The planner of this rank's homes; `prepare` checks a batch before it is planned."""
    layouts = [of.group.layout for of in rows]
    if settings.mode == "data":
        classes = [own.classes_at(of, world.rank) for own, of in zip(popular, layouts, strict=True)]
        regions = home_regions(rows, world.rank, settings.prefetch, settings.policy, classes)
    else:
        kind = ResidentPlanner if settings.mode == "resident" else PassThroughPlanner
        regions = [Region(at, kind(layout, world.rank)) for at, layout in enumerate(layouts)]
    grows = settings.mode == "host"
    return StreamPlanner(
        Link(world, world.planning_group, counters, "the planning group"),
        [of.group for of in rows],
        regions,
        [None if grows else of.cache.slots for of in rows],
        PlanningSettings(
            lookahead=settings.lookahead,
            prefetch=settings.prefetch,
            dtype=settings.dtype,
            validate=settings.validate,
            fingerprint=settings.fingerprint,
            prepare=prepare,
            hot=settings.hot,
            early=shares_early(settings, world),
        ),
    )
