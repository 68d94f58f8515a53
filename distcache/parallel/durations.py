"""Durations of a run of any length in memory that does not grow."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np

WARM_UP_STEPS = 10
"""First steps of a process that count for no time: warm-up of caches and allocators."""

KEPT = 65_536
"""Values that are kept; of more than these, as many drawn at random from all."""


class Durations:
    """Of the numbers added: count, sum, median and percentiles, without the first ten.

    Exact up to `KEPT` numbers. Beyond, `kept` is a uniform sample of all of them (Vitter's
    algorithm R, from a fixed seed), whose median has its place among all within 0.4 percentile
    points nineteen times in twenty; count and sum stay exact.
    """

    def __init__(self, skip: int = WARM_UP_STEPS, keep: int = KEPT) -> None:
        self.kept = array("d")
        self.skipped: list[float] = []
        self.count, self.total = 0, 0.0
        self._skip, self._keep = skip, keep
        self._random = random.Random(0)

    def add(self, value: float) -> bool:
        """Take in a number; whether it counts."""
        if len(self.skipped) < self._skip:
            self.skipped.append(value)
            return False
        self.count += 1
        self.total += value
        if len(self.kept) < self._keep:
            self.kept.append(value)
        elif (place := self._random.randrange(self.count)) < self._keep:
            self.kept[place] = value
        return True

    def percentiles(self, wanted: Sequence[float]) -> list[float] | None:
        """The percentiles (0 to 100), linear between neighbours; None where nothing counts."""
        return np.percentile(self.kept, wanted).tolist() if self.count else None
