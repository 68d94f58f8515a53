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
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.bodies import NAMES, Bodies, make, using
from distcache.planner.calls import distinct_rows, hashed_rows
from distcache.planner.home import HomePlanner
from distcache.step_plan import StepPlan, check_plan

Seconds = dict[str, float]


class PlanningRun:
    """All homes of a world in one process, planning as training does, without the exchange.

    `body`: the loops', `compiled` or `numpy`. `seconds`: time so far in each part, summed over the
    ranks; `cpu_seconds`: of it, this thread's on its core, all parts; `counts` so far: planned
    `steps`, and the `distinct`, missed (`misses`) and evicted (`evictions`) rows of all homes.
    """

    def __init__(
        self, layout: RowLayout, slots: int, lookahead: int, prefetch: int, body: str
    ) -> None:
        world = layout.world_size
        self.layout, self.lookahead, self.prefetch = layout, lookahead, prefetch
        self.bodies = make(body)
        per_home = -(-slots // world)
        with using(self.bodies):
            self.homes = [HomePlanner(layout, home, per_home, prefetch) for home in range(world)]
        self.seconds: Seconds = defaultdict(float)
        self.cpu_seconds = 0.0
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
        with using(self.bodies):
            self._ingest(rows)
            return self._decide() if len(self._waiting) > self.lookahead else []

    def _ingest(self, rows: Sequence[np.ndarray]) -> None:
        started = now()
        requests = [make_request(self.layout, part) for part in rows]
        started = self._add("request", started)
        for home, planner in enumerate(self.homes):
            planner.ingest(self._ingested, "train", [request.rows[home] for request in requests])
        self._add("ingest", started)
        self._ingested += 1
        self._waiting.append(requests)

    def _decide(self) -> list[StepPlan]:
        started = now()
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

    def _add(self, part: str, started: tuple[float, float]) -> tuple[float, float]:
        wall, cpu = now()
        self.seconds[part] += wall - started[0]
        self.cpu_seconds += cpu - started[1]
        return wall, cpu


@contextlib.contextmanager
def timed_loops(run: PlanningRun) -> Iterator[Seconds]:
    """Time, while open, every loop of a run: seconds by name."""
    seconds: Seconds = defaultdict(float)

    def timed(name: str, loop: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return loop(*arguments)
            finally:
                seconds[name] += time.perf_counter() - started

        return call

    plain = run.bodies
    run.bodies = Bodies(plain.body, **{name: timed(name, getattr(plain, name)) for name in NAMES})
    try:
        yield seconds
    finally:
        run.bodies = plain


def distinct_contenders(rows: int, bodies: Sequence[str]) -> dict[str, Callable[[np.ndarray], Any]]:
    """Ways to find the distinct rows of a batch (int64 `[n]`, below `rows`), by name."""
    found: dict[str, Callable[[np.ndarray], Any]] = {
        "np.unique": np.unique,
        "np.unique with inverse": lambda ids: np.unique(ids, return_inverse=True),
        "torch.unique with inverse": lambda ids: torch.unique(
            torch.from_numpy(ids), return_inverse=True
        ),
    }
    position = np.full(rows, -1, dtype=np.int32)
    for body in bodies:
        found[f"distinct by index, {body}"] = _by(body, lambda ids: distinct_rows(ids, position, 0))
        found[f"distinct by hash, {body}"] = _by(body, hashed_rows)
    return found


def _by(body: str, find: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    """`find` with one body's loops."""
    loops = make(body)

    def call(ids: np.ndarray) -> Any:
        with using(loops):
            return find(ids)

    return call


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
