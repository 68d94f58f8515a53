"""Numbers of a step made up by hand: what stages took and hid, device times on the host's clock,
durations of long runs, and what all ranks make of the words of each at a step's end.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from distcache.engine.gradients import BUSY, SAVE, StepResult, agreement, words
from distcache.engine.step import WAIT, Span, StageClock
from distcache.streams import DeviceClock
from distcache.trainer.record import StepTimes


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
    clock, seen = StageClock(), []
    clock.watchers.append(lambda number, kind, spans: seen.append((number, kind, len(spans))))
    step(clock, 0, "movement", 2)  # all of the gather was waited for
    step(clock, 1, "movement", 1)
    found = clock.lap()
    took = {"plan": 4000, "gather": 2000, "forward_backward": 3000}
    assert found["stage_ms"] == took | {WAIT: 1500}
    assert found["stage_hidden_ms"] == {"plan": 4000, "gather": 500}
    step(clock, 2, "movement", 0)
    step(clock, 3, "movement", 5, kind="eval")
    found = clock.lap()
    assert found["stage_ms"] == took | {WAIT: 0}
    assert found["stage_hidden_ms"] == {"plan": 4000, "gather": 2000}
    assert clock.mean_ms() == pytest.approx(took | {WAIT: 1000})
    assert clock.hidden_ms() == pytest.approx({"plan": 4000, "gather": 1000})
    assert clock.steps == 3
    assert seen == [(0, "train", 4), (1, "train", 4), (2, "train", 4), (3, "eval", 4)]


def test_the_hidden_share_counts_movement_in_the_loop_as_waited_for() -> None:
    overlapped, serial = StageClock(), StageClock()
    step(overlapped, 0, "movement", 0.5)
    step(serial, 0, "training", 0)
    found = overlapped.lap()
    assert (found["hidden_share"], found["stall_ms"]) == ((4 + 1.5) / 6, 500)
    assert overlapped.lap() == {}, "no step since"
    found = serial.lap()
    assert (found["hidden_share"], found["stage_hidden_ms"]) == (4 / 6, {"plan": 4000})
    assert StageClock().lap() == {}, "nor any step"


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
        start, end = clock.host_time(Event(at)), clock.host_time(Event(at + 0.001))
        worst = max(worst, abs(end - start - 0.001))
        if step_s < 1 and at > 120:
            at += 60 * step_s
        assert abs(start - 50.0 - at) < 1.0
        clock.host_time(Event(max(0.0, at - 30.0)))  # movement runs ahead: not all come in order
    assert worst < 1.3e-4  # a float32 of 20 minutes in milliseconds


def test_exact_while_all_are_kept_and_without_the_first() -> None:
    found = StepTimes(skip=3, keep=100)
    for _ in range(3):
        found.add(9.0, 1)
    assert found.step_ms() == {"median": None, "p90": None} and found.count == 0
    values = [random.Random(1).random() for _ in range(100)]
    for value in values:
        found.add(value, 1)
    median, p90 = np.percentile(values, (50, 90)).tolist()
    assert found.step_ms() == {"median": 1e3 * median, "p90": 1e3 * p90}
    assert found.count == 100


def test_beyond_that_the_last() -> None:
    found = StepTimes(skip=0, keep=1_000)
    for value in range(50_000):
        found.add(float(value), 1)
    assert list(found.kept) == list(range(49_000, 50_000))
    assert (found.count, found.total) == (50_000, 50_000 * 49_999 / 2)


TENTHS = [float(torch.tensor(share)) for share in (0.1, 0.2, 0.7)]  # float32, as a model's


@pytest.mark.parametrize(
    ("losses", "stops", "expected"),
    [
        (TENTHS, (), StepResult((TENTHS[0] + TENTHS[1]) + TENTHS[2], (), False)),
        ((1.0, 1.0, 0.0), (1,), StepResult(2.0, (), True)),
        ((math.inf, 1.0), (0,), StepResult(math.inf, (0,), True)),
        ((1.0, -math.inf, 2.0, -math.inf), (), StepResult(-math.inf, (1, 3), False)),
        ((1e308, 1e308), (), StepResult(math.inf, (0, 1), False)),
    ],
)
def test_what_follows_from_what_the_ranks_say(losses, stops, expected) -> None:
    """Losses add up in rank order and in float64; a sum that overflows is everybody's."""
    said = [words(torch.tensor(loss, dtype=torch.float64), rank in stops)
            for rank, loss in enumerate(losses)]  # fmt: skip
    assert agreement(torch.stack(said)) == expected
    assert words(torch.tensor(0.5), False).dtype is torch.float64


def test_who_has_a_loss_that_is_no_number() -> None:
    found = agreement(torch.tensor([[1.0, 0], [math.nan, 0], [2.0, 0]], dtype=torch.float64))
    assert found.bad_ranks == (1,) and math.isnan(found.loss)


def test_all_ranks_learn_of_a_checkpoint_that_waits_for_another() -> None:
    """Which is due in minutes the first rank alone knows."""
    for busy in (0, BUSY):
        found = agreement(torch.tensor([[0.5, SAVE], [0.25, busy]], dtype=torch.float64))
        assert (found.loss, found.save, found.waits) == (0.75, not busy, bool(busy))
