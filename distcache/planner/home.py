"""The planner of one home: distinct rows, hits, slots for misses, victims."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distcache.errors import PlanError, StepTooLargeError
from distcache.layout import RowLayout
from distcache.planner import loops
from distcache.planner.victims import DEFAULT, Forget, Policy, SlotTable, make_ranking

_AHEAD = 24
"""Steps, beside those of 2 P, that may be planned and never run: threads are no further ahead."""


@dataclass(frozen=True)
class Ingested:
    """A step's rows at their home. `local`: distinct local rows `[U_h]` in canonical order;
    `previous` `[U_h]`: the steps before it that named them last, -1 for none; `replies`: for each
    rank, the canonical index within this home of every row that it asked for. All int32."""

    step: int
    kind: str
    local: np.ndarray
    previous: np.ndarray
    replies: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class HomeDecision(Ingested):
    """A home's part of a step. `slots` `[U_h]`: device slots (global numbers); `fetch`: indices
    into the part of rows to fetch, ascending; rows are row numbers of the layout (int64)."""

    slots: np.ndarray
    fetch: np.ndarray
    fetch_rows: np.ndarray
    evict_slots: np.ndarray
    evict_rows: np.ndarray
    latest_use: int


def _parts(entry: Ingested) -> tuple:
    return entry.step, entry.kind, entry.local, entry.previous, entry.replies


def distinct_rows(
    local: np.ndarray, position: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(distinct [U], previous [U], labels [n])`, int32, of local rows (int64 `[n]`).

    `position` int32: the step that named each row last, -1 for none; it becomes `step` for these.
    Raises PlanError for a row outside it, and leaves it as it was.
    """
    local = np.ascontiguousarray(local, dtype=np.int64)
    count = len(local)
    distinct, previous = np.empty(count, np.int32), np.empty(count, np.int32)
    labels = np.empty(count, np.int32)
    count = loops.name_rows(local, position, step, distinct, previous, labels)
    if count < 0:
        raise PlanError(
            f"step {step}: id {-1 - count} is row {local[-1 - count]} of a home that has "
            f"{len(position)}: ids must lie within their tables"
        )
    return distinct[:count].copy(), previous[:count].copy(), labels


class Planner:
    """Plans the rows of one home: `ingest` in stream order, then `plan` in stream order.

    What all kinds share: distinct rows, by an index of 4 bytes per local row.
    """

    def __init__(self, layout: RowLayout, home: int, slots: int, own_slots: slice) -> None:
        """`slots`: how many it has; `own_slots`: where they are among those of the device."""
        self.layout, self.home, self.slots, self.own_slots = layout, home, slots, own_slots
        self._last_reference = np.full(layout.local_rows, -1, dtype=np.int32)
        self._window: deque[Ingested] = deque()

    @property
    def index_bytes(self) -> int:
        """Bytes of the index over this home's rows, with what the policy keeps of each."""
        return self._last_reference.nbytes

    @property
    def due_rows(self) -> int:
        """Distinct rows of the oldest ingested step, which `plan` would decide."""
        return len(self._window[0].local)

    def ingest(self, step: int, kind: str, requests: Sequence[np.ndarray]) -> Ingested:
        """Take the rows (int64, homed here) that every rank names in `step`, in rank order.

        Raises PlanError for a row that the layout does not have.
        """
        rows = np.concatenate(requests) if len(requests) > 1 else requests[0]
        known = self._last_reference
        distinct, previous, labels = distinct_rows(self.layout.local(rows), known, step)
        replies, start = [], 0
        for request in requests:
            replies.append(labels[start : start + len(request)])
            start += len(request)
        entry = Ingested(step, kind, distinct, previous, tuple(replies))
        self._window.append(entry)
        return entry

    def plan(self) -> HomeDecision:
        """Decide the oldest ingested step."""
        raise NotImplementedError

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """Forget all beyond `step`, and start again from what the device holds after it.

        `slot_row` int64 `[slots]`: the row in each of this home's slots, -1 free.
        """
        self._window.clear()


class HomePlanner(Planner):
    """Plans the rows of `home` into its own range of `slots` device slots.

    `lookahead` is L, `prefetch` P. A step is decided when the ids through step + L are ingested
    (or the stream ended). `popularity` uint8 `[local rows]`: each row's class, higher is hotter, 0
    never seen; `PINNED` rows leave where no other can, whatever the policy. Its index is 8 bytes
    per local row: slot and last reference; only the home has it, so it is divided over the ranks.
    Raises ConfigError where a policy needs popularity and it is None.
    """

    def __init__(
        self,
        layout: RowLayout,
        home: int,
        slots: int,
        prefetch: int,
        policy: Policy = DEFAULT,
        popularity: np.ndarray | None = None,
        first_slot: int | None = None,
        names: np.ndarray | None = None,
    ) -> None:
        """`first_slot`: of its range on the device; None: home h's range follows that of h - 1.
        `names` int32 `[local rows]`: what a replay's rows are called in training, where the local
        rows are others; None: as they are numbered."""
        self._first_slot = home * slots if first_slot is None else first_slot
        super().__init__(layout, home, slots, slice(self._first_slot, self._first_slot + slots))
        self._popularity_bytes = 0 if popularity is None else popularity.nbytes
        rows = layout.local_rows
        named = () if names is None else (names,)
        self._ranking = make_ranking(policy, rows, slots, popularity, *named)
        self._table = SlotTable(rows, slots, prefetch, self._ranking, popularity)
        self._past: deque[tuple[Ingested, Forget]] = deque(maxlen=2 * prefetch + _AHEAD)
        self._looks_ahead, self._planned = policy.uses_window, -1

    @property
    def index_bytes(self) -> int:
        """See `Planner.index_bytes`."""
        index = self._table.slot_of.nbytes + self._last_reference.nbytes
        return index + self._ranking.nbytes + self._popularity_bytes

    def ingest(self, step: int, kind: str, requests: Sequence[np.ndarray]) -> Ingested:
        """See `Planner.ingest`; the policy's window learns of the step's uses."""
        entry = super().ingest(step, kind, requests)
        if self._looks_ahead:
            self._table.refer(entry.local, entry.previous, self._planned, step)
        return entry

    def plan(self) -> HomeDecision:
        """Decide the oldest ingested step. Raises StepTooLargeError and decides nothing when its
        distinct rows exceed the slots."""
        entry = self._window[0]
        if len(entry.local) > self.slots:
            raise StepTooLargeError(
                f"step {entry.step}: home rank {self.home} has {len(entry.local)} distinct rows "
                f"for {self.slots} slots",
                rows=len(entry.local),
                slots=self.slots,
            )
        self._window.popleft()
        self._planned = entry.step
        table, local, step = self._table, entry.local, entry.step
        slots, fetch = table.look_up(local, step)
        filled, latest = table.take(len(fetch), step)
        evict_slots, leaving = table.fill(local, fetch, filled, slots)
        if self._looks_ahead:
            table.look_ahead(step)
        self._past.append((entry, self._ranking.learn(local, entry.previous, step)))
        table.file(slots, step)
        if self._first_slot:
            slots, evict_slots = slots + np.int32(self._first_slot), evict_slots + self._first_slot
        rows = [self.layout.row(self.home, of.astype(np.int64)) for of in (local[fetch], leaving)]
        return HomeDecision(*_parts(entry), slots, fetch, rows[0], evict_slots, rows[1], latest)

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """See `Planner.restore`. How far planning was ahead leaves no trace: what later steps were
        counted for is taken back."""
        while self._window:
            self._unname(self._window.pop())
        while self._past and self._past[-1][0].step > step:
            entry, forget = self._past.pop()
            self._unname(entry)
            forget()
        self._planned = step
        np.minimum(self._last_reference, step, out=self._last_reference)  # beyond `_past`
        local = np.where(slot_row >= 0, self.layout.local(np.maximum(slot_row, 0)), -1)
        self._table.restore(local.astype(np.int32), step)

    def _unname(self, entry: Ingested) -> None:
        self._last_reference[entry.local] = entry.previous


class ResidentPlanner(Planner):
    """All rows on every device: slot = row, nothing moves (mode `resident`)."""

    def __init__(self, layout: RowLayout, home: int) -> None:
        super().__init__(layout, home, layout.local_rows, slice(None))

    def plan(self) -> HomeDecision:
        """See `Planner.plan`: every row is a hit."""
        entry = self._window.popleft()
        rows = self.layout.row(self.home, entry.local.astype(np.int64))
        return HomeDecision(*_parts(entry), rows, *(np.empty(0, np.int64),) * 4, -1)


class PassThroughPlanner(ResidentPlanner):
    """No cache: every row comes from the store and leaves after its step (mode `host`).

    Slots interleave over homes, so that the buffer may grow with the largest step.
    """

    def __init__(self, layout: RowLayout, home: int) -> None:
        super().__init__(layout, home)
        self._leaving = (np.empty(0, np.int64), np.empty(0, np.int64), -1)

    def plan(self) -> HomeDecision:
        """See `Planner.plan`: the rows of the step before leave, all of this step's come in."""
        every = super().plan()
        every_row = np.arange(len(every.slots))
        slots = every_row * self.layout.world_size + self.home
        old_slots, old_rows, latest = self._leaving
        self._leaving = (slots, every.slots, every.step)
        return replace(
            every,
            slots=slots,
            fetch=every_row,
            fetch_rows=every.slots,
            evict_slots=old_slots,
            evict_rows=old_rows,
            latest_use=latest,
        )

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """See `Planner.restore`; the rows still in the buffer leave before the next step."""
        super().restore(slot_row, step)
        slots = np.flatnonzero(slot_row >= 0)
        self._leaving = (slots, slot_row[slots], step)
