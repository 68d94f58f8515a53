"""The fitted exponent is that of the synthetic source, within its own error."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.data.synthetic import ZipfTables
from distcache.popularity.counters import DenseCounter
from distcache.popularity.curve import Curve, fit_zipf


def curve(rows: int, lookups: int, exponent: float, seed: int):
    ids = ZipfTables([rows], exponent, seed).draw_ids(
        np.random.default_rng(seed).random(lookups), np.array([lookups])
    )
    counter = DenseCounter("a", rows)
    counter.add(ids)
    counter.close_part()
    return Curve.of(counter.result())


@pytest.mark.parametrize("rows", [300, 10_000, 300_000])
@pytest.mark.parametrize("exponent", [0.3, 0.8, 1.05, 1.2, 1.6])
def test_the_exponent_is_found_within_its_error(rows: int, exponent: float) -> None:
    for seed in (1, 2):
        fit = fit_zipf(curve(rows, 1_000_000, exponent, seed))
        if fit.exponent is None:
            assert rows == 300_000 and exponent == 0.3  # 3 lookups a row: none has 30
            continue
        assert abs(fit.exponent - exponent) < 1.5 * fit.error
        assert fit.error < 0.35 * exponent


def test_uniform_ids_have_the_exponent_0() -> None:
    fit = fit_zipf(curve(2_000, 200_000, 0.0, 3))
    assert fit.exponent == 0 and fit.rows == 2_000 and "chance" in fit.why


def test_too_little_to_fit() -> None:
    assert fit_zipf(curve(3, 1000, 1.0, 1)).why.startswith("fewer than 20 rows")
    one = fit_zipf(Curve.of(_all_equal()))
    assert one.exponent is None and one.error is None


def _all_equal():
    counter = DenseCounter("a", 100)
    counter.add(np.full(500, 7))
    counter.close_part()
    return counter.result()
