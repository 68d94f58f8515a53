"""Predictions over numbers of ranks, and where the winner changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distcache.cost.choose import best_mixed, winner
from distcache.cost.demand import Demand
from distcache.cost.links import Cluster
from distcache.cost.predict import Prediction, Settings, predict
from distcache.cost.traffic import HYBRID, REPLICATED, SHARDED


@dataclass(frozen=True)
class Point:
    """All placements at one number of ranks. `best`: the winner by the objective, None where
    nothing can run."""

    cluster: Cluster
    demand: Demand
    predictions: tuple[Prediction, ...]
    best: Prediction | None

    @property
    def world_size(self) -> int:
        """W."""
        return self.cluster.ranks

    def of(self, placement: str) -> Prediction | None:
        """The prediction of a placement; None where it was not made."""
        return next((p for p in self.predictions if p.placement == placement), None)


@dataclass(frozen=True)
class Crossover:
    """Between `before` and `after` ranks the cheapest layout changes from `old` to `new`; by
    power laws between the two, at about `at` ranks."""

    before: int
    after: int
    at: float
    old: str
    new: str


def compare(demand: Demand, cluster: Cluster, settings: Settings, objective: str) -> Point:
    """Every placement of cached rows (mixed at its best K) and every hybrid layout."""
    found = [predict(name, demand, cluster, settings) for name in (SHARDED, REPLICATED)]
    mixed = best_mixed(demand, cluster, settings, objective)
    found += [] if mixed is None else [mixed]
    found += [predict(name, demand, cluster, settings) for name in HYBRID]
    return Point(cluster, demand, tuple(found), winner(found, objective))


def sweep(
    worlds: Sequence[int], at: Callable[[int], tuple[Demand, Cluster, Settings]], objective: str
) -> list[Point]:
    """`compare` at each number of ranks; `at` gives demand, cluster and settings of one."""
    return [compare(*at(world), objective) for world in worlds]


def crossovers(points: Sequence[Point], objective: str) -> list[Crossover]:
    """Where the winner changes from one point to the next."""
    found = []
    for first, second in itertools.pairwise(points):
        if first.best is None or second.best is None:
            continue
        old, new = first.best.placement, second.best.placement
        if old == new:
            continue
        there, here = first.of(new), second.of(old)
        at = math.sqrt(first.world_size * second.world_size)
        if there is not None and here is not None:
            at = _crossing(
                first, second, [p.cost[objective] for p in (first.best, there, here, second.best)]
            )
        found.append(Crossover(first.world_size, second.world_size, at, old, new))
    return found


def _crossing(first: Point, second: Point, costs: Sequence[float]) -> float:
    """Ranks at which two costs, `[old, new]` at both points, meet; the middle where they do not,
    or one of them is 0."""
    low, high = math.log(first.world_size), math.log(second.world_size)
    middle = math.exp((low + high) / 2)
    if min(costs) <= 0:
        return middle
    before = math.log(costs[1] / costs[0])
    after = math.log(costs[3] / costs[2])
    if before < 0 or after > 0 or before == after:
        return middle
    return math.exp(low + (high - low) * before / (before - after))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def ranks_per_node(world_size: int, most: int) -> int:
    """As many ranks of a node as it has at `most`, such that nodes have equally many."""
    return max(d for d in range(1, min(world_size, most) + 1) if world_size % d == 0)
