"""The cached tables of a model: their stores and slots, and `CachedTables`, the engine's face."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from distcache.cache import DeviceCache
from distcache.comm.agreement import together
from distcache.comm.failure import record_failure
from distcache.comm.link import PLANNING, ROWS, CollectiveCounters, Link
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.gradients import (
    start_reduce_rows,
    start_to_homes,
    start_to_sharded_homes,
    to_all,
)
from distcache.engine.groups import (
    REPLICATED,
    Placement,
    RegionSlots,
    TableGroup,
    join_pooled,
    make_groups,
    region_slots,
    state_slots,
)
from distcache.engine.lookup import PooledLookup, RowLookup
from distcache.engine.movement import GroupRows, Mover
from distcache.engine.planning import PlanningSettings, StreamPlanner
from distcache.engine.queue import StepStream
from distcache.engine.room import Region
from distcache.engine.step import (
    APPLY,
    RETURN_ROWS,
    SHARE_LATE,
    SYNC,
    TRAINING_LANE,
    WAIT,
    Flight,
    Shaker,
    Span,
    Stage,
    running,
    shaker,
)
from distcache.engine.warm import WarmStart, warm_up
from distcache.engine.whole import load_tables, read_block, whole_tables
from distcache.errors import PeerError, PlanError
from distcache.layout import TableSpec
from distcache.ops.reference import put
from distcache.optim import RowUpdate
from distcache.planner.home import HomePlanner, PassThroughPlanner, ResidentPlanner
from distcache.planner.shard import HotLayout
from distcache.planner.victims import DEFAULT, Policy
from distcache.popularity.statistics import GroupPopularity, Popularity, share_popularity
from distcache.store.memory import require_memory
from distcache.store.rows import (
    STAGED,
    ZERO_COPY,
    RowStore,
    block_rows,
    create_stores,
    initial_rows,
)
from distcache.streams import COMMUNICATION, COMPUTE, Streams

# -----------------------------------------------------------------------------
# How the rows are kept.


@dataclass(frozen=True)
class TableSettings:
    """How rows are cached, planned and summed; the same on all ranks.

    `mode`: `data` caches C rows per rank over the node's store, `resident` has every row on every
    device, `host` keeps none; `slots`: C of each group (only mode `data` reads it); `lookahead`: L;
    `prefetch`: P; `reduction`: `ordered` or `native`; `dtype` of rows; `validate`: check every law
    of every plan; `fingerprint`: a number that must agree over the ranks; `schedule`: `overlapped`
    or `serial`; `shake_ms`: longest random delay at hand-overs between threads; `placement`: of
    cached rows in mode `data`; `access`: `staged` or `zero_copy`; `pooled`: lookups give bags, else
    the row of every id.
    """

    mode: str = "data"
    slots: Sequence[int] = ()
    lookahead: int = 8
    prefetch: int = 1
    policy: Policy = DEFAULT
    reduction: str = "ordered"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    validate: bool = False
    fingerprint: int = 0
    schedule: str = "overlapped"
    shake_ms: float = 0.0
    placement: Placement = field(default_factory=Placement)
    access: str = STAGED
    pooled: bool = True

    def placed(self, world: World) -> Placement:
        """How rows lie; the modes without a cache have them on every rank."""
        return self.placement.on(world) if self.mode == "data" else Placement()

    def shares_early(self, world: World) -> bool:
        """Whether sharded rows may travel before the step that reads them."""
        placed = self.placed(world)
        return placed.kind != REPLICATED and placed.early and self.prefetch > 0


# -----------------------------------------------------------------------------
# What the tables are made of: groups, stores, slots and planners.


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
    validate: bool = False,
) -> list[DeviceCache]:
    """A cache of `slots[g]` for every group; called by all ranks, fails on all or none.

    `validate`: as of `DeviceCache`.
    """

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
                validate=validate,
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


def make_rows(
    groups: Sequence[TableGroup],
    update: RowUpdate,
    link: Link,
    settings: TableSettings,
    streams: Streams,
) -> list[GroupRows]:
    """Stores (one per node, initialised by its ranks) and device slots of every group."""
    world = link.world
    stores: Sequence[RowStore | None] = [None] * len(groups)
    slots, placement = settings.slots, settings.placed(world)
    if settings.mode == "resident":
        slots = [group.layout.rows for group in groups]
    else:
        stores = make_stores(world, groups, update, settings.dtype, settings.seed, settings.access)
    if settings.mode == "host":
        slots = [world.size] * len(groups)
    regions = [region_slots(group, count) for group, count in zip(groups, slots, strict=True)]
    caches = make_caches(
        world, groups, regions, update, settings.dtype, placement, settings.validate
    )
    if settings.mode == "resident":
        for group, cache in zip(groups, caches, strict=True):
            initialise_resident(group, cache, settings.seed, update.initial_state(group.dim))
    common = (update, link, streams, settings.prefetch)
    return [
        GroupRows(group, cache, store, *common, count)
        for group, cache, store, count in zip(groups, caches, stores, regions, strict=True)
    ]


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
    settings: TableSettings,
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
            early=settings.shares_early(world),
        ),
    )


# -----------------------------------------------------------------------------
# The engine's face: whoever trains goes through it, whatever the placement.


@dataclass(frozen=True)
class RowSums:
    """Summed row gradients of a step by group, None where a group has no such rows.

    `replicated`: `[U, D]` in canonical order, the same on all ranks; where homes alone keep the
    optimizer state `[U_h, D]`, those of this rank's home. `sharded`: `[H, D]`, those of the
    sharded rows of this rank's home.
    """

    replicated: list[Tensor | None]
    sharded: list[Tensor | None]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [sums for sums in (*self.replicated, *self.sharded) if sums is not None]


@dataclass(frozen=True)
class RowChoice:
    """Rows of a group that are updated as step `count` of their tables: places in the `replicated`
    and `sharded` sums of the step, int64 on the CPU (None: all)."""

    count: int
    replicated: Tensor | None = None
    sharded: Tensor | None = None


class CachedTables:
    """Embedding tables as rows in slots; every method is called by all ranks in the same order.

    A step's way: `ahead(batches)` plans steps on threads of its own (`now` plans one here),
    `open` gives a step's leaves, one for each group, `pooled` or `rows` look up in them, and what
    autograd leaves in their gradients goes through `start_sum` (inside `syncing`) to `apply`.

    `groups`: the tables by width; `rows`: their slots and stores; `last_step`: the last step that
    was opened, -1 before any; `failed`: whether a step or a movement failed half-way, so that this
    rank's rows are those of no step; `counters`: bytes that this rank sent.
    """

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        features: Sequence[str],
        update: RowUpdate,
        settings: TableSettings,
        popularity: Popularity | None = None,
        check: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        """`features`: of the batches, in their order; `popularity`: what statistics say of these
        tables, in order; `check`: gives a batch whose ids lie in their tables, or raises DataError
        (on the planner's thread). Raises MemoryTooSmallError where a host does not hold the rows.
        """
        self.world, self.tables, self.settings, self.update = world, list(tables), settings, update
        groups, popular = popular_groups(world, tables, features, popularity)
        self.placement = settings.placed(world)
        self.groups = self.placement.groups(groups)
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self.link = Link(world, world.device_group, self.counters, "the device group")
        self.streams = Streams(world.device)
        self.rows = make_rows(self.groups, update, self.link, settings, self.streams)
        counters = CollectiveCounters()  # the planner's thread counts for itself, step by step
        self.planner = make_planner(world, self.rows, counters, settings, check, popular)
        share = 0.0 if popularity is None else popularity.warm_start
        self._warm = WarmStart([own.hot for own in popular], share)
        self.warmed = -1
        """Rows that a warm start brought; -1 before it."""
        self.shares = any(group.hot is not None for group in self.groups)
        """Whether a step begins with an exchange of rows."""
        self.home_state = self.placement.state == "home"
        self._returns = self.home_state and any(rows.slots.replicated for rows in self.rows)
        self._shake: Shaker | None = shaker(settings.shake_ms, world.rank)
        self._mover = Mover(
            self.rows,
            self.link,
            self.streams,
            settings.dtype,
            settings.pooled,
            settings.shares_early(world),
        )
        self.stream: StepStream | None = None
        """The last that was begun, whose threads may have ended."""
        self.last_step, self.failed, self._stale = -1, False, False

    # --- plans ------------------------------------------------------------------------------

    @property
    def overlapped(self) -> bool:
        """Whether rows move on a thread of their own."""
        return self.settings.schedule == "overlapped"

    def ahead(self, batches: Iterable[Batch]) -> StepStream:
        """Plan `batches` on a thread of its own, and move their rows on another; one stream at a
        time is open. Planning goes on from what the device holds, so a stream may end anywhere and
        another one, or `now`, take over after the same step on all ranks.

        Raises PlanError while another stream is open or after a failed step.
        """
        self._begin()
        depth, mover = self.settings.prefetch + 1, self._mover if self.overlapped else None
        self.stream = StepStream(self.planner, batches, depth, self.streams, mover, self._shake)
        return self.stream

    def now(self, batch: Batch) -> Flight:
        """Plan one batch in this thread (L = 0); it is opened next, before any other is planned.

        Raises what `ahead` and its stream raise.
        """
        self._begin()
        try:
            return next(self.planner.planned([batch], lambda: False, ahead=False))
        except BaseException:
            self._stale = True
            raise

    def _begin(self) -> None:
        """Let planning go on from what the device holds, without plans that did not move."""
        if self.failed:
            raise PlanError("a step failed half-way: this model cannot go on; load a checkpoint")
        if self.stream is not None and not self.stream.ended:
            raise PlanError("another stream of this model is open: end or close it first")
        if self._stale or self.planner.ingested != self.last_step + 1:
            rows = self.rows
            self.planner.restore(self.last_step, lambda at, slots: rows[at].held_rows(slots))
        self._stale = False
        if self.warmed < 0:
            self.warm_up()

    def warm_up(self) -> None:
        """Fill empty slots with the likeliest rows, as far as statistics tell them; the first
        stream does it where nobody has."""
        parts = (self._warm, self.rows, self.planner, self.link, self.streams, self.last_step)
        self.warmed = warm_up(*parts)

    def quiet(self) -> None:
        """Between two steps: let no row move until the next step is opened."""
        if self.stream is not None:
            self.stream.quiet()

    def end(self, limit_s: float, orderly: bool = True) -> bool:
        """End the stream that is open, after the same step on all ranks; whether its threads ended
        in time. Safe to call twice. Raises what went wrong with moving rows."""
        stream = self.stream
        if stream is None:
            return True
        ended = stream.stop(limit_s, orderly)
        if ended and stream is self.stream:
            self.stream = None
        return ended

    # --- steps ------------------------------------------------------------------------------

    def stage(self, stage: Stage, flight: Flight) -> Context[None]:
        """The time in which the training thread runs `stage` of a step, on the stage's stream."""
        return running(stage, flight, TRAINING_LANE, self.streams, self._shake)

    def open(self, flight: Flight) -> list[Tensor]:
        """Begin a step: its leaves by group, `[U + N, D]`, once its rows are on the device.

        A leaf's first U rows are the replicated ones in canonical order, the other N those sharded
        rows that this rank's ids name. Later steps' rows may move from now on. Each step of a
        stream is opened once, in order.
        """
        stream, streams = flight.stream, self.streams
        flight.free = streams.mark(COMPUTE)
        if stream is None or not self.overlapped:
            flight.after = flight.free
            self._mover.move(flight, TRAINING_LANE, self._shake)
            flight.moved = True
        else:
            # Where a step begins with an exchange, fills come before or after it on all ranks.
            if self.shares:
                stream.settle()
            stream.release(self.last_step, flight.free, flight.step if self.shares else None)
            stream.arrive(flight)
        if self.shares:
            streams.after(COMMUNICATION, (flight.free,))  # it sends rows that were just changed
            with self.stage(SHARE_LATE, flight):
                self._share(flight)
            if stream is not None:
                stream.release_rest()
        self.last_step = flight.step
        return self.leaves(flight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def leaves(self, flight: Flight) -> list[Tensor]:
        """The leaves of the step that was opened last, read anew: as `open` gave them, or, once the
        step was applied, with the new rows (then all ranks call it, for sharded rows travel)."""
        if flight.applied and self.shares:
            with self.stage(SHARE_LATE, flight):
                self._share(flight)
        flight.applied = False
        self.streams.after(COMPUTE, (flight.after,))
        self.streams.hand_over(flight.made, COMPUTE)
        flight.made = []
        flight.leaves = []
        sharded = flight.sharded or [None] * len(self.rows)
        for rows, plan, where, own in zip(
            self.rows, flight.plans, flight.where, sharded, strict=True
        ):
            if own is None:
                flight.leaves.append(rows.leaf(plan, where.slots))
            elif plan.distinct:
                flight.leaves.append(torch.cat((rows.leaf(plan, where.slots), own)))
            else:
                flight.leaves.append(own)
        return flight.leaves

    @torch.inference_mode(False)
    @torch.no_grad()
    def _share(self, flight: Flight) -> None:
        """Bring the sharded rows that did not travel before the step; all of them, once it was
        applied."""
        known = flight.sharded or [None] * len(self.rows)
        flight.sharded = []
        for rows, plan, where, early in zip(
            self.rows, flight.plans, flight.where, known, strict=True
        ):
            shard, there = plan.shard, where.shard
            if shard is None or there is None:
                flight.sharded.append(None)
                continue
            came = rows.send_rows(shard.late, there.late, self.link, f"late rows {plan.step}")
            if shard.early is not None and there.early is not None:
                if early is None or flight.applied:
                    first = rows.send_rows(
                        shard.early, there.early, self.link, f"rows of {plan.step} again"
                    )
                    early = first.new_empty((shard.rows, first.shape[1]))
                    put(early, there.early.places, first)
                came = put(early, there.late.places, came)
            flight.made.append(came)
            flight.sharded.append(came)

    def pooled(self, flight: Flight, leaves: Sequence[Tensor], part: int = 0) -> Tensor:
        """The bags of a step's micro-batch `part`, `[b, sum of widths]` in the order of the
        features; differentiable in `leaves`, whose gradients are summed in the ids' order."""
        found = [
            PooledLookup.apply(leaf, bags)
            for leaf, bags in zip(leaves, flight.lookups[part], strict=True)
        ]
        return join_pooled(self.groups, found)

    def lookup(self, flight: Flight, leaves: Sequence[Tensor], part: int = 0) -> list[Tensor]:
        """The row of every id of a step's micro-batch `part`, by feature: `[n_f, D_f]` each; of
        tables with `pooled=False`."""
        out: dict[int, Tensor] = {}
        for group, leaf, bags in zip(self.groups, leaves, flight.lookups[part], strict=True):
            out |= zip(group.features, RowLookup.apply(leaf, bags), strict=True)
        return [out[feature] for feature in sorted(out)]

    @contextmanager
    def syncing(self, flight: Flight) -> Iterator[None]:
        """The exchange of a step's gradients with all ranks, after the moves that come before it
        in the order of the device group."""
        if flight.stream is not None and self.world.size > 1:
            began = time.perf_counter()
            waited = flight.stream.settle() or flight
            span = Span(WAIT, TRAINING_LANE, waited.step, began, time.perf_counter())
            waited.waits.append(span)
        with self.stage(SYNC, flight):
            yield

    @torch.no_grad()
    def start_sum(
        self, flight: Flight, gradients: Sequence[Tensor | None]
    ) -> Callable[[], RowSums]:
        """Send this rank's leaf gradients `[U + N, D]`, by group, to the rows' homes; call it for
        the sums. Inside `syncing`. Contributions of a row are added in rank order. None, on all
        ranks: a group whose rows are left as they are."""
        native = self.settings.reduction == "native"
        replicated: list[Callable[[], Tensor] | None] = []
        sharded: list[Callable[[], Tensor] | None] = []
        for rows, plan, where, gradient in zip(
            self.rows, flight.plans, flight.where, gradients, strict=True
        ):
            sums, own, named = None, None, (where.replicated, where.source_rows)
            if gradient is None:
                replicated.append(None)
                sharded.append(None)
                continue
            if rows.slots.replicated:
                summed = gradient[: plan.distinct]
                if self.home_state:
                    sums = start_to_homes(self.link, plan, summed, named)
                else:
                    sums = start_reduce_rows(self.link, plan, summed, native, named)
            if plan.shard is not None and where.shard is not None:
                mine = (gradient[plan.distinct :], where.shard.source_rows)
                own = start_to_sharded_homes(self.link, plan.step, plan.shard, *mine)
            replicated.append(sums)
            sharded.append(own)

        def finish() -> RowSums:
            return RowSums(
                [None if sums is None else sums() for sums in replicated],
                [None if own is None else own() for own in sharded],
            )

        return finish

    @torch.no_grad()
    def apply(
        self,
        flight: Flight,
        sums: RowSums,
        lr: float,
        count: int | Sequence[Sequence[RowChoice]],
        enabled: Tensor | None = None,
    ) -> None:
        """Update the step's rows and state in place, inside stage `apply`; see `applying`.

        `count`: number of the optimizer step, from 1, of all rows, or the choices of each group,
        whose other rows are left as they are; `enabled`: as in `optim.apply_rows`.
        """
        parts = (self.rows, flight.plans, flight.where, sums.replicated, sums.sharded)
        for place, (rows, plan, where, gradient, own) in enumerate(zip(*parts, strict=True)):
            shard, there = plan.shard, where.shard
            for one in (RowChoice(count),) if isinstance(count, int) else count[place]:
                update = (lr, one.count)
                if gradient is not None:
                    rows.apply(plan, gradient, update, where.slots, enabled, one.replicated)
                if shard is not None and own is not None and there is not None:
                    rows.apply_sharded(shard, own, update, there.slots, enabled, one.sharded)
        flight.applied = True

    def tables_of_sums(self, flight: Flight, group: int) -> tuple[Tensor | None, Tensor | None]:
        """The table of every row of a group's sums, by its place in the group, int32 on the CPU:
        of the replicated ones and of the sharded ones; inside `syncing`.

        A home knows its rows by number; of rows whose sums are everywhere it tells the others.
        """
        rows, plan, world = self.rows[group], flight.plans[group], self.world
        offsets, held = rows.group.layout.offsets, rows.cache.slot_row

        def named(slots: Tensor) -> Tensor:
            places = np.searchsorted(offsets, held[slots.numpy()], side="right") - 1
            return torch.from_numpy(places.astype(np.int32))

        replicated = None
        if rows.slots.replicated:
            replicated = named(plan.slots[plan.home_slice(world.rank)])
            if world.size > 1 and not self.home_state:
                own = replicated.unsqueeze(1).to(world.device)
                found = to_all(self.link, plan, own, f"tables of rows {plan.step}")
                replicated = found.cpu().flatten()
        return replicated, None if plan.shard is None else named(plan.shard.slots)

    @contextmanager
    def applying(self, flight: Flight) -> Iterator[None]:
        """The update of rows and dense part; then homes that alone have the state send their new
        rows to all ranks, if they were applied."""
        with self.stage(APPLY, flight):
            yield
        if self._returns and flight.applied:
            with self.stage(RETURN_ROWS, flight), torch.no_grad():
                for rows, plan, where in zip(self.rows, flight.plans, flight.where, strict=True):
                    if rows.slots.replicated:
                        rows.return_rows(plan, self.link, where.slots)
            self.streams.after(COMPUTE, (flight.after,))

    def count(self, flight: Flight) -> None:
        """Count what moved for a step, and the bytes of its planning and moving."""
        for rows, counts in zip(self.rows, flight.counts, strict=True):
            rows.counts.add(counts)
        self.counters.count(ROWS, flight.fill_bytes, flight.fill_between_nodes)
        self.counters.count(PLANNING, flight.planning_bytes)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What fails inside leaves the rows of no step; the other ranks hear of it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """This rank's rows are those of no step, because of `error`: the other ranks hear of it."""
        self.failed = True
        record_failure(self.world.store, self.world.rank, error)

    # --- whole tables -----------------------------------------------------------------------

    def flush(self, applied: int = 0) -> None:
        """Bring every changed row to the stores; a barrier.

        Nobody writes unless all ranks have the same last step and `applied` steps: PlanError or
        PeerError, on all ranks, if a step failed half-way on one of them.
        """
        self.quiet()
        steps = together(self.world, lambda: self._whole_steps(applied))
        if len(set(steps)) > 1:
            counts = ", ".join(f"rank {rank}: {run}" for rank, run in enumerate(steps))
            raise PeerError(
                f"the ranks have run different steps, so nothing was written ({counts}); go on "
                "from the last checkpoint"
            )
        for rows in self.rows:
            rows.flush()
        together(self.world, lambda: None)

    def _whole_steps(self, applied: int) -> tuple[int, int]:
        """The last step that was run and the number of those applied; PlanError if one failed."""
        if self.failed:
            raise PlanError(
                f"a step after {self.last_step - 1} failed half-way: what this rank holds is the "
                "state of no step; go on from the last checkpoint"
            )
        return self.last_step, applied

    def forget(self) -> None:
        """The stores have changed under the cache: all rows are read anew; local."""
        for rows in self.rows:
            rows.cache.forget()
        self._stale, self.warmed = True, -1

    def block(self, table: int, ids: range) -> Tensor | None:
        """Rows `ids` of a table in original ids, `[n, D]` on the CPU, on rank 0; after `flush`."""
        return read_block(self.world, self.rows, table, ids)

    def state(self, scratch: Path | None = None, filled: bool = True) -> dict[str, Any]:
        """All tables by name, for `torch.distributed.checkpoint`; see `whole.whole_tables`."""
        return whole_tables(self.world, self.tables, self.rows, self.update, scratch, filled)

    def require_unused(self) -> None:
        """Raise PlanError once rows are cached, which would hide what a load fills in."""
        if self.last_step >= 0 or self.warmed > 0:
            raise PlanError("a step was run or rows are cached: load a checkpoint before that")

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave and a load filled; see `require_unused`."""
        self.require_unused()
        load_tables(self.world, self.tables, self.rows, self.update, state)
        together(self.world, lambda: None)

    def close(self) -> None:
        """Let go of the stores, once no stream is open; safe to call twice, on one rank alone."""
        for rows in self.rows:
            if rows.store is not None:
                rows.store.close()
