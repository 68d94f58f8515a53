"""The modes `data`, `resident` and `host`: one pure data-parallel trainer over rows in slots.

`data` caches C rows per rank over the node's store; `resident` has all rows on every device
(C = V, the same labels and gradients, nothing moves); `host` keeps none (every row of a step comes
from the store and leaves after it). Only the planner and the size of the cache differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from distcache.comm.agree import together
from distcache.comm.counters import PLANNING, ROWS, CollectiveCounters
from distcache.comm.link import Link
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.data.check import BatchCheck
from distcache.errors import PeerError, PlanError
from distcache.layout import TableSpec
from distcache.optim.dense import dense_optimizer
from distcache.optim.rows import row_update
from distcache.parallel.base import LateResult, OptimizerSpec, Parallel, Step, StepResult
from distcache.parallel.cached_parts import (
    CachedSettings,
    make_planner,
    make_rows,
    placement_of,
)
from distcache.parallel.cached_state import (
    hot_rows,
    load_dense,
    load_tables,
    meaningless,
    read_block,
    state_of_dense,
    whole_tables,
)
from distcache.parallel.cached_step import CachedStep
from distcache.parallel.load import RankLoad
from distcache.parallel.same import check_same
from distcache.parallel.statistics import StepStatistics, inter_node_bytes, stage_values
from distcache.pipeline.build import popular_groups
from distcache.pipeline.clock import StageClock, Watcher
from distcache.pipeline.feed import StepFeed
from distcache.pipeline.schedule import (
    InFlight,
    OverlappedSchedule,
    SerialSchedule,
    movement_of,
    record,
)
from distcache.pipeline.shake import Shaker, shaker
from distcache.pipeline.warm import WarmStart, warm_up
from distcache.popularity.node import Popularity
from distcache.streams import Mark, Streams

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
