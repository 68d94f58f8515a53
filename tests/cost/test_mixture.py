"""What counts of a few steps say of the rows behind them, beside the law that they are drawn by."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cost_cases import BATCH, STATE, demand, draw, layout

from distcache.cost.demand import (
    GroupDemand,
    GroupWindow,
    counted_sources,
    demand_at,
    demand_of_window,
)
from distcache.popularity.statistics import Statistics, TableCounts

WORLD, STEPS = 2, 40


def drawn_rows() -> list[list[np.ndarray]]:
    return draw(WORLD, STEPS, 5)


def by_lookups(steps: list[list[np.ndarray]]) -> GroupDemand:
    """From counts of lookups."""
    offsets = layout(WORLD).offsets
    counts = np.bincount(np.concatenate([r for step in steps for r in step]), minlength=offsets[-1])
    tables = []
    for table, (low, high) in enumerate(pairwise(offsets)):
        tables.append(TableCounts.of(f"cat_{table}", counts[low:high]))
    known = Statistics(tuple(tables), "ids", BATCH * WORLD * len(steps))
    sources = counted_sources(known, [8] * len(tables))
    return demand_at(sources, [STATE] * len(tables), BATCH, WORLD).groups[0]


def by_steps(steps: list[list[np.ndarray]]) -> GroupDemand:
    """From the steps that name each row."""
    return demand_of_window([GroupWindow(layout(WORLD), steps, STATE)], BATCH).groups[0]


def union(group: GroupDemand, steps: int) -> float:
    """Distinct rows that so many steps are expected to name."""
    return sum(float(t.met[0] @ (1 - (1 - t.met[1]) ** steps)) for t in group.tables)


@pytest.mark.parametrize("source", [by_lookups, by_steps])
def test_as_many_rows_are_met_as_were_counted(source) -> None:
    steps = drawn_rows()
    found = source(steps)
    every = len(np.unique(np.concatenate([rows for step in steps for rows in step])))
    assert union(found, STEPS) == pytest.approx(every, rel=0.005)
    for fewer in (5, 20):
        assert union(found, fewer) == pytest.approx(union(demand(WORLD).groups[0], fewer), rel=0.03)
    for table in found.tables:
        rows, chance = table.met
        assert rows.sum() == pytest.approx(table.rows)
        assert rows @ chance == pytest.approx(table.world_rows)


@pytest.mark.parametrize("source", [by_lookups, by_steps])
def test_beyond_what_was_counted_it_follows_the_law(source) -> None:
    law, found = demand(WORLD).groups[0], source(drawn_rows())
    assert union(found, 4 * STEPS) == pytest.approx(union(law, 4 * STEPS), rel=0.06)


def test_prefixes_share_out_all_rows() -> None:
    found = by_lookups(drawn_rows())
    hot, cold = found.split([100.0, 50.0, 10.0])
    assert union(hot, STEPS) + union(cold, STEPS) == pytest.approx(union(found, STEPS))
    assert hot.tables[0].met[0].sum() == pytest.approx(100.0)


def test_one_step_of_counts_says_nothing_of_the_next() -> None:
    assert all(table.reuse is None for table in by_lookups(drawn_rows()[:1]).tables)
