"""Counters of tables: exact or sketched by memory, in parts, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.errors import ConfigError, DataError
from distcache.popularity import counters as module
from distcache.popularity.counters import DenseCounter, HyperLogLog, SketchCounter, make_counters


def skewed(rows: int, count: int, seed: int = 0) -> np.ndarray:
    return (rows * np.random.default_rng(seed).random(count) ** 5).astype(np.int64)


def test_exact_counts_over_parts() -> None:
    counter, ids = DenseCounter("a", 1000), skewed(1000, 5000)
    for part in np.array_split(ids, 3):
        counter.add(part[:100])
        counter.add(part[100:])
        counter.close_part()
        counter.close_part()  # a part without a lookup is none
    found = counter.result()
    assert (found.lookups, found.distinct) == (5000, len(np.unique(ids)))
    assert found.counts.tolist() == np.bincount(ids, minlength=1000).tolist()
    assert found.ids is None and found.error == 0
    assert counter.bytes == 8000 and len(counter.drift.own) == 3


def test_counts_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 250)
    counter = DenseCounter("a", 4)
    for _ in range(3):
        counter.add(np.full(200, 2))
    counter.close_part()
    found = counter.result()
    assert found.counts.dtype == np.int64 and found.counts.tolist() == [0, 0, 600, 0]


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_its_table_is_named(bad: int) -> None:
    with pytest.raises(DataError, match=rf"'a': id {bad} is not in its table, which has 10 rows"):
        DenseCounter("a", 10).add(np.array([1, bad]))


def test_sketched_counts_over_parts() -> None:
    rows = 1 << 20
    counter, ids = SketchCounter("a", rows, 400_000), skewed(rows, 200_000)
    for part in np.array_split(ids, 4):
        counter.add(part)
        counter.close_part()
    found = counter.result()
    true = np.bincount(ids, minlength=rows)
    assert found.lookups == 200_000 and found.distinct == np.count_nonzero(true)
    assert (found.counts <= true[found.ids]).all()
    assert (true - found.dense() <= found.error).all() and found.error > 0
    assert counter.bytes <= 400_000
    small = SketchCounter("a", 1 << 30, 100_000)
    assert isinstance(small.seen, HyperLogLog) and small.bytes <= 100_000


def test_memory_is_shared_by_need() -> None:
    rows = [10, 1_000_000, 5_000, 2_000_000]
    names = ["a", "b", "c", "d"]
    exact = make_counters(names, rows, 8 * sum(rows))
    assert all(isinstance(counter, DenseCounter) for counter in exact)
    assert [counter.rows for counter in exact] == rows
    assert [counter.feature for counter in exact] == names
    for memory in (8 * sum(rows) - 1, 10_000_000, 1_000_000):
        made = make_counters(names, rows, memory)
        assert sum(counter.bytes for counter in made) <= memory
        assert isinstance(made[0], DenseCounter) and isinstance(made[3], SketchCounter)
    with pytest.raises(ConfigError, match=r"analyze\.memory=50000 .* give at least 171152 bytes"):
        make_counters(names, rows, 50_000)
