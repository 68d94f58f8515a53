"""Counting in bounded memory: frequent items with a known error, and how many ids are distinct."""

from __future__ import annotations

import math

import numpy as np

from distcache.popularity.bodies import bodies

_CHUNK = 1 << 16
"""Ids that a sketch takes at once: bounds the scratch of the NumPy bodies."""

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
        start, stop = 0, 0
        while start < len(ids):
            stop = min(start + _CHUNK, len(ids))
            done, self._active = bodies().offer(
                ids[start:stop],
                weights[start:stop],
                self._keys,
                self._values,
                self._active,
                self._limit,
            )
            start += done
            if start < stop:
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
        _, self._active = bodies().offer(
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
        for start in range(0, len(ids), _CHUNK):
            self._distinct += bodies().mark(ids[start : start + _CHUNK], self._bits)

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
        for start in range(0, len(ids), _CHUNK):
            bodies().observe(ids[start : start + _CHUNK], self._registers)

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
