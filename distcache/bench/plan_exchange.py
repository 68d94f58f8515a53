"""The whole plan with the ranks' exchange: `distcache.bench.planner` starts one process per rank.

Every rank requests, decides, exchanges both, ingests and assembles as in training, over gloo; each
has a core of its own where there are enough.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from distcache.bench.options import at_least, option, parse, show, split_arguments
from distcache.bench.plan_ids import IdStream, by_rank, compose_plan
from distcache.bench.plan_placements import PlacedGroup, Placer
from distcache.bench.plan_runs import evict_all
from distcache.bench.report import Record
from distcache.bench.spread import rotated, spread
from distcache.cli.run import run_job, set_up_logging, train_command
from distcache.comm.link import CollectiveCounters, Link, host_link
from distcache.comm.rendezvous import find_place
from distcache.comm.world import World, close_world, open_world
from distcache.config.tree import CacheConfig
from distcache.engine.exchange import Asking, Decided, Deciding, PlanExchange, Status
from distcache.engine.room import requests_of, sharded_part
from distcache.errors import DistcacheError
from distcache.planner.assemble import HomePart, Request, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision
from distcache.planner.shard import nothing
from distcache.step_plan import StepPlan, check_plan

MODULE = "distcache.bench.plan_exchange"


@dataclass(frozen=True)
class ExchangeOptions:
    """What `measure_exchange` tells the ranks."""

    size: str = option("kaggle", "as those of distcache.bench.planner")
    batch: int = option(16384, "the same")
    placements: tuple[str, ...] = option(("replicated",), "the same")
    share: float = option(0.0005, "the same")
    steps: int = option(10, "the same")
    repetitions: int = option(7, "the same")
    warmup: int = option(400, "the same")
    pin: bool = option(True, "the same")
    out: str = option("", "the file for the records, JSON")

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, steps=self.steps, repetitions=self.repetitions)


def measure_exchange(
    options: ExchangeOptions, overrides: Sequence[str], ranks: int
) -> list[Record]:
    """Run `ranks` processes to their end; one record for each body. Raises DistcacheError."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "records.json"), Path(folder, "log")
        given = [f"{key}={show(value)}" for key, value in asdict(options).items() if key != "out"]
        command = train_command(ranks, [*given, f"out={out}", *overrides], MODULE)
        code = run_job(command, ranks, log)
        if code or not out.exists():
            raise DistcacheError(
                f"the {ranks} ranks of the exchange failed with exit code {code}:\n"
                + log.read_text(errors="replace")[-4000:]
            )
        return json.loads(out.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank; the first writes the records."""
    line = split_arguments(sys.argv[1:] if arguments is None else arguments)
    options = parse(ExchangeOptions, line.given)
    place = find_place()
    set_up_logging("WARNING", place.rank, place.world_size)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if options.pin and len(cores) >= place.local_size:
        os.sched_setaffinity(0, {cores[place.local_rank]})
    world = open_world("cpu")
    try:
        records = _measure(options, line.overrides, world)
        if world.is_first:
            Path(options.out).write_text(json.dumps(records))
        close_world(world)
    finally:
        close_world(world, orderly=False)
    return 0


class RankRun:
    """One rank's planners and their exchange, without training. `seconds`: time so far by part."""

    def __init__(self, placed: PlacedGroup, cache: CacheConfig, world: World) -> None:
        self.layout, self._hot = placed.group.layout, placed.hot_rows()
        self.lookahead, self.prefetch = int(cache.lookahead), int(cache.prefetch)
        self.counters = CollectiveCounters()
        link = Link(world, world.planning_group, self.counters, "the planning group")
        self._regions = placed.regions(world.rank, self.prefetch)
        sharded = [place for place, region in enumerate(self._regions) if region.sharded]
        self._exchange = PlanExchange(link, len(self._regions), 0, sharded)
        self.seconds: dict[str, float] = defaultdict(float)
        self._waiting: deque[Request] = deque()
        self._step, self._move_after = 0, -1

    def step(self, rows: np.ndarray) -> StepPlan | None:
        """Ingest this rank's rows of a step; the plan of the step L + 1 before, if there is one."""
        with self._part("request"):
            request = make_request(self.layout, rows, self._hot)
            asked = requests_of(self._regions, [request])
        step, self._step = self._step, self._step + 1
        asking = Asking(step, Status.OK, "train", step, 0, asked)
        due = self._waiting.popleft() if len(self._waiting) > self.lookahead else None
        deciding = None if due is None else self._deciding(due)
        with self._part("exchange"):
            told = self._exchange.exchange(asking, deciding)
        with self._part("ingest"):
            for region, rows_of in zip(self._regions, told.named, strict=True):
                region.planner.ingest(step, "train", rows_of)
        self._waiting.append(request)
        if due is None or deciding is None or told.decided is None:
            return None
        with self._part("assemble"):
            plan = self._assembled(due, deciding.decisions, told.decided)
        with self._part("check"):
            check_plan(plan)
        return plan

    def _deciding(self, due: Request) -> Deciding:
        """This home's decisions on the step of request `due`."""
        rows = [region.planner.due_rows for region in self._regions]
        with self._part("plan"):
            own = [region.planner.plan() for region in self._regions]
        asked = requests_of(self._regions, [due])
        return Deciding(own[0].step, Status.OK, rows, own, asked)

    def _assembled(
        self, request: Request, own: Sequence[HomeDecision], decided: Decided
    ) -> StepPlan:
        """The plan of a step on which all homes decided."""
        self._move_after = next_move_after(
            own[0].step, self.prefetch, decided.latest_use, self._move_after
        )
        world = self.layout.world_size
        mine, sharded = nothing((own[0].step, own[0].kind), world), None
        parts = [HomePart(mine.slots, mine.fetch, mine.slots)] * world
        for place, region in enumerate(self._regions):
            if region.sharded:
                sharded = sharded_part(place, decided, own[place], self.prefetch > 0)
            else:
                parts, mine = decided.parts[place], own[place]
        return assemble(request, parts, mine, self._move_after, sharded)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


Runs = dict[tuple[str, str], RankRun]
"""By placement and body."""


def _measure(options: ExchangeOptions, overrides: Sequence[str], world: World) -> list[Record]:
    """Every run's turns over the same ids, in rotating order; the records, alike on all ranks."""
    placer = Placer(
        compose_plan(options.size, options.batch, overrides, find_place()), options.share
    )
    runs = {
        (kind, "compiled"): RankRun(placer.place(kind, world.size), placer.cache, world)
        for kind in options.placements
    }
    layout = placer.group(world.size).layout
    stream, link = IdStream(placer.source, layout, options.batch), host_link(world)

    def draw(steps: int) -> list[np.ndarray]:
        return [by_rank(rows, world.size)[world.rank] for rows in stream.draw(steps)]

    steady = _warm_up(runs, draw, link, options.warmup)
    walls: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    on_cores: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    for repetition in range(options.repetitions):
        batches = draw(options.steps)
        for name in rotated(list(runs), repetition):
            link.gather_objects(None, "the start of a turn")
            started, used = time.perf_counter(), time.process_time()
            for rows in batches:
                runs[name].step(rows)
            spent = time.perf_counter() - started, time.process_time() - used
            ended = link.gather_objects(spent, "the end of a turn")
            walls[name].append(max(wall for wall, _ in ended))
            on_cores[name].append(sum(cpu for _, cpu in ended))
    steps = options.steps * options.repetitions
    ids = options.steps * options.batch * len(layout.tables)
    sent = {
        name: link.gather_objects(run.counters.planning_bytes / steps, "planning bytes")
        for name, run in runs.items()
    }
    return [
        {
            "kind": "exchange",
            "world_size": world.size,
            "placement": kind,
            "body": body,
            "steady_eviction": steady[kind, body],
            "seconds": walls[kind, body],
            "cpu_seconds": on_cores[kind, body],
            "ids": ids,
            # As without the exchange: W cores work for the whole time.
            "ids_per_second": spread([ids / (wall * world.size) for wall in walls[kind, body]]),
            "ids_per_cpu_second": spread([ids / cpu for cpu in on_cores[kind, body]]),
            "ms": {name: 1e3 * value / steps for name, value in run.seconds.items()},
            "planning_bytes": sum(sent[kind, body]) / world.size,
            "planning_bytes_by_rank": sent[kind, body],
        }
        for (kind, body), run in runs.items()
    ]


def _warm_up(
    runs: Runs, draw: Callable[[int], list[np.ndarray]], link: Link, most: int
) -> dict[tuple[str, str], bool]:
    """Plan until every fetched row sends one away, on all ranks; which runs came so far."""
    steady = dict.fromkeys(runs, False)
    for _ in range(most):
        (rows,) = draw(1)
        plans = {name: run.step(rows) for name, run in runs.items()}
        own = {name: plan is not None and evict_all([plan]) for name, plan in plans.items()}
        of_all = link.gather_objects(own, "steady eviction")
        steady = {name: all(of_rank[name] for of_rank in of_all) for name in runs}
        if all(steady.values()):
            break
    for run in runs.values():
        run.seconds.clear()
        run.counters.reset()
    return steady


if __name__ == "__main__":
    sys.exit(main())
