"""What a cache makes of a budget and statistics: decided by rank 0, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.layout import TableSpec
from distcache.planner.policy import Policy
from distcache.popularity.node import Popularity
from distcache.popularity.plan import Budget, SlotPlan, pinned_rows, plan_slots
from distcache.popularity.statistics import Statistics
from distcache.store.available import describe_bytes

log = logging.getLogger(__name__)

AUTO = "auto"

WARM_START = 0.5
"""`cache.warm_start=auto` where there are statistics: most of these rows save a fetch later, of the
next half most do not (docs/popularity.md). Rows that are pinned all come first: they stay."""

_SHOWN = 40
"""Tables that the log lists."""


@dataclass(frozen=True)
class Use:
    """What is made of statistics: `order`, `warm_start` (or `auto`) and `split` as the keys of
    group `cache`; `policy`: of the planners; `prefetch`: P."""

    policy: Policy
    order: str = "ids"
    warm_start: float | str = AUTO
    split: str | Mapping[str, Any] = "proportional"
    prefetch: int = 1


def decide(
    world: World,
    tables: Sequence[TableSpec],
    state_widths: Sequence[int],
    budget: Budget,
    use: Use,
    read: Callable[[], Statistics | None],
) -> tuple[tuple[int, ...], Popularity | None]:
    """Slots C of each group, and the popularity of rows where there are statistics.

    `state_widths`: S of each table's rows; `read` gives the statistics of `tables`, in order, or
    None. Called by all ranks; raises ConfigError on all of them.
    """
    found: list[Statistics | None] = []
    together(world, lambda: found.append(read()))
    statistics = found[0]

    def on_first() -> tuple[SlotPlan, tuple[int, ...] | None] | None:
        if not world.is_first:
            return None
        plan = plan_slots(tables, state_widths, budget, use.split, statistics)
        if statistics is None or use.policy.ranking != "static":
            return plan, None
        return plan, pinned_rows(tables, plan.slots, statistics, budget, use.prefetch + 1)

    decided = together(world, on_first)[0]
    if decided is None:
        raise RuntimeError("rank 0 decides the slots")
    plan, pinned = decided
    if statistics is None:
        return plan.slots, None
    if world.is_first:
        _report(tables, state_widths, budget.itemsize, plan, statistics)
    by_itself = WARM_START if pinned is None else 1.0
    return plan.slots, Popularity(
        statistics,
        plan.hot_rows,
        order=use.order == "popularity",
        warm_start=by_itself if use.warm_start == AUTO else float(use.warm_start),
        classes=use.policy.needs_popularity,
        pinned_rows=pinned,
    )


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
        named = counted.lookups_of_hottest(hot) / max(counted.lookups, 1)
        lines.append(
            f"{table.name:<24} {table.rows:>13,} {hot:>11,} {hot / table.rows:>7.2%} "
            f"{named:>8.1%}  {describe_bytes(sizes[place])}"
        )
    if len(tables) > _SHOWN:
        lines.append(f"... and {len(tables) - _SHOWN} smaller ones")
    slots = " + ".join(map(str, plan.slots))
    log.info("the cache of %s slots by table:\n%s", slots, "\n".join(lines))
