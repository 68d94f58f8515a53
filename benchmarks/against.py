"""The training of two checkouts, interleaved in one run: step time, and CPU time by thread.

Each checkout trains in processes of its own through the public `distcache.fit` and stands still
while the other one has its turn. Both draw the same batches from the same seeds and start from the
same weights.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.report import (
    Column,
    Record,
    Section,
    ratios,
    show_range,
    show_spread,
    spread,
    take_turns,
)
from distcache.cli.run import commit, job_environment, stop_job
from distcache.compare import log_tail
from distcache.config.tree import Config
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.against")

THIS = "this"
OTHER = "other"

FIT_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data", {}),
    "serial": ("data", {"trainer.schedule": "serial"}),
    "home": ("data", {"cache.placement": "replicated", "cache.state": "home"}),
    "replicated": ("data", {"cache.placement": "replicated", "cache.state": "replicated"}),
    "sharded": ("data", {"cache.placement": "sharded", "cache.state": "replicated"}),
    "resident": ("resident", {}),
    "host": ("host", {}),
    "hybrid": ("hybrid", {}),
}
"""`parallel` and settings of `distcache.fit` by mode; `mixed` and `auto` would need statistics."""

RANK_FILE = Path(__file__).with_name("against_rank.py")
BATCHES_AHEAD = 16
"""Batches that training may read ahead beyond those of L and P."""
POLL_S = 1.0
GRACE_S = 10.0
"""Time that a rank gets to stop."""


class Job:
    """The ranks of one checkout, from the start of their training to its end."""

    def __init__(self, checkout: Path, ranks: int, spec: Record, stack: ExitStack) -> None:
        """Start the ranks with the specification of `against_rank`; `stack` ends them."""
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="against-")))
        settings = spec["settings"] | {"run.dir": str(self._folder / "run")}
        spec = spec | {"checkout": str(checkout), "settings": settings}
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        for rank in range(ranks):
            parent_end, child_end = Pipe()
            self._pipes.append(stack.enter_context(parent_end))
            environment = _rank_environment(rank, ranks, port)
            environment |= {"PYTHONPATH": path, "RANK_PIPE": str(child_end.fileno())}
            rank_log = stack.enter_context((self._folder / f"rank{rank}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-P", str(RANK_FILE), json.dumps(spec)],
                env=environment,
                pass_fds=[child_end.fileno()],
                stdout=rank_log,
                stderr=rank_log,
                start_new_session=True,  # the parent decides when it hears of Ctrl-C
            )
            stack.callback(stop_job, process, GRACE_S)
            self._processes.append(process)
            child_end.close()  # the end of a rank is then the end of its pipe

    def run(self, lead: int, steps: int) -> list[Record]:
        """Train `lead + steps` steps; return the reports of the ranks."""
        return self._request((lead, steps))

    def finish(self) -> float:
        """Train the rest of the stream; return the loss of the last step."""
        return self._request(None)[0]

    def _request(self, message: tuple[int, int] | None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        return [self._receive(rank) for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Any:
        """Return the next message of a rank; raise ConfigError with the log of a failed one."""
        pipe = self._pipes[rank]
        try:
            while not pipe.poll(POLL_S):
                if any(process.poll() for process in self._processes):
                    raise EOFError
            return pipe.recv()
        except (EOFError, ConnectionError):
            time.sleep(POLL_S)  # the exit code comes after the end of the pipe
            failed = [r for r, process in enumerate(self._processes) if process.poll()] or [rank]
            tails = "\n".join(log_tail(self._folder / f"rank{r}.log") for r in failed)
            raise ConfigError(f"rank {failed[0]} failed:\n{tails}") from None


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables of a rank as torchrun would set them on one node."""
    return job_environment(ranks) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _free_port() -> int:
    """Return a free TCP port below those that the system gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(29501, 32768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def measure_steps(options: Any, config: Config, overrides: Sequence[str]) -> list[Record]:
    """Compare both checkouts in each of `options.modes` that `distcache.fit` has.

    `options` are those of `benchmarks.step`, `config` is their configuration. Raises ConfigError
    for a folder that is no checkout, and with the log of a rank that failed.
    """
    paths = {THIS: Path(__file__).resolve().parents[1], OTHER: Path(options.against).resolve()}
    if not (paths[OTHER] / "distcache" / "__init__.py").is_file():
        raise ConfigError(f"against={options.against} has no package distcache: name a checkout")
    if "RANK" in os.environ:
        raise ConfigError("against= starts its ranks itself: give ranks=, without torchrun")
    modes = [mode for mode in options.modes if mode in FIT_ARGUMENTS]
    if not modes:
        supported = ", ".join(FIT_ARGUMENTS)
        raise ConfigError(f"modes={','.join(options.modes)}: against= takes {supported}")
    records: list[Record] = []
    for mode in modes:
        records += compare(mode, paths, options, spec_of(mode, options, config, overrides))
    return records


def spec_of(mode: str, options: Any, config: Config, overrides: Sequence[str]) -> Record:
    """Return the specification of the training run that both checkouts make."""
    parallel, mode_settings = FIT_ARGUMENTS[mode]
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
    window = int(config.cache.lookahead) + int(config.cache.prefetch) + BATCHES_AHEAD
    return {
        "table_rows": list(config.data.table_rows or ()),
        "zipf": config.data.zipf,
        "batch": options.batch,
        "batches": options.warmup + turns + window,
        "width": options.widths[0],
        "bottom": list(config.model.dense_arch),
        "top": list(config.model.over_arch),
        "embeddings": options.model == "embeddings",
        "parallel": parallel,
        "optimizer": options.optimizer,
        "settings": settings | mode_settings,
        "seed": config.trainer.seed,
    }


def compare(mode: str, paths: Mapping[str, Path], options: Any, spec: Record) -> list[Record]:
    """Let both checkouts take turns in a mode; return the records."""

    def run_turn(job: Job, _: int) -> Record:
        reports = job.run(options.lead, options.steps)
        return {"step_ms": reports[0]["step_ms"], "cpu_ms": mean_cpu_ms(reports)}

    with ExitStack() as stack:
        jobs = {side: Job(path, options.ranks, spec, stack) for side, path in paths.items()}
        for side, job in jobs.items():
            log.info("%s, %s: %d steps of warm-up", mode, side, options.warmup)
            job.run(0, options.warmup)
        turns = take_turns(
            {s: partial(run_turn, job) for s, job in jobs.items()}, options.repetitions
        )
        losses = {side: job.finish() for side, job in jobs.items()}
    common = {"mode": mode, "ranks": options.ranks, "batch": options.batch}
    medians = {side: [float(np.median(t["step_ms"])) for t in turns[side]] for side in paths}
    summary = {
        "step_ms": {
            side: spread([ms for t in turns[side] for ms in t["step_ms"]]) for side in paths
        },
        "ratio": spread(ratios(medians[THIS], medians[OTHER])),
        "same_loss": losses[THIS] == losses[OTHER],
        "commits": {side: commit(path) for side, path in paths.items()},
    }
    records = [{"kind": "against", **common, **summary, "turn_medians_ms": medians}]
    for thread in turns[THIS][0]["cpu_ms"]:
        cpu = {side: [t["cpu_ms"].get(thread, 0.0) for t in turns[side]] for side in paths}
        record: Record = {"kind": "thread", **common, "thread": thread}
        record["cpu_ms"] = {side: spread(values) for side, values in cpu.items()}
        record["ratio"] = spread(ratios(cpu[THIS], cpu[OTHER]) if all(cpu[OTHER]) else [])
        records.append(record)
    return records


def mean_cpu_ms(reports: Sequence[Record]) -> dict[str, float]:
    """Return each thread's CPU time, the mean over ranks; `all`: of all Python threads."""
    names = dict.fromkeys(name for report in reports for name in report["cpu_ms"])
    means = {n: sum(r["cpu_ms"].get(n, 0.0) for r in reports) / len(reports) for n in names}
    return means | {"all": sum(ms for name, ms in means.items() if name != "process")}


def show_commit(state: Record) -> str:
    """Return a commit's first digits, and whether files differ from it."""
    return state["commit"][:12] + (" with changes" if state["dirty"] else "")


def _of_side(key: str, side: str) -> Callable[[Record], Any]:
    return lambda record: record[key][side]


SECTIONS = (
    Section(
        "Steps of both checkouts",
        "Milliseconds from the beginning of one step's forward to that of the next: median "
        "[quartiles] over all timed steps. The ratio is of the median steps of two turns over the "
        "same batches. Equal last losses mean bit-equal training.",
        "against",
        (
            Column("mode", "mode"),
            Column("ranks", "ranks"),
            Column("step ms, this", _of_side("step_ms", THIS), show_spread()),
            Column("step ms, other", _of_side("step_ms", OTHER), show_spread()),
            Column("this / other", "ratio", show_spread(3)),
            Column("range", "ratio", show_range(3)),
            Column("same last loss", "same_loss", str),
            Column("other commit", _of_side("commits", OTHER), show_commit),
        ),
    ),
    Section(
        "Threads",
        "Milliseconds on a core per step and rank: median [quartiles] over the turns, ratios "
        "within a turn. `all`: Python's threads together; `process`: with those of libraries. "
        "`planning` includes the exchange of plans, and reading and checking batches.",
        "thread",
        (
            Column("mode", "mode"),
            Column("ranks", "ranks"),
            Column("thread", "thread"),
            Column("CPU ms, this", _of_side("cpu_ms", THIS), show_spread()),
            Column("CPU ms, other", _of_side("cpu_ms", OTHER), show_spread()),
            Column("this / other", "ratio", show_spread(3)),
        ),
    ),
)
