"""Tables before the first step: their stores, slots and planners, and the likeliest rows in the
caches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from distcache.cache import DeviceCache
from distcache.comm.link import CollectiveCounters, Link, run_on_all_ranks
from distcache.comm.rendezvous import record_failure
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.groups import (
    Region,
    RegionSlots,
    TableGroup,
    TableSettings,
    region_slots,
    state_slots,
)
from distcache.engine.movement import GroupRows
from distcache.engine.planning import StreamPlanner, home_regions
from distcache.engine.step import MoveCounts
from distcache.layout import RowLayout
from distcache.optim import RowUpdate
from distcache.planner.home import Parts, PassThroughPlanner, ResidentPlanner
from distcache.planner.victims import GroupPopularity
from distcache.store.memory import describe_bytes, require_memory
from distcache.store.rows import WAY_OUT, ZERO_COPY, NodePart, RowStore, draw_tables, put_block
from distcache.streams import COMPUTE, COPY_IN, Streams

log = logging.getLogger(__name__)

# -----------------------------------------------------------------------------
# What the tables are made of: stores, slots and planners.


def make_rows(
    groups: Sequence[TableGroup],
    update: RowUpdate,
    link: Link,
    settings: TableSettings,
    streams: Streams,
    stores: Sequence[RowStore | None] = (),
) -> list[GroupRows]:
    """Stores (one per node, initialised by its ranks, unless there are some) and device slots of
    every group."""
    world = link.world
    slots = settings.slots
    if settings.mode == "resident":
        slots, stores = [group.layout.rows for group in groups], [None] * len(groups)
    elif not stores:
        stores = make_stores(world, groups, update, settings.dtype, settings.seed, settings.access)
    if settings.mode == "host":
        slots = [world.size] * len(groups)
    regions = [region_slots(group, count) for group, count in zip(groups, slots, strict=True)]
    caches: list[DeviceCache] = []
    make = partial(_make_caches, world, groups, regions, update, settings)
    run_on_all_ranks(world, lambda: caches.extend(make()))
    common = (link, streams, settings.prefetch, settings.mode == "host")
    return [
        GroupRows(group, cache, store, *common, count)
        for group, cache, store, count in zip(groups, caches, stores, regions, strict=True)
    ]


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
    layouts = [group.layout for group in groups]
    widths = [update.state_width(group.dim) for group in groups]
    stores: list[RowStore] = []

    def check() -> None:  # all as a whole, before the first is made
        if not world.local_rank:
            pairs = zip(layouts, widths, strict=True)
            needed = sum(sum(NodePart(own, world).bytes(width, dtype)) for own, width in pairs)
            require_memory(needed, "the tables and their optimizer state", WAY_OUT)

    def open_all() -> None:
        for store in stores:
            store.open_to(world.device)

    run_on_all_ranks(world, check)
    try:
        for layout, width in zip(layouts, widths, strict=True):
            stores.append(RowStore(layout, width, dtype, world))
        for group, store in zip(groups, stores, strict=True):
            store.initialise(seed, group.tables, update.initial_state(group.dim))
        if access == ZERO_COPY:
            run_on_all_ranks(world, open_all)
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores


def _make_caches(
    world: World,
    groups: Sequence[TableGroup],
    slots: Sequence[RegionSlots],
    update: RowUpdate,
    settings: TableSettings,
) -> list[DeviceCache]:
    """A cache of `slots[g]` for every group; `resident` has every row in it."""
    parts = []
    for group, count in zip(groups, slots, strict=True):
        kind = group.layout.kind(update.state_width(group.dim), settings.dtype)
        parts.append((group, count.all, kind, state_slots(count, world, settings.placed(world))))
    if world.device.type == "cpu":  # pages come with their first touch: count all at once
        nbytes = 0
        for _, count, kind, own in parts:
            nbytes += kind.bytes_of(count, count if own is None else own.rows(count))
        require_memory(
            nbytes * world.local_size,
            f"the slots of {world.local_size} local ranks",
            "lower cache.rows (or cache.ratio, cache.bytes), use fewer ranks or more memory",
        )
    made = []
    for group, count, kind, own in parts:
        made.append(DeviceCache(count, kind, world.device, own, settings.validate))
        if settings.mode == "resident":
            # Every row in the slot of its own number, from the bits that a store would have.
            put = partial(put_block, made[-1].weight)
            draw_tables(settings.seed, group.tables, group.layout, put, world.local_size)
            if made[-1].state is not None:
                made[-1].state[:] = update.initial_state(group.dim).to(made[-1].state)
            made[-1].slot_row[:] = np.arange(group.layout.rows)
    return made


class RowPopularity(Protocol):
    """The use of rows before training, as a warm start and planners need it."""

    @property
    def warm_start(self) -> float:
        """Share of the slots that are filled before the first step."""

    def share(
        self, world: World, layouts: Sequence[RowLayout], members: Sequence[Sequence[int]]
    ) -> list[GroupPopularity]:
        """Return the popularity of the rows of each group, whose tables are `members[g]`. Called by
        all ranks; raises on all of them."""


def make_planner(
    world: World,
    rows: Sequence[GroupRows],
    settings: TableSettings,
    prepare: Callable[[Batch], Batch],
    popular: Sequence[GroupPopularity],
) -> StreamPlanner:
    """The planner of this rank's homes; `prepare` checks a batch before it is planned."""
    layouts = [of.group.layout for of in rows]
    if settings.mode == "data":
        classes = [own.classes_at(of, world.rank) for own, of in zip(popular, layouts, strict=True)]
        placed = [(of.group, of.slots) for of in rows]
        regions = home_regions(placed, world.rank, settings.prefetch, settings.policy, classes)
    else:
        kind = ResidentPlanner if settings.mode == "resident" else PassThroughPlanner
        regions = [Region(at, kind(layout, world.rank)) for at, layout in enumerate(layouts)]
    # The planner's thread counts for itself, step by step.
    link = Link(world, world.planning_group, CollectiveCounters(), "the planning group")
    grows = settings.mode == "host"
    slots = [None if grows else of.cache.slots for of in rows]
    return StreamPlanner(link, [of.group for of in rows], regions, slots, settings, prepare)


# -----------------------------------------------------------------------------
# Warm start: the likeliest rows lie in the cache before the first step reads any.
#
# They come as a step's rows do, each from its home to all ranks, and are clean; the planner then
# goes on from what the slots hold. So a warm cache has the same numbers as a cold one, with fewer
# fetches.

_BLOCK = 1 << 14
"""Rows of one home that are brought at a time."""


def warm_up(
    hot: Sequence[np.ndarray | None],
    share: float,
    rows: Sequence[GroupRows],
    planner: StreamPlanner,
    streams: Streams,
    step: int,
) -> int:
    """Fill free caches, and have `planner` go on after `step`; called by all ranks.

    `hot`: for each group, rows int64 `[K]` by the layout's numbers, the likeliest first (-1: none),
    or None; `share`: of each home's slots that they may fill, 0 to 1. Nothing may be cached or on
    its way. Returns how many rows all homes brought, which count as no step's.
    """
    world, began = planner.link.world, time.perf_counter()
    if not (share > 0 and any(own is not None and len(own) for own in hot)):
        return 0
    group = rows[0].link.group
    link = Link(world, group, CollectiveCounters(), "the device group (warm start)")
    counts = MoveCounts()
    try:
        with torch.inference_mode(False), torch.no_grad():
            streams.wait_events(COPY_IN, (streams.record_event(COMPUTE),))
            with streams.use(COPY_IN):
                for of, own in zip(rows, hot, strict=True):
                    if own is not None:
                        _fill(of, own[own >= 0], share, link, counts)
                streams.synchronize(streams.record_event(COPY_IN))
    except BaseException as error:  # the others wait for this rank's rows
        record_failure(world.store, world.rank, error)
        raise
    planner.restore(step, lambda place, slots: rows[place].held_rows(slots))
    brought = run_on_all_ranks(world, lambda: (counts.rows_fetched, counts.host_to_device_bytes))
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


def _fill(rows: GroupRows, hot: np.ndarray, share: float, link: Link, counts: MoveCounts) -> None:
    """Bring the first of `hot` that each home has room for, block by block."""
    group, rank, slots, tail = rows.group, link.world.rank, rows.slots, hot[:0]
    if group.hot is not None:
        is_tail = ~np.isin(hot, group.hot)
        hot, tail = hot[~is_tail], hot[is_tail]
    for taken, parts in warm_blocks(group, hot, slots.replicated, share):
        own = torch.from_numpy(parts[rank])
        at, lengths = (torch.from_numpy(taken), None), [len(part) for part in parts]
        if (gathered := rows.gather_rows(own, counts)) is None:
            return  # they have no store
        rows.fill_replicated(at, lengths, own, gathered.read(), link, "warm start")
        gathered.release()
    room, layout = slots.own_sharded, group.layout
    tail = tail[layout.home(tail) == rank]
    seats = Parts.of(room.stop - room.start, layout.most_rows).seats(layout.local(tail), share)
    tail, seats = tail[seats >= 0], room.start + seats[seats >= 0]
    for start in range(0, len(tail), _BLOCK):
        own = torch.from_numpy(tail[start : start + _BLOCK])
        at = torch.from_numpy(seats[start : start + _BLOCK])
        if (gathered := rows.gather_rows(own, counts)) is not None:
            rows.cache.fill(at, own, *gathered.read())
            gathered.release()


def warm_blocks(
    group: TableGroup, hot: np.ndarray, slots: int, share: float
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Block after block of replicated rows `hot` (int64, by the layout's numbers, the likeliest
    first): their slots, by home, and each home's rows.

    Each part of a home takes its first `share` * its slots rows (`Parts.seats`).
    """
    layout, own = group.hot_rows or group.layout, slots // group.layout.world_size
    homes, by_home, parts = group.layout.home(hot), [], Parts.of(own, layout.most_rows)
    for home in range(layout.world_size):
        rows = hot[homes == home]
        seats = parts.seats(layout.local(rows), share)
        by_home.append((home * own + seats[seats >= 0], rows[seats >= 0]))
    for start in range(0, max(len(rows) for _, rows in by_home), _BLOCK):
        blocks = [[of[start : start + _BLOCK] for of in both] for both in by_home]
        taken, own_rows = zip(*blocks, strict=True)
        yield np.concatenate(taken), list(own_rows)
