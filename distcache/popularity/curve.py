"""What follows from counts alone: who gets which share, distinct rows, the best static set.

Counts enter as a curve: how many rows were looked up how often. It has thousands of entries where
a table has millions of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distcache.popularity.statistics import TableCounts

ALIKE = 0.02
"""Below this `CountCurve.spread` rows count as alike (it is 0.02 at a Zipf exponent of 0.14)."""


@dataclass(frozen=True)
class CountCurve:
    """`rows[i]` rows have the count `counts[i]` each; counts fall. Float64 `[k]`, none are 0.

    Counts are whole where they are exact (`error` 0); of a sketch they are up to `error` too small,
    and the rows that it does not hold share what is left of the lookups evenly.
    """

    counts: np.ndarray
    rows: np.ndarray
    error: int = 0

    @cached_property
    def lookups(self) -> float:
        """All lookups (N)."""
        return float(self.counts @ self.rows)

    @cached_property
    def distinct(self) -> float:
        """Rows that were looked up at all."""
        return float(self.rows.sum())

    def top_share(self, rows: float) -> float:
        """Share of the lookups that fall on the `rows` most frequent rows; 0 without lookups."""
        if not self.lookups:
            return 0.0
        ends = np.concatenate(([0.0], np.cumsum(self.rows)))
        sums = np.concatenate(([0.0], np.cumsum(self.counts * self.rows)))
        return float(np.interp(rows, ends, sums)) / self.lookups

    def chances(self, lookups: float) -> np.ndarray:
        """For each entry, the probability that a row of it is among `lookups` lookups.

        These are drawn from the N that were counted, without putting any back: as a batch is from
        an epoch. 1 - C(N - c, n) / C(N, n), where with m = min(c, n) and M = max(c, n) the quotient
        is (1 - M / (N - (m-1)/2))^m to second order, and exactly for m = 1. For a stream without an
        end it estimates without bias what 1 - (1 - p)^n would be with the unknown p (Hurlbert
        1971), where p = c / N would be biased by rows that the counts have not seen.
        """
        few, many = np.minimum(self.counts, lookups), np.maximum(self.counts, lookups)
        left = np.maximum(self.lookups - np.maximum(few - 1, 0) / 2, 1.0)
        with np.errstate(divide="ignore"):
            return -np.expm1(few * np.log1p(-np.minimum(many / left, 1.0)))

    def expected_distinct(self, lookups: float) -> float:
        """Expected distinct rows among `lookups` lookups in random order, at most N of them."""
        return float(self.chances(min(lookups, self.lookups)) @ self.rows)

    def spread(self, rows: int) -> float:
        """Squared coefficient of variation of the popularity of a table's `rows` rows, without
        what chance adds to their counts: 0 where all are alike, about `rows` where one has all."""
        mean = self.lookups / rows
        if mean == 0 or rows < 2:
            return 0.0
        squares = float(self.counts**2 @ self.rows) - rows * mean**2
        return max(0.0, (squares / (rows - 1) - mean) / mean**2)

    def alike(self, rows: int) -> bool:
        """Whether the `rows` rows of a table differ by no more than chance: their spread is near 0,
        and enough lookups were counted, exactly, to say so. A table of one row is none."""
        if rows < 2 or not self.lookups or self.error:
            return False
        chance = math.sqrt(2 / rows) * rows / self.lookups  # the standard error of `spread`
        return self.spread(rows) < ALIKE and 2 * chance < ALIKE


def curve_of(table: TableCounts) -> CountCurve:
    """The curve of a table's counts."""
    values, rows = table.histogram()
    curve = CountCurve(values.astype(np.float64), rows.astype(np.float64))
    left = table.lookups - curve.lookups
    if left <= 0:
        return curve
    others = max(table.distinct - curve.distinct, left / max(table.error, 1), 1.0)
    order = np.argsort(-np.append(curve.counts, left / others), kind="stable")
    return CountCurve(
        np.append(curve.counts, left / others)[order],
        np.append(curve.rows, others)[order],
        table.error,
    )


@dataclass(frozen=True)
class StaticSet:
    """The best fixed set of rows over several tables, by size: rows by falling count.

    `rows`, `lookups`, `touched`: of all entries, running sums: rows, their lookups, and how often
    a batch is expected to touch one of them. Float64 `[k + 1]`, from 0.
    """

    rows: np.ndarray
    lookups: np.ndarray
    touched: np.ndarray

    @classmethod
    def of(cls, curves: Sequence[CountCurve], batch_lookups: Sequence[float]) -> StaticSet:
        """`batch_lookups`: lookups of each table in a global batch."""
        pairs = list(zip(curves, batch_lookups, strict=True))
        counts = np.concatenate([curve.counts for curve in curves])
        rows = np.concatenate([curve.rows for curve in curves])
        chances = np.concatenate([curve.chances(min(n, curve.lookups)) for curve, n in pairs])
        order = np.argsort(-counts, kind="stable")
        sums = (rows[order], (counts * rows)[order], (chances * rows)[order])
        return cls(*(np.concatenate(([0.0], np.cumsum(values))) for values in sums))

    def hit_rate(self, rows: float) -> float:
        """Share of the distinct rows of a batch that the `rows` most frequent rows hold."""
        return self._share(self.touched, rows)

    def lookup_rate(self, rows: float) -> float:
        """Share of the lookups that they hold."""
        return self._share(self.lookups, rows)

    def _share(self, sums: np.ndarray, rows: float) -> float:
        return float(np.interp(rows, self.rows, sums)) / sums[-1] if sums[-1] else 0.0


def split_static(curves: Sequence[CountCurve], rows: float) -> list[float]:
    """How many of the `rows` most frequent rows of all tables each of them has."""
    counts = np.concatenate([curve.counts for curve in curves])
    number = np.concatenate([curve.rows for curve in curves])
    table = np.repeat(np.arange(len(curves)), [len(curve.counts) for curve in curves])
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(number[order]) - number[order]
    last = np.searchsorted(before, rows) - 1  # the entry in which the rows run out
    level = counts[order][max(last, 0)] if len(counts) else 0.0
    taken = np.where(counts > level, number, 0.0)
    alike = np.where(counts == level, number, 0.0)  # they share what is left by their numbers
    left = min(max(rows - taken.sum(), 0.0), alike.sum())
    taken += alike * (left / max(alike.sum(), 1.0))
    return np.bincount(table, weights=taken, minlength=len(curves)).tolist()
