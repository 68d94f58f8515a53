"""Which rows a step needs, on one rank and on any: what every placement's traffic follows from.

Letters: W ranks, b samples per rank, n = b x (ids per sample) lookups of a table per rank and step,
q the probability that a rank touches a row in a step, Q that any rank does, and G ranks of a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distcache.errors import ConfigError

DEVIATIONS = 6.0
"""Buffers hold the expected rows and so many standard deviations more."""


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


@dataclass(frozen=True)
class GroupDemand:
    """Tables of one width. `dim` D; `state_width` S: floats of optimizer state per row."""

    tables: tuple[TableDemand, ...]
    dim: int
    state_width: int

    @cached_property
    def rows(self) -> int:
        """V of the group."""
        return sum(table.rows for table in self.tables)

    @property
    def rank_rows(self) -> float:
        """See `TableDemand.rank_rows`."""
        return sum(table.rank_rows for table in self.tables)

    @property
    def world_rows(self) -> float:
        """See `TableDemand.world_rows`."""
        return sum(table.world_rows for table in self.tables)

    @property
    def node_rows(self) -> float:
        """See `TableDemand.node_rows`."""
        return sum(table.node_rows for table in self.tables)

    @property
    def late_rows(self) -> float:
        """See `TableDemand.late_rows`."""
        return sum(table.late_rows for table in self.tables)

    @property
    def late_node_rows(self) -> float:
        """See `TableDemand.late_node_rows`."""
        return sum(table.late_node_rows for table in self.tables)

    @property
    def lookups(self) -> float:
        """Lookups of one rank and step."""
        return sum(table.lookups for table in self.tables)

    def split(self, prefixes: Sequence[float]) -> tuple[GroupDemand, GroupDemand]:
        """The replicated prefixes of all tables, and the rest."""
        pairs = [t.split(k) for t, k in zip(self.tables, prefixes, strict=True)]
        parts = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        hot, cold = (GroupDemand(tables, self.dim, self.state_width) for tables in parts)
        return hot, cold

    def buffers(self, world_size: int) -> tuple[float, float, float]:
        """Rows with `DEVIATIONS` to spare: of a rank, of all ranks, and of one home."""
        rank, world = (sum(t.variances[i] for t in self.tables) for i in (0, 1))
        homed = 0.0
        for table in self.tables:
            share = table.world / world_size
            homed += float((share * (1 - share)) @ table.count)
        means = (self.rank_rows, self.world_rows, self.world_rows / world_size)
        spread = (rank, world, homed)
        return tuple(  # type: ignore[return-value]
            mean + DEVIATIONS * math.sqrt(variance)
            for mean, variance in zip(means, spread, strict=True)
        )


@dataclass(frozen=True)
class Demand:
    """What one step of W = `world_size` ranks needs, `batch` samples (b) on each.

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

    @property
    def rank_rows(self) -> float:
        """Distinct rows of a rank, over all groups."""
        return sum(group.rank_rows for group in self.groups)

    @property
    def world_rows(self) -> float:
        """Distinct rows of all ranks, over all groups."""
        return sum(group.world_rows for group in self.groups)

    def prefixes(self, rows: dict[str, int]) -> list[list[float]]:
        """A replicated prefix for each table of each group, from {table: rows}; others 0.

        Raises ConfigError for a name that is no table, or rows beyond one.
        """
        known = {table.name: table.rows for table in self.tables}
        for name, count in rows.items():
            if name not in known:
                names = ", ".join(list(known)[:20])
                raise ConfigError(
                    f"replicated_rows: {name}={count} names no table: choose from {names}"
                )
            if not 0 <= count <= known[name]:
                raise ConfigError(
                    f"replicated_rows: {name}={count}, but the table has {known[name]} "
                    f"rows: give 0 to {known[name]}"
                )
        return [[float(rows.get(t.name, 0)) for t in group.tables] for group in self.groups]
