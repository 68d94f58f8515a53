"""Ids per second of the whole plan on one core: `python -m distcache.bench.planner`.

Requests, ingest, plan and assembly of all ranks run one after the other in this process, in steady
eviction, compiled and in NumPy, beside ways to find a batch's distinct rows alone, in turns over
the same ids. Drawing ids is not timed. With the ranks' exchange, each rank is a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from distcache.bench.options import at_least, option, parse, split_arguments, usage
from distcache.bench.plan_exchange import ExchangeOptions, measure_exchange
from distcache.bench.plan_ids import IdStream, by_rank, compose_plan
from distcache.bench.plan_placements import PlacedGroup, Placer, check_placements
from distcache.bench.plan_runs import (
    PlanningRun,
    distinct_contenders,
    evict_all,
    run_distinct,
    timed_loops,
)
from distcache.bench.plan_start import measure_start
from distcache.bench.plan_tables import YARDSTICK, run_name, tables
from distcache.bench.report import Record, Report, check_out, header, to_markdown, write_report
from distcache.bench.spread import ratios, rotated, spread
from distcache.cli.run import set_up_logging
from distcache.comm.rendezvous import Place
from distcache.config.tree import CacheConfig, Config
from distcache.engine.groups import REPLICATED
from distcache.errors import DistcacheError

log = logging.getLogger("distcache.bench.planner")

MODULE = "distcache.bench.planner"
PURPOSE = "Ids per second of the whole plan on one core, beside np.unique on the same ids."


@dataclass(frozen=True)
class PlannerOptions:
    """The keys of the command line."""

    size: str = option(
        "kaggle", "tables: kaggle (33,762,577 rows), terabyte (204,184,588) or small"
    )
    batch: int = option(16384, "samples of a step over all ranks, one id per table each")
    worlds: tuple[int, ...] = option((1, 2), "numbers of ranks, simulated in this process")
    placements: tuple[str, ...] = option(
        (REPLICATED,), "replicated, sharded and mixed; with one rank all are replicated"
    )
    share: float = option(0.0005, "of all rows: the hottest, which mixed replicates")
    exchange: int = option(2, "ranks of the run with the exchange, a process each; 0: no such run")
    steps: int = option(10, "steps of each contender in a repetition")
    repetitions: int = option(7, "repetitions, in each of which every contender has its turn")
    warmup: int = option(400, "most steps before measuring; it starts once every miss evicts")
    pin: bool = option(True, "run on one core only; with the exchange, on one for each rank")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, steps=self.steps, repetitions=self.repetitions)
        at_least(1, worlds=min(self.worlds), warmup=self.warmup)
        at_least(0, exchange=self.exchange)
        check_placements(self.placements)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    set_up_logging("INFO")
    if "--help" in given or "-h" in given:
        sys.stdout.write(usage(PlannerOptions, MODULE, PURPOSE))
        return 0
    try:
        line = split_arguments(given)
        options = parse(PlannerOptions, line.given)
        out = check_out(options.out)
        config = compose_plan(options.size, options.batch, line.overrides, Place())
        head = header(MODULE, given, asdict(options), 1)
        with one_core(options.pin):
            records = measure(options, config)
        if options.exchange:
            told = {f.name: getattr(options, f.name) for f in fields(ExchangeOptions)}
            told = ExchangeOptions(**{**told, "out": ""})
            records += measure_exchange(told, line.overrides, options.exchange)
        report = Report("Planner", MODULE, given, asdict(options), records, tables)
        sys.stdout.write(to_markdown(report, head))
        if out is not None:
            write_report(report, head, out)
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    return 0


@contextlib.contextmanager
def one_core(pin: bool) -> Iterator[None]:
    """One torch thread, and (`pin`) one core, while open."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    try:
        if pin:
            os.sched_setaffinity(0, {max(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def measure(options: PlannerOptions, config: Config) -> list[Record]:
    """Warm up, take turns, and summarise: the records of the report."""
    placer = Placer(config, options.share)
    runs: Runs = {}
    for kind in options.placements:
        for world in options.worlds:
            if kind == REPLICATED or world > 1:
                placed = placer.place(kind, world)
                runs |= {(kind, world, "compiled"): _run(placed, placer.cache)}
    layout = placer.group(1).layout
    stream = IdStream(placer.source, layout, options.batch)
    steady = _warm_up(runs, stream, options.warmup)
    rows = layout.rows
    distinct = distinct_contenders(rows)
    turns = _Turns(runs, distinct, stream.draw(1)[0].reshape(-1))
    for repetition in range(options.repetitions):
        turns.take(repetition, stream.draw(options.steps))
    records = [*turns.records, *_rates(turns.records), *_part_records(runs, options)]
    batches = stream.draw(options.steps)
    records += [_loop_record(key, run, batches) for key, run in runs.items()]
    records += [_index_record(key, run, steady[key]) for key, run in runs.items()]
    return records + measure_start()


Key = tuple[str, int, str]
"""Placement, number of ranks and body."""

Runs = dict[Key, PlanningRun]


def _run(placed: PlacedGroup, cache: CacheConfig) -> PlanningRun:
    return PlanningRun(placed, int(cache.lookahead), int(cache.prefetch))


def _about(key: Key) -> Record:
    """What every record says of its run."""
    return dict(zip(("placement", "world_size", "body"), key, strict=True))


def _warm_up(runs: Runs, stream: IdStream, most: int) -> dict[Key, bool]:
    """Plan until every fetched row sends one away; whether each run came so far."""
    steady = dict.fromkeys(runs, False)
    for _ in range(most):
        (rows,) = stream.draw(1)
        for key, run in runs.items():
            steady[key] = evict_all(run.step(by_rank(rows, run.world_size)))
        if all(steady.values()):
            break
    else:
        log.warning("no steady eviction within warmup=%d steps: give more", most)
    for run in runs.values():
        run.seconds.clear()
        run.counts.clear()
    return steady


class _Turns:
    """Every contender's turn over the same ids, in rotating order."""

    def __init__(
        self, runs: Runs, distinct: dict[str, Callable[[np.ndarray], Any]], sample: np.ndarray
    ) -> None:
        self._runs = {f"plan, {run_name(_about(key))}": run for key, run in runs.items()}
        self._distinct = distinct
        self.names = [*self._runs, *self._distinct]
        self.records: list[Record] = []
        for find in self._distinct.values():
            run_distinct(find, [sample])  # the first call of each loads code and touches pages

    def take(self, repetition: int, batches: Sequence[np.ndarray]) -> None:
        """One repetition over `batches` (rows `[T, b]`)."""
        flat = [rows.reshape(-1) for rows in batches]
        ids = sum(len(rows) for rows in flat)
        for name in rotated(self.names, repetition):
            if name in self._runs:
                seconds, cpu = self._plan(self._runs[name], batches)
            else:
                seconds, cpu = run_distinct(self._distinct[name], flat)
            self.records.append(
                {
                    "kind": "turn",
                    "contender": name,
                    "repetition": repetition,
                    "ids": ids,
                    "seconds": seconds,
                    "cpu_seconds": cpu,
                }
            )

    def _plan(self, run: PlanningRun, batches: Sequence[np.ndarray]) -> tuple[float, float]:
        before = sum(run.seconds.values()), run.cpu_seconds
        for rows in [by_rank(batch, run.world_size) for batch in batches]:
            run.step(rows)
        return sum(run.seconds.values()) - before[0], run.cpu_seconds - before[1]


def _rates(turns: Sequence[Record]) -> list[Record]:
    """Ids per second of every contender, and its ratio to `np.unique` within each repetition."""
    rates: dict[str, list[float]] = {}
    on_core: dict[str, list[float]] = {}
    for turn in sorted(turns, key=lambda turn: turn["repetition"]):
        rates.setdefault(turn["contender"], []).append(turn["ids"] / turn["seconds"])
        on_core.setdefault(turn["contender"], []).append(turn["ids"] / turn["cpu_seconds"])
    records = []
    for name, values in rates.items():
        ratio = ratios(values, rates[YARDSTICK])
        records.append(
            {
                "kind": "rate",
                "contender": name,
                "ids_per_second": spread(values),
                "ids_per_cpu_second": spread(on_core[name]),
                "ratio_to": YARDSTICK,
                "ratio": spread(ratio),
            }
        )
    return records


def _part_records(runs: Runs, options: PlannerOptions) -> list[Record]:
    """Milliseconds per step and rank of every part, over all turns."""
    records = []
    steps = options.steps * options.repetitions
    for key, run in runs.items():
        share = 1e3 / (steps * run.world_size)
        parts = {name: value * share for name, value in run.seconds.items()}
        records.append({"kind": "parts", **_about(key), "ms": parts})
    return records


def _loop_record(key: Key, run: PlanningRun, batches: Sequence[np.ndarray]) -> Record:
    """Milliseconds per step and rank of every loop."""
    with timed_loops() as seconds:
        for rows in batches:
            run.step(by_rank(rows, run.world_size))
    share = 1e3 / (len(batches) * run.world_size)
    ms = {name: share * value for name, value in seconds.items()}
    return {"kind": "loops", **_about(key), "ms": ms}


def _index_record(key: Key, run: PlanningRun, steady: bool) -> Record:
    counts = run.counts
    return {
        "kind": "index",
        **_about(key),
        "rows": run.layout.rows,
        "index_bytes": run.index_bytes,
        "bytes_per_row": run.index_bytes / run.layout.rows,
        "slots": run.slots,
        "steady_eviction": steady,
        "steps": counts["steps"],
        "distinct_per_step": counts["distinct"] / counts["steps"],
        "misses_per_step": counts["misses"] / counts["steps"],
        "evictions_per_step": counts["evictions"] / counts["steps"],
    }


if __name__ == "__main__":
    sys.exit(main())
