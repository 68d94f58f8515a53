"""Distinct rows as predicted, against rows that are drawn."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from cost_cases import BAGS, BATCH, ROWS, demand, draw

from distcache.cost.demand import (
    TableSource,
    counted_sources,
    demand_at,
    zipf_curve,
    zipf_sources,
)
from distcache.errors import ConfigError
from distcache.popularity.curve import Curve
from distcache.popularity.statistics import Statistics, TableCounts

STEPS = 400


def within(values: list[float], expected: float, deviations: float = 4.5) -> bool:
    """Whether the mean of draws is what was expected, by its own standard error."""
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return abs(np.mean(values) - expected) < deviations * error


def test_distinct_rows_are_those_of_drawn_ids() -> None:
    world = 3
    found, drawn = demand(world), draw(world, STEPS)
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


def test_chances_are_exact_where_they_are_tiny_or_certain() -> None:
    chances = Curve(np.array([1.0, 0.5, 1e-12]), np.ones(3), math.inf, 3)
    assert chances.touched(3).tolist() == [1.0, 0.875, pytest.approx(3e-12, rel=1e-9)]
    assert chances.touched(0).tolist() == [0.0, 0.0, 0.0]


def test_large_tables_take_few_buckets() -> None:
    law = zipf_curve(1_000_000_000, 1.05)
    assert len(law.rows) < 6000
    assert law.rows.sum() == 1_000_000_000
    assert law.counts @ law.rows == pytest.approx(1.0, rel=1e-9)
    assert (np.diff(law.counts) <= 1e-12).all()


def test_more_ranks_touch_more_rows_each_as_many() -> None:
    found = [demand(world) for world in (1, 2, 4, 64, 1024)]
    assert len({d.rank_rows for d in found}) == 1
    rows = [d.world_rows for d in found]
    assert rows == sorted(rows) and rows[0] == found[0].rank_rows
    assert rows[-1] <= sum(ROWS)
    assert found[0].groups[0].lookups == BATCH * sum(BAGS)


def test_a_prefix_and_the_rest_are_the_whole() -> None:
    group = demand(4).groups[0]
    hot, cold = group.split([100.0, 0.0, 40.0])
    for name in ("rows", "rank_rows", "world_rows", "late_rows", "lookups"):
        assert getattr(hot, name) + getattr(cold, name) == pytest.approx(getattr(group, name))
    assert hot.tables[1].rank_rows == 0 and cold.tables[2].rank_rows == 0
    share = hot.tables[0].rank_rows / group.tables[0].rank_rows
    assert 0.3 < share < 1  # the first 100 of 5,000 rows are the popular ones
    with pytest.raises(ConfigError, match=r"t_cat_1=301, but the table has 300 rows"):
        group.split([0.0, 301.0, 0.0])
    with pytest.raises(ConfigError, match=r"t_other=1 names no table: choose from t_cat_0"):
        demand(4).prefixes({"t_other": 1})


def test_counts_say_what_the_law_says() -> None:
    samples = 20_000
    drawn = np.concatenate([np.concatenate(step) for step in draw(1, samples // BATCH, 5)])
    tables, low = [], 0
    for index, rows in enumerate(ROWS):
        counts = np.bincount(drawn[(drawn >= low) & (drawn < low + rows)] - low, minlength=rows)
        tables.append(TableCounts.of(f"cat_{index}", counts))
        low += rows
    statistics = Statistics(tuple(tables), "ids", samples // BATCH * BATCH)
    counted = demand_at(counted_sources(statistics, [8] * 3), [0] * 3, BATCH, 4)
    law = demand(4)
    assert counted.rank_rows == pytest.approx(law.rank_rows, rel=0.01)
    assert counted.world_rows == pytest.approx(law.world_rows, rel=0.01)
    assert [t.name for t in counted.tables] == [t.name for t in law.tables]
    # More lookups than were counted: all rows that were seen, and no more.
    many = demand_at(counted_sources(statistics, [8] * 3), [0] * 3, samples, 4)
    assert many.world_rows == pytest.approx(sum(table.distinct for table in tables))


def test_tables_of_one_width_are_a_group() -> None:
    tables = zipf_sources([100, 200, 300], [8, 4, 8], [1, 1, 1], [1.0] * 3)
    found = demand_at(tables, [16, 4, 16], 10, 2)
    assert [(g.dim, g.state_width, g.rows) for g in found.groups] == [(8, 16, 400), (4, 4, 200)]


def test_what_makes_no_sense_is_refused() -> None:
    source = TableSource("t", 10, 4, 1.0, zipf_curve(10, 1.0))
    with pytest.raises(ConfigError, match=r"batch=0"):
        demand_at([source], [0], 0, 1)
    with pytest.raises(ConfigError, match=r"world_size=0"):
        demand_at([source], [0], 1, 0)
    with pytest.raises(ConfigError, match=r"a table of 0 rows"):
        zipf_curve(0, 1.0)
