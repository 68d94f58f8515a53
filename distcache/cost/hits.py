"""How many rows of a step a cache holds already, from popularity alone.

Rows are touched independently from step to step (the independent reference model). The planner of
policy `lookahead` with tail `lfu` keeps the rows that are used again within its window, and beside
them those used most often: once popularity is learnt, the most popular rows stay for good, and the
others pass through. Of the steps before that, `miniature` tells. Where ids are at hand,
`planner.replay` counts what this estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.cost.demand import GroupDemand
from distcache.cost.miniature import miniature


@dataclass(frozen=True)
class Hits:
    """Per step, over all homes: `touched` distinct rows, of which `fetched` are missing, and
    `written_back` rows that leave for them."""

    touched: float
    fetched: float
    written_back: float

    @property
    def rate(self) -> float:
        """Hit rate of distinct rows; 1 where none is touched."""
        return 1.0 - self.fetched / self.touched if self.touched else 1.0


def expected_hits(
    groups: Sequence[GroupDemand], slots: Sequence[float], window: int, prefetch: int,
    steps: int | None = None,
) -> Hits:  # fmt: skip
    """The hits of caches of `slots` distinct rows for each of `groups`, over all homes.

    `window` L, `prefetch` P; `steps`: of a run that starts with an empty cache; None: once it is
    warm.
    """
    parts = [
        _group_hits(group, count, window, prefetch, steps)
        for group, count in zip(groups, slots, strict=True)
    ]
    sums = (sum(getattr(p, name) for p in parts) for name in ("touched", "fetched", "written_back"))
    return Hits(*sums)


def _group_hits(
    group: GroupDemand, slots: float, window: int, prefetch: int, steps: int | None
) -> Hits:
    """The hits of one group.

    Of a run that starts cold every first use is a fetch, and rows that leave are fetched again: as
    often as in a miniature of its first steps, and from there on as once it is warm.
    """
    rows, chance = _by_chance(group)
    touched = float(rows @ chance)
    if touched == 0:
        return Hits(0.0, 0.0, 0.0)
    warm = _warm(rows, chance, slots, window, prefetch)
    if steps is None:
        missing = float(((1.0 - warm.inside) * warm.missing).sum())
        return Hits(touched, missing, missing)
    seen = float(rows @ (1.0 - (1.0 - chance) ** steps))
    if seen <= slots:  # nothing leaves
        return Hits(touched, seen / steps, 0.0)
    fetched = warm.fetched(rows, chance, steps)
    small = miniature(rows, chance, slots, (window, prefetch), steps)
    if small is not None:
        first = float(rows @ (1.0 - (1.0 - chance) ** small.steps))
        fetched += first + small.again - warm.fetched(rows, chance, small.steps)
    return Hits(touched, fetched / steps, max(fetched - slots, 0.0) / steps)


@dataclass(frozen=True)
class _Warm:
    """A warm cache, by bucket, float64 `[k]`: the share of rows that stay for good (`inside`), and
    the rows of a step that a cache without them would not have (`missing`)."""

    inside: np.ndarray
    missing: np.ndarray

    def fetched(self, rows: np.ndarray, chance: np.ndarray, steps: int) -> float:
        """Rows that the first so many steps fetch if popularity were known from the start."""
        seen = rows * (1.0 - (1.0 - chance) ** steps)
        return float((1.0 - self.inside) @ self.missing * steps + self.inside @ seen)


def _warm(rows: np.ndarray, chance: np.ndarray, slots: float, window: int, prefetch: int) -> _Warm:
    """Static rows hit always, the others where they are used again soon.

    A row that passes through stays P + 1 steps, or until its next use if that is at most
    G = P + 1 + L steps away: so the planner sees it when the row might leave.
    """
    kept, static = prefetch + 1 + window, 0.0
    while True:
        passing = rows * _passing(chance, kept, prefetch + 1)
        ends = np.concatenate(([0.0], np.cumsum(rows)))
        room = ends + passing.sum() - np.concatenate(([0.0], np.cumsum(passing)))
        if room[0] <= slots or kept == prefetch + 1:
            break
        kept -= 1  # the slots do not hold all rows of the window: what is used last goes
    if room[0] < slots:
        static = float(np.interp(slots, room, ends))
    inside = np.clip((static - ends[:-1]) / rows, 0.0, 1.0)
    return _Warm(inside, rows * chance * (1.0 - chance) ** kept)


def _by_chance(group: GroupDemand) -> tuple[np.ndarray, np.ndarray]:
    """Rows and Q of all tables' buckets, the likeliest first; those never touched left out."""
    if not group.tables:
        return np.empty(0), np.empty(0)
    rows = np.concatenate([table.met[0] for table in group.tables])
    chance = np.concatenate([table.met[1] for table in group.tables])
    order = np.argsort(-chance, kind="stable")
    rows, chance = rows[order], np.minimum(chance[order], 1.0)
    used = (rows > 0) & (chance > 0)
    return rows[used], chance[used]


def _passing(chance: np.ndarray, kept: int, held: int) -> np.ndarray:
    """Share of the time that a row touched with probability `chance` is in the cache if it stays
    for its next use at most `kept` steps away, else for `held` steps."""
    rest = (1.0 - chance) ** kept
    return np.minimum(1.0 - rest + chance * rest * (held - kept), 1.0)
