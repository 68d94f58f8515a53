"""How cached rows lie over the ranks: which are on every rank, by counts and the cost model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distcache.comm.agreement import on_first
from distcache.comm.world import World
from distcache.cost.cluster import Cluster
from distcache.cost.demand import Demand, counted_sources, demand_at
from distcache.cost.predict import Choice, Settings, best_mixed, choose_placement
from distcache.engine.groups import MIXED, Placement
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.popularity.curve import top_rows
from distcache.popularity.slots import Budget, likeliest_rows, pinned_rows
from distcache.popularity.statistics import Popularity, Statistics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """What is known before training: the `tables`, their C slots by group, and the use of rows, by
    `statistics` of the tables, in order, or of the first batches alone."""

    tables: Sequence[TableSpec]
    slots: Sequence[int]
    statistics: Statistics


def counted_demand(
    known: Known, update: RowUpdate, batch: float, world_size: int, local_ranks: int
) -> Demand:
    """What a step of `batch` samples a rank needs, from the statistics; `local_ranks` on a node."""
    tables = known.tables
    sources = counted_sources(known.statistics, [table.dim for table in tables])
    named = [replace(own, name=of.name) for own, of in zip(sources, tables, strict=True)]
    widths = [update.state_width(table.dim) for table in tables]
    return demand_at(named, widths, batch, world_size, local_ranks)


def cheapest(
    placement: str, demand: Demand, cluster: Cluster, settings: Settings, objective: str
) -> Choice:
    """The placement that `objective` makes best; of `mixed`, the best rows to replicate."""
    best = best_mixed(demand, cluster, settings, objective) if placement == MIXED else None
    if best is None:
        return choose_placement(demand, cluster, settings, objective)
    if best.refused is not None:
        log.warning(
            "cache.placement=mixed: even with the best rows to replicate, %s; a step that does not "
            "fit is refused. cache.placement=sharded has all slots for its rows",
            best.refused,
        )
    why = f"the best rows to replicate, by {objective}"
    return Choice(MIXED, best.replicated_rows, (best,), why)


def of_all_homes(
    world: World,
    tables: Sequence[TableSpec],
    budget: Budget,
    slots: Sequence[int],
    popularity: Popularity,
) -> Popularity:
    """`popularity` for a sharded cache, whose W ranks hold W times as many rows as one has slots.

    `slots`: C of each group. Called by all ranks.
    """
    known, pinned = popularity.statistics, popularity.pinned_rows
    held = [count * world.size for count in slots]

    def rows() -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        hot = likeliest_rows(tables, held, known, budget)
        if pinned is None:
            return hot, None
        return hot, pinned_rows(tables, held, known, budget, budget.steps - 1)

    hot, pinned = on_first(world, rows)
    return replace(popularity, hot_rows=hot, pinned_rows=pinned)


def replicated_counts(rows: Mapping[str, Any], tables: Sequence[TableSpec]) -> list[int]:
    """K of each table, from `cache.replicated_rows`; 0 for those that it does not name.

    Raises ConfigError for a table that there is not, or more rows than a table has.
    """
    sizes = {table.name: table.rows for table in tables}
    for name, count in rows.items():
        if name not in sizes:
            shown = ", ".join(list(sizes)[:20]) + (", ..." if len(sizes) > 20 else "")
            raise ConfigError(
                f"cache.replicated_rows: {name}={count} names no table: choose from {shown}"
            )
        if count > sizes[name]:
            raise ConfigError(
                f"cache.replicated_rows: {name}={count}, but the table has {sizes[name]} rows: "
                f"give at most {sizes[name]}"
            )
    return [int(rows.get(table.name, 0)) for table in tables]


def rows_of_share(share: float, known: Known) -> list[int]:
    """How many rows of each table are among the most frequent `share` of all rows."""
    wanted = max(1, round(share * sum(table.rows for table in known.tables)))
    counts, rows = zip(*(table.histogram() for table in known.statistics.tables), strict=True)
    return [int(count) for count in top_rows(counts, rows, wanted)]


def placed(state: str, kind: str, counts: Sequence[int], known: Known) -> Placement:
    """The placement with its hot rows: the most frequent `counts` of each table, then any."""
    if kind != MIXED:
        return Placement(kind, state)
    hot = []
    for table, count in zip(known.statistics.tables, counts, strict=True):
        ids = table.hottest(count).astype(np.int64)
        if len(ids) < count:  # fewer were looked up: then others, from 0 on
            others = np.setdiff1d(np.arange(min(table.rows, count + len(ids))), ids)
            ids = np.concatenate((ids, others[: count - len(ids)]))
        hot.append(np.sort(ids))
    digest = hashlib.sha256(b"".join(ids.tobytes() for ids in hot)).hexdigest()[:16]
    total = sum(table.rows for table in known.tables)
    log.info("replicated rows: %d of %d", sum(map(len, hot)), total)
    return Placement(MIXED, state, tuple(hot), digest)
