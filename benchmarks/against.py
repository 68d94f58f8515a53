"""The training of two checkouts, interleaved in one run: step time, CPU time and calls by thread.

Each checkout trains in processes of its own through the public door, `distcache.fit`, and stands
still while the other has its turn; both draw the same batches from the same seeds, and start from
the same weights.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.looks import Looks, look_until
from benchmarks.ranks import End, failed, started
from benchmarks.report import Column, Record, Section
from benchmarks.turns import ratios, shown, shown_range, spread, take_turns
from distcache.cli.run import commit
from distcache.config.tree import Config
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.against")

THIS, OTHER = SIDES = ("this", "other")

DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data", {}),
    "serial": ("data", {"trainer.schedule": "serial"}),
    "home": ("data", {"cache.placement": "replicated", "cache.state": "home"}),
    "replicated": ("data", {"cache.placement": "replicated", "cache.state": "replicated"}),
    "sharded": ("data", {"cache.placement": "sharded", "cache.state": "replicated"}),
    "resident": ("resident", {}),
    "host": ("host", {}),
    "hybrid": ("hybrid", {}),
}
"""What `distcache.fit` is given for each mode: `parallel` and settings. Not `mixed` and `auto`, for
which it would need statistics of what is drawn here."""

_RANK = Path(__file__).with_name("against_rank.py")
_AHEAD = 16
"""Batches that training may read ahead beyond those of L and P."""

SEEN = ("training", "planning", "talking", "movement")
"""Threads that are looked at, by `against_rank.role_of`."""

_POLL_S = 1.0

_POOLED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Let a process keep the memory of tensors that it lets go of, as it does beside a GPU."""


class Job:
    """One checkout's ranks, from the start of their training to its end."""

    def __init__(self, checkout: Path, ranks: int, spec: Record, stack: ExitStack) -> None:
        """`spec`: what they train, as `against_rank` has it; `stack`: ends them at its end."""
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="against-")))
        settings = spec["settings"] | {"run.dir": str(self._folder / "run")}
        spec, self._checkout = spec | {"checkout": str(checkout), "settings": settings}, checkout
        pairs = [Pipe() for _ in range(ranks)]
        self._pipes: list[Connection] = [stack.enter_context(mine) for mine, _ in pairs]
        path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._children = stack.enter_context(
            started(
                ["-P", str(_RANK), json.dumps(spec)],
                [End()] * ranks,
                self._folder,
                one_node=True,
                more={"PYTHONPATH": path} | (_POOLED if spec["late"] else {}),
                pipes=[theirs.fileno() for _, theirs in pairs],
            )
        )
        for _, theirs in pairs:
            theirs.close()  # so that the end of a rank is the end of its pipe

    def run(self, lead: int, steps: int, how: str = "run") -> list[Record]:
        """Train `lead + steps` steps; the meters of the last `steps`, by rank. `how`: `alone`:
        from there on no calls are counted any more; `seen`: nor there, and every millisecond or so
        it is seen what the threads are at."""
        found = self._tell(how, lead, steps)
        self._threads = [rank["threads"] for rank in found]
        for rank, seen in zip(found, self._seen, strict=False):
            rank["seen"] = seen
        return found

    def finish(self) -> float:
        """Train what is left, and end; the loss of the last step."""
        return self._tell("stop")[0]

    def _tell(self, *words: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(words)
        self._seen = self._look() if words[0] == "seen" else []
        return [self._hear(rank) for rank in range(len(self._pipes))]

    def _look(self) -> list[dict[str, tuple[int, int, int]]]:
        """Look at the threads of all ranks until these answer, or end; by rank, how often each was
        seen at work of its own, with the interpreter then, and at any."""
        package = str(self._checkout / "distcache") + os.sep
        looks = [
            {role: Looks(child.pid, threads[role], package) for role in SEEN if role in threads}
            for child, threads in zip(self._children, self._threads, strict=True)
        ]
        every = [look for of_rank in looks for look in of_rank.values()]
        look_until(lambda: all(pipe.poll() for pipe in self._pipes), every)
        return [
            {role: (each.own, each.held, each.all) for role, each in of_rank.items()}
            for of_rank in looks
        ]

    def _hear(self, rank: int) -> Any:
        """The next answer of a rank; ConfigError with its log where it has ended instead."""
        pipe = self._pipes[rank]
        try:
            while not pipe.poll(_POLL_S):
                if any(child.poll() for child in self._children):
                    raise EOFError
            return pipe.recv()
        except (EOFError, ConnectionError):
            time.sleep(_POLL_S)  # the exit code comes after the end of the pipe
            bad = [r for r, child in enumerate(self._children) if child.poll()]
            raise failed(self._folder, bad or [rank]) from None


def measure(options: Any, config: Config, overrides: Sequence[str]) -> list[Record]:
    """Turns of this checkout and of `options.against`, for each of `options.modes` that
    `distcache.fit` has; `options` are those of the step's bench, `config` what they compose.

    Raises ConfigError for what is no checkout, and with the log of a rank that failed.
    """
    paths = checkouts(options.against)
    modes = [mode for mode in options.modes if mode in DOORS]
    left = ",".join(mode for mode in options.modes if mode not in DOORS)
    if not modes:
        raise ConfigError(f"modes={left}: against= takes {', '.join(DOORS)}")
    if left:
        log.warning("modes=%s left out: against= takes %s", left, ", ".join(DOORS))
    records: list[Record] = []
    for mode in modes:
        records += compare(mode, paths, options, spec_of(mode, options, config, overrides))
    return records


def checkouts(against: str) -> dict[str, Path]:
    """This checkout, and another one where it is named; ConfigError for what is none."""
    paths = {THIS: Path(__file__).resolve().parents[1]}
    if against:
        paths[OTHER] = Path(against).resolve()
        if not (paths[OTHER] / "distcache" / "__init__.py").is_file():
            raise ConfigError(f"against={against} has no package distcache: name a checkout")
    if "RANK" in os.environ:
        raise ConfigError("ranks are started here: give ranks=, without torchrun")
    return paths


def spec_of(mode: str, options: Any, config: Config, overrides: Sequence[str]) -> Record:
    """What both checkouts train in a mode, by the keys of the step's bench."""
    parallel, of_mode = DOORS[mode]
    settings: dict[str, Any] = {
        "cache.lookahead": config.cache.lookahead,
        "optim.dense_lr": config.optim.dense_lr,
        "optim.embedding_lr": config.optim.embedding_lr,
        "trainer.device": config.trainer.device,
        "trainer.threads": options.threads or 1,
        "trainer.log_every": 1_000_000,
        "run.save": False,
        "run.digest": "false",
    }
    if parallel == "data":
        settings["cache.ratio"] = config.cache.ratio
        settings["cache.prefetch"] = config.cache.prefetch
    for key, _, value in (word.partition("=") for word in overrides):
        if key.startswith(("cache.", "store.", "trainer.", "optim.")):
            settings[key] = yaml.safe_load(value)
    turns = options.repetitions * (options.lead + options.steps)
    ahead = int(config.cache.lookahead) + int(config.cache.prefetch) + _AHEAD
    return {
        "table_rows": list(config.data.table_rows or ()),
        "zipf": config.data.zipf,
        "batch": options.batch,
        "batches": options.warmup + turns + ahead,
        "width": options.width,
        "bottom": list(config.model.dense_arch),
        "top": list(config.model.over_arch),
        "embeddings": options.model == "embeddings",
        "parallel": parallel,
        "optimizer": options.optimizer,
        "settings": settings | of_mode,
        "seed": config.trainer.seed,
        "count": False,
        "plans": False,
        "late": False,
    }


def compare(mode: str, paths: Mapping[str, Path], options: Any, spec: Record) -> list[Record]:
    """Turns of both sides, then a count of each one's calls; the records."""
    about, blocks = {"mode": mode, "world_size": options.ranks}, []

    def turn(side: str, repetition: int) -> Record:
        ranks = jobs[side].run(options.lead, options.steps)
        blocks.append({"kind": "block", **about, "side": side, "repetition": repetition})
        blocks[-1] |= {"step_ms": ranks[0]["step_ms"], "cpu_ms": of_ranks(ranks, "cpu_ms")}
        return blocks[-1]

    with ExitStack() as stack:
        jobs = {side: Job(path, options.ranks, spec, stack) for side, path in paths.items()}
        for side, job in jobs.items():
            log.info("%s, %s: %d steps of warm-up", mode, side, options.warmup)
            job.run(0, options.warmup)
        found = take_turns({side: partial(turn, side) for side in jobs}, options.repetitions)
        losses = {side: job.finish() for side, job in jobs.items()}
    every = {side: [ms for block in found[side] for ms in block["step_ms"]] for side in SIDES}
    medians = {side: [float(np.median(b["step_ms"])) for b in found[side]] for side in SIDES}
    step = {"step_ms": {side: spread(values) for side, values in every.items()}}
    step |= {"ratio": _ratio(medians), "losses": losses, "same": losses[THIS] == losses[OTHER]}
    step["commits"] = {side: commit(path) for side, path in paths.items()}
    calls = {side: count_calls(path, options, spec) for side, path in paths.items()}
    records = [*blocks, {"kind": "against", **about, **step}]
    for thread in dict.fromkeys(name for block in blocks for name in block["cpu_ms"]):
        cpu = {side: [b["cpu_ms"].get(thread, 0.0) for b in found[side]] for side in SIDES}
        record: Record = {"kind": "thread", **about, "thread": thread}
        record["cpu_ms"] = {side: spread(values) for side, values in cpu.items()}
        record["ratio"] = _ratio(cpu) if all(cpu[OTHER]) else None
        for key in ("calls", "package_calls"):
            record[key] = {side: counted[key].get(thread) for side, counted in calls.items()}
        records.append(record)
    return records


def count_calls(checkout: Path, options: Any, spec: Record) -> dict[str, dict[str, float]]:
    """Python calls a step by thread, and those of functions of the package, mean over ranks."""
    steps = options.lead + options.steps
    fewer = spec["batches"] - (options.repetitions - 1) * steps
    with ExitStack() as stack:
        job = Job(checkout, options.ranks, spec | {"count": True, "batches": fewer}, stack)
        job.run(0, options.warmup)  # the look-ahead fills: then every step plans and moves one
        ranks = job.run(0, steps)
        job.finish()
    return {key: of_ranks(ranks, key) for key in ("calls", "package_calls")}


def of_ranks(ranks: Sequence[Record], key: str) -> dict[str, float]:
    """The mean over ranks, by thread; `all`: of all Python's threads together."""
    names = dict.fromkeys(name for rank in ranks for name in rank[key])
    means = {name: sum(r[key].get(name, 0) for r in ranks) / len(ranks) for name in names}
    return means | {"all": sum(value for name, value in means.items() if name != "process")}


def _ratio(values: Mapping[str, Sequence[float]]) -> Record:
    return spread(ratios(values[THIS], values[OTHER]))


def shown_commit(found: Record) -> str:
    """A commit's first digits, and whether files differ from it."""
    return found["commit"][:12] + (" with changes" if found["dirty"] else "")


def _sides(title: str, key: str, show: Any) -> list[Column]:
    """A column for each side."""
    return [
        Column(f"{title}, {side}", lambda row, side=side: row[key][side], show) for side in SIDES
    ]


def _calls(title: str, key: str) -> list[Column]:
    """Columns of calls a step, and their ratio."""

    def ratio(row: Record) -> float | None:
        counts = row[key]
        return counts[THIS] / counts[OTHER] if counts[THIS] and counts[OTHER] else None

    return [*_sides(title, key, ",.0f"), Column("ratio", ratio, ".2f")]


SECTIONS = (
    Section(
        "Steps of both checkouts",
        "Milliseconds from the beginning of one step's forward to that of the next: median "
        "[quartiles] over all timed steps. The ratio is of the median steps of two turns over the "
        "same batches. The last loss is the same number wherever the training is the same. The "
        "other checkout is at the commit in the last column.",
        "against",
        (
            Column("mode", "mode"),
            Column("ranks", "world_size"),
            *_sides("step ms", "step_ms", shown()),
            Column(f"{THIS} / {OTHER}", "ratio", shown(3)),
            Column("range", "ratio", shown_range(3)),
            Column("same last loss", "same", str),
            Column("other commit", lambda row: row["commits"][OTHER], shown_commit),
        ),
    ),
    Section(
        "Threads",
        "Milliseconds a step and rank on a core: median [quartiles] over the turns, ratios within "
        "a turn. Calls of Python functions a step and rank, from an untimed run: all, and those of "
        "functions of the package. `all`: Python's threads together; `process`: with those of "
        "libraries.",
        "thread",
        (
            Column("mode", "mode"),
            Column("ranks", "world_size"),
            Column("thread", "thread"),
            *_sides("CPU ms", "cpu_ms", shown()),
            Column(f"{THIS} / {OTHER}", "ratio", shown(3)),
            *_calls("calls", "calls"),
            *_calls("of the package", "package_calls"),
        ),
    ),
)
