"""The whole plan with the ranks' exchange: `distcache.bench.planner` starts one process per rank.

Every rank requests, exchanges, ingests, decides, exchanges and assembles as in training, over gloo;
each has a core of its own where there are enough.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from distcache.bench.options import at_least, option, parse, show, split_arguments
from distcache.bench.plan_ids import IdStream, by_rank, compose_plan
from distcache.bench.report import Record
from distcache.bench.spread import rotated, spread
from distcache.cache.size import cache_slots
from distcache.cli.logs import set_up_logging
from distcache.cli.processes import run_job, train_command
from distcache.comm.counters import CollectiveCounters
from distcache.comm.link import Link, host_link
from distcache.comm.rendezvous import find_place
from distcache.comm.world import World, close_world, open_world
from distcache.config import CacheConfig
from distcache.errors import DistcacheError
from distcache.layout import RowLayout
from distcache.pipeline.exchange import PlanExchange, Status
from distcache.planner.assemble import Request, assemble, make_request, next_move_after
from distcache.planner.bodies import make, using
from distcache.planner.home import HomePlanner
from distcache.run import build
from distcache.step_plan import StepPlan, check_plan

MODULE = "distcache.bench.plan_exchange"


@dataclass(frozen=True)
class ExchangeOptions:
    """What `measure_exchange` tells the ranks."""

    size: str = option("kaggle", "as those of distcache.bench.planner")
    batch: int = option(16384, "the same")
    bodies: tuple[str, ...] = option(("compiled",), "the same")
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
    """One rank's planner and its exchange, without training. `seconds`: time so far by part."""

    def __init__(self, layout: RowLayout, cache: CacheConfig, body: str, world: World) -> None:
        group = (layout.rows, layout.dim, 0)
        slots = cache_slots(cache.rows, cache.ratio, cache.bytes, [group], 4, world.size)[0]
        self.layout, self.lookahead, self.prefetch = layout, cache.lookahead, cache.prefetch
        self.body, self.counters = body, CollectiveCounters()
        link = Link(world, world.planning_group, self.counters, "the planning group")
        self._exchange = PlanExchange(link, 1, 0)
        with using(make(body)):
            per_home = -(-slots // world.size)
            self._planner = HomePlanner(layout, world.rank, per_home, self.prefetch)
        self.seconds: dict[str, float] = defaultdict(float)
        self._waiting: deque[Request] = deque()
        self._step, self._move_after = 0, -1

    def step(self, rows: np.ndarray) -> StepPlan | None:
        """Ingest this rank's rows of a step; the plan of the step L before, if there is one."""
        with using(make(self.body)):
            with self._part("request"):
                request = make_request(self.layout, rows)
            step, self._step = self._step, self._step + 1
            with self._part("exchange of requests"):
                _, named = self._exchange.requests(Status.OK, step, ("train", step), [request])
            with self._part("ingest"):
                self._planner.ingest(step, "train", named[0])
            self._waiting.append(request)
            return self._decide() if len(self._waiting) > self.lookahead else None

    def _decide(self) -> StepPlan:
        request, due = self._waiting.popleft(), [self._planner.due_rows]
        with self._part("plan"):
            own = self._planner.plan()
        with self._part("exchange of decisions"):
            decided = self._exchange.decisions(Status.OK, own.step, due, [own], [request])
        with self._part("assemble"):
            self._move_after = next_move_after(
                own.step, self.prefetch, decided.latest_use, self._move_after
            )
            plan = assemble(request, decided.parts[0], own, self._move_after)
        with self._part("check"):
            check_plan(plan)
        return plan

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


def _measure(options: ExchangeOptions, overrides: Sequence[str], world: World) -> list[Record]:
    """Every body's turns over the same ids, in rotating order; the records, alike on all ranks."""
    config = compose_plan(options.size, options.batch, overrides, find_place())
    source = build.build_source(config)
    layout = RowLayout(build.build_tables(config, source), world.size)
    runs = {body: RankRun(layout, config.cache, body, world) for body in options.bodies}
    stream, link = IdStream(source, layout, options.batch), host_link(world)

    def draw(steps: int) -> list[np.ndarray]:
        return [by_rank(rows, world.size)[world.rank] for rows in stream.draw(steps)]

    def evicts(plan: StepPlan | None) -> bool:
        enough = plan is not None and 0 < plan.fetch_counts[world.rank] <= len(plan.evict_slots)
        return all(link.gather_objects(enough, "steady eviction"))

    steady = False
    for _ in range(options.warmup):
        (rows,) = draw(1)
        steady = all([evicts(run.step(rows)) for run in runs.values()])
        if steady:
            break
    for run in runs.values():
        run.seconds.clear()
        run.counters.reset()
    walls: dict[str, list[float]] = {body: [] for body in runs}
    on_cores: dict[str, list[float]] = {body: [] for body in runs}
    for repetition in range(options.repetitions):
        batches = draw(options.steps)
        for body in rotated(list(runs), repetition):
            link.gather_objects(None, "the start of a turn")
            started, used = time.perf_counter(), time.process_time()
            for rows in batches:
                runs[body].step(rows)
            spent = time.perf_counter() - started, time.process_time() - used
            ended = link.gather_objects(spent, "the end of a turn")
            walls[body].append(max(wall for wall, _ in ended))
            on_cores[body].append(sum(cpu for _, cpu in ended))
    steps = options.steps * options.repetitions
    ids = options.steps * options.batch * len(layout.tables)
    return [
        {
            "kind": "exchange",
            "world_size": world.size,
            "body": body,
            "steady_eviction": steady,
            "seconds": walls[body],
            "cpu_seconds": on_cores[body],
            "ids": ids,
            # As without the exchange: W cores work for the whole time.
            "ids_per_second": spread([ids / (wall * world.size) for wall in walls[body]]),
            "ids_per_cpu_second": spread([ids / cpu for cpu in on_cores[body]]),
            "ms": {name: 1e3 * value / steps for name, value in run.seconds.items()},
            "planning_bytes": run.counters.planning_bytes / steps,
        }
        for body, run in runs.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
