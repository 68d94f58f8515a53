"""Which batches a run trains and evaluates on, as pure functions: schedules, and hot and cold
phases with what the held-out loss does to them."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from toy_parallel import ToySource

from distcache.popularity.hot_cold import COLD, HOT, STEADY_FALLS, Phase, Sizes
from distcache.trainer.schedule import PhasedSchedule, Schedule, make_schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(0, 3, None, 0), "t0 t1 t2"),
        (Schedule(0, 3, None, 2), "t0 t1 t2 e0 e1"),
        (Schedule(0, 5, 2, 1), "t0 t1 e0 t2 t3 e0 t4 e0"),
        (Schedule(0, 4, 2, 1), "t0 t1 e0 t2 t3 e0"),
        (Schedule(3, 5, 2, 1), "t3 e0 t4 e0"),
        (Schedule(5, 5, 2, 1), "e0"),
        (Schedule(7, 5, None, 0), ""),
        (Schedule(0, 0, None, 1), "e0"),
        (Schedule(0, 4, 2, 0), "t0 t1 t2 t3"),
    ],
)
def test_order(schedule, expected):
    assert " ".join(f"{kind[0]}{index}" for kind, index in schedule.order()) == expected


def test_a_schedule_over_a_source():
    source = ToySource()
    assert make_schedule(source, 0, None, None, 0).steps == 6  # an epoch; more repeats it
    batches = list(make_schedule(source, 0, 13, None, 0).batches(source, 0, 1))
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6 + [2]
    assert [batch.global_size for batch in batches] == ([16] * 5 + [10]) * 2 + [16]
    for wanted, held_out in ((9, 5), (3, 3)):
        assert make_schedule(source, 0, 1, None, wanted).eval_batches == held_out
    source.drawn.clear()
    stream = make_schedule(source, 0, 4, 1, 1).batches(source, 0, 1)
    assert source.drawn == []
    next(stream), next(stream)
    assert source.drawn == [("train", 0), ("eval", 0)]
    source.steps_per_epoch = source.eval_batches = None
    assert make_schedule(source, 0, 100, None, 8).eval_batches == 8


def clock_of(rate: float, sizes: Sizes) -> PhasedSchedule:
    return PhasedSchedule(0, None, None, 0, Phase(rate), sizes)


@pytest.mark.parametrize(
    ("sizes", "rate", "expected"),
    [
        ((4, 2), 0.5, "hot2 cold1 hot2 cold1"),
        ((4, 2), 1.0, "hot4 cold2"),
        ((0, 3), 0.5, "cold2 cold1"),
        ((3, 0), 0.5, "hot2 hot1"),
        ((7, 1), 0.3, "hot3 cold1 hot2 hot2"),
        ((1, 10), 0.25, "hot1 cold3 cold2 cold3 cold2"),
        ((2, 2), 0.01, "hot1 cold1 hot1 cold1"),
    ],
)
def test_phases_of_an_epoch(sizes, rate, expected):
    clock, done, seen = clock_of(rate, lambda epoch: sizes), 0, []
    while done < sum(sizes):
        phase = clock.begin()
        seen.append(f"{phase.kind}{phase.left}")
        done += phase.left
        clock.phase = phase.forward(phase.left)
    assert " ".join(seen) == expected


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_once_whatever_the_losses(seed):
    rng = np.random.default_rng(seed)
    each = np.maximum(rng.integers(0, 30, (3, 2)), [[0, 1], [1, 0], [0, 1]])
    total, losses = int(each.sum()), rng.random(2000)
    clock = clock_of(float(rng.uniform(0.01, 1)), lambda epoch: tuple(each[epoch].tolist()))
    done, seen = 0, Counter()
    while done < total:
        phase = clock.begin()
        assert phase.left > 0
        first = getattr(phase, phase.kind)
        seen.update((phase.epoch, phase.kind, first + at) for at in range(phase.left))
        done += phase.left
        clock.phase = phase.forward(phase.left)
        assert clock.phase.due
        rate = clock.learn(losses[done]).rate
        assert 1 / max(each[phase.epoch]) <= rate <= 1 or rate == phase.rate
    assert done == total
    kinds = [(epoch, kind) for epoch in range(3) for kind in (HOT, COLD)]
    expected = zip(kinds, each.reshape(-1).tolist(), strict=True)
    assert seen == Counter((*kind, number) for kind, count in expected for number in range(count))


def test_the_rate_halves_at_a_rise_and_doubles_after_steady_falls():
    phase, rates = Phase(0.5), []
    falls = [0.9 - 0.01 * at for at in range(STEADY_FALLS + 1)]
    for loss in [1.0, 1.1, 1.2, 1.3, 1.4, 1.4, *falls, None, 0.8, 0.85]:
        phase = phase.learn(loss, 1 / 8)
        rates.append(phase.rate)
    # First nothing to compare with; three rises down to one batch of the larger kind, and no less.
    assert rates[:6] == [0.5, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert rates[6:11] == [0.125] * 3 + [0.25] * 2
    assert rates[11:] == [0.25, 0.25, 0.125]  # no loss, a fall, a rise
    everything = Phase(0.8, loss=1.0, falls=STEADY_FALLS - 1).learn(0.9, 1 / 8)
    assert everything.rate == 1.0
    assert Phase(0.05, loss=1.0).learn(1.1, 1 / 8).rate == 0.05  # a low rate that was given stays


class Source:
    """11 hot and 6 cold batches an epoch, as labels."""

    def sizes(self, epoch: int) -> tuple[int, int]:
        return 11, 6

    def batch(self, place: tuple, step: int, rank: int, world_size: int) -> str:
        epoch, kind, number = place
        return f"{kind} {epoch} {number} {step}"

    def eval_batch(self, index: int, rank: int, world_size: int) -> str:
        return f"eval {index}"


def phased(first: int, steps: int, every, batches: int, phase=None, rate=0.3) -> PhasedSchedule:
    phase = phase or Phase(rate)
    return PhasedSchedule(first, steps, every, batches, phase, Source().sizes)


def test_no_phase_becomes_shorter_than_an_evaluation():
    schedule, losses, lengths = phased(0, 170, None, 3, rate=1.0), iter(range(1000)), []
    for stream in schedule.streams(Source(), 0, 1):
        batches = list(stream)
        assert batches[-3:] == ["eval 0", "eval 1", "eval 2"]
        lengths.append(len(batches) - 3)
        for _ in range(lengths[-1]):
            schedule.forward()
        schedule.learn(next(losses))
    assert lengths[:4] == [11, 6, 6, 3]
    assert lengths[-8:] == lengths[-16:-8] == [3, 2, 3, 2, 3, 1, 2, 1]


def trained(schedule: PhasedSchedule, stop_at: int | None, after_eval: bool = True):
    """Training batches and the position after each step, as the loop would go through them, until
    `stop_at` steps are done; `after_eval`: an evaluation then is done before the stop."""
    seen, positions, done, evaluated = [], {}, schedule.first_step, 0
    for stream in schedule.streams(Source(), 0, 1):
        for batch in stream:
            if not batch.startswith("eval"):
                if done == stop_at:
                    return seen, positions
                seen.append(batch)
                done += 1
                assert batch.endswith(f" {done - 1}")
                positions[done] = schedule.forward()
                if done == stop_at and not after_eval:
                    return seen, positions
                continue
            evaluated += 1
            if evaluated % schedule.eval_batches == 0:
                positions[done] = schedule.learn(math.sin(done / 3))  # rises and falls
                if done == stop_at:
                    return seen, positions
        if done == stop_at:
            return seen, positions
    return seen, positions


@pytest.mark.parametrize("evaluation", [(None, 2), (5, 1), (None, 0)])
def test_stopped_anywhere_it_goes_on_the_same(evaluation):
    steps = 40  # two epochs and a part
    whole, positions = trained(phased(0, steps, *evaluation), None)
    assert len(whole) == steps
    assert len({text.rsplit(" ", 1)[0] for text in whole}) == steps  # no batch twice
    assert (len({position.rate for position in positions.values()}) > 1) == (evaluation[1] > 0)
    for stop_at in range(1, steps):
        for after_eval in (True, False):
            before, seen = trained(phased(0, steps, *evaluation), stop_at, after_eval)
            phase = Phase(**json.loads(json.dumps(vars(seen[stop_at]))))
            after, rest = trained(phased(stop_at, steps, *evaluation, phase), None)
            assert before + after == whole
            assert rest[steps] == positions[steps]


def test_nothing_left_to_train_is_evaluated_once():
    streams = [list(stream) for stream in phased(40, 40, None, 2).streams(Source(), 0, 1)]
    assert streams == [["eval 0", "eval 1"]]
