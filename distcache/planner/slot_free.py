"""The planners of the modes without a cache: the same labels from the same code, no victims.

`ResidentPlanner` (all rows on every device) and `PassThroughPlanner` (none) stand in for
`HomePlanner`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from distcache.layout import RowLayout
from distcache.planner.bodies import bodies
from distcache.planner.home import HomeDecision, HomePlanner, Ingested, take_requests


class _SlotFreePlanner:
    """What the planners that choose no slots share: distinct rows, in stream order."""

    def __init__(self, layout: RowLayout, home: int) -> None:
        self.layout, self.home = layout, home
        self.slots = layout.local_rows
        self._position = np.full(layout.local_rows, -1, dtype=np.int32)
        self._window: deque[Ingested] = deque()
        bodies()  # compiles now, not while planning

    @property
    def index_bytes(self) -> int:
        """Bytes of the scratch array that finds distinct rows."""
        return self._position.nbytes

    @property
    def own_slots(self) -> slice:
        """All slots of the device."""
        return slice(None)

    @property
    def due_rows(self) -> int:
        """As `HomePlanner.due_rows`."""
        return len(self._window[0].local)

    def ingest(self, step: int, kind: str, requests: Sequence[np.ndarray]) -> Ingested:
        """As `HomePlanner.ingest`."""
        entry = take_requests(self.layout, self._position, (step, kind), requests)
        self._window.append(entry)
        return entry


class ResidentPlanner(_SlotFreePlanner):
    """All rows on every device: slot = row, nothing moves (mode `resident`)."""

    def plan(self) -> HomeDecision:
        """As `HomePlanner.plan`: every row is a hit."""
        entry = self._window.popleft()
        rows = self.layout.row(self.home, entry.local.astype(np.int64))
        none = np.empty(0, np.int64)
        label = (entry.step, entry.kind)
        return HomeDecision(*label, rows, *(none,) * 4, -1, entry.replies, entry.previous)

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """Forget the window."""
        self._window.clear()


class PassThroughPlanner(_SlotFreePlanner):
    """No cache: every row comes from the store and leaves after its step (mode `host`).

    Slots interleave over homes, so that the buffer may grow with the largest step.
    """

    def __init__(self, layout: RowLayout, home: int) -> None:
        super().__init__(layout, home)
        self._previous = (np.empty(0, np.int64), np.empty(0, np.int64), -1)

    def plan(self) -> HomeDecision:
        """As `HomePlanner.plan`: the rows of the step before leave, all of this step's come in."""
        entry = self._window.popleft()
        rows = self.layout.row(self.home, entry.local.astype(np.int64))
        size = self.layout.world_size
        slots = np.arange(len(rows), dtype=np.int64) * size + self.home
        old_slots, old_rows, latest = self._previous
        self._previous = (slots, rows, entry.step)
        return HomeDecision(
            step=entry.step,
            kind=entry.kind,
            slots=slots,
            fetch=np.arange(len(rows), dtype=np.int64),
            fetch_rows=rows,
            evict_slots=old_slots,
            evict_rows=old_rows,
            latest_use=latest,
            replies=entry.replies,
            previous=entry.previous,
        )

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """Forget the window; the rows still in the buffer leave before the next step."""
        self._window.clear()
        slots = np.flatnonzero(slot_row >= 0)
        self._previous = (slots, slot_row[slots], step)


Planner = HomePlanner | ResidentPlanner | PassThroughPlanner
