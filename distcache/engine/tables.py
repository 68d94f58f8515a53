"""`CachedTables`, the engine's face: whoever trains goes through it, whatever the placement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcache import ops
from distcache.comm.link import PLANNING, ROWS, CollectiveCounters, Link, run_on_all_ranks
from distcache.comm.rendezvous import record_failure
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.full_tables import FullTables
from distcache.engine.gradients import (
    PooledLookup,
    RowLookup,
    join_pooled,
    start_reduce_rows,
    start_sums,
    start_to_homes,
)
from distcache.engine.groups import TableSettings, make_groups
from distcache.engine.movement import RowChoice, RowMover, marked_ids
from distcache.engine.pipeline import StepStream
from distcache.engine.start import RowPopularity, make_planner, make_rows, warm_up
from distcache.engine.step import (
    RETURN_ROWS,
    SHARE_LATE,
    SYNC,
    SYNC_ALONE,
    TRAINING_LANE,
    DelayHook,
    Stage,
    StepContext,
    stage_scope,
)
from distcache.errors import PeerError, PlanError
from distcache.layout import TableSpec
from distcache.ops import put
from distcache.optim import RowUpdate, kernel_rules
from distcache.planner.victims import GroupPopularity
from distcache.stopping import DelayedInterrupt
from distcache.store.rows import RowStore
from distcache.streams import COMMUNICATION, COMPUTE, Streams

MARKS = 4
"""Marks that are kept, the newest, for `CachedTables.changed_since`."""


RowSums = list[list[Tensor | None]]
"""Summed row gradients of a step, of each group two, None where it has no such rows: of its
replicated rows `[U, D]` in canonical order, the same on all ranks, or, where homes alone keep the
optimizer state, `[U_h, D]`, those of this rank's home; and of the sharded rows of this rank's home,
`[H, D]`."""

Owners = tuple[Tensor | None, Tensor | None]
"""The table of every row of a group's sums, by its place in the group, int32 on the CPU: of the
replicated ones and of the sharded ones."""


def all_of(sums: RowSums) -> list[Tensor]:
    """Those that there are."""
    return [own for of_group in sums for own in of_group if own is not None]


class ErrorScope(Context["ErrorScope"]):
    """See `CachedTables.error_scope`. A class and not a generator: every step enters it twice."""

    def __init__(self, tables: CachedTables) -> None:
        self._tables = tables

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._tables.fail(error)


class CachedTables:
    """Embedding tables as rows in slots; every method is called by all ranks in the same order.

    A step's way: `ahead(batches)` plans steps on threads of its own (`now` plans one here),
    `open` gives a step's leaves, one for each group, `pooled` or `rows` look up in them, and what
    autograd leaves in their gradients goes through `start_sum` (inside `syncing`) to `apply`.

    `groups`: the tables by width; `rows`: their slots and stores; `last_step`: the last step that
    was opened, -1 before any; `failed`: whether a step or a movement failed half-way, so that this
    rank's rows are those of no step; `counters`: bytes that this rank sent.
    """

    delay_hook: DelayHook = bool
    """Does nothing; tests delay hand-overs with it."""

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        features: Sequence[str],
        update: RowUpdate,
        settings: TableSettings,
        popularity: RowPopularity | None = None,
        check: Callable[[Batch], Batch] = lambda batch: batch,
        stores: Sequence[RowStore] = (),
        updates: Sequence[RowUpdate] = (),
    ) -> None:
        """`features`: of the batches, in their order; `popularity`: what statistics say of these
        tables, in order; `check`: gives a batch whose ids lie in their tables, or raises DataError
        (on the thread that reads it); `stores`: of `release`, whose rows go on; `updates`: the row
        optimizers of all tables, if they are not all `update`. Raises MemoryTooSmallError where a
        host does not hold the rows.
        """
        self.world, self.tables, self.settings, self.update = world, list(tables), settings, update
        groups = make_groups(tables, features, world.size)
        popular = [GroupPopularity() for _ in groups]
        share = 0.0
        if popularity is not None:
            layouts = [group.layout for group in groups]
            members = [group.tables for group in groups]
            popular = popularity.share(world, layouts, members)
            share = popularity.warm_start
        self.placement = settings.placed(world)
        self.groups = self.placement.groups(groups)
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self.link = Link(world, world.device_group, self.counters, "the device group")
        self.streams = Streams(world.device)
        self.rows = make_rows(self.groups, update, self.link, settings, self.streams, stores)
        self.full_tables = FullTables(world, self.tables, self.rows, update)
        self.planner = make_planner(world, self.rows, settings, check, popular)
        self._warm = ([own.hot for own in popular], share)
        self._updates = list(updates) or [update]
        self._is_compiled = False
        self.warmed = -1
        """Rows that a warm start brought; -1 before it."""
        self.shares = any(group.hot is not None for group in self.groups)
        """Whether a step begins with an exchange of rows."""
        self.home_state = self.placement.state == "home"
        self._returns = self.home_state and any(rows.slots.replicated for rows in self.rows)
        self._mover = RowMover(self.rows, self.link, self.streams, settings)
        self.overlapped = settings.schedule == "overlapped"
        """Whether rows move on a thread of their own."""
        self.stream: StepStream | None = None
        """The last that was begun, whose threads may have ended."""
        self.sync = SYNC if world.size > 1 else SYNC_ALONE
        """The stage in which gradients and results go to all ranks."""
        self.last_step, self.failed, self._stale = -1, False, False
        self.error_scope = ErrorScope(self)
        """What fails inside leaves the rows of no step; the other ranks hear of it."""
        self._alone = {"train", "eval"} if world.size > 1 and self.streams.asynchronous else set()
        """Kinds of steps whose first is yet to come, beside which nothing moves: a GPU may wait for
        its own work when it loads a kernel for the first time, and that work for other ranks."""

    # --- plans ------------------------------------------------------------------------------

    def ahead(self, batches: Iterable[Batch]) -> StepStream:
        """Plan `batches` on a thread of its own, and move their rows on another; one stream at a
        time is open. Planning goes on from what the device holds, so a stream may end anywhere and
        another one, or `now`, take over after the same step on all ranks.

        Raises PlanError while another stream is open or after a failed step.
        """
        self._begin()
        depth, mover = self.settings.prefetch + 1, self._mover if self.overlapped else None
        self.stream = StepStream(self.planner, batches, depth, self.streams, mover, self.delay_hook)
        return self.stream

    def now(self, batch: Batch) -> StepContext:
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
            raise PlanError(
                "a step failed half-way, and this model cannot go on: make it anew, then load a "
                "checkpoint"
            )
        if self.stream is not None and not self.stream.finish_if_exhausted():
            raise PlanError(
                "another stream of this model is open, or a batch that it reads does not come: end "
                "or close it first"
            )
        if self._stale or self.planner.ingested != self.last_step + 1:
            rows = self.rows
            self.planner.restore(self.last_step, lambda at, slots: rows[at].held_rows(slots))
        self._stale = False
        if not self._is_compiled:
            self._compile_kernels()
        if self.warmed < 0:
            self.warm_up()

    @torch.no_grad()
    def _compile_kernels(self) -> None:
        """Compile and load the kernels of all steps in this thread, before another one launches
        any: Triton's compiler would stop training or movement in the middle of a run."""
        if self.world.device.type == "cuda":
            rules = kernel_rules(self._updates)
            for kind in dict.fromkeys(rows.cache.kind for rows in self.rows):
                ops.compile_kernels(kind, rules, self.world.device)
        self._is_compiled = True

    def warm_up(self) -> None:
        """Fill empty slots with the likeliest rows, as far as statistics tell them; the first
        stream does it where nobody has."""
        parts = (self.rows, self.planner, self.streams, self.last_step)
        self.warmed = warm_up(*self._warm, *parts)

    def look_ahead(self, steps: int) -> None:
        """Let L be `steps` from the next stream on; by all ranks, while none is open."""
        self.settings = self.planner.settings = replace(self.planner.settings, lookahead=steps)

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

    def stage(self, stage: Stage, context: StepContext) -> Context[None]:
        """The time in which the training thread runs `stage` of a step, on the stage's stream."""
        return stage_scope(stage, context, TRAINING_LANE, self.streams, self.delay_hook)

    def open(self, context: StepContext) -> list[Tensor]:
        """Begin a step: its leaves by group, `[U + N, D]`, once its rows are on the device.

        A leaf's first U rows are the replicated ones in canonical order, the other N those sharded
        rows that this rank's ids name. Later steps' rows may move from now on. Each step of a
        stream is opened once, in order; where autograd records nothing (`torch.no_grad`, no
        inference mode), as all of a step but its forward and backward.
        """
        stream, streams, alone = context.stream, self.streams, False
        context.free = streams.record_event(COMPUTE, timed=True)
        if stream is None or not self.overlapped:
            context.after = context.free
            with DelayedInterrupt(), self.error_scope:
                if not context.moved:  # by an earlier call that was interrupted later
                    self._mover.move(context, TRAINING_LANE, self.delay_hook)
                    context.moved = True
        else:
            alone = context.batch.kind in self._alone
            self._alone.discard(context.batch.kind)
            # Where a step begins with an exchange, fills come before or after it on all ranks.
            if self.shares:
                stream.wait_until_issued()
            last = context.step if self.shares or alone else None
            stream.release(self.last_step, context.free, last)
            stream.wait_for_rows(context)
        if self.shares:
            # It sends rows that were just changed.
            streams.wait_events(COMMUNICATION, (context.free,))
            with self.stage(SHARE_LATE, context):
                self._share(context)
            if stream is not None and not alone:
                stream.release_all()
        self.last_step = context.step
        return self._leaves(context)

    def leaves(self, context: StepContext) -> list[Tensor]:
        """The leaves of the step that was opened last, read anew: as `open` gave them, or, once the
        step was applied, with the new rows (then all ranks call it, for sharded rows travel); see
        `open`."""
        if context.applied and self.shares:
            with self.stage(SHARE_LATE, context):
                self._share(context)
        context.applied = False
        return self._leaves(context)

    def _leaves(self, context: StepContext) -> list[Tensor]:
        self.streams.wait_events(COMPUTE, (context.after,))
        self.streams.record_stream(context.made, COMPUTE)
        context.made, context.leaves = [], []
        for at, (rows, plan) in enumerate(zip(self.rows, context.plans, strict=True)):
            own = context.sharded[at] if context.sharded else None
            if own is None or plan.distinct:
                first = rows.cache.gather(plan.slots, context.where[at].slots)
                own = first if own is None else torch.cat((first, own))
            context.leaves.append(own.to(rows.cache.kind.dtype))
        return context.leaves

    def _share(self, context: StepContext) -> None:
        """Bring the sharded rows that did not travel before the step; all of them, once it was
        applied."""
        known = context.sharded or [None] * len(self.rows)
        context.sharded = []
        for rows, plan, where, early in zip(
            self.rows, context.plans, context.where, known, strict=True
        ):
            shard, there = plan.shard, where.shard
            if shard is None or there is None:
                context.sharded.append(None)
                continue
            came = rows.send_rows(shard.late, there.late, self.link, f"late rows {plan.step}")
            if shard.early is not None and there.early is not None:
                if early is None or context.applied:
                    what = f"rows of {plan.step} again"
                    first = rows.send_rows(shard.early, there.early, self.link, what)
                    early = first.new_empty((shard.rows, first.shape[1]))
                    put(early, there.early.places, first)
                came = put(early, there.late.places, came)
            context.made.append(came)
            context.sharded.append(came)

    def pooled(
        self,
        context: StepContext,
        leaves: Sequence[Tensor],
        part: int = 0,
        weights: Sequence[Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The bags of a step's micro-batch `part`, `[b, sum of widths]` in the order of the
        features; differentiable in `leaves`, whose gradients are summed in the ids' order, and in
        `weights`, by feature, of ids of a batch that was planned without. `out`: where the bags are
        to lie too."""
        found, bags_of = [], context.lookups[part]
        room = (out,) if out is not None and len(bags_of) == 1 and bags_of[0].single else ()
        for group, leaf, bags in zip(self.groups, leaves, bags_of, strict=True):
            own = None
            if weights is not None:
                own = torch.cat([weights[feature] for feature in group.features]).to(leaf.dtype)
            found.append(PooledLookup.apply(leaf, bags, own, room))
        pooled = join_pooled(self.groups, found)
        if out is not None and not room:
            out.copy_(pooled.detach())
        return pooled

    def lookup(self, context: StepContext, leaves: Sequence[Tensor], part: int = 0) -> list[Tensor]:
        """The row of every id of a step's micro-batch `part`, by feature: `[n_f, D_f]` each; of
        tables with `pooled=False`."""
        out: dict[int, Tensor] = {}
        for group, leaf, bags in zip(self.groups, leaves, context.lookups[part], strict=True):
            out |= zip(group.features, RowLookup.apply(leaf, bags), strict=True)
        return [out[feature] for feature in sorted(out)]

    def syncing(self, context: StepContext) -> Context[None]:
        """The exchange of a step's gradients with all ranks, after the moves that come before it
        in the order of the device group."""
        self.settle(context)
        return self.stage(self.sync, context)

    def settle(self, context: StepContext) -> None:
        """Wait until all moves that were let go are issued: what comes now comes after them in the
        order of the device group."""
        if context.stream is not None and self.world.size > 1:
            began = time.perf_counter()
            (context.stream.wait_until_issued() or context).waited(began)

    def start_sum(
        self, context: StepContext, gradients: Sequence[Tensor | None]
    ) -> Callable[[], RowSums]:
        """Send this rank's leaf gradients `[U + N, D]`, by group, to the rows' homes; call it for
        the sums. Inside `syncing`, where autograd records nothing. Contributions of a row are added
        in rank order. None, on all ranks: a group whose rows are left as they are."""
        native, link = self.settings.reduction == "native", self.link
        started: list[tuple[Callable[[], Tensor] | None, Callable[[], Tensor] | None]] = []
        for rows, plan, where, gradient in zip(
            self.rows, context.plans, context.where, gradients, strict=True
        ):
            sums, own = None, None
            if gradient is not None and rows.slots.replicated:
                summed, named = gradient[: plan.distinct], (where.touched_rows, where.source_rows)
                if self.home_state:
                    sums = start_to_homes(link, plan, summed, named)
                else:
                    sums = start_reduce_rows(link, plan, summed, named, native)
            if gradient is not None and plan.shard is not None and where.shard is not None:
                counts = (plan.shard.counts, plan.shard.source_counts)
                mine = (where.shard.source_rows, len(plan.shard.slots))
                what = f"sharded row gradients {plan.step}"
                own = start_sums(link, what, gradient[plan.distinct :], counts, mine)
            started.append((sums, own))

        def finish() -> RowSums:
            found: RowSums = [[None, None] for _ in started]
            for region in (0, 1):  # in program order: first the sums of replicated rows go to all
                for own, of in zip(found, started, strict=True):
                    if (sums := of[region]) is not None:
                        own[region] = sums()
            return found

        return finish

    def apply(
        self,
        context: StepContext,
        sums: RowSums,
        choices: RowChoice | Sequence[Sequence[RowChoice]],
        enabled: Tensor | None = None,
    ) -> None:
        """Update the step's rows and state in place, where autograd records nothing, inside stage
        `apply`; then `return_rows`. `choices`: of all rows, or of each group, whose other rows are
        left as they are; `enabled`: as in `ops.update_rows`."""
        parts = (self.rows, context.plans, context.where, sums)
        for place, (rows, plan, where, own) in enumerate(zip(*parts, strict=True)):
            for one in (choices,) if isinstance(choices, RowChoice) else choices[place]:
                rows.apply(plan, where, own, one, enabled)
        context.applied = True

    def tables_of_sums(self, context: StepContext, group: int) -> Owners:
        """The table of every row of a group's sums; inside `syncing`.

        A home knows its rows by number; of rows whose sums are everywhere it tells the others.
        """
        rows, plan, world = self.rows[group], context.plans[group], self.world
        offsets, held = rows.group.layout.offsets, rows.cache.slot_row

        def named(slots: Tensor) -> Tensor:
            places = np.searchsorted(offsets, held[slots.numpy()], side="right") - 1
            return torch.from_numpy(places.astype(np.int32))

        replicated = None
        if rows.slots.replicated:
            replicated = named(plan.slots[plan.home_slice(world.rank)])
            if world.size > 1 and not self.home_state:
                own = replicated.unsqueeze(1).to(world.device)
                what = f"tables of rows {plan.step}"
                gathered = self.link.all_gather_rows(own, plan.home_counts, what)
                replicated = gathered.cpu().flatten()
        return replicated, None if plan.shard is None else named(plan.shard.slots)

    def return_rows(self, context: StepContext) -> None:
        """Once rows and dense part are updated: homes that alone have the state send their new rows
        to all ranks, if they were applied."""
        if not (self._returns and context.applied):
            return
        with self.stage(RETURN_ROWS, context), torch.no_grad():
            for rows, plan, where in zip(self.rows, context.plans, context.where, strict=True):
                if rows.slots.replicated:
                    rows.return_rows(plan, self.link, where.slots)
        self.streams.wait_events(COMPUTE, (context.after,))

    def count(self, context: StepContext) -> None:
        """Count what moved for a step, and the bytes of its planning and moving."""
        for rows, counts in zip(self.rows, context.counts, strict=True):
            rows.counts.add(counts)
        if self.world.size > 1:  # a rank alone sends nothing
            self.counters.count(ROWS, context.fill_bytes, context.fill_between_nodes)
            self.counters.count(PLANNING, context.planning_bytes)

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

        def whole_steps() -> tuple[int, int]:
            if self.failed:
                raise PlanError(
                    f"a step after {self.last_step - 1} failed half-way: what this rank holds is "
                    "the state of no step; go on from the last checkpoint"
                )
            return self.last_step, applied

        with self.error_scope:
            if self.stream is not None:
                self.stream.pause_movement()
        steps = run_on_all_ranks(self.world, whole_steps)
        if len(set(steps)) > 1:
            counts = ", ".join(f"rank {rank}: {run}" for rank, run in enumerate(steps))
            raise PeerError(
                f"the ranks have run different steps, so nothing was written ({counts}); go on "
                "from the last checkpoint"
            )
        for rows in self.rows:
            rows.flush()
        run_on_all_ranks(self.world, lambda: None)

    def mark(self, changed: Mapping[str, np.ndarray] | None = None, keep: int = MARKS) -> int:
        """A mark at this step, right after `flush`, by its number, for `changed_since`; the last
        `keep` are kept, each a bit for every row. Raises PlanError where rows have no store.

        `changed`: ids of tables, int64 `[m]`, that count as changed since.
        """
        if any(rows.store is None for rows in self.rows):
            raise PlanError("tables that lie on the devices whole keep no marks: take another mode")
        number = max(self.rows[0].marks, default=-1) + 1
        for rows in self.rows:
            # A new dictionary: movement may be going through the one there is.
            kept = {at: bits for at, bits in rows.marks.items() if at > number - keep}
            none = np.zeros(-(-rows.group.layout.local_rows // 8), np.uint8)
            rows.marks = {**kept, number: none}
        for index, table in enumerate(self.tables):
            if changed and table.name in changed:
                self.full_tables.note(index, changed[table.name], number)
        return number

    def changed_since(self, mark: int) -> dict[str, np.ndarray]:
        """The ids of each table, int64, ascending, of the rows named by steps that were applied, or
        written by hand, since `mark`; the same on all ranks. Right after `flush`.

        Raises PlanError for a mark that is not kept.
        """
        if mark not in self.rows[0].marks:
            raise PlanError(
                f"mark {mark} is not kept, of the last {MARKS} there are "
                f"{sorted(self.rows[0].marks)}: export whole tables, and mark again"
            )
        found: dict[str, np.ndarray] = {}
        for rows in self.rows:
            layout, own = rows.group.layout, rows.marks[mark]
            by_home = enumerate(run_on_all_ranks(self.world, lambda own=own: own))
            homes = [marked_ids(layout, home, bits) for home, bits in by_home]
            for table, *parts in zip(layout.tables, *homes, strict=True):
                found[table.name] = np.sort(np.concatenate(parts))
        return {table.name: found[table.name] for table in self.tables}

    def forget(self) -> None:
        """The stores have changed under the cache: all rows are read anew; local."""
        for rows in self.rows:
            rows.cache.forget()
        self._stale, self.warmed = True, -1

    def require_unused(self) -> None:
        """Raise PlanError once rows are cached, which would hide what a load fills in."""
        if self.last_step >= 0 or self.warmed > 0:
            raise PlanError("a step was run or rows are cached: load a checkpoint before that")

    def release(self) -> list[RowStore]:
        """End, once no stream is open, and hand over the stores; safe to call twice."""
        self.planner.close()
        with suppress(RuntimeError):  # of a device that has failed, and has said so
            self.streams.drain()  # rows of steps that nobody ran may still be on their way
        return [rows.store for rows in self.rows if rows.store is not None]

    def close(self) -> None:
        """Let go of the stores, once no stream is open; safe to call twice, on one rank alone."""
        for store in self.release():
            store.close()
