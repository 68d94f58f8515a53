"""Hot and cold phases as pure functions: every batch once, and what the held-out loss does."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from distcache.popularity.hot_cold import COLD, HOT, BatchPlace
from distcache.trainer.schedule import (
    STEADY_FALLS,
    Phase,
    PhaseClock,
    PhasedSchedule,
    Schedule,
)


def play(sizes, rate, steps, loss=None):
    """(kind, batches, rate) of each phase until `steps` are done; `loss(step)` after each."""
    clock, done, seen = PhaseClock(Phase(rate), 0, sizes), 0, []
    while done < steps:
        phase = clock.begin(done)
        seen.append((phase.kind, phase.left, phase.rate))
        done += phase.left
        if loss is not None:
            clock.learn(done, loss(done))
    return seen


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
    seen = play(lambda epoch: sizes, rate, sum(sizes))
    assert " ".join(f"{kind}{left}" for kind, left, _ in seen) == expected


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_once_whatever_the_losses(seed):
    rng = np.random.default_rng(seed)
    each = np.maximum(rng.integers(0, 30, (3, 2)), [[0, 1], [1, 0], [0, 1]])
    total, losses = int(each.sum()), rng.random(2000)
    clock = PhaseClock(Phase(float(rng.uniform(0.01, 1))), 0, lambda e: tuple(each[e].tolist()))
    done, seen = 0, Counter()
    while done < total:
        phase = clock.begin(done)
        assert phase.left > 0
        first = getattr(phase, phase.kind)
        seen.update((phase.epoch, phase.kind, first + at) for at in range(phase.left))
        done += phase.left
        assert clock.at(done).due
        assert 1 / max(each[phase.epoch]) <= clock.learn(done, losses[done]).rate <= 1 or (
            clock.at(done).rate == phase.rate
        )
    assert done == total
    expected = {
        (epoch, kind, number)
        for epoch in range(3)
        for kind, count in zip((HOT, COLD), each[epoch].tolist(), strict=True)
        for number in range(count)
    }
    assert seen == Counter(expected)


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


def test_no_phase_becomes_shorter_than_an_evaluation():
    plain, losses = Schedule(0, 170, None, 3), iter(range(1000))
    schedule = PhasedSchedule.of(plain, Source(), None, 1.0)
    lengths = []
    for stream in schedule.streams(Source(), 0, 1):
        batches = list(stream)
        assert batches[-3:] == ["eval 0", "eval 1", "eval 2"]
        lengths.append(len(batches) - 3)
        schedule.learn(sum(lengths), next(losses))
    assert lengths[:4] == [11, 6, 6, 3]
    assert lengths[-8:] == lengths[-16:-8] == [3, 2, 3, 2, 3, 1, 2, 1]


class Source:
    """11 hot and 6 cold batches an epoch, as labels."""

    def epoch(self, number):
        """See `HotColdSource.epoch`."""
        return self

    sizes = (11, 6)

    def batch(self, place: BatchPlace, step: int, rank: int, world_size: int) -> str:
        """See `HotColdSource.batch`."""
        return f"{place.kind} {place.epoch} {place.number} {step}"

    def eval_batch(self, index: int, rank: int, world_size: int) -> str:
        """See `HotColdSource.eval_batch`."""
        return f"eval {index}"


def loss_after(step: int) -> float:
    """Any loss that rises and falls."""
    return math.sin(step / 3)


def trained(schedule: PhasedSchedule, stop_at: int | None, after_eval: bool = True):
    """Training batches and the position after each step, as the loop would go through them, until
    `stop_at` steps are done; `after_eval`: an evaluation then is done before the stop."""
    seen, positions, done, evaluated = [], {}, schedule.first_step, 0
    for stream in schedule.streams(Source(), 0, 1):
        for batch in stream:
            if done == stop_at and not batch.startswith("eval"):
                return seen, positions
            if not batch.startswith("eval"):
                seen.append(batch)
                done += 1
                assert batch.endswith(f" {done - 1}")
                positions[done] = schedule.position(done)
                if done == stop_at and not after_eval:
                    return seen, positions
                continue
            evaluated += 1
            if evaluated % schedule.eval_batches == 0:
                positions[done] = schedule.learn(done, loss_after(done))
                if done == stop_at:
                    return seen, positions
        if done == stop_at:
            return seen, positions
    return seen, positions


@pytest.mark.parametrize("evaluation", [(None, 2), (5, 1), (None, 0)])
def test_stopped_anywhere_it_goes_on_the_same(evaluation):
    every, batches = evaluation
    steps = 40  # two epochs and a part

    def schedule(first: int, phase: Phase | None) -> PhasedSchedule:
        return PhasedSchedule.of(Schedule(first, steps, every, batches), Source(), phase, 0.3)

    whole, positions = trained(schedule(0, None), None)
    assert len(whole) == steps
    assert len({text.rsplit(" ", 1)[0] for text in whole}) == steps  # no batch twice
    assert (len({position.rate for position in positions.values()}) > 1) == (batches > 0)
    for stop_at in range(1, steps):
        for after_eval in (True, False):
            before, seen = trained(schedule(0, None), stop_at, after_eval)
            phase = Phase(**json.loads(json.dumps(seen[stop_at].values())))
            after, rest = trained(schedule(stop_at, phase), None)
            assert before + after == whole
            assert rest[steps] == positions[steps]


def test_nothing_left_to_train_is_evaluated_once():
    schedule = PhasedSchedule.of(Schedule(40, 40, None, 2), Source(), None, 0.3)
    streams = [list(stream) for stream in schedule.streams(Source(), 0, 1)]
    assert streams == [["eval 0", "eval 1"]]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase(0.5, 0, 40, 3, HOT, 0, 0.5), "cold0.3 hot1.0"),
        (Phase(0.5, 0, 2, 40, COLD, 0, 0.5), "hot0.2 hot1.0"),
        (Phase(0.5, 0, 9, 3, HOT, 20, 0.5), "hot0.9 hot0.10 cold0.3"),
        (Phase(1.0, 0, 5, 40, COLD, 7, 1.0), "hot0.5 hot1.0"),
        (Phase(0.5, 0, 2, 2, COLD, 2, 0.5), "cold0.2 cold0.3 hot0.2"),
    ],
)
def test_other_batches_than_it_began_with(phase: Phase, expected: str):
    """11 hot and 6 cold batches now: the epoch goes on with those that are left, and ends."""
    schedule = PhasedSchedule.of(Schedule(43, 90, None, 0), Source(), phase, 0.3)
    seen = [batch.split() for stream in schedule.streams(Source(), 0, 1) for batch in stream]
    assert len(seen) == 47
    names = [f"{kind}{epoch}.{number}" for kind, epoch, number, _ in seen]
    places = iter(names)
    assert all(name in places for name in expected.split())  # in this order
    last = int(seen[-1][1])
    numbers = [(kind, int(epoch), int(number)) for kind, epoch, number, _ in seen]
    assert all(number < {HOT: 11, COLD: 6}[kind] for kind, _, number in numbers)
    for epoch in range(1, last):
        assert len({one for one in numbers if one[1] == epoch}) == 17
