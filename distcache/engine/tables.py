"""`CachedTables`, the engine's face: whoever trains goes through it, whatever the placement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcache.comm.link import PLANNING, ROWS, CollectiveCounters, Link, together
from distcache.comm.rendezvous import record_failure
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.gradients import (
    PooledLookup,
    RowLookup,
    join_pooled,
    start_reduce_rows,
    start_sums,
    start_to_homes,
    to_all,
)
from distcache.engine.groups import TableSettings, make_groups
from distcache.engine.movement import Mover, RowChoice, marked_ids
from distcache.engine.queue import StepStream
from distcache.engine.start import make_planner, make_rows, warm_up
from distcache.engine.step import (
    RETURN_ROWS,
    SHARE_LATE,
    SYNC,
    SYNC_ALONE,
    TRAINING_LANE,
    Flight,
    Shake,
    Stage,
    running,
)
from distcache.engine.whole import WholeTables
from distcache.errors import PeerError, PlanError
from distcache.layout import TableSpec
from distcache.ops import put
from distcache.optim import RowUpdate
from distcache.popularity.statistics import GroupPopularity, Popularity, share_popularity
from distcache.store.rows import RowStore
from distcache.streams import COMMUNICATION, COMPUTE, Streams

MARKS = 4
"""Marks that are kept, the newest, for `CachedTables.changed_since`."""


RowSums = list[list[Tensor | None]]
"""Summed row gradients of a step, of each group two, None where it has no such rows: of its
replicated rows `[U, D]` in canonical order, the same on all ranks, or, where homes alone keep the
optimizer state, `[U_h, D]`, those of this rank's home; and of the sharded rows of this rank's home,
`[H, D]`."""


def all_of(sums: RowSums) -> list[Tensor]:
    """Those that there are."""
    return [own for of_group in sums for own in of_group if own is not None]


class Whole(Context["Whole"]):
    """See `CachedTables.whole`. A class and not a generator: every step enters it twice."""

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

    shake: Shake = bool
    """Does nothing; tests delay hand-overs with it."""

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        features: Sequence[str],
        update: RowUpdate,
        settings: TableSettings,
        popularity: Popularity | None = None,
        check: Callable[[Batch], Batch] = lambda batch: batch,
        stores: Sequence[RowStore] = (),
    ) -> None:
        """`features`: of the batches, in their order; `popularity`: what statistics say of these
        tables, in order; `check`: gives a batch whose ids lie in their tables, or raises DataError
        (on the thread that reads it); `stores`: of `release`, whose rows go on. Raises
        MemoryTooSmallError where a host does not hold the rows.
        """
        self.world, self.tables, self.settings, self.update = world, list(tables), settings, update
        groups = make_groups(tables, features, world.size)
        popular, share = [GroupPopularity() for _ in groups], 0.0
        if popularity is not None:
            layouts = [group.layout for group in groups]
            members = [group.tables for group in groups]
            popular = share_popularity(world, layouts, members, popularity)
            share = popularity.warm_start
        self.placement = settings.placed(world)
        self.groups = self.placement.groups(groups)
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self.link = Link(world, world.device_group, self.counters, "the device group")
        self.streams = Streams(world.device)
        self.rows = make_rows(self.groups, update, self.link, settings, self.streams, stores)
        self.whole_tables = WholeTables(world, self.tables, self.rows, update)
        self.planner = make_planner(world, self.rows, settings, check, popular)
        self._warm = ([own.hot for own in popular], share)
        self.warmed = -1
        """Rows that a warm start brought; -1 before it."""
        self.shares = any(group.hot is not None for group in self.groups)
        """Whether a step begins with an exchange of rows."""
        self.home_state = self.placement.state == "home"
        self._returns = self.home_state and any(rows.slots.replicated for rows in self.rows)
        self._mover = Mover(self.rows, self.link, self.streams, settings)
        self.overlapped = settings.schedule == "overlapped"
        """Whether rows move on a thread of their own."""
        self.stream: StepStream | None = None
        """The last that was begun, whose threads may have ended."""
        self.sync = SYNC if world.size > 1 else SYNC_ALONE
        """The stage in which gradients and results go to all ranks."""
        self.last_step, self.failed, self._stale = -1, False, False
        self.whole = Whole(self)
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
        self.stream = StepStream(self.planner, batches, depth, self.streams, mover, self.shake)
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
            raise PlanError(
                "a step failed half-way, and this model cannot go on: make it anew, then load a "
                "checkpoint"
            )
        if self.stream is not None and not self.stream.has_ended():
            raise PlanError(
                "another stream of this model is open, or a batch that it reads does not come: end "
                "or close it first"
            )
        if self._stale or self.planner.ingested != self.last_step + 1:
            rows = self.rows
            self.planner.restore(self.last_step, lambda at, slots: rows[at].held_rows(slots))
        self._stale = False
        if self.warmed < 0:
            self.warm_up()

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

    def stage(self, stage: Stage, flight: Flight) -> Context[None]:
        """The time in which the training thread runs `stage` of a step, on the stage's stream."""
        return running(stage, flight, TRAINING_LANE, self.streams, self.shake)

    def open(self, flight: Flight) -> list[Tensor]:
        """Begin a step: its leaves by group, `[U + N, D]`, once its rows are on the device.

        A leaf's first U rows are the replicated ones in canonical order, the other N those sharded
        rows that this rank's ids name. Later steps' rows may move from now on. Each step of a
        stream is opened once, in order; where autograd records nothing (`torch.no_grad`, no
        inference mode), as all of a step but its forward and backward.
        """
        stream, streams, alone = flight.stream, self.streams, False
        flight.free = streams.mark(COMPUTE, timed=True)
        if stream is None or not self.overlapped:
            flight.after = flight.free
            self._mover.move(flight, TRAINING_LANE, self.shake)
            flight.moved = True
        else:
            alone = flight.batch.kind in self._alone
            self._alone.discard(flight.batch.kind)
            # Where a step begins with an exchange, fills come before or after it on all ranks.
            if self.shares:
                stream.settle()
            last = flight.step if self.shares or alone else None
            stream.release(self.last_step, flight.free, last)
            stream.arrive(flight)
        if self.shares:
            streams.after(COMMUNICATION, (flight.free,))  # it sends rows that were just changed
            with self.stage(SHARE_LATE, flight):
                self._share(flight)
            if stream is not None and not alone:
                stream.release_rest()
        self.last_step = flight.step
        return self._leaves(flight)

    def leaves(self, flight: Flight) -> list[Tensor]:
        """The leaves of the step that was opened last, read anew: as `open` gave them, or, once the
        step was applied, with the new rows (then all ranks call it, for sharded rows travel); see
        `open`."""
        if flight.applied and self.shares:
            with self.stage(SHARE_LATE, flight):
                self._share(flight)
        flight.applied = False
        return self._leaves(flight)

    def _leaves(self, flight: Flight) -> list[Tensor]:
        self.streams.after(COMPUTE, (flight.after,))
        self.streams.hand_over(flight.made, COMPUTE)
        flight.made, flight.leaves = [], []
        for at, (rows, plan) in enumerate(zip(self.rows, flight.plans, strict=True)):
            own = flight.sharded[at] if flight.sharded else None
            if own is None or plan.distinct:
                first = rows.cache.gather(plan.slots, flight.where[at].slots)
                own = first if own is None else torch.cat((first, own))
            flight.leaves.append(own.to(rows.cache.kind.dtype))
        return flight.leaves

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
                    what = f"rows of {plan.step} again"
                    first = rows.send_rows(shard.early, there.early, self.link, what)
                    early = first.new_empty((shard.rows, first.shape[1]))
                    put(early, there.early.places, first)
                came = put(early, there.late.places, came)
            flight.made.append(came)
            flight.sharded.append(came)

    def pooled(
        self,
        flight: Flight,
        leaves: Sequence[Tensor],
        part: int = 0,
        weights: Sequence[Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The bags of a step's micro-batch `part`, `[b, sum of widths]` in the order of the
        features; differentiable in `leaves`, whose gradients are summed in the ids' order, and in
        `weights`, by feature, of ids of a batch that was planned without. `out`: where the bags are
        to lie too."""
        found, bags_of = [], flight.lookups[part]
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

    def lookup(self, flight: Flight, leaves: Sequence[Tensor], part: int = 0) -> list[Tensor]:
        """The row of every id of a step's micro-batch `part`, by feature: `[n_f, D_f]` each; of
        tables with `pooled=False`."""
        out: dict[int, Tensor] = {}
        for group, leaf, bags in zip(self.groups, leaves, flight.lookups[part], strict=True):
            out |= zip(group.features, RowLookup.apply(leaf, bags), strict=True)
        return [out[feature] for feature in sorted(out)]

    def syncing(self, flight: Flight) -> Context[None]:
        """The exchange of a step's gradients with all ranks, after the moves that come before it
        in the order of the device group."""
        self.settle(flight)
        return self.stage(self.sync, flight)

    def settle(self, flight: Flight) -> None:
        """Wait until all moves that were let go are issued: what comes now comes after them in the
        order of the device group."""
        if flight.stream is not None and self.world.size > 1:
            began = time.perf_counter()
            (flight.stream.settle() or flight).waited(began)

    def start_sum(
        self, flight: Flight, gradients: Sequence[Tensor | None]
    ) -> Callable[[], RowSums]:
        """Send this rank's leaf gradients `[U + N, D]`, by group, to the rows' homes; call it for
        the sums. Inside `syncing`, where autograd records nothing. Contributions of a row are added
        in rank order. None, on all ranks: a group whose rows are left as they are."""
        native, link = self.settings.reduction == "native", self.link
        started: list[tuple[Callable[[], Tensor] | None, Callable[[], Tensor] | None]] = []
        for rows, plan, where, gradient in zip(
            self.rows, flight.plans, flight.where, gradients, strict=True
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
        flight: Flight,
        sums: RowSums,
        choices: RowChoice | Sequence[Sequence[RowChoice]],
        enabled: Tensor | None = None,
    ) -> None:
        """Update the step's rows and state in place, where autograd records nothing, inside stage
        `apply`; then `return_rows`. `choices`: of all rows, or of each group, whose other rows are
        left as they are; `enabled`: as in `ops.update_rows`."""
        parts = (self.rows, flight.plans, flight.where, sums)
        for place, (rows, plan, where, own) in enumerate(zip(*parts, strict=True)):
            for one in (choices,) if isinstance(choices, RowChoice) else choices[place]:
                rows.apply(plan, where, own, one, enabled)
        flight.applied = True

    def tables_of_sums(self, flight: Flight, group: int) -> Owners:
        """The table of every row of a group's sums; inside `syncing`.

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

    def return_rows(self, flight: Flight) -> None:
        """Once rows and dense part are updated: homes that alone have the state send their new rows
        to all ranks, if they were applied."""
        if not (self._returns and flight.applied):
            return
        with self.stage(RETURN_ROWS, flight), torch.no_grad():
            for rows, plan, where in zip(self.rows, flight.plans, flight.where, strict=True):
                if rows.slots.replicated:
                    rows.return_rows(plan, self.link, where.slots)
        self.streams.after(COMPUTE, (flight.after,))

    def count(self, flight: Flight) -> None:
        """Count what moved for a step, and the bytes of its planning and moving."""
        for rows, counts in zip(self.rows, flight.counts, strict=True):
            rows.counts.add(counts)
        if self.world.size > 1:  # a rank alone sends nothing
            self.counters.count(ROWS, flight.fill_bytes, flight.fill_between_nodes)
            self.counters.count(PLANNING, flight.planning_bytes)

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

        with self.whole:
            if self.stream is not None:
                self.stream.quiet()
        steps = together(self.world, whole_steps)
        if len(set(steps)) > 1:
            counts = ", ".join(f"rank {rank}: {run}" for rank, run in enumerate(steps))
            raise PeerError(
                f"the ranks have run different steps, so nothing was written ({counts}); go on "
                "from the last checkpoint"
            )
        for rows in self.rows:
            rows.flush()
        together(self.world, lambda: None)

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
                self.whole_tables.note(index, changed[table.name], number)
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
            by_home = enumerate(together(self.world, lambda own=own: own))
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


# -----------------------------------------------------------------------------
# The rows of one step, and their gradients, as an optimizer of a loop of one's own has them.

_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    torch.Tensor.norm,
    torch._foreach_norm,
}


class HomeGradient(Tensor):
    """The gradient of rows whose sums lie at this rank's home alone: a norm of it would count other
    rows on every rank, so torch's functions for that are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise PlanError for a norm; all else is as of any tensor."""
        if func in _NORMS:
            raise PlanError(
                "each rank has the gradients of other rows (placement='sharded' or 'mixed', or "
                "state='home'), so their norm on one rank is not the gradient's: clip with "
                "distcache.clip_grad_norm_(model.parameters(), ebc, max_norm)"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclass
class RowPart:
    """Rows of one group as the optimizer has them: `rows`, whose `.grad` is what is applied.

    `at_home`: whether the sums lie at this rank's home alone, not on every rank; `sharded`: which
    of the sums of `group` they are.
    """

    group: int
    rows: Tensor
    at_home: bool
    sharded: bool


Owners = tuple[Tensor | None, Tensor | None]
"""The table of every row of a group's sums, by its place in the group, int32 on the CPU: of the
replicated ones and of the sharded ones."""
Kind = tuple[RowUpdate, int]
"""How rows are updated, and as which step of their table."""


def choices_of(owners: Owners | None, kinds: Sequence[Kind | None]) -> list[RowChoice]:
    """What of a group's rows is updated. `kinds`: by table of the group, None for one that is left
    as it is; `owners`: None where all are alike."""
    if owners is None:
        return [] if kinds[0] is None else [RowChoice(*kinds[0])]
    found = []
    for kind in [kind for kind in dict.fromkeys(kinds) if kind is not None]:
        mine = torch.tensor([one == kind for one in kinds])
        own = [None if at is None else mine[at.long()].nonzero().flatten() for at in owners]
        found.append(RowChoice(*kind, *own))
    return found


class StepRows:
    """The rows of a step as their optimizer has them: `parts`, the replicated ones first.

    `guard`: where homes have sums of their own, one number whose gradient is 0, or infinite where
    some home's sums are not finite: all ranks' scalers see the same. `params`: what an optimizer
    has as parameters.
    """

    def __init__(self, tables: CachedTables, flight: Flight, leaves: Sequence[Tensor]) -> None:
        """`leaves` of the step, which are its rows where every rank has all sums."""
        self._tables, self._flight = tables, flight
        replicated: list[RowPart] = []
        sharded: list[RowPart] = []
        for place, (rows, plan, leaf) in enumerate(
            zip(tables.rows, flight.plans, leaves, strict=True)
        ):
            home, there = tables.home_state, flight.where[place].shard
            if rows.slots.replicated:
                mine = plan.home_slice(tables.world.rank) if home else slice(0, plan.distinct)
                whole = plan.shard is None and not home
                own = leaf if whole else leaf.detach()[mine].requires_grad_()
                replicated.append(RowPart(place, own, home, sharded=False))
            if plan.shard is not None and there is not None:
                own = rows.cache.gather(plan.shard.slots, there.slots)
                own = own.to(rows.cache.kind.dtype).requires_grad_()
                sharded.append(RowPart(place, own, at_home=True, sharded=True))
        self.parts = [*replicated, *sharded]
        homes = any(part.at_home for part in self.parts)
        self.guard = leaves[0].new_zeros(1).requires_grad_() if homes else None
        self.params = [part.rows for part in self.parts]
        if self.guard is not None:
            self.params.append(self.guard)

    def take(self, sums: RowSums, finite: Tensor | None) -> None:
        """Let the sums be the gradients; `finite`: of `all_finite`."""
        for part in self.parts:
            found = sums[part.group][part.sharded]
            if found is not None and part.at_home:
                found = found.as_subclass(HomeGradient)
            part.rows.grad = found
        if self.guard is not None and finite is not None:
            self.guard.grad = torch.where(finite, 0.0, math.inf).to(self.guard)

    def sums(self) -> RowSums:
        """The gradients to apply, as the optimizer's users have left them."""
        found: RowSums = [[None, None] for _ in self._tables.rows]
        for part in self.parts:
            if part.rows.grad is not None:
                found[part.group][part.sharded] = part.rows.grad.as_subclass(Tensor)
        return found

    def all_finite(self, sums: RowSums) -> Tensor:
        """Whether all sums, also those that other homes have, are finite: bool `[1]`."""
        own = [torch.isfinite(found).all() for found in all_of(sums)]
        one = torch.ones((), dtype=torch.bool, device=self._tables.world.device)
        finite = torch.stack([one, *own]).all().reshape(1)
        if self.guard is None:
            return finite
        return self._of_all(finite.to(torch.int64), "finite sums").min().reshape(1).bool()

    def owners(self, group: int, sums: RowSums, frozen: Sequence[bool]) -> Owners:
        """The table of every row of a group's sums, of which those that are `frozen`, by place in
        the group, become zero, so that nothing that looks at gradients counts them."""
        found = self._tables.tables_of_sums(self._flight, group)
        for at, own in zip(found, sums[group], strict=True):
            if at is not None and own is not None and any(frozen):
                rows = torch.tensor(frozen)[at.long()].nonzero().flatten()
                own.index_fill_(0, rows.to(own.device), 0.0)
        return found

    @torch.no_grad()
    def norm(self, norm_type: float) -> Tensor:
        """The `norm_type`-norm of the gradients, each row once; float64 on the device.

        Every row's part in float64, scaled to whole numbers and added up as such: the same number
        whatever the order of the rows and whoever has them.
        """
        powers: dict[bool, list[Tensor]] = {False: [], True: []}
        for part in self.parts:
            if part.rows.grad is not None:
                rows, empty = part.rows.grad.as_subclass(Tensor).double().abs(), not len(part.rows)
                if math.isinf(norm_type):
                    own = rows.new_zeros(0) if empty else rows.amax(1)
                else:
                    own = rows.pow(norm_type).sum(1)
                powers[part.at_home].append(own)
        none = torch.zeros(0, dtype=torch.float64, device=self._tables.world.device)
        if not any(powers.values()):  # no sums: then moves may be under way, on the same group
            return none.sum()
        shared, own = (torch.cat([none, *powers[home]]) for home in (False, True))
        # 0 where there are no rows, and infinite where one is NaN
        most = torch.cat((shared, own, none.new_zeros(1))).max().nan_to_num(math.inf, math.inf)
        if self.guard is not None:
            most = self._of_all(most.reshape(1), "the largest row gradient").max()
        if math.isinf(norm_type):
            return most
        count = max(1, sum(plan.all_distinct for plan in self._flight.plans))
        exponent = torch.frexp(most).exponent.clamp(min=-900)
        shift = 61 - math.ceil(math.log2(count)) - exponent
        whole = [
            torch.ldexp(values, shift).round().to(torch.int64).sum() for values in (shared, own)
        ]
        if self.guard is not None:
            whole[1] = self._of_all(whole[1].reshape(1), "sums of squares").sum()
        total = torch.ldexp((whole[0] + whole[1]).double(), -shift)
        return torch.where(torch.isfinite(most), total, most).pow(1 / norm_type)

    def _of_all(self, value: Tensor, what: str) -> Tensor:
        """One number of every rank."""
        what = f"{what} of step {self._flight.step}"
        return self._tables.link.start_all_gather(value, PLANNING, what)().flatten()
