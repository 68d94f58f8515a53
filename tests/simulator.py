"""All homes of a world in one process: whole plans, without devices, groups or a clock.

The slow twin of `distcache.replay`, whose counts are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from distcache.comm.world import Nodes
from distcache.layout import RowLayout
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision
from distcache.planner.shard import (
    HotRows,
    ShardParts,
    make_routes,
    masks_for_all,
    nothing,
    replies_to_all,
)
from distcache.replay import PlannerSettings, make_homes
from distcache.step_plan import StepPlan


def simulate(
    layout: RowLayout, settings: PlannerSettings, steps: Iterable[Sequence[np.ndarray]]
) -> Iterator[list[StepPlan]]:
    """Plans of all ranks for a stream of steps; each step gives one row array per rank.

    Yields, for each step, the plan of every rank. Raises StepTooLargeError as training would.
    """
    near, far = make_homes(layout, settings)
    hot = None if settings.hot is None else HotRows(settings.hot)
    waiting: deque[list[Request]] = deque()
    move_after = -1

    def decided() -> list[StepPlan]:
        nonlocal move_after
        plans = plans_of(layout, settings, [home.plan() for home in near],
                         [home.plan() for home in far], waiting.popleft(), move_after)  # fmt: skip
        move_after = plans[0].move_after
        return plans

    for step, rows in enumerate(steps):
        requests = [make_request(layout, np.asarray(part, np.int64), hot) for part in rows]
        for home, planner in enumerate(near):
            planner.ingest(step, "train", [request.rows[home] for request in requests])
        for home, planner in enumerate(far):
            planner.ingest(step, "train", [request.sharded[home] for request in requests])
        waiting.append(requests)
        if len(waiting) > settings.lookahead:
            yield decided()
    while waiting:
        yield decided()


def plans_of(
    layout: RowLayout,
    settings: PlannerSettings,
    near: list[HomeDecision],
    far: list[HomeDecision],
    requests: list[Request],
    before: int,
) -> list[StepPlan]:
    """Every rank's plan of a step, of which all homes have decided the replicated and the sharded
    rows, and which moves no earlier than the step `before` it."""
    ranks, uses = range(len(requests)), [decision.latest_use for decision in (*near, *far)]
    step = (near or far)[0].step
    after = next_move_after(step, settings.prefetch, uses, before)
    near = near or [nothing((step, "train"), len(requests))] * len(requests)
    nodes = Nodes(settings.nodes or (layout.world_size,))
    routes = [make_routes(nodes, rank) for rank in ranks]
    told = [replies_to_all(decision) for decision in far]
    masks = [
        [None] * len(ranks) if way is None else masks_for_all(d.replies, len(d.slots), way)
        for d, way in zip(far, routes, strict=False)
    ]
    plans = []
    for rank, request in enumerate(requests):
        parts, tail = [HomePart(d.slots, d.fetch, d.replies[rank]) for d in near], None
        if far:
            tail = ShardParts(
                far[rank],
                tuple(of_home[rank] for of_home in told),
                sum(len(decision.slots) for decision in far),
                sum(len(decision.fetch) for decision in far),
                settings.early,
                routes[rank],
                tuple(of_home[rank] for of_home in masks),
            )
        plans.append(assemble(request, parts, near[rank], after, tail))
    return plans
