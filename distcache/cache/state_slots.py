"""Slots with optimizer state on this rank, where homes alone keep it (ZeRO's first stage)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StateSlots:
    """The slots [first, first + count), and all from `tail` on, in this order."""

    first: int
    count: int
    tail: int

    def rows(self, slots: int) -> int:
        """How many of `slots` slots have state."""
        return self.count + slots - self.tail

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Where the state of each of `slots` (int64 `[m]`, all of which have one) lies."""
        return np.where(slots >= self.tail, slots - self.tail + self.count, slots - self.first)
