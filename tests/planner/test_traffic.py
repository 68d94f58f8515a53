"""Counts of what ranks send are those of whole plans, and loads lie evenly over the homes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import make_layout, streams
from simulator import simulate

from distcache.errors import ConfigError, StepTooLargeError
from distcache.replay import (
    Load,
    PlannerSettings,
    RegionCounts,
    RowFormat,
    StepTraffic,
    count_traffic,
)
from distcache.step_plan import StepPlan, check_plan_fully


def of_plans(plans: Sequence[StepPlan]) -> tuple[RegionCounts, RegionCounts | None]:
    """What the plans of all ranks say, the replicated and the sharded rows."""
    for place, plan in enumerate(plans):
        assert plan.source_counts == tuple(other.touched_counts[place] for other in plans)
    near = RegionCounts(
        np.array([plan.touched_counts for plan in plans]),
        np.array(plans[0].home_counts),
        np.array([len(plan.fetch_rows) for plan in plans]),
        np.array([len(plan.evict_rows) for plan in plans]),
        np.zeros((len(plans), len(plans)), np.int64),
    )
    shards = [plan.shard for plan in plans]
    if shards[0] is None:
        return near, None
    for place, shard in enumerate(shards):
        assert shard.source_counts == tuple(other.counts[place] for other in shards)
        late = tuple(other.late.send_counts[place] for other in shards)
        assert shard.late.receive_counts == late
        if shard.early is not None:
            both = np.add(shard.early.send_counts, shard.late.send_counts)
            assert tuple(both) == shard.source_counts
    far = RegionCounts(
        np.array([shard.counts for shard in shards]),
        np.array([len(shard.slots) for shard in shards]),
        np.array([len(shard.fetch_rows) for shard in shards]),
        np.array([len(shard.evict_rows) for shard in shards]),
        np.array([shard.late.send_counts for shard in shards]),
    )
    return near, far


def equal(found: RegionCounts | None, expected: RegionCounts | None, nothing: bool) -> None:
    if found is None:
        assert nothing or expected is None or not expected.rows.any()
        return
    for name, values in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


@given(streams(), st.sampled_from(["replicated", "sharded", "mixed"]), st.booleans(), st.data())
@examples(120)
def test_counts_are_those_of_whole_plans(
    case: tuple, placement: str, early: bool, data: st.DataObject
) -> None:
    stream, layout, config = case
    if placement != "replicated":
        hot = np.empty(0, np.int64)
        if placement == "mixed":
            share = data.draw(st.sampled_from([0.05, 0.4, 1.0]))
            hot = np.flatnonzero(np.random.default_rng(len(stream)).random(layout.rows) < share)
        per_home = -(-config.slots // layout.world_size)
        replicated = per_home * layout.world_size if len(hot) else 0
        slots = {"slots": replicated + per_home, "replicated": replicated}
        config = replace(config, hot=hot, early=early, **slots)
    plans = list(simulate(layout, config, stream))
    counts = list(count_traffic(layout, config, stream))
    assert len(plans) == len(counts)
    for of_ranks, step in zip(plans, counts, strict=True):
        for plan in of_ranks:
            check_plan_fully(plan, None)
        assert (step.step, step.move_after) == (of_ranks[0].step, of_ranks[0].move_after)
        assert step.ids == sum(len(plan.positions) for plan in of_ranks)
        near, far = of_plans(of_ranks)
        if layout.world_size == 1:  # a lone rank's request has all ids, and nothing leaves
            assert not StepTraffic((step,), (RowFormat(4),)).sent.any()
            continue
        equal(step.replicated, near, placement == "sharded")
        equal(step.sharded, far, placement == "replicated")


WORLDS = (2, 3, 4, 8, 16, 32, 64)
STREAMS = ("strided", "sorted", "skewed")
IDS, ROWS = 6000, 4_000_000


def ids_of(kind: str, world: int, seed: int) -> list[np.ndarray]:
    """A step of `IDS` ids of each rank."""
    rng = np.random.default_rng([seed, world])
    if kind == "strided":  # as plain row % W would send to one rank
        first = np.arange(world * IDS // 2) * world
        return [rng.choice(first, IDS) for _ in range(world)]
    if kind == "sorted":
        ids = np.sort(rng.integers(0, ROWS, world * IDS))
        return np.split(ids, world)
    return [(ROWS * rng.random(IDS) ** 4).astype(np.int64) for _ in range(world)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", STREAMS)
def test_loads_lie_evenly_over_the_homes(kind: str, world: int) -> None:
    layout = make_layout(max(ROWS, world * world * IDS), world)
    stream = [ids_of(kind, world, step) for step in range(3)]
    named = np.concatenate([np.unique(part) for part in stream[0]])
    traffic = np.unique(named, return_counts=True)[1]
    assert traffic.max() / traffic.sum() <= 1 / (5 * world), "one row has too much of the traffic"
    per_home = 4 * IDS
    for hot in (None, np.empty(0, np.int64), np.arange(IDS)):
        replicated = per_home * world if hot is not None and len(hot) else 0
        slots = per_home * world if hot is None else replicated + per_home
        config = PlannerSettings(slots, 1, 1, hot=hot, replicated=replicated)
        steps = list(count_traffic(layout, config, stream))
        found = [StepTraffic((step,), (RowFormat(4),)) for step in steps]
        loads = {
            "rows of a home": sum(step.home_rows for step in found),
            "sent": sum(step.sent for step in found),
            "received": sum(step.received for step in found),
            "planning": sum(step.planning for step in found),
            "read": sum(step.host_read for step in found),
        }
        for what, by_rank in loads.items():
            assert Load.of(by_rank).ratio <= 1.2, (what, hot is None)


@pytest.mark.parametrize("world", WORLDS)
def test_no_stride_has_few_homes(world: int) -> None:
    layout, count = make_layout(2**34, world), 1000 * world
    strides = [*range(1, 200), 301, 447, 545, 903, 1806, 1871, 1889, 2709, 4096, 10**5, 2**17]
    for stride in strides:
        homes = np.bincount(layout.home(np.arange(count) * stride), minlength=world)
        assert Load.of(homes).ratio <= 1.2, stride


def test_a_row_that_has_all_the_traffic_is_seen() -> None:
    layout, hot = make_layout(1000, 4), np.empty(0, np.int64)
    stream = [[np.array([5]) for _ in range(4)]]
    (step,) = count_traffic(layout, PlannerSettings(4, 0, 0, hot=hot), stream)
    load = Load.of(StepTraffic((step,), (RowFormat(4),)).home_rows)
    assert (load.mean, load.largest, load.ratio) == (0.25, 1.0, 4.0)
    assert Load.of(np.zeros(4)).ratio == 1.0


def test_bad_streams_are_refused() -> None:
    layout = make_layout(100, 2)
    with pytest.raises(ConfigError, match="step 0 has ids of 1 ranks, the layout is of 2"):
        list(count_traffic(layout, PlannerSettings(10, 0, 0), [[np.arange(3)]]))
    with pytest.raises(StepTooLargeError, match="home rank"):
        list(count_traffic(layout, PlannerSettings(2, 0, 0), [[np.arange(50)] * 2]))
