"""Which rows a step needs, on one rank and on any: what every placement's traffic follows from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distcache.data.synthetic import ZipfTables
from distcache.errors import ConfigError
from distcache.layout import RowLayout
from distcache.popularity.curve import Curve, room_for
from distcache.popularity.statistics import Statistics

# -----------------------------------------------------------------------------
# How often the rows of each table are looked up: by a Zipf law, or as counted.


def zipf_curve(rows: int, exponent: float) -> Curve:
    """A table of `rows` rows by Zipf's law with `exponent`, as the synthetic stream draws it; 1e9
    rows have a few thousand entries."""
    if rows < 1:
        raise ConfigError(f"table_rows: a table of {rows} rows: give at least 1")
    chance, widths = ZipfTables([rows], exponent, 0).bins(0)
    return Curve(chance, widths.astype(np.float64), math.inf, rows)


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
    curve: Curve
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
        law = zipf_curve(rows, exponents[index])
        found.append(TableSource(name, rows, dims[index], lookups[index], law))
    return found


def counted_sources(statistics: Statistics, dims: Sequence[int]) -> list[TableSource]:
    """The tables of `statistics`, `dims` wide; as many lookups a sample as were counted."""
    found = []
    for table, dim in zip(statistics.tables, dims, strict=True):
        own = Curve.of(table, statistics.samples)
        each, counted = own.per_sample, float(table.lookups)
        whole = own.with_others(table.distinct)
        name = f"t_{table.feature}"
        found.append(TableSource(name, table.rows, dim, each, whole, counted=counted))
    return found


# -----------------------------------------------------------------------------
# Which rows a step needs, on one rank and on any: what every placement's traffic follows from.
#
# Letters: W ranks, b samples per rank, n = b x (ids per sample) lookups of a table per rank and
# step, q the probability that a rank touches a row in a step, Q that any rank does, and G ranks of
# a node.


def check_nodes(world_size: int, local_ranks: int) -> None:
    """Raise ConfigError where `world_size` ranks are no whole number of nodes of `local_ranks`."""
    if local_ranks < 1 or world_size % local_ranks:
        raise ConfigError(
            f"local_ranks={local_ranks} does not divide world_size={world_size}: every node has as "
            "many ranks; give a number that does"
        )


@dataclass(frozen=True)
class Reuse:
    """Rows as a cache meets them again: `count` rows that a step touches with probability `world`,
    among the rows [start, end). Float64 `[m]`."""

    count: np.ndarray
    world: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class TableDemand:
    """One table's rows in buckets, those of the smallest replicated prefix first.

    `count` float64 `[k]`: rows of each bucket; `rank`, `world` float64 `[k]`: q and Q of its rows.
    `start`, `end` float64 `[k]`: the rows [start, end) of the table, in the order in which prefixes
    are taken, among which they lie. `lookups`: of one rank and step; `features`: that read it.
    `before` float64 `[k]`: the probability that a row which is touched was so in the step before,
    None: Q, as steps are independent; `reuse`: None: the same rows (see `demand_of_window`).
    `node` float64 `[k]`: the probability that any of the G ranks of a node touches a row in a step;
    None: q, as where each rank is a node.
    """

    name: str
    rows: int
    count: np.ndarray
    rank: np.ndarray
    world: np.ndarray
    start: np.ndarray
    end: np.ndarray
    lookups: float
    features: int = 1
    before: np.ndarray | None = None
    reuse: Reuse | None = None
    node: np.ndarray | None = None

    def split(self, prefix: float) -> tuple[TableDemand, TableDemand]:
        """The table's replicated prefix of so many rows, and the rest, as two tables.

        Raises ConfigError for a prefix beyond the table.
        """
        if not 0 <= prefix <= self.rows:
            raise ConfigError(
                f"replicated_rows: {self.name}={prefix:g}, but the table has {self.rows} "
                f"rows: give 0 to {self.rows}"
            )
        return self._part(prefix, True), self._part(prefix, False)

    def _part(self, prefix: float, first: bool) -> TableDemand:
        share = _share(self, prefix, first)
        kept = share > 0
        count = (self.count * share)[kept]
        lookups, reuse = 0.0, None
        if self.rank_rows:
            lookups = self.lookups * float(self.rank[kept] @ count) / self.rank_rows
        if self.reuse is not None:
            grown = self.reuse
            reuse = replace(grown, count=grown.count * _share(grown, prefix, first))
        return replace(
            self,
            rows=round(prefix if first else self.rows - prefix),
            count=count,
            rank=self.rank[kept],
            world=self.world[kept],
            start=self.start[kept],
            end=self.end[kept],
            lookups=lookups,
            before=None if self.before is None else self.before[kept],
            reuse=reuse,
            node=None if self.node is None else self.node[kept],
        )

    @property
    def met(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and Q for hit rates: `(rows [m], Q [m])`."""
        found = self.reuse or self
        return found.count, found.world

    @property
    def rank_rows(self) -> float:
        """Distinct rows that a rank is expected to touch in a step: the sum of q."""
        return float(self.rank @ self.count)

    @property
    def world_rows(self) -> float:
        """Distinct rows that all ranks are expected to touch: the sum of Q."""
        return float(self.world @ self.count)

    @property
    def node_rows(self) -> float:
        """Distinct rows that the ranks of one node are expected to touch together."""
        return self.rank_rows if self.node is None else float(self.node @ self.count)

    @property
    def late_rows(self) -> float:
        """Of a rank's distinct rows those that some rank touched in the step before, too."""
        return self._late(self.rank)

    @property
    def late_node_rows(self) -> float:
        """The same of a node's distinct rows."""
        return self._late(self.rank if self.node is None else self.node)

    def _late(self, touched: np.ndarray) -> float:
        before = self.world if self.before is None else self.before
        return float((touched * before) @ self.count)

    @property
    def variances(self) -> tuple[float, float]:
        """Variances of `rank_rows` and `world_rows`, of rows touched independently (an upper
        bound: lookups are shared out, which binds rows negatively)."""
        q, whole = self.rank, self.world
        return float((q * (1 - q)) @ self.count), float((whole * (1 - whole)) @ self.count)


def _share(buckets: TableDemand | Reuse, prefix: float, first: bool) -> np.ndarray:
    """The share of each bucket's rows in the `first` so many rows of the table, or after them."""
    width = np.maximum(buckets.end - buckets.start, 1e-300)
    inside = np.clip((prefix - buckets.start) / width, 0.0, 1.0)
    return inside if first else 1.0 - inside


def _sum_of(parts: str, name: str) -> property:
    """A number of all `parts`, tables or groups, summed."""
    return property(lambda whole: sum(getattr(part, name) for part in getattr(whole, parts)))


@dataclass(frozen=True)
class GroupDemand:
    """Tables of one width, and of all of them what `TableDemand` says of one (`rows`: V).

    `dim` D; `state_width` S: floats of optimizer state per row.
    """

    tables: tuple[TableDemand, ...]
    dim: int
    state_width: int

    rows = _sum_of("tables", "rows")
    rank_rows = _sum_of("tables", "rank_rows")
    world_rows = _sum_of("tables", "world_rows")
    node_rows = _sum_of("tables", "node_rows")
    late_rows = _sum_of("tables", "late_rows")
    late_node_rows = _sum_of("tables", "late_node_rows")
    lookups = _sum_of("tables", "lookups")

    def split(self, prefixes: Sequence[float]) -> tuple[GroupDemand, GroupDemand]:
        """The replicated prefixes of all tables, and the rest."""
        pairs = [t.split(k) for t, k in zip(self.tables, prefixes, strict=True)]
        parts = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        hot, cold = (GroupDemand(tables, self.dim, self.state_width) for tables in parts)
        return hot, cold

    def buffers(self, world_size: int) -> tuple[float, float, float]:
        """Rows that there is room for (`room_for`): of a rank, of all ranks, and of one home."""
        rank, world = (sum(t.variances[i] for t in self.tables) for i in (0, 1))
        homed = 0.0
        for table in self.tables:
            share = table.world / world_size
            homed += float((share * (1 - share)) @ table.count)
        means = (self.rank_rows, self.world_rows, self.world_rows / world_size)
        spread = (rank, world, homed)
        return tuple(  # type: ignore[return-value]
            room_for(mean, variance) for mean, variance in zip(means, spread, strict=True)
        )


@dataclass(frozen=True)
class Demand:
    """What one step of W = `world_size` ranks needs, `batch` samples (b) on each: `rank_rows` and
    `world_rows` distinct rows over all groups.

    `local_ranks`: G, of the nodes that the tables' `node` is about; of no account on one node.
    """

    groups: tuple[GroupDemand, ...]
    world_size: int
    batch: float
    local_ranks: int = 1

    @property
    def tables(self) -> tuple[TableDemand, ...]:
        """The tables of all groups, group by group."""
        return tuple(table for group in self.groups for table in group.tables)

    rank_rows = _sum_of("groups", "rank_rows")
    world_rows = _sum_of("groups", "world_rows")

    def prefixes(self, rows: dict[str, int]) -> list[list[float]]:
        """A replicated prefix for each table of each group, from {table: rows}; others 0.

        Raises ConfigError for a name that is no table.
        """
        known = {table.name for table in self.tables}
        for name, count in rows.items():  # how many a table has, its `split` says
            if name not in known:
                names = ", ".join([table.name for table in self.tables][:20])
                raise ConfigError(
                    f"replicated_rows: {name}={count} names no table: choose from {names}"
                )
        return [[float(rows.get(t.name, 0)) for t in group.tables] for group in self.groups]


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


def with_mixture(
    table: TableDemand, uses: np.ndarray, counted: float, by_step: bool = False
) -> Reuse | None:
    """A table's rows as a cache will meet them, over `counted` steps as many as were counted.

    `uses` float64 `[k]`: how often the rows of each bucket were counted, whole numbers; by lookup,
    or `by_step`: in how many of the `counted` steps. Rows counted c <= `FEW` times (of steps: in
    half of them at most) have the rates m that those counts leave likely, by Poisson's law with
    mean m (of steps: binomial with Q = 1 - exp(-m / S)). As likelihoods are highest where as many
    rows have each count as there are, the rows that `counted` steps of the mixture touch, the sum
    of 1 - (1 - Q)^S, are as many as were counted, and so are those of fewer steps. All rows of the
    table take part, for how many were not counted is known; Q is scaled so that a step touches what
    it did. None where there are no such rows.
    """
    few = min(FEW, int(counted / 2)) if by_step else FEW
    low, kept = np.flatnonzero(uses <= few), np.flatnonzero(uses > few)
    touched = float(table.count[low] @ table.world[low])
    if few < 1 or not touched:
        return None
    seen = float(table.count.sum())
    rows = np.append(table.count[low], max(table.rows - seen, 0.0))
    counts = np.append(np.rint(uses[low]), 0.0).astype(np.int64)
    start = np.append(table.start[low], seen)
    end = np.append(table.end[low], max(float(table.rows), seen))
    rates = _rates(table.rows, few, counted, by_step)
    chance = -np.expm1(-rates / counted)
    kernel = _binomial(few, counted, chance) if by_step else _poisson(few, rates)
    shares = _posterior(np.bincount(counts, rows, few + 1), kernel)[counts]
    shares[shares < _LEAST] = 0.0
    shares /= shares.sum(axis=1, keepdims=True)
    bucket, rate = np.nonzero(shares * rows[:, None])
    count, found = rows[bucket] * shares[bucket, rate], chance[rate]
    return Reuse(
        np.concatenate((table.count[kept], count)),
        np.concatenate((table.world[kept], found * (touched / float(count @ found)))),
        np.concatenate((table.start[kept], start[bucket])),
        np.concatenate((table.end[kept], end[bucket])),
    )


def _rates(rows: int, few: int, counted: float, by_step: bool) -> np.ndarray:
    """Expected counts, up to those of the rows counted `few` times; float64 `[m]`, rising. With the
    lowest, all rows of the table together would be counted once."""
    top = -counted * np.log1p(-few / counted) if by_step else float(few)
    number = int(np.ceil(_PER_OCTAVE * np.log2(max(top * rows, 2.0))))
    return top * 2.0 ** (-np.arange(number, -1, -1) / _PER_OCTAVE)


def _log_factorials(few: int) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, few + 1)))))


def _poisson(few: int, rates: np.ndarray) -> np.ndarray:
    """Probability of the counts 0 to `few` by rate; float64 `[few + 1, m]`."""
    counts = np.arange(few + 1)[:, None]
    return np.exp(counts * np.log(rates) - rates - _log_factorials(few)[:, None])


def _binomial(few: int, steps: float, chance: np.ndarray) -> np.ndarray:
    """The same of steps that a row is named in, up to a factor of each count."""
    counts = np.arange(few + 1)[:, None]
    ways = np.cumprod(np.append(1.0, (steps - np.arange(few)) / np.arange(1, few + 1)))
    return ways[:, None] * np.exp(counts * np.log(chance) + (steps - counts) * np.log1p(-chance))


def _posterior(rows: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Shares `[few + 1, m]` of the rates among rows of each count, of which there are `rows`."""
    weights = np.full(kernel.shape[1], 1.0 / kernel.shape[1])
    share = rows / rows.sum()
    for _ in range(_ROUNDS):
        weights *= (share / np.maximum(kernel @ weights, 1e-300)) @ kernel
        weights /= weights.sum()
    joint = kernel * weights
    return joint / np.maximum(joint.sum(axis=1, keepdims=True), 1e-300)


# -----------------------------------------------------------------------------
# From tables and their popularity to the demand of a step.


def demand_at(
    sources: Sequence[TableSource],
    state_widths: Sequence[int],
    batch: float,
    world_size: int,
    local_ranks: int = 1,
) -> Demand:
    """The demand of a step of W = `world_size` ranks with `batch` samples (b) each.

    `state_widths`: S of each table's rows; `local_ranks`: ranks of each node. Tables of one width
    are a group, in order of first appearance (as `layout.group_tables`).
    """
    if batch <= 0:
        raise ConfigError(f"batch={batch}: give the samples of one rank, at least 1")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: give at least 1")
    check_nodes(world_size, local_ranks)
    groups: dict[int, list[TableDemand]] = {}
    states: dict[int, int] = {}
    for source, state in zip(sources, state_widths, strict=True):
        groups.setdefault(source.dim, []).append(_table(source, batch, world_size, local_ranks))
        states[source.dim] = state
    return Demand(
        tuple(GroupDemand(tuple(tables), dim, states[dim]) for dim, tables in groups.items()),
        world_size,
        batch,
        local_ranks,
    )


def _table(source: TableSource, batch: float, world_size: int, local_ranks: int) -> TableDemand:
    curve, lookups = source.curve, batch * source.lookups
    count, end = curve.rows, np.cumsum(curve.rows)
    found = TableDemand(
        source.name,
        source.rows,
        count,
        curve.touched(lookups),
        curve.touched(world_size * lookups),
        end - count,
        end,
        lookups,
        source.features,
        node=curve.touched(local_ranks * lookups) if 1 < local_ranks < world_size else None,
    )
    if math.isinf(curve.lookups) or curve.error:  # counts of a sketch are not whole
        return found
    steps = curve.lookups / (world_size * lookups) if lookups else 0.0
    return replace(found, reuse=with_mixture(found, curve.counts, steps) if steps > 1 else None)


# -----------------------------------------------------------------------------
# Demand measured from the ids of a few steps, as they are at hand when training starts.


@dataclass(frozen=True)
class GroupWindow:
    """The ids of one group over S steps. `rows_by_step[s][r]`: row numbers (int64 `[n]`) of all
    lookups of rank r, in any order; `state_width` S; `features` that read each table."""

    layout: RowLayout
    rows_by_step: Sequence[Sequence[np.ndarray]]
    state_width: int
    features: Sequence[int] | None = None


def demand_of_window(windows: Sequence[GroupWindow], batch: float, local_ranks: int = 1) -> Demand:
    """The demand of the steps of a window, `batch` samples of a rank on average.

    `local_ranks`: ranks of each node, which are consecutive. Distinct rows per rank and step, of
    a node, and of all ranks, are exact averages. Prefixes are of the rows
    that the window names most often. What the cache meets again (`TableDemand.reuse`) is an
    estimate, for the window has not seen all rows (`mixture.with_mixture`). Raises ConfigError for
    a window without a step, or of another number of ranks than the layout has.
    """
    groups = []
    for window in windows:
        if not window.rows_by_step:
            raise ConfigError("the window of ids has no step: give at least one")
        world = window.layout.world_size
        for step, ranks in enumerate(window.rows_by_step):
            if len(ranks) != world:
                raise ConfigError(
                    f"step {step} of the window has ids of {len(ranks)} ranks, the layout is of "
                    f"{world}: give those of every rank"
                )
        check_nodes(world, local_ranks)
        groups.append(_group(window, local_ranks))
    if not groups:
        raise ConfigError("the window of ids has no group of tables")
    return Demand(tuple(groups), windows[0].layout.world_size, batch, local_ranks)


def _group(window: GroupWindow, local_ranks: int) -> GroupDemand:
    """Counts per row over the window: how many ranks' steps, nodes' steps, and steps name it."""
    layout, steps = window.layout, len(window.rows_by_step)
    world = layout.world_size
    together = [1, world, *([local_ranks] if 1 < local_ranks < world else [])]
    named = [_named(window, ranks) for ranks in together]
    rows = named[0][0]
    shares = [
        count / (steps * (world // ranks))
        for ranks, (_, count) in zip(together, named, strict=True)
    ]
    lookups = np.zeros(len(layout.tables))
    for ranks in window.rows_by_step:
        for part in ranks:
            lookups += _by_table(part, layout)
    tables = []
    features = window.features or [len(table.features) for table in layout.tables]
    for index, table in enumerate(layout.tables):
        low, high = np.searchsorted(rows, layout.offsets[index : index + 2])
        count, q, whole, *node = _merged([share[low:high] for share in shares])
        end = np.cumsum(count)
        start = end - count
        before = None if steps < 2 else np.rint(whole * steps - 1) / (steps - 1)
        each = float(lookups[index]) / (steps * world)
        found = TableDemand(
            table.name, table.rows, count, q, whole, start, end, each, features[index], before
        )
        found = replace(found, node=node[0] if node else None)
        reuse = None if steps < 2 else with_mixture(found, np.rint(whole * steps), steps, True)
        tables.append(replace(found, reuse=reuse))
    return GroupDemand(tuple(tables), layout.dim, window.state_width)


def _named(window: GroupWindow, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a window, ascending, and how often so many ranks in a row name each in a step."""
    world = window.layout.world_size
    parts = [
        np.unique(np.concatenate(step[first : first + ranks]))
        for step in window.rows_by_step
        for first in range(0, world, ranks)
    ]
    return np.unique(np.concatenate(parts), return_counts=True)


def _by_table(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    tables = np.searchsorted(layout.offsets, rows, side="right") - 1
    return np.bincount(tables, minlength=len(layout.tables)).astype(np.float64)


def _merged(shares: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Rows with equal `shares` (q, Q, and of nodes) as one bucket, by falling q: the rows of each,
    and its shares; float64 `[k]`."""
    found, count = np.unique(-np.stack(shares), axis=1, return_counts=True)
    return count.astype(np.float64), *(-found)
