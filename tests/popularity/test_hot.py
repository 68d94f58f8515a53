"""The hot set: which rows, which samples, and how many rows the slots hold beside cold ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distcache.data.batch import JaggedIds
from distcache.popularity.curve import Curve
from distcache.popularity.hot_cold import (
    HotSet,
    expected_cold,
    hottest,
    rows_that_fit,
)
from distcache.popularity.statistics import Statistics, TableCounts


def statistics(*counts, samples: int = 100) -> Statistics:
    """Tables with these counts of each row."""
    arrays = enumerate(np.asarray(own, dtype=np.int64) for own in counts)
    return Statistics(tuple(TableCounts.of(f"f{i}", own) for i, own in arrays), "ids", samples)


def curves(known: Statistics) -> list[Curve]:
    """The curve of each table."""
    return [Curve.of(table, known.samples) for table in known.tables]


def jagged(bags: list[list[list[int]]]) -> JaggedIds:
    """The same as a batch."""
    flat = [bag for own in bags for bag in own]
    offsets = np.concatenate(([0], np.cumsum([len(bag) for bag in flat], dtype=np.int64)))
    values = np.array([row for bag in flat for row in bag], dtype=np.int64)
    features = tuple(f"f{index}" for index in range(len(bags)))
    return JaggedIds(features, torch.from_numpy(values), torch.from_numpy(offsets))


@pytest.mark.parametrize("seed", range(6))
def test_samples_equal_a_loop_over_them(seed):
    """Single ids, ragged bags and empty ones, in any mixture."""
    rng = np.random.default_rng(seed)
    rows = [50, 9, 1, 200]
    known = statistics(*(rng.integers(0, 20, count) for count in rows))
    wanted = [int(rng.integers(0, count + 1)) for count in rows]
    hot = HotSet(known, wanted)
    own = [set(known.tables[t].hottest(wanted[t]).tolist()) for t in range(4)]
    assert hot.hot_rows == tuple(map(len, own))
    lengths = [np.ones(80, dtype=int) if f == seed % 4 else rng.poisson(1, 80) for f in range(4)]
    bags = [[rng.integers(0, rows[f], n).tolist() for n in lengths[f]] for f in range(4)]
    found = hot.samples(jagged(bags))
    pairs = list(zip(own, bags, strict=True))
    for sample, is_hot in enumerate(found.tolist()):
        assert is_hot == all(row in rows for rows, bag in pairs for row in bag[sample])
    assert 0 < found.sum() < 80 or min(wanted) == 0


def test_empty_bags_are_hot_and_strange_ids_are_not():
    hot = HotSet(statistics([5, 4, 0]), [3])
    assert hot.hot_rows == (2,)  # a row that was never looked up is not hot
    bags = [[[], [0], [1, 0], [2], [3], [-1], [0, 2]]]
    assert hot.samples(jagged(bags)).tolist() == [True, True, True, False, False, False, False]
    assert len(hot.samples(jagged([[]]))) == 0


def test_ids_beyond_float32():
    """Neighbours above 2^24, which are one number as float32."""
    big = (1 << 24) + 1
    table = TableCounts("f0", 1 << 25, 7, 1, np.array([7]), np.array([big]))
    hot = HotSet(Statistics((table,), "ids", 7), [1])
    assert hot.has(0, np.array([big - 1, big, big + 1])).tolist() == [False, True, False]
    assert hot.nbytes == (1 << 25) // 8


@pytest.mark.parametrize("seed", range(5))
def test_greedy_equals_a_sort(seed):
    rng = np.random.default_rng(seed)
    counts = [rng.integers(0, 6, n) for n in (30, 1, 12, 50)]
    known = statistics(*counts)
    every = sorted((-count, table) for table, own in enumerate(counts) for count in own if count)
    for rows in (0, 1, 5, 40, len(every), len(every) + 9):
        taken = [table for _, table in every[:rows]]
        assert hottest(curves(known), rows) == [taken.count(table) for table in range(4)]


def test_cold_batches_look_up_as_many_cold_rows_as_expected():
    """For ids that are independent of one another."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, (20_000, 3)) - 1, 4999)
    known = statistics(*(np.bincount(ids[:, t], minlength=5000) for t in range(3)), samples=20_000)
    hot = HotSet(known, hottest(curves(known), 600))
    masks = np.stack([hot.has(t, ids[:, t]) for t in range(3)], axis=1)
    cold = np.flatnonzero(~masks.all(axis=1))
    batch, found = 256, []
    for _ in range(50):
        some = rng.choice(cold, batch, replace=False)
        own = [np.unique(ids[some, t][~masks[some, t]]) for t in range(3)]
        found.append(sum(map(len, own)))
    expected = expected_cold(curves(known), hot.hot_rows, batch)
    assert np.mean(found) == pytest.approx(expected, rel=0.03)


def test_rows_that_fit_leave_room_and_use_it():
    known = curves(statistics([9, 8, 0, 1], [3]))
    assert rows_that_fit(known, 100, 8) == [3, 1]  # all that were ever looked up
    assert rows_that_fit(known, 1, 8) == [0, 0]
    assert rows_that_fit(curves(statistics([0, 0], [0])), 100, 8) == [0, 0]
    rng = np.random.default_rng(1)
    counts = [rng.permutation((1e5 / (1 + np.arange(4000)) ** 1.1).astype(int)) for _ in range(2)]
    known = curves(statistics(*counts, samples=int(counts[0].sum())))
    for slots, batch, steps in ((2000, 16, 3), (2000, 128, 3), (700, 256, 2), (350, 256, 1)):
        room = slots - slots // 10  # the margin of caches as small as these
        rows = sum(rows_that_fit(known, slots, batch))
        needed = [
            hot + steps * expected_cold(known, hottest(known, hot), batch)
            for hot in (rows, rows + 1)
        ]
        assert 0 < rows < room
        assert needed[0] <= room < needed[1]
