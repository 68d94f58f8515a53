"""From the config to the slots of each group, and what the cache takes from statistics."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.config import Config
from distcache.data.batch import BatchSource
from distcache.layout import TableSpec
from distcache.optim.rows import row_update
from distcache.planner.policy import Policy
from distcache.popularity.node import Popularity
from distcache.popularity.plan import (
    Budget,
    SlotPlan,
    pinned_rows,
    plan_slots,
    statistics_of,
)
from distcache.popularity.statistics import Statistics, check_fits, read_statistics
from distcache.run.ahead import AUTO, PREFETCH
from distcache.store.available import describe_bytes

log = logging.getLogger(__name__)

WARM_START = 1.0
"""`cache.warm_start=auto` where there are statistics: see docs/popularity.md."""

_SHOWN = 40
"""Tables that the log lists."""


def plan_cache(
    config: Config, world: World, tables: Sequence[TableSpec], source: BatchSource, itemsize: int
) -> tuple[tuple[int, ...], Popularity | None]:
    """Slots C of each group, and the popularity of rows where `cache.statistics` are given.

    `itemsize`: bytes of an element. Called by all ranks; raises ConfigError on all of them.
    """
    cache = config.cache
    update = row_update(config.optim.name, 0.0)
    widths = [update.state_width(table.dim) for table in tables]
    batch = config.data.global_batch_size
    budget = Budget(cache.rows, cache.ratio, cache.bytes, itemsize, world.size, batch)
    read: list[Statistics | None] = []
    together(world, lambda: read.append(read_checked(config, tables, source)))
    statistics = read[0]

    policy = Policy(cache.policy, cache.tail)
    ahead = PREFETCH if cache.prefetch == AUTO else cache.prefetch

    def decide() -> tuple[SlotPlan, tuple[int, ...] | None] | None:
        if not world.is_first:
            return None
        plan = plan_slots(tables, widths, budget, cache.split, statistics)
        if statistics is None or policy.ranking != "static":
            return plan, None
        return plan, pinned_rows(tables, plan.slots, statistics, budget, ahead + 1)

    decided = together(world, decide)[0]
    if decided is None:
        raise RuntimeError("rank 0 decides the slots")
    plan, pinned = decided
    if statistics is None:
        return plan.slots, None
    if world.is_first:
        _report(tables, widths, itemsize, plan, statistics)
    return plan.slots, Popularity(
        statistics,
        plan.hot_rows,
        order=cache.order == "popularity",
        warm_start=WARM_START if cache.warm_start == AUTO else float(cache.warm_start),
        classes=policy.needs_popularity,
        pinned_rows=pinned,
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


def _report(
    tables: Sequence[TableSpec],
    widths: Sequence[int],
    itemsize: int,
    plan: SlotPlan,
    statistics: Statistics,
) -> None:
    """Log each table's hot rows, the largest first."""
    lines = [f"{'table':<24} {'rows':>13} {'hot rows':>11} {'share':>7} {'lookups':>8}  bytes"]
    sizes = [
        hot * (table.dim + state) * itemsize
        for hot, table, state in zip(plan.hot_rows, tables, widths, strict=True)
    ]
    largest = sorted(range(len(tables)), key=lambda place: -sizes[place])
    for place in largest[:_SHOWN]:
        table, hot, counted = tables[place], plan.hot_rows[place], statistics.tables[place]
        named = int(counted.dense()[counted.hottest(hot)].sum()) / max(counted.lookups, 1)
        lines.append(
            f"{table.name:<24} {table.rows:>13,} {hot:>11,} {hot / table.rows:>7.2%} "
            f"{named:>8.1%}  {describe_bytes(sizes[place])}"
        )
    if len(tables) > _SHOWN:
        lines.append(f"... and {len(tables) - _SHOWN} smaller ones")
    slots = " + ".join(map(str, plan.slots))
    log.info("the cache of %s slots by table:\n%s", slots, "\n".join(lines))
