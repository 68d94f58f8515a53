"""Lookups of one table, counted while they stream by: exactly, or in bounded memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distcache.data.samplers import mix64
from distcache.errors import ConfigError, DataError
from distcache.popularity.statistics import TableCounts

# -----------------------------------------------------------------------------
# Counting in bounded memory: frequent items with a known error, and how many ids are distinct.
# All of it takes the distinct ids of many lookups at once, so that NumPy's sorting is the loop.

COUNTER_BYTES = 112
"""Of one counter of a `SketchCounter`: those of the part and of the whole, a lookup that waits, and
the scratch of merging, which is most."""


class FrequentItems:
    """Counters of the most frequent ids, at most `most` (Misra & Gries 1982; merged as in Agarwal
    et al. 2012, "Mergeable summaries").

    Where more ids have one, the (`most` + 1)-th largest counter is taken off each, and those at 0
    leave. `error`: what was taken off so far, at most total / (most + 1): the true count of an id
    lies between its counter and counter + error; an id without a counter has at most `error`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.ids, self.counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.error = 0

    def add(self, ids: np.ndarray, counts: np.ndarray, error: int = 0) -> None:
        """Add int64 `counts` of int64 `ids` (distinct), each of them at most `error` too small."""
        both = np.concatenate((self.ids, ids))
        order = np.argsort(both, kind="stable")  # of two runs that rise this is one merge
        both, counts = both[order], np.concatenate((self.counts, counts))[order]
        del order
        first = np.flatnonzero(np.diff(both, prepend=-1))
        found, total = both[first], np.add.reduceat(counts, first) if len(first) else counts
        del both, counts, first
        if len(found) > self._most:
            last = len(found) - self._most - 1
            least = int(np.partition(total, last)[last])
            kept = total > least
            found, total, error = found[kept], total[kept] - least, error + least
        self.ids, self.counts = found, total
        self.error += error


class Bitmap:
    """How many distinct ids of a table of `rows` rows were seen, in at most so many `bytes`.

    Exactly, by one bit a row, where that fits; else ids share bits by a hash, and their number is
    m ln(m / z) for z of m bits that are not set: linear counting (Whang et al. 1990).
    """

    def __init__(self, rows: int, bytes: int) -> None:
        self.exact = -(-rows // 8) <= bytes
        self._bits = np.zeros(-(-rows // 8) if self.exact else bytes, dtype=np.uint8)
        self.bytes = len(self._bits)

    def add(self, ids: np.ndarray) -> None:
        """See `ids` (int64, inside the table)."""
        if not self.exact:
            ids = (mix64(ids.astype(np.uint64)) % np.uint64(8 * self.bytes)).astype(np.int64)
        np.bitwise_or.at(self._bits, ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8))

    @property
    def _set(self) -> int:
        return int(np.bitwise_count(self._bits).sum(dtype=np.int64))

    def estimate(self) -> int:
        """How many distinct ids were seen; where no bit is left, at least so many."""
        if self.exact:
            return self._set
        bits = 8 * self.bytes
        return round(bits * math.log(bits / max(bits - self._set, 1)))

    @property
    def relative_error(self) -> float:
        """Standard error of the estimate, as a share of it; 0: exact."""
        load = self.estimate() / (8 * self.bytes)
        if self.exact or not load:
            return 0.0
        return math.sqrt((math.expm1(load) - load) / (8 * self.bytes)) / load


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
    pairs = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole > 0]
    return sum(part / whole for part, whole in pairs) / len(pairs) if pairs else None


# -----------------------------------------------------------------------------
# Lookups of one table, counted while they stream by: exactly, or in bounded memory.
#
# The stream comes in parts: what is counted in a part, `close_part` gives and adds to the whole.

DENSE_BYTES = 8
"""Of a row that is counted exactly: a uint32 for the part and one for the whole."""

LEAST_BYTES = 1 << 16
"""The least memory that one table is given, unless it needs less."""

_MOST = np.iinfo(np.uint32).max
_LEAST_COUNTERS = 16


class TableCounter(ABC):
    """What counts the lookups of a table of `rows` rows, read by `feature`.

    `bytes`: memory that it takes.
    """

    bytes: int

    def __init__(self, feature: str, rows: int) -> None:
        self.feature, self.rows = feature, rows
        self.lookups = 0
        self.drift = Drift(rows)
        self._in_part = 0

    @property
    def distinct_error(self) -> float:
        """Standard error of its distinct rows, as a share of them; 0: exact."""
        return 0.0

    def add(self, ids: np.ndarray) -> None:
        """Count `ids` (int64 `[n]`). Raises DataError for one outside the table."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.rows:
            bad = ids[(ids < 0) | (ids >= self.rows)][0]
            raise DataError(
                f"feature {self.feature!r}: id {bad} is not in its table, which has {self.rows} "
                f"rows (ids 0 to {self.rows - 1})"
            )
        self._count(np.ascontiguousarray(ids, dtype=np.int64))
        self.lookups += len(ids)
        self._in_part += len(ids)

    def close_part(self) -> None:
        """End a part of the stream; one without a lookup is none."""
        if self._in_part:
            ids, counts = self._end_part()
            self.drift.add(ids, counts, self._in_part)
            self._in_part = 0

    @abstractmethod
    def _count(self, ids: np.ndarray) -> None:
        """Count ids that are inside the table."""

    @abstractmethod
    def _end_part(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids, ascending, and counts of the part, which is added to the whole."""

    @abstractmethod
    def result(self) -> TableCounts:
        """Counts over all closed parts."""


class DenseCounter(TableCounter):
    """A counter for every row."""

    def __init__(self, feature: str, rows: int) -> None:
        super().__init__(feature, rows)
        self._part = np.zeros(rows, dtype=np.uint32)
        self._whole = np.zeros(rows, dtype=np.uint32)
        self.bytes = DENSE_BYTES * rows

    def _count(self, ids: np.ndarray) -> None:
        if self._part.dtype == np.uint32 and self._in_part + len(ids) > _MOST:
            self._part = self._part.astype(np.int64)
        np.add.at(self._part, ids, self._part.dtype.type(1))  # of another type it is slow

    def _end_part(self) -> tuple[np.ndarray, np.ndarray]:
        if self._whole.dtype == np.uint32 and self.lookups > _MOST:
            self._whole = self._whole.astype(np.int64)
        ids = np.flatnonzero(self._part != 0)  # of bools it is ten times as fast
        counts = self._part[ids].astype(np.int64)
        self._whole += self._part
        self._part.fill(0)
        return ids, counts

    def result(self) -> TableCounts:
        """See `TableCounter.result`."""
        return TableCounts.of(self.feature, self._whole)


class SketchCounter(TableCounter):
    """Counters of the most frequent rows, in about `memory` bytes."""

    def __init__(self, feature: str, rows: int, memory: int) -> None:
        super().__init__(feature, rows)
        self._seen = Bitmap(rows, memory // 2)
        self._most = max(_LEAST_COUNTERS, (memory - self._seen.bytes) // COUNTER_BYTES)
        self.bytes = self._seen.bytes + COUNTER_BYTES * self._most
        self._part, self._whole = FrequentItems(self._most), FrequentItems(self._most)
        self._waiting: list[np.ndarray] = []
        self._held = 0  # lookups that wait

    def _count(self, ids: np.ndarray) -> None:
        # Sorting as many lookups as there are counters makes merging them cheap for each.
        for start in range(0, len(ids), self._most):
            self._waiting.append(ids[start : start + self._most].copy())
            self._held += len(self._waiting[-1])
            if self._held >= self._most:
                self._merge()

    def _merge(self) -> None:
        """Count the lookups that wait."""
        if self._waiting:
            ids, counts = np.unique(np.concatenate(self._waiting), return_counts=True)
            self._waiting, self._held = [], 0
            self._seen.add(ids)
            self._part.add(ids, counts)

    def _end_part(self) -> tuple[np.ndarray, np.ndarray]:
        self._merge()
        ids, counts = self._part.ids, self._part.counts
        self._whole.add(ids, counts, self._part.error)
        self._part.clear()
        return ids, counts

    @property
    def distinct_error(self) -> float:
        """See `TableCounter`."""
        return self._seen.relative_error

    def result(self) -> TableCounts:
        """See `TableCounter.result`."""
        ids, counts = self._whole.ids, self._whole.counts
        distinct = min(max(self._seen.estimate(), len(ids)), self.rows, self.lookups)
        return TableCounts(
            self.feature, self.rows, self.lookups, distinct, counts, ids, self._whole.error
        )


def make_counters(
    features: Sequence[str], table_rows: Sequence[int], memory: int
) -> list[TableCounter]:
    """A counter for each table, all together in about `memory` bytes.

    The smallest tables are counted exactly, as many as leave the others a fair share; where all
    fit, all are exact. Raises ConfigError where the memory is too little for sketches too.
    """
    counters: dict[int, TableCounter] = {}
    left, todo = memory, sorted(range(len(table_rows)), key=lambda table: table_rows[table])
    for done, table in enumerate(todo):
        rows, share = table_rows[table], left // (len(todo) - done)
        exact = DENSE_BYTES * rows
        if exact > share and share < LEAST_BYTES:
            least = sum(min(DENSE_BYTES * rows, LEAST_BYTES) for rows in table_rows)
            raise ConfigError(
                f"analyze.memory={memory} is too little to count {len(table_rows)} tables: give at "
                f"least {least} bytes; {DENSE_BYTES * sum(table_rows)} count every row exactly"
            )
        if exact <= share:
            counters[table] = DenseCounter(features[table], rows)
        else:
            counters[table] = SketchCounter(features[table], rows, share)
        left -= counters[table].bytes
    return [counters[table] for table in range(len(table_rows))]
