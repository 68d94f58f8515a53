"""How many rows a step needs how likely: from counts to curves, and what follows from them.

A step's n lookups of a table are n of the N that were counted, none twice. A row that c of them
name is needed by a step with probability q = 1 - C(N - c, n) / C(N, n) (Hurlbert, 1971), which is
1 - (1 - c / N)^n for small n / N. The sum of q is the expected number of distinct rows, without
bias also where the N are a sample: the rows that it lacks need no guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.popularity.statistics import Statistics, TableCounts

DEVIATIONS = 6.0
"""Slots that a step is given room for, in standard deviations above the rows it is expected to
need."""


@dataclass(frozen=True)
class Curve:
    """Rows of one table by how likely a step needs them.

    `use` float64 `[m]`, descending: the probability q; `rows` int64 `[m]`: how many rows have it.
    `unseen`: rows that no lookup named.
    """

    use: np.ndarray
    rows: np.ndarray
    unseen: int = 0

    @property
    def expected_rows(self) -> float:
        """Distinct rows that a step is expected to need."""
        return float(self.use @ self.rows)


@dataclass(frozen=True)
class GroupCurves:
    """The curves of a group's tables; `row_bytes`: bytes of a row and its optimizer state."""

    tables: tuple[Curve, ...]
    row_bytes: int

    @property
    def rows(self) -> int:
        """V: rows of all tables."""
        return sum(int(curve.rows.sum()) + curve.unseen for curve in self.tables)


def row_use(counts: np.ndarray, lookups: int, per_step: float) -> np.ndarray:
    """q of rows that `counts` of `lookups` lookups name, for `per_step` lookups; float64.

    C(N - c, n) / C(N, n) is a product of c factors 1 - n / (N - i), and one of n factors
    1 - c / (N - i): the one with fewer factors, each of them taken at the middle i. Below one
    lookup a step, q is that share of what one lookup has.
    """
    counts = np.asarray(counts, dtype=np.float64)
    if per_step < 1:
        return per_step * counts / max(lookups, 1)
    few, many = np.minimum(counts, per_step), np.maximum(counts, per_step)
    left = lookups - np.maximum(few - 1, 0) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = -np.expm1(few * np.log1p(-np.minimum(many / left, 1.0)))
    return np.where(counts > 0, chance, 0.0)


def lookups_per_step(statistics: Statistics, table: TableCounts, batch: int) -> float:
    """Lookups of `table` that a global batch of `batch` samples makes, on average."""
    return table.lookups / max(statistics.samples, 1) * batch


def curve_of(table: TableCounts, per_step: float) -> Curve:
    """The curve of a table for steps of `per_step` lookups."""
    values, rows = table.histogram()
    return Curve(row_use(values, table.lookups, per_step), rows, table.rows - int(rows.sum()))


def least_slots(group: GroupCurves, world_size: int) -> int:
    """Slots, a multiple of W, in which a step of a group is expected to fit with room to spare.

    The rows of a step fall to W homes like independent draws; each home gets as many slots as it
    is expected to need and `DEVIATIONS` standard deviations more, but not more than its rows.
    """
    mean = sum(curve.expected_rows for curve in group.tables) / world_size
    variance = 0.0
    for curve in group.tables:
        homed = curve.use / world_size
        variance += float(curve.rows @ (homed * (1 - homed)))
    home = math.ceil(mean + DEVIATIONS * math.sqrt(variance))
    return min(max(home, 1), -(-group.rows // world_size)) * world_size


def hot_prefixes(tables: Sequence[Curve], slots: int) -> list[int]:
    """How many of each table's most frequent rows are among the `slots` likeliest of all.

    Only rows that were looked up count; where several are as likely, earlier tables' come first.
    """
    use = np.concatenate([curve.use for curve in tables])
    rows = np.concatenate([curve.rows for curve in tables])
    owner = np.repeat(np.arange(len(tables)), [len(curve.use) for curve in tables])
    order = np.argsort(-use, kind="stable")
    ends = np.cumsum(rows[order])
    taken = np.clip(slots - (ends - rows[order]), 0, rows[order])
    return [int(taken[owner[order] == place].sum()) for place in range(len(tables))]


def expected_misses(tables: Sequence[Curve], hot_rows: Sequence[int]) -> float:
    """Distinct rows of a step that are expected outside each table's `hot_rows` likeliest."""
    outside = 0.0
    for curve, hot in zip(tables, hot_rows, strict=True):
        inside = np.clip(hot - (np.cumsum(curve.rows) - curve.rows), 0, curve.rows)
        outside += curve.expected_rows - float(curve.use @ inside)
    return outside


def pinned_prefixes(tables: Sequence[Curve], slots: int, steps: int, world_size: int) -> list[int]:
    """How many of each table's most frequent rows may stay in a group's `slots` for good.

    As many as leave room, with `DEVIATIONS` to spare at the fullest home, for the other rows that
    `steps` steps are expected to need.
    """
    low, high = 0, slots
    while low < high:
        middle = (low + high + 1) // 2
        others = steps * expected_misses(tables, hot_prefixes(tables, middle))
        spread = others + (middle if world_size > 1 else 0)  # which home has them is chance
        if middle + others + DEVIATIONS * math.sqrt(spread * world_size) <= slots:
            low = middle
        else:
            high = middle - 1
    return hot_prefixes(tables, low)
