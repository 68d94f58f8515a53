"""From the config to the slots of each group, and what the cache takes from statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distcache.comm.first import on_first
from distcache.comm.world import World
from distcache.config import Config
from distcache.data.batch import BatchSource
from distcache.layout import TableSpec
from distcache.optim.rows import row_update
from distcache.planner.policy import Policy
from distcache.popularity.decide import Use, decide
from distcache.popularity.hot import HotSet
from distcache.popularity.node import Popularity
from distcache.popularity.plan import Budget, likeliest_rows, pinned_rows, statistics_of
from distcache.popularity.statistics import Statistics, check_fits, read_statistics
from distcache.run.ahead import AUTO, PREFETCH


def with_state(config: Config) -> Config:
    """`config` with `cache.state` decided, where it says `auto`."""
    cache = config.cache
    if cache.state != AUTO:
        return config
    state = row_update(config.optim.name, 0.0).state_place
    if cache.reduction == "native":  # sums that all ranks have
        state = "replicated"
    return replace(config, cache=replace(cache, state=state))


def plan_cache(
    config: Config, world: World, tables: Sequence[TableSpec], source: BatchSource, itemsize: int
) -> tuple[tuple[int, ...], Popularity | None]:
    """Slots C of each group, and the popularity of rows where `cache.statistics` are given.

    `itemsize`: bytes of an element. Called by all ranks; raises ConfigError on all of them.
    """
    cache = config.cache
    slots, popularity = decide(
        world,
        tables,
        slot_state(config, tables, world.size),
        budget_of(config, itemsize, world.size),
        Use(
            Policy(cache.policy, cache.tail),
            cache.order,
            cache.warm_start,
            cache.split,
            prefetch_of(config),
        ),
        lambda: read_checked(config, tables, source),
    )
    hot: HotSet | None = getattr(source, "hot", None)
    if hot is not None and popularity is not None:  # the rows of hot batches stay for good
        warm = 1.0 if cache.warm_start == AUTO else popularity.warm_start
        rows = hot.hot_rows
        popularity = replace(popularity, hot_rows=rows, pinned_rows=rows, warm_start=warm)
    return slots, popularity


def of_all_homes(
    config: Config,
    world: World,
    tables: Sequence[TableSpec],
    source: BatchSource,
    slots: Sequence[int],
    popularity: Popularity | None,
) -> Popularity | None:
    """`popularity` for a sharded cache, whose W ranks hold W times as many rows as one has slots.

    `slots`: C of each group. Rows that were given by table, and those of hot batches, stay as they
    are. Called by all ranks.
    """
    given = not isinstance(config.cache.split, str) or getattr(source, "hot", None) is not None
    if popularity is None or given or world.size == 1:
        return popularity
    known, pinned = popularity.statistics, popularity.pinned_rows
    budget, held = budget_of(config, 0, world.size), [count * world.size for count in slots]
    steps = prefetch_of(config) + 1

    def rows() -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        hot = likeliest_rows(tables, held, known, budget)
        return hot, None if pinned is None else pinned_rows(tables, held, known, budget, steps)

    hot, pinned = on_first(world, rows)
    return replace(popularity, hot_rows=hot, pinned_rows=pinned)


def prefetch_of(config: Config) -> int:
    """P, as slots are planned for."""
    return PREFETCH if config.cache.prefetch == AUTO else config.cache.prefetch


def state_widths(config: Config, tables: Sequence[TableSpec]) -> list[int]:
    """S of each table's rows."""
    update = row_update(config.optim.name, 0.0)
    return [update.state_width(table.dim) for table in tables]


def slot_state(config: Config, tables: Sequence[TableSpec], world_size: int) -> list[int]:
    """Floats of state that a slot of each table takes on one of so many ranks: S, or a share of it
    where rows are on every rank and their homes keep the state."""
    homes = world_size if shares_state(config) else 1
    return [-(-width // homes) for width in state_widths(config, tables)]


def shares_state(config: Config) -> bool:
    """Whether rows are on every rank and homes alone keep their state."""
    cache = with_state(config).cache
    return cache.state == "home" and cache.placement == "replicated"


def budget_of(config: Config, itemsize: int, world_size: int) -> Budget:
    """What the keys of `cache` give the slots of a rank."""
    cache, batch = config.cache, config.data.global_batch_size
    return Budget(cache.rows, cache.ratio, cache.bytes, itemsize, world_size, batch)


def read_checked(
    config: Config, tables: Sequence[TableSpec], source: BatchSource
) -> Statistics | None:
    """The statistics under `cache.statistics`, of `tables` in order; None where none are given.

    Raises ConfigError, with both fingerprints, for those of other data.
    """
    path = config.cache.statistics
    if path is None:
        return None
    statistics = read_statistics(path)
    check_fits(statistics, source, path)
    return statistics_of(statistics, tables, f"cache.statistics={path}")
