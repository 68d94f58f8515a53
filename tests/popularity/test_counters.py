"""Counters of tables: exact or sketched by memory, in parts; what sketches promise, and cost."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from distcache.errors import ConfigError, DataError
from distcache.popularity import counters as module
from distcache.popularity.counters import (
    Bitmap,
    DenseCounter,
    FrequentItems,
    SketchCounter,
    make_counters,
)


def skewed(rows: int, count: int, seed: int = 0) -> np.ndarray:
    return (rows * np.random.default_rng(seed).random(count) ** 5).astype(np.int64)


def seeded(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(count)]


def test_exact_counts_over_parts() -> None:
    counter, ids = DenseCounter("a", 1000), skewed(1000, 5000)
    for bad in (-1, 1000):
        with pytest.raises(DataError, match=rf"'a': id {bad} is not in its table, .* 1000 rows"):
            counter.add(np.array([1, bad]))
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
    assert counter.bytes <= 400_000 and counter.distinct_error == 0  # each row has a bit
    small = SketchCounter("a", 1 << 30, 100_000)
    small.add(ids)
    small.close_part()
    assert small.bytes <= 100_000 and 0 < small.distinct_error < 0.01
    assert small.result().distinct == pytest.approx(found.distinct, rel=4 * small.distinct_error)


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


@pytest.mark.parametrize("power", [1, 3, 8])
def test_frequent_items_keep_their_error(power: int) -> None:
    """Every count lies between its counter and counter + error, however items came and merged."""
    parts = [(20_000 * rng.random(20_000) ** power).astype(np.int64) for rng in seeded(3)]
    most, whole = 700, FrequentItems(700)
    for part in parts:
        one = FrequentItems(most)
        for some in np.array_split(part, 4):
            one.add(*np.unique(some, return_counts=True))
        whole.add(one.ids, one.counts, one.error)
    true = np.bincount(np.concatenate(parts), minlength=20_000)
    held = np.zeros_like(true)
    held[whole.ids] = whole.counts
    assert (np.diff(whole.ids) > 0).all() and (whole.counts > 0).all() and len(whole.ids) <= most
    assert (held <= true).all() and (true <= held + whole.error).all()
    assert 0 < whole.error <= true.sum() / (most + 1)
    few = FrequentItems(50)
    for _ in range(3):
        few.add(*np.unique(np.arange(100) % 50, return_counts=True))
    assert few.error == 0 and few.counts.tolist() == [6] * 50


@pytest.mark.parametrize("count", [0, 1, 30, 3_000, 40_000, 300_000])
def test_distinct_ids_are_estimated_within_the_error(count: int) -> None:
    for rng in seeded(3):
        ids = np.unique(rng.integers(0, 1 << 60, count))
        seen = Bitmap(1 << 60, 20_000)
        seen.add(np.concatenate((ids, ids)))
        assert not seen.exact
        assert abs(seen.estimate() - len(ids)) <= 4 * seen.relative_error * len(ids)
    assert (seen.relative_error > 0) == (count > 0)
    full = Bitmap(1 << 60, 1)
    full.add(np.random.default_rng(0).integers(0, 1 << 60, 1000))
    assert full.estimate() == round(8 * np.log(8))


def test_a_sketch_takes_the_memory_that_it_says() -> None:
    memory, rows = 4_000_000, 1 << 22
    ids = [skewed(rows, 10_000, seed) for seed in range(20)]
    tracemalloc.start()
    counter = SketchCounter("a", rows, memory)
    for part in ids:
        counter.add(part)
    counter.close_part()
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.6 * memory < taken < 1.05 * memory and counter.bytes <= memory
