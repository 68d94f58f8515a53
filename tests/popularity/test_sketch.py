"""Sketches keep what they promise: errors of counters, and of distinct ids."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from planner_bodies import BODIES, using

from distcache.popularity.counters import Bitmap, FrequentItems, HyperLogLog


def check(sketch: FrequentItems, ids: np.ndarray, places: int) -> None:
    """Every count lies between its counter and counter + error, and the error is bounded."""
    true = Counter(ids.tolist())
    keys, counts = sketch.items()
    assert (np.diff(keys) > 0).all() and (counts > 0).all()
    held = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    for key, count in true.items():
        low = held.get(key, 0)
        assert low <= count <= low + sketch.error
    assert set(held) <= set(true)
    assert sketch.error <= 2.7 * len(ids) / places


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("power", [1, 3, 8])
def test_counters_and_their_error(body: str, power: int) -> None:
    rng = np.random.default_rng(power)
    ids = (20_000 * rng.random(60_000) ** power).astype(np.int64)
    with using(body):
        sketch = FrequentItems(1024)
        for start in range(0, len(ids), 7001):
            sketch.add(ids[start : start + 7001])
        check(sketch, ids, 1024)
        assert sketch.error > 0  # the table was purged: the bound above says something


def test_the_two_bodies_hold_the_same() -> None:
    ids = (9_000 * np.random.default_rng(3).random(30_000) ** 2).astype(np.int64)
    found = []
    for body in BODIES:
        with using(body):
            sketch = FrequentItems(512)
            sketch.add(ids)
            found.append((sketch.error, *(part.tolist() for part in sketch.items())))
    assert found[0] == found[1]


def test_few_ids_are_exact_and_sketches_merge() -> None:
    ids = np.arange(300) % 50
    sketch = FrequentItems(128)
    sketch.add(ids)
    assert sketch.error == 0 and sketch.items()[1].tolist() == [6] * 50
    rng = np.random.default_rng(0)
    parts = [(5_000 * rng.random(20_000) ** 4).astype(np.int64) for _ in range(3)]
    whole = FrequentItems(1024)
    for part in parts:
        one = FrequentItems(1024)
        one.add(part)
        whole.merge(one)
    check(whole, np.concatenate(parts), 1024)


@pytest.mark.parametrize("count", [0, 1, 30, 3_000, 40_000, 300_000])
def test_distinct_ids_are_estimated_within_the_error(count: int) -> None:
    for seed in range(3):
        ids = np.unique(np.random.default_rng(seed).integers(0, 1 << 60, count))
        log_log = HyperLogLog(12)
        log_log.add(np.concatenate((ids, ids)))
        assert abs(log_log.estimate() - len(ids)) <= 4 * log_log.relative_error * len(ids)
    assert log_log.relative_error == pytest.approx(0.01625)


def test_a_bitmap_is_exact() -> None:
    ids = np.random.default_rng(1).integers(0, 100_000, 200_000)
    bitmap = Bitmap(100_000)
    bitmap.add(ids)
    bitmap.add(ids[:5])
    assert bitmap.estimate() == len(np.unique(ids)) and bitmap.relative_error == 0
