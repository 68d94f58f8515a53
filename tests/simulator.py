"""All homes of a world in one process: whole plans, without devices, groups or a clock.

The slow twin of `distcache.replay`, whose counts are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from distcache.comm.world import Nodes
from distcache.layout import RowLayout
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision
from distcache.planner.shard import (
    Routes,
    ShardParts,
    make_routes,
    masks_for_all,
    nothing,
    reply_to,
)
from distcache.replay import PlannerSettings, make_homes
from distcache.step_plan import StepPlan


def simulate(
    layout: RowLayout, settings: PlannerSettings, steps: Iterable[Sequence[np.ndarray]]
) -> Iterator[list[StepPlan]]:
    """Plans of all ranks for a stream of steps; each step gives one row array per rank.

    Yields, for each step, the plan of every rank. Raises StepTooLargeError as training would.
    """
    world = SimulatedWorld(layout, settings)
    waiting: list[list[Request]] = []
    for step, rows in enumerate(steps):
        waiting.append(world.ingest(step, rows))
        if len(waiting) > settings.lookahead:
            yield world.plan(waiting.pop(0))
    while waiting:
        yield world.plan(waiting.pop(0))


class SimulatedWorld:
    """The planners of all homes: `replicated` and `sharded`, each by home, empty where there are
    no such rows."""

    def __init__(self, layout: RowLayout, settings: PlannerSettings) -> None:
        self._layout, self._settings = layout, settings
        self._move_after = -1
        world = layout.world_size
        self.replicated, self.sharded = make_homes(layout, settings)
        nodes = Nodes(settings.nodes or (world,))
        self._routes = [make_routes(nodes, rank) for rank in range(world)]

    def ingest(self, step: int, rows: Sequence[np.ndarray], kind: str = "train") -> list[Request]:
        """Bring the rows of a step, by rank, to their homes."""
        hot = self._settings.hot
        requests = [make_request(self._layout, np.asarray(r, dtype=np.int64), hot) for r in rows]
        for home, planner in enumerate(self.replicated):
            planner.ingest(step, kind, [request.rows[home] for request in requests])
        for home, planner in enumerate(self.sharded):
            planner.ingest(step, kind, [request.sharded[home] for request in requests])
        return requests

    def plan(self, requests: list[Request]) -> list[StepPlan]:
        """Decide the oldest ingested step, of which all ranks' requests are given."""
        shared = [home.plan() for home in self.replicated]
        own = [home.plan() for home in self.sharded]
        step, uses = (shared or own)[0].step, [d.latest_use for d in (*shared, *own)]
        after = next_move_after(step, self._settings.prefetch, uses, self._move_after)
        self._move_after = after
        shared = shared or [nothing((step, "train"), len(requests))] * len(requests)
        masks = [self._masks(home, decision) for home, decision in enumerate(own)]
        plans = []
        for rank, request in enumerate(requests):
            parts = [HomePart(d.slots, d.fetch, d.replies[rank]) for d in shared]
            tail = self._told(own, masks, rank) if own else None
            plans.append(assemble(request, parts, shared[rank], after, tail))
        return plans

    def _masks(self, home: int, decision: HomeDecision) -> list[np.ndarray | None]:
        """What a home tells each rank of who named its rows."""
        routes: Routes | None = self._routes[home]
        if routes is None:
            return [None] * len(decision.replies)
        return masks_for_all(decision.replies, len(decision.slots), routes)

    def _told(
        self,
        decisions: Sequence[HomeDecision],
        masks: Sequence[Sequence[np.ndarray | None]],
        rank: int,
    ) -> ShardParts:
        """What a rank learns of the decisions on sharded rows; `masks`: by home, then rank."""
        return ShardParts(
            decisions[rank],
            tuple(reply_to(decision, rank) for decision in decisions),
            sum(len(decision.slots) for decision in decisions),
            sum(len(decision.fetch) for decision in decisions),
            self._settings.early,
            self._routes[rank],
            tuple(of_home[rank] for of_home in masks),
        )
