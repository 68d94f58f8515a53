"""What the host does for a step, by thread, and the step that this predicts beside a GPU:
`python -m benchmarks.host`.

Ranks train on the CPU in processes of their own, with the threads that they have beside a GPU. A
thread's time on its core, less what torch, the package's kernels and the model take of it, is its
own: it is looked at what training and movement are at, about every millisecond. Stages are timed
and results read as seldom and as late as beside a GPU. The cost model of `distcache.plan`, given
what was measured, predicts steps beside an H100.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.against import SEEN, THIS, Job, checkouts, of_ranks, spec_of
from benchmarks.against_rank import CALLS
from benchmarks.looks import require_looks
from benchmarks.options import option
from benchmarks.ranks import opened_world
from benchmarks.report import Bench, Column, Record, Section, run_bench
from benchmarks.setting import SIZES, compose_setting
from benchmarks.turns import shown, spread, take_turns
from distcache.cli.compose import read_line
from distcache.cli.plan_run import (
    PLANNER,
    Options,
    measure_host,
    parse_request,
    share_of_rest,
    time_planner,
)
from distcache.comm.world import World
from distcache.cost.cluster import HOST, Cluster, HostTimes
from distcache.cost.demand import Demand
from distcache.cost.predict import Prediction, Settings, predict
from distcache.cost.traffic import REPLICATED, RESIDENT, TABLE_WISE
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.gradients import packed
from distcache.ops.long_segments import segment_chunks
from distcache.trainer.plan_cache import timed

log = logging.getLogger("distcache.benchmarks.host")

STREAMS = ((1.0, 1.05), (0.25, 1.05), (0.25, 0.6), (1 / 256, 1.05))
"""What planners alone plan: a share of the batch, and Zipf's exponent, so that more or fewer ids of
a step are distinct; and so few that they tell what a step takes without any."""

TRAINING = "training"
PARTLY_OWN = (TRAINING, "movement")
"""Threads of which some is not their own, but torch's, the package's kernels' and the model's."""

ROOMS = (0, 2, 6)
"""Steps whose rows their slots are for; 0: every row has a slot of its own, and none moves."""


_TURNS = 3
"""Planners of each stream and room, of which the quickest counts."""


@dataclass(frozen=True)
class HostOptions:
    """The keys of the command line."""

    size: str = option("kaggle", "tables", among=tuple(SIZES))
    optimizers: tuple[str, ...] = option(
        ("sgd", "adagrad"), "mode data trains with each; resident, and a smaller batch, with the "
        "first", among=("sgd", "adagrad", "adam"),
    )  # fmt: skip
    ranks: tuple[int, ...] = option((1, 2), "processes that train together", least=1)
    batch: int = option(16384, "samples of a rank and step", least=4)
    width: int = option(8, "of every table; a thread's own work knows no width", least=1)
    ratio: float = option(0.015, "slots as a share of the rows")
    steps: int = option(10, "steps of a turn", least=1)
    repetitions: int = option(4, "turns whose time is taken", least=1)
    seen: int = option(
        300,
        "steps in which it is looked at what threads are at; 0: none, and all "
        "that a thread does counts as its own",
        least=0,
    )
    warmup: int = option(24, "steps before, of `batch`, in which the slots are filled", least=1)
    planner_threads: int = option(6, "of a predicted rank beside a GPU", least=1)
    launch_us: float = option(7.0, "microseconds of a kernel's launch beside a GPU, an estimate")
    against: str = option("", "another checkout, whose training takes turns with this one's")
    measured: bool = option(True, "false: steps as predicted from the table of distcache.plan")
    out: str = option("", "the report, a .md file; JSON lines go beside it")


WIDTHS, SHARES, WORLDS = (64, 128), (0.25, 1.0), (1, 2, 8)
"""Of predicted steps: widths, batches as shares of `batch`, ranks on one node."""

WARM = 1 / 256
"""Share of `batch` at which training's own work, and what all threads do in Python, are measured
for the model. What a GPU does is done by the threads' own cores here, and sweeps their caches: the
same calls take longer then."""

_PLAN = ("device=h100", "host={bandwidth: 50e9}", "lookahead=16", "prefetch=1", "optim=sgd")
"""What they are of, beside that."""


def measure(options: HostOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Turns of all runs, what the planner takes, and the steps predicted from both."""
    layers = f"model.dense_arch=[32,32,16,{options.width}]", "model.over_arch=[32,16,1]"
    layers += (f"model.embedding_dim={options.width}",)
    ahead = "cache.lookahead=16", "cache.prefetch=1", f"cache.ratio={options.ratio}"
    config = compose_setting(options.size, (*layers, *ahead, *overrides))
    rows = list(config.data.table_rows)
    if options.measured and options.seen:
        require_looks()
    if not options.measured:
        own = {"planner_threads": options.planner_threads, "launch_s": 1e-6 * options.launch_us}
        return predictions(options, rows, replace(HOST, **own))
    records: list[Record] = []
    for about in runs_of(options):
        log.info(" ".join(f"{key}={value}" for key, value in about.items()))
        seen = options.seen * min(8, options.batch // about["batch"])  # short steps are seen less
        turns = 1 + options.repetitions + -(-seen // options.steps)
        own = {"model": "dlrm", "lead": 0, "threads": 1, "repetitions": turns}
        own["warmup"] = options.warmup * options.batch // about["batch"]
        own |= about | {"batch": about["ranks"] * about["batch"]}
        of_run = SimpleNamespace(**asdict(options) | own)
        spec = spec_of(about["mode"], of_run, config, overrides)
        records += trained(replace(options, seen=seen), spec, about, of_run.warmup)
    with opened_world("cpu") as world:
        planner = replace(
            measure_host(world, rows, options.batch, WIDTHS[0]),
            **planner_times(world, rows, options.batch),
        )
        chunked_s = chunk_seconds(world, rows, options.batch)
    planner = replace(planner, launch_s=1e-6 * options.launch_us)
    times = constants(options, rows, records, planner, chunked_s)
    return [*records, *predictions(options, rows, times)]


def predictions(options: HostOptions, rows: Sequence[int], times: HostTimes) -> list[Record]:
    """The constants, and the steps predicted from them."""
    numbers = {key: value for key, value in asdict(times).items() if key != "name"}
    records = [{"kind": "constant", "key": key, "value": v} for key, v in numbers.items()]
    return [*records, *steps_of(options, rows, times)]


def planner_times(world: World, table_rows: Sequence[int], batch: int) -> dict[str, float]:
    """`PLANNER`, fitted to a planner alone, in each room over each stream, and `serial`, of the
    first stream in the largest. Which share of a row's time is its place in the plan stays that of
    the table."""
    counts, seconds, serials = [], [], []
    for (share, zipf), room in product(STREAMS, ROOMS):
        samples = max(1, round(share * batch))
        source = SyntheticSource(SyntheticSpec(table_rows, zipf=zipf, global_batch_size=samples))
        turns = [time_planner(world, source, room) for _ in range(_TURNS)]
        counts.append([turns[0][0][name] for name in PLANNER[:-1]])
        took, serial = min(turn[1:] for turn in turns)
        seconds.append(took)
        serials.append(serial)
    times = dict(zip(PLANNER, fit(counts, seconds), strict=False))
    placed = times["named_s"] * HOST.placed_s / (HOST.named_s + HOST.placed_s)
    largest = len(ROOMS) - 1
    rest = share_of_rest(serials[largest], seconds[largest], times["planning_s"])
    return times | {"named_s": times["named_s"] - placed, "placed_s": placed, "serial": rest}


def chunk_seconds(world: World, table_rows: Sequence[int], batch: int) -> float:
    """What a row's occurrences take of movement beside a device: they are cut into chunks, and
    these packed with where they begin, and the slot."""
    source = SyntheticSource(SyntheticSpec(table_rows, global_batch_size=batch))
    found = source.train_batch(0, 0, 1).ids
    tables = found.values.numpy().reshape(len(table_rows), -1)
    counts = np.concatenate([np.unique(ids, return_counts=True)[1] for ids in tables])
    segments = torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32))

    def cut() -> None:
        packed([segments, segments, segment_chunks(segments).table], pinned=False)

    return timed(world, cut) / len(counts)


def fit(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Seconds of each of the things counted, none below 0, that come nearest to all `seconds`, by
    their ratios: least squares, where what would be negative is left out, the most negative
    first."""
    wanted = np.asarray(seconds, dtype=np.float64)
    table = np.asarray(counts, dtype=np.float64) / wanted[:, None]
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    kept, found = list(range(table.shape[1])), np.zeros(table.shape[1])
    while kept:
        solved = np.linalg.lstsq(table[:, kept] / scale[kept], np.ones(len(wanted)), rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved / scale[kept]
            break
        kept.pop(int(solved.argmin()))
    return found.tolist()


def runs_of(options: HostOptions) -> list[Record]:
    """What trains: mode, optimizer, ranks, and samples of each."""
    names, first = ("mode", "optimizer", "ranks", "batch"), options.optimizers[0]
    every = [("data", *of, options.batch) for of in product(options.optimizers, options.ranks)]
    every += [("resident", first, ranks, options.batch) for ranks in options.ranks]
    small = round(SHARES[0] * options.batch)
    every += [("data", first, ranks, small) for ranks in options.ranks]
    every += [("resident", first, options.ranks[0], small)]
    warm = max(1, round(WARM * options.batch))
    every += [("data", *of, warm) for of in product(options.optimizers, options.ranks)]
    every += [("hybrid", "sgd", ranks, warm) for ranks in options.ranks]
    return [dict(zip(names, run, strict=True)) for run in every]


def trained(options: HostOptions, spec: Record, about: Record, warmup: int) -> list[Record]:
    """A turn of a run in which calls are counted, one in which threads are looked at, and those
    whose time is taken, also of the other checkout's where there is one; a record for each thread.
    `warmup`: steps before, until as many rows leave as come."""
    paths = checkouts(options.against)
    with ExitStack() as stack:
        jobs = {
            side: Job(path, about["ranks"], spec | {"count": True, "late": True}, stack)
            for side, path in paths.items()
        }
        for job in jobs.values():
            job.run(0, warmup)

        def turns(how: str, steps: int, count: int = 1) -> dict[str, list[list[Record]]]:
            run = {s: lambda _, job=job: job.run(0, steps, how) for s, job in jobs.items()}
            return take_turns(run, count)

        counted = turns("run", options.steps)
        seen = turns("seen", options.seen) if options.seen else {side: [[]] for side in jobs}
        alone = turns("alone", options.steps, options.repetitions)
        for job in jobs.values():
            job.finish()
    return [
        {"kind": "thread", **about, "side": side, "thread": thread}
        | _thread(counted[side][0], seen[side][0], alone[side], thread)
        for side, thread in product(paths, threads_of(about))
    ]


def threads_of(about: Record) -> list[str]:
    """Those that a run has: `hybrid` trains alone, and one rank talks to nobody."""
    if about["mode"] == "hybrid":
        return [TRAINING]
    return [thread for thread in SEEN if about["ranks"] > 1 or thread != "talking"]


def _thread(
    counted: Sequence[Record], seen: Sequence[Record], alone: Sequence[Any], thread: str
) -> Record:
    """Milliseconds of a thread's core, by turns, and its calls, a step and rank; and its own ones,
    as the share of looks that saw it at work of its own, with the standard error of that, and those
    of them with the interpreter."""
    core = spread([of_ranks(ranks, "cpu_ms").get(thread, 0.0) for ranks in alone])
    found: Record = {key: of_ranks(counted, key).get(thread, 0.0) for key in CALLS}
    looks = [rank["seen"].get(thread, (0, 0, 0)) for rank in seen if "seen" in rank]
    own, held, every = np.sum(looks, axis=0).tolist() if looks else (0, 0, 0)
    counts = {"held_ms": held} | ({"own_ms": own} if thread in PARTLY_OWN else {})
    for key, count in counts.items() if every else ():
        share, error = (of(max(count, 0.5)) / every for of in (float, math.sqrt))  # above nothing
        found[key] = {"ms": core["median"] * share, "least": core["min"] * share}
        found[key] |= {"error": core["median"] * error, "looks": every}
    return {"core_ms": core, **found}


def constants(
    options: HostOptions,
    rows: Sequence[int],
    threads: Sequence[Record],
    planner: HostTimes,
    chunked_s: float,
) -> HostTimes:
    """The planner's constants, with those that runs of this checkout give beside them; records of
    the planner's thread get what all predict of it.

    Training's own work, and what all threads do of theirs in Python, are those of `data` and the
    first optimizer with the fewest samples (`WARM`), on one rank and on several. Of the other runs,
    movement's has a part for each row that the rank names, to which comes `chunked_s`, and each
    that its home moves; the planner's are times what it takes beside training, whose caches are
    colder. What exchanges take has a part for each number that is told. Of turns the least counts,
    without what other load adds.
    """
    here = [record for record in threads if record["side"] == THIS]
    hybrid = [record for record in here if record["mode"] == "hybrid"]
    data = [record for record in here if record["mode"] == "data"]
    own = {
        id(record): 1e-3 * (record["own_ms"]["least"] if "own_ms" in record else
                            record["core_ms"]["min"])
        for record in here
    }  # fmt: skip
    times = replace(planner, planner_threads=1)

    def step(record: Record, times: HostTimes = times) -> Prediction:
        kind = REPLICATED if record["mode"] == "data" else RESIDENT
        return predicted(options, rows, times, kind, record | {"width": WIDTHS[0]})

    def moved(record: Record) -> list[float]:
        times = HostTimes(listed_s=1.0), HostTimes(moved_s=1.0)
        return [1.0, *[step(record, of).time.threads.mover for of in times]]

    def told(record: Record) -> list[float]:
        times = HostTimes(exchange_s=1.0), HostTimes(told_s=1.0)
        return [step(record, of).time.threads.talker for of in times]

    least = min(record["batch"] for record in data)
    known = {"batch": least, "optimizer": options.optimizers[0]}
    warm = [record for record in data if record.items() >= known.items()]
    sized = [record for record in here if record["batch"] > least]  # of cached modes

    def of_one(records: Sequence[Record], seconds: Callable[[Record], float]) -> list[float]:
        """What a rank alone takes for a step, and how much more one of several."""
        sums: dict[int, float] = defaultdict(float)
        for record in records:
            sums[record["ranks"]] += seconds(record)
        single = [of for ranks, of in sums.items() if ranks == 1]
        several = [of for ranks, of in sums.items() if ranks > 1]
        one = float(np.median(single or several))
        return [one, max(0.0, float(np.median(several or single)) - one)]

    training = [record for record in warm if record["thread"] == TRAINING]
    work = of_one(training, lambda r: own[id(r)]) + of_one(hybrid, lambda r: own[id(r)])
    python = [HOST.python_s, HOST.python_more_s]
    if any("held_ms" in record for record in warm):
        python = of_one(warm, lambda r: 1e-3 * r.get("held_ms", {"least": 0.0})["least"])
    moves = [record for record in sized if record["thread"] == "movement"]
    own_of_moves = fit([moved(r) for r in moves], [own[id(r)] for r in moves])
    moving = dict(zip(("moving_s", "listed_s", "moved_s"), own_of_moves, strict=True))
    moving["listed_s"] += chunked_s  # on a CPU nothing is cut into chunks
    names = "training_s", "summing_s", "hybrid_s", "hybrid_more_s", "python_s", "python_more_s"
    times = replace(times, **moving, **dict(zip(names, work + python, strict=True)))
    plans = [record for record in here if record["thread"] == "planning"]
    planned = {id(record): step(record).time.threads.planner for record in plans}
    alone = [r for r in plans if r["batch"] > least and r["ranks"] == 1] or plans
    (factor,) = fit([[planned[id(r)]] for r in alone], [own[id(r)] for r in alone])
    talks = [record for record in here if record["thread"] == "talking" and record["ranks"] > 1]
    exchanged = [HOST.exchange_s, HOST.told_s]
    if talks:
        exchanged = fit([told(r) for r in talks], [1e-3 * r["core_ms"]["min"] for r in talks])
    slower = {name: factor * getattr(times, name) for name in PLANNER}
    slower |= zip(("exchange_s", "told_s"), exchanged, strict=True)
    times = replace(times, **slower)
    for record in plans:
        record["predicted_ms"] = 1e3 * step(record, times).time.threads.planner
    return replace(times, planner_threads=options.planner_threads)


def predicted(
    options: HostOptions, rows: Sequence[int], times: HostTimes, kind: str, how: Record
) -> Prediction:
    """A step beside an H100, as `distcache.plan` predicts it with these `times` of the host; `how`:
    `batch`, `width` and `ranks`."""
    own = [f"table_rows={list(rows)}", f"cache_ratio={options.ratio}", f"width={how['width']}"]
    own += [f"batch={how['batch']}", f"world_size={how['ranks']}"]
    demand, cluster, settings = _shape(*[word.replace(" ", "") for word in (*_PLAN, *own)])
    return predict(kind, demand, replace(cluster, threads=times), settings)


@cache
def _shape(*words: str) -> tuple[Demand, Cluster, Settings]:
    """What the keys of `distcache.plan` ask for."""
    line = read_line("plan", Options, words)
    assert line is not None, "neither help nor the configuration was asked for"
    return parse_request(line).on(line.values.world_size, 1)


def steps_of(options: HostOptions, rows: Sequence[int], times: HostTimes) -> list[Record]:
    """A record for each predicted step; rows are staged, or read in place."""
    records = []
    for width, share, ranks in product(WIDTHS, SHARES, WORLDS):
        how = {"batch": round(share * options.batch), "width": width, "ranks": ranks}
        found = {
            who: predicted(options, rows, at, kind, how).time
            for who, kind, at in (
                ("data, zero_copy", REPLICATED, replace(times, row_s=0.0)),
                ("data, staged", REPLICATED, times),
                ("resident", RESIDENT, times),
                ("fused tables", TABLE_WISE, replace(times, hybrid_s=0.0, hybrid_more_s=0.0)),
                ("hybrid", TABLE_WISE, times),
            )
        }
        for who, time in found.items():
            gpu = time.dense + time.sparse + time.exposed
            records.append({
                "kind": "step", **how, "who": who, "step": time.total, "binds": time.binds,
                "gpu": gpu, "link": max(time.host, time.exposed + time.hidden),
                **time.threads._asdict(), "thread_to_gpu": max(time.threads) / gpu,
                "to_resident": time.total / found["resident"].total,
                "to_fused": time.total / found["fused tables"].total,
            })  # fmt: skip
    return records


_MS = shown()


def _ms(title: str, key: str) -> Column:
    return Column(title, lambda row: 1e3 * row[key], ".2f")


def _share(own: Record) -> str:
    return f"{own['ms']:.2f} ± {own['error']:.2f}"


SECTIONS = (
    Section(
        "Threads",
        "Milliseconds a step and rank, median [quartiles] over the turns. On a core: all that the "
        "thread does. Its own: without what torch, the package's kernels and the model take; of "
        "`hybrid` TorchRec's is its own, too: the "
        "share of looks at the thread, once in 0.7 ms that it has a core in another turn, that saw "
        "it at work of its own, and the standard error of that share; planning and talking are "
        "their threads' own. With the interpreter: of its own, as long as no other thread can run "
        "Python. What a GPU does is done by the thread's core here, which sweeps the "
        "caches: the fewer samples, the less longer its own calls take for that. "
        "Calls of Python functions a step and rank, with those of the dense part, which a GPU "
        "replays: all, those of the package, and of NumPy's functions (ufuncs are none). As "
        "predicted: of the planner's thread, one, from the constants below. As beside a GPU, one "
        "of ten steps has its stages timed, results are read two steps later, and a process keeps "
        "the memory that tensors let go of. "
        "Tables are narrow here, for memory's sake: what depends on the width is torch's.",
        "thread",
        (
            Column("mode", "mode"),
            Column("optimizer", "optimizer"),
            Column("ranks", "ranks"),
            Column("batch", "batch", ","),
            Column("checkout", "side"),
            Column("thread", "thread"),
            Column("on a core", "core_ms", _MS),
            Column("its own", "own_ms", _share),
            Column("with the interpreter", "held_ms", _share),
            Column("as predicted", "predicted_ms", ".2f"),
            Column("calls", "calls", ",.0f"),
            Column("of the package", "package_calls", ",.0f"),
            Column("NumPy", "numpy_calls", ",.0f"),
        ),
    ),
    Section(
        "What the model takes from this",
        "`distcache.cost.cluster.HostTimes`: seconds, but for `serial`, the share of a planner's "
        "work but `planning_s` that one thread does alone, and `planner_threads`, which is given. "
        "The planner's are "
        "fitted to twelve streams and caches without training beside them (`time_planner` of "
        "`distcache.cli.plan_run`), and times one factor that the planners above have beside "
        "it. `training_s`, `summing_s`, `hybrid_s` and `hybrid_more_s`, and `python_s` and "
        "`python_more_s`, which are of all threads together (all of the fewest samples), "
        "`moving_s`, `listed_s` and `moved_s` are from the table above, its least turns, and to "
        "`listed_s` comes what cutting a row's occurrences into chunks and packing these takes, as "
        "a device wants them; `exchange_s` and `told_s` are what an exchange takes of its thread's "
        "core, waiting for the other ranks left out. "
        "`row_s` is of a row gathered or scattered by one thread, `launch_s` an estimate.",
        "constant",
        (Column("constant", "key"), Column("value", "value", lambda v: f"{v:.3g}")),
    ),
    Section(
        "The predicted step",
        "Milliseconds of a step of DLRM and SGD beside an H100 (NVLink 4, host link of 50 GB/s), "
        "as `distcache.plan` predicts it, which has not run on one: kernels reach 0.8 of the "
        "device's memory bandwidth and 0.67 of its float32 rate, both estimates. A step is as long "
        "as what takes longest: the GPU with the collectives that it waits for, links, one of the "
        "host's threads, or all of them in Python, which runs in one at a time. `fused tables`: "
        "lookups and updates in one kernel, whole tables on ranks, without a planner; their Python "
        "and their sorts are left out. `hybrid`: these as TorchRec trains them, with its "
        "Python, but for what its pipeline adds beside a GPU. Goal: data / resident <= 1.05, and "
        "no thread slower than the GPU (<= 1); threads / GPU is of the slowest thread, or of what "
        "all do in Python.",
        "step",
        (
            Column("width", "width"),
            Column("batch", "batch", ","),
            Column("ranks", "ranks"),
            Column("who", "who"),
            _ms("GPU", "gpu"),
            _ms("links", "link"),
            _ms("launches", "launch"),
            _ms("planner", "planner"),
            _ms("talker", "talker"),
            _ms("mover", "mover"),
            _ms("Python", "interpreter"),
            _ms("step", "step"),
            Column("binds", "binds"),
            Column("threads / GPU", "thread_to_gpu", ".2f"),
            Column("/ resident", "to_resident", ".2f"),
            Column("/ fused", "to_fused", ".2f"),
        ),
    ),
)

BENCH = Bench("The host's threads", HostOptions, measure, SECTIONS, overrides=True)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
