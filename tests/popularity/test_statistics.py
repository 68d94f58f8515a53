"""Statistics: written, read again, refused where they are of other data; what a node shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from distcache.errors import ConfigError, DataError, MemoryTooSmallError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.victims import PINNED
from distcache.popularity.statistics import (
    Popularity,
    Statistics,
    TableCounts,
    check_fits,
    read_statistics,
    row_classes,
    share_popularity,
    write_statistics,
)
from distcache.store import memory as available


@dataclass
class Source:
    """What `check_fits` reads of a batch source."""

    features: tuple[str, ...] = ("a", "b")
    table_rows: tuple[int, ...] = (4, 10)
    vocabulary: str = "ids"


@pytest.fixture
def statistics() -> Statistics:
    dense = TableCounts("a", 4, 111, 3, np.array([1, 100, 0, 10], dtype=np.uint32))
    sparse = TableCounts("b", 10, 12, 2, np.array([5, 5]), np.array([3, 9]), error=1)
    return Statistics((dense, sparse), "ids", 100, 0.5)


def test_what_is_written_is_read(tmp_path: Path, statistics: Statistics) -> None:
    write_statistics(tmp_path, statistics)
    found = read_statistics(tmp_path)
    assert found.fingerprint == statistics.fingerprint
    assert (found.samples, found.share, found.vocabulary) == (100, 0.5, "ids")
    nothing = np.empty(0)
    for one, other in zip(found.tables, statistics.tables, strict=True):
        assert one.dense().tolist() == other.dense().tolist()
        plain = [replace(table, counts=nothing, ids=None) for table in (one, other)]
        assert str(plain[0]) == str(plain[1])
    assert found.tables[0].order.tolist() == [1, 3, 0]
    assert found.tables[1].hottest(1).tolist() == [3]
    check_fits(found, Source(), tmp_path)


@pytest.mark.parametrize(
    "other",
    [Source(features=("a", "c")), Source(table_rows=(4, 11)), Source(vocabulary="hash")],
    ids=["features", "rows", "vocabulary"],
)
def test_statistics_of_other_data_are_refused(statistics: Statistics, other: Source) -> None:
    with pytest.raises(ConfigError, match=f"(?s){statistics.fingerprint}.*has fingerprint"):
        check_fits(statistics, other, "here")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("0", np.zeros(3), "has 3 entries"),
        ("0", np.array([1, -1, 0, 2]), "other entries than counts"),
        ("0", np.ones(4), "other entries than counts"),
        ("1_ids", np.array([3, 10]), "ids outside a table of 10 rows"),
    ],
)
def test_missing_and_damaged_statistics(tmp_path, statistics, name, values, message) -> None:
    with pytest.raises(ConfigError, match=r"holds neither statistics\.json nor manifest"):
        read_statistics(tmp_path)
    write_statistics(tmp_path, statistics)
    np.save(tmp_path / f"counts/{name}.npy", values)
    with pytest.raises(DataError, match=f"{message}.*count again"):
        read_statistics(tmp_path)


def test_lookups_of_the_hottest(statistics: Statistics) -> None:
    found = [statistics.tables[0].lookups_of_hottest(rows) for rows in (0, 1, 2, 4, 9)]
    assert found == [0, 100, 110, 111, 111]
    assert [statistics.tables[1].lookups_of_hottest(rows) for rows in (0, 1, 3)] == [0, 5, 10]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64])
def test_histogram_of_counts(dtype: type) -> None:
    rng = np.random.default_rng(0)
    most = min(int(np.iinfo(dtype).max), 2**33)
    counts = np.minimum(rng.zipf(1.2, 20_000) - 1, most).astype(dtype)
    table = TableCounts("a", len(counts), int(counts.sum(dtype=np.int64)), 0, counts)
    values, rows = np.unique(counts[counts > 0], return_counts=True)
    found = table.histogram()
    assert found[0].tolist() == values[::-1].tolist()
    assert found[1].tolist() == rows[::-1].tolist()
    assert found[0].dtype == found[1].dtype == np.int64
    none = TableCounts("a", 3, 0, 0, np.zeros(3, dtype)).histogram()
    assert [len(part) for part in none] == [0, 0]


def test_classes_rise_with_counts(statistics: Statistics) -> None:
    classes = row_classes(statistics, [0, 1], [1, 0])
    assert classes.dtype == np.uint8 and len(classes) == 14
    assert classes[:4].tolist() == [1, PINNED, 0, 1 + round(8 * np.log2(10))]
    assert np.flatnonzero(classes[4:]).tolist() == [3, 9]


TABLES = [TableSpec("a", 5, 4, ("a_0",)), TableSpec("b", 601, 4, ("b_0",))]


def some() -> Statistics:
    counts = [np.array([3, 0, 9, 0, 9]), np.random.default_rng(0).zipf(1.4, 601).clip(max=999) - 1]
    tables = [TableCounts.of(t.name, own) for t, own in zip(TABLES, counts, strict=True)]
    return Statistics(tuple(tables), "ids", 500)


@pytest.mark.parametrize("homes", [1, 3, 4])
def test_each_home_reads_the_classes_of_its_rows(world, homes: int) -> None:
    statistics, layout = some(), RowLayout(TABLES, homes)
    popularity = Popularity(statistics, (2, 40), classes=True, pinned_rows=(1, 30))
    (shared,) = share_popularity(world, [layout], [(0, 1)], popularity)
    expected = row_classes(statistics, [0, 1], [1, 30])
    assert np.array_equal(shared.classes, expected)
    assert shared.hot is None
    every = np.arange(layout.local_rows)
    for home in range(homes):
        rows = layout.row(home, every)
        padded = np.append(expected, np.zeros(homes, np.uint8))  # the last index may be of no row
        assert np.array_equal(shared.classes_at(layout, home), padded[rows])


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
