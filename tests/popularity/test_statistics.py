"""Statistics: written and read again, refused where they speak of other data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from distcache.errors import ConfigError, DataError
from distcache.planner.victims import PINNED
from distcache.popularity.statistics import (
    Statistics,
    TableCounts,
    check_fits,
    read_statistics,
    row_classes,
    write_statistics,
)


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
    for one, other in zip(found.tables, statistics.tables, strict=True):
        assert (one.feature, one.rows, one.lookups, one.distinct, one.error) == (
            other.feature, other.rows, other.lookups, other.distinct, other.error
        )  # fmt: skip
        assert one.dense().tolist() == other.dense().tolist()
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


def test_missing_and_damaged_statistics(tmp_path: Path, statistics: Statistics) -> None:
    with pytest.raises(ConfigError, match=r"holds neither statistics\.json nor manifest"):
        read_statistics(tmp_path)
    write_statistics(tmp_path, statistics)
    np.save(tmp_path / "counts/0.npy", np.zeros(3))
    with pytest.raises(DataError, match="has 3 entries"):
        read_statistics(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("0", np.array([1, -1, 0, 2]), "other entries than counts"),
        ("0", np.ones(4), "other entries than counts"),
        ("1_ids", np.array([3, 10]), "ids outside a table of 10 rows"),
    ],
)
def test_counts_that_make_no_sense(
    tmp_path: Path, statistics: Statistics, name: str, values: np.ndarray, message: str
) -> None:
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
