"""The contenders of the planner's bench: the whole plan, and ways to find distinct rows alone."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from distcache.bench.plan_placements import PlacedGroup
from distcache.engine.room import Region, requests_of
from distcache.planner import loops
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision
from distcache.planner.loops import distinct_rows, hashed_rows
from distcache.planner.shard import ShardParts, nothing, replies_to_all
from distcache.step_plan import StepPlan, check_plan

Seconds = dict[str, float]


class PlanningRun:
    """All homes of a world in one process, planning as training does, without the exchange.

    `seconds`: time so far in each part, summed over the
    ranks; `cpu_seconds`: of it, this thread's on its core, all parts; `counts` so far: planned
    `steps`, and the `distinct`, missed (`misses`) and evicted (`evictions`) rows of all homes.
    """

    def __init__(self, placed: PlacedGroup, lookahead: int, prefetch: int) -> None:
        self.layout = placed.group.layout
        self.lookahead, self.prefetch = lookahead, prefetch
        self._hot = placed.hot_rows()
        self._homes = [placed.regions(rank, prefetch) for rank in range(self.world_size)]
        self.seconds: Seconds = defaultdict(float)
        self.cpu_seconds = 0.0
        self.counts: dict[str, int] = defaultdict(int)
        self._waiting: deque[list[Request]] = deque()
        self._ingested = 0
        self._move_after = -1

    @property
    def world_size(self) -> int:
        """W."""
        return self.layout.world_size

    @property
    def index_bytes(self) -> int:
        """Bytes of the index over all rows, all homes together: a node's."""
        return sum(region.planner.index_bytes for home in self._homes for region in home)

    @property
    def slots(self) -> int:
        """Slots of all homes: the distinct rows that all devices hold."""
        return sum(region.planner.slots for home in self._homes for region in home)

    def step(self, rows: Sequence[np.ndarray]) -> list[StepPlan]:
        """Ingest a step (row numbers by rank); the plans of the step L before, if there is one."""
        self._ingest(rows)
        return self._decide() if len(self._waiting) > self.lookahead else []

    def _ingest(self, rows: Sequence[np.ndarray]) -> None:
        started = now()
        requests = [make_request(self.layout, part, self._hot) for part in rows]
        started = self._add("request", started)
        by_region = [requests_of(self._homes[0], [request]) for request in requests]
        for home, regions in enumerate(self._homes):
            for place, region in enumerate(regions):
                named = [asked[place].rows[home] for asked in by_region]
                region.planner.ingest(self._ingested, "train", named)
        self._add("ingest", started)
        self._ingested += 1
        self._waiting.append(requests)

    def _decide(self) -> list[StepPlan]:
        started = now()
        decided = [[region.planner.plan() for region in home] for home in self._homes]
        started = self._add("plan", started)
        uses = [decision.latest_use for decisions in decided for decision in decisions]
        step = decided[0][0].step
        self._move_after = next_move_after(step, self.prefetch, uses, self._move_after)
        told = _Told(self._homes[0], decided, self.prefetch > 0)
        plans = []
        for rank, request in enumerate(self._waiting.popleft()):
            parts, own, sharded = told.to(rank)
            plans.append(assemble(request, parts, own, self._move_after, sharded))
        started = self._add("assemble", started)
        for plan in plans:
            check_plan(plan)
        self._add("check", started)
        self._count(plans)
        return plans

    def _count(self, plans: list[StepPlan]) -> None:
        self.counts["steps"] += 1
        self.counts["distinct"] += plans[0].all_distinct
        self.counts["misses"] += plans[0].all_misses
        self.counts["evictions"] += evictions(plans)

    def _add(self, part: str, started: tuple[float, float]) -> tuple[float, float]:
        wall, cpu = now()
        self.seconds[part] += wall - started[0]
        self.cpu_seconds += cpu - started[1]
        return wall, cpu


@contextlib.contextmanager
def timed_loops() -> Iterator[Seconds]:
    """Time, while open, every loop of the planner: seconds by name."""
    seconds: Seconds = defaultdict(float)

    def timed(name: str, loop: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return loop(*arguments)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    plain = {name: loop for name, loop in vars(loops).items() if hasattr(loop, "py_func")}
    vars(loops).update({name: timed(name, loop) for name, loop in plain.items()})
    try:
        yield seconds
    finally:
        vars(loops).update(plain)


class _Told:
    """What the homes tell every rank about a step, without the wire. `decided`: by home, region."""

    def __init__(
        self, regions: Sequence[Region], decided: list[list[HomeDecision]], early: bool
    ) -> None:
        self._early, self._shared, self._own = early, None, None
        for place, region in enumerate(regions):
            of_region = [decisions[place] for decisions in decided]
            if region.sharded:
                self._own = of_region
                self._replies = [replies_to_all(decision) for decision in of_region]
                self._rows = sum(len(decision.slots) for decision in of_region)
                self._misses = sum(len(decision.fetch) for decision in of_region)
            else:
                self._shared = of_region
        if self._shared is None:
            first = decided[0][0]
            self._shared = [nothing((first.step, first.kind), len(decided))] * len(decided)

    def to(self, rank: int) -> tuple[list[HomePart], HomeDecision, ShardParts | None]:
        """For one rank: the parts of the replicated rows, its home's decision, the sharded ones."""
        parts = [HomePart(d.slots, d.fetch, d.replies[rank]) for d in self._shared]
        if self._own is None:
            return parts, self._shared[rank], None
        replies = tuple(of_home[rank] for of_home in self._replies)
        sharded = ShardParts(self._own[rank], replies, self._rows, self._misses, self._early)
        return parts, self._shared[rank], sharded


def evictions(plans: Sequence[StepPlan]) -> int:
    """Rows that leave for a step, over all homes and regions."""
    return sum(_leaving(plan) for plan in plans)


def _leaving(plan: StepPlan) -> int:
    return len(plan.evict_rows) + (0 if plan.shard is None else len(plan.shard.evict_rows))


def evict_all(plans: Sequence[StepPlan]) -> bool:
    """Whether a row leaves the homes of these plans for every one that is fetched, and some do.

    With sharded rows: among these, for the replicated ones may have a slot each for good.
    """
    regions = [plan if plan.shard is None else plan.shard for plan in plans]
    leaving = sum(len(region.evict_rows) for region in regions)
    return 0 < sum(len(region.fetch_rows) for region in regions) <= leaving


def distinct_contenders(rows: int) -> dict[str, Callable[[np.ndarray], Any]]:
    """Ways to find the distinct rows of a batch (int64 `[n]`, below `rows`), by name."""
    found: dict[str, Callable[[np.ndarray], Any]] = {
        "np.unique": np.unique,
        "np.unique with inverse": lambda ids: np.unique(ids, return_inverse=True),
        "torch.unique with inverse": lambda ids: torch.unique(
            torch.from_numpy(ids), return_inverse=True
        ),
    }
    position = np.full(rows, -1, dtype=np.int32)
    found["distinct by index, compiled"] = lambda ids: distinct_rows(ids, position, 0)
    found["distinct by hash, compiled"] = hashed_rows
    return found


def run_distinct(
    find: Callable[[np.ndarray], Any], batches: Sequence[np.ndarray]
) -> tuple[float, float]:
    """Seconds to find the distinct rows of every batch, and how many of them on the core."""
    started = now()
    for ids in batches:
        find(ids)
    ended = now()
    return ended[0] - started[0], ended[1] - started[1]


def now() -> tuple[float, float]:
    """Seconds by the clock, and on the core that this thread has used."""
    return time.perf_counter(), time.thread_time()
