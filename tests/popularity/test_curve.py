"""What follows from counts, beside the plain way to compute it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distcache.data.synthetic import ZipfTables
from distcache.popularity.counters import Drift
from distcache.popularity.curve import Curve, StaticSet, StepCurves, fit_zipf, most_frequent
from distcache.popularity.statistics import TableCounts

COUNTS = np.array([5, 0, 100_000, 1, 1, 70_000, 5, 0, 2], dtype=np.uint32)


def table(counts: np.ndarray) -> TableCounts:
    return TableCounts.of("a", counts)


def curve_of(counted: TableCounts) -> Curve:
    return Curve.of(counted).with_others(counted.distinct)


def test_a_curve_holds_the_counts() -> None:
    curve = curve_of(table(COUNTS))
    assert curve.counts.tolist() == [100_000, 70_000, 5, 2, 1]
    assert curve.rows.tolist() == [1, 1, 2, 1, 2]
    assert curve.lookups == COUNTS.sum() and curve.distinct == 7
    for rows in range(10):
        best = np.sort(COUNTS)[::-1][:rows].sum() / COUNTS.sum()
        assert curve.top(rows) == pytest.approx(best)


def test_rows_that_a_sketch_does_not_hold_share_the_rest() -> None:
    sketched = TableCounts("a", 9, 100, 6, np.array([50, 30]), np.array([2, 4]), error=6)
    curve = curve_of(sketched)
    assert curve.lookups == 100 and curve.distinct == 6
    assert curve.counts.tolist() == [50, 30, 5] and curve.rows.tolist() == [1, 1, 4]
    flat = TableCounts("a", 100, 10_000, 100, np.array([1]), np.array([4]), error=90)
    assert curve_of(flat).spread < 0.001 and not curve_of(flat).alike
    assert fit_zipf(curve_of(flat)).exponent is None


def chance(counts: np.ndarray, drawn: int, of: int = 0) -> np.ndarray:
    """That a row with each count is among `drawn` of all (`of`) lookups, none of them put back."""
    total = of or int(counts.sum())
    ways = math.comb(total, drawn)
    return np.array([1 - math.comb(total - int(count), drawn) / ways for count in counts])


@pytest.mark.parametrize("lookups", [1, 3, 12, 40])
def test_distinct_rows_of_a_part_of_the_lookups(lookups: int) -> None:
    counts = np.array([20, 9, 5, 5, 1, 1, 1, 1, 0])
    found = curve_of(table(counts))
    assert found.expected(lookups) == pytest.approx(chance(counts, lookups).sum(), rel=0.003)
    assert found.expected(10 * int(counts.sum())) == pytest.approx(8)


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
        found.append(curve_of(table(counts)).expected(2000))
        seen = counts / counts.sum()
        plugged.append(float(np.sum(-np.expm1(2000 * np.log1p(-seen)))))
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - true) < 4 * error
    assert abs(np.mean(plugged) - true) > 4 * error  # what the plain form would have said


def test_rows_alike_and_not() -> None:
    rng = np.random.default_rng(1)
    even = curve_of(table(np.bincount(rng.integers(0, 1000, 100_000), minlength=1000)))
    assert even.alike and even.spread < 0.005
    few = curve_of(table(np.bincount(rng.integers(0, 10**6, 1000), minlength=10**6)))
    assert not few.alike  # too few lookups to say so
    assert not curve_of(table(np.array([100, 0, 0, 0]))).alike
    assert not Curve(np.array([9.0]), np.array([1.0]), 9.0, 1).alike
    uneven = rng.choice(1000, 100_000, p=np.arange(1, 1001) / 500_500)
    found = curve_of(table(np.bincount(uneven, minlength=1000))).spread
    assert found == pytest.approx(1 / 3, rel=0.05)  # of a popularity that rises evenly


def test_the_best_fixed_set_of_several_tables() -> None:
    rng = np.random.default_rng(2)
    many = [rng.integers(0, 50, 40), rng.integers(0, 90, 30)]
    curves = [curve_of(table(counts)) for counts in many]
    found = StaticSet.of(StepCurves(tuple(curves), (20, 40)))
    joint = np.concatenate(many)
    chances = np.concatenate([chance(c, n) for c, n in zip(many, (20, 40), strict=True)])
    order = np.argsort(-joint, kind="stable")
    for rows in (1, 7, 30, 65):
        best = order[:rows]
        assert found.held("lookups", rows) == pytest.approx(joint[best].sum())
        assert found.held("touched", rows) == pytest.approx(chances[best].sum(), rel=0.02)
        parts = most_frequent(curves, rows, shared=True)
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
    return Curve.of(table(np.bincount(ids, minlength=rows)))


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
    assert fit.exponent == 0 and fit.rows == 2_000 and "chance" in fit.why
    assert fit_zipf(zipf_curve(3, 1000, 1.0, 1)).why.startswith("fewer than 20 rows")
    one = fit_zipf(Curve.of(table(np.eye(1, 100, 7, dtype=np.int64)[0] * 500)))
    assert one.exponent is None and one.error is None
