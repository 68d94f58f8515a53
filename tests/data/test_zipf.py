"""Ids follow the stated distribution, and expectations follow from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distcache.data.synthetic import ZipfTables
from distcache.errors import ConfigError

EXPONENTS = [0.0, 0.5, 0.999999, 1.0, 1.05, 2.0]


def theory(rows: int, exponent: float) -> np.ndarray:
    """Masses of x^-a on [k + .5, k + 1.5), by fine numerical integration, k in [0, rows)."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    x = 1.0 + np.arange(rows)[:, None] + nodes / 2
    mass = (x**-exponent * weights).sum(axis=1)
    return mass / mass.sum()


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_masses_are_those_of_the_integrated_distribution(rows, exponent):
    tables = ZipfTables([rows], exponent, seed=0)
    mass = np.diff(tables.mass_below(0, np.arange(rows + 1)))
    np.testing.assert_allclose(mass, theory(rows, exponent), rtol=1e-7, atol=1e-12)
    assert tables.mass_below(0, np.array([rows]))[0] == pytest.approx(1.0)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_drawn_ids_follow_the_distribution(exponent):
    rows, n = 1000, 400_000
    tables = ZipfTables([7, rows], exponent, seed=5)
    ids = tables.draw_ids(np.random.default_rng(0).random(n + 3), np.array([3, n]))[3:]
    by_rank = np.bincount(ids, minlength=rows)[tables.ids_of_ranks(1, np.arange(rows))]
    expected = theory(rows, exponent) * n
    # Pearson's statistic has mean 999 and deviation 45; pool cells of fewer than 5.
    large = expected >= 5
    chi = np.sum((by_rank - expected)[large] ** 2 / expected[large])
    freedom = large.sum()
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)
    rest = expected[~large].sum()
    assert abs(by_rank[~large].sum() - rest) <= 5 * math.sqrt(rest + 1)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_inverse_meets_every_boundary_of_a_large_table(exponent):
    rows = 40_000_000
    tables = ZipfTables([rows], exponent, seed=1)
    ranks = np.unique(np.geomspace(1, rows - 1, 2000).astype(np.int64))
    if exponent == 2.0:
        ranks = ranks[ranks < 1_000_000]  # beyond, a float64 has few numbers left below 1
    middle = tables.mass_below(0, ranks + 0.5)
    ids = tables.draw_ids(middle, np.array([len(ranks)]))
    assert np.array_equal(ids, tables.ids_of_ranks(0, ranks))


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_ends_of_the_unit_interval_stay_inside(exponent):
    for rows in (1, 2, 3, 4096, 10_131_227, 3_000_000_000):
        tables = ZipfTables([rows], exponent, seed=1)
        ids = tables.draw_ids(np.array([0.0, 1 - 2.0**-53]), np.array([2]))
        assert ids[0] == tables.ids_of_ranks(0, np.array([0]))[0]
        assert np.all((ids >= 0) & (ids < rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 12, 97, 1000, 5461])
def test_ranks_to_ids_is_a_bijection(rows):
    for seed in range(5):
        ids = ZipfTables([rows], 1.0, seed).ids_of_ranks(0, np.arange(rows))
        assert np.array_equal(np.sort(ids), np.arange(rows))


def test_hot_ids_are_scattered_and_differ_between_tables():
    tables = ZipfTables([100_000] * 4, 1.0, seed=2)
    hot = [tables.ids_of_ranks(table, np.arange(100)) for table in range(4)]
    for table, ids in enumerate(hot):
        # Every quarter of the table holds some of the hundred hottest ids.
        assert np.bincount(ids // 25_000, minlength=4).min() >= 10
        for other in hot[:table]:
            assert len(np.intersect1d(ids, other)) < 20


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("rows", [1, 3, 5000, 200_000])
@pytest.mark.parametrize("lookups", [0, 1, 50, 100_000])
def test_expected_distinct_is_the_sum_over_rows(rows, lookups, exponent):
    tables = ZipfTables([rows], exponent, seed=0)
    mass = np.clip(np.diff(tables.mass_below(0, np.arange(rows + 1))), 0, 1)
    with np.errstate(divide="ignore"):
        exact = np.sum(-np.expm1(lookups * np.log1p(-mass))) if lookups else 0.0
    assert tables.expected_distinct(0, lookups) == pytest.approx(exact, rel=1e-4)


def test_expected_distinct_is_what_is_drawn():
    rows, n = 10_000_000, 200_000
    tables = ZipfTables([rows], 1.05, seed=0)
    drawn = [
        len(np.unique(tables.draw_ids(np.random.default_rng(s).random(n), np.array([n]))))
        for s in range(3)
    ]
    assert tables.expected_distinct(0, n) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize("exponent", [-0.1, math.nan, math.inf])
def test_bad_exponents_are_refused(exponent):
    with pytest.raises(ConfigError, match=r"data\.zipf"):
        ZipfTables([10], exponent, seed=0)
