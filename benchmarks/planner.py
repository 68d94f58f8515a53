"""Ids per second of the whole plan on one core: `python -m benchmarks.planner`, or under torchrun
for several ranks.

Each rank's planner plans a click stream in steady eviction as it does beside training, exchange
included, in turns with ways to find a batch's distinct rows alone, over the same ids. Drawing ids
is not timed. `against=<another checkout>` compares the planning threads of two checkouts instead,
which plan what they would for training.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from benchmarks import against
from benchmarks.against import OTHER, THIS
from benchmarks.modes import RowCounts
from benchmarks.options import option
from benchmarks.ranks import opened_world
from benchmarks.report import Bench, Column, Record, Section, of_kind, pivoted, run_bench
from benchmarks.setting import SIZES, compose_setting
from benchmarks.stream import BatchBank, Contender, Feed, Turns
from benchmarks.turns import ratios, shown, spread, take_turns
from distcache.cli.run import commit
from distcache.comm.link import CollectiveCounters, Link, host_link
from distcache.comm.rendezvous import find_place
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.engine import planning
from distcache.engine.exchange import PlanExchange
from distcache.engine.groups import (
    MIXED,
    REPLICATED,
    SHARDED,
    Placement,
    TableGroup,
    TableSettings,
    group_bags,
    make_groups,
    region_slots,
)
from distcache.errors import ConfigError, DistcacheError
from distcache.layout import RowLayout, TableSpec
from distcache.planner import loops, request_loops
from distcache.planner.home import HomePlanner
from distcache.planner.rank import RankPlanner
from distcache.planner.victims import DEFAULT, NONE, Policy
from distcache.popularity.slots import cache_slots
from distcache.trainer import build
from distcache.trainer.plan_cache import resolve_placement

PLACEMENTS = (REPLICATED, SHARDED, MIXED)
YARDSTICK = "np.unique"
"""The contender that every rate is compared with."""

EXCHANGE = "exchange"
PARTS = (
    (planning, "group_bags", "bags"),
    (RankPlanner, "request", "request"),
    (PlanExchange, "exchange", EXCHANGE),
    (HomePlanner, "ingest", "ingest"),
    (HomePlanner, "plan", "plan"),
    (RankPlanner, "assemble", "assemble"),
    (planning, "check_plan", "check"),
)
"""The functions that a plan is made of: where they are called from, and what the report says."""

LOOPS = (
    *((request_loops, name) for name in ("name_span", "divide_span", "mark", "order_ids")),
    *((loops, name) for name in ("advance", "gather")),
)
"""The planner's compiled loops in the midst of a stream, but for those that others of them call."""

Seconds = dict[str, list[float]]
"""By name: seconds of the clock, and on a thread's core."""


def no_seconds() -> Seconds:
    """None of any name."""
    return defaultdict(lambda: [0.0, 0.0])


SPENT = no_seconds()
"""What the `PARTS` of the step under way have taken."""

_AHEAD = 3
"""Batches that a planner reads beyond the window of the step that it plans, at most."""

ROLES = ("planning", "parts", "talking")
"""Of threads that plan, as `against_rank.role_of` has them."""


@dataclass(frozen=True)
class PlannerOptions:
    """The keys of the command line."""

    size: str = option("kaggle", "tables", among=tuple(SIZES))
    batch: int = option(16384, "samples of a step over all ranks", least=1)
    placements: tuple[str, ...] = option(
        (REPLICATED,), "with one rank all are replicated", among=PLACEMENTS
    )
    share: float = option(0.0005, "of all rows: the hottest, which mixed replicates")
    steps: int = option(10, "steps of each contender in a repetition", least=1)
    repetitions: int = option(7, "turns of each contender", least=1)
    warmup: int = option(400, "most steps before; they end once every miss evicts", least=1)
    threads: int = option(1, "torch threads of a rank", least=1)
    pin: bool = option(True, "a core for each rank, where there are enough")
    against: str = option("", "another checkout, whose planner takes turns with this one's")
    planner_threads: tuple[int, ...] = option((1, 2), "of this one, each a run", least=1)
    ranks: int = option(1, "ranks of each checkout, with against=; else torchrun says", least=1)
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def measure(options: PlannerOptions, overrides: tuple[str, ...]) -> list[Record]:
    """All records of the report; called by every rank."""
    place = find_place()
    sizes = (f"data.global_batch_size={options.batch}", *overrides)
    config = compose_setting(options.size, sizes)
    if options.against:
        return measure_against(options, config, overrides)
    if not 0 < options.share < 1:
        raise ConfigError(f"share={options.share}: a share of the rows lies in (0, 1)")
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    try:
        if options.pin and len(cores) >= place.local_size:
            os.sched_setaffinity(0, {cores[place.local_rank]})
        with opened_world("cpu") as world:
            records = measure_here(options, config, world)
    finally:
        os.sched_setaffinity(0, cores)
    return records + (measure_start() if place.rank == 0 else [])


def measure_here(options: PlannerOptions, config: Config, world: World) -> list[Record]:
    """Warm up, take turns, and summarise; called by all ranks."""
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    (group,) = make_groups(tables, source.features, world.size)
    size, cache = [(group.layout.rows, group.dim, 0)], config.cache
    slots = cache_slots(cache.rows, cache.ratio, cache.bytes, size, 4, world.size)
    bank = BatchBank(source, world.rank, world.size)
    contenders: list[Contender] = []
    for kind in options.placements if world.size > 1 else (REPLICATED,):
        share = options.share if kind == MIXED else None
        own = replace(cache, placement=kind, replicated_share=share, state="replicated")
        placed = replace(config, cache=own, parallel=replace(config.parallel, mode="data"))
        known = (tables, slots, None)
        placement = resolve_placement(placed, world, known, source, nn.Identity())
        one = placement.groups([group])[0] if world.size > 1 else group
        # Slots are those of training: C on each device, whatever the placement.
        held = SimpleNamespace(group=one, slots=region_slots(one, slots[0]))
        policies = {"": DEFAULT, ", no table stays": replace(DEFAULT, resident=NONE)}
        for note, policy in policies.items() if kind == REPLICATED else [("", DEFAULT)]:
            what = kind + note, kind, policy
            contenders.append(Planning(*what, held, config, world, bank.feed()))
    ways = distinct_ways().items()
    contenders += [Finding(name, way, group, bank.feed()) for name, way in ways]
    with watching(PARTS, SPENT), closing(Turns(contenders, world, bank)) as turns:
        turns.warm_up(1, options.warmup)
        records = turns.take(options.repetitions, 0, options.steps)
        for contender in contenders:
            if isinstance(contender, Planning):
                records.append(_loop_record(turns, contender.name, options.steps))
    return records


def _loop_record(turns: Turns, name: str, steps: int) -> Record:
    """Milliseconds per step of every one of the planner's loops."""
    seconds = no_seconds()
    with watching([(owner, loop, loop) for owner, loop in LOOPS], seconds):
        turns.go(name, steps)
    ms = {loop: 1e3 * wall / steps for loop, (wall, _) in seconds.items()}
    return {"kind": "loops", "mode": name, "world_size": turns.world.size, "ms": ms}


class Timed(Contender):
    """Counts its ids, and what it takes of its thread's core (`own`) and of its process's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ids, self._cpu = 0, 0.0

    def step(self) -> None:
        """See `Contender.step`."""
        began = time.thread_time()
        ids = self.work()
        self._cpu += time.thread_time() - began
        self._ids += ids

    @abstractmethod
    def work(self) -> int:
        """One step; how many ids it had."""

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`."""
        cpu = {"process": 1e3 * time.process_time(), "own": 1e3 * self._cpu}
        return {"cpu_ms": cpu, "ids_per_step": {"ids": self._ids}}


class Planning(Timed):
    """This rank's planner in a placement; all ranks step alike."""

    def __init__(
        self,
        name: str,
        kind: str,
        policy: Policy,
        placed: Any,
        config: Config,
        world: World,
        feed: Feed,
    ) -> None:
        super().__init__(f"plan, {name}")
        ahead = int(config.cache.lookahead), int(config.cache.prefetch)
        self.ahead = 1 + sum(ahead) + _AHEAD
        self._rows, self._world = RowCounts(), world
        self._table_rows = placed.group.layout.rows
        self._counters = CollectiveCounters()
        pairs = [(placed.group, placed.slots)]
        self._regions = planning.home_regions(pairs, world.rank, ahead[1], policy, [None])
        self._planner = planning.StreamPlanner(
            Link(world, world.planning_group, self._counters, "the planning group"),
            [placed.group],
            self._regions,
            [placed.slots.all],
            TableSettings(lookahead=ahead[0], prefetch=ahead[1], placement=Placement(kind)),
        )
        self._plans = self._planner.planned(feed, lambda: False)
        self._parts, self._steps = no_seconds(), 0

    def work(self) -> int:
        """Plan the next step."""
        SPENT.clear()
        plans = next(self._plans).plans
        self._planner.settle()  # the next exchange of this group may be another contender's
        for name, (wall, cpu) in SPENT.items():
            self._parts[name][0] += wall
            self._parts[name][1] += cpu
        self._steps += 1
        self._rows.add(plans)
        return sum(len(plan.positions) for plan in plans)

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`; `own` is without the exchange."""
        found, size = super().meters(), self._world.size
        cpu = found["cpu_ms"]
        sent = dict.fromkeys(map(str, range(size)), 0)
        # What is the mean over ranks afterwards is then each rank's own.
        sent[str(self._world.rank)] = size * self._counters.planning_bytes
        return {
            **found,
            "cpu_ms": {**cpu, "own": cpu["own"] - 1e3 * self._parts[EXCHANGE][1]},
            "stage_ms": {name: 1e3 * self._parts[name][0] for *_, name in PARTS},
            "rows_per_step": dict(self._rows.sums),
            "sent_per_step": sent,
        }

    def steady(self) -> bool:
        """Whether every row that the last step fetched sent one away."""
        return self._rows.steady

    def summary(self) -> dict[str, Any]:
        """The index of all homes together, and what this rank's core gave to an exchange."""
        index = sum(region.planner.index_bytes for region in self._regions)
        slots = sum(region.planner.slots for region in self._regions)
        told = host_link(self._world).gather_objects((index, slots), "what the homes have")
        index, slots = (sum(values) for values in zip(*told, strict=True))
        found = {"index_bytes": index, "bytes_per_row": index / self._table_rows, "slots": slots}
        return found | {"exchange_core_ms": 1e3 * self._parts[EXCHANGE][1] / self._steps}


class Finding(Timed):
    """A way to find the distinct rows of a batch alone."""

    def __init__(
        self, name: str, way: Callable[[np.ndarray], Any], group: TableGroup, feed: Feed
    ) -> None:
        super().__init__(name)
        self._way, self._group, self._feed = way, group, feed
        self._ready: deque[np.ndarray] = deque()

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._ready) < steps:
            bags = group_bags(self._group, next(self._feed).ids, torch.float32)
            rows = bags.ids.copy()
            for start, stop, first in bags.pieces[:3].T:
                rows[start:stop] += first
            self._ready.append(rows)

    def work(self) -> int:
        """Find those of the next batch."""
        rows = self._ready.popleft()
        self._way(rows)
        return len(rows)


def distinct_ways() -> dict[str, Callable[[np.ndarray], Any]]:
    """Ways to find the distinct rows of a batch (int64 `[n]`), by name."""
    layout = RowLayout([TableSpec("all", 2**31, 4, ("all",))], 1)
    return {
        YARDSTICK: np.unique,
        "np.unique with inverse": lambda ids: np.unique(ids, return_inverse=True),
        "torch.unique with inverse": lambda ids: torch.unique(
            torch.from_numpy(ids), return_inverse=True
        ),
        "distinct by hash": RankPlanner(layout).request,
    }


@contextmanager
def watching(targets: Sequence[tuple[Any, str, str]], found: Seconds) -> Iterator[None]:
    """Add to `found` what functions take while open.

    `targets`: where a function is looked up, under which name, and what it is called here.
    """

    def watched(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **more: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **more)
            finally:
                found[name][0] += time.perf_counter() - wall
                found[name][1] += time.thread_time() - cpu

        return call

    with ExitStack() as stack:
        for owner, attribute, name in targets:
            function = watched(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, function))
        yield


_START = """
import sys, time
times = [time.perf_counter()]
import numba
times.append(time.perf_counter())
import distcache.planner.rank
sys.stdout.write(f"{times[1] - times[0]} {time.perf_counter() - times[1]}")
"""


def measure_start() -> list[Record]:
    """Numba's import and the loops after it, in two fresh processes over one empty folder."""
    records, checkout = [], Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        own = {**os.environ, "NUMBA_CACHE_DIR": folder}
        for name in ("compiled", "loaded from disk"):
            command = [sys.executable, "-c", _START]
            done = subprocess.run(command, env=own, cwd=checkout, capture_output=True, text=True)
            if done.returncode:
                raise DistcacheError(f"the compiled loops do not load:\n{done.stderr[-2000:]}")
            numba, loops = map(float, done.stdout.split())
            records.append({"kind": "start", "loops": name, "import_s": numba, "loops_s": loops})
    return records


def measure_against(
    options: PlannerOptions, config: Config, overrides: tuple[str, ...]
) -> list[Record]:
    """Planning threads of this checkout's training, with each number of them, and of the other's,
    in turns over the same batches; nothing that they plan is trained."""
    paths = against.checkouts(options.against)
    narrow = {"width": 4, "model": "embeddings", "optimizer": "sgd", "lead": 0}
    of_run = SimpleNamespace(**vars(options) | narrow)
    spec = against.spec_of("data", of_run, config, overrides) | {"plans": True}
    runs = {
        f"this, k = {k}": (THIS, {"trainer.planner_threads": k}) for k in options.planner_threads
    }
    runs |= {OTHER: (OTHER, {})}
    with ExitStack() as stack:
        jobs = {
            name: against.Job(
                paths[side], options.ranks, spec | {"settings": spec["settings"] | own}, stack
            )
            for name, (side, own) in runs.items()
        }
        for job in jobs.values():
            job.run(0, options.warmup)
        turns = take_turns(
            {name: partial(_planned_turn, job, options.steps) for name, job in jobs.items()},
            options.repetitions,
        )
    commits, records = {side: commit(path) for side, path in paths.items()}, []
    for name, found in turns.items():
        about = {"kind": "planning", "run": name, "ranks": options.ranks, "batch": options.batch}
        values = {key: [turn[key] for turn in found] for key in found[0]}
        other = {key: [turn[key] for turn in turns[OTHER]] for key in ("cpu", "wall")}
        records.append(about | {"commit": commits[runs[name][0]]})
        records[-1] |= {key: spread(of) for key, of in values.items()}
        records[-1] |= {
            f"{key}_ratio": spread(ratios(values[key], of)) for key, of in other.items()
        }
    return records


def _planned_turn(job: against.Job, steps: int, repetition: int) -> dict[str, float]:
    """Milliseconds a step, mean over the ranks: on all cores, without reading and checking batches
    (`cpu`); of the clock, with that, median of the steps (`wall`); on the planner's core, without
    what it shares with other threads or is theirs, where there are several (`serial`). Page faults
    of the process."""
    ranks = job.run(0, steps)
    cpu, taken = against.of_ranks(ranks, "cpu_ms"), against.of_ranks(ranks, "taken_ms")
    return {
        "cpu": sum(cpu.get(role, 0.0) for role in ROLES) - taken["reading"],
        "wall": float(np.mean([np.median(rank["step_ms"]) for rank in ranks])),
        "serial": cpu["planning"] - taken["shared"],
        "reading": taken["reading"],
        "faults": against.of_ranks(ranks, "faults")["process"],
    }


def rates(records: Sequence[Record]) -> list[Record]:
    """Ids per second of every contender, by the clock and on cores, and its ratio to `np.unique`
    by the threads' time on their cores without the exchange, within each repetition."""
    turns: dict[str, list[Record]] = {record["mode"]: [] for record in of_kind(records, "mode")}
    for turn in of_kind(records, "turn"):
        turns[turn["mode"]].append(turn)

    def of(name: str, key: str) -> list[float]:
        return [1e3 * turn["ids_per_step"]["ids"] / turn["cpu_ms"][key] for turn in turns[name]]

    return [
        {
            "mode": name,
            "world_size": records[0].get("world_size"),
            "wall": spread(
                [1e3 * turn["ids_per_step"]["ids"] / np.mean(turn["step_ms"]) for turn in found]
            ),
            **{key: spread(of(name, key)) for key in ("process", "own")},
            "ratio": spread(ratios(of(name, "own"), of(YARDSTICK, "own"))),
        }
        for name, found in turns.items()
    ]


def run_name(record: Record) -> str:
    """Contender and number of ranks of a record."""
    return f"{record['mode'].removeprefix('plan, ')}, W = {record['world_size']}"


SECTIONS = (
    Section(
        "Ids per second on one core",
        "Median [quartiles] over the repetitions, in millions; W ranks work side by side, and each "
        "rank's ids count. M ids/s: by the clock, waits included. Per CPU second: of a rank's "
        "process, with gloo's threads. Without exchange: of the planning thread, but for the "
        f"exchange; the ratio to {YARDSTICK} is of these, within each repetition.",
        rates,
        (
            Column("contender", "mode"),
            Column("M ids/s", "wall", shown(scale=1e-6)),
            Column("M ids per CPU second", "process", shown(scale=1e-6)),
            Column("without exchange", "own", shown(scale=1e-6)),
            Column(f"of {YARDSTICK}", "ratio", shown()),
        ),
    ),
    pivoted(
        (
            "Where the time goes",
            "Milliseconds per step of the first rank, by the clock: in the exchange with waits for "
            "the others. `bags`: where which ids are; `ingest`: what all ranks name, and the next "
            "decision, which `plan` then has; `check`: the laws' cheap checks. Median over the "
            "turns of the mean of a turn's steps.",
        ),
        "mode",
        lambda record: record["stage_ms"],
        ("part", run_name),
    ),
    pivoted(
        (
            "Inside: the loops",
            "Mean milliseconds per step of the planner's loops, from steps of their own. "
            "`name_span` and `divide_span` are in request, `mark` and `order_ids` in assemble, the "
            "others in ingest.",
        ),
        "loops",
        lambda record: record["ms"],
        ("loop", run_name),
    ),
    Section(
        "Until the loops are there",
        "Seconds in a fresh process, when its first planner is made: with an empty cache "
        "folder (once per installation), then again.",
        "start",
        (
            Column("loops", "loops"),
            Column("import of Numba", "import_s", ".2f"),
            Column("loops", "loops_s", ".2f"),
        ),
    ),
    Section(
        "Index, stream and exchange",
        "The index is that of a node, all its homes together; rows are means per step. Bytes are "
        "of integers (headers, requests, decisions) that a rank tells others for a step: the "
        "mean of all ranks, and of one rank. Exchange: milliseconds of its thread's core that an "
        "exchange takes on the first rank, the mean of all steps.",
        lambda records: [r for r in of_kind(records, "mode") if "index_bytes" in r],
        (
            Column("run", run_name),
            Column("B per row", "bytes_per_row", ".2f"),
            Column("slots", "slots", ","),
            Column("distinct", lambda r: r["rows_per_step"]["distinct"], ",.0f"),
            Column("misses", lambda r: r["rows_per_step"]["misses"], ",.0f"),
            Column(
                "evictions", lambda r: r["world_size"] * r["rows_per_step"]["evictions"], ",.0f"
            ),
            Column("steady", lambda r: "yes" if r["steady_eviction"] else "no"),
            Column("bytes sent", lambda r: np.mean(list(r["sent_per_step"].values())), ",.0f"),
            Column("the most", lambda r: max(r["sent_per_step"].values()), ",.0f"),
            Column("exchange", "exchange_core_ms", ".2f"),
        ),
    ),
    Section(
        "Planning threads of both checkouts",
        "Milliseconds a step and rank, median [quartiles] over the turns; ratios to the other "
        "checkout's within a turn. Nothing that is planned is trained, so all cores are for "
        "planning. CPU: on all threads that plan, without reading batches and checking their ids, "
        "which `reading` is. Wall: by the clock, with reading, which another thread does where "
        "there are several. Serial: of the planner's thread, without what it shares with others.",
        "planning",
        (
            Column("run", "run"),
            Column("batch", "batch", ","),
            Column("CPU", "cpu", shown()),
            Column("ratio", "cpu_ratio", shown(3)),
            Column("wall", "wall", shown()),
            Column("ratio", "wall_ratio", shown(3)),
            Column("serial", "serial", shown()),
            Column("reading", "reading", shown()),
            Column("page faults", "faults", shown(0)),
            Column("commit", "commit", against.shown_commit),
        ),
    ),
)

BENCH = Bench("Planner", PlannerOptions, measure, SECTIONS, overrides=True)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
