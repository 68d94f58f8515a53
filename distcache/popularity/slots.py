"""How many slots each group of tables has, by size or by what a step needs of its rows."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.popularity.curve import Curve, room_for, room_of, top_rows
from distcache.popularity.statistics import Statistics, TableCounts, fingerprint_of


def listed(values: Sequence[int]) -> str:
    """Numbers of groups for messages."""
    return " + ".join(map(str, values))


# -----------------------------------------------------------------------------
# What a step needs of the tables that share slots.


@dataclass(frozen=True)
class StepCurves:
    """The curves of tables that share slots, in a step that makes `lookups[t]` lookups of table t.

    Rows go by how likely the step needs them (q), which differs between tables of equal counts.
    """

    tables: tuple[Curve, ...]
    lookups: tuple[float, ...]

    @classmethod
    def of(cls, statistics: Statistics, tables: Sequence[int], batch: float) -> StepCurves:
        """Of some of the counted tables, for a global batch of `batch` samples."""
        curves = tuple(Curve.of(statistics.tables[t], statistics.samples) for t in tables)
        return cls(curves, tuple(curve.per_sample * batch for curve in curves))

    @cached_property
    def use(self) -> tuple[np.ndarray, ...]:
        """q of each table's entries; float64 `[k]`, falling."""
        return tuple(c.touched(n) for c, n in zip(self.tables, self.lookups, strict=True))

    @cached_property
    def expected(self) -> float:
        """Distinct rows that a step is expected to need."""
        return sum(float(q @ c.rows) for q, c in zip(self.use, self.tables, strict=True))

    def likeliest(self, slots: int) -> list[int]:
        """How many of each table's most frequent rows are among the `slots` likeliest of all; rows
        that were never looked up are not."""
        return top_rows(self.use, [curve.rows for curve in self.tables], slots)

    def misses(self, hot_rows: Sequence[int]) -> float:
        """Distinct rows of a step that are expected outside each table's `hot_rows` likeliest."""
        parts = zip(self.use, self.tables, hot_rows, strict=True)
        return sum(float(q @ curve.below(hot)) for q, curve, hot in parts)

    def least_slots(self, world_size: int) -> int:
        """Slots, a multiple of W, in which a step is expected to fit with room to spare.

        Its rows fall to W homes like independent draws, and each home gets the room for its part,
        but not more slots than it has rows.
        """
        homed = [q / world_size for q in self.use]
        home = math.ceil(room_of(homed, [curve.rows for curve in self.tables]))
        rows = sum(curve.table_rows for curve in self.tables)
        return min(max(home, 1), -(-rows // world_size)) * world_size

    def pinned(self, slots: int, steps: int, world_size: int) -> list[int]:
        """How many of each table's most frequent rows may stay in `slots` slots for good.

        As many as leave room, at the fullest home, for the other rows that `steps` steps are
        expected to need.
        """

        def full(rows: int) -> bool:
            others = steps * self.misses(self.likeliest(rows))
            spread = others + (rows if world_size > 1 else 0)  # which home has them is chance
            return room_for(rows + others, spread * world_size) > slots

        return self.likeliest(bisect_left(range(1, slots + 1), True, key=full))


# -----------------------------------------------------------------------------
# Slots per rank for each group of tables, from cache.rows, cache.ratio or cache.bytes, or by
# default.

log = logging.getLogger(__name__)

DEFAULT_RATIO = Fraction("0.015")
"""Slots as a share of the rows when none of the three keys is given,"""

DEFAULT_BYTES = 32 << 20
"""but at least as many as fit in these bytes, rows and state: small tables are cached whole."""

MARGIN = 1.2
"""Times the rows that P + 2 steps are expected to name: room for them, where that is known."""


def cache_slots(
    rows: int | None,
    ratio: float | None,
    bytes: int | None,
    groups: Sequence[tuple[int, int, int]],
    itemsize: int,
    world_size: int,
    expected: Sequence[float] = (),
) -> list[int]:
    """Slots per rank (C) of each group.

    At most one of `rows` (slots over all groups), `ratio` (of each group's rows, in (0, 1]) and
    `bytes` (device memory of all groups' slots) is given. None means, for each group, the most of
    1.5 % of its rows, of what 32 MiB hold of them, and of 1.2 times `expected`: the distinct rows
    of each group that the steps on the device at once are expected to name (empty: not known).
    `groups`: (V, D, S) of each, D and S as elements of `itemsize` bytes; `world_size`: W.

    `rows` and `bytes` are split over the groups by their rows V; bytes that a group cannot use go
    to the others. C is a multiple of W, because home h owns C / W slots: `rows` and `ratio` are
    rounded up to it, `bytes` down, as it is a bound; at least W, at most W * ceil(V / W) (a cache
    larger than the tables is capped, and logged).
    """
    given = (("rows", rows), ("ratio", ratio), ("bytes", bytes))
    key, value = next(((key, size) for key, size in given if size is not None), ("", 0))
    all_rows = sum(v for v, _, _ in groups)
    full = [-(-v // world_size) * world_size for v, _, _ in groups]
    largest = {"rows": all_rows, "bytes": cache_bytes(full, groups, itemsize)}
    if value > largest.get(key, value):
        log.warning(
            "cache larger than the tables: capped (cache.%s=%d, all rows take %d)",
            *(key, value, largest[key]),
        )
    if not key:
        wanted = []
        for place, (v, dim, state) in enumerate(groups):
            small = min(v, DEFAULT_BYTES // ((dim + state) * itemsize))
            named = MARGIN * expected[place] if expected else 0.0
            wanted.append(max(math.ceil(DEFAULT_RATIO * v), small, math.ceil(named)))
    elif key == "ratio":
        share = Fraction(str(value))  # the decimal that was typed: 0.07 of 100 rows is 7
        wanted = [math.ceil(share * v) for v, _, _ in groups]
    elif key == "rows":
        wanted = [-(-int(value) * v // all_rows) for v, _, _ in groups]
    else:
        wanted, left, rest = list(full), int(value), all_rows
        sizes = [(dim + state) * itemsize for _, dim, state in groups]
        # Those come first that are full first, whose rows take least: the others split the rest.
        for g in sorted(range(len(groups)), key=lambda g: full[g] * sizes[g] / groups[g][0]):
            share = left * groups[g][0] // rest
            wanted[g] = min(share // sizes[g], full[g]) // world_size * world_size
            left -= min(share, full[g] * sizes[g])
            rest -= groups[g][0]
    return [
        min(max(-(-slots // world_size) * world_size, world_size), most)
        for slots, most in zip(wanted, full, strict=True)
    ]


def cache_bytes(slots: Sequence[int], groups: Sequence[tuple[int, int, int]], itemsize: int) -> int:
    """Device bytes of one rank's slots of all groups, rows and optimizer state."""
    pairs = zip(slots, groups, strict=True)
    return sum(count * (dim + state) * itemsize for count, (_, dim, state) in pairs)


# -----------------------------------------------------------------------------
# The budget of a cache split over groups and tables: `cache.split`.
#
# A group's tables share one pool of slots, so a split decides the slots C of each group, and, per
# table, the hot prefix: how many of its most frequent rows lie in the cache first.

PROPORTIONAL, BY_CURVE = "proportional", "by_curve"


def slots_by_curve(
    groups: Sequence[StepCurves], row_bytes: Sequence[int], budget: int, world_size: int
) -> list[int]:
    """Slots C of each group, multiples of W, for the fewest expected fetches per byte.

    A row that is needed with probability q by a step saves q fetches a step where it is cached,
    for its bytes (`row_bytes`: of a row and its state, by group): rows are taken by q / bytes while
    the `budget` (bytes on one rank) lasts. Each group gets at least its `least_slots` first. Raises
    ConfigError where the budget is below that.
    """
    least = [group.least_slots(world_size) for group in groups]
    needed = sum(slots * size for slots, size in zip(least, row_bytes, strict=True))
    if budget < needed:
        raise ConfigError(
            f"cache.split={BY_CURVE}: a step is expected to need {listed(least)} slots of "
            f"{listed(row_bytes)} bytes each (by group), {needed} bytes together, but the budget "
            f"is {budget} bytes: set cache.bytes={needed} or more, or lower data.global_batch_size"
        )
    saving, room = [], []  # of rows beyond each group's least, in bytes
    for group, size, skipped in zip(groups, row_bytes, least, strict=True):
        use = np.concatenate([np.append(q, 0.0) for q in group.use])
        count = np.concatenate([np.append(c.rows, c.table_rows - c.distinct) for c in group.tables])
        order = np.argsort(-use, kind="stable")
        saving.append(use[order] / size)
        room.append(np.clip(np.cumsum(count[order]) - skipped, 0, count[order]) * size)
    taken = zip(top_rows(saving, room, budget - needed), row_bytes, least, strict=True)
    return [(own + more // size) // world_size * world_size for more, size, own in taken]


def given_rows(
    split: Mapping[str, Any], tables: Sequence[TableSpec], of: str = "cache.split"
) -> list[int]:
    """The rows that a user's key `of` gives each table, by table or feature; 0 to the others.

    Raises ConfigError for an unknown table, one that is named twice, or more rows than it has.
    """
    places = {table.name: place for place, table in enumerate(tables)}
    for place, table in enumerate(tables):
        for feature in table.features:
            places.setdefault(feature, place)
    rows, named = [0] * len(tables), dict[int, str]()
    for name, count in split.items():
        key = f"{of}: {name}={count}"
        if name not in places:
            known = ", ".join(table.name for table in tables[:20])
            raise ConfigError(
                f"{key} names no table: choose from {known}{', ...' if len(tables) > 20 else ''}"
            )
        place = places[name]
        if place in named:
            raise ConfigError(f"{key} names the table that {named[place]} names: give one of them")
        most = tables[place].rows
        if count > most:
            raise ConfigError(f"{key}, but the table has {most} rows: give at most {most}")
        rows[place], named[place] = count, name
    return rows


# -----------------------------------------------------------------------------
# Statistics of the tables of a model.


def statistics_of(
    statistics: Statistics, tables: Sequence[TableSpec], given: str, vocabulary: str | None = None
) -> Statistics:
    """`statistics` with one entry for each of `tables`, in order; features of one table add up.

    `given`: where they come from, for errors; `vocabulary`: of the data, where it is known. Raises
    ConfigError, with both fingerprints, where they lack a feature, count other rows than its table
    has, or are of another vocabulary.
    """
    vocabulary = statistics.vocabulary if vocabulary is None else vocabulary
    alike = vocabulary == statistics.vocabulary
    found = {table.feature: table for table in statistics.tables}
    counts = []
    for table in tables:
        counted = [found.get(name, found.get(table.feature_of(name))) for name in table.features]
        parts = [part for part in counted if part is not None]
        lacks = len(parts) < len(table.features) or any(p.rows != table.rows for p in parts)
        if lacks or not alike:
            features = [feature for table in tables for feature in table.features]
            rows = [table.rows for table in tables for _ in table.features]
            wanted = fingerprint_of(features, rows, vocabulary)
            raise ConfigError(
                f"{given} are statistics {statistics.described}; table {table.name!r} has "
                f"{table.rows} rows, read by {', '.join(table.features)}, of {vocabulary} (all "
                f"tables: fingerprint {wanted}): count this data with python -m distcache.analyze"
            )
        if len(parts) == 1:
            counts.append(parts[0])
        else:
            summed = np.sum([part.dense() for part in parts], axis=0)
            counts.append(TableCounts.of(table.name, summed))
    return replace(statistics, tables=tuple(counts))
