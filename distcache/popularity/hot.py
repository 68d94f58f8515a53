"""The hot set: the rows that stay cached, so that samples of hot rows alone move nothing.

FAE (Adnan et al., VLDB 2022) trains such samples apart from the others. There hot ids were
float32, which has no distinct numbers above 2^24; here ids are int64, and a row takes one bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.data.batch import JaggedIds
from distcache.data.hashing import digest_of
from distcache.popularity.statistics import Statistics

_MARGIN, _MOST_MARGIN, _HOMES = 4.0, 0.1, 8
"""Slots left for the uneven share of hot rows that homes have: 4 deviations at 8 homes, at most a
tenth of the slots. The same whatever the number of ranks, and so is the hot set."""

_GRID = 65
"""Points at which numbers of hot rows are tried first."""

COLD_STEPS = (3, 2, 1)
"""Cold batches whose cold rows find room beside the hot rows: those of a step, of the one that
movement runs ahead, and one to spare; fewer where the cache is too small for that."""


class HotSet:
    """The `hot_rows[t]` most frequent rows of each table, one bit a row (V / 8 bytes)."""

    def __init__(self, statistics: Statistics, hot_rows: Sequence[int]) -> None:
        rows = np.array(statistics.table_rows, dtype=np.int64)
        self.table_rows = statistics.table_rows
        self._offsets = np.concatenate(([0], np.cumsum((rows + 7) // 8 * 8)))
        self._bits = np.zeros(int(self._offsets[-1]) // 8, dtype=np.uint8)
        counts = []
        starts = (self._offsets[:-1] // 8).tolist()
        for table, start, count in zip(statistics.tables, starts, hot_rows, strict=True):
            chosen = table.hottest(count)
            counts.append(len(chosen))
            mask = np.zeros((table.rows + 7) // 8 * 8, dtype=bool)
            mask[chosen] = True
            packed = np.packbits(mask, bitorder="little")
            self._bits[start : start + len(packed)] = packed
        self.hot_rows: tuple[int, ...] = tuple(counts)

    @property
    def rows(self) -> int:
        """Hot rows of all tables."""
        return sum(self.hot_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._bits.nbytes

    @property
    def digest(self) -> str:
        """A digest of which rows are hot."""
        return digest_of(self._bits)

    @property
    def named(self) -> str:
        """How many rows are hot, and which, in short."""
        return f"{self.rows} ({self.digest[:12]})"

    def has(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Whether each of `ids` int64 `[n]` is a hot row of `table`; bool.

        An id outside the table is not: whoever checks the batch says what becomes of it.
        """
        inside = ids.view(np.uint64) < np.uint64(self.table_rows[table])
        at = np.where(inside, ids, 0) + self._offsets[table]
        bits = self._bits[at >> 3] >> (at & 7).astype(np.uint8)
        return (bits & 1).astype(bool) & inside

    def samples(self, ids: JaggedIds) -> np.ndarray:
        """Which of the samples of `ids` look up hot rows alone; bool `[b]`.

        A sample whose bags are all empty does. Feature f reads table f.
        """
        values, offsets = ids.values.numpy(), ids.offsets.numpy()
        values = values.astype(np.int64, copy=False)
        hot = np.ones(ids.batch_size, dtype=bool)
        for feature in range(len(ids.features)):
            first = feature * ids.batch_size
            edges = offsets[first : first + ids.batch_size + 1]
            found = self.has(feature, values[edges[0] : edges[-1]])
            if (np.diff(edges) == 1).all():
                hot &= found
                continue
            cold = np.concatenate(([0], np.cumsum(~found)))  # cold ids before each place
            hot &= np.diff(cold[edges - edges[0]]) == 0
        return hot


@dataclass(frozen=True)
class HotCurve:
    """How many rows of a table were looked up how often. `counts` int64, distinct, descending;
    `rows` int64: rows with each; `per_sample`: lookups of the table in a sample."""

    counts: np.ndarray
    rows: np.ndarray
    per_sample: float

    def below(self, hot: int) -> np.ndarray:
        """Rows with each count beside the `hot` most frequent ones."""
        return np.clip(np.cumsum(self.rows) - hot, 0, self.rows)


def curve_of(statistics: Statistics, table: int) -> HotCurve:
    """The curve of one table; rows that were never looked up are left out."""
    own = statistics.tables[table]
    per_sample = own.lookups / max(statistics.samples, 1)
    return HotCurve(*own.histogram(), per_sample)


def greedy(curves: Sequence[HotCurve], rows: int) -> list[int]:
    """How many rows of each table are among the `rows` most frequent of all of them; of equally
    frequent ones those of earlier tables come first."""
    counts = np.concatenate([curve.counts for curve in curves])
    order = np.argsort(-counts, kind="stable")
    ends = np.cumsum(np.concatenate([curve.rows for curve in curves])[order])
    if rows <= 0 or not len(ends):
        return [0] * len(curves)
    least = counts[order[min(int(np.searchsorted(ends, rows)), len(ends) - 1)]]
    chosen = [int(curve.rows[curve.counts > least].sum()) for curve in curves]
    rest = rows - sum(chosen)
    for place, curve in enumerate(curves):
        equal = min(int(curve.rows[curve.counts == least].sum()), rest)
        chosen[place] += equal
        rest -= equal
    return chosen


def rows_that_fit(curves: Sequence[HotCurve], slots: int, batch: int) -> list[int]:
    """Hot rows of each of the tables that share `slots` slots, beside the rows of cold batches.

    `batch`: samples of a global batch. Taken greedily by frequency, as many as leave room for the
    cold rows that `COLD_STEPS` cold batches are expected to look up; none where none fits.
    """
    margin = min(_MARGIN * math.sqrt(_HOMES * slots), _MOST_MARGIN * slots)
    room = int(slots - margin)
    distinct = sum(int(curve.rows.sum()) for curve in curves)
    if distinct <= room:
        return greedy(curves, distinct)
    for steps in COLD_STEPS:

        def fits(rows: int, steps: int = steps) -> bool:
            cold = expected_cold(curves, greedy(curves, rows), batch)
            return rows + steps * cold <= room

        # More hot rows leave fewer cold ones: few may not fit where more do. So the most are found
        # on a grid, from above, and then between two of its points.
        grid = np.linspace(min(room, distinct), 0, _GRID, dtype=np.int64)[:-1].tolist()
        low = next((rows for rows in grid if fits(rows)), 0)
        high = min((rows for rows in grid if rows > low), default=low)
        while low and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low:
            return greedy(curves, low)
    return [0] * len(curves)


def expected_cold(curves: Sequence[HotCurve], hot_rows: Sequence[int], batch: int) -> float:
    """About how many distinct cold rows a cold batch of `batch` samples looks up.

    All lookups of a cold row come in cold samples. Of these there are as many as if the lookups of
    a sample were cold independently of one another, and at least as many as the table with the
    most cold lookups says.
    """
    cold = [curve.below(hot) for curve, hot in zip(curves, hot_rows, strict=True)]
    pairs = list(zip(curves, cold, strict=True))
    least, all_samples, hot_share = 0.0, 0.0, 1.0
    for curve, rows in pairs:
        lookups, colder = (float((curve.counts * of).sum()) for of in (curve.rows, rows))
        if lookups:
            least = max(least, colder / max(1.0, curve.per_sample))
            all_samples = max(all_samples, lookups / curve.per_sample)
            hot_share *= (1 - colder / lookups) ** curve.per_sample
    samples = max(least, all_samples * (1 - hot_share))
    if samples < 1:
        return 0.0
    share = min(batch, samples) / samples
    return float(sum((rows * -np.expm1(-c.counts * share)).sum() for c, rows in pairs))
