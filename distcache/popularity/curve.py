"""Lookups counted while they stream by, and what follows from counts alone.

The first part counts the lookups of a table. A curve then says how many rows of a table were
looked up how often. It has thousands of entries where a table has millions of rows, and all that
the package expects before it trains comes from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from distcache.errors import DataError
from distcache.popularity.statistics import TableCounts

# -----------------------------------------------------------------------------
# How the most frequent rows of one part of a stream serve the parts after it.

HOT_SHARE, SEEN_SHARE = 0.01, 0.1
"""A hot set is the first share of the table's rows, at most the second one of those that the first
part looks up (the others are there by chance), and at least one row."""


@dataclass
class Drift:
    """Shares of the lookups of consecutive parts that fall on hot sets, for a table of `rows`.

    `own[i]`: of part i, on its own hot set; `next[i]`: of part i + 1, on that of part i; `far[i]`:
    of part i, on that of the first part. `hot_rows`: rows of a hot set. Popularity that stays as it
    is gives `next` and `far` alike; both are a little below `own`, as a hot set fits its own part's
    chance as well.
    """

    rows: int
    own: list[float] = field(default_factory=list)
    next: list[float] = field(default_factory=list)
    far: list[float] = field(default_factory=list)
    hot_rows: int = 0
    _first: np.ndarray | None = None
    _last: np.ndarray | None = None

    def add(self, ids: np.ndarray, counts: np.ndarray, lookups: int) -> None:
        """The next part: distinct `ids`, ascending, their counts, and all its lookups."""
        if not self.hot_rows:
            most = min(HOT_SHARE * self.rows, SEEN_SHARE * len(ids))
            self.hot_rows = max(1, math.ceil(most))
        hot = ids
        if len(ids) > self.hot_rows:
            hot = np.sort(ids[np.argpartition(-counts, self.hot_rows - 1)[: self.hot_rows]])
        self.own.append(_share(hot, ids, counts, lookups))
        if self._last is not None:
            self.next.append(_share(self._last, ids, counts, lookups))
        if self._first is None:
            self._first = hot
        self.far.append(_share(self._first, ids, counts, lookups))
        self._last = hot

    def kept(self) -> float | None:
        """What the hot set of one part serves in the next, as a share of what the next part's own
        serves; the mean over the parts, None for fewer than two."""
        return _ratio(self.next, self.own[1:])

    def kept_far(self) -> float | None:
        """The same of the first part's hot set in the last part."""
        return _ratio(self.far[-1:], self.own[-1:]) if len(self.own) > 1 else None


def _share(hot: np.ndarray, ids: np.ndarray, counts: np.ndarray, lookups: int) -> float:
    """Share of the lookups on `hot` (ascending)."""
    if not len(ids):
        return 0.0
    at = np.minimum(np.searchsorted(ids, hot), len(ids) - 1)
    return float(counts[at[ids[at] == hot]].sum()) / lookups


def _ratio(parts: list[float], wholes: list[float]) -> float | None:
    shares = [part / whole for part, whole in zip(parts, wholes, strict=True) if whole > 0]
    return sum(shares) / len(shares) if shares else None


# -----------------------------------------------------------------------------
# Lookups of one table, counted exactly.
#
# The stream comes in parts: what is counted in a part, `close_part` gives and adds to the whole.

COUNT_BYTES = 8
"""Of a row: a uint32 for the part and one for the whole."""

_MOST = np.iinfo(np.uint32).max


class TableCounter:
    """Counts the lookups of a table of `rows` rows, read by `feature`."""

    def __init__(self, feature: str, rows: int) -> None:
        self.feature, self.rows, self.lookups = feature, rows, 0
        self.drift = Drift(rows)
        self._part = np.zeros(rows, dtype=np.uint32)
        self._whole = np.zeros(rows, dtype=np.uint32)
        self._in_part = 0

    def add(self, ids: np.ndarray) -> None:
        """Count `ids` (int64 `[n]`). Raises DataError for one outside the table."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.rows:
            bad = ids[(ids < 0) | (ids >= self.rows)][0]
            raise DataError(
                f"feature {self.feature!r}: id {bad} is not in its table, which has {self.rows} "
                f"rows (ids 0 to {self.rows - 1})"
            )
        if self._part.dtype == np.uint32 and self._in_part + len(ids) > _MOST:
            self._part = self._part.astype(np.int64)
        np.add.at(self._part, ids, self._part.dtype.type(1))  # of another type it is slow
        self.lookups += len(ids)
        self._in_part += len(ids)

    def close_part(self) -> None:
        """End a part of the stream; one without a lookup is none."""
        if not self._in_part:
            return
        if self._whole.dtype == np.uint32 and self.lookups > _MOST:
            self._whole = self._whole.astype(np.int64)
        ids = np.flatnonzero(self._part != 0)  # of bools it is ten times as fast
        self.drift.add(ids, self._part[ids].astype(np.int64), self._in_part)
        self._whole += self._part
        self._part.fill(0)
        self._in_part = 0

    def result(self) -> TableCounts:
        """Counts of all parts, of which the last ends here."""
        self.close_part()
        return TableCounts.of(self.feature, self._whole)


# -----------------------------------------------------------------------------
# Room: does a step fit the slots?
#
# Rows come, and fall to homes, nearly independently, so their number varies by at most its own
# square root, and the room for them is the mean and some standard deviations more. How many is the
# one thing in which those who ask differ.

SURE = 6.0
"""Standard deviations where slots and buffers are sized: no step of a run exceeds them."""

LIKELY = 3.0
"""Where a warning depends on it: the fullest home of the largest of many steps."""


def room_for(mean: float, variance: float, deviations: float = SURE) -> float:
    """Rows that a step hardly ever exceeds, which has `mean` of them, with this `variance`."""
    return mean + deviations * math.sqrt(variance)


def room_of(chances: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> float:
    """`room_for` the rows of a step, of which each of `rows[t][i]` comes with `chances[t][i]`.

    The variance is that of rows that come independently, an upper bound: lookups are shared out,
    which binds rows negatively.
    """
    pairs = list(zip(chances, rows, strict=True))
    mean = sum(float(q @ count) for q, count in pairs)
    return room_for(mean, sum(float((q * (1 - q)) @ count) for q, count in pairs))


ALIKE = 0.02
"""Below this `Curve.spread` rows count as alike (it is 0.02 at a Zipf exponent of 0.14)."""


@dataclass(frozen=True)
class Curve:
    """`rows[i]` of a table's `table_rows` rows (V) have the count `counts[i]` each.

    Float64 `[k]`; counts fall, none are 0. `lookups`: all lookups that were counted (N), in
    `samples` samples. Of a law that is known, `lookups` is infinite, and `counts` are the chances
    of rows in one lookup of a stream without an end.
    """

    counts: np.ndarray
    rows: np.ndarray
    lookups: float
    table_rows: int
    samples: int = 1

    @classmethod
    def of(cls, table: TableCounts, samples: int = 1) -> Curve:
        """The curve of a table's counts."""
        values, rows = table.histogram()
        counts, number = values.astype(np.float64), rows.astype(np.float64)
        return cls(counts, number, float(table.lookups), table.rows, samples)

    @cached_property
    def distinct(self) -> float:
        """Rows that were looked up at all."""
        return float(self.rows.sum())

    @property
    def per_sample(self) -> float:
        """Lookups of a sample, on average."""
        return self.lookups / max(self.samples, 1)

    def held(self, values: np.ndarray, rows: float) -> float:
        """The sum of `values` (float64 `[k]`: of a row of each entry) over the `rows` most frequent
        rows."""
        ends, sums = (np.append(0.0, np.cumsum(of)) for of in (self.rows, values * self.rows))
        return float(np.interp(rows, ends, sums))

    def top(self, rows: float) -> float:
        """Share of the lookups that fall on the `rows` most frequent rows; 0 without lookups."""
        return self.held(self.counts, rows) / self.lookups if self.lookups else 0.0

    def below(self, hot: float) -> np.ndarray:
        """Rows of each entry beside the `hot` most frequent ones; float64 `[k]`."""
        return np.clip(np.cumsum(self.rows) - hot, 0, self.rows)

    def touched(self, lookups: float) -> np.ndarray:
        """For each entry, the probability q that a row of it is among `lookups` lookups (n).

        These are drawn from the N that were counted, without putting any back: as a batch is from
        an epoch. 1 - C(N - c, n) / C(N, n), where with m = min(c, n) and M = max(c, n) the quotient
        is (1 - M / (N - (m-1)/2))^m to second order, and exactly for m = 1. For a stream without an
        end it estimates without bias what 1 - (1 - p)^n would be with the unknown p (Hurlbert
        1971), where p = c / N would be biased by rows that the counts have not seen: they need no
        guess. Below one lookup q is that share of what one lookup has; beyond all N it is 1 for
        every row that they named, a lower bound, for some were not.
        """
        if math.isinf(self.lookups):
            with np.errstate(divide="ignore", invalid="ignore"):
                found = -np.expm1(lookups * np.log1p(-self.counts))
            return found if lookups > 0 else np.zeros_like(self.counts)
        if lookups < 1:
            return lookups * self.counts / max(self.lookups, 1.0)
        drawn = min(lookups, self.lookups)
        few, many = np.minimum(self.counts, drawn), np.maximum(self.counts, drawn)
        left = np.maximum(self.lookups - np.maximum(few - 1, 0) / 2, 1.0)
        with np.errstate(divide="ignore"):
            return -np.expm1(few * np.log1p(-np.minimum(many / left, 1.0)))

    def expected(self, lookups: float) -> float:
        """Distinct rows that so many lookups in random order are expected to name."""
        return float(self.touched(lookups) @ self.rows)

    @property
    def spread(self) -> float:
        """Squared coefficient of variation of the popularity of the table's rows, without what
        chance adds to their counts: 0 where all are alike, about V where one has all."""
        mean = self.lookups / self.table_rows
        if mean == 0 or self.table_rows < 2:
            return 0.0
        squares = float(self.counts**2 @ self.rows) - self.table_rows * mean**2
        return max(0.0, (squares / (self.table_rows - 1) - mean) / mean**2)

    @property
    def alike(self) -> bool:
        """Whether the table's rows differ by no more than chance: their spread is near 0, and
        enough lookups were counted to say so. A table of one row is none."""
        if self.table_rows < 2 or not self.lookups:
            return False
        # the standard error of `spread`
        chance = math.sqrt(2 / self.table_rows) * self.table_rows / self.lookups
        return self.spread < ALIKE and 2 * chance < ALIKE


# -----------------------------------------------------------------------------
# The curves of several tables: which of their rows come first.


def top_rows(
    keys: Sequence[np.ndarray], rows: Sequence[np.ndarray], count: float, shared: bool = False
) -> list[Any]:
    """How many of the `count` rows with the highest keys each table has, whole numbers.

    `keys`, `rows` float64 `[k]` of each table: of its rows `rows[i]` have the key `keys[i]`. Of
    rows with one key those of earlier tables come first; `shared`: each table has its part of them,
    a fraction.
    """
    key, number = np.concatenate(keys), np.concatenate(rows)
    table = np.repeat(np.arange(len(keys)), [len(own) for own in keys])
    order = np.argsort(-key, kind="stable")
    before = np.cumsum(number[order]) - number[order]
    taken = np.zeros(len(key))
    taken[order] = np.clip(count - before, 0.0, number[order])
    if shared and taken.any():
        last = np.where(key == key[taken > 0].min(), number, 0.0)
        taken = np.where(last > 0, last * (taken[last > 0].sum() / last.sum()), taken)
    found = np.bincount(table, weights=taken, minlength=len(keys))
    return found.tolist() if shared else found.astype(np.int64).tolist()


def most_frequent(curves: Sequence[Curve], rows: float, shared: bool = False) -> list[Any]:
    """How many of the `rows` most frequent rows of all tables each has (`top_rows`)."""
    return top_rows([c.counts for c in curves], [c.rows for c in curves], rows, shared)


# -----------------------------------------------------------------------------
# The exponent of Zipf's law, k-th row ~ k^-a, that the counts of a table follow, and its error.

_SURE = 30
"""Least count of a row in the fit: its own chance is then below a fifth."""
_LEAST_ROWS = 20
_MOST_ROWS = 1_000_000
_INNER = 0.5
"""At most this share of the rows that were looked up, so that none is at the table's end."""


@dataclass(frozen=True)
class ZipfFit:
    """`exponent` a with its standard error, from the `rows` most frequent rows; None where they
    are too few, or their counts do not fall."""

    exponent: float | None
    error: float | None
    rows: int


def fit_zipf(curve: Curve) -> ZipfFit:
    """Fit the curve of a table.

    Rank regression: least squares of log(rank - 1/2) on log(count) has slope -1/a, with standard
    error (1/a) sqrt(2 / rows) (Gabaix & Ibragimov 2011, "Rank - 1/2"). Over the rows with at least
    30 lookups, at most the more frequent half of those looked up: chance blurs the counts of the
    others, and sorting then makes them look steeper. Rows whose counts differ by no more than
    chance have the exponent 0.
    """
    rows = int(curve.rows[curve.counts >= _SURE].sum())
    rows = min(rows, _MOST_ROWS, int(curve.distinct * _INNER))
    if curve.alike:
        return ZipfFit(0.0, math.sqrt(ALIKE), curve.table_rows)
    if rows < _LEAST_ROWS:
        return ZipfFit(None, None, rows)
    sizes = np.repeat(np.log(curve.counts), curve.rows.astype(np.int64))[:rows]
    ranks = np.log(np.arange(1, rows + 1) - 0.5)
    sizes = sizes - sizes.mean()
    slope = -float(sizes @ (ranks - ranks.mean())) / max(float(sizes @ sizes), 1e-300)
    if slope <= 0:  # all these rows have the same count
        return ZipfFit(None, None, rows)
    return ZipfFit(1 / slope, math.sqrt(2 / rows) / slope, rows)


# -----------------------------------------------------------------------------
# What is known of one table's lookups: the numbers of a report, made from its counts.

TOP_SHARES = (0.001, 0.01, 0.015, 0.05, 0.1)
"""Shares of a table's rows whose share of the lookups is reported."""


@dataclass(frozen=True)
class TableProfile:
    """One table's lookups: `counts` in so many `samples`, for global batches of `batch` samples;
    `drift` over the parts of the stream."""

    counts: TableCounts
    samples: int
    batch: int
    drift: Drift

    @cached_property
    def curve(self) -> Curve:
        """That of the counts."""
        return Curve.of(self.counts, self.samples)

    @cached_property
    def fit(self) -> ZipfFit:
        """Zipf's law."""
        return fit_zipf(self.curve)

    @property
    def batch_lookups(self) -> float:
        """Lookups of a global batch."""
        return self.curve.per_sample * self.batch

    @property
    def unused(self) -> bool:
        """Whether nothing looked anything up."""
        return self.counts.lookups == 0

    @property
    def single(self) -> bool:
        """Whether all ids are equal."""
        return self.counts.lookups > 0 and self.counts.distinct == 1 and self.counts.rows > 1

    def top(self, share: float) -> float:
        """Share of the lookups on this share of the table's rows, the most frequent ones."""
        return self.curve.top(math.ceil(share * self.counts.rows))

    @property
    def distinct_per_batch(self) -> float:
        """Expected distinct rows of a global batch."""
        return self.curve.expected(self.batch_lookups)

    def values(self) -> dict[str, object]:
        """All of it as JSON values."""
        counts, drift = self.counts, self.drift
        return {
            "feature": counts.feature,
            "rows": counts.rows,
            "lookups": counts.lookups,
            "distinct": counts.distinct,
            "top_shares": {str(share): self.top(share) for share in TOP_SHARES},
            "zipf": vars(self.fit),
            "rows_alike": self.curve.alike,
            "lookups_per_batch": self.batch_lookups,
            "distinct_per_batch": self.distinct_per_batch,
            "drift": {name: getattr(drift, name) for name in ("hot_rows", "own", "next", "far")}
            | {"kept": drift.kept(), "kept_far": drift.kept_far()},
        }
