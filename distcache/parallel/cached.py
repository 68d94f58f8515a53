"""The modes `data`, `resident` and `host`: one pure data-parallel step over cached rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.cache import DeviceCache
from distcache.comm.agreement import together
from distcache.comm.link import PLANNING, ROWS, CollectiveCounters, Link
from distcache.comm.world import World
from distcache.data.batch import Batch, BatchCheck
from distcache.engine.gradients import (
    Agreement,
    ControlRing,
    DenseGradients,
    start_reduce_rows,
    start_to_homes,
    start_to_sharded_homes,
)
from distcache.engine.groups import REPLICATED, Placement, TableGroup, join_pooled, region_slots
from distcache.engine.lookup import DeviceBags, PooledLookup, to_device
from distcache.engine.movement import GroupRows
from distcache.engine.planning import StreamPlanner
from distcache.engine.queue import StepFeed
from distcache.engine.room import Region
from distcache.engine.step import (
    EARLY,
    HotSamples,
    InFlight,
    Movement,
    OverlappedSchedule,
    PlanningSettings,
    SerialSchedule,
    Shaker,
    Stage,
    StageClock,
    StepPart,
    Watcher,
    movement_of,
    record,
    shaker,
)
from distcache.engine.tables import home_regions, make_caches, make_stores, popular_groups
from distcache.engine.warm import WarmStart, warm_up
from distcache.engine.whole import ShardedTables, table_block
from distcache.errors import PeerError, PlanError
from distcache.layout import TableSpec
from distcache.ops.copies import put
from distcache.optim import (
    RowUpdate,
    dense_optimizer,
    load_state,
    masked_step,
    put_back,
    row_update,
    state_tensors,
    uncount,
)
from distcache.parallel.base import (
    LateResult,
    OptimizerSpec,
    Parallel,
    Step,
    StepResult,
    check_same,
    predict,
)
from distcache.parallel.statistics import RankLoad, StepStatistics, inter_node_bytes, stage_values
from distcache.planner.home import PassThroughPlanner, ResidentPlanner
from distcache.planner.policy import DEFAULT, Policy
from distcache.popularity.statistics import GroupPopularity, Popularity
from distcache.store.rows import STAGED, RowStore, block_rows, initial_rows
from distcache.streams import COMMUNICATION, COMPUTE, Mark, Streams

# -----------------------------------------------------------------------------
# What a cached mode is made of: its stores and slots, and its planner.


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


# -----------------------------------------------------------------------------
# What a checkpoint of a cached mode consists of, by name.

_MODEL, _OPTIMIZER = "dense.", "dense_optim."


MOST_NAMED = 64
"""Tables that a summary names."""


def table_views(groups: Sequence[GroupRows], table: int) -> tuple[Tensor, Tensor | None]:
    """Views of a table's weights and state in original ids; where this node has all of its rows."""
    rows, place = _find(groups, table)
    if rows.store is not None:
        return rows.store.table(place)
    start, stop = (int(at) for at in rows.group.layout.offsets[place : place + 2])
    state = rows.cache.state
    return rows.cache.weight[start:stop], None if state is None else state[start:stop]


def read_block(world: World, groups: Sequence[GroupRows], table: int, ids: range) -> Tensor | None:
    """Rows `ids` of a table, `[n, D]` on the CPU, on rank 0; None or the same on others."""
    rows, place = _find(groups, table)
    if _is_split(world, groups) and rows.store is not None:
        return table_block(world, rows.store, place, ids)
    return table_views(groups, table)[0][ids.start : ids.stop].cpu()


def whole_tables(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    scratch: Path | None,
    filled: bool,
) -> dict[str, Any]:
    """All tables by name (`state_of_tables`), for `torch.distributed.checkpoint`.

    Views of the store on one node, where only the first of the ranks that share it names them;
    ranks with copies of their own (`resident`) all do, and one of them is written. On several
    nodes shards in files under `scratch`, with the rows' values where `filled`.
    """
    if _is_split(world, groups):
        return dict(ShardedTables(world, tables, groups).state(update, scratch, filled))
    if groups[0].store is not None and world.local_rank:
        return {}
    views = [(table, *table_views(groups, index)) for index, table in enumerate(tables)]
    return dict(state_of_tables(views, update))


def load_tables(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    state: Mapping[str, Any],
) -> None:
    """Take what `whole_tables` gave and a load filled; views have it already."""
    if _is_split(world, groups):
        ShardedTables(world, tables, groups).load(update, state)


def _is_split(world: World, groups: Sequence[GroupRows]) -> bool:
    """Whether each node's store has only a part of the rows."""
    return world.nodes.count > 1 and groups[0].store is not None


def _find(groups: Sequence[GroupRows], table: int) -> tuple[GroupRows, int]:
    """The rows of a table's group, and its index there."""
    rows = next(rows for rows in groups if table in rows.group.tables)
    return rows, rows.group.tables.index(table)


def hot_rows(tables: Sequence[TableSpec], rows: Sequence[int]) -> dict[str, int] | None:
    """The hot rows of each table by name; None for more tables than a summary names."""
    if len(tables) > MOST_NAMED:
        return None
    return {table.name: count for table, count in zip(tables, rows, strict=True)}


def meaningless(mode: str) -> tuple[str, ...]:
    """Values of a summary that `mode` does not have: it caches nothing, or moves nothing."""
    cached = ("cache_rows", "hit_rate", "hit_rate_lookups") if mode != "data" else ()
    moved = ("rows_fetched", "rows_written_back", "host_to_device_bytes", "device_to_host_bytes")
    return (*cached, *moved) if mode == "resident" else cached


def state_of_tables(
    views: Sequence[tuple[TableSpec, Tensor, Tensor | None]], update: RowUpdate
) -> dict[str, Tensor]:
    """`tables.<name>.weight` `[rows, D]`, and `tables.<name>.<state>` for each state of `update`.

    `views`: tables with their weights and state `[rows, S]` (None where S = 0).
    """
    state: dict[str, Tensor] = {}
    for table, weight, extra in views:
        state[f"tables.{table.name}.weight"] = weight
        for name, columns in update.state_columns(table.dim).items():
            if extra is not None:
                state[f"tables.{table.name}.{name}"] = extra[:, columns]
    return state


def state_of_dense(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`dense.<name>` of the model's state, `dense_optim.<parameter>.<state>` of the optimizer's."""
    state = {f"{_MODEL}{name}": value for name, value in model.state_dict().items()}
    for name, value in state_tensors(optimizer, _names(model)).items():
        state[f"{_OPTIMIZER}{name}"] = value
    return state


def load_dense(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Take back what `state_of_dense` gave."""
    model.load_state_dict(_under(_MODEL, state))
    load_state(optimizer, _names(model), _under(_OPTIMIZER, state))


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {key[len(prefix) :]: v for key, v in state.items() if key.startswith(prefix)}


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


# -----------------------------------------------------------------------------
# One step of a cached mode: its stages, and what they read and write.


class CachedStep:
    """The stages of training and evaluation steps over `rows` and the dense `model`.

    `applied`: steps applied so far (int64, shared with the checkpoint); `embedding_lr`: the rate of
    the coming steps. A loss that is not finite is sticky: nothing applies after it.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        rows: Sequence[GroupRows],
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        settings: CachedSettings,
        streams: Streams,
        delay: int,
    ) -> None:
        """`delay`: steps after which a step's loss is read; 0: at once."""
        self.groups, self.rows, self.model = groups, rows, model
        self.link: Link = rows[0].link
        self.dense = DenseGradients(model.parameters(), self.link)
        self.dense_optimizer, self.settings = dense_optimizer, settings
        self.embedding_lr = 0.0
        self.applied = torch.zeros((), dtype=torch.int64)
        self._control, self._delay = ControlRing(self.link, streams, delay), delay
        self._bad_ranks: tuple[int, ...] = ()
        world = self.link.world
        self.shares = any(group.hot is not None for group in groups)
        """Whether a step begins with an exchange of rows."""
        self._home_state = placement_of(settings, world).state == "home"
        early = shares_early(settings, world)
        movement = Movement(rows, self.link, streams, True, settings.dtype, early).stages
        first: tuple[Stage, ...] = ()
        late: tuple[Stage, ...] = ()
        back: tuple[Stage, ...] = ()
        if settings.hot is not None:
            first = (Stage(EARLY, COMPUTE, self._forward_backward_hot),)
        if self.shares:
            late = (Stage("share_late", COMMUNICATION, self._share_late),)
        if self._home_state and any(group_rows.slots.replicated for group_rows in rows):
            back = (Stage("return_rows", COMMUNICATION, self._return_rows),)
        self.training = (
            *first,
            *movement,
            *late,
            Stage("forward_backward", COMPUTE, self._forward_backward),
            Stage("sync", COMMUNICATION, self._sync),
            Stage("apply", COMPUTE, self._apply),
            *back,
        )
        self.evaluation = (*movement, *late, Stage("forward", COMPUTE, self._forward))

    def _predict(self, flight: InFlight) -> Tensor:
        """Logits `[b]` of the local batch from the leaves of its rows."""
        pooled = [
            PooledLookup.apply(leaf, bags)
            for leaf, bags in zip(flight.leaves, flight.bags, strict=True)
        ]
        joined = join_pooled(self.groups, pooled)
        return predict(self.model, flight.dense, joined, self.settings.amp)

    @torch.no_grad()
    def _share_late(self, flight: InFlight) -> None:
        """Bring the sharded rows that could not travel before the step."""
        known = flight.sharded or [None] * len(self.rows)
        flight.sharded = []
        parts = (self.rows, flight.planned.plans, flight.bags, known)
        for rows, plan, bags, early in zip(*parts, strict=True):
            if plan.shard is None or bags.shard is None:
                flight.sharded.append(None)
                continue
            what, there = f"late rows {plan.step}", bags.shard.late
            came = rows.send_rows(plan.shard.late, there, self.link, what)
            if early is not None:
                came = put(early, there.places, came)
            flight.sharded.append(came)

    def _take_leaves(self, flight: InFlight) -> list[Tensor]:
        """The rows of the step, `[U + N, D]` for each group."""
        return [self._leaf(place, flight, bags.slots) for place, bags in enumerate(flight.bags)]

    def _leaf(self, place: int, flight: InFlight, where: Tensor) -> Tensor:
        rows, plan = self.rows[place], flight.planned.plans[place]
        sharded = flight.sharded[place] if flight.sharded else None
        if sharded is None:
            return rows.leaf(plan, where)
        return torch.cat((rows.leaf(plan, where), sharded)) if plan.distinct else sharded

    def _forward_backward(self, flight: InFlight) -> None:
        parts = flight.planned.parts
        if parts:
            hot, cold = parts
            if not hot.early:
                self._start(flight)
                self._add_part(flight, hot)
            self._add_part(flight, cold)
            return
        self._start(flight)
        flight.leaves = [leaf.requires_grad_() for leaf in self._take_leaves(flight)]
        logits = self._predict(flight)
        flight.loss = self._loss(logits, flight.labels, flight)
        flight.loss.backward()

    def _start(self, flight: InFlight) -> None:
        self.dense.zero()
        flight.buffers = [(value, value.clone()) for value in self.model.buffers()]

    def _loss(self, logits: Tensor, labels: Tensor, flight: InFlight) -> Tensor:
        """This rank's share of the mean over the global batch."""
        labels = labels.to(logits.dtype)
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total / flight.planned.batch.global_size

    def _forward_backward_hot(self, flight: InFlight) -> None:
        """The hot part of a step, if its rows are all on the device before any moves for it."""
        hot = flight.planned.parts[0]
        if hot.early:
            self._start(flight)
            self._add_part(flight, hot)

    def _add_part(self, flight: InFlight, part: StepPart) -> None:
        """Add a part's loss and gradients to those of its step; the hot part comes first."""
        device = self.link.world.device
        if not flight.gradients:
            flight.gradients = [
                torch.zeros(plan.leaf_rows, rows.cache.dim, dtype=rows.cache.dtype, device=device)
                for rows, plan in zip(self.rows, flight.planned.plans, strict=True)
            ]
            flight.loss = torch.zeros((), dtype=self.settings.dtype, device=device)
        if len(part.samples) == 0:
            return
        dtype = self.settings.dtype
        dense, labels = (to_device(t.to(dtype), device) for t in (part.dense, part.labels))
        bags = [DeviceBags(b, p, device) for b, p in zip(part.bags, part.plans, strict=True)]
        leaves = [leaf.requires_grad_() for leaf in self._leaves_of(part, bags, flight)]
        pooled = [PooledLookup.apply(leaf, b) for leaf, b in zip(leaves, bags, strict=True)]
        joined = join_pooled(self.groups, pooled)
        logits = predict(self.model, dense, joined, self.settings.amp)
        loss = self._loss(logits, labels, flight)
        loss.backward()
        flight.loss = flight.loss + loss.detach()
        for gradient, leaf, b in zip(flight.gradients, leaves, bags, strict=True):
            if leaf.grad is not None:  # rows are distinct within a part: plain additions
                gradient.index_add_(0, b.touched, leaf.grad)

    @torch.no_grad()
    def _leaves_of(
        self, part: StepPart, bags: Sequence[DeviceBags], flight: InFlight
    ) -> list[Tensor]:
        """The rows of a part, `[R, D]` for each group, from those of the step where some came."""
        if not self.shares or part.early:
            of_groups = zip(self.rows, part.plans, bags, strict=True)
            return [rows.leaf(plan, b.slots) for rows, plan, b in of_groups]
        flight.leaves = flight.leaves or self._take_leaves(flight)
        pairs = zip(flight.leaves, bags, strict=True)
        return [leaf.index_select(0, b.touched) for leaf, b in pairs]

    @torch.no_grad()
    def _forward(self, flight: InFlight) -> None:
        flight.leaves = self._take_leaves(flight)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            flight.logits = self._predict(flight)
        finally:
            for module, training in modes:
                module.training = training

    def _sync(self, flight: InFlight) -> None:
        """Program order: row gradients of each group, dense chunks, loss and control; then what
        follows from the first."""
        native = self.settings.reduction == "native"
        gradients = flight.gradients or [
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in flight.leaves
        ]
        if flight.loss is None:
            raise RuntimeError("sync comes after forward_backward")
        parts = (self.rows, flight.planned.plans, gradients, flight.bags)
        replicated: list[Callable[[], Tensor] | None] = []
        sharded: list[Callable[[], Tensor] | None] = []
        for rows, plan, gradient, bags in zip(*parts, strict=True):
            where, shard, sums, own = (bags.replicated, bags.source_rows), plan.shard, None, None
            if rows.slots.replicated:
                summed = gradient[: plan.distinct]
                if self._home_state:
                    sums = start_to_homes(self.link, plan, summed, where)
                else:
                    sums = start_reduce_rows(self.link, plan, summed, native, where)
            if shard is not None and bags.shard is not None:
                named = (gradient[plan.distinct :], bags.shard.source_rows)
                own = start_to_sharded_homes(self.link, plan.step, shard, *named)
            replicated.append(sums)
            sharded.append(own)
        dense, control = self.dense.start_sum(), self._control.start(flight.loss, flight.stop)
        flight.sums += [None if sums is None else sums() for sums in replicated]
        flight.sharded_sums += [None if own is None else own() for own in sharded]
        dense()
        flight.control = control()

    @torch.no_grad()
    def _apply(self, flight: InFlight) -> None:
        """Update rows and dense part; a step whose summed loss is not finite changes nothing."""
        control = flight.control
        if control is None:
            raise RuntimeError("apply comes after sync")
        enabled = control.enabled if self._delay else None
        put_back(flight.buffers, control.enabled)
        if not self._delay and self.agreed(flight).bad_ranks:
            return
        self.applied += 1
        count = int(self.applied)
        update = (self.embedding_lr, count)
        parts = (self.rows, flight.planned.plans, flight.bags, flight.sums, flight.sharded_sums)
        for rows, plan, bags, gradient, own in zip(*parts, strict=True):
            if gradient is not None:
                rows.apply(plan, gradient, update, bags.slots, enabled)
            if plan.shard is not None and own is not None and bags.shard is not None:
                rows.apply_sharded(plan.shard, own, update, bags.shard.slots, enabled)
        if enabled is None:
            self.dense_optimizer.step()
        else:
            masked_step(self.dense_optimizer, enabled)

    @torch.no_grad()
    def _return_rows(self, flight: InFlight) -> None:
        """Bring the rows that homes have updated to all ranks."""
        if flight.agreement is not None and flight.agreement.bad_ranks:
            return
        parts = (self.rows, flight.planned.plans, flight.bags)
        for rows, plan, bags in zip(*parts, strict=True):
            if rows.slots.replicated:
                rows.return_rows(plan, self.link, bags.slots)

    def agreed(self, flight: InFlight) -> Agreement:
        """What all ranks know of a step; to be asked for step after step, in order.

        Sticky: after a loss that is not finite nothing applies, whoever goes on.
        """
        if flight.agreement is None and flight.control is not None:
            agreement = flight.control.read()
            self._bad_ranks = self._bad_ranks or agreement.bad_ranks
            flight.agreement = replace(agreement, bad_ranks=self._bad_ranks)
            if self._bad_ranks and self._delay:  # it counted, before anybody knew
                self.applied -= 1
                uncount(self.dense_optimizer)
        if flight.agreement is None:
            raise RuntimeError("a step that is not through its stages has no result")
        return flight.agreement


# -----------------------------------------------------------------------------
# The modes `data`, `resident` and `host`: one pure data-parallel trainer over rows in slots.
#
# `data` caches C rows per rank over the node's store; `resident` has all rows on every device
# (C = V, the same labels and gradients, nothing moves); `host` keeps none (every row of a step
# comes
# from the store and leaves after it). Only the planner and the size of the cache differ.

Schedule = OverlappedSchedule | SerialSchedule

_DELAY = 2
"""Steps after which the host looks at a step's loss, where the device works on beside it."""


class CachedParallel(Parallel):
    """Tables as rows in slots, dense part replicated, all gradients summed over ranks."""

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        features: Sequence[str],
        model: nn.Module,
        optimizer: OptimizerSpec,
        settings: CachedSettings,
        popularity: Popularity | None = None,
    ) -> None:
        """`popularity`: what mode `data` takes from statistics of these tables, in order."""
        check_same(world, tables, features, model, optimizer, settings)
        self.world, self.tables, self.settings = world, list(tables), settings
        self.features = tuple(features)
        self.model = model.to(world.device, settings.dtype)
        groups, popular = popular_groups(world, tables, features, popularity)
        self.groups = placement_of(settings, world).groups(groups)
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self.link = Link(world, world.device_group, self.counters, "the device group")
        spec, result_delay = optimizer, settings.result_delay
        self.update = row_update(spec.name, 0.0, spec.eps, spec.betas, spec.initial_accumulator)
        self.streams = Streams(world.device)
        self.rows = make_rows(self.groups, self.update, self.link, settings, self.streams)
        self.dense_optimizer = dense_optimizer(
            self.model.parameters(), spec.name, 0.0, spec.eps, spec.betas, spec.initial_accumulator
        )
        if result_delay is None:
            result_delay = _DELAY * self.streams.asynchronous
        self.result_delay = result_delay
        parts = (self.groups, self.rows, self.model, self.dense_optimizer)
        self.step = CachedStep(*parts, settings, self.streams, result_delay)
        self._unread: deque[tuple[InFlight, Mark]] = deque()
        self.clock, self.load = StageClock(), RankLoad()
        self.statistics = StepStatistics(settings.prefetch)
        check = BatchCheck(tables, features, settings.on_bad_id)
        counters = CollectiveCounters()
        self.planner = make_planner(world, self.rows, counters, settings, check, popular)
        share = 0.0 if popularity is None else popularity.warm_start
        self._warm, self._warmed = WarmStart([own.hot for own in popular], share), -1
        self._hot_rows = None if popularity is None else popularity.hot_rows
        self._train, self._eval = self._schedules(shaker(settings.shake_ms, world.rank))

    def _schedules(self, shake: Shaker | None) -> tuple[Schedule, Schedule]:
        """How the stages of training and of evaluation steps follow one another."""
        step, streams, depth = self.step, self.streams, self.settings.prefetch + 1
        kinds = (step.training, step.evaluation)
        if self.settings.schedule == "serial":
            self.feed = StepFeed(self.planner, self.rows, depth, streams, shake=shake)
            train, evaluate = (SerialSchedule(stages, streams, shake) for stages in kinds)
            return train, evaluate
        movement = movement_of(step.training)
        early, shares = self.settings.hot is not None, step.shares
        parts = (self.planner, self.rows, depth, streams)
        feed = self.feed = StepFeed(*parts, movement, shake, early, shares)
        waits = (feed.settle, feed.arrive, feed.ahead)
        train, evaluate = (OverlappedSchedule(stages, streams, shake, *waits) for stages in kinds)
        return train, evaluate

    @property
    def applied(self) -> Tensor:
        """Optimizer steps applied so far, int64; after `flush` exactly, on every device."""
        return self.step.applied

    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """Plan ahead on a thread of its own; see `Parallel.stream`."""
        if self._warmed < 0:
            self._warmed = warm_up(self._warm, self.rows, self.planner, self.link, self.streams)
        steps = self.feed.steps(batches)
        try:
            for flight in steps:
                yield Step(flight.planned.batch, flight.planned, flight)
        finally:
            steps.close()

    def train_step(self, step: Step, stop: bool = False) -> StepResult:
        """See `Parallel.train_step`."""
        flight: InFlight = step.flight
        flight.stop = stop
        before = self.feed.last_mark
        with self.feed.running(flight):
            self._train.run(flight)
        self.statistics.add(flight, self.rows)
        self.load.add(flight.planned.plans, self.world.rank)
        self.counters.count(ROWS, flight.fill_bytes, flight.fill_between_nodes)
        self.counters.count(PLANNING, flight.planned.planning_bytes)
        self._unread.append((flight, before))
        self._read(self.result_delay)
        return (
            LateResult(lambda: self._result(flight)) if self.result_delay else self._result(flight)
        )

    def _result(self, flight: InFlight) -> StepResult:
        """What all ranks know of a step; waits for it, and for those before it."""
        while flight.agreement is None or any(flight is unread for unread, _ in self._unread):
            self._read(len(self._unread) - 1)
        agreement = flight.agreement
        return StepResult(agreement.loss, agreement.bad_ranks, agreement.stop)

    def _read(self, keep: int) -> None:
        """Look at the results of steps, in order, but for the last `keep` of them."""
        while len(self._unread) > keep:
            flight, before = self._unread[0]
            with self.feed.whole():
                self.step.agreed(flight)
            self._unread.popleft()
            record(self.clock, flight, self.streams, before)

    def eval_step(self, step: Step) -> Tensor:
        """See `Parallel.eval_step`."""
        flight, before, counters = step.flight, self.feed.last_mark, self.counters
        sent, between = counters.collective_bytes, counters.inter_node_bytes
        with self.feed.running(flight):
            self._eval.run(flight)
        since = sent - counters.collective_bytes, between - counters.inter_node_bytes
        counters.count(ROWS, *since)  # they are training's
        record(self.clock, flight, self.streams, before)
        if flight.logits is None:
            raise RuntimeError("the schedule has no stage that computes logits")
        return flight.logits

    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """See `Parallel.set_lr`."""
        self.step.embedding_lr = embedding_lr
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense_lr

    # --- whole tables -----------------------------------------------------------------------

    def flush(self) -> None:
        """Bring every dirty row to the store; a barrier.

        Nobody writes unless all ranks have the same last step: an error, on all ranks, if a step
        failed half-way on one of them. After an error that the stream raised they have.
        """
        self._read(0)
        self.feed.quiet()
        steps = together(self.world, self._whole_steps)
        if len(set(steps)) > 1:
            counts = ", ".join(f"rank {rank}: {run}" for rank, run in enumerate(steps))
            raise PeerError(
                f"the ranks have run different steps, so nothing was written ({counts}); go on "
                "from the last checkpoint"
            )
        for rows in self.rows:
            rows.flush()
        together(self.world, lambda: None)

    def _whole_steps(self) -> tuple[int, int]:
        """The last step that was run and the number of those applied; PlanError if one failed."""
        if self.feed.failed:
            raise PlanError(
                f"a step after {self.feed.run_step} failed half-way: what this rank holds is the "
                "state of no step; go on from the last checkpoint"
            )
        return self.feed.run_step, int(self.applied)

    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """See `Parallel.table_block`."""
        return read_block(self.world, self.rows, table, range(start, stop))

    def dense_state(self) -> dict[str, Tensor]:
        """See `Parallel.dense_state`."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """See `Parallel.state_dict`, and `cached_state.whole_tables`."""
        return self.blank_state(filled=True)

    def blank_state(self, filled: bool = False) -> dict[str, Any]:
        """See `Parallel.blank_state`."""
        parts = (self.world, self.tables, self.rows, self.update)
        state = {"applied_steps": self.applied}
        tables = whole_tables(*parts, self.scratch, filled)
        return state | tables | state_of_dense(self.model, self.dense_optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Parallel.load_state_dict`; before any step.

        Raises PlanError once rows are cached, which would hide what was filled in.
        """
        if self.feed.run_step >= 0 or self._warmed > 0:
            raise PlanError("a step was run or rows are cached: load a checkpoint before that")
        self.applied.copy_(state["applied_steps"])
        load_dense(self.model, self.dense_optimizer, state)
        load_tables(self.world, self.tables, self.rows, self.update, state)
        together(self.world, lambda: None)

    def summary(self) -> dict[str, Any]:
        """See `Parallel.summary`; called by all ranks."""
        self._read(0)
        dense = self.step.dense.flat.nbytes * 2 + sum(
            value.nbytes
            for state in self.dense_optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        values = self.statistics.summary(self.world, self.rows, self.counters, dense)
        took, hidden = self.clock.mean_ms(), self.clock.hidden_ms()
        values |= {"stage_ms": took, "stage_hidden_ms": hidden}
        placement = placement_of(self.settings, self.world)
        values |= self.load.summary(self.world, placement, took, hidden)
        values["table_rows"] = sum(table.rows for table in self.tables)
        values["inter_node_bytes"] = inter_node_bytes(self.world, self.counters)
        if self._hot_rows is not None:
            values["warm_start_rows"] = max(self._warmed, 0)
            values["hot_rows_by_table"] = hot_rows(self.tables, self._hot_rows)
        return values | dict.fromkeys(meaningless(self.settings.mode))

    def errors_are_common(self) -> bool:
        """See `Parallel.errors_are_common`."""
        return not self.feed.failed

    def progress(self) -> dict[str, Any]:
        """See `Parallel.progress`."""
        rate = self.statistics.hit_rate() if self.settings.mode == "data" else None
        values = stage_values(self.clock, self.step.training)
        return values if rate is None else {"hit_rate": rate} | values

    def watch(self, watcher: Watcher) -> None:
        """See `Parallel.watch`."""
        self.clock.watchers.append(watcher)

    def close(self) -> None:
        """End the stream, if one is open, and let go of stores and gradients."""
        self.feed.close()
        for rows in self.rows:
            if rows.store is not None:
                rows.store.close()
        for parameter in self.step.dense.parameters:
            parameter.grad = None
