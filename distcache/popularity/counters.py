"""Lookups of one table, counted while they stream by: exactly, or in bounded memory.

The stream comes in parts: what is counted in a part, `close_part` gives and adds to the whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from distcache.errors import ConfigError, DataError
from distcache.popularity.bodies import bodies
from distcache.popularity.drift import Drift
from distcache.popularity.sketch import ENTRY_BYTES, Bitmap, FrequentItems, HyperLogLog
from distcache.popularity.statistics import TableCounts

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
        bodies().count_rows(ids, self._part)

    def _end_part(self) -> tuple[np.ndarray, np.ndarray]:
        if self._whole.dtype == np.uint32 and self.lookups > _MOST:
            self._whole = self._whole.astype(np.int64)
        most = min(self.rows, self._in_part)
        ids, counts = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        found = bodies().take_counts(self._part, self._whole, ids, counts)
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
