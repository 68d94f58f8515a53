"""Which rows of a collection lie where: its slots, placement and popularity, from the settings.

The trainer's rules (`distcache.trainer.plan_cache`) with a collection's settings in place of the
configuration; what is unknown without a stream of batches is taken from statistics alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distcache.comm.agreement import on_first
from distcache.comm.world import World
from distcache.cost.cluster import Cluster, Link, check_world, read_cluster
from distcache.cost.demand import counted_sources, demand_at
from distcache.cost.predict import Settings, best_mixed, choose_placement
from distcache.embedding.settings import CacheSettings
from distcache.engine.groups import MIXED, REPLICATED, SHARDED, Placement
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.popularity.slots import (
    Budget,
    Use,
    decide,
    likeliest_rows,
    pinned_rows,
    statistics_of,
)
from distcache.popularity.statistics import Popularity, Statistics, read_statistics
from distcache.trainer.plan_cache import Known, placed, replicated_counts, rows_of_share

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacedRows:
    """`slots`: C of each group; `placement` of rows over the ranks; `popularity` where there are
    statistics."""

    slots: tuple[int, ...]
    placement: Placement
    popularity: Popularity | None


def decide_rows(
    world: World, tables: Sequence[TableSpec], update: RowUpdate, settings: CacheSettings
) -> PlacedRows:
    """Slots, placement and popularity; called by all ranks, decided by rank 0.

    `tables`: with the keys that they read as features. Raises ConfigError on all ranks.
    """
    state = settings.state
    if state == "auto":
        state = REPLICATED if settings.reduction == "native" else update.state_place
    homes = world.size if state == "home" and settings.placement == REPLICATED else 1
    budget = Budget(
        settings.rows,
        settings.ratio,
        settings.bytes,
        settings.dtype.itemsize,
        world.size,
        settings.batch_size or 1,
        settings.prefetch + 2,
    )
    use = Use(
        settings.policy_settings,
        settings.warm_start,
        settings.split,
        settings.prefetch,
    )
    widths = [-(-update.state_width(table.dim) // homes) for table in tables]
    slots, popularity = decide(
        world, tables, widths, budget, use, lambda: given_statistics(settings, tables)
    )
    found = _placement(world, tables, update, replace(settings, state=state), slots, popularity)
    if found.kind != REPLICATED:
        popularity = _of_all_homes(world, tables, budget, slots, popularity, settings)
    return PlacedRows(slots, found, popularity)


def given_statistics(settings: CacheSettings, tables: Sequence[TableSpec]) -> Statistics | None:
    """The statistics of `tables`, in order; ConfigError for those of other tables."""
    given = settings.statistics
    if given is None:
        return None
    if isinstance(given, Statistics):
        return statistics_of(given, tables, "the given statistics")
    return statistics_of(read_statistics(given, "statistics"), tables, f"statistics={given}")


def _placement(
    world: World,
    tables: Sequence[TableSpec],
    update: RowUpdate,
    settings: CacheSettings,
    slots: Sequence[int],
    popularity: Popularity | None,
) -> Placement:
    """`settings.placement`, chosen where it says `auto`, with the replicated rows of `mixed`."""
    if settings.replicated_rows is not None:  # tables that are not there, on one rank too
        replicated_counts(settings.replicated_rows, tables)
    if world.size == 1:
        return Placement()
    if settings.placement in (REPLICATED, SHARDED) or popularity is None:
        return Placement(settings.placement, settings.state)
    known = Known(tables, slots, popularity.statistics)

    def choose() -> Placement:
        if settings.replicated_rows is not None:
            kind, counts = MIXED, replicated_counts(settings.replicated_rows, tables)
        elif settings.replicated_share is not None:
            kind, counts = MIXED, rows_of_share(settings.replicated_share, known)
        else:
            kind, counts = _cheapest(world, known, update, settings)
        return placed(settings.state, kind, counts, known)

    return on_first(world, choose)


def _cheapest(
    world: World, known: Known, update: RowUpdate, settings: CacheSettings
) -> tuple[str, list[int]]:
    """The placement with the lowest predicted cost, and K of each table: by time where the links
    are known (`cluster`), else by the bytes that leave a rank."""
    tables, objective = known.tables, "bytes"
    link = Link(1e10, 1e-5, "any")
    cluster = Cluster(world.size, link, link)
    if settings.cluster is not None:
        cluster, objective = read_cluster(settings.cluster), "time"
        check_world(cluster, world.nodes.sizes)
    sources = counted_sources(known.statistics, [table.dim for table in tables])
    named = [replace(own, name=of.name) for own, of in zip(sources, tables, strict=True)]
    widths = [update.state_width(table.dim) for table in tables]
    batch = (settings.batch_size or 1) / world.size
    demand = demand_at(named, widths, batch, world.size, world.local_size)
    wanted = Settings(
        tuple(known.slots),
        settings.state,
        settings.lookahead,
        settings.prefetch,
        itemsize=settings.dtype.itemsize,
    )
    if settings.placement == MIXED:
        best = best_mixed(demand, cluster, wanted, objective)
        counts = {} if best is None else best.replicated_rows
        return MIXED, [counts.get(table.name, 0) for table in tables]
    choice = choose_placement(demand, cluster, wanted, objective)
    log.info("placement='auto' is %s: %s", choice.placement, choice.why)
    return choice.placement, [choice.replicated_rows.get(table.name, 0) for table in tables]


def _of_all_homes(
    world: World,
    tables: Sequence[TableSpec],
    budget: Budget,
    slots: Sequence[int],
    popularity: Popularity | None,
    settings: CacheSettings,
) -> Popularity | None:
    """`popularity` for a sharded cache, whose W ranks hold W times as many rows as one has slots;
    rows that were given by table stay as they are."""
    if popularity is None or not isinstance(settings.split, str):
        return popularity
    known, pinned = popularity.statistics, popularity.pinned_rows
    held = [count * world.size for count in slots]

    def rows() -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        hot = likeliest_rows(tables, held, known, budget)
        if pinned is None:
            return hot, None
        return hot, pinned_rows(tables, held, known, budget, settings.prefetch + 1)

    hot, pinned = on_first(world, rows)
    return replace(popularity, hot_rows=hot, pinned_rows=pinned)
