"""The budget of a cache split over groups and tables: `cache.split`.

A group's tables share one pool of slots, so a split decides the slots C of each group, and, per
table, the hot prefix: how many of its most frequent rows lie in the cache first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distcache.errors import ConfigError
from distcache.layout import TableSpec, group_tables
from distcache.popularity.curves import GroupCurves, least_slots

PROPORTIONAL, BY_CURVE = "proportional", "by_curve"

SPLITS = (PROPORTIONAL, BY_CURVE)
"""By name; a mapping of tables to rows is the third."""


def slots_by_curve(groups: Sequence[GroupCurves], budget: int, world_size: int) -> list[int]:
    """Slots C of each group, multiples of W, for the fewest expected fetches per byte.

    A row that is needed with probability q by a step saves q fetches a step where it is cached,
    for its bytes: rows are taken by q / bytes while the `budget` (bytes on one rank) lasts. Each
    group gets at least `least_slots` first. Raises ConfigError where the budget is below that.
    """
    least = [least_slots(group, world_size) for group in groups]
    needed = sum(slots * group.row_bytes for slots, group in zip(least, groups, strict=True))
    if budget < needed:
        raise ConfigError(
            f"cache.split={BY_CURVE}: a step is expected to need {_listed(least)} slots of "
            f"{_listed([group.row_bytes for group in groups])} bytes each (by group), {needed} "
            f"bytes together, but the budget is {budget} bytes: set cache.bytes={needed} or more, "
            "or lower data.global_batch_size"
        )
    slots, left = list(least), budget - needed
    full = [-(-group.rows // world_size) * world_size for group in groups]
    for group, rows in _by_saving(groups, least):
        size = groups[group].row_bytes
        taken = min(rows, left // size, full[group] - slots[group])
        slots[group] += taken
        left -= taken * size
    return [count // world_size * world_size for count in slots]


def _by_saving(groups: Sequence[GroupCurves], least: Sequence[int]) -> list[tuple[int, int]]:
    """(group, rows) in the order of saving per byte, without each group's `least` likeliest."""
    saving, rows, owner = [], [], []
    for index, (group, skipped) in enumerate(zip(groups, least, strict=True)):
        use = np.concatenate([np.append(c.use, 0.0) for c in group.tables])
        count = np.concatenate([np.append(c.rows, c.unseen) for c in group.tables])
        order = np.argsort(-use, kind="stable")
        ends = np.cumsum(count[order])
        saving.append(use[order] / group.row_bytes)
        rows.append(np.minimum(np.maximum(ends - skipped, 0), count[order]))
        owner.append(np.full(len(order), index))
    order = np.argsort(-np.concatenate(saving), kind="stable")
    rows, owner = np.concatenate(rows)[order], np.concatenate(owner)[order]
    kept = rows > 0
    return list(zip(owner[kept].tolist(), rows[kept].tolist(), strict=True))


def given_rows(split: Mapping[str, Any], tables: Sequence[TableSpec]) -> list[int]:
    """The rows that a user's `split` gives each table, by table or feature; 0 to the others.

    Raises ConfigError for an unknown table, or a number that is not from 0 to the table's rows.
    """
    places = {table.name: place for place, table in enumerate(tables)}
    for place, table in enumerate(tables):
        for feature in table.features:
            places.setdefault(feature, place)
    rows, named = [0] * len(tables), dict[int, str]()
    for name, count in split.items():
        key = f"cache.split: {name}={count}"
        if name not in places:
            known = ", ".join(table.name for table in tables[:20])
            raise ConfigError(
                f"{key} names no table: choose from {known}{', ...' if len(tables) > 20 else ''}"
            )
        place = places[name]
        if place in named:
            raise ConfigError(f"{key} names the table that {named[place]} names: give one of them")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"{key}: give a whole number of rows, at least 0")
        if count > tables[place].rows:
            raise ConfigError(
                f"{key}, but the table has {tables[place].rows} rows: give at most so"
            )
        rows[place], named[place] = count, name
    return rows


def slots_as_given(hot_rows: Sequence[int], tables: Sequence[TableSpec], world: int) -> list[int]:
    """Slots C of each group for each table's rows, up to a multiple of W = `world`.

    Raises ConfigError for a group without a row.
    """
    slots = []
    for members in group_tables(tables):
        total = sum(hot_rows[table] for table in members)
        if total == 0:
            names = ", ".join(tables[table].name for table in members[:10])
            raise ConfigError(
                f"cache.split gives no row to the tables of width {tables[members[0]].dim} "
                f"({names}), which have slots of their own: give them the rows of a step at least"
            )
        slots.append(-(-total // world) * world)
    return slots


def _listed(values: Sequence[int]) -> str:
    return " + ".join(map(str, values))
