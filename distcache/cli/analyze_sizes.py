"""How the hit rate grows with the cache: replays by size, the best fixed set, and the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distcache.planner.cases import Case
from distcache.popularity.curve import StaticSet
from distcache.popularity.profile import TableProfile
from distcache.run.prediction import Estimate, Prediction, Sizes

GRID = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes of the curve, as shares of the rows."""

CLOSE = 0.99
"""Where the target is out of reach, this share of what the whole tables reach is aimed at."""

_HALVINGS = 9
"""Of the logarithm of the size, while the target's size is searched."""


@dataclass(frozen=True)
class SizePoint:
    """A cache of `ratio` of the rows: what the run comes to, and the best fixed set of as many rows
    of each group (`static`: share of lookups, `static_distinct`: of a batch's distinct rows)."""

    ratio: float
    slots: tuple[int, ...]
    bytes: int
    estimate: Estimate
    static: float
    static_distinct: float

    @property
    def rate(self) -> float:
        """Share of lookups served; below 0 where training would refuse the size."""
        found = self.estimate.hit_rate_lookups
        return -1.0 if found is None else found


@dataclass(frozen=True)
class Target:
    """The smallest cache for a share of lookups. `whole`: with all rows on the device; `aim`: what
    was searched for, lower than `wanted` where no cache reaches that; `point`: the cache."""

    wanted: float
    aim: float
    whole: SizePoint
    point: SizePoint

    @property
    def reachable(self) -> bool:
        """Whether any cache reaches what was wanted."""
        return self.whole.rate >= self.wanted


class SizeSearch:
    """Replays of one policy by cache size, each size once."""

    def __init__(
        self,
        prediction: Prediction,
        sizes: Sizes,
        profiles: Sequence[TableProfile],
        case: Callable[[Sequence[int]], Case],
        world_size: int,
    ) -> None:
        """`case`: the configured case with these slots per rank."""
        self._prediction, self._sizes, self._case = prediction, sizes, case
        self._world = world_size
        self._static = [
            StaticSet.of(
                [profiles[table].curve for table in members],
                [profiles[table].batch_lookups for table in members],
            )
            for members in sizes.members
        ]
        self._known: dict[tuple[int, ...], SizePoint] = {}

    def at(self, ratio: float) -> SizePoint:
        """The point of a cache of `ratio` of the rows."""
        slots = self._sizes.slots(ratio, self._world)
        if slots not in self._known:
            self._known[slots] = SizePoint(
                ratio,
                slots,
                self._sizes.bytes_of(slots, self._world),
                self._prediction.estimate(self._case(slots)),
                _joint(self._static, slots, StaticSet.lookup_rate, "lookups"),
                _joint(self._static, slots, StaticSet.hit_rate, "touched"),
            )
        return self._known[slots]

    def _named(self, ratio: float) -> SizePoint:
        """The point of `ratio`, by that number even where another gave the same slots before."""
        point = replace(self.at(ratio), ratio=ratio)
        self._known[point.slots] = point
        return point

    def grid(self) -> list[SizePoint]:
        """The points of all sizes that training would not refuse, also those of the search."""
        for ratio in GRID:
            self.at(ratio)
        fits = [point for point in self._known.values() if point.estimate.refused is None]
        return sorted(fits, key=lambda point: point.slots)

    def target(self, wanted: float) -> Target:
        """The smallest cache that serves the share `wanted` of the lookups, to three digits."""
        whole = self.at(1.0)
        aim = wanted if whole.rate >= wanted else CLOSE * whole.rate
        low, high = math.log(1.0 / self._sizes.rows), 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.at(math.exp(middle)).rate >= aim:
                high = middle
            else:
                low = middle
        point = self._named(rounded_up(math.exp(high)))
        while point.rate < aim and point.ratio < 1:  # where a larger cache serves a little less
            point = self._named(rounded_up(1.05 * point.ratio))
        return Target(wanted, aim, whole, point)


def rounded_up(ratio: float) -> float:
    """`ratio` to three digits, upwards, at most 1."""
    if ratio >= 1:
        return 1.0
    digits = 2 - math.floor(math.log10(ratio))
    return min(1.0, round(math.ceil(ratio * 10**digits - 1e-9) / 10**digits, digits))


def _joint(
    sets: Sequence[StaticSet],
    slots: Sequence[int],
    rate: Callable[[StaticSet, float], float],
    weight: str,
) -> float:
    """A rate over all groups, each with its own slots."""
    weights = [float(getattr(one, weight)[-1]) for one in sets]
    rates = [rate(one, count) for one, count in zip(sets, slots, strict=True)]
    return sum(w * r for w, r in zip(weights, rates, strict=True)) / max(sum(weights), 1e-300)
