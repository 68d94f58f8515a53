"""From a budget, a split and statistics to each group's slots and each table's hot rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distcache.cache.size import cache_bytes, cache_slots
from distcache.errors import ConfigError
from distcache.layout import TableSpec, group_tables
from distcache.popularity.curves import (
    Curve,
    GroupCurves,
    curve_of,
    hot_prefixes,
    lookups_per_step,
    pinned_prefixes,
)
from distcache.popularity.split import (
    BY_CURVE,
    PROPORTIONAL,
    SPLITS,
    given_rows,
    slots_as_given,
    slots_by_curve,
)
from distcache.popularity.statistics import Statistics, TableCounts, fingerprint_of


@dataclass(frozen=True)
class Budget:
    """What the slots of one rank may take: at most one of `rows`, `ratio` and `bytes`, as for
    `cache_slots`; `itemsize`: bytes of an element; `world_size`: W; `batch`: samples of a step."""

    rows: int | None
    ratio: float | None
    bytes: int | None
    itemsize: int
    world_size: int
    batch: int = 1


@dataclass(frozen=True)
class SlotPlan:
    """`slots`: C of each group; `hot_rows`: for each table, how many of its most frequent rows lie
    in the cache first (0 where nothing says so)."""

    slots: tuple[int, ...]
    hot_rows: tuple[int, ...]


def plan_slots(
    tables: Sequence[TableSpec],
    state_widths: Sequence[int],
    budget: Budget,
    split: str | Mapping[str, Any],
    statistics: Statistics | None,
) -> SlotPlan:
    """Split `budget` over the groups and tables.

    `state_widths`: S of each table's rows; `statistics`: of these tables, in order. `proportional`
    gives each group slots by its rows, `by_curve` by `slots_by_curve`; the hot rows are the
    likeliest of each group, as many as it has slots. A mapping gives the hot rows of each table,
    and their group as many slots. Raises ConfigError where the split does not fit the tables, the
    budget, or lacks statistics.
    """
    groups = group_tables(tables)
    sizes = []
    for members in groups:
        rows = sum(tables[table].rows for table in members)
        sizes.append((rows, tables[members[0]].dim, state_widths[members[0]]))
    if not isinstance(split, str):
        plan = _as_given(tables, sizes, budget, split)
        if statistics is not None:
            _check_room(plan, groups, statistics, budget.batch)
        return plan
    if split not in SPLITS:
        raise ConfigError(
            f"cache.split={split} is unknown: choose {' or '.join(SPLITS)}, or give "
            "{table: rows} for each table"
        )
    world, item = budget.world_size, budget.itemsize
    slots = cache_slots(budget.rows, budget.ratio, budget.bytes, sizes, item, world)
    if statistics is None:
        if split != PROPORTIONAL:
            raise ConfigError(
                f"cache.split={split} needs to know how often rows are looked up: give "
                "cache.statistics=<folder of python -m distcache.analyze or preprocess>, or use "
                f"cache.split={PROPORTIONAL}"
            )
        return SlotPlan(tuple(slots), (0,) * len(tables))
    if split == BY_CURVE:
        curves = [_curve(statistics, table, budget.batch) for table in statistics.tables]
        grouped = [
            GroupCurves(tuple(curves[table] for table in members), (dim + state) * item)
            for members, (_, dim, state) in zip(groups, sizes, strict=True)
        ]
        allowed = budget.bytes or cache_bytes(slots, sizes, item)
        slots = slots_by_curve(grouped, allowed, world)
    return SlotPlan(tuple(slots), likeliest_rows(tables, slots, statistics, budget))


def _curve(statistics: Statistics, table: TableCounts, batch: int) -> Curve:
    return curve_of(table, lookups_per_step(statistics, table, batch))


def _as_given(
    tables: Sequence[TableSpec],
    sizes: Sequence[tuple[int, int, int]],
    budget: Budget,
    split: Mapping[str, Any],
) -> SlotPlan:
    """The split of a user; its total may not exceed `cache.rows` or `cache.bytes`."""
    hot = given_rows(split, tables)
    slots = slots_as_given(hot, tables, budget.world_size)
    taken = cache_bytes(slots, sizes, budget.itemsize)
    if budget.ratio is not None:
        raise ConfigError(
            f"cache.ratio={budget.ratio} and rows by table (cache.split) contradict each other: "
            "leave cache.ratio out"
        )
    for key, limit, total, what in (
        ("rows", budget.rows, sum(hot), "rows"),
        ("bytes", budget.bytes, taken, "bytes"),
    ):
        if limit is not None and total > limit:
            raise ConfigError(
                f"cache.split gives the tables {total} {what}, more than cache.{key}={limit}: "
                f"give fewer rows, or set cache.{key}={total} or more"
            )
    return SlotPlan(tuple(slots), tuple(hot))


def likeliest_rows(
    tables: Sequence[TableSpec], slots: Sequence[int], statistics: Statistics, budget: Budget
) -> tuple[int, ...]:
    """How many of each table's most frequent rows are among the likeliest of its group, of which
    there are as many as `slots` of the group."""
    hot = [0] * len(tables)
    for members, count in zip(group_tables(tables), slots, strict=True):
        curves = [_curve(statistics, statistics.tables[table], budget.batch) for table in members]
        for table, rows in zip(members, hot_prefixes(curves, count), strict=True):
            hot[table] = rows
    return tuple(hot)


def pinned_rows(
    tables: Sequence[TableSpec],
    slots: Sequence[int],
    statistics: Statistics,
    budget: Budget,
    steps: int,
) -> tuple[int, ...]:
    """For each table, how many of its most frequent rows stay in the cache for good.

    `slots`: C of each group; `steps`: steps whose other rows the remaining slots hold at once.
    """
    pinned = [0] * len(tables)
    for members, count in zip(group_tables(tables), slots, strict=True):
        curves = [_curve(statistics, statistics.tables[table], budget.batch) for table in members]
        prefixes = pinned_prefixes(curves, count, steps, budget.world_size)
        for table, rows in zip(members, prefixes, strict=True):
            pinned[table] = rows
    return tuple(pinned)


def _check_room(
    plan: SlotPlan, groups: Sequence[Sequence[int]], statistics: Statistics, batch: int
) -> None:
    """ConfigError for a group whose slots hold fewer rows than a step is expected to need."""
    for members, slots in zip(groups, plan.slots, strict=True):
        curves = [_curve(statistics, statistics.tables[table], batch) for table in members]
        needed = sum(curve.expected_rows for curve in curves)
        if needed > slots:
            names = ", ".join(statistics.tables[table].feature for table in members[:10])
            raise ConfigError(
                f"cache.split gives {slots} slots to the tables of {names}, but a step is expected "
                f"to need {needed:.0f} of their rows at once: give them more, or lower "
                "data.global_batch_size"
            )


def statistics_of(statistics: Statistics, tables: Sequence[TableSpec], given: str) -> Statistics:
    """`statistics` with one entry for each of `tables`, in order; features of one table add up.

    `given`: where they come from, for errors. Raises ConfigError, with both fingerprints, where
    they lack a feature, or count other rows than its table has.
    """
    found = {table.feature: table for table in statistics.tables}
    counts = []
    for table in tables:
        parts = [found[feature] for feature in table.features if feature in found]
        if len(parts) < len(table.features) or any(part.rows != table.rows for part in parts):
            features = [feature for table in tables for feature in table.features]
            rows = [table.rows for table in tables for _ in table.features]
            wanted = fingerprint_of(features, rows, statistics.vocabulary)
            raise ConfigError(
                f"{given} (fingerprint {statistics.fingerprint}) are statistics of the features "
                f"{_described(statistics)}; table {table.name!r} has {table.rows} rows, read by "
                f"{', '.join(table.features)} (all tables: fingerprint {wanted}): count this "
                "model's data with python -m distcache.analyze"
            )
        counts.append(parts[0] if len(parts) == 1 else _added(table, parts))
    return replace(statistics, tables=tuple(counts))


def _described(statistics: Statistics) -> str:
    pairs = zip(statistics.features, statistics.table_rows, strict=True)
    return ", ".join(f"{feature} ({rows} rows)" for feature, rows in pairs)


def _added(table: TableSpec, parts: Sequence[TableCounts]) -> TableCounts:
    counts = np.sum([part.dense() for part in parts], axis=0)
    return TableCounts(
        feature=table.name,
        rows=table.rows,
        lookups=sum(part.lookups for part in parts),
        distinct=int(np.count_nonzero(counts)),
        counts=counts,
        error=sum(part.error for part in parts),
    )
