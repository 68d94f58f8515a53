"""Compare: `python -m distcache.compare [key=value ...] modes=data,hybrid world_size=2`.

1. The configuration of every mode is composed and checked.
2. Each mode trains in fresh processes, one after the other; repeats go round all modes in turn.
3. What the runs left is read and laid side by side: table.md, table.csv, results.jsonl, plots.png.
"""

from __future__ import annotations

import logging
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import combinations
from pathlib import Path

from distcache.cli.compare_report import ModeRun, markdown, read_run, write_files
from distcache.cli.compose import (
    Line,
    checked_config,
    compose_overrides,
    override,
    run_command,
)
from distcache.cli.run import run_job, train_command
from distcache.comm.rendezvous import Place
from distcache.config import option, rules_of
from distcache.config.checks import at_least, one_of
from distcache.config.tree import Config, RunConfig
from distcache.errors import ConfigError

log = logging.getLogger("distcache.compare")

WINDOWS = 50
"""About how many lines of metrics a run shall leave, so that its spread can be told."""

_CHOICES = {key: rule.get("choice", ()) for key, rule in rules_of(Config).items()}

VARIANTS = {
    **{mode: (f"parallel={mode}",) for mode in _CHOICES["parallel.mode"]},
    **{name: ("parallel=data", f"cache.placement={name}") for name in _CHOICES["cache.placement"]},
    **{
        name: ("parallel=hybrid", f"parallel.sharding={name}")
        for name in _CHOICES["parallel.sharding"]
        if name != "auto"  # which is the placement
    },
}
"""The overrides of each name of `modes=`: a mode, or a mode with one of its layouts."""

_STEP = re.compile(r"\bstep [\d,]+(/[\d,]+)?  ")
"""What a line of progress begins with, after the time."""

ONLY_OF = {
    "cache.replicated_rows": ("mixed",),
    "cache.replicated_share": ("mixed",),
    "cache.cluster": ("mixed", "auto"),
}
"""Keys that only these layouts take; others beside them do without."""


@dataclass
class CompareConfig(Config):
    """The keys of a run, and those of a comparison."""

    modes: list[str] = option(
        ["data", "hybrid"],
        "modes to run (data, hybrid, resident, host), the first is the one others are compared "
        "with; or layouts of one of them: replicated, sharded, mixed, auto (data with that "
        "cache.placement), table_wise, row_wise, column_wise (hybrid with that parallel.sharding)",
    )
    world_size: int = option(2, "ranks of every run, all on this machine")
    repeats: int = option(
        1,
        "runs of each mode, taken in turns; from 2 on, noise is the spread between runs instead of "
        "the spread within one; from 4 on, a difference is seldom one by chance",
    )
    output: str = option("", "folder of the runs, logs, table and plots; empty: compare/<time>")


@dataclass(frozen=True)
class Request:
    """What to compare: modes (of `VARIANTS`) in order, ranks and repeats of each, the folder, and
    overrides."""

    modes: tuple[str, ...]
    world_size: int
    repeats: int
    output: Path
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A mode's overrides: frequent metrics and no checkpoint, unless the user says otherwise.

    `refusal`: why its configuration was refused, so that it does not run.
    """

    mode: str
    arguments: tuple[str, ...]
    refusal: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a comparison by the command line; 0, or 1 if a mode failed."""
    said = "interrupted; the run that was going on has been stopped"
    return run_command("compare", CompareConfig, run, arguments, said)


def run(line: Line[CompareConfig], command: Sequence[str]) -> int:
    """Compare what the command line asks for."""
    return compare(parse(line), shlex.join(command))


def parse(line: Line[CompareConfig]) -> Request:
    """The request of a command line; ConfigError for values that make no sense."""
    own = line.values
    for key in sorted(line.given.intersection(("parallel", "parallel.mode", "run.dir"))):
        raise ConfigError(f"{key}: a comparison sets {key} itself: use modes= and output=")
    for mode in own.modes:
        one_of("modes", mode, list(VARIANTS))
        _check_free(mode, line.overrides)
    if len(set(own.modes)) < len(own.modes):
        raise ConfigError(f"modes={','.join(own.modes)} names a mode twice: use repeats=2")
    at_least("world_size", own.world_size, 1)
    at_least("repeats", own.repeats, 1)
    if not own.modes:
        raise ConfigError("modes is empty: name at least one")
    folder = Path(own.output or f"compare/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return Request(tuple(own.modes), own.world_size, own.repeats, folder, line.overrides)


def _check_free(mode: str, overrides: Sequence[str]) -> None:
    """ConfigError for an override of a key that a layout sets."""
    for own in VARIANTS[mode]:
        key = own.partition("=")[0]
        for given in overrides:
            if given.partition("=")[0].lstrip("+") == key:
                raise ConfigError(
                    f"{given}: modes={mode} sets {key} itself: leave it out, or name the mode "
                    f"({VARIANTS[mode][0].partition('=')[2]}) in modes= instead of its layout"
                )


def compare(request: Request, command: str) -> int:
    """Run, read, report; 0, or 1 if a mode failed. Raises ConfigError if no mode can run."""
    jobs = prepare(request)
    request.output.mkdir(parents=True, exist_ok=True)
    runs = [
        run_mode(request, job, repeat)
        for repeat in range(request.repeats)
        for job in jobs
        if repeat == 0 or job.refusal is None
    ]
    write_files(request.output, runs, command)
    sys.stdout.write(f"\n{markdown(runs)}\n")
    sys.stdout.flush()
    log.info("table, runs and plots are in %s", request.output)
    for run in runs:
        if run.error is not None:
            log.error("%s failed (exit code %s): %s", run.name, run.exit_code, run.error)
    return 1 if any(run.error is not None for run in runs) else 0


def prepare(request: Request) -> list[Job]:
    """Compose and check every mode's configuration; ConfigError if all are refused."""
    place = Place(world_size=request.world_size, local_size=request.world_size)
    given = {word.partition("=")[0] for word in request.overrides}
    jobs, errors, seen = [], [], dict[str, Config]()
    for mode in request.modes:
        arguments = [*VARIANTS[mode], *_taken(request, mode)]
        if "run.save" not in given:
            arguments.append("run.save=false")
        try:
            config = checked_config(compose_overrides(arguments), place)
            steps = config.trainer.steps
            seen[mode] = replace(config, run=RunConfig())
            if steps is not None and "trainer.log_every" not in given:
                arguments.append(f"trainer.log_every={max(1, steps // WINDOWS)}")
            jobs.append(Job(mode, tuple(arguments)))
        except ConfigError as error:
            jobs.append(Job(mode, tuple(arguments), refusal=str(error)))
            errors.append(error)
    if len(errors) == len(jobs):
        raise errors[0]
    _check_different(seen)
    return jobs


def _check_different(configs: dict[str, Config]) -> None:
    """ConfigError for two modes whose configuration is one and the same."""
    for one, other in combinations(configs, 2):
        if configs[one] == configs[other]:
            raise ConfigError(
                f"modes={one},{other} are one and the same configuration: leave one of them out; "
                "repeats=2 runs it twice"
            )


def _taken(request: Request, mode: str) -> list[str]:
    """The overrides for a mode: all but those of keys that only other layouts asked for take."""

    def is_taken(text: str) -> bool:
        takers = set(ONLY_OF.get(text.partition("=")[0].lstrip("+"), request.modes))
        return mode in takers or not takers.intersection(request.modes)

    return [text for text in request.overrides if is_taken(text)]


def run_mode(request: Request, job: Job, repeat: int) -> ModeRun:
    """Train one mode in fresh processes and read what it left; a failure is part of the result."""
    mode = job.mode
    name = mode if request.repeats == 1 else f"{mode}-{repeat + 1}"
    folder = request.output / name
    if job.refusal is not None:
        return ModeRun(mode, name, folder, exit_code=None, seconds=0.0, error=job.refusal)
    log_file = request.output / f"{name}.log"
    arguments = [*job.arguments, override("run.dir", folder)]
    started = time.monotonic()
    log.info("%s: %d rank(s), log in %s", name, request.world_size, log_file)

    def tell() -> None:
        log.info("%s: %.0f s, %s", name, time.monotonic() - started, progress_of(log_file))

    code = run_job(
        train_command(request.world_size, arguments), request.world_size, log_file, on_wait=tell
    )
    run = read_run(mode, name, folder, code, time.monotonic() - started, log_file)
    rate = run.number("samples_per_second")
    speed = "" if rate is None else f", {rate:,.0f} samples/s"
    log.info("%s: %s in %.1f s%s", name, "failed" if run.error else "done", run.seconds, speed)
    return run


def progress_of(path: Path) -> str:
    """The last line of a log that tells of a step, or else the last with anything in it."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if _STEP.search(line)]
    return (steps or lines or ["no output yet"])[-1].strip()


if __name__ == "__main__":
    sys.exit(main())
