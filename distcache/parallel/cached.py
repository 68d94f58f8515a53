"""The modes `data`, `resident` and `host`: one pure data-parallel trainer over rows in slots.

`data` caches C rows per rank over the node's store; `resident` has all rows on every device (C = V,
the same labels and gradients, nothing moves); `host` keeps none (every row of a step comes from the
store and leaves after it). Only the planner and the size of the cache differ. What concerns rows is
`engine.tables.CachedTables`; here are the dense part, the loss, and the order in which both go.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.comm.link import ROWS
from distcache.comm.world import World
from distcache.data.batch import Batch, BatchCheck
from distcache.engine.full_tables import Snapshot
from distcache.engine.gradients import Control, ControlRing, DenseGradients
from distcache.engine.groups import TableSettings
from distcache.engine.movement import RowChoice
from distcache.engine.pipeline import STOP_S
from distcache.engine.step import (
    APPLY,
    FORWARD,
    FORWARD_BACKWARD,
    MoveCounts,
    StepContext,
    Watcher,
    record,
)
from distcache.engine.tables import CachedTables, RowSums
from distcache.errors import ConfigError, PlanError
from distcache.layout import TableSpec
from distcache.optim import RowUpdate, dense_optimizer, masked_step, put_back, uncount
from distcache.parallel.base import (
    LateResult,
    Parallel,
    Step,
    StepResult,
    StepStatistics,
    held_bytes,
    predict,
)
from distcache.parallel.dense_graph import DenseGraph, shape_of
from distcache.popularity.statistics import Popularity
from distcache.store.table_files import Stored

MOST_NAMED = 64
"""Tables that a summary names."""

_DELAY = 2
"""Steps after which the host looks at a step's loss, where the device works on beside it."""

_GRAPHS = 8
"""Most graphs of a run whose batches change their shape: recording one waits for the device."""

_FAILED_STOP_S = 1.0
"""`STOP_S` when a step failed: the other planners may never come."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedSettings(TableSettings):
    """How a cached mode runs: its rows, and beside them `on_bad_id` (`error` or `hash`);
    `result_delay`: steps after which a step's loss is read (None: 2 on CUDA, 0 on the CPU); `amp`:
    `off`, or `bf16` for the dense part; `cuda_graph`: whether a GPU replays the dense part, which
    does the same in each step then, from a graph."""

    on_bad_id: str = "error"
    result_delay: int | None = None
    amp: str = "off"
    cuda_graph: bool = False


@dataclass
class Outcome:
    """What becomes of one step of the trainer, on its way.

    `loss`: this rank's share of the mean over the global batch; `buffers`: those of the dense model
    that are saved, and their values before the step.
    """

    asks: int = 0
    loss: Tensor | None = None
    sums: RowSums | None = None
    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    control: Control | None = None
    agreement: StepResult | None = None


class CachedParallel(Parallel):
    """Tables as rows in slots, dense part replicated, all gradients summed over ranks.

    `applied`: steps applied so far (also in the checkpoint, int64); after `flush` exactly, on every
    device. A loss that is not finite is sticky: nothing applies after it.
    """

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        features: Sequence[str],
        model: nn.Module,
        update: RowUpdate,
        settings: CachedSettings,
        popularity: Popularity | None = None,
    ) -> None:
        """`popularity`: what mode `data` takes from statistics of these tables, in order."""
        self.world, self.settings, self.features = world, settings, tuple(features)
        self.model = model.to(world.device, settings.dtype)
        check = BatchCheck(tables, features, settings.on_bad_id)
        self.tables = CachedTables(world, tables, features, update, settings, popularity, check)
        self.groups, self.rows, self.link = self.tables.groups, self.tables.rows, self.tables.link
        self.streams, self.counters = self.tables.streams, self.tables.counters
        self.dense_optimizer = dense_optimizer(self.model.parameters(), update)
        self.dense = DenseGradients(self.model, link=self.link)
        delay = settings.result_delay
        self.result_delay = _DELAY * self.streams.asynchronous if delay is None else delay
        how = self.result_delay, self.tables.sync.stream
        self._control = ControlRing(self.link, self.streams, *how)
        self._graph: DenseGraph | None = None
        self._records = _GRAPHS * (settings.cuda_graph and self.streams.ordered)
        """How many graphs may yet be made, each of steps of a shape that the one before is not
        for."""
        self._pooled_width = sum(group.dim * len(group.features) for group in self.groups)
        self._shape: Hashable = None
        """Of the last step; None before the first."""
        self.applied = 0
        self._update = update
        self._bad_ranks: tuple[int, ...] = ()
        self._due: StepContext | None = None
        self._open = False
        self._unread: deque[StepContext] = deque()
        self._modules = list(self.model.modules())
        self._buffers = [
            (module, name)
            for module in self._modules
            for name in module._buffers.keys() - module._non_persistent_buffers_set
        ]
        """What of the dense model a checkpoint has beside its parameters, in any order."""
        self.statistics = StepStatistics(self.tables)
        self.clock = self.statistics.clock
        self._hot_rows = None if popularity is None else popularity.hot_rows

    # --- the stream of steps ----------------------------------------------------------------

    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """Plan ahead on a thread of its own; see `Parallel.stream`.

        Ends at the first rank's end. Raises what went wrong with the batches of some rank, on all
        ranks after the same step; PlanError while another stream is open or after a failed step.
        """
        tables = self.tables
        if self._open:
            raise PlanError("another stream of this model is open: end or close it first")
        stream, self._open = tables.ahead(batches), True
        try:
            for context in stream:
                self._due = context
                yield Step(context.batch, context)
                if self._due is not None:
                    raise PlanError(
                        f"step {context.step} of the stream was not run: call train_step or "
                        "eval_step once for each step, before the next is taken"
                    )
        except Exception:
            tables.failed |= stream.error_is_local
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """Stop the threads; forget what was planned beyond the last step that was run."""
        if not self._open:
            return
        self._open, self._due, tables = False, None, self.tables
        limit = _FAILED_STOP_S if tables.failed else min(self.world.timeout_s, STOP_S)
        try:
            ended = tables.end(limit, orderly=not tables.failed)
        except Exception as error:  # the movement of a step that nobody will run
            tables.fail(error)
            log.warning("moving rows failed: %s", error)
            ended = tables.end(_FAILED_STOP_S, orderly=False)
        if not ended and not tables.failed:
            tables.failed = True
            log.warning("the planner did not end within %g s: the batches do not come", limit)

    # --- one step ---------------------------------------------------------------------------

    def _begin(self, step: Step) -> StepContext:
        """The step that was handed out last; PlanError for any other."""
        context: StepContext = step.context
        if context is not self._due:
            raise PlanError(
                f"step {context.step} is not due: run each step of the stream once, in its order"
            )
        self._due, context.result = None, Outcome()
        return context

    @torch.no_grad()
    def train_step(self, step: Step, asks: int = 0) -> StepResult:
        """See `Parallel.train_step`."""
        context, tables = self._begin(step), self.tables
        context.result.asks = asks
        with tables.error_scope:
            leaves = tables.open(context)
            with tables.stage(FORWARD_BACKWARD, context):
                self._forward_backward(context, leaves)
            with tables.syncing(context):
                self._sync(context, leaves)
            with tables.stage(APPLY, context):
                self._apply(context)
            tables.return_rows(context)
        tables.count(context)
        self.statistics.add(context)
        # The next step has this memory, whenever somebody looks at the result of this one.
        context.leaves, context.sharded, context.result.sums, context.result.buffers = (
            [],
            [],
            None,
            (),
        )
        self._unread.append(context)
        self._read(self.result_delay)
        if self.result_delay:
            late: Any = LateResult(partial(self._result, context))
            return late
        return context.result.agreement

    @torch.enable_grad()
    def _forward_backward(self, context: StepContext, leaves: Sequence[Tensor]) -> None:
        outcome: Outcome = context.result
        if context.batch.is_empty:  # a model need not take an empty batch
            self.dense.zero()
            self.dense.gather()
            outcome.loss = context.labels.new_zeros(())
            return
        if self._buffers:
            buffers = (module._buffers.get(name) for module, name in self._buffers)
            outcome.buffers = [(value, value.clone()) for value in buffers if value is not None]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        graph, shape, size = self._graph, shape_of(context), context.batch.global_size
        if graph is not None and graph.shape == shape:
            pooled = self.tables.pooled(context, leaves, out=graph.pooled)
            outcome.loss, gradient = graph(context)
            if gradient is not None:
                pooled.backward(gradient)
        else:  # nothing here holds the bags, whose memory backward can have
            dense, labels, pooled = context.dense, context.labels, self.tables.pooled
            outcome.loss, _ = self._dense_pass(dense, pooled(context, leaves), labels, size)
            if self._records and self._shape in (None, shape) and len(context.dense):
                self._record(context)
        self._shape = shape

    def _dense_pass(
        self, dense: Tensor, pooled: Tensor, labels: Tensor, samples: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `DensePass`; the dense part's own gradients lie in `self.dense.flat` then."""
        self.dense.zero()
        own = None if pooled.requires_grad else pooled.detach().requires_grad_()
        logits = predict(self.model, dense, pooled if own is None else own, self.settings.amp)
        del pooled
        labels = labels.to(logits.dtype)
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = total / samples
        loss.backward()
        with torch.no_grad():
            self.dense.gather()
        return loss.detach(), None if own is None else own.grad

    def _record(self, context: StepContext) -> None:
        """Record the dense part for the steps to come, of this one's shape, which waits for the
        device: it is the first step, beside which nothing moves that other ranks could wait for, or
        the second of a shape.

        Raises ConfigError where that fails: torch does not promise to go on then.
        """
        self._records, self._graph = self._records - 1, None
        buffers, way_out = list(self.model.buffers()), "set trainer.cuda_graph=false"
        try:
            self._graph = DenseGraph(self._dense_pass, context, self._pooled_width)
        except Exception as error:  # that of the end has the first for its context
            raise ConfigError(
                f"the dense part cannot be recorded as a CUDA graph: {error.__context__ or error}; "
                f"{way_out}"
            ) from error
        if any(new is not old for new, old in zip(self.model.buffers(), buffers, strict=True)):
            raise ConfigError(
                "the model gives its buffers new memory as it runs, where a CUDA graph changes "
                f"nothing: change them in place, or {way_out}"
            )

    def _sync(self, context: StepContext, leaves: Sequence[Tensor]) -> None:
        """Program order: row gradients of each group, dense chunks, loss and control; then what
        follows from the first. All three are under way at once."""
        outcome: Outcome = context.result
        gradients = [torch.zeros_like(at) if at.grad is None else at.grad for at in leaves]
        rows = self.tables.start_sum(context, gradients)
        dense, control = self.dense.start_sum(), self._control.start(outcome.loss, outcome.asks)
        outcome.sums = rows()
        dense()
        outcome.control = control()

    def _apply(self, context: StepContext) -> None:
        """Update rows and dense part; a step changes nothing if its summed loss is not finite, or
        if no rank has a sample: Adam and momentum would move weights without a gradient."""
        outcome: Outcome = context.result
        control = outcome.control
        enabled = control.enabled if self.result_delay else None
        if outcome.buffers:
            put_back(outcome.buffers, control.enabled)
        if not self.result_delay and self._agreed(context).bad_ranks:
            return
        if context.batch.is_empty:
            return
        self.applied += 1
        choice = RowChoice(self._update, self.applied)
        self.tables.apply(context, outcome.sums, choice, enabled)
        if enabled is None:
            self.dense_optimizer.step()
        else:
            masked_step(self.dense_optimizer, enabled, [self.dense.flat])

    def _agreed(self, context: StepContext) -> StepResult:
        """What all ranks know of a step; to be asked for step after step, in order.

        Sticky: after a loss that is not finite nothing applies, whoever goes on.
        """
        outcome: Outcome = context.result
        if outcome.agreement is None:
            agreement = outcome.control.read()
            self._bad_ranks = self._bad_ranks or agreement.bad_ranks
            if self._bad_ranks:
                agreement = agreement._replace(bad_ranks=self._bad_ranks)
            outcome.agreement = agreement
            counted = bool(self.result_delay) and not context.batch.is_empty
            if self._bad_ranks and counted:  # before anybody knew
                self.applied -= 1
                uncount(self.dense_optimizer)
        return outcome.agreement

    def _result(self, context: StepContext) -> StepResult:
        """What all ranks know of a step; waits for it, and for those before it."""
        while context.result.agreement is None:
            self._read(len(self._unread) - 1)
        return context.result.agreement

    def _read(self, keep: int) -> None:
        """Look at the results of steps, in order, but for the last `keep` of them."""
        while len(self._unread) > keep:
            context = self._unread[0]
            with self.tables.error_scope:
                self._agreed(context)
            self._unread.popleft()
            record(self.clock, context, self.streams)
            if context.stream is not None:
                context.stream.retire(context)

    def eval_step(self, step: Step) -> Tensor:
        """See `Parallel.eval_step`."""
        context, tables, counters = self._begin(step), self.tables, self.counters
        sent, between = counters.collective_bytes, counters.inter_node_bytes
        with tables.error_scope, torch.no_grad():
            leaves = tables.open(context)
            with tables.stage(FORWARD, context):
                modes = [(module, module.training) for module in self._modules]
                self.model.eval()
                try:
                    pooled = tables.pooled(context, leaves)
                    logits = predict(self.model, context.dense, pooled, self.settings.amp)
                finally:
                    for module, training in modes:
                        module.training = training
        since = sent - counters.collective_bytes, between - counters.inter_node_bytes
        counters.count(ROWS, *since)  # they are training's
        record(self.clock, context, self.streams)
        return logits

    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """See `Parallel.set_lr`."""
        if embedding_lr != self._update.lr:
            self._update = replace(self._update, lr=embedding_lr)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense_lr

    # --- whole tables -----------------------------------------------------------------------

    def flush(self) -> None:
        """Bring every dirty row to the store; a barrier.

        Nobody writes unless all ranks have the same last step: an error, on all ranks, if a step
        failed half-way on one of them. After an error that the stream raised they have.
        """
        self._read(0)
        self.tables.flush(self.applied)

    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """See `Parallel.table_block`."""
        return self.tables.full_tables.block(table, range(start, stop))

    def fill_table(self, table: int, source: Stored) -> None:
        """See `Parallel.fill_table`. Raises PlanError once rows are cached."""
        self.tables.require_unused()
        self.tables.full_tables.fill(table, source)

    def snapshot(self, folder: Path) -> Snapshot | None:
        """See `Parallel.snapshot`: where this node has all rows, and the devices have copies."""
        if self.settings.mode == "resident" or self.world.nodes.count > 1:
            return None
        return Snapshot(folder, self.tables.rows, self.tables.full_tables)

    def mark(self) -> int | None:
        """See `Parallel.mark`: where rows have a store."""
        return None if self.settings.mode == "resident" else self.tables.mark(keep=1)

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        """See `Parallel.state_dict`, and `whole.FullTables.state`."""
        return self.blank_state(True, since)

    def blank_state(self, filled: bool = False, since: int | None = None) -> dict[str, Any]:
        """See `Parallel.blank_state`."""
        tables = self.tables.full_tables.state(self.scratch, filled, since)
        return {"applied_steps": torch.tensor(self.applied)} | tables | self.dense_values()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Parallel.load_state_dict`; before any step.

        Raises PlanError once rows are cached, which would hide what was filled in.
        """
        self.tables.require_unused()
        self.applied = int(state["applied_steps"])
        self.load_dense(state)
        self.tables.full_tables.load(state)

    def summary(self) -> dict[str, Any]:
        """See `Parallel.summary`; called by all ranks."""
        self._read(0)
        tables, specs = self.tables, self.tables.tables
        dense = held_bytes(self.dense.parameters, self.dense_optimizer)
        values = self.statistics.summary(dense)
        values["table_rows"] = sum(table.rows for table in specs)
        values |= {"lookahead": self.settings.lookahead, "prefetch": self.settings.prefetch}
        if self._hot_rows is not None:
            values["warm_start_rows"] = max(tables.warmed, 0)
            pairs = zip(specs, self._hot_rows, strict=True)
            named = {table.name: count for table, count in pairs}
            values["hot_rows_by_table"] = named if len(specs) <= MOST_NAMED else None
        if self.settings.mode != "data":  # it caches nothing
            values |= dict.fromkeys(("cache_rows", "hit_rate", "hit_rate_lookups"))
        if self.settings.mode == "resident":  # and moves nothing
            values |= dict.fromkeys(vars(MoveCounts()))
        return values

    def errors_are_common(self) -> bool:
        """See `Parallel.errors_are_common`."""
        return not self.tables.failed

    def progress(self) -> dict[str, Any]:
        """See `Parallel.progress`."""
        rate = self.statistics.hit_rate() if self.settings.mode == "data" else None
        values = self.clock.lap()
        return values if rate is None else {"hit_rate": rate} | values

    def watch(self, watcher: Watcher) -> None:
        """See `Parallel.watch`; every step is timed from now on."""
        self.streams.timed_every = 1
        super().watch(watcher)

    def close(self) -> None:
        """End the stream, if one is open, and let go of stores, gradients and graph."""
        self._end()
        self.tables.close()
        self._graph = None
        for parameter in self.dense.parameters:
            parameter.grad = None
