"""The exponent of Zipf's law, k-th row ~ k^-a, that the counts of a table follow, and its error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distcache.popularity.curve import ALIKE, CountCurve

_SURE = 30
"""Least count of a row in the fit: its own chance is then below a fifth."""
_ERRORS = 10
"""Least count of a row in the fit, in errors of a sketch."""

_LEAST_ROWS = 20
_MOST_ROWS = 1_000_000
_INNER = 0.5
"""At most this share of the rows that were looked up, so that none is at the table's end."""


@dataclass(frozen=True)
class ZipfFit:
    """`exponent` a with its standard error, from the `rows` most frequent rows; None where they
    are too few, and `why`."""

    exponent: float | None
    error: float | None
    rows: int
    why: str = ""


def fit_zipf(curve: CountCurve, table_rows: int) -> ZipfFit:
    """Fit the curve of a table of `table_rows` rows.

    Rank regression: least squares of log(rank - 1/2) on log(count) has slope -1/a, with standard
    error (1/a) sqrt(2 / rows) (Gabaix & Ibragimov 2011, "Rank - 1/2"). Over the rows with at least
    30 lookups, at most the more frequent half of those looked up: chance blurs the counts of the
    others, and sorting then makes them look steeper. In a sketch, of rows with at least ten times
    its error. Rows whose counts differ by no more than
    chance have the exponent 0.
    """
    rows = int(curve.rows[curve.counts >= max(_SURE, _ERRORS * curve.error)].sum())
    rows = min(rows, _MOST_ROWS, int(curve.distinct * _INNER))
    if curve.alike(table_rows):
        return ZipfFit(0.0, math.sqrt(ALIKE), table_rows, "rows differ by chance alone")
    if rows < _LEAST_ROWS:
        return ZipfFit(None, None, rows, f"fewer than {_LEAST_ROWS} rows have enough lookups")
    sizes = np.repeat(np.log(curve.counts), curve.rows.astype(np.int64))[:rows]
    ranks = np.log(np.arange(1, rows + 1) - 0.5)
    sizes = sizes - sizes.mean()
    squares = float(sizes @ sizes)
    if squares == 0:
        return ZipfFit(None, None, rows, "all these rows have the same count")
    slope = -float(sizes @ (ranks - ranks.mean())) / squares
    if slope <= 0:
        return ZipfFit(None, None, rows, "counts do not fall with the rank")
    return ZipfFit(1 / slope, math.sqrt(2 / rows) / slope, rows)
