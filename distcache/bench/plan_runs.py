"""The contenders of the planner's bench: the whole plan, and ways to find distinct rows alone."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from distcache.layout import RowLayout
from distcache.planner import home as home_module
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.distinct import by_hash, by_index
from distcache.planner.home import HomePlanner
from distcache.step_plan import StepPlan, check_plan

Seconds = dict[str, float]


class PlanningRun:
    """All homes of a world in one process, planning as training does, without the exchange.

    `seconds`: time so far in each part, summed over the ranks; `counts` so far: planned `steps`,
    and the `distinct`, missed (`misses`) and evicted (`evictions`) rows of all homes.
    """

    def __init__(self, layout: RowLayout, slots: int, lookahead: int, prefetch: int) -> None:
        world = layout.world_size
        self.layout, self.lookahead, self.prefetch = layout, lookahead, prefetch
        per_home = -(-slots // world)
        self.homes = [HomePlanner(layout, home, per_home, prefetch) for home in range(world)]
        self.seconds: Seconds = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self._waiting: deque[list[Request]] = deque()
        self._ingested = 0
        self._move_after = -1

    @property
    def index_bytes(self) -> int:
        """Bytes of the index over all rows, all homes together: a node's."""
        return sum(home.index_bytes for home in self.homes)

    def step(self, rows: Sequence[np.ndarray]) -> list[StepPlan]:
        """Ingest a step (row numbers by rank); the plans of the step L before, if there is one."""
        started = time.perf_counter()
        requests = [make_request(self.layout, part) for part in rows]
        started = self._add("request", started)
        for home, planner in enumerate(self.homes):
            planner.ingest(self._ingested, "train", [request.rows[home] for request in requests])
        self._add("ingest", started)
        self._ingested += 1
        self._waiting.append(requests)
        return self._decide() if len(self._waiting) > self.lookahead else []

    def _decide(self) -> list[StepPlan]:
        started = time.perf_counter()
        decisions = [home.plan() for home in self.homes]
        started = self._add("plan", started)
        uses = [decision.latest_use for decision in decisions]
        step = decisions[0].step
        self._move_after = next_move_after(step, self.prefetch, uses, self._move_after)
        plans = []
        for rank, request in enumerate(self._waiting.popleft()):
            parts = [HomePart(d.slots, d.fetch, d.replies[rank]) for d in decisions]
            plans.append(assemble(request, parts, decisions[rank], self._move_after))
        started = self._add("assemble", started)
        for plan in plans:
            check_plan(plan)
        self._add("check", started)
        self._count(plans)
        return plans

    def _count(self, plans: list[StepPlan]) -> None:
        self.counts["steps"] += 1
        self.counts["distinct"] += plans[0].distinct
        self.counts["misses"] += plans[0].misses
        self.counts["evictions"] += sum(len(plan.evict_slots) for plan in plans)

    def _add(self, part: str, started: float) -> float:
        now = time.perf_counter()
        self.seconds[part] += now - started
        return now


@contextlib.contextmanager
def inner_parts(run: PlanningRun) -> Iterator[Seconds]:
    """Time, while open, what happens inside `ingest` and `plan` of a run: seconds by part."""
    seconds: Seconds = defaultdict(float)

    def timed(part: str, function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds[part] += time.perf_counter() - started

        return call

    with contextlib.ExitStack() as stack:
        swapped: list[tuple[Any, str, str]] = [(home_module, "by_index", "distinct")]
        for planner in run.homes:
            table = planner._table
            swapped += [(planner, "_refer", "window"), (planner, "_look_ahead", "window")]
            swapped += [(table, "take", "victims"), (table, "used", "filing")]
        for owner, name, part in swapped:
            original = getattr(owner, name)
            own = name in vars(owner)
            setattr(owner, name, timed(part, original))
            if own:
                stack.callback(setattr, owner, name, original)
            else:
                stack.callback(delattr, owner, name)
        yield seconds


def distinct_contenders(rows: int) -> dict[str, Callable[[np.ndarray], Any]]:
    """Ways to find the distinct rows of a batch (int64 `[n]`, below `rows`), by name."""
    position = np.empty(rows, dtype=np.int32)
    return {
        "np.unique": np.unique,
        "np.unique with inverse": lambda ids: np.unique(ids, return_inverse=True),
        "torch.unique with inverse": lambda ids: torch.unique(
            torch.from_numpy(ids), return_inverse=True
        ),
        "by_index": lambda ids: by_index(ids, position),
        "by_hash": by_hash,
    }


def run_distinct(find: Callable[[np.ndarray], Any], batches: Sequence[np.ndarray]) -> float:
    """Seconds to find the distinct rows of every batch."""
    started = time.perf_counter()
    for ids in batches:
        find(ids)
    return time.perf_counter() - started


def run_argsort(plans: Sequence[StepPlan]) -> float:
    """Seconds of the stable sort inside `assemble`, done once more for every plan."""
    started = time.perf_counter()
    for plan in plans:
        plan.positions.argsort(stable=True)
    return time.perf_counter() - started
