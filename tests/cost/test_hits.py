"""Hit rates from popularity, against the planner's own decisions on drawn rows."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import demand, draw, layout

from distcache.cost.traffic import expected_hits
from distcache.planner.victims import DEFAULT
from distcache.replay import Case, replay
from distcache.trace import record_ids

WORLD, STEPS = 2, 120


@pytest.fixture(scope="module")
def trace():
    """Drawn rows, all ranks' one after the other."""
    steps = [np.concatenate(step) for step in draw(WORLD, STEPS, 11)]
    return record_ids(steps, layout(WORLD).rows, (WORLD,))


@pytest.mark.parametrize("slots", [700, 1000, 2000, 5340])
def test_fetched_rows_are_about_those_of_the_planner(trace, slots: int) -> None:
    case = Case(DEFAULT, (slots // WORLD * WORLD,), 8, 1, WORLD)
    counted = replay(trace, [case])[0]
    assert counted.refused is None
    found = expected_hits(demand(WORLD).groups[0], slots, 8, 1, STEPS)
    assert found.touched == pytest.approx(counted.distinct / STEPS, rel=0.01)
    assert found.fetched == pytest.approx(counted.fetched / STEPS, rel=0.03)
    assert found.written_back == pytest.approx(
        counted.written_back / STEPS, abs=0.03 * found.fetched
    )
    assert 0 < found.rate < 1


def test_what_holds_everything_misses_only_what_is_new() -> None:
    groups = demand(WORLD).groups
    everything = float(sum(group.rows for group in groups))
    cold = expected_hits(groups[0], everything, 8, 1, 50)
    met = groups[0].tables
    seen = sum(float(t.count @ (1 - (1 - t.world) ** 50)) for t in met)
    assert cold.fetched == pytest.approx(seen / 50)
    assert cold.written_back == pytest.approx(0, abs=1e-9)
    warm = expected_hits(groups[0], everything, 8, 1)
    assert warm.fetched == pytest.approx(0, abs=1e-9) and warm.rate == pytest.approx(1)


def test_more_slots_and_longer_windows_miss_less() -> None:
    groups = demand(WORLD).groups
    by_slots = [expected_hits(groups[0], c, 8, 1).fetched for c in (300, 600, 1200, 2400, 4800)]
    assert by_slots == sorted(by_slots, reverse=True)
    assert expected_hits(groups[0], 900, 0, 1).fetched > expected_hits(groups[0], 900, 4, 1).fetched


def test_nothing_touched_is_nothing_missed() -> None:
    hot, _ = demand(WORLD).groups[0].split([0.0, 0.0, 0.0])
    found = expected_hits(hot, 0, 8, 1)
    assert (found.touched, found.fetched, found.rate) == (0.0, 0.0, 1.0)
