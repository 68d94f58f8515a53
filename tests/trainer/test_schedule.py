"""The batch schedule as a pure function."""

from __future__ import annotations

import pytest
from toy_parallel import ToySource

from distcache.errors import ConfigError
from distcache.trainer.schedule import Schedule, make_schedule


def names(schedule: Schedule) -> str:
    """`t3` for training step 3, `e0` for evaluation batch 0."""
    return " ".join(f"{kind[0]}{index}" for kind, index in schedule.order())


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
    assert names(schedule) == expected


def test_steps_null_is_one_epoch_and_more_repeats_it_with_ragged_batches():
    source = ToySource()
    assert make_schedule(source, 0, None, None, 0).steps == 6
    batches = list(make_schedule(source, 0, 13, None, 0).batches(source, 0, 1))
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6 + [2]
    assert [batch.global_size for batch in batches] == ([16] * 5 + [10]) * 2 + [16]


def test_held_out_batches_bound_an_evaluation():
    assert make_schedule(ToySource(), 0, 1, None, 9).eval_batches == 5
    assert make_schedule(ToySource(), 0, 1, None, 3).eval_batches == 3


def test_unlimited_data_wants_steps():
    source = ToySource()
    source.steps_per_epoch = source.eval_batches = None
    assert make_schedule(source, 0, 100, None, 8).eval_batches == 8
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        make_schedule(source, 0, None, None, 0)


def test_batches_are_drawn_when_asked_for():
    source = ToySource()
    stream = make_schedule(source, 0, 4, 1, 1).batches(source, 0, 1)
    assert source.drawn == []
    next(stream), next(stream)
    assert source.drawn == [("train", 0), ("eval", 0)]
