"""What follows from counts alone: shares, distinct rows, the best static set, drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distcache.popularity.counters import Bitmap, Drift, TableCounter
from distcache.popularity.statistics import Statistics, TableCounts

# -----------------------------------------------------------------------------
# What follows from counts alone: who gets which share, distinct rows, the best static set.
#
# Counts enter as a curve: how many rows were looked up how often. It has thousands of entries
# where
# a table has millions of rows.

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


# -----------------------------------------------------------------------------
# The exponent of Zipf's law, k-th row ~ k^-a, that the counts of a table follow, and its error.

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


# -----------------------------------------------------------------------------
# How many rows a step needs how likely: from counts to curves, and what follows from them.
#
# A step's n lookups of a table are n of the N that were counted, none twice. A row that c of them
# name is needed by a step with probability q = 1 - C(N - c, n) / C(N, n) (Hurlbert, 1971), which
# is
# 1 - (1 - c / N)^n for small n / N. The sum of q is the expected number of distinct rows, without
# bias also where the N are a sample: the rows that it lacks need no guess.

DEVIATIONS = 6.0
"""Slots that a step is given room for, in standard deviations above the rows it is expected to
need."""


@dataclass(frozen=True)
class Curve:
    """Rows of one table by how likely a step needs them.

    `use` float64 `[m]`, descending: the probability q; `rows` int64 `[m]`: how many rows have it.
    `unseen`: rows that no lookup named.
    """

    use: np.ndarray
    rows: np.ndarray
    unseen: int = 0

    @property
    def expected_rows(self) -> float:
        """Distinct rows that a step is expected to need."""
        return float(self.use @ self.rows)


@dataclass(frozen=True)
class GroupCurves:
    """The curves of a group's tables; `row_bytes`: bytes of a row and its optimizer state."""

    tables: tuple[Curve, ...]
    row_bytes: int

    @property
    def rows(self) -> int:
        """V: rows of all tables."""
        return sum(int(curve.rows.sum()) + curve.unseen for curve in self.tables)


def row_use(counts: np.ndarray, lookups: int, per_step: float) -> np.ndarray:
    """q of rows that `counts` of `lookups` lookups name, for `per_step` lookups; float64.

    C(N - c, n) / C(N, n) is a product of c factors 1 - n / (N - i), and one of n factors
    1 - c / (N - i): the one with fewer factors, each of them taken at the middle i. Below one
    lookup a step, q is that share of what one lookup has.
    """
    counts = np.asarray(counts, dtype=np.float64)
    if per_step < 1:
        return per_step * counts / max(lookups, 1)
    few, many = np.minimum(counts, per_step), np.maximum(counts, per_step)
    left = lookups - np.maximum(few - 1, 0) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = -np.expm1(few * np.log1p(-np.minimum(many / left, 1.0)))
    return np.where(counts > 0, chance, 0.0)


def lookups_per_step(statistics: Statistics, table: TableCounts, batch: int) -> float:
    """Lookups of `table` that a global batch of `batch` samples makes, on average."""
    return table.lookups / max(statistics.samples, 1) * batch


def row_curve_of(table: TableCounts, per_step: float) -> Curve:
    """The curve of a table for steps of `per_step` lookups."""
    values, rows = table.histogram()
    return Curve(row_use(values, table.lookups, per_step), rows, table.rows - int(rows.sum()))


def least_slots(group: GroupCurves, world_size: int) -> int:
    """Slots, a multiple of W, in which a step of a group is expected to fit with room to spare.

    The rows of a step fall to W homes like independent draws; each home gets as many slots as it
    is expected to need and `DEVIATIONS` standard deviations more, but not more than its rows.
    """
    mean = sum(curve.expected_rows for curve in group.tables) / world_size
    variance = 0.0
    for curve in group.tables:
        homed = curve.use / world_size
        variance += float(curve.rows @ (homed * (1 - homed)))
    home = math.ceil(mean + DEVIATIONS * math.sqrt(variance))
    return min(max(home, 1), -(-group.rows // world_size)) * world_size


def hot_prefixes(tables: Sequence[Curve], slots: int) -> list[int]:
    """How many of each table's most frequent rows are among the `slots` likeliest of all.

    Only rows that were looked up count; where several are as likely, earlier tables' come first.
    """
    use = np.concatenate([curve.use for curve in tables])
    rows = np.concatenate([curve.rows for curve in tables])
    owner = np.repeat(np.arange(len(tables)), [len(curve.use) for curve in tables])
    order = np.argsort(-use, kind="stable")
    ends = np.cumsum(rows[order])
    taken = np.clip(slots - (ends - rows[order]), 0, rows[order])
    return [int(taken[owner[order] == place].sum()) for place in range(len(tables))]


def expected_misses(tables: Sequence[Curve], hot_rows: Sequence[int]) -> float:
    """Distinct rows of a step that are expected outside each table's `hot_rows` likeliest."""
    outside = 0.0
    for curve, hot in zip(tables, hot_rows, strict=True):
        inside = np.clip(hot - (np.cumsum(curve.rows) - curve.rows), 0, curve.rows)
        outside += curve.expected_rows - float(curve.use @ inside)
    return outside


def pinned_prefixes(tables: Sequence[Curve], slots: int, steps: int, world_size: int) -> list[int]:
    """How many of each table's most frequent rows may stay in a group's `slots` for good.

    As many as leave room, with `DEVIATIONS` to spare at the fullest home, for the other rows that
    `steps` steps are expected to need.
    """
    low, high = 0, slots
    while low < high:
        middle = (low + high + 1) // 2
        others = steps * expected_misses(tables, hot_prefixes(tables, middle))
        spread = others + (middle if world_size > 1 else 0)  # which home has them is chance
        if middle + others + DEVIATIONS * math.sqrt(spread * world_size) <= slots:
            low = middle
        else:
            high = middle - 1
    return hot_prefixes(tables, low)


# -----------------------------------------------------------------------------
# What is known of one table's lookups: the numbers of a report, made from its counts.

TOP_SHARES = (0.001, 0.01, 0.015, 0.05, 0.1)
"""Shares of a table's rows whose share of the lookups is reported."""


@dataclass(frozen=True)
class TableProfile:
    """One table's lookups.

    `counts`, and their `curve`; `fit` of Zipf's law; `drift` over the parts of the stream;
    `distinct_error`: standard error of the distinct rows, as a share (0: exact); `batch_lookups`:
    lookups of a global batch; `count_bytes`: memory that counting took.
    """

    counts: TableCounts
    curve: CountCurve
    fit: ZipfFit
    drift: Drift
    distinct_error: float
    batch_lookups: float
    count_bytes: int

    @property
    def exact(self) -> bool:
        """Whether every row was counted."""
        return self.counts.ids is None

    @property
    def unused(self) -> bool:
        """Whether nothing looked anything up."""
        return self.counts.lookups == 0

    @property
    def single(self) -> bool:
        """Whether all ids are equal."""
        return self.counts.lookups > 0 and self.counts.distinct == 1 and self.counts.rows > 1

    @property
    def alike(self) -> bool:
        """Whether rows differ by no more than chance."""
        return self.curve.alike(self.counts.rows)

    def top(self, share: float) -> float:
        """Share of the lookups on this share of the table's rows, the most frequent ones."""
        return self.curve.top_share(math.ceil(share * self.counts.rows))

    def distinct_per_batch(self, world_size: int = 1) -> float:
        """Expected distinct rows of a rank's slice of a batch; of the global batch at 1."""
        return self.curve.expected_distinct(self.batch_lookups / world_size)

    def values(self, world_sizes: Sequence[int]) -> dict[str, object]:
        """All of it as JSON values."""
        counts, drift = self.counts, self.drift
        return {
            "feature": counts.feature,
            "rows": counts.rows,
            "lookups": counts.lookups,
            "distinct": counts.distinct,
            "distinct_standard_error": self.distinct_error,
            "exact": self.exact,
            "count_error": counts.error,
            "count_bytes": self.count_bytes,
            "top_shares": {str(share): self.top(share) for share in TOP_SHARES},
            "zipf": vars(self.fit),
            "rows_alike": self.alike,
            "lookups_per_batch": self.batch_lookups,
            "distinct_per_batch": {str(w): self.distinct_per_batch(w) for w in world_sizes},
            "drift": {
                "hot_rows": drift.hot_rows,
                "own": drift.own,
                "next": drift.next,
                "far": drift.far,
                "kept": drift.kept(),
                "kept_far": drift.kept_far(),
            },
        }


def profile_of(counter: TableCounter, samples: int, batch: int) -> TableProfile:
    """The profile of what `counter` counted in `samples` samples, for global batches of `batch`."""
    counts = counter.result()
    seen = getattr(counter, "seen", None)
    error = 0.0 if seen is None or isinstance(seen, Bitmap) else seen.relative_error
    curve = curve_of(counts)
    return TableProfile(
        counts=counts,
        curve=curve,
        fit=fit_zipf(curve, counts.rows),
        drift=counter.drift,
        distinct_error=error,
        batch_lookups=counts.lookups / max(samples, 1) * batch,
        count_bytes=counter.bytes,
    )
