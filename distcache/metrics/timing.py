"""Step times and throughput, without the first steps."""

from __future__ import annotations

from distcache.parallel.durations import Durations


class StepTimes:
    """Host times of training steps, in memory that does not grow with them.

    An interval reaches from the end of the step (or evaluation) before to the end of this one,
    waits for batches and plans included; samples are those of all ranks.
    """

    def __init__(self) -> None:
        self._intervals = Durations()
        self._samples = 0
        self._recent = (0, 0.0, 0)  # steps, seconds, samples

    def add(self, interval_s: float, samples: int) -> None:
        """Record one training step."""
        if self._intervals.add(interval_s):
            self._samples += samples
        steps, seconds, recent = self._recent
        self._recent = (steps + 1, seconds + interval_s, recent + samples)

    def step_ms(self) -> dict[str, float | None]:
        """`median` and `p90` of the intervals in milliseconds, without the first ten; None where
        none is. Of more steps than `durations.KEPT`, those of a uniform sample of that many."""
        found = self._intervals.percentiles((50, 90))
        median, p90 = (None, None) if found is None else (1e3 * value for value in found)
        return {"median": median, "p90": p90}

    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second of interval, without the first ten steps."""
        spent = self._intervals.total
        return self._samples / spent if spent > 0 else None

    def lap(self) -> tuple[float, float]:
        """Of the steps since the last lap, or the beginning: mean interval in seconds, samples per
        second."""
        steps, seconds, samples = self._recent
        self._recent = (0, 0.0, 0)
        spent = max(seconds, 1e-9)
        return spent / max(steps, 1), samples / spent
