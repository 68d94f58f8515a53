"""Rows that a step needs, on one rank and on any: the input of every placement's traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distcache.data.synthetic import ZipfTables
from distcache.layout import TableSpec, group_tables
from distcache.popularity.curve import Curve, room_of
from distcache.popularity.statistics import Statistics


def zipf_curve(rows: int, exponent: float) -> Curve:
    """A table of `rows` rows by Zipf's law with `exponent`, as the synthetic stream draws it; 1e9
    rows have a few thousand entries."""
    chance, widths = ZipfTables([rows], exponent, 0).bins(0)
    return Curve(chance, widths.astype(np.float64), math.inf, rows)


@dataclass(frozen=True)
class TableSource:
    """A table whose use is predicted: `lookups` ids of it in a sample on average."""

    table: TableSpec
    lookups: float
    curve: Curve


def zipf_sources(
    tables: Sequence[TableSpec], lookups: Sequence[float], exponents: Sequence[float]
) -> list[TableSource]:
    """Tables by Zipf's law; all sequences have an entry for each."""
    each = zip(tables, lookups, exponents, strict=True)
    return [TableSource(table, count, zipf_curve(table.rows, a)) for table, count, a in each]


def counted_sources(statistics: Statistics, tables: Sequence[TableSpec]) -> list[TableSource]:
    """Tables as those of `statistics`, in order, are used; as many lookups a sample as were
    counted."""
    curves = [Curve.of(table, statistics.samples) for table in statistics.tables]
    pairs = zip(tables, curves, strict=True)
    return [TableSource(table, curve.per_sample, curve) for table, curve in pairs]


# -----------------------------------------------------------------------------
# Letters: W ranks, b samples per rank, n = b x (ids per sample) lookups of a table per rank and
# step, q the probability that a rank touches a row in a step, and Q that any rank does.


def _expected(*chances: str) -> property:
    """Rows of a table for which all of these probabilities come true."""

    def rows(table: TableDemand) -> float:
        return float(math.prod(getattr(table, name) for name in chances) @ table.count)

    return property(rows)


@dataclass(frozen=True)
class TableDemand:
    """One table's rows in buckets, those of the smallest replicated prefix first.

    `count` float64 `[k]`: rows of each bucket; `rank`, `world` float64 `[k]`: q and Q of its rows.
    `start`, `end` float64 `[k]`: the rows [start, end) of the table, in the order in which prefixes
    are taken, among which they lie. `lookups`: of one rank and step. `reuse`: the rows as a cache
    meets them again, whose `world` alone is of interest, None: the same rows (see `with_mixture`).
    """

    name: str
    rows: int
    count: np.ndarray
    rank: np.ndarray
    world: np.ndarray
    start: np.ndarray
    end: np.ndarray
    lookups: float
    reuse: TableDemand | None = None

    def split(self, prefix: float) -> tuple[TableDemand, TableDemand]:
        """The table's replicated prefix of so many rows, and the rest, as two tables."""
        return self._part(prefix, True), self._part(prefix, False)

    def _part(self, prefix: float, first: bool) -> TableDemand:
        width = np.maximum(self.end - self.start, 1e-300)
        share = np.clip((prefix - self.start) / width, 0.0, 1.0)
        share = share if first else 1.0 - share
        kept = share > 0
        of_rows = ("rank", "world", "start", "end")
        parts: dict[str, Any] = {name: getattr(self, name)[kept] for name in of_rows}
        parts |= {"count": (self.count * share)[kept], "lookups": 0.0}
        if self.rank_rows:
            part = float(parts["rank"] @ parts["count"])
            parts["lookups"] = self.lookups * part / self.rank_rows
        if self.reuse is not None:
            parts["reuse"] = self.reuse._part(prefix, first)
        return replace(self, rows=round(prefix if first else self.rows - prefix), **parts)

    @property
    def met(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and Q for hit rates: `(rows [m], Q [m])`."""
        found = self.reuse or self
        return found.count, found.world

    rank_rows = _expected("rank")
    """Distinct rows that a rank is expected to touch in a step: the sum of q."""
    world_rows = _expected("world")
    """Distinct rows that all ranks are expected to touch: the sum of Q."""
    late_rows = _expected("rank", "world")
    """Distinct rows of a rank that some rank touched in the step before, too; steps are
    independent."""


def _sum_of(parts: str, name: str) -> property:
    """A number of all `parts`, tables or groups, summed."""
    return property(lambda whole: sum(getattr(part, name) for part in getattr(whole, parts)))


@dataclass(frozen=True)
class GroupDemand:
    """Tables of one width and dtype, and of all of them what `TableDemand` says of one (`rows`: V).

    `dim` D; `state_width` S: floats of optimizer state per row; `stored` as `TableSpec.dtype`.
    """

    tables: tuple[TableDemand, ...]
    dim: int
    state_width: int
    stored: torch.dtype | None = None

    rows = _sum_of("tables", "rows")
    rank_rows = _sum_of("tables", "rank_rows")
    world_rows = _sum_of("tables", "world_rows")
    late_rows = _sum_of("tables", "late_rows")
    lookups = _sum_of("tables", "lookups")

    def split(self, prefixes: Sequence[float]) -> tuple[GroupDemand, GroupDemand]:
        """The replicated prefixes of all tables, of so many rows each, and the rest."""
        pairs = [t.split(k) for t, k in zip(self.tables, prefixes, strict=True)]
        parts = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        hot, cold = (replace(self, tables=tables) for tables in parts)
        return hot, cold

    def row_bytes(self, itemsize: int, state: float = 0.0) -> float:
        """Bytes of a row as it is stored and moved, with so many elements of state, where elements
        have `itemsize` bytes."""
        own = itemsize if self.stored is None else self.stored.itemsize
        return self.dim * own + state * itemsize

    def buffers(self, world_size: int) -> tuple[float, float, float]:
        """Rows that there is room for (`room_of`): of a rank, of all ranks, and of one home."""
        rows = [table.count for table in self.tables]
        ranks, every = [t.rank for t in self.tables], [t.world for t in self.tables]
        homes = [chance / world_size for chance in every]
        return room_of(ranks, rows), room_of(every, rows), room_of(homes, rows)


@dataclass(frozen=True)
class Demand:
    """Rows that one step of W = `world_size` ranks needs, `batch` samples (b) on each: `rank_rows`
    and `world_rows` distinct rows over all groups."""

    groups: tuple[GroupDemand, ...]
    world_size: int
    batch: float

    @property
    def tables(self) -> tuple[TableDemand, ...]:
        """The tables of all groups, group by group."""
        return tuple(table for group in self.groups for table in group.tables)

    rank_rows = _sum_of("groups", "rank_rows")
    world_rows = _sum_of("groups", "world_rows")


# -----------------------------------------------------------------------------
# How popular the rows behind small counts are: those seen a few times, and those not seen yet.
#
# A row that was counted c times is not one that is used c times as a rule: of rows counted once
# most are used less often, and some of those not counted will be used. What all counts say together
# is the mixture of rates that makes them likeliest (Kiefer and Wolfowitz 1956; found by EM, Laird
# 1978).

FEW = 32
"""Rows counted more often are taken to be as popular as their counts say (within 18 %)."""

_PER_OCTAVE = 4
_ROUNDS = 400
_LEAST = 1e-3
"""Rates on a grid, so many per doubling; rounds of EM; shares of a count's rows below which a rate
is left out."""


def with_mixture(table: TableDemand, uses: np.ndarray, counted: float) -> TableDemand | None:
    """A table's rows as a cache will meet them, over S = `counted` steps as many as were counted.

    `uses` float64 `[k]`: how often the rows of each bucket were looked up, whole numbers. Rows
    counted c <= `FEW` times have the rates m that those counts leave likely, by Poisson's law with
    mean m. As likelihoods are highest where as many rows have each count as there are, the rows
    that S steps of the mixture touch, the sum of 1 - (1 - Q)^S with Q = 1 - exp(-m / S), are as
    many as were counted, and so are those of fewer steps. All rows of the table take part, for how
    many were not counted is known; Q is scaled so that a step touches what it did. None where there
    are no such rows.
    """
    low, kept = np.flatnonzero(uses <= FEW), np.flatnonzero(uses > FEW)
    touched = float(table.count[low] @ table.world[low])
    if not touched:
        return None
    seen = float(table.count.sum())
    rows = np.append(table.count[low], max(table.rows - seen, 0.0))
    counts = np.append(np.rint(uses[low]), 0.0).astype(np.int64)
    start = np.append(table.start[low], seen)
    end = np.append(table.end[low], max(float(table.rows), seen))
    # Up to the rows counted `FEW` times; with the lowest rate, all rows of the table together would
    # be counted once.
    number = int(np.ceil(_PER_OCTAVE * np.log2(max(FEW * table.rows, 2))))
    rates = FEW * 2.0 ** (-np.arange(number, -1, -1) / _PER_OCTAVE)
    chance = -np.expm1(-rates / counted)
    shares = _posterior(np.bincount(counts, rows, FEW + 1), _poisson(rates))[counts]
    shares[shares < _LEAST] = 0.0
    shares /= shares.sum(axis=1, keepdims=True)
    bucket, rate = np.nonzero(shares * rows[:, None])
    count, found = rows[bucket] * shares[bucket, rate], chance[rate]
    parts = {
        "count": (table.count[kept], count),
        "world": (table.world[kept], found * (touched / float(count @ found))),
        "start": (table.start[kept], start[bucket]),
        "end": (table.end[kept], end[bucket]),
    }
    again: dict[str, Any] = {name: np.concatenate(pair) for name, pair in parts.items()}
    return replace(table, rank=again["world"], **again)


def _poisson(rates: np.ndarray) -> np.ndarray:
    """Probability of the counts 0 to `FEW` by rate; float64 `[FEW + 1, m]`."""
    counts = np.arange(FEW + 1)
    factorials = np.cumsum(np.log(np.maximum(counts, 1)))  # their logarithms
    return np.exp(counts[:, None] * np.log(rates) - rates - factorials[:, None])


def _posterior(rows: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Shares `[FEW + 1, m]` of the rates among rows of each count, of which there are `rows`."""
    weights = np.full(kernel.shape[1], 1.0 / kernel.shape[1])
    share = rows / rows.sum()
    for _ in range(_ROUNDS):
        weights *= (share / np.maximum(kernel @ weights, 1e-300)) @ kernel
        weights /= weights.sum()
    joint = kernel * weights
    return joint / np.maximum(joint.sum(axis=1, keepdims=True), 1e-300)


def demand_at(
    sources: Sequence[TableSource],
    state_widths: Sequence[int],
    batch: float,
    world_size: int,
) -> Demand:
    """The demand of a step of W = `world_size` ranks with `batch` samples (b) each.

    `state_widths`: S of each table's rows.
    """
    demands = [_table(source, batch, world_size) for source in sources]
    groups = []
    for members in group_tables([source.table for source in sources]):
        first, own = members[0], tuple(demands[table] for table in members)
        spec = sources[first].table
        groups.append(GroupDemand(own, spec.dim, state_widths[first], spec.dtype))
    return Demand(tuple(groups), world_size, batch)


def _table(source: TableSource, batch: float, world_size: int) -> TableDemand:
    curve, lookups = source.curve, batch * source.lookups
    count, end = curve.rows, np.cumsum(curve.rows)
    touched = [curve.touched(number * lookups) for number in (1, world_size)]
    place = (end - count, end)
    found = TableDemand(source.table.name, curve.table_rows, count, *touched, *place, lookups)
    if math.isinf(curve.lookups):
        return found
    steps = curve.lookups / (world_size * lookups) if lookups else 0.0
    return replace(found, reuse=with_mixture(found, curve.counts, steps) if steps > 1 else None)
