"""The modes `data`, `resident` and `host`: one pure data-parallel trainer over rows in slots.

`data` caches C rows per rank over the node's store; `resident` has all rows on every device
(C = V, the same labels and gradients, nothing moves); `host` keeps none (every row of a step comes
from the store and leaves after it). Only the planner and the size of the cache differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distcache.cache.device_cache import DeviceCache
from distcache.comm.agree import together
from distcache.comm.counters import CollectiveCounters
from distcache.comm.link import Link
from distcache.comm.world import World
from distcache.coordinator import DenseGradients, agree, reduce_rows
from distcache.data.batch import Batch
from distcache.data.check import check_ids
from distcache.errors import DataError, PeerError, PlanError
from distcache.layout import TableSpec
from distcache.optim.dense import dense_optimizer
from distcache.optim.dense_state import load_state, state_tensors
from distcache.optim.rows import row_update
from distcache.parallel.base import OptimizerSpec, Parallel, Step, StepResult
from distcache.parallel.same import check_same
from distcache.parallel.statistics import StepStatistics
from distcache.pipeline.feed import StepFeed
from distcache.pipeline.groups import TableGroup, join_pooled, make_groups
from distcache.pipeline.lookup import DeviceBags, PooledLookup
from distcache.pipeline.planning import PlannedStep, PlanningSettings, StreamPlanner
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.schedule import InFlight, SerialSchedule, Stage, StageClock
from distcache.planner.home import HomePlanner, PassThroughPlanner, Planner, ResidentPlanner
from distcache.store.initial import block_rows, initial_rows
from distcache.store.rows import create_stores


@dataclass(frozen=True)
class CachedSettings:
    """How a cached mode runs. `slots`: C of each group (only mode `data` reads it)."""

    mode: str
    slots: Sequence[int] = ()
    lookahead: int = 8
    prefetch: int = 1
    policy: str = "lookahead"
    reduction: str = "ordered"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    on_bad_id: str = "error"
    validate: bool = False
    fingerprint: int = 0


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
    ) -> None:
        check_same(world, tables, features, model, optimizer, settings)
        self.world, self.tables, self.settings = world, list(tables), settings
        self.features = tuple(features)
        self.model = model.to(world.device, settings.dtype)
        self.groups = make_groups(tables, features, world.size)
        self.counters, self._uncounted = CollectiveCounters(), CollectiveCounters()
        self.link = Link(world, world.device_group, self.counters, "the device group")
        spec = optimizer
        self.update = row_update(
            spec.name, 0.0, spec.eps, spec.betas, spec.initial_accumulator
        )
        self.rows = self._make_rows()
        self.dense = DenseGradients(self.model.parameters(), self.link)
        self.dense_optimizer = dense_optimizer(
            self.dense.parameters, spec.name, 0.0, spec.eps, spec.betas, spec.initial_accumulator
        )
        self.embedding_lr = 0.0
        self.applied = torch.zeros((), dtype=torch.int64)
        self._bad_ranks: tuple[int, ...] = ()
        self.clock = StageClock()
        self.statistics = StepStatistics()
        movement = (
            Stage("write_back", "copy_out", self._write_back),
            Stage("gather", "host", self._gather),
            Stage("fill", "copy_in", self._fill),
        )
        self._train = SerialSchedule(
            (
                *movement,
                Stage("forward_backward", "compute", self._forward_backward),
                Stage("sync", "communication", self._sync),
                Stage("apply", "compute", self._apply),
            ),
            self.clock,
        )
        self._eval = SerialSchedule(
            (*movement, Stage("forward", "compute", self._forward)), self.clock
        )
        self.planner = self._make_planner()
        self.feed = StepFeed(self.planner, self.rows, settings.prefetch + 1)

    # --- building ---------------------------------------------------------------------------

    def _make_rows(self) -> list[GroupRows]:
        """Stores (one per node, initialised by its ranks) and device slots of every group."""
        settings, world = self.settings, self.world
        widths = [self.update.state_width(group.dim) for group in self.groups]
        layouts = [group.layout for group in self.groups]
        stores: list = [None] * len(layouts)
        if settings.mode != "resident":
            stores = create_stores(layouts, widths, settings.dtype, world)
        rows = []
        for index, group in enumerate(self.groups):
            slots = {"resident": group.layout.rows, "host": world.size}.get(settings.mode)
            slots = settings.slots[index] if slots is None else slots
            width = widths[index]

            def make(slots: int = slots, group: TableGroup = group, width: int = width):
                return DeviceCache(slots, group.dim, width, settings.dtype, world.device)

            made: list[DeviceCache] = []
            together(world, lambda make=make, made=made: made.append(make()))
            store = stores[index]
            initial = self.update.initial_state(group.dim)
            if store is not None:
                store.initialise(settings.seed, group.tables, initial)
            else:
                self._initialise_resident(group, made[0], initial)
            rows.append(GroupRows(group, made[0], store, self.update, self.link))
        return rows

    def _initialise_resident(self, group: TableGroup, cache: DeviceCache, initial: float) -> None:
        """Every row in the slot of its own number, from the bits that a store would have."""
        size = block_rows(group.dim)
        for place, table in enumerate(group.tables):
            spec, offset = self.tables[table], int(group.layout.offsets[place])
            for start in range(0, spec.rows, size):
                stop = min(start + size, spec.rows)
                block = initial_rows(
                    self.settings.seed, table, spec.rows, group.dim, start, stop
                )
                cache.weight[offset + start : offset + stop] = block.to(cache.weight)
        if cache.state is not None:
            cache.state.fill_(initial)
        cache.slot_row[:] = np.arange(group.layout.rows)

    def _make_planner(self) -> StreamPlanner:
        settings, rank = self.settings, self.world.rank
        planners: list[Planner] = []
        for group, rows in zip(self.groups, self.rows, strict=True):
            if settings.mode == "resident":
                planners.append(ResidentPlanner(group.layout, rank))
            elif settings.mode == "host":
                planners.append(PassThroughPlanner(group.layout, rank))
            else:
                own = rows.cache.slots // self.world.size
                window = settings.policy == "lookahead"
                planners.append(HomePlanner(group.layout, rank, own, settings.prefetch, window))
        grows = settings.mode == "host"
        link = Link(self.world, self.world.planning_group, self.counters, "the planning group")
        return StreamPlanner(
            link,
            self.groups,
            planners,
            [None if grows else rows.cache.slots for rows in self.rows],
            PlanningSettings(
                lookahead=settings.lookahead,
                prefetch=settings.prefetch,
                dtype=settings.dtype,
                validate=settings.validate,
                fingerprint=settings.fingerprint,
                prepare=self._checked,
            ),
        )

    def _checked(self, batch: Batch) -> Batch:
        """`batch` with every id inside its table; DataError names the one that is not."""
        if self._table_of_feature is None:
            reader = {f: table for table in self.tables for f in table.features}
            self._table_of_feature = [reader[feature] for feature in self.features]
        tables = self._table_of_feature
        if batch.ids.features != self.features:
            raise DataError(
                f"batch {batch.index} has the features {list(batch.ids.features)}; this model "
                f"reads {list(self.features)}, in this order"
            )
        ids = check_ids(
            batch.ids,
            [table.rows for table in tables],
            [table.name for table in tables],
            batch.first_sample,
            self.settings.on_bad_id,
        )
        return replace(batch, ids=ids)

    _table_of_feature: list[TableSpec] | None = None

    # --- the step ---------------------------------------------------------------------------

    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """Plan ahead on a thread of its own; see `Parallel.stream`."""
        steps = self.feed.steps(batches)
        try:
            for planned in steps:
                yield Step(planned.batch, planned)
        finally:
            steps.close()

    def train_step(self, step: Step, stop: bool = False) -> StepResult:
        """See `Parallel.train_step`."""
        flight = InFlight(step.plans, stop=stop)
        self._run(self._train, flight, timed=True)
        self.statistics.add(step.plans, self.rows)
        agreement = flight.agreement
        if agreement is None:
            raise RuntimeError("the schedule has no stage that agrees on the loss")
        return StepResult(agreement.loss, agreement.bad_ranks, agreement.stop)

    def eval_step(self, step: Step) -> Tensor:
        """See `Parallel.eval_step`."""
        flight = InFlight(step.plans)
        counts = [replace(rows.counts) for rows in self.rows]
        self.link.counters = self._uncounted
        try:
            self._run(self._eval, flight, timed=False)
        finally:
            self.link.counters = self.counters
            for rows, before in zip(self.rows, counts, strict=True):
                rows.counts = before
        if flight.logits is None:
            raise RuntimeError("the schedule has no stage that computes logits")
        return flight.logits

    def _run(self, schedule: SerialSchedule, flight: InFlight, timed: bool) -> None:
        with self.feed.running(flight.planned):
            schedule.run(flight, timed)

    def _write_back(self, flight: InFlight) -> None:
        for rows, plan in zip(self.rows, flight.planned.plans, strict=True):
            rows.write_back(plan)

    def _gather(self, flight: InFlight) -> None:
        flight.gathered = [
            rows.gather(plan) for rows, plan in zip(self.rows, flight.planned.plans, strict=True)
        ]

    def _fill(self, flight: InFlight) -> None:
        for rows, plan, values in zip(
            self.rows, flight.planned.plans, flight.gathered, strict=True
        ):
            rows.fill(plan, values)
        flight.gathered = []

    def _predict(self, flight: InFlight) -> Tensor:
        """Logits `[b]` of the local batch from the leaves of its rows."""
        planned, device = flight.planned, self.world.device
        pooled = [
            PooledLookup.apply(leaf, DeviceBags(bags, plan, device))
            for leaf, bags, plan in zip(flight.leaves, planned.bags, planned.plans, strict=True)
        ]
        batch = planned.batch
        dense = batch.dense.to(device, self.settings.dtype)
        return self.model(dense, join_pooled(self.groups, pooled, len(batch.labels)))

    def _take_leaves(self, planned: PlannedStep) -> list[Tensor]:
        return [rows.leaf(plan) for rows, plan in zip(self.rows, planned.plans, strict=True)]

    def _forward_backward(self, flight: InFlight) -> None:
        batch = flight.planned.batch
        flight.leaves = [leaf.requires_grad_() for leaf in self._take_leaves(flight.planned)]
        self.dense.zero()
        logits = self._predict(flight)
        labels = batch.labels.to(logits)
        total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        flight.loss = total / batch.global_size
        flight.loss.backward()

    @torch.no_grad()
    def _forward(self, flight: InFlight) -> None:
        flight.leaves = self._take_leaves(flight.planned)
        flight.logits = self._predict(flight)

    def _sync(self, flight: InFlight) -> None:
        """Program order: row gradients of each group, dense chunks, loss and control."""
        native = self.settings.reduction == "native"
        for leaf, plan in zip(flight.leaves, flight.planned.plans, strict=True):
            gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            flight.sums.append(reduce_rows(self.link, plan, gradient, native))
        self.dense.sum()
        if flight.loss is None:
            raise RuntimeError("sync comes after forward_backward")
        agreement = agree(self.link, flight.loss, flight.stop)
        if not agreement.bad_ranks and not math.isfinite(agreement.loss):
            agreement = replace(agreement, bad_ranks=tuple(range(self.world.size)))
        # Sticky: after a loss that is not finite nothing applies, whoever goes on.
        self._bad_ranks = self._bad_ranks or agreement.bad_ranks
        agreement = replace(agreement, bad_ranks=self._bad_ranks)
        flight.agreement = agreement

    @torch.no_grad()
    def _apply(self, flight: InFlight) -> None:
        """Update rows and dense part; a step whose summed loss is not finite changes nothing."""
        if flight.agreement is None or flight.agreement.bad_ranks:
            return
        self.applied += 1
        count = int(self.applied)
        for rows, plan, gradient in zip(
            self.rows, flight.planned.plans, flight.sums, strict=True
        ):
            rows.apply(plan, gradient, self.embedding_lr, count)
        self.dense_optimizer.step()

    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """See `Parallel.set_lr`."""
        self.embedding_lr = embedding_lr
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense_lr

    # --- whole tables -----------------------------------------------------------------------

    def flush(self) -> None:
        """Bring every dirty row to the store; a barrier.

        Nobody writes unless all ranks have the same last step: an error, on all ranks, if a step
        failed half-way on one of them. After an error that the stream raised they have.
        """
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

    def _table(self, table: int) -> tuple[Tensor, Tensor | None]:
        """Views of a table's weights and state in original ids."""
        group = next(i for i, group in enumerate(self.groups) if table in group.tables)
        place = self.groups[group].tables.index(table)
        rows = self.rows[group]
        if rows.store is not None:
            return rows.store.table(place)
        start, stop = (int(at) for at in self.groups[group].layout.offsets[place : place + 2])
        state = rows.cache.state
        return rows.cache.weight[start:stop], None if state is None else state[start:stop]

    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """See `Parallel.table_block`."""
        return self._table(table)[0][start:stop].cpu()

    def dense_state(self) -> dict[str, Tensor]:
        """See `Parallel.dense_state`."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """See `Parallel.state_dict`: views, in original ids.

        Where local ranks share a store, only the first of them names its tables; ranks with
        copies of their own (`resident`) all do, and one of them is written.
        """
        state: dict[str, Any] = {"applied_steps": self.applied}
        shared = self.settings.mode != "resident"
        if not shared or self.world.local_rank == 0:
            for index, table in enumerate(self.tables):
                weight, extra = self._table(index)
                state[f"tables.{table.name}.weight"] = weight
                for name, columns in self.update.state_columns(table.dim).items():
                    if extra is not None:
                        state[f"tables.{table.name}.{name}"] = extra[:, columns]
        for name, parameter in self.model.state_dict().items():
            state[f"dense.{name}"] = parameter
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for name, value in state_tensors(self.dense_optimizer, names).items():
            state[f"dense_optim.{name}"] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Parallel.load_state_dict`; tables were filled in place, before any step.

        Raises PlanError after a step: cached rows would hide what was filled in.
        """
        if self.feed.run_step >= 0:
            raise PlanError("a step was run: load a checkpoint before the first step")
        self.applied.copy_(state["applied_steps"])
        prefix = "dense."
        self.model.load_state_dict(
            {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
        )
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        prefix = "dense_optim."
        load_state(
            self.dense_optimizer,
            names,
            {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)},
        )
        together(self.world, lambda: None)

    def summary(self) -> dict[str, Any]:
        """See `Parallel.summary`; called by all ranks."""
        dense = self.dense.flat.nbytes * 2 + sum(
            value.nbytes
            for state in self.dense_optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        values = self.statistics.summary(self.world, self.rows, self.counters, dense)
        values["stage_ms"] = self.clock.mean_ms()
        values["table_rows"] = [table.rows for table in self.tables]
        if self.settings.mode != "data":
            values["cache_rows"] = None
        if self.settings.mode == "resident":
            moved = ("hit_rate", "hit_rate_lookups", "rows_fetched", "rows_written_back")
            for key in (*moved, "host_to_device_bytes", "device_to_host_bytes"):
                values[key] = None
        return values

    def close(self) -> None:
        """End the stream, if one is open, and let go of stores and gradients."""
        self.feed.close()
        for rows in self.rows:
            if rows.store is not None:
                rows.store.close()
        for parameter in self.dense.parameters:
            parameter.grad = None
