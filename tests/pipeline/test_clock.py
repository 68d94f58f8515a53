"""What stages took and hid, counted from spans made up by hand."""

from __future__ import annotations

import pytest

from distcache.engine.step import WAIT, Span, StageClock
from distcache.parallel.base import stage_values


def step(clock: StageClock, number: int, gather_lane: str, waited: float, kind="train") -> None:
    """A plan of 4 s, a gather of 2 s, compute of 3 s; the loop waited from the gather's start."""
    start = 100.0 * number
    spans = [
        Span("plan", "planner", number, start, start + 4),
        Span("gather", gather_lane, number, start + 10, start + 12),
        Span("forward_backward", "training", number, start + 20, start + 23),
    ]
    waits = [Span(WAIT, "training", number, start + 10, start + 10 + waited)]
    clock.add(number, kind, spans, waits)


def test_a_lap_holds_the_steps_since_the_one_before() -> None:
    clock = StageClock()
    step(clock, 0, "movement", 2)  # all of the gather was waited for
    step(clock, 1, "movement", 1)
    took, hidden = clock.lap()
    assert took == {"plan": 4000, "gather": 2000, "forward_backward": 3000, WAIT: 1500}
    assert hidden == {"plan": 4000, "gather": 500}
    step(clock, 2, "movement", 0)
    step(clock, 3, "movement", 5, kind="eval")
    took, hidden = clock.lap()
    assert took == {"plan": 4000, "gather": 2000, "forward_backward": 3000, WAIT: 0}
    assert hidden == {"plan": 4000, "gather": 2000}
    assert set(clock.lap()[0].values()) == {0.0}, "no step since"
    assert clock.mean_ms() == pytest.approx(
        {"plan": 4000, "gather": 2000, "forward_backward": 3000, WAIT: 1000}
    )
    assert clock.hidden_ms() == pytest.approx({"plan": 4000, "gather": 1000})


def test_the_hidden_share_counts_movement_in_the_loop_as_waited_for() -> None:
    overlapped, serial = StageClock(), StageClock()
    step(overlapped, 0, "movement", 0.5)
    step(serial, 0, "training", 0)
    found = stage_values(overlapped)
    assert (found["hidden_share"], found["stall_ms"]) == ((4 + 1.5) / 6, 500)
    found = stage_values(serial)
    assert (found["hidden_share"], found["stage_hidden_ms"]) == (4 / 6, {"plan": 4000})
    assert stage_values(StageClock())["hidden_share"] is None


def test_watchers_see_every_step_with_its_waits() -> None:
    clock, seen = StageClock(), []
    clock.watchers.append(lambda number, kind, spans: seen.append((number, kind, len(spans))))
    step(clock, 0, "movement", 1)
    step(clock, 1, "movement", 1, kind="eval")
    assert seen == [(0, "train", 4), (1, "eval", 4)]
    assert clock.steps == 1
