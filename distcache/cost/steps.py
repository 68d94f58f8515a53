"""From tables and their popularity to the demand of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distcache.cost.demand import Demand, GroupDemand, TableDemand, check_nodes
from distcache.cost.mixture import with_mixture
from distcache.cost.popularity import Counted, TableSource
from distcache.cost.unseen import with_unseen
from distcache.errors import ConfigError


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
    popularity, lookups = source.popularity, batch * source.lookups
    count = np.asarray(popularity.rows, dtype=np.float64)
    end = np.cumsum(count)
    found = TableDemand(
        source.name,
        source.rows,
        count,
        popularity.touched(lookups),
        popularity.touched(world_size * lookups),
        end - count,
        end,
        lookups,
        source.features,
        node=popularity.touched(local_ranks * lookups) if 1 < local_ranks < world_size else None,
    )
    if not isinstance(popularity, Counted):
        return found
    curve = popularity.curve
    if curve.error:  # counts of a sketch are not whole
        return replace(found, reuse=with_unseen(found, curve.counts <= 1))
    steps = curve.lookups / (world_size * lookups) if lookups else 0.0
    return replace(found, reuse=with_mixture(found, curve.counts, steps) if steps > 1 else None)
