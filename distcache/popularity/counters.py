"""Lookups of one table, counted while they stream by: exactly, or in bounded memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distcache.errors import ConfigError, DataError
from distcache.popularity import loops
from distcache.popularity.statistics import TableCounts

# -----------------------------------------------------------------------------
# Counting in bounded memory: frequent items with a known error, and how many ids are distinct.

_FULL = 0.75
"""Share of the places of a sketch's hash table that may be in use."""

ENTRY_BYTES = 40
"""Of one place of a `FrequentItems`: its key and counter, and scratch while it is purged."""

_NO_WEIGHTS = np.empty(0, dtype=np.int64)


class FrequentItems:
    """Counters of the most frequent ids (Anderson et al. 2017, "A high-performance algorithm for
    identifying frequent items in data streams", as in Apache DataSketches).

    A hash table of `places` (a power of two) counters. When three quarters are in use, the median
    of all counters is taken off each, and those at 0 leave, so at least half do. `error`: what was
    taken off so far, at most about 2.7 x total / places: the true count of an id lies between its
    counter and counter + error; an id without a counter has at most `error`. (The paper takes the
    median of a sample; that of all counters costs one pass as well and bounds the error surely.)
    """

    def __init__(self, places: int) -> None:
        if places < 4 or places & (places - 1):
            raise ValueError(f"{places} places: give a power of two of at least 4")
        self._keys = np.full(places, -1, dtype=np.int64)
        self._values = np.zeros(places, dtype=np.int64)
        self._limit = int(_FULL * places)
        self._active = 0
        self.error = 0

    def add(self, ids: np.ndarray, weights: np.ndarray = _NO_WEIGHTS) -> None:
        """Count `ids` (int64 `[n]`, not negative), once or `weights` (int64 `[n]`) times each."""
        start = 0
        while start < len(ids):
            done, self._active = loops.offer(
                ids[start:], weights[start:], self._keys, self._values, self._active, self._limit
            )
            start += done
            if start < len(ids):  # the table is full
                self._purge()

    def merge(self, other: FrequentItems) -> None:
        """Count what `other` counted; its error adds to this one's."""
        ids, counts = other.items()
        self.add(ids, counts)
        self.error += other.error

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids, ascending, and their counters; int64 `[k]` each."""
        used = np.flatnonzero(self._keys >= 0)
        used = used[np.argsort(self._keys[used])]
        return self._keys[used], self._values[used]

    def clear(self) -> None:
        """Forget everything."""
        self._keys.fill(-1)
        self._values.fill(0)
        self._active = self.error = 0

    def _purge(self) -> None:
        """Take the median off all counters, and drop those that have none left."""
        ids, counts = self.items()
        median = int(np.partition(counts, len(counts) // 2)[len(counts) // 2])
        keep, error = counts > median, self.error + median
        self.clear()
        self.error = error
        _, self._active = loops.offer(
            ids[keep], counts[keep] - median, self._keys, self._values, 0, self._limit
        )


class Bitmap:
    """Distinct ids of a table of `rows` rows, exactly: one bit a row."""

    relative_error = 0.0

    def __init__(self, rows: int) -> None:
        self._bits = np.zeros(self.bytes_for(rows), dtype=np.uint8)
        self._distinct = 0

    @staticmethod
    def bytes_for(rows: int) -> int:
        """What a bitmap of `rows` rows takes."""
        return -(-rows // 8)

    def add(self, ids: np.ndarray) -> None:
        """See `ids` (int64, inside the table)."""
        self._distinct += loops.mark(ids, self._bits)

    def estimate(self) -> int:
        """How many distinct ids were seen."""
        return self._distinct


class HyperLogLog:
    """About how many distinct ids were seen, in 2^p bytes (Flajolet et al. 2007), with Ertl's
    improved estimator (2017, arXiv:1702.01284), which has no bias to correct at any count.

    `relative_error`: its standard error, 1.04 / sqrt(2^p), as a share of the estimate.
    """

    def __init__(self, bits: int) -> None:
        if not 4 <= bits <= 20:
            raise ValueError(f"{bits} bits: give 4 to 20")
        self._bits = bits
        self._registers = np.zeros(1 << bits, dtype=np.uint8)

    @property
    def relative_error(self) -> float:
        """See the class."""
        return 1.04 / math.sqrt(len(self._registers))

    def add(self, ids: np.ndarray) -> None:
        """See `ids` (int64)."""
        loops.observe(ids, self._registers)

    def estimate(self) -> int:
        """About how many distinct ids were seen."""
        m, last = len(self._registers), 64 - 11 - self._bits
        held = np.bincount(self._registers, minlength=last + 2).astype(np.float64)
        total = m * _tau(1 - held[last + 1] / m)
        for rank in range(last, 0, -1):
            total = 0.5 * (total + held[rank])
        total += m * _sigma(held[0] / m)
        return round(m * m / (2 * math.log(2)) / total) if math.isfinite(total) else 0


def _sigma(x: float) -> float:
    """Ertl's correction for registers that are still 0; infinite where all are."""
    if x == 1.0:
        return math.inf
    y, total, before = 1.0, x, -1.0
    while total != before:
        x *= x
        before = total
        total += x * y
        y += y
    return total


def _tau(x: float) -> float:
    """Ertl's correction for registers that are full."""
    if x in (0.0, 1.0):
        return 0.0
    y, total, before = 1.0, 1 - x, -1.0
    while total != before:
        x = math.sqrt(x)
        before = total
        y *= 0.5
        total -= (1 - x) ** 2 * y
    return total / 3


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
_HLL_BITS = 14


class TableCounter(ABC):
    """What counts the lookups of a table of `rows` rows, read by `feature`."""

    def __init__(self, feature: str, rows: int) -> None:
        self.feature, self.rows = feature, rows
        self.lookups = 0
        self.drift = Drift(rows)
        self._in_part = 0

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory that it takes."""

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

    @property
    def bytes(self) -> int:
        """See `TableCounter.bytes`."""
        return self._part.nbytes + self._whole.nbytes

    def _count(self, ids: np.ndarray) -> None:
        if self._part.dtype == np.uint32 and self._in_part + len(ids) > _MOST:
            self._part = self._part.astype(np.int64)
        loops.count_rows(ids, self._part)

    def _end_part(self) -> tuple[np.ndarray, np.ndarray]:
        if self._whole.dtype == np.uint32 and self.lookups > _MOST:
            self._whole = self._whole.astype(np.int64)
        most = min(self.rows, self._in_part)
        ids, counts = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        found = loops.take_counts(self._part, self._whole, ids, counts)
        return ids[:found], counts[:found]

    def result(self) -> TableCounts:
        """See `TableCounter.result`."""
        distinct = int(np.count_nonzero(self._whole))
        return TableCounts(self.feature, self.rows, self.lookups, distinct, self._whole)


class SketchCounter(TableCounter):
    """Counters of the most frequent rows, in about `memory` bytes."""

    def __init__(self, feature: str, rows: int, memory: int) -> None:
        super().__init__(feature, rows)
        bitmap = Bitmap.bytes_for(rows)
        self.seen: Bitmap | HyperLogLog
        if bitmap <= memory // 2:
            self.seen, left = Bitmap(rows), memory - bitmap
        else:
            self.seen, left = HyperLogLog(_HLL_BITS), memory - (1 << _HLL_BITS)
        places = 1 << max(4, int(math.log2(max(left, 1) / (2 * ENTRY_BYTES))))
        self._bytes = memory - left + 2 * ENTRY_BYTES * places
        self._part, self._whole = FrequentItems(places), FrequentItems(places)

    @property
    def bytes(self) -> int:
        """See `TableCounter.bytes`; with the scratch of purging."""
        return self._bytes

    def _count(self, ids: np.ndarray) -> None:
        self._part.add(ids)
        self.seen.add(ids)

    def _end_part(self) -> tuple[np.ndarray, np.ndarray]:
        self._whole.merge(self._part)
        items = self._part.items()
        self._part.clear()
        return items

    def result(self) -> TableCounts:
        """See `TableCounter.result`."""
        ids, counts = self._whole.items()
        distinct = min(max(self.seen.estimate(), len(ids)), self.rows, self.lookups)
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
