"""The popularity order and classes of a group, and what the ranks of a node share of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distcache.comm.world import close_world, open_world
from distcache.errors import MemoryTooSmallError
from distcache.layout import RowLayout, TableSpec
from distcache.popularity.curve import Curve, StepCurves
from distcache.popularity.statistics import (
    Popularity,
    Statistics,
    TableCounts,
    row_classes,
    share_popularity,
)
from distcache.store import memory as available

TABLES = [TableSpec("a", 5, 4, ("a_0",)), TableSpec("b", 601, 4, ("b_0",))]


def counted(feature: str, counts: np.ndarray, sparse: bool = False) -> TableCounts:
    found = TableCounts.of(feature, np.asarray(counts, np.int64))
    ids = np.flatnonzero(found.counts)
    return replace(found, counts=found.counts[ids], ids=ids) if sparse else found


def some(sparse: bool = False) -> Statistics:
    counts = np.random.default_rng(0).zipf(1.4, 601).clip(max=999) - 1
    tables = (counted("a", [3, 0, 9, 0, 9], sparse), counted("b", counts, sparse))
    return Statistics(tables, "ids", 500)


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


@pytest.mark.parametrize("homes", [1, 3, 4])
def test_each_home_reads_the_classes_of_its_rows(world, homes: int) -> None:
    statistics, layout = some(), RowLayout(TABLES, homes)
    popularity = Popularity(statistics, (2, 40), classes=True, pinned_rows=(1, 30))
    (shared,) = share_popularity(world, [layout], [(0, 1)], popularity)
    expected = row_classes(statistics, [0, 1], [1, 30])
    assert np.array_equal(shared.classes, expected)
    assert shared.hot is None
    seen = 0
    for home in range(homes):
        found = shared.classes_at(layout, home)
        for local, klass in enumerate(found.tolist()):
            row = int(layout.row(home, np.array([local]))[0])
            if row >= layout.rows:
                assert klass == 0
                continue
            assert klass == expected[row]
            seen += 1
    assert seen == layout.rows


def test_hot_rows_are_the_likeliest_of_the_group(world) -> None:
    statistics, layout = some(), RowLayout(TABLES, 1)
    popularity = Popularity(statistics, (3, 300), warm_start=0.5)
    (shared,) = share_popularity(world, [layout], [(0, 1)], popularity)
    counts = np.concatenate([table.dense() for table in statistics.tables])
    known = shared.hot[shared.hot >= 0]
    assert set(known[known < 5].tolist()) == {0, 2, 4}
    assert len(known) == 3 + min(300, statistics.tables[1].distinct)
    assert (np.diff(counts[known]) <= 0).all(), "per step and sample a count is a likelihood"
    assert (shared.hot[len(known) :] == -1).all()
    nothing = share_popularity(world, [layout], [(0, 1)], replace(popularity, warm_start=0.0))
    assert nothing[0].hot is None and nothing[0].classes is None


def test_a_node_without_memory_for_the_classes_says_so(world, monkeypatch) -> None:
    monkeypatch.setattr(available, "available_memory", lambda: 605)
    with pytest.raises(MemoryTooSmallError, match=r"popularity of the rows.*cache\.warm_start=0"):
        share_popularity(
            world, [RowLayout(TABLES, 1)], [(0, 1)], Popularity(some(), (0, 0), classes=True)
        )


@pytest.mark.parametrize("homes", [1, 4])
def test_pinned_rows_leave_room_for_those_of_the_next_steps(homes: int) -> None:
    rng = np.random.default_rng(2)
    tables = [counted("x", rng.zipf(1.3, 4000).clip(max=10**4)) for _ in range(2)]
    step = StepCurves(tuple(map(Curve.of, tables)), (200, 200))
    for slots in (900, 2000, 8000):
        pinned = step.pinned(slots, 2, homes)
        others = 2 * step.misses(pinned)
        assert sum(pinned) + others <= slots
        assert slots == 8000 or sum(pinned) + others > 0.5 * slots
        assert pinned == step.likeliest(sum(pinned))
    assert step.pinned(10, 2, homes) == [0, 0], "a cache that holds no step pins nothing"
