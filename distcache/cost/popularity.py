"""How likely n lookups touch a row of a table, for rows in buckets of like popularity.

A table may have 1e9 rows; its buckets are a few thousand. Sources are a Zipf law (the one of the
synthetic stream) or counts of `popularity.statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distcache.data.zipf import ZipfTables
from distcache.errors import ConfigError
from distcache.popularity.curve import CountCurve
from distcache.popularity.curve import curve_of as count_curve
from distcache.popularity.statistics import Statistics


class Popularity(Protocol):
    """Rows of one table by popularity, the most popular first."""

    @property
    def rows(self) -> np.ndarray:
        """Rows of each bucket; float64 `[k]`."""
        ...

    def touched(self, lookups: float) -> np.ndarray:
        """Probability that a row of each bucket is among `lookups` lookups; float64 `[k]`."""
        ...


@dataclass(frozen=True)
class Chances:
    """`rows[i]` rows are looked up with probability `chance[i]` each; float64 `[k]`, falling."""

    chance: np.ndarray
    rows: np.ndarray

    def touched(self, lookups: float) -> np.ndarray:
        """See `Popularity`: 1 - (1 - p)^n, exact where p is tiny."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = -np.expm1(lookups * np.log1p(-self.chance))
        return found if lookups > 0 else np.zeros_like(self.chance)


@dataclass(frozen=True)
class Counted:
    """Buckets of rows that were looked up equally often.

    Up to all N lookups that were counted, chances are `CountCurve.chances`, whose sums are without
    bias. Beyond them the rows that nobody has looked up yet are missing: what is said is a lower
    bound.
    """

    curve: CountCurve

    @property
    def rows(self) -> np.ndarray:
        """See `Popularity`."""
        return self.curve.rows

    def touched(self, lookups: float) -> np.ndarray:
        """See `Popularity`."""
        if lookups < 1:  # that share of what one lookup has
            return lookups * self.curve.counts / max(self.curve.lookups, 1.0)
        return self.curve.chances(min(lookups, self.curve.lookups))


def zipf_popularity(rows: int, exponent: float) -> Chances:
    """A table of `rows` rows by Zipf's law with `exponent`, as the synthetic stream draws it."""
    if rows < 1:
        raise ConfigError(f"table_rows: a table of {rows} rows: give at least 1")
    chance, widths = ZipfTables([rows], exponent, 0).bins(0)
    return Chances(chance, widths.astype(np.float64))


@dataclass(frozen=True)
class TableSource:
    """A table whose use is predicted: `rows` x `dim`, `lookups` ids of it in a sample on average.

    `name`: of the table; `features`: that read it, for the pooled vectors of hybrid layouts;
    `counted`: lookups that were counted, None where the law is known.
    """

    name: str
    rows: int
    dim: int
    lookups: float
    popularity: Popularity
    features: int = 1
    counted: float | None = None


def zipf_sources(
    table_rows: Sequence[int],
    dims: Sequence[int],
    lookups: Sequence[float],
    exponents: Sequence[float],
    names: Sequence[str] | None = None,
) -> list[TableSource]:
    """Tables by Zipf's law; all sequences have an entry for each (`names`: t_cat_0, ...)."""
    found = []
    for index, rows in enumerate(table_rows):
        name = f"t_cat_{index}" if names is None else names[index]
        law = zipf_popularity(rows, exponents[index])
        found.append(TableSource(name, rows, dims[index], lookups[index], law))
    return found


def counted_sources(statistics: Statistics, dims: Sequence[int]) -> list[TableSource]:
    """The tables of `statistics`, `dims` wide; as many lookups a sample as were counted."""
    found = []
    for table, dim in zip(statistics.tables, dims, strict=True):
        each = table.lookups / max(statistics.samples, 1)
        law = Counted(count_curve(table))
        name = f"t_{table.feature}"
        counted = float(table.lookups)
        found.append(TableSource(name, table.rows, dim, each, law, counted=counted))
    return found
