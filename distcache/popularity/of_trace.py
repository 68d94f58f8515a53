"""Popularity classes counted from a trace itself: what statistics of that very data say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcache.planner.cases import Case
from distcache.planner.policy import PINNED
from distcache.planner.replay import Popularity
from distcache.planner.trace import Trace
from distcache.popularity.classes import row_classes
from distcache.popularity.statistics import Statistics, TableCounts


def popularity_of(traces: Sequence[Trace]) -> Popularity:
    """The `popularity` for `replay`: classes of every row, uint8 `[V]`, by case and group.

    Counts are of the training steps. For `static` the hottest rows are pinned, as many as
    `pinned_rows` says.
    """
    counted = [_table(trace) for trace in traces]
    plain: dict[int, np.ndarray] = {}

    def classes(case: Case, group: int) -> np.ndarray | None:
        if case.policy is None or not case.policy.needs_popularity:
            return None
        table = counted[group]
        if group not in plain:
            plain[group] = row_classes(Statistics((table,), "ids", 0), [0])
        if case.policy.ranking != "static":
            return plain[group]
        pinned = plain[group].copy()
        pinned[table.hottest(pinned_rows(traces[group], table.order, case, group))] = PINNED
        return pinned

    return classes


def pinned_rows(trace: Trace, hottest: np.ndarray, case: Case, group: int = 0) -> int:
    """How many of the rows `hottest` (int64, the hottest first) a static policy may pin.

    As many as leave room for the other rows of any P + 1 steps in a row, at every home, so that a
    step's rows never press a pinned one out and holds stay whole; found by bisection.
    """
    homes = trace.of_world(case.world_size)
    ranks = []
    for home in homes:
        order = np.argsort(hottest)
        place = np.searchsorted(hottest, home.names, sorter=order)
        place = np.minimum(place, max(len(hottest) - 1, 0))
        known = hottest[order[place]] == home.names
        ranks.append(np.where(known, order[place], len(hottest)))
    slots, steps = case.home_slots[group], case.prefetch + 1

    def fits(count: int) -> bool:
        for home, rank in zip(homes, ranks, strict=True):
            cold = np.concatenate(([0], np.cumsum(rank[home.numbers] >= count)))
            ends = home.starts[np.minimum(np.arange(home.steps) + steps, home.steps)]
            most = int((cold[ends] - cold[home.starts[:-1]]).max(initial=0))
            if int((rank < count).sum()) + most > slots:
                return False
        return True

    low, high = 0, min(len(hottest), slots * case.world_size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _table(trace: Trace) -> TableCounts:
    rows, counts = trace.row_counts()
    return TableCounts(
        "trace", trace.rows, int(counts.sum()), int(np.count_nonzero(counts)), counts, rows
    )
