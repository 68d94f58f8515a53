"""From the config to the slots of each group, and what the cache takes from statistics."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.comm.world import World
from distcache.config import Config
from distcache.data.batch import BatchSource
from distcache.layout import TableSpec
from distcache.optim.rows import row_update
from distcache.planner.policy import Policy
from distcache.popularity.decide import Use, decide
from distcache.popularity.node import Popularity
from distcache.popularity.plan import Budget, statistics_of
from distcache.popularity.statistics import Statistics, check_fits, read_statistics
from distcache.run.ahead import AUTO, PREFETCH


def plan_cache(
    config: Config, world: World, tables: Sequence[TableSpec], source: BatchSource, itemsize: int
) -> tuple[tuple[int, ...], Popularity | None]:
    """Slots C of each group, and the popularity of rows where `cache.statistics` are given.

    `itemsize`: bytes of an element. Called by all ranks; raises ConfigError on all of them.
    """
    cache = config.cache
    update = row_update(config.optim.name, 0.0)
    batch = config.data.global_batch_size
    return decide(
        world,
        tables,
        [update.state_width(table.dim) for table in tables],
        Budget(cache.rows, cache.ratio, cache.bytes, itemsize, world.size, batch),
        Use(
            Policy(cache.policy, cache.tail),
            cache.order,
            cache.warm_start,
            cache.split,
            PREFETCH if cache.prefetch == AUTO else cache.prefetch,
        ),
        lambda: read_checked(config, tables, source),
    )


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
