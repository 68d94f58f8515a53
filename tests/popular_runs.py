"""Statistics of a scenario's batches, and runs of it with a popularity."""

from __future__ import annotations

from counting import count_ids
from scenarios import Outcome, Scenario, run_mode

from distcache.comm.world import World
from distcache.layout import TableSpec, group_tables
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.popularity.curve import Curve, StepCurves
from distcache.popularity.slots import statistics_of
from distcache.popularity.statistics import Popularity, Statistics


def count(case: Scenario, steps: range) -> Statistics:
    """Counts of every feature over some steps of a scenario."""
    rows = {feature: table.rows for table in case.tables for feature in table.features}
    return count_ids(
        {feature: rows[feature] for feature in case.features},
        (case.batch(step).ids for step in steps),
    )


def popularity_of(case: Scenario, slots: tuple[int, ...], **how: object) -> Popularity:
    """The popularity of the first half of a run for caches of `slots`."""
    counted = statistics_of(count(case, range(max(case.steps // 2, 1))), case.tables, "here")
    hot = hot_rows_for(case.tables, slots, counted)
    return Popularity(counted, hot, **how)


def hot_rows_for(tables: tuple[TableSpec, ...], slots: tuple[int, ...], counted: Statistics):
    """The likeliest rows of each group, as many as it has slots."""
    hot = [0] * len(tables)
    for members, total in zip(group_tables(tables), slots, strict=True):
        curves = tuple(Curve.of(counted.tables[i]) for i in members)
        step = StepCurves(curves, (1.0,) * len(members))
        for table, rows in zip(members, step.likeliest(total), strict=True):
            hot[table] = rows
    return tuple(hot)


def make_popular(
    world: World, case: Scenario, settings: CachedSettings, popularity: Popularity | None
) -> CachedParallel:
    """The mode of a scenario."""
    mode = CachedParallel(
        world, case.tables, case.features, case.model(), case.optimizer, settings, popularity
    )
    mode.set_lr(case.lr, case.lr)
    return mode


def run_popular(
    world: World, case: Scenario, settings: CachedSettings, popularity: Popularity | None
) -> Outcome:
    """Train `case`, with an evaluation batch every five steps."""
    return run_mode(world, case, settings, 5, popularity)
