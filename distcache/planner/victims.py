"""Which slots of one home may be filled next: buckets by last and next use, never a scan.

Window-Belady (Belady 1966, on the known window; BagPipe, SOSP 2023): rows without a use in the
window leave first, least recently used first; then the farthest next use. Slots used in the last
P steps are *held* and leave only when the others are short, oldest last use first (ScratchPipe,
ISCA 2022, holds past + current + future rows for the same reason).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from distcache.planner.bodies import bodies
from distcache.planner.calls import distinct_rows
from distcache.planner.loops import NEVER


class SlotTable:
    """Bookkeeping of one home's slots `0 .. slots - 1` (local numbers).

    `row`: local row held, -1 free; `last_use`, `next_use`: steps. 16 bytes per slot with scratch.
    Entries in the buckets are hints: each is checked against these arrays when it is taken.
    """

    def __init__(self, slots: int, prefetch: int) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self.row = np.full(slots, -1, dtype=np.int32)
        self.last_use = np.full(slots, -1, dtype=np.int32)
        self.next_use = np.full(slots, NEVER, dtype=np.int32)
        self._scratch = np.full(slots, -1, dtype=np.int32)
        self._free = np.arange(slots, dtype=np.int32)
        self._filed = 0
        self._idle: deque[tuple[int, np.ndarray]] = deque()
        self._soon: dict[int, list[np.ndarray]] = {}
        self._used: deque[tuple[int, np.ndarray]] = deque()

    def look_up(
        self, local: np.ndarray, slot_of: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The slots of the distinct rows `local` that `step` uses, and which of them to fetch.

        Slots found are held: they cannot leave for this step. All int32; `slot_of`: the slot of
        every row, -1 for none.
        """
        slots, fetch = np.empty(len(local), np.int32), np.empty(len(local), np.int32)
        misses = bodies().look_up(local, slot_of, self.last_use, self.next_use, step, slots, fetch)
        return slots, fetch[:misses].copy()

    def fill(
        self,
        local: np.ndarray,
        fetch: np.ndarray,
        filled: np.ndarray,
        slot_of: np.ndarray,
        slots: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put the rows `local[fetch]` into the slots `filled`, which `take` gave for them.

        Returns the slots among them whose rows leave, and those rows.
        """
        evicted, leaving = np.empty(len(fetch), np.int32), np.empty(len(fetch), np.int32)
        count = bodies().fill(local, fetch, filled, slot_of, self.row, slots, evicted, leaving)
        return evicted[:count].copy(), leaving[:count].copy()

    def wanted(self, rows: np.ndarray, slot_of: np.ndarray, step: int) -> None:
        """The window says that these rows, as far as cached, are next used by `step`."""
        slots = np.empty(len(rows), np.int32)
        count = bodies().want(rows, slot_of, self.next_use, step, slots)
        if count:
            self._soon.setdefault(step, []).append(slots[:count].copy())

    def _live(self, slots: np.ndarray, used_at: int, most: int) -> tuple[np.ndarray, int]:
        """At most `most` of `slots` that were last used at `used_at` and are not wanted; how many
        of `slots` that took to find."""
        found = np.empty(min(most, len(slots)), np.int32)
        count, read = bodies().live(slots, self.last_use, self.next_use, used_at, found)
        return found[:count].copy(), read

    def used(self, slots: np.ndarray, step: int) -> None:
        """File the slots of a step that has been planned, after `wanted` told their next uses."""
        self._soon.pop(step, None)
        idle, _ = self._live(slots, step, len(slots))
        if len(idle):
            self._idle.append((step, idle))
            self._filed += len(idle)
            self._compact()
        self._used.append((step, slots))
        while self._used and self._used[0][0] < step - self.prefetch:
            self._used.popleft()

    def _compact(self) -> None:
        """Drop outdated hints once they outnumber the slots (amortised over the steps)."""
        if self._filed <= 4 * self.slots:
            return
        live = [
            (used_at, self._live(slots, used_at, len(slots))[0]) for used_at, slots in self._idle
        ]
        self._idle = deque(entry for entry in live if len(entry[1]))
        self._filed = sum(len(slots) for _, slots in self._idle)

    def take(self, count: int, step: int) -> tuple[np.ndarray, int]:
        """`count` slots to hold for the misses of `step`, and the latest last use among them (-1:
        none).

        The caller has checked that the step's distinct rows fit, so enough slots are not its own.
        """
        parts: list[np.ndarray] = []
        taken, self._free = self._free[:count], self._free[count:]
        self.last_use[taken] = step
        parts.append(taken)
        need = count - len(taken)
        latest = -1
        for source in (self._take_idle, self._take_farthest, self._take_held):
            if need == 0:
                break
            for slots in source(need, step):
                latest = max(latest, int(self.last_use[slots].max()))
                self.last_use[slots] = step
                self.next_use[slots] = NEVER
                parts.append(slots)
                need -= len(slots)
        return np.concatenate(parts), latest

    def _take_idle(self, need: int, step: int) -> list[np.ndarray]:
        """Rows without a use in the window whose hold has ended, least recently used first."""
        out = []
        while need and self._idle and self._idle[0][0] < step - self.prefetch:
            used_at, slots = self._idle.popleft()
            leaving, read = self._live(slots, used_at, need)
            if read < len(slots):
                self._idle.appendleft((used_at, slots[read:]))
            if len(leaving):
                out.append(leaving)
                need -= len(leaving)
        return out

    def _take_farthest(self, need: int, step: int) -> list[np.ndarray]:
        """Rows with a use in the window whose hold has ended, farthest next use first."""
        out = []
        for use in sorted(self._soon, reverse=True):
            if need == 0 or use <= step:
                break
            slots = np.concatenate(self._soon[use])
            slots = slots[self.next_use[slots] == use]
            # A slot filled anew for the same next use is filed twice.
            slots, _, _ = distinct_rows(slots, self._scratch, -1)
            leaves = np.flatnonzero(self.last_use[slots] < step - self.prefetch)[:need]
            chosen = slots[leaves]
            self._soon[use] = [np.delete(slots, leaves)]
            if len(chosen):
                out.append(chosen)
                need -= len(chosen)
        return out

    def _take_held(self, need: int, step: int) -> list[np.ndarray]:
        """Shorten holds: oldest last use first, farthest next use first within it."""
        out = []
        for used_at, slots in self._used:
            if need == 0:
                break
            if used_at >= step:
                continue
            live = slots[self.last_use[slots] == used_at]
            live = live[np.argsort(-self.next_use[live].astype(np.int64), kind="stable")][:need]
            if len(live):
                out.append(live)
                need -= len(live)
        return out

    def restore(self, row: np.ndarray, step: int) -> None:
        """Start again from the rows that the slots really hold (-1: free), none of them held."""
        held = row >= 0
        self.row[:] = row
        self.last_use[:] = step - self.prefetch - 1
        self.next_use[:] = NEVER
        self._free = np.flatnonzero(~held).astype(np.int32)
        occupied = np.flatnonzero(held).astype(np.int32)
        self._idle = deque([(step - self.prefetch - 1, occupied)] if len(occupied) else [])
        self._soon, self._used = {}, deque()
