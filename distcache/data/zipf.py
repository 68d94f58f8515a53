"""Zipf-distributed ids by a closed-form inverse, for tables of any size and any exponent >= 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distcache.data.hashing import key_of
from distcache.errors import ConfigError

HEAD_RANKS = 4096
"""Ranks that expectations count one by one; the tail beyond them is binned logarithmically."""
_BIN_RATIO = 1.01


class ZipfTables:
    """Popularity of the rows of T tables: rank k in [0, N) has the mass of x^-a on [k+.5, k+1.5).

    That integrated distribution follows (k + 1)^-a closely and has a closed-form inverse, for
    a = 0 (uniform) and a = 1 too. Ranks become ids by an affine bijection of each table's own,
    so that popular ids lie scattered and differ between tables.
    """

    def __init__(self, table_rows: Sequence[int], exponent: float, seed: int) -> None:
        if not (math.isfinite(exponent) and exponent >= 0):
            raise ConfigError(f"data.zipf={exponent}: it must be a finite number >= 0")
        self.rows = np.array(table_rows, dtype=np.uint64)
        self._power = 1.0 - exponent
        spans = np.log(2.0 * self.rows + 1.0)
        # Inverse: x = .5 * (1 + u * scale)^(1 / power); at power 0, x = .5 * exp(u * scale).
        self._scale = spans if self._power == 0 else np.expm1(self._power * spans)
        maps = [_affine(int(n), key_of(seed, index)) for index, n in enumerate(table_rows)]
        self._multiplier = np.array([multiplier for multiplier, _ in maps], dtype=np.uint64)
        self._shift = np.array([shift for _, shift in maps], dtype=np.uint64)

    def draw_ids(self, uniforms: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Ids int64 `[n]` from `uniforms` float64 `[n]`, the first `counts[0]` of table 0, ...

        float64 throughout: float32 has no distinct numbers for ranks above 2^24.
        """
        values = uniforms * np.repeat(self._scale, counts)
        if self._power != 0:
            np.log1p(values, out=values)
            values *= 1.0 / self._power
        np.exp(values, out=values)
        values -= 1.0
        values *= 0.5
        # Rounding may reach rank N once in 2^50 draws; the modulo below takes it to rank 0.
        ranks = values.astype(np.int64).view(np.uint64)
        rows = np.repeat(self.rows, counts)
        ranks *= np.repeat(self._multiplier, counts)
        ranks += np.repeat(self._shift, counts)
        ranks %= rows
        return ranks.view(np.int64)

    def ids_of_ranks(self, table: int, ranks: np.ndarray) -> np.ndarray:
        """Ids int64 of the rows that are `ranks`-th (from 0) in popularity."""
        ids = ranks.astype(np.uint64) * self._multiplier[table] + self._shift[table]
        return (ids % self.rows[table]).view(np.int64)

    def mass_below(self, table: int, ranks: np.ndarray) -> np.ndarray:
        """Probability float64 that a lookup falls on a rank below each of `ranks` (0 to N)."""
        spans = np.log(2.0 * ranks + 1.0)
        if self._power != 0:
            spans = np.expm1(self._power * spans)
        return spans / self._scale[table]

    def head(self, table: int) -> np.ndarray:
        """Probabilities float64 of the first min(N, `HEAD_RANKS`) ranks of a table."""
        edges = np.arange(min(int(self.rows[table]), HEAD_RANKS) + 1)
        return np.diff(self.mass_below(table, edges))

    def expected_distinct(self, table: int, lookups: int) -> float:
        """Expected distinct rows of a table among `lookups` independent lookups."""
        if lookups <= 0:
            return 0.0
        mass, widths = self.bins(table)
        with np.errstate(divide="ignore"):
            missed = lookups * np.log1p(-mass)
        return float(np.sum(-np.expm1(missed) * widths))

    def bins(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Ranks in bins of like popularity, the most popular first: the mean probability of a row
        of each bin, float64 `[k]`, and its rows, int64 `[k]`."""
        edges = _bin_edges(int(self.rows[table]))
        widths = np.diff(edges)
        return np.clip(np.diff(self.mass_below(table, edges)) / widths, 0.0, 1.0), widths


def _bin_edges(rows: int) -> np.ndarray:
    """Integer edges of [0, rows): single ranks first, then bins that grow by `_BIN_RATIO`."""
    head = min(rows, HEAD_RANKS)
    steps = math.ceil(math.log(rows / head) / math.log(_BIN_RATIO))
    tail = np.minimum(np.floor(head * _BIN_RATIO ** np.arange(1, steps + 1)), rows)
    return np.unique(np.concatenate((np.arange(head + 1), tail.astype(np.int64), [rows])))


def _affine(rows: int, key: int) -> tuple[int, int]:
    """Multiplier coprime to `rows` and shift of the bijection rank -> id; products fit 63 bits."""
    bound = max(1, min(rows, (1 << 62) // rows))
    multiplier = 1 + key % bound
    while math.gcd(multiplier, rows) != 1:
        multiplier = 1 + multiplier % bound
    return multiplier, (key >> 32) % rows
