"""Demand of the first batches: exact averages, and what a cache meets again."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import BAGS, BATCH, STATE, cluster, demand, draw, layout, settings

from distcache.cost.demand import GroupWindow, demand_of_window
from distcache.cost.predict import choose_placement
from distcache.cost.traffic import expected_hits
from distcache.errors import ConfigError

WORLD, STEPS = 3, 9


def window(steps: int = STEPS, seed: int = 2):
    drawn = draw(WORLD, steps, seed)
    return drawn, demand_of_window([GroupWindow(layout(WORLD), drawn, STATE)], BATCH)


def test_distinct_rows_are_exact_averages() -> None:
    drawn, found = window()
    ranks = [len(np.unique(rows)) for step in drawn for rows in step]
    every = [np.unique(np.concatenate(step)) for step in drawn]
    assert found.rank_rows == pytest.approx(np.mean(ranks))
    assert found.world_rows == pytest.approx(np.mean([len(rows) for rows in every]))
    assert found.groups[0].lookups == pytest.approx(BATCH * sum(BAGS))
    assert [t.lookups for t in found.tables] == pytest.approx([BATCH * bag for bag in BAGS])
    assert found.groups[0].state_width == STATE and found.world_size == WORLD


def test_late_rows_are_not_counted_twice() -> None:
    # A row named in two of three steps, by one of two ranks each: in one other step of two.
    rows = [[np.array([5]), np.array([6])], [np.array([5]), np.array([7])], [np.array([8])] * 2]
    small = demand_of_window([GroupWindow(layout(2), rows, 0)], 1.0)
    assert small.rank_rows == pytest.approx(1.0)
    assert small.groups[0].late_rows == pytest.approx(2 / 6 * 0.5)


def test_prefixes_are_of_the_rows_named_most_often() -> None:
    drawn, found = window()
    low, high = layout(WORLD).offsets[:2]
    named = [np.unique(rows) for step in drawn for rows in step]
    first = np.concatenate([rows[(rows >= low) & (rows < high)] for rows in named])
    touches = np.sort(np.bincount(first))[::-1]
    for prefix in (1, 8, 64):
        hot, cold = found.groups[0].split([float(prefix), 0.0, 0.0])
        assert hot.rank_rows == pytest.approx(touches[:prefix].sum() / len(named))
        assert hot.rank_rows + cold.rank_rows == pytest.approx(found.rank_rows)


def test_hit_rates_see_beyond_the_window() -> None:
    _, found = window(30)
    law = expected_hits(demand(WORLD).groups[0], 2000, 8, 1)
    seen = expected_hits(found.groups[0], 2000, 8, 1)
    assert seen.touched == pytest.approx(law.touched, rel=0.05)
    assert seen.rate == pytest.approx(law.rate, abs=0.01)
    grown = found.tables[0].reuse
    assert grown is not None and grown.count.sum() == pytest.approx(5000, rel=0.01)
    assert grown.count @ grown.world == pytest.approx(found.tables[0].world_rows, rel=1e-6)


def test_a_window_is_enough_to_choose() -> None:
    _, found = window()
    for objective in ("time", "bytes"):
        measured = choose_placement(found, cluster(WORLD), settings(3000), objective)
        law = choose_placement(demand(WORLD), cluster(WORLD), settings(3000), objective)
        assert measured.placement == law.placement
    costs = [p.cost["bytes"] for p in measured.predictions]
    assert costs[0] == pytest.approx(law.predictions[0].cost["bytes"], rel=0.05)


def test_one_step_is_a_window() -> None:
    _, found = window(1)
    assert found.rank_rows > 0 and found.tables[0].reuse is None
    assert choose_placement(found, cluster(WORLD), settings(3000)).predictions


def test_windows_without_steps_or_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no step"):
        demand_of_window([GroupWindow(layout(2), [], 0)], 1.0)
    with pytest.raises(ConfigError, match=r"step 0 .* ids of 1 ranks, the layout is of 2"):
        demand_of_window([GroupWindow(layout(2), [[np.array([1])]], 0)], 1.0)
    with pytest.raises(ConfigError, match=r"no group of tables"):
        demand_of_window([], 1.0)
