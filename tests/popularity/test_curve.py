"""Lookups counted; what follows from counts; the hot set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from distcache.data.batch import JaggedIds
from distcache.data.synthetic import ZipfTables
from distcache.errors import DataError
from distcache.popularity import curve as module
from distcache.popularity.curve import (
    Curve,
    Drift,
    TableCounter,
    fit_zipf,
    most_frequent,
)
from distcache.popularity.hot_cold import HotSet, expected_cold, rows_that_fit
from distcache.popularity.statistics import Statistics, TableCounts


def skewed(rows: int, count: int) -> np.ndarray:
    return (rows * np.random.default_rng(0).random(count) ** 5).astype(np.int64)


def test_exact_counts_over_parts() -> None:
    counter, ids = TableCounter("a", 1000), skewed(1000, 5000)
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
    assert found.ids is None and len(counter.drift.own) == 3


def test_counts_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 250)
    counter = TableCounter("a", 4)
    for _ in range(3):
        counter.add(np.full(200, 2))
    counter.close_part()
    found = counter.result()
    assert found.counts.dtype == np.int64 and found.counts.tolist() == [0, 0, 600, 0]


COUNTS = np.array([5, 0, 100_000, 1, 1, 70_000, 5, 0, 2], dtype=np.uint32)


def curve_of(counts: np.ndarray) -> Curve:
    return Curve.of(TableCounts.of("a", counts))


def test_a_curve_holds_the_counts() -> None:
    curve = curve_of(COUNTS)
    assert curve.counts.tolist() == [100_000, 70_000, 5, 2, 1]
    assert curve.rows.tolist() == [1, 1, 2, 1, 2]
    assert curve.lookups == COUNTS.sum() and curve.distinct == 7
    for rows in range(10):
        best = np.sort(COUNTS)[::-1][:rows].sum() / COUNTS.sum()
        assert curve.top(rows) == pytest.approx(best)


def chance(counts: np.ndarray, drawn: int, of: int = 0) -> np.ndarray:
    """That a row with each count is among `drawn` of all (`of`) lookups, none of them put back."""
    total = of or int(counts.sum())
    ways = math.comb(total, drawn)
    return np.array([1 - math.comb(total - int(count), drawn) / ways for count in counts])


@pytest.mark.parametrize("n", [1, 7, 60])
def test_use_is_the_chance_that_some_lookup_names_the_row(n: int) -> None:
    counts = np.array([100.0, 30, 9, 2, 1])
    exact = chance(counts, n, 100)
    use = Curve(counts, np.ones(5), 100.0, 6).touched(n)
    assert use[-1] == pytest.approx(n / 100) and use[0] == 1
    assert np.allclose(use, exact, atol=2e-3)
    many = Curve(counts * 1e7, np.ones(5), 1e9, 6)
    assert np.allclose(many.touched(n), 1 - (1 - counts / 100) ** n, rtol=1e-6)
    law = Curve(counts / 100, np.ones(5), math.inf, 6)
    assert np.allclose(law.touched(n), many.touched(n), rtol=1e-6)
    ends = Curve(np.array([1.0, 0.5, 1e-12]), np.ones(3), math.inf, 3)
    assert ends.touched(3).tolist() == [1.0, 0.875, pytest.approx(3e-12, rel=1e-9)]
    assert ends.touched(0).tolist() == [0.0, 0.0, 0.0]


def test_an_endless_stream_is_estimated_without_bias() -> None:
    shares = 1.0 / np.arange(1, 50_001)
    shares /= shares.sum()
    true = float(np.sum(-np.expm1(2000 * np.log1p(-shares))))
    rng, found, plugged = np.random.default_rng(5), [], []
    for _ in range(20):
        counts = np.bincount(rng.choice(50_000, 20_000, p=shares), minlength=50_000)
        found.append(curve_of(counts).expected(2000))
        seen = counts / counts.sum()
        plugged.append(float(np.sum(-np.expm1(2000 * np.log1p(-seen)))))
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - true) < 4 * error
    assert abs(np.mean(plugged) - true) > 4 * error  # what the plain form would have said


def test_rows_alike_and_not() -> None:
    rng = np.random.default_rng(1)
    even = curve_of(np.bincount(rng.integers(0, 1000, 100_000), minlength=1000))
    assert even.alike and even.spread < 0.005
    few = curve_of(np.bincount(rng.integers(0, 10**6, 1000), minlength=10**6))
    assert not few.alike  # too few lookups to say so
    assert not curve_of(np.array([100, 0, 0, 0])).alike
    assert not Curve(np.array([9.0]), np.array([1.0]), 9.0, 1).alike
    uneven = rng.choice(1000, 100_000, p=np.arange(1, 1001) / 500_500)
    found = curve_of(np.bincount(uneven, minlength=1000)).spread
    assert found == pytest.approx(1 / 3, rel=0.05)  # of a popularity that rises evenly


def test_the_best_fixed_set_of_several_tables() -> None:
    rng = np.random.default_rng(2)
    many = [rng.integers(0, 50, 40), rng.integers(0, 90, 30)]
    curves = [curve_of(counts) for counts in many]
    joint = np.concatenate(many)
    chances = np.concatenate([chance(c, n) for c, n in zip(many, (20, 40), strict=True)])
    order = np.argsort(-joint, kind="stable")
    for rows in (1, 7, 30, 65):
        best = order[:rows]
        parts = most_frequent(curves, rows, shared=True)
        of = list(zip(curves, parts, (20, 40), strict=True))
        lookups = sum(curve.held(curve.counts, part) for curve, part, _ in of)
        assert lookups == pytest.approx(joint[best].sum())
        touched = sum(curve.held(curve.touched(n), part) for curve, part, n in of)
        assert touched == pytest.approx(chances[best].sum(), rel=0.05)
        assert sum(parts) == pytest.approx(min(rows, (joint > 0).sum()))
        least = joint[best].min()
        for counts, part in zip(many, parts, strict=True):
            assert (counts > least).sum() <= part + 1e-9 <= (counts >= least).sum() + 1e-6


def test_drift_is_seen() -> None:
    def parts(moves: bool) -> Drift:
        drift, rng = Drift(1000), np.random.default_rng(0)
        for part in range(4):
            ids = (1000 * rng.random(20_000) ** 6).astype(np.int64)
            counts = np.bincount((ids + 100 * part * moves) % 1000, minlength=1000)
            some = np.flatnonzero(counts)
            drift.add(some, counts[some], 20_000)
        return drift

    still, moving = parts(False), parts(True)
    assert still.hot_rows == 10 and len(still.own) == len(still.far) == len(still.next) + 1 == 4
    assert still.kept() > 0.98 and still.kept_far() > 0.98
    assert moving.kept() < 0.3 and moving.kept_far() < 0.3
    assert Drift(10).kept() is None and Drift(10).kept_far() is None


def zipf_curve(rows: int, lookups: int, exponent: float, seed: int) -> Curve:
    ids = ZipfTables([rows], exponent, seed).draw_ids(
        np.random.default_rng(seed).random(lookups), np.array([lookups])
    )
    return curve_of(np.bincount(ids, minlength=rows))


@pytest.mark.parametrize("rows", [300, 10_000, 300_000])
@pytest.mark.parametrize("exponent", [0.3, 0.8, 1.05, 1.2, 1.6])
def test_the_exponent_is_found_within_its_error(rows: int, exponent: float) -> None:
    for seed in (1, 2):
        fit = fit_zipf(zipf_curve(rows, 1_000_000, exponent, seed))
        if fit.exponent is None:
            assert rows == 300_000 and exponent == 0.3  # 3 lookups a row: none has 30
            continue
        assert abs(fit.exponent - exponent) < 1.5 * fit.error
        assert fit.error < 0.35 * exponent


def test_uniform_ids_have_the_exponent_0_and_few_have_none() -> None:
    fit = fit_zipf(zipf_curve(2_000, 200_000, 0.0, 3))
    assert fit.exponent == 0 and fit.rows == 2_000
    assert fit_zipf(zipf_curve(3, 1000, 1.0, 1)).exponent is None
    one = fit_zipf(curve_of(np.eye(1, 100, 7, dtype=np.int64)[0] * 500))
    assert one.exponent is None and one.error is None


def statistics(*counts, samples: int = 100) -> Statistics:
    """Tables with these counts of each row."""
    arrays = enumerate(np.asarray(own, dtype=np.int64) for own in counts)
    return Statistics(tuple(TableCounts.of(f"f{i}", own) for i, own in arrays), "ids", samples)


def curves(known: Statistics) -> list[Curve]:
    """The curve of each table."""
    return [Curve.of(table, known.samples) for table in known.tables]


def test_empty_bags_are_hot_and_strange_ids_are_not():
    hot = HotSet(statistics([5, 4, 0]), [3])
    assert hot.hot_rows == (2,)  # a row that was never looked up is not hot
    values, ends = torch.tensor([0, 1, 0, 2, 3, -1, 0, 2]), torch.tensor([0, 0, 1, 3, 4, 5, 6, 8])
    assert hot.samples(JaggedIds(("f0",), values, ends)).tolist() == [True] * 3 + [False] * 4
    assert len(hot.samples(JaggedIds(("f0",), values[:0], ends[:1]))) == 0


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
        assert most_frequent(curves(known), rows) == [taken.count(table) for table in range(4)]


def test_cold_batches_look_up_as_many_cold_rows_as_expected():
    """For ids that are independent of one another."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, (20_000, 3)) - 1, 4999)
    known = statistics(*(np.bincount(ids[:, t], minlength=5000) for t in range(3)), samples=20_000)
    hot = HotSet(known, most_frequent(curves(known), 600))
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
            hot + steps * expected_cold(known, most_frequent(known, hot), batch)
            for hot in (rows, rows + 1)
        ]
        assert 0 < rows < room
        assert needed[0] <= room < needed[1]
