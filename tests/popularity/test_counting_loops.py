"""The counting loops: compiled and NumPy bodies agree, and with the plain meaning."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from planner_bodies import BODIES, using

from distcache.popularity import loops

NONE = np.empty(0, dtype=np.int64)


@pytest.fixture(params=BODIES, autouse=True)
def body(request: pytest.FixtureRequest):
    """Each body of the loops in turn."""
    with using(request.param):
        yield


def skewed(rows: int, count: int, seed: int = 0) -> np.ndarray:
    return (rows * np.random.default_rng(seed).random(count) ** 3).astype(np.int64)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_rows_are_counted(dtype: type) -> None:
    ids = skewed(500, 3000)
    counts = np.zeros(500, dtype=dtype)
    assert loops.count_rows(ids, counts) == 3000
    assert counts.tolist() == np.bincount(ids, minlength=500).tolist()
    assert loops.count_rows(NONE, counts) == 0


@pytest.mark.parametrize("bad", [-1, 5, np.iinfo(np.int64).max, np.iinfo(np.int64).min])
def test_counting_stops_before_an_id_outside_the_table(bad: int) -> None:
    counts = np.zeros(5, dtype=np.uint32)
    assert loops.count_rows(np.array([1, 1, bad, 2]), counts) == -1 - 2
    assert counts.tolist() == [0, 2, 0, 0, 0]


@pytest.mark.parametrize(("part", "whole"), [("u4", "u4"), ("u4", "i8"), ("i8", "i8")])
def test_a_parts_counts_are_taken(part: str, whole: str) -> None:
    ids = skewed(500, 300)
    true = np.bincount(ids, minlength=500)
    counted, total = true.astype(part), np.full(500, 3, dtype=whole)
    rows, counts = np.empty(300, dtype=np.int64), np.empty(300, dtype=np.int64)
    found = loops.take_counts(counted, total, rows, counts)
    assert rows[:found].tolist() == np.flatnonzero(true).tolist()
    assert counts[:found].tolist() == true[true > 0].tolist()
    assert total.tolist() == (true + 3).tolist() and not counted.any()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_table_of_counters(weighted: bool) -> None:
    ids = skewed(10_000, 5000)
    weights = np.arange(5000) % 7 + 1 if weighted else NONE
    keys, values = np.full(4096, -1, dtype=np.int64), np.zeros(4096, dtype=np.int64)
    done, active = loops.offer(ids, weights, keys, values, 0, 1000)
    true: Counter = Counter()
    added = 0
    for key, weight in zip(ids.tolist(), weights.tolist() or [1] * 5000, strict=True):
        if key not in true and len(true) == 1000:
            break
        true[key] += weight
        added += 1
    assert (done, active) == (added, 1000)  # it stops before the id that would be one too many
    used = keys >= 0
    assert dict(zip(keys[used].tolist(), values[used].tolist(), strict=True)) == dict(true)
    known = ids[:100]
    assert loops.offer(known, NONE, keys, values, active, 1000) == (100, 1000)


def test_bits_are_set_once() -> None:
    bits = np.zeros(125, dtype=np.uint8)
    ids = skewed(1000, 700)
    assert loops.mark(ids, bits) == len(np.unique(ids))
    assert loops.mark(ids, bits) == 0
    assert (
        np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == np.unique(ids).tolist()
    )


def test_registers_are_the_same_in_both_bodies() -> None:
    ids = np.concatenate((skewed(1 << 40, 50_000), [0, np.iinfo(np.int64).max]))
    found = []
    for name in BODIES:
        with using(name):
            registers = np.zeros(256, dtype=np.uint8)
            loops.observe(ids, registers)
            found.append(registers.tolist())
    assert found[0] == found[1] and min(found[0]) > 0
