"""The bodies of the planner's loops make the same plans, in memory that the batch alone decides."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from plan_streams import make_layout, sharded_streams, streams
from planner_bodies import ALL, BODIES, equal, using
from simulator import PlannerSettings, simulate

from distcache.errors import PlanError
from distcache.planner.assemble import make_request
from distcache.planner.home import HomePlanner
from distcache.planner.loops import occurrences
from distcache.planner.policy import POLICIES, Policy


def plans_of(body: str, case: tuple) -> list:
    """All plans of a stream."""
    stream, layout, config = case
    with using(body), np.errstate(over="ignore"):
        return [plan for plans in simulate(layout, config, stream) for plan in plans]


def check_equal_plans(case: tuple) -> None:
    """Every body makes the same plans, field by field."""
    expected, *others = [plans_of(body, case) for body in ALL]
    for plans in others:
        assert len(plans) == len(expected)
        assert all(map(equal, plans, expected))


@examples(120)
@given(streams())
def test_plans_of_random_streams(case: tuple) -> None:
    check_equal_plans(case)


@examples(120)
@given(sharded_streams())
def test_plans_of_random_sharded_streams(case: tuple) -> None:
    check_equal_plans(case)


@pytest.mark.slow
@examples(3000)
@given(streams())
def test_plans_of_random_streams_campaign(case: tuple) -> None:
    check_equal_plans(case)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_plans_of_a_long_stream_in_a_tight_cache(world: int, name: str) -> None:
    rng = np.random.default_rng(world)
    stream = [
        [(rng.random(60) ** 3 * 4000).astype(np.int64) for _ in range(world)] for _ in range(80)
    ]
    largest = max(len(np.unique(np.concatenate(step))) for step in stream)
    classes = rng.integers(0, 250, 4000).astype(np.uint8)
    policy = Policy(name, "lfu" if name == "lookahead" else "lru")
    config = PlannerSettings(world * largest, 5, 1, policy, classes)
    check_equal_plans((stream, make_layout(4000, world), config))


def test_a_step_out_of_order_is_refused() -> None:
    for body in BODIES:
        with using(body):
            home = HomePlanner(make_layout(10, 1), 0, 5, 1)
            home.ingest(0, "train", [np.array([1, 2])])
            home.plan()
            with pytest.raises(PlanError, match="steps come in order"):
                home.ingest(0, "train", [np.array([2, 3])])


def peak_bytes(rows: int, count: int, world: int) -> int:
    """The most that planning one batch of `count` ids adds to a warm planner, bytes."""
    layout = make_layout(rows, world)
    home = HomePlanner(layout, 0, count, 1)
    assert home.index_bytes == 9 * layout.local_rows
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for step in range(4):
            ids = rng.integers(0, rows, count)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            request = make_request(layout, ids)
            asked = request.rows[0]
            home.ingest(step, "train", [asked] + [asked[:0]] * (world - 1))
            decision = home.plan()
            occurrences(decision.replies[0], None, len(decision.slots))
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world", [1, 2])
def test_memory_beside_the_index_grows_with_the_batch_alone(world: int, body: str) -> None:
    with using(body):
        few, many = (peak_bytes(rows, 2000, world) for rows in (50_000, 3_000_000))
        larger = peak_bytes(3_000_000, 8000, world)
    assert many < 1.1 * few + 4096
    assert larger < 6 * many
