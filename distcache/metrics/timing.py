"""Step times and throughput, without the first steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SKIPPED_STEPS = 10
"""First training steps of a process that count for no time: warm-up of caches and allocators."""


@dataclass
class StepTimes:
    """Host times of training steps, in seconds.

    `intervals`: from the end of the step (or evaluation) before to the end of this one, waits for
    batches and plans included; `samples`: of all ranks.
    """

    intervals: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def add(self, interval_s: float, samples: int) -> None:
        """Record one training step."""
        self.intervals.append(interval_s)
        self.samples.append(samples)

    def step_ms(self) -> dict[str, float | None]:
        """`median` and `p90` of the intervals in milliseconds, without the first ten; None where
        none is."""
        kept = np.asarray(self.intervals[SKIPPED_STEPS:]) * 1e3
        if len(kept) == 0:
            return {"median": None, "p90": None}
        return {"median": float(np.median(kept)), "p90": float(np.percentile(kept, 90))}

    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second of interval, without the first ten steps."""
        spent = sum(self.intervals[SKIPPED_STEPS:])
        return sum(self.samples[SKIPPED_STEPS:]) / spent if spent > 0 else None

    def recent(self, count: int) -> tuple[float, float]:
        """Of the last `count` steps: mean interval in seconds, samples per second."""
        intervals = self.intervals[-count:]
        spent = max(sum(intervals), 1e-9)
        return spent / max(len(intervals), 1), sum(self.samples[-count:]) / spent
