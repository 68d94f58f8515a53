"""Which placement is the cheapest, and where the winner changes with the number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.cost.cluster import Cluster
from distcache.cost.demand import Demand, TableDemand
from distcache.cost.predict import Prediction, Settings, predict
from distcache.cost.traffic import HYBRID, MIXED, REPLICATED, SHARDED, YARDSTICKS
from distcache.errors import ConfigError

# -----------------------------------------------------------------------------
# Which placement is the cheapest: `cache.placement=auto`, and the best replicated prefix K.

OBJECTIVES = ("time", "bytes")
"""What `cache.objective` may be: seconds of a step, or bytes that leave a rank."""

_THRESHOLDS = 25
"""Prefixes that are tried, by how likely a rank touches a row."""

_MOST_OF_CACHE = 0.5
"""At most this share of the slots is for replicated rows of `mixed`."""

_CLEARLY = 0.01
"""`mixed` has a parameter to go wrong: it is chosen where it saves at least this share."""


@dataclass(frozen=True)
class Choice:
    """The placement to use. `replicated_rows`: {table: K} of `mixed`, else empty; `state`: as in
    the settings; `predictions`: of all placements that were compared, the chosen one first; `why`:
    in a sentence."""

    placement: str
    replicated_rows: dict[str, int]
    state: str
    predictions: tuple[Prediction, ...]
    why: str


def choose_placement(
    demand: Demand, cluster: Cluster, settings: Settings, objective: str = "time"
) -> Choice:
    """The placement of cached rows with the lowest predicted cost on `cluster`.

    `demand`: of one step, by `steps.demand_at` (from statistics or Zipf laws) or
    `window.demand_of_window` (from the first batches); `objective`: `time` or `bytes`. Compares
    sharded, replicated and mixed at
    its best K. Placements that would be refused (too few slots, too little device memory) are out;
    the first of equals in that order wins, and mixed only where it saves one per cent. Pure and
    deterministic: ranks that call it with equal arguments choose alike. Raises ConfigError where
    no placement fits, with the reason of each.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"cache.objective={objective} is unknown: choose {' or '.join(OBJECTIVES)}"
        )
    found = [predict(name, demand, cluster, settings) for name in (SHARDED, REPLICATED)]
    mixed = best_mixed(demand, cluster, settings, objective)
    if mixed is not None:
        found.append(mixed)
    best = winner(found, objective)
    if best is None:
        reasons = "; ".join(f"{p.placement}: {p.refused}" for p in found)
        raise ConfigError(f"cache.placement=auto: no placement fits: {reasons}")
    order = [best, *(p for p in found if p is not best)]
    return Choice(
        best.placement, best.replicated_rows, settings.state, tuple(order), _why(order, objective)
    )


def winner(predictions: Sequence[Prediction], objective: str) -> Prediction | None:
    """The cheapest that can run; None if none can. Earlier ones win ties, `mixed` only clearly;
    `YARDSTICKS` never."""
    able = [p for p in predictions if p.refused is None and p.placement not in YARDSTICKS]
    fixed = [p for p in able if p.placement != MIXED]
    best = min(fixed, key=lambda p: p.cost[objective], default=None)
    for prediction in able:
        if prediction.placement != MIXED:
            continue
        limit = None if best is None else (1 - _CLEARLY) * best.cost[objective]
        if limit is None or prediction.cost[objective] < limit:
            best = prediction
    return best


def best_mixed(
    demand: Demand, cluster: Cluster, settings: Settings, objective: str = "time"
) -> Prediction | None:
    """`mixed` with the best replicated prefixes; None where no prefix makes a difference.

    Prefixes follow one threshold for all tables: the rows that a rank touches with at least that
    probability in a step. So the sweep has one parameter, and K of each table follows.
    """
    best: Prediction | None = None
    for rows in candidate_prefixes(demand, settings):
        found = predict(MIXED, demand, cluster, settings, rows)
        better = best is None or (found.refused is not None, found.cost[objective]) < (
            best.refused is not None,
            best.cost[objective],
        )
        if better:
            best = found
    return best


def candidate_prefixes(demand: Demand, settings: Settings) -> list[dict[str, int]]:
    """{table: K} for falling thresholds, as long as a group's prefixes take at most half its slots.

    Neither nothing nor everything is among them.
    """
    likely = [float(t.rank.max()) for t in demand.tables if len(t.rank)]
    least = [float(t.rank[t.rank > 0].min()) for t in demand.tables if (t.rank > 0).any()]
    if not least or max(likely) <= 0:
        return []
    found: list[dict[str, int]] = []
    for threshold in np.geomspace(max(likely) * 0.999, min(least), _THRESHOLDS):
        rows = {t.name: prefix_above(t, float(threshold)) for t in demand.tables}
        for group, slots in zip(demand.groups, settings.slots, strict=True):
            if sum(rows[t.name] for t in group.tables) > _MOST_OF_CACHE * slots:
                return found
        whole = sum(rows.values()) == sum(t.rows for t in demand.tables)
        if any(rows.values()) and not whole and (not found or rows != found[-1]):
            found.append(rows)
    return found


def prefix_above(table: TableDemand, threshold: float) -> int:
    """The longest prefix of a table in which a rank touches rows with at least probability
    `threshold`, on average over those that lie together."""
    if not len(table.start):
        return 0
    starts, where = np.unique(table.start, return_inverse=True)
    ends = np.zeros(len(starts))
    np.maximum.at(ends, where, table.end)
    touched = np.bincount(where, weights=table.rank * table.count, minlength=len(starts))
    below = np.flatnonzero(touched / np.maximum(ends - starts, 1e-300) < threshold)
    stop = int(below[0]) if len(below) else len(starts)
    return round(float(ends[stop - 1])) if stop else 0


def _why(order: Sequence[Prediction], objective: str) -> str:
    unit, scale = (
        ("ms per step", 1e3) if objective == "time" else ("KiB per rank and step", 1 / 1024)
    )
    texts = []
    for prediction in order:
        text = f"{prediction.placement} {_three_digits(prediction.cost[objective] * scale)}"
        texts.append(text + (" (refused)" if prediction.refused else ""))
    return f"predicted {unit}: {', '.join(texts)}"


def _three_digits(value: float) -> str:
    """A number above 0 with at least three digits that count."""
    digits = 2 if value <= 0 else max(0, min(9, 2 - math.floor(math.log10(value))))
    return f"{value:,.{digits}f}"


# -----------------------------------------------------------------------------
# Predictions over numbers of ranks, and where the winner changes.


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
