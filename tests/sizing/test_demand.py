"""Distinct rows and hit rates as predicted, against rows that are drawn and planned."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from simulator import record_ids
from sizing_cases import cluster, counted, demand, draw, layout, settings, specs

from distcache.planner.victims import DEFAULT
from distcache.replay import Case, replay
from distcache.sizing import traffic as module
from distcache.sizing.cost import choose_placement
from distcache.sizing.demand import GroupDemand, demand_at, zipf_curve, zipf_sources
from distcache.sizing.traffic import expected_hits, miniature

WORLD, STEPS = 2, 120


def within(values: list[float], expected: float, deviations: float = 4.5) -> bool:
    """Whether the mean of draws is what was expected, by its own standard error."""
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return abs(np.mean(values) - expected) < deviations * error


def test_distinct_rows_are_those_of_drawn_ids() -> None:
    world = 3
    found, drawn = demand(world), draw(world, 400)
    ranks = [float(len(np.unique(rows))) for step in drawn for rows in step]
    every = [float(len(np.unique(np.concatenate(step)))) for step in drawn]
    assert within(ranks, found.rank_rows)
    assert within(every, found.world_rows)
    late = [
        float(len(np.intersect1d(rows, np.concatenate(before))))
        for before, step in itertools.pairwise(drawn)
        for rows in step
    ]
    assert within(late, found.groups[0].late_rows, 6.0)  # neighbours share a step
    # Bounds, not estimates: real rows bind each other negatively. And of the right size.
    rank, whole, _ = found.groups[0].buffers(world)
    assert max(ranks) < rank and max(every) < whole
    assert rank < found.rank_rows + 12 * np.std(ranks)


def test_large_tables_take_few_buckets() -> None:
    law = zipf_curve(1_000_000_000, 1.05)
    assert len(law.rows) < 6000
    assert law.rows.sum() == 1_000_000_000
    assert law.counts @ law.rows == pytest.approx(1.0, rel=1e-9)
    assert (np.diff(law.counts) <= 1e-12).all()


def test_a_prefix_and_the_rest_are_the_whole() -> None:
    group = demand(4).groups[0]
    assert group.rank_rows < group.world_rows
    hot, cold = group.split([100.0, 0.0, 40.0])
    names = (
        "rows",
        "rank_rows",
        "world_rows",
        "late_rows",
        "lookups",
    )
    for name in names:
        assert getattr(hot, name) + getattr(cold, name) == pytest.approx(getattr(group, name))
    assert hot.tables[1].rank_rows == 0 and cold.tables[2].rank_rows == 0
    share = hot.tables[0].rank_rows / group.tables[0].rank_rows
    assert 0.3 < share < 1  # the first 100 of 5,000 rows are the popular ones


def test_counts_say_what_the_law_says() -> None:
    drawn = draw(1, 312, 5)
    found, law = counted(drawn, 4), demand(4)
    assert found.rank_rows == pytest.approx(law.rank_rows, rel=0.01)
    assert found.world_rows == pytest.approx(law.world_rows, rel=0.01)
    assert [t.name for t in found.tables] == [t.name for t in law.tables]
    # More lookups than were counted: all rows that were seen, and no more.
    every = len(np.unique(np.concatenate([step[0] for step in drawn])))
    assert counted(drawn, 4, 20_000).world_rows == pytest.approx(every)


def union(group: GroupDemand, steps: int) -> float:
    """Distinct rows that so many steps are expected to name."""
    return sum(float(t.met[0] @ (1 - (1 - t.met[1]) ** steps)) for t in group.tables)


def test_as_many_rows_are_met_as_were_counted() -> None:
    """And about as many as the law says, in fewer steps and in more."""
    steps, law = draw(2, 40, 5), demand(2).groups[0]
    found = counted(steps, 2).groups[0]
    every = len(np.unique(np.concatenate([rows for step in steps for rows in step])))
    assert union(found, 40) == pytest.approx(every, rel=0.005)
    for others, bound in ((5, 0.03), (20, 0.03), (160, 0.06)):
        assert union(found, others) == pytest.approx(union(law, others), rel=bound)
    for table in found.tables:
        rows, chance = table.met
        assert rows.sum() == pytest.approx(table.rows)
        assert rows @ chance == pytest.approx(table.world_rows)
    hot, cold = found.split([100.0, 50.0, 10.0])
    assert union(hot, 40) + union(cold, 40) == pytest.approx(union(found, 40))
    assert hot.tables[0].met[0].sum() == pytest.approx(100.0)


def test_a_few_steps_are_enough_to_choose() -> None:
    """As the first batches are, where no statistics are given."""
    found, law = counted(draw(3, 9, 2), 3), demand(3)
    for objective in ("time", "bytes"):
        one, other = (
            choose_placement(d, cluster(3), settings(3000), objective)[0] for d in (found, law)
        )
        assert one.placement == other.placement
    costs = [choice.cost["bytes"] for choice in (one, other)]
    assert costs[0] == pytest.approx(costs[1], rel=0.05)
    hits = [expected_hits(d.groups[0], 2000, 8, 1) for d in (counted(draw(3, 30, 2), 3), law)]
    assert hits[0].touched == pytest.approx(hits[1].touched, rel=0.05)
    assert hits[0].rate == pytest.approx(hits[1].rate, abs=0.01)
    one = counted(draw(3, 1, 2), 3)  # which says nothing of the next step
    assert one.rank_rows > 0 and all(table.reuse is None for table in one.tables)
    assert choose_placement(one, cluster(3), settings(3000))[0].refused is None


def test_tables_of_one_width_are_a_group() -> None:
    tables = zipf_sources(specs([100, 200, 300], [8, 4, 8]), [1, 1, 1], [1.0] * 3)
    found = demand_at(tables, [16, 4, 16], 10, 2)
    assert [(g.dim, g.state_width, g.rows) for g in found.groups] == [(8, 16, 400), (4, 4, 200)]


@pytest.fixture(scope="module")
def trace():
    """Drawn rows, all ranks' one after the other."""
    steps = [np.concatenate(step) for step in draw(WORLD, STEPS, 11)]
    return record_ids(steps, layout(WORLD).rows, (WORLD,))


@pytest.mark.parametrize("slots", [700, 1000, 2000, 5340])
def test_fetched_rows_are_about_those_of_the_planner(trace, slots: int) -> None:
    case = Case(DEFAULT, (slots // WORLD * WORLD,), 8, 1, WORLD)
    planned = replay(trace, [case])[0]
    assert planned.refused is None
    found = expected_hits(demand(WORLD).groups[0], slots, 8, 1, STEPS)
    assert found.touched == pytest.approx(planned.distinct / STEPS, rel=0.01)
    assert found.fetched == pytest.approx(planned.fetched / STEPS, rel=0.03)
    written = planned.written_back / STEPS
    assert found.written_back == pytest.approx(written, abs=0.03 * found.fetched)
    assert 0 < found.rate < 1


def test_what_holds_everything_misses_only_what_is_new() -> None:
    group = demand(WORLD).groups[0]
    cold = expected_hits(group, float(group.rows), 8, 1, 50)
    assert cold.fetched == pytest.approx(union(group, 50) / 50)
    assert cold.written_back == pytest.approx(0, abs=1e-9)
    warm = expected_hits(group, float(group.rows), 8, 1)
    assert warm.fetched == pytest.approx(0, abs=1e-9) and warm.rate == pytest.approx(1)
    nothing, _ = group.split([0.0, 0.0, 0.0])
    found = expected_hits(nothing, 0, 8, 1)
    assert (found.touched, found.fetched, found.rate) == (0.0, 0.0, 1.0)


def test_more_slots_and_longer_windows_miss_less() -> None:
    group = demand(WORLD).groups[0]
    by_slots = [expected_hits(group, c, 8, 1).fetched for c in (300, 600, 1200, 2400, 4800)]
    assert by_slots == sorted(by_slots, reverse=True)
    assert expected_hits(group, 900, 0, 1).fetched > expected_hits(group, 900, 4, 1).fetched


MANY = np.array([1.0, 3.0, 50.0, 400.0, 3000.0, 20000.0])
CHANCE = np.array([1.0, 0.9, 0.3, 0.05, 0.02, 0.001])
AHEAD = (4, 1)


def test_a_share_of_the_rows_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = miniature(MANY, CHANCE, 1500, AHEAD, 200)
    monkeypatch.setattr(module, "USES", module.USES // 50)
    part = miniature(MANY, CHANCE, 1500, AHEAD, 200)
    assert whole is not None and part is not None
    steps, again = part
    assert 0 < steps <= whole[0] == 200
    assert miniature(MANY, CHANCE, 1500, AHEAD, steps) == part
    monkeypatch.undo()
    whole = miniature(MANY, CHANCE, 1500, AHEAD, steps)
    assert whole is not None and again != whole[1]
    assert again == pytest.approx(whole[1], rel=0.1)
    roomy = miniature(MANY, CHANCE, 30_000, AHEAD, 100)
    assert roomy is not None and roomy[1] == 0  # nothing leaves
    assert miniature(MANY, CHANCE, 60, AHEAD, 100) is None  # a step does not fit
