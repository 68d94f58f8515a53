"""One group's rows on their way: store -> cache -> step -> cache -> store, as the plan says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.cache.device_cache import FOREIGN, DeviceCache
from distcache.cache.staging import StagingRing
from distcache.comm.link import Link
from distcache.coordinator import share_rows
from distcache.optim.rows import RowUpdate, apply_rows
from distcache.pipeline.groups import TableGroup
from distcache.step_plan import StepPlan
from distcache.store.rows import RowStore
from distcache.streams import COMPUTE, COPY_IN, Mark, Streams


@dataclass(frozen=True)
class Gathered:
    """Rows of one step in staging buffer `number`: `[M_h, D]`, and `[M_h, S]` or None."""

    number: int
    weight: Tensor
    state: Tensor | None


@dataclass
class MoveCounts:
    """Rows that this rank's home moved, and their bytes over the host link."""

    rows_fetched: int = 0
    rows_written_back: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0

    def add(self, other: MoveCounts) -> None:
        """Count what another one counted."""
        self.rows_fetched += other.rows_fetched
        self.rows_written_back += other.rows_written_back
        self.host_to_device_bytes += other.host_to_device_bytes
        self.device_to_host_bytes += other.device_to_host_bytes


class GroupRows:
    """The rows of one group on one rank: device slots over the node's store.

    `store` is None in mode `resident`, where every row has its slot and nothing moves.
    """

    def __init__(
        self,
        group: TableGroup,
        cache: DeviceCache,
        store: RowStore | None,
        update: RowUpdate,
        link: Link,
        streams: Streams,
        prefetch: int,
    ) -> None:
        """`prefetch`: P, which bounds the steps whose rows lie in staging buffers."""
        self.group, self.cache, self.store = group, cache, store
        self.update, self.link, self.streams = update, link, streams
        self.counts = MoveCounts()
        """Of the training steps that were run, and of `flush`."""
        self.row_bytes = (cache.dim + cache.state_width) * cache.dtype.itemsize
        widths = (cache.dim, cache.state_width)
        self._arriving = StagingRing(prefetch + 2, widths, cache.dtype, streams)
        self._leaving = StagingRing(1, widths, cache.dtype, streams)

    def write_back(self, plan: StepPlan, counts: MoveCounts) -> None:
        """Bring the dirty rows that leave to the store: cache[evict_slots] -> store[evict_rows]."""
        if len(plan.evict_slots):
            self._store_rows(*self.cache.evict(plan.evict_slots, plan.evict_rows), counts)

    def gather(self, plan: StepPlan, counts: MoveCounts) -> Gathered | None:
        """Read this home's fetched rows from the store into a staging buffer; None without one."""
        if self.store is None:
            return None
        number, weight, state = self._arriving.take(len(plan.fetch_rows))
        self.store.gather(plan.fetch_rows, out=(weight, state))
        counts.rows_fetched += len(weight)
        counts.host_to_device_bytes += len(weight) * self.row_bytes
        return Gathered(number, weight, state)

    def fill(self, plan: StepPlan, gathered: Gathered | None, link: Link) -> None:
        """Share the fetched rows with all ranks over `link` and put them into their slots."""
        if gathered is None:
            return
        rank, size = link.world.rank, link.world.size
        weight, state = gathered.weight, gathered.state
        if size > 1:
            device, width = self.cache.device, self.cache.dim
            own = [t.to(device, non_blocking=True) for t in (weight, state) if t is not None]
            rows = share_rows(link, plan, own[0] if state is None else torch.cat(own, dim=1))
            weight, state = rows[:, :width], None if state is None else rows[:, width:]
        if plan.misses:
            names = np.full(plan.misses, FOREIGN, dtype=np.int64)
            start = sum(plan.fetch_counts[:rank])
            names[start : start + plan.fetch_counts[rank]] = plan.fetch_rows.numpy()
            slots = plan.fetch_slots
            self._ensure(int(slots.max()) + 1)
            self.cache.fill(slots, names, weight, state)
        self._arriving.release(gathered.number, self.streams.mark(COPY_IN))

    def _ensure(self, slots: int) -> None:
        """Room for `slots` slots; a cache that grew lies in memory of the current stream."""
        before = self.cache.slots
        self.cache.ensure(slots)
        if self.cache.slots > before:
            self.streams.hand_over((self.cache.weight, self.cache.state), COMPUTE)

    def leaf(self, plan: StepPlan, where: Tensor | None = None) -> Tensor:
        """A copy of the step's rows in canonical order, `[U, D]`, on the device.

        `where`: the plan's slots on the device already.
        """
        return self.cache.gather(plan.slots, where)

    def apply(
        self,
        plan: StepPlan,
        gradient: Tensor,
        lr: float,
        step: int,
        where: Tensor | None = None,
        enabled: Tensor | None = None,
    ) -> None:
        """Update the step's rows and state in place with the summed gradient `[U, D]`.

        `where`: the plan's slots on the device already; `enabled`: as in `apply_rows`.
        """
        slots = plan.slots.to(self.cache.device) if where is None else where
        cache = self.cache
        apply_rows(self.update, cache.weight, cache.state, slots, gradient, lr, step, enabled)
        cache.mark_dirty(plan.slots)

    def flush(self) -> None:
        """Write this home's dirty rows to the store; they stay cached."""
        if self.store is None:
            return
        dirty = self.cache.dirty_slots()
        rows = torch.from_numpy(self.cache.slot_row[dirty.numpy()])
        own = rows >= 0
        self._store_rows(dirty[own], rows[own], self.counts)
        self.cache.clean(dirty)

    def held_rows(self, slots: slice) -> np.ndarray:
        """This home's rows in `slots`, int64; -1 where one is free or holds another home's row."""
        held = self.cache.slot_row[slots]
        return np.where(held >= 0, held, -1)

    def _store_rows(self, slots: Tensor, rows: Tensor, counts: MoveCounts) -> None:
        """Copy slots to the store; the calling thread waits until the rows are there."""
        if len(slots) == 0 or self.store is None:
            return
        weight, state = self.cache.read(slots)
        if self.streams.asynchronous:
            number, host_weight, host_state = self._leaving.take(len(slots))
            host_weight.copy_(weight, non_blocking=True)
            if state is not None and host_state is not None:
                host_state.copy_(state, non_blocking=True)
            torch.cuda.current_stream(self.cache.device).synchronize()
            weight, state = host_weight, host_state
            self._leaving.release(number, Mark())
        self.store.scatter(rows, weight, state)
        counts.rows_written_back += len(slots)
        counts.device_to_host_bytes += len(slots) * self.row_bytes
