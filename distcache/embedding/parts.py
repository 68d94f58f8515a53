"""What the tables of a collection are made of: groups, slots, stores and planners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distcache.comm.link import Link
from distcache.data.batch import Batch
from distcache.embedding.settings import CacheSettings
from distcache.layout import TableSpec
from distcache.optim.rows import RowUpdate
from distcache.pipeline.build import (
    home_regions,
    make_caches,
    make_stores,
    popular_groups,
)
from distcache.pipeline.groups import TableGroup
from distcache.pipeline.placement import RegionSlots
from distcache.pipeline.planned import PlanningSettings
from distcache.pipeline.planning import StreamPlanner
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.warm import WarmStart
from distcache.popularity.decide import Use, decide
from distcache.popularity.node import GroupPopularity
from distcache.popularity.plan import Budget, statistics_of
from distcache.popularity.statistics import Statistics, read_statistics
from distcache.streams import Streams


@dataclass(frozen=True)
class RowParts:
    """The rows of every group, and what they take from statistics."""

    groups: list[TableGroup]
    rows: list[GroupRows]
    popular: list[GroupPopularity]
    warm: WarmStart


def make_row_parts(
    link: Link,
    tables: Sequence[TableSpec],
    keys: Sequence[str],
    update: RowUpdate,
    settings: CacheSettings,
    streams: Streams,
) -> RowParts:
    """Slots and stores of all groups; called by all ranks of `link`.

    `tables` name lookups by place; `keys`: their features, as statistics and a split name them.
    """
    world, dtype = link.world, settings.dtype
    budget = Budget(
        settings.rows,
        settings.ratio,
        settings.bytes,
        dtype.itemsize,
        world.size,
        settings.batch_size or 1,
    )
    use = Use(
        settings.policy_settings,
        settings.order,
        settings.warm_start,
        settings.split,
        settings.prefetch,
    )
    widths = [update.state_width(table.dim) for table in tables]
    named = [
        replace(table, features=tuple(keys[int(f)] for f in table.features)) for table in tables
    ]
    slots, popularity = decide(
        world, named, widths, budget, use, lambda: _statistics(settings, named)
    )
    features = [feature for table in tables for feature in table.features]
    groups, popular = popular_groups(world, tables, features, popularity)
    stores = make_stores(world, groups, update, dtype, settings.seed, settings.store_access)
    caches = make_caches(world, groups, [RegionSlots(count) for count in slots], update, dtype)
    rows = [
        GroupRows(group, cache, store, update, link, streams, settings.prefetch)
        for group, cache, store in zip(groups, caches, stores, strict=True)
    ]
    share = 0.0 if popularity is None else popularity.warm_start
    return RowParts(groups, rows, popular, WarmStart([own.hot for own in popular], share))


def _statistics(settings: CacheSettings, tables: Sequence[TableSpec]) -> Statistics | None:
    """The statistics of `tables`, in order; ConfigError for those of other tables."""
    given = settings.statistics
    if given is None:
        return None
    if isinstance(given, Statistics):
        return statistics_of(given, tables, "the given statistics")
    return statistics_of(read_statistics(given, "statistics"), tables, f"statistics={given}")


def make_stream_planner(
    link: Link,
    parts: RowParts,
    settings: CacheSettings,
    fingerprint: int,
    prepare: Callable[[Batch], Batch],
) -> StreamPlanner:
    """The planner of this rank's homes, over the planning group of `link`."""
    rank, policy = link.world.rank, settings.policy_settings
    pairs = zip(parts.popular, parts.groups, strict=True)
    classes = [own.classes_at(group.layout, rank) for own, group in pairs]
    return StreamPlanner(
        link,
        parts.groups,
        home_regions(parts.rows, rank, settings.prefetch, policy, classes),
        [rows.cache.slots for rows in parts.rows],
        PlanningSettings(
            lookahead=settings.lookahead,
            prefetch=settings.prefetch,
            dtype=settings.dtype,
            fingerprint=fingerprint,
            prepare=prepare,
        ),
    )
