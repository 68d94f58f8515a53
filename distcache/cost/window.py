"""Demand measured from the ids of a few steps, as they are at hand when training starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distcache.cost.demand import Demand, GroupDemand, TableDemand, check_nodes
from distcache.cost.mixture import with_mixture
from distcache.errors import ConfigError
from distcache.layout import RowLayout


@dataclass(frozen=True)
class GroupWindow:
    """The ids of one group over S steps. `rows_by_step[s][r]`: row numbers (int64 `[n]`) of all
    lookups of rank r, in any order; `state_width` S; `features` that read each table."""

    layout: RowLayout
    rows_by_step: Sequence[Sequence[np.ndarray]]
    state_width: int
    features: Sequence[int] | None = None


def demand_of_window(windows: Sequence[GroupWindow], batch: float, local_ranks: int = 1) -> Demand:
    """The demand of the steps of a window, `batch` samples of a rank on average.

    `local_ranks`: ranks of each node, which are consecutive. Distinct rows per rank and step, of
    a node, and of all ranks, are exact averages. Prefixes are of the rows
    that the window names most often. What the cache meets again (`TableDemand.reuse`) is an
    estimate, for the window has not seen all rows (`mixture.with_mixture`). Raises ConfigError for
    a window without a step, or of another number of ranks than the layout has.
    """
    groups = []
    for window in windows:
        if not window.rows_by_step:
            raise ConfigError("the window of ids has no step: give at least one")
        world = window.layout.world_size
        for step, ranks in enumerate(window.rows_by_step):
            if len(ranks) != world:
                raise ConfigError(
                    f"step {step} of the window has ids of {len(ranks)} ranks, the layout is of "
                    f"{world}: give those of every rank"
                )
        check_nodes(world, local_ranks)
        groups.append(_group(window, local_ranks))
    if not groups:
        raise ConfigError("the window of ids has no group of tables")
    return Demand(tuple(groups), windows[0].layout.world_size, batch, local_ranks)


def _group(window: GroupWindow, local_ranks: int) -> GroupDemand:
    """Counts per row over the window: how many ranks' steps, nodes' steps, and steps name it."""
    layout, steps = window.layout, len(window.rows_by_step)
    world = layout.world_size
    together = [1, world, *([local_ranks] if 1 < local_ranks < world else [])]
    named = [_named(window, ranks) for ranks in together]
    rows = named[0][0]
    shares = [
        count / (steps * (world // ranks))
        for ranks, (_, count) in zip(together, named, strict=True)
    ]
    lookups = np.zeros(len(layout.tables))
    for ranks in window.rows_by_step:
        for part in ranks:
            lookups += _by_table(part, layout)
    tables = []
    features = window.features or [len(table.features) for table in layout.tables]
    for index, table in enumerate(layout.tables):
        low, high = np.searchsorted(rows, layout.offsets[index : index + 2])
        count, q, whole, *node = _merged([share[low:high] for share in shares])
        end = np.cumsum(count)
        start = end - count
        before = None if steps < 2 else np.rint(whole * steps - 1) / (steps - 1)
        each = float(lookups[index]) / (steps * world)
        found = TableDemand(
            table.name, table.rows, count, q, whole, start, end, each, features[index], before
        )
        found = replace(found, node=node[0] if node else None)
        reuse = None if steps < 2 else with_mixture(found, np.rint(whole * steps), steps, True)
        tables.append(replace(found, reuse=reuse))
    return GroupDemand(tuple(tables), layout.dim, window.state_width)


def _named(window: GroupWindow, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a window, ascending, and how often so many ranks in a row name each in a step."""
    world = window.layout.world_size
    parts = [
        np.unique(np.concatenate(step[first : first + ranks]))
        for step in window.rows_by_step
        for first in range(0, world, ranks)
    ]
    return np.unique(np.concatenate(parts), return_counts=True)


def _by_table(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    tables = np.searchsorted(layout.offsets, rows, side="right") - 1
    return np.bincount(tables, minlength=len(layout.tables)).astype(np.float64)


def _merged(shares: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Rows with equal `shares` (q, Q, and of nodes) as one bucket, by falling q: the rows of each,
    and its shares; float64 `[k]`."""
    found, count = np.unique(-np.stack(shares), axis=1, return_counts=True)
    return count.astype(np.float64), *(-found)
