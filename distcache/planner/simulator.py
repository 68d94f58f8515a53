"""All homes of a world in one process: the real planner without devices, groups or a clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.layout import RowLayout
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.home import HomePlanner
from distcache.planner.policy import DEFAULT, Policy
from distcache.planner.rankings import home_popularity
from distcache.step_plan import StepPlan


@dataclass(frozen=True)
class PlannerSettings:
    """C per rank, L, P, and the policy; `popularity` uint8 `[V]`: a class for each row."""

    slots: int
    lookahead: int
    prefetch: int
    policy: Policy = DEFAULT
    popularity: np.ndarray | None = None


def simulate(
    layout: RowLayout, settings: PlannerSettings, steps: Iterable[Sequence[np.ndarray]]
) -> Iterator[list[StepPlan]]:
    """Plans of all ranks for a stream of steps; each step gives one row array per rank.

    Yields, for each step, the plan of every rank. Raises StepTooLargeError as training would.
    """
    world = layout.world_size
    per_home = -(-settings.slots // world)
    homes = [_home(layout, home, per_home, settings) for home in range(world)]
    waiting: list[list[Request]] = []
    move_after = -1
    step = -1
    for step, rows in enumerate(steps):
        requests = [make_request(layout, np.asarray(part, dtype=np.int64)) for part in rows]
        for home, planner in enumerate(homes):
            planner.ingest(step, "train", [request.rows[home] for request in requests])
        waiting.append(requests)
        if len(waiting) > settings.lookahead:
            plans = _plan(homes, waiting.pop(0), settings.prefetch, move_after)
            move_after = plans[0].move_after
            yield plans
    while waiting:
        plans = _plan(homes, waiting.pop(0), settings.prefetch, move_after)
        move_after = plans[0].move_after
        yield plans


def _home(layout: RowLayout, home: int, slots: int, settings: PlannerSettings) -> HomePlanner:
    classes = settings.popularity
    if classes is not None:
        classes = home_popularity(layout, home, classes)
    return HomePlanner(layout, home, slots, settings.prefetch, settings.policy, classes)


def _plan(
    homes: list[HomePlanner], requests: list[Request], prefetch: int, before: int
) -> list[StepPlan]:
    decisions = [home.plan() for home in homes]
    step = decisions[0].step
    uses = [decision.latest_use for decision in decisions]
    move_after = next_move_after(step, prefetch, uses, before)
    plans = []
    for rank, request in enumerate(requests):
        parts = [HomePart(d.slots, d.fetch, d.replies[rank]) for d in decisions]
        plans.append(assemble(request, parts, decisions[rank], move_after))
    return plans
