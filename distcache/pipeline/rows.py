"""One group's rows on their way: store -> cache -> step -> cache -> store, as the plan says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.cache.device_cache import FOREIGN, DeviceCache
from distcache.comm.link import Link
from distcache.coordinator import share_rows
from distcache.optim.rows import RowUpdate, apply_rows
from distcache.pipeline.groups import TableGroup
from distcache.step_plan import StepPlan
from distcache.store.rows import RowStore

Rows = tuple[Tensor, Tensor | None]


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
    ) -> None:
        self.group, self.cache, self.store = group, cache, store
        self.update, self.link = update, link
        self.counts = MoveCounts()
        """Of the training steps that were run, and of `flush`."""
        self.row_bytes = (cache.dim + cache.state_width) * cache.dtype.itemsize

    def write_back(self, plan: StepPlan, counts: MoveCounts) -> None:
        """Bring the dirty rows that leave to the store: cache[evict_slots] -> store[evict_rows]."""
        if len(plan.evict_slots):
            self._store_rows(*self.cache.evict(plan.evict_slots, plan.evict_rows), counts)

    def gather(self, plan: StepPlan, counts: MoveCounts) -> Tensor | None:
        """Read this home's fetched rows from the store, `[M_h, D + S]`; None without a store."""
        if self.store is None:
            return None
        weight, state = self.store.gather(plan.fetch_rows)
        counts.rows_fetched += len(weight)
        counts.host_to_device_bytes += len(weight) * self.row_bytes
        return weight if state is None else torch.cat((weight, state), dim=1)

    def fill(self, plan: StepPlan, gathered: Tensor | None, link: Link) -> None:
        """Share the fetched rows with all ranks over `link` and put them into their slots."""
        if gathered is None:
            return
        rows = share_rows(link, plan, gathered.to(self.cache.device, non_blocking=True))
        if plan.misses == 0:
            return
        names = np.full(plan.misses, FOREIGN, dtype=np.int64)
        rank = link.world.rank
        start = sum(plan.fetch_counts[:rank])
        names[start : start + plan.fetch_counts[rank]] = plan.fetch_rows.numpy()
        slots = plan.fetch_slots
        self.cache.ensure(int(slots.max()) + 1)
        state = rows[:, self.cache.dim :] if self.cache.state_width else None
        self.cache.fill(slots, names, rows[:, : self.cache.dim], state)

    def leaf(self, plan: StepPlan) -> Tensor:
        """A copy of the step's rows in canonical order, `[U, D]`, on the device."""
        return self.cache.gather(plan.slots)

    def apply(self, plan: StepPlan, gradient: Tensor, lr: float, step: int) -> None:
        """Update the step's rows and state in place with the summed gradient `[U, D]`."""
        slots = plan.slots.to(self.cache.device)
        apply_rows(self.update, self.cache.weight, self.cache.state, slots, gradient, lr, step)
        self.cache.mark_dirty(plan.slots)

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
        if len(slots) == 0 or self.store is None:
            return
        weight, state = self.cache.read(slots)
        self.store.scatter(rows, weight.cpu(), None if state is None else state.cpu())
        counts.rows_written_back += len(slots)
        counts.device_to_host_bytes += len(slots) * self.row_bytes
