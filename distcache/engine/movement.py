"""Rows on their way: store -> cache -> step -> cache -> store, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distcache.cache import DeviceCache, StagingRing
from distcache.comm.link import ROWS, CollectiveCounters, Link
from distcache.engine.gradients import DeviceBags, all_to_device, lookups_of
from distcache.engine.groups import RegionSlots, TableGroup, TableSettings
from distcache.engine.step import (
    FILL,
    GATHER,
    SCATTER,
    SHARE_EARLY,
    WRITE_BACK,
    DelayHook,
    MoveCounts,
    Stage,
    StepContext,
    stage_scope,
)
from distcache.layout import HALVES, RowKind, RowLayout
from distcache.ops import put, update_rows
from distcache.optim import RowUpdate
from distcache.step_plan import Indices, StepPlan, Transfer
from distcache.store.old_rows import OldRows, mark_new
from distcache.store.rows import DirectRows, Gathered, Rows, RowStore, nothing
from distcache.streams import COPY_IN, Streams

# -----------------------------------------------------------------------------
# Ways of rows between a store and its device: through staging buffers, or read in place.


class Staged:
    """`store.access=staged`: host threads gather into pinned buffers, which are copied as a whole;
    what comes back is copied to a buffer, and, later, waited for and scattered."""

    def __init__(
        self,
        store: RowStore,
        device: torch.device,
        streams: Streams,
        prefetch: int,
    ) -> None:
        """`prefetch`: P, which bounds the steps whose rows lie in buffers."""
        self._store, self._device, self._streams = store, device, streams
        self._kind = store.kind
        self._arriving = StagingRing(prefetch + 2, self._kind, streams)
        self._leaving = StagingRing(1, self._kind, streams)

    def gather(self, rows: Tensor) -> Gathered:
        """Copies of the rows in the next staging buffer."""
        number, buffer = self._arriving.take(rows.shape[0])
        self._store.gather(rows, out=self._kind.parts(buffer))

        def read() -> Rows:
            return self._kind.parts(buffer.to(self._device, non_blocking=True))

        def release() -> None:  # the buffer may be used again once the copy from it is through
            self._arriving.release(number, self._streams.record_event(COPY_IN))

        return Gathered(read, release)

    def put(self, rows: Tensor, memory: Tensor) -> Callable[[], None]:
        """Send the rows (`DeviceCache.read`) on the current stream; call it, before the next `put`,
        to wait until they are here, and scatter them."""
        if not self._streams.asynchronous:
            return partial(self._store.scatter, rows, *self._kind.parts(memory))
        number, buffer = self._leaving.take(rows.shape[0])
        buffer.copy_(memory, non_blocking=True)
        sent = torch.cuda.current_stream(self._device).record_event()
        self._leaving.release(number, sent)

        def land() -> None:
            self._streams.synchronize(sent)
            self._store.scatter(rows, *self._kind.parts(buffer))

        return land


Access = Staged | DirectRows
"""How rows of one group get to the device and back; one thread at a time uses it."""


# -----------------------------------------------------------------------------
# One group's rows on their way: store -> cache -> step -> cache -> store, as the plan says.


Slots = tuple[Tensor, Tensor | None]
"""Slots on the CPU; and on the device, where they are there already."""


class RowChoice(NamedTuple):
    """Rows of a group that are updated by `update`, at its rate, as step `count` of their tables:
    places in the `replicated` and `sharded` sums of the step, int64 on the CPU (None: all)."""

    update: RowUpdate
    count: int
    replicated: Tensor | None = None
    sharded: Tensor | None = None


class GroupRows:
    """The rows of one group on one rank: device slots over the node's store.

    `store` is None in mode `resident`, where every row has its slot and nothing moves.
    """

    def __init__(
        self,
        group: TableGroup,
        cache: DeviceCache,
        store: RowStore | None,
        link: Link,
        streams: Streams,
        prefetch: int,
        grows: bool,
        slots: RegionSlots,
    ) -> None:
        """`prefetch`: P, which bounds the steps whose rows lie in staging buffers; `grows`: whether
        a step may fill more slots than there are (mode `host`); `slots`: of the cache, by
        region."""
        self.group, self.cache, self.store, self.slots = group, cache, store, slots
        self._grows = grows
        self.link, self.streams = link, streams
        self.counts = MoveCounts()
        """Of the training steps that were run, and of `flush`."""
        self.row_bytes = cache.kind.nbytes
        self.grown = False
        """Whether the slots lie in new memory, which other streams do not know of yet."""
        self.old: OldRows | None = None
        """Keeps what is about to be overwritten in the store, while somebody reads that."""
        self.marks: dict[int, np.ndarray] = {}
        """Of each mark, a bit for every row of this home: whether it was written since."""
        self._access: Access | None = None
        if store is not None:
            self._access = store.direct or Staged(store, cache.device, streams, prefetch)

    def write_back(self, plan: StepPlan, counts: MoveCounts) -> Callable[[], None]:
        """Send the dirty rows that leave to the store, cache[evict_slots] -> store[evict_rows].

        Call it to wait until they are there: before any of them is read, and the next write-back.
        """
        slots, rows, shard = plan.evict_slots, plan.evict_rows, plan.shard
        if shard is not None:
            slots = torch.cat((slots, shard.evict_slots))
            rows = torch.cat((rows, shard.evict_rows))
        return self._store_rows(*self.cache.evict(slots, rows), counts)

    def gather(self, plan: StepPlan, counts: MoveCounts) -> Gathered | None:
        """What the host does for this home's fetched rows; None without a store."""
        rows = plan.fetch_rows
        if plan.shard is not None:
            rows = torch.cat((rows, plan.shard.fetch_rows))
        return self.gather_rows(rows, counts)

    def gather_rows(self, rows: Tensor, counts: MoveCounts) -> Gathered | None:
        """The same for any `rows` of this home, int64 `[m]` on the CPU."""
        if self._access is None:
            return None
        counts.rows_fetched += rows.shape[0]
        counts.host_to_device_bytes += rows.shape[0] * self.row_bytes
        return self._access.gather(rows)

    def fill(self, plan: StepPlan, where: Indices, gathered: Gathered | None, link: Link) -> None:
        """Put the fetched rows into their slots, the replicated ones, shared over `link`, on all
        ranks; `where`: the plan's indices on the device."""
        if gathered is None:
            return
        own, (weight, state) = plan.fetch_rows.shape[0], gathered.read()
        if self.slots.replicated:
            first = weight[:own], None if state is None else state[:own]
            slots, counts = (plan.fetch_slots, where.fetch_slots), plan.fetch_counts
            self.fill_replicated(slots, counts, plan.fetch_rows, first, link, f"fill {plan.step}")
        shard, there = plan.shard, where.shard
        if shard is not None and there is not None and weight.shape[0] > own:
            rest = weight[own:], None if state is None else state[own:]
            self.cache.fill(shard.fetch_slots, shard.fetch_rows, *rest, there.fetch_slots)
        gathered.release()

    def fill_replicated(
        self,
        slots: Slots,
        counts: Sequence[int],
        own: Tensor,
        values: tuple[Tensor, Tensor | None],
        link: Link,
        what: str,
    ) -> None:
        """Share the fetched rows with all ranks; their state too, unless homes keep it. Host memory
        was read once, by the home; the copies travel over the device group.

        `slots`: of the rows of all homes, by home; `counts`: how many each has; `own`: the rows of
        this one, whose `values` were fetched. All ranks fill them.
        """
        rank, size, (weight, state) = link.world.rank, link.world.size, values
        if size > 1:
            device, both = self.cache.device, self.cache.state_slots is None
            rows = weight.to(device, non_blocking=True)
            if state is not None:
                state = state.to(device, non_blocking=True)
            joined = joined_rows(rows, state if both else None)
            gathered = link.all_gather_rows(joined, counts, what)
            weight, other = parted_rows(gathered, self.cache.kind)
            state = other if both else state
        on_host, where = slots
        if on_host.shape[0]:
            if self._grows:
                before, most = self.cache.slots, int(on_host.numpy().max())
                self.cache.ensure(most + 1)  # in memory of the current stream, if it grows
                self.grown |= self.cache.slots > before
            self.cache.fill(on_host, own, weight, state, where, sum(counts[:rank]))

    def send_rows(self, transfer: Transfer, there: Transfer, link: Link, what: str) -> Tensor:
        """Send sharded rows to the ranks that requested them; return those for this rank, `[r, D]`
        in the order of `places`.

        `there`: the transfer on the device.
        """
        rows = self.cache.gather(transfer.slots, there.slots)
        counts = transfer.send_counts, transfer.receive_counts
        received = link.start_all_to_all(joined_rows(rows), *counts, ROWS, what)()
        return received.view(rows.dtype)

    def apply(
        self,
        plan: StepPlan,
        where: Indices,
        sums: Sequence[Tensor | None],
        choice: RowChoice,
        enabled: Tensor | None,
    ) -> None:
        """Update the step's rows and state in place with their summed gradients.

        `where`: the plan's indices on the device; `sums`: of the replicated rows, `[U, D]`, or,
        where homes keep the state, of this home's `[U_h, D]`, and of its sharded rows, `[H, D]`;
        None: left as they are. `enabled`: as in `ops.update_rows`.
        """
        cache, (replicated, own) = self.cache, sums
        if replicated is not None:
            world, only = self.link.world, choice.replicated
            mine = plan.home_slice(world.rank)
            slots, parts = where.slots, (cache.weight, cache.state)
            own_only = only
            if cache.state_slots is not None:
                home = self.slots.own_replicated(world.rank, world.size)
                parts, slots = cache.part(home), slots[mine] - home.start
            elif only is not None:
                own_only = only[(only >= mine.start) & (only < mine.stop)] - mine.start
            self._changed(plan.slots[mine], own_only)
            self._update(parts, (slots, only), replicated, choice, enabled)
        shard, there = plan.shard, where.shard
        if own is not None and shard is not None and there is not None:
            home = self.slots.own_sharded
            self._changed(shard.slots, choice.sharded)
            to = there.slots - home.start, choice.sharded
            self._update(cache.part(home), to, own, choice, enabled)

    def _changed(self, slots: Tensor, only: Tensor | None) -> None:
        """Let the rows of this home in `slots`, on the CPU, be dirty: those that `only` tells
        (None: all). Others write theirs back, and nobody does where no row leaves."""
        if self.store is not None:
            self.cache.mark_dirty(slots if only is None else slots[only])

    def _update(
        self,
        parts: tuple[Tensor, Tensor | None],
        to: tuple[Tensor, Tensor | None],
        gradient: Tensor,
        choice: RowChoice,
        enabled: Tensor | None,
    ) -> None:
        """Update rows of `parts`, weights and state. `to`: their places there, and which of these,
        on the CPU (None: all)."""
        places, only = to
        if only is not None:
            there = only.to(places.device)
            places, gradient = places.index_select(0, there), gradient.index_select(0, there)
        rule = choice.update.rule(choice.update.lr, choice.count)
        update_rows(rule, *parts, places, gradient, enabled)

    def return_rows(self, plan: StepPlan, link: Link, where: Tensor) -> None:
        """Send this home's updated replicated rows to all ranks, and take theirs.

        `where`: the plan's slots on the device.
        """
        mine = plan.home_slice(link.world.rank)
        own = self.cache.gather(plan.slots[mine], where[mine])
        what = f"updated rows {plan.step}"
        rows = link.all_gather_rows(joined_rows(own), plan.home_counts, what)
        put(self.cache.weight, where, rows.view(own.dtype))

    def flush(self) -> None:
        """Write this home's dirty rows to the store, and wait for them; they stay cached."""
        if self._access is None:
            return
        dirty = self.cache.dirty_slots()
        rows = torch.from_numpy(self.cache.slot_row[dirty.numpy()])
        own = rows >= 0
        self._store_rows(dirty[own], rows[own], self.counts)()
        if isinstance(self._access, DirectRows):
            for mark in self._access.marks():
                self.link.settle("rows on their way to the store", mark)
        self.cache.clean(dirty)

    def held_rows(self, slots: slice) -> np.ndarray:
        """This home's rows in `slots`, int64; -1 where one is free or holds another home's row."""
        held = self.cache.slot_row[slots]
        return np.where(held >= 0, held, -1)

    def note(self, rows: Tensor, mark: int | None = None) -> None:
        """Rows of this home, int64 `[m]` on the CPU, are written: tell all marks, or this one."""
        if marks := self.marks:
            local = np.ascontiguousarray(self.group.layout.local(rows.numpy()))
            for number, bits in marks.items():
                if mark in (None, number):
                    mark_new(bits, local, np.empty_like(local))

    def _store_rows(self, slots: Tensor, rows: Tensor, counts: MoveCounts) -> Callable[[], None]:
        """Send slots to the store; see `write_back`."""
        if slots.shape[0] == 0 or self._access is None:
            return nothing
        if (old := self.old) is not None:  # the training thread lets go of it at any time
            old.keep(rows)
        self.note(rows)
        counts.rows_written_back += slots.shape[0]
        counts.device_to_host_bytes += slots.shape[0] * self.row_bytes
        return self._access.put(rows, self.cache.read(slots))


def joined_rows(weight: Tensor, state: Tensor | None = None) -> Tensor:
    """Rows, followed by their state, as one tensor for other ranks: bytes where their dtypes differ
    or are none that every backend knows."""
    if weight.dtype in HALVES:
        weight, state = (t if t is None else t.view(torch.uint8) for t in (weight, state))
    return weight if state is None else torch.cat((weight, state), dim=1)


def parted_rows(joined: Tensor, kind: RowKind) -> Rows:
    """Rows, and what state follows them, of `joined_rows` that came from other ranks."""
    width = kind.dim * kind.stored.itemsize // joined.itemsize
    weight = joined[:, :width]
    state = joined[:, width:] if joined.shape[1] > width else None
    if joined.dtype == torch.uint8:
        # Not `contiguous`: a single row is that already, and its state may begin at an address at
        # which no element of `dtype` can lie.
        weight = weight.clone(memory_format=torch.contiguous_format).view(kind.stored)
        if state is not None:
            state = state.clone(memory_format=torch.contiguous_format).view(kind.dtype)
    return weight, state


def marked_ids(layout: RowLayout, home: int, bits: np.ndarray) -> list[np.ndarray]:
    """Of each table the ids, int64, ascending, whose rows at home on `home` have their bit set in
    `bits`, of a mark there."""
    rows = layout.row(home, np.unpackbits(bits, bitorder="little").nonzero()[0])
    own = np.split(rows, np.searchsorted(rows, layout.offsets))[1:-1]
    return [rows - first for rows, first in zip(own, layout.offsets[:-1], strict=True)]


# -----------------------------------------------------------------------------
# The stages that bring a step's rows to the device, for all groups of a model.


Stages = tuple[tuple[Stage, Callable[[StepContext], None]], ...]


class RowMover:
    """The stages of movement in the order in which they must run, in three parts.

    `prepare`: gather, which is the host's alone and waits for nothing but the write-backs before.
    `issue`: write_back, fill, and with sharded rows share_early, which sends those that no step on
    its way changes to who reads them: device work and collectives, for which nobody waits. `land`:
    scatter, the host's part of the write-back, once the device has sent the rows. Where a step
    fetches rows that leave before it (mode `host`), all is done in `issue`.

    The ranks' fills go over the device group of `link`, with counters of their own: what a step's
    fill sent is counted with the step, when that is run.
    """

    def __init__(
        self,
        rows: Sequence[GroupRows],
        link: Link,
        streams: Streams,
        settings: TableSettings,
    ) -> None:
        self._rows, self._streams = list(rows), streams
        self._dtype, self._pooled = settings.dtype, settings.pooled
        self._common: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors that steps have in common, by `id`: that of the host, and that of the device."""
        self._sent = CollectiveCounters(link.world.nodes, link.world.rank)
        self._link = Link(link.world, link.group, self._sent, "the device group (moving rows)")
        gather, scatter = (GATHER, self._gather), (SCATTER, self._scatter)
        write_back, fill = (WRITE_BACK, self._write_back), (FILL, self._fill)
        self._ahead: Stages = (gather,)
        self._stages: Stages = (write_back, fill)
        self._behind: Stages = (scatter,)
        if settings.mode == "host":  # whose plans evict rows that they fetch
            self._ahead, self._behind = (), ()
            self._stages = (write_back, scatter, gather, fill)
        if settings.shares_early(link.world):
            self._stages += ((SHARE_EARLY, self._share_early),)

    def move(self, context: StepContext, lane: str, delay_hook: DelayHook) -> None:
        """Take a step through all stages; its rows, indices and batch are then on the device.

        As each part, in one thread, where autograd records nothing (`torch.no_grad`, no inference
        mode).
        """
        self.prepare(context, lane, delay_hook)
        self.issue(context, lane, delay_hook)
        self.land(context, lane, delay_hook)

    def prepare(self, context: StepContext, lane: str, delay_hook: DelayHook) -> None:
        """What may come before the step may move, once the step before it has landed."""
        context.timed = self._streams.is_timed(context.step)
        context.counts = [MoveCounts() for _ in self._rows]
        self._run(self._ahead, context, lane, delay_hook)

    def issue(self, context: StepContext, lane: str, delay_hook: DelayHook) -> None:
        """All that the device and other ranks have to do."""
        self._run(self._stages, context, lane, delay_hook)

    def land(self, context: StepContext, lane: str, delay_hook: DelayHook) -> None:
        """Bring to the store what leaves; waits for the device."""
        self._run(self._behind, context, lane, delay_hook)

    def _run(self, stages: Stages, context: StepContext, lane: str, delay_hook: DelayHook) -> None:
        for stage, run in stages:
            with stage_scope(stage, context, lane, self._streams, delay_hook):
                run(context)

    def _write_back(self, context: StepContext) -> None:
        context.leaving = [
            rows.write_back(plan, counts)
            for rows, plan, counts in zip(self._rows, context.plans, context.counts, strict=True)
        ]

    def _scatter(self, context: StepContext) -> None:
        for land in context.leaving:
            land()
        context.leaving = []

    def _gather(self, context: StepContext) -> None:
        with self._streams.use(COPY_IN):
            self._send(context)
        context.gathered = [
            rows.gather(plan, counts)
            for rows, plan, counts in zip(self._rows, context.plans, context.counts, strict=True)
        ]

    def _fill(self, context: StepContext) -> None:
        self._sent.reset()
        for rows, plan, where, values in zip(
            self._rows, context.plans, context.where, context.gathered, strict=True
        ):
            rows.fill(plan, where, values, self._link)
            if rows.grown:
                context.made += [t for t in (rows.cache.weight, rows.cache.state) if t is not None]
                rows.grown = False
        self._count(context)
        context.gathered = []

    def _share_early(self, context: StepContext) -> None:
        self._sent.reset()
        for rows, plan, where in zip(self._rows, context.plans, context.where, strict=True):
            if plan.shard is None or plan.shard.early is None or where.shard is None:
                context.sharded.append(None)
                continue
            there, what = where.shard.early, f"early rows {plan.step}"
            came = rows.send_rows(plan.shard.early, there, self._link, what)
            out = came.new_empty((plan.shard.rows, came.shape[1]))
            put(out, there.places, came)
            context.made.append(out)
            context.sharded.append(out)
        self._count(context)

    def _count(self, context: StepContext) -> None:
        """What was sent since the counters were reset is the step's."""
        context.fill_bytes += self._sent.collective_bytes
        context.fill_between_nodes += self._sent.inter_node_bytes

    def _send(self, context: StepContext) -> None:
        """The step's index tensors, once for all that reads them: a copy for the arena of each
        plan, where micro-batches have no others, and one for what is in none, as what a batch has
        of its own; what batches of one shape have in common stays on the device."""
        batch, device = context.batch, self._link.world.device
        sizes = batch.parts or (batch.ids.batch_size,)
        by_group = [
            lookups_of(bags, plan, sizes, self._pooled, device)
            for bags, plan in zip(context.bags, context.plans, strict=True)
        ]
        context.where = [plan.indices for plan in context.plans]
        context.dense, context.labels = (of.to(self._dtype) for of in (batch.dense, batch.labels))
        bags = list(chain(*by_group))
        if device.type == "cuda":
            self._send_there(context, bags, device)
        for of in bags:
            of.arrange()
        context.lookups = [list(of_part) for of_part in zip(*by_group, strict=True)]
        if device.type == "cuda":  # what is new there, and what other steps read too
            context.made += [tensor for of in bags for tensor in of.tensors()]

    def _send_there(
        self, context: StepContext, bags: Sequence[DeviceBags], device: torch.device
    ) -> None:
        """Bring the step's batch, the index tensors of its plans, and `bags` to the device."""
        indices = chain(*[of.tensors() for of in (*bags, *context.where)])
        every = {id(tensor): tensor for tensor in (context.dense, context.labels, *indices)}
        common = {id(tensor): tensor for of in bags for tensor in of.common}
        kept = {key: both[1] for key, both in self._common.items() if key in common}
        there = dict(kept)
        own = {key for key in every if key not in common}
        for plan in context.plans:
            if id(plan.positions) in own:
                arena = plan.arena.to(device, non_blocking=True)
                context.made.append(arena)  # of a rank without ids it may be all that is known
                there |= _in_arena(plan, arena, [every[key] for key in own])
        own -= there.keys()
        for keys in (common.keys() - kept.keys(), own):  # what stays lies in memory of its own
            new = all_to_device([every[key] for key in keys], device) if keys else []
            there |= dict(zip(keys, new, strict=True))
        self._common = {key: (tensor, there[key]) for key, tensor in common.items()}

        def moved(tensor: Tensor) -> Tensor:
            return there[id(tensor)]

        context.dense, context.labels = moved(context.dense), moved(context.labels)
        context.where = [of.mapped(moved) for of in context.where]
        context.made += [context.dense, context.labels]
        for of in bags:
            of.change(moved)


def _in_arena(plan: StepPlan, there: Tensor, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Those of the `tensors` that lie in the arena of a plan, by `id`, in its copy `there`."""
    first = plan.arena.data_ptr()
    starts = [(each.data_ptr() - first) // plan.arena.itemsize for each in tensors]
    return {
        id(each): there[at : at + len(each)]
        for at, each in zip(starts, tensors, strict=True)
        if 0 <= at < len(there)
    }
