"""Slots that no row of the trace needs are not made, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.planner.victims import Policy
from distcache.replay import Case, replay
from distcache.trace import record_ids
from distcache.trainer.prediction import RecordedRun


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("policy", [Policy(), Policy("lfu"), Policy("static"), Policy("lru")])
def test_more_slots_than_rows(world: int, policy: Policy) -> None:
    rng = np.random.default_rng(0)
    steps = [(4000 * rng.random(50) ** 2).astype(np.int64) for _ in range(40)]
    trace = record_ids(steps, 4000, (world,))
    most = max(len(home.names) for home in trace.of_world(world))
    prediction = RecordedRun([trace], 40)
    for slots in (3999, world * most, world * most - world, 300):
        case = Case(policy, (slots,), 4, 1, world)
        found = prediction.estimate(case)
        (plain,) = replay(trace, [case], prediction.classes)
        assert found.case == case and found.hit_rate == plain.hit_rate
        assert found.fetched == plain.fetched and found.written_back == plain.written_back
