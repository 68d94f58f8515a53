"""The laws of sharded plans over random streams: rows come once, from their homes, up to date."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import make_layout, sharded_streams
from planner_bodies import BODIES, using
from shard_model import replay
from simulator import PlannerSettings, simulate

from distcache.errors import StepTooLargeError

LAGS = st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=12, max_size=12)


@examples(200)
@given(sharded_streams(), LAGS, st.sampled_from(BODIES))
def test_every_row_comes_once_and_up_to_date(case: tuple, lag: list, body: str) -> None:
    with using(body):
        replay(*case, lag)


@pytest.mark.slow
@pytest.mark.timeout(900)  # more than any other test takes
@examples(3000)
@given(sharded_streams(), LAGS, st.sampled_from(BODIES))
def test_every_row_comes_once_and_up_to_date_campaign(case: tuple, lag: list, body: str) -> None:
    with using(body):
        replay(*case, lag)


def stream_of(world: int, steps: int, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        [(rng.random(12) ** 2 * 60).astype(np.int64) for _ in range(world)] for _ in range(steps)
    ]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("hot", [0, 6])
def test_tight_caches_evict_and_rows_travel_both_ways(world: int, hot: int) -> None:
    """What the random streams are meant to reach is reached."""
    replicated = hot * world
    config = PlannerSettings(
        replicated + 36, 3, 2, hot=np.arange(hot, dtype=np.int64), replicated=replicated
    )
    counts = replay(stream_of(world, 20), make_layout(60, world), config, [0] * 20)
    assert min(counts.early, counts.late, counts.fetched, counts.evicted) > 0 or world > 1
    assert min(counts.early, counts.late, counts.fetched) > 0


def test_without_prefetch_every_row_may_travel_with_movement() -> None:
    """With P = 0 movement comes after the step before: no row is changed in between."""
    config = PlannerSettings(36, 3, 0, hot=np.empty(0, np.int64))
    counts = replay(stream_of(2, 12), make_layout(60, 2), config, [0] * 12)
    assert counts.late == 0 < counts.early


def test_a_home_whose_region_is_too_small_refuses_the_step() -> None:
    layout, hot = make_layout(60, 2), np.arange(20, dtype=np.int64)
    full = [[np.arange(60), np.arange(0)]]
    roomy = PlannerSettings(20 + 30, 0, 0, hot=hot, replicated=20)
    assert next(simulate(layout, roomy, full))[0].all_distinct == 60
    for slots, replicated in ((20 + 19, 20), (18 + 30, 18)):
        tight = PlannerSettings(slots, 0, 0, hot=hot, replicated=replicated)
        with pytest.raises(StepTooLargeError, match=r"step 0: home rank \d has \d+ distinct rows"):
            next(simulate(layout, tight, full))
