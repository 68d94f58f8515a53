"""Device times on the host's clock stay exact in runs of hours."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.streams import DeviceClock


class Event:
    """As a CUDA event: times between two are float32 milliseconds."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_time(self, other: Event) -> float:
        assert other.at_s >= self.at_s, "an event from before the zero"
        return float(np.float32(1e3 * (other.at_s - self.at_s)))


@pytest.mark.parametrize("step_s", [0.0137, 7.3, 100.0])
def test_a_stage_of_one_millisecond_is_told_after_hours(step_s: float) -> None:
    clock = DeviceClock(Event(0.0), 50.0)
    at, worst = 0.0, 0.0
    while at < 10 * 3600:
        at += step_s if at % 600 > 3 * step_s else 600.0  # now and then a long pause
        start, end = clock.seconds(Event(at)), clock.seconds(Event(at + 0.001))
        worst = max(worst, abs(end - start - 0.001))
        if step_s < 1 and at > 120:
            at += 60 * step_s
        assert abs(start - 50.0 - at) < 1.0
        clock.seconds(Event(max(0.0, at - 30.0)))  # movement runs ahead: not all come in order
    assert worst < 1.3e-4  # a float32 of 20 minutes in milliseconds
