"""Compare: `python -m distcache.compare [key=value ...] modes=data,hybrid world_size=2`.

1. The configuration of every mode is composed and checked.
2. Each mode trains in fresh processes, one after the other; repeats go round all modes in turn.
3. What the runs left is read and laid side by side: table.md, results.jsonl, plots.png.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from distcache.cli.compose import Line, checked_config, compose_overrides, override, run_command
from distcache.cli.run import (
    Table,
    draw,
    machine_text,
    open_folder,
    output_folder,
    run_job,
    tidy,
    train_command,
)
from distcache.config import option, rules_of
from distcache.config.checks import at_least, one_of, refuse_if
from distcache.config.tree import Config
from distcache.errors import ConfigError

log = logging.getLogger("distcache.compare")

WINDOWS = 50
"""About how many lines of metrics a run shall leave, so that its losses can be drawn."""

_RULES = rules_of(Config)
_CHOICES = {key: rule.get("choice", ()) for key, rule in _RULES.items()}

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

ONLY_OF = {key: rule["only"] for key, rule in _RULES.items() if rule.get("by") == "placement"}
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
        "runs of each mode, taken in turns; from 2 on, noise is the spread between them; from 4 "
        "on, a difference is seldom one by chance",
    )
    output: str = option("", "folder of the runs, logs, table and plots; empty: compare/<time>")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a comparison by the command line; 0, or 1 if a mode failed."""
    said = "interrupted; the run that was going on has been stopped"
    return run_command("compare", CompareConfig, run, arguments, said)


def run(line: Line[CompareConfig], command: Sequence[str]) -> int:
    """Run, read, report; 0, or 1 if a mode failed. Raises ConfigError if no mode can run."""
    check_line(line)
    jobs, out = prepare(line), output_folder(line.values.output, "compare/")
    with open_folder(out, "output"):
        runs = [
            run_mode(line.values, out, mode, job, repeat)
            for repeat in range(line.values.repeats)
            for mode, job in jobs.items()
            if repeat == 0 or not isinstance(job, ConfigError)
        ]
        write_files(out, runs, shlex.join(command))
    sys.stdout.write(f"\n{markdown(runs)}\n")
    sys.stdout.flush()
    log.info("table, runs and plots are in %s", out)
    for run in runs:
        if run.error is not None:
            log.error("%s failed (exit code %s): %s", run.name, run.exit_code, run.error)
    return 1 if any(run.error is not None for run in runs) else 0


def check_line(line: Line[CompareConfig]) -> None:
    """Raise ConfigError for values that make no sense."""
    own = line.values
    for key in ("parallel", "parallel.mode", "run.dir"):
        itself = f"{key}: a comparison sets {key} itself: use modes= and output="
        refuse_if(key in line.given, itself)
    for mode in own.modes:
        one_of("modes", mode, list(VARIANTS))
    twice = f"modes={','.join(own.modes)} names a mode twice: use repeats=2"
    refuse_if(len(set(own.modes)) < len(own.modes), twice)
    at_least("world_size", own.world_size, 1)
    at_least("repeats", own.repeats, 1)
    refuse_if(not own.modes, "modes is empty: name at least one")


def prepare(line: Line[CompareConfig]) -> dict[str, list[str] | ConfigError]:
    """The overrides of every mode, with frequent metrics and no checkpoint unless the user says
    otherwise, or why its configuration is refused; ConfigError if all are."""
    own, jobs = line.values, dict[str, list[str] | ConfigError]()
    for mode in own.modes:
        arguments = []
        for text in line.overrides:  # but those of keys that only other layouts asked for take
            takers = set(ONLY_OF.get(text.partition("=")[0].lstrip("+"), own.modes))
            if mode in takers or not takers.intersection(own.modes):
                arguments.append(text)
        arguments += VARIANTS[mode]  # which says what the mode is, whatever is given for others
        if "run.save" not in line.given:
            arguments.append("run.save=false")
        try:
            steps = checked_config(compose_overrides(arguments)).trainer.steps
            if steps is not None and "trainer.log_every" not in line.given:
                arguments.append(f"trainer.log_every={max(1, steps // WINDOWS)}")
            jobs[mode] = arguments
        except ConfigError as error:
            jobs[mode] = error
    errors = [job for job in jobs.values() if isinstance(job, ConfigError)]
    if len(errors) == len(jobs):
        raise errors[0]
    return jobs


def run_mode(
    own: CompareConfig, out: Path, mode: str, job: list[str] | ConfigError, repeat: int
) -> ModeRun:
    """Train one mode in fresh processes and read what it left; a failure is part of the result."""
    ranks = own.world_size
    name = mode if own.repeats == 1 else f"{mode}-{repeat + 1}"
    folder, log_file = out / name, out / f"{name}.log"
    if isinstance(job, ConfigError):
        return ModeRun(mode, name, folder, exit_code=None, seconds=0.0, error=str(job))
    arguments = [*job, override("run.dir", folder)]
    started = time.monotonic()
    log.info("%s: %d rank(s), log in %s", name, ranks, log_file)

    def tell() -> None:
        said = log_file.read_text(errors="replace").strip() or "no output yet"
        log.info("%s: %.0f s, %s", name, time.monotonic() - started, said.splitlines()[-1])

    code = run_job(train_command(ranks, arguments), ranks, log_file, on_wait=tell)
    run = read_run(mode, name, folder, code, time.monotonic() - started, log_file)
    rate = run.number("samples_per_second")
    speed = "" if rate is None else f", {rate:,.0f} samples/s"
    log.info("%s: %s in %.1f s%s", name, "failed" if run.error else "done", run.seconds, speed)
    return run


# -----------------------------------------------------------------------------
# What a finished run left behind, and how much its step time scatters.

TAIL_LINES = 25


@dataclass(frozen=True)
class ModeRun:
    """One run of one mode: `summary.json` and `metrics.jsonl` as read, or the reason why not."""

    mode: str
    name: str
    folder: Path
    exit_code: int | None
    seconds: float
    error: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def number(self, key: str, factor: float = 1) -> float | None:
        """A number of the summary by dotted key, times `factor`; None where there is none."""
        value: Any = self.summary
        for part in key.split("."):
            value = (value or {}).get(part)
        return None if value is None else value * factor

    def per_step(self, key: str, factor: float = 1) -> float | None:
        """A number of the summary divided by the steps that it covers."""
        value, steps = self.number(key, factor), self.number("steps")
        return None if value is None or not steps else value / steps

    def losses(self) -> dict[int, float]:
        """Loss by step, of the logged steps."""
        return {line["step"]: line["loss"] for line in self.metrics if line.get("loss") is not None}


@dataclass(frozen=True)
class Spread:
    """Median of a mode's step time and its range, ms, over the medians of so many `runs`."""

    median: float
    low: float
    high: float
    runs: int

    def __str__(self) -> str:
        return f" {self.median:,.2f} ms [{self.low:,.2f} to {self.high:,.2f}]"


def read_run(
    mode: str, name: str, folder: Path, exit_code: int, seconds: float, log_file: Path
) -> ModeRun:
    """Read a run folder. `error` is the log's tail where the run failed or left no summary."""
    path = folder / "summary.json"
    if exit_code != 0 or not path.is_file():
        tail = log_tail(log_file) if exit_code else f"no {path}\n{log_tail(log_file)}"
        return ModeRun(mode, name, folder, exit_code, seconds, error=tail)
    if path.stat().st_mtime < time.time() - seconds:
        old = f"no step was trained, and {path} is of an earlier run: give another output="
        return ModeRun(mode, name, folder, exit_code, seconds, error=old)
    lines = folder / "metrics.jsonl"
    metrics = [json.loads(line) for line in lines.read_text().splitlines() if line.strip()]
    summary = json.loads(path.read_text())
    return ModeRun(mode, name, folder, exit_code, seconds, summary=summary, metrics=metrics)


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; from its first error on, if the end is torchrun's own report."""
    text = path.read_text(errors="replace").splitlines() if path.is_file() else []
    errors = [number for number, line in enumerate(text) if "error: " in line]
    start = errors[0] if errors else max(0, len(text) - lines)
    shown = text[start : start + lines]
    if errors:  # what follows is torchrun's own report
        shown = list(takewhile(lambda line: "torch/distributed/elastic" not in line, shown))
    return "\n".join([f"the end of {path}:", *shown])


def spread(runs: Sequence[ModeRun]) -> Spread | None:
    """How the step time of one mode's runs scatters; None where fewer than two were measured."""
    known = [value for run in runs if (value := run.number("step_ms.median")) is not None]
    if len(known) < 2:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def verdict(one: Spread | None, other: Spread | None) -> tuple[str, str]:
    """Whether the step times of two modes differ by more than they scatter: a word for the table,
    and what to say below it.

    Ranges that overlap may be noise. Of ranges of several runs that lie apart it is said how often
    those of equal speed would: of all ways to divide the runs into two sets of these sizes, two.
    """
    if one is None or other is None:
        return " (one run)", "how much runs differ is not known from one: use repeats=4"
    over = f" (ranges over {one.runs} runs)"
    if one.low <= other.high and other.low <= one.high:
        return " (noise)", f"noise: the ranges overlap{over}"
    odds = math.comb(one.runs + other.runs, one.runs) // 2
    word = f" (chance 1 in {odds})" if odds < RARE else ""
    return word, f"apart, as modes of one speed would be 1 time in {odds}{over}"


def loss_differences(one: ModeRun, other: ModeRun) -> dict[int, float]:
    """Relative differences of the losses by step, ascending, of the steps that both runs logged."""
    ours = one.losses()
    theirs = other.losses()
    common = sorted(ours.keys() & theirs.keys())
    scale = {step: max(abs(ours[step]), abs(theirs[step])) for step in common}
    return {
        step: abs(ours[step] - theirs[step]) / scale[step] if scale[step] else 0.0
        for step in common
    }


def largest_loss_difference(one: ModeRun, other: ModeRun) -> float | None:
    """Largest relative difference of the losses at the steps that both runs logged."""
    return max(loss_differences(one, other).values(), default=None)


# -----------------------------------------------------------------------------
# The comparison as one picture of six panels: losses and their differences, evaluations,
# throughput, device memory, bytes.

RATES = {"samples_per_second": "whole run"}
MEMORY = {"embedding_device_bytes": "embeddings", "peak_device_bytes": "peak"}
LINKS = {
    "host_to_device_bytes": "host to device,\nall ranks",
    "device_to_host_bytes": "device to host,\nall ranks",
    "collective_bytes": "rows and their\ngradients,\nper rank",
    "dense_collective_bytes": "dense\ngradients,\nper rank",
    "planning_bytes": "planning",
}


def plot(figure: Any, modes: dict[str, list[ModeRun]]) -> None:
    """Draw the picture of the modes, of which there is at least one."""
    losses, differences, metrics, rates, memory, links = figure.subplots(3, 2).flat
    draw_losses(losses, modes)
    draw_differences(differences, modes)
    draw_evaluations(metrics, modes)
    draw_bars(rates, modes, RATES, ModeRun.number, 1)
    rates.set(title="throughput, samples/s")
    draw_bars(memory, modes, MEMORY, ModeRun.number, MIB)
    memory.set(title="device memory per rank, MiB")
    draw_bars(links, modes, LINKS, ModeRun.per_step, KIB)
    links.set(title="KiB per step by link")
    for panel in (losses, differences, metrics, rates, memory, links):
        tidy(panel, "y")


def draw_losses(panel: Any, modes: dict[str, list[ModeRun]]) -> None:
    """Losses over each other, in dashes that interleave: equal curves look like one of all."""
    dash = 5.0
    for order, (mode, runs) in enumerate(modes.items()):
        style: Any = (-order * dash, (dash, dash * (len(modes) - 1))) if len(modes) > 1 else "solid"
        points = sorted(runs[0].losses().items())
        panel.plot(*zip(*points, strict=True), color=f"C{order}", linestyle=style, linewidth=2)
        panel.plot([], [], color=f"C{order}", linewidth=2, label=mode)  # a solid legend
    panel.set(title="training loss", xlabel="step", ylabel="mean loss of the global batch")
    panel.legend()


def draw_differences(panel: Any, modes: dict[str, list[ModeRun]]) -> None:
    """Relative differences of the losses to those of the first mode, logarithmic but near 0."""
    (base, first), *others = modes.items()
    largest = 0.0
    for order, (mode, runs) in enumerate(others, start=1):
        points = loss_differences(first[0], runs[0])
        largest = max([largest, *points.values()])
        panel.plot(list(points), list(points.values()), color=f"C{order}", label=mode)
    if largest > 0:
        panel.set_yscale("symlog", linthresh=largest / 1e3)
        panel.set_ylim(-largest / 2e3, 3 * largest)  # a line at 0 stays visible
    else:
        panel.set_ylim(0, 1)
    panel.set(title=f"relative difference of the loss to {base}", xlabel="step")
    if others:
        panel.legend()


def draw_evaluations(panel: Any, modes: dict[str, list[ModeRun]]) -> None:
    """AUC of the evaluations over the steps, as points, since a run may have only one."""
    for order, (mode, runs) in enumerate(modes.items()):
        points = [(m["step"], m["eval_auc"]) for m in runs[0].metrics if m.get("eval_auc")]
        steps = [step for step, _ in points]
        # Smaller markers on top, so that equal values show all modes.
        size = 4 + 4 * (len(modes) - 1 - order)
        panel.plot(steps, [auc for _, auc in points], f"C{order}o-", markersize=size, label=mode)
    panel.set(title="AUC on held-out samples", xlabel="step")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panel.legend()


def draw_bars(
    panel: Any, modes: dict[str, list[ModeRun]], keys: Mapping[str, str], read: Read, factor: float
) -> None:
    """A group of bars per key, a bar per mode; logarithmic where values lie far apart."""
    width, places = 0.8 / len(modes), np.arange(len(keys))
    rotation, seen = 0 if len(keys) * len(modes) <= 12 else 90, []
    for order, mode in enumerate(modes):
        values = [medians(modes, read, key, factor)[order] for key in keys]
        at = places + (order - (len(modes) - 1) / 2) * width
        bars = panel.bar(at, [v or 0 for v in values], 0.92 * width, color=f"C{order}", label=mode)
        texts = ["n/a" if value is None else bar_text(value) for value in values]
        panel.bar_label(bars, texts, padding=2, fontsize=8, rotation=rotation)
        seen += [value for value in values if value]
    if seen and max(seen) > 20 * min(seen):
        panel.set_yscale("log")
        panel.set_ylim(min(seen) / 4, max(seen) * 3)
    else:
        panel.margins(y=0.15)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    panel.set_xticks(places, list(keys.values()))


def bar_text(value: float) -> str:
    """A value in four digits or more, without an exponent where it is large."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# -----------------------------------------------------------------------------
# The comparison as Markdown and JSON lines, with what is noise and what is the same bits.

NOTHING = "-"
RARE = 20
"""From here on the table does not say how often a difference comes by chance: 1 time in so many."""

KIB, MIB = 1 / 2**10, 1 / 2**20

# label, summary key, factor, digits after the point, whether divided by the steps
NUMBERS: tuple[tuple[str, str, float, str, bool], ...] = (
    ("samples/s, whole run", "samples_per_second", 1, ",.0f", False),
    ("step ms, median", "step_ms.median", 1, ",.2f", False),
    ("step ms, p90", "step_ms.p90", 1, ",.2f", False),
    ("hit rate of distinct rows", "hit_rate", 1, ".4f", False),
    ("hit rate of lookups", "hit_rate_lookups", 1, ".4f", False),
    ("embeddings on device, MiB", "embedding_device_bytes", MIB, ",.1f", False),
    ("peak on device, MiB", "peak_device_bytes", MIB, ",.1f", False),
    ("rows and row gradients sent, KiB per rank and step", "collective_bytes", KIB, ",.1f", True),
    ("dense gradients sent, KiB per rank and step", "dense_collective_bytes", KIB, ",.1f", True),
    ("planning sent, KiB per step", "planning_bytes", KIB, ",.1f", True),
    ("host to device, KiB per step, all ranks", "host_to_device_bytes", KIB, ",.1f", True),
    ("device to host, KiB per step, all ranks", "device_to_host_bytes", KIB, ",.1f", True),
    ("final loss", "final_loss", 1, ".6f", False),
    ("evaluation AUC", "eval_auc", 1, ".6f", False),
    ("evaluation log loss", "eval_logloss", 1, ".6f", False),
)


def by_mode(runs: Sequence[ModeRun]) -> dict[str, list[ModeRun]]:
    """Runs that succeeded, by mode, in the order asked for."""
    found: dict[str, list[ModeRun]] = {}
    for run in runs:
        if run.error is None:
            found.setdefault(run.mode, []).append(run)
    return found


Read = Callable[[ModeRun, str, float], float | None]
"""`ModeRun.number` or `ModeRun.per_step`."""


def medians(
    modes: Mapping[str, Sequence[ModeRun]], read: Read, key: str, factor: float = 1
) -> list[float | None]:
    """Of each mode the median over its runs of a number; None where no run has it."""
    found = [[read(run, key, factor) for run in runs] for runs in modes.values()]
    known = [[value for value in values if value is not None] for values in found]
    return [statistics.median(values) if values else None for values in known]


def markdown(runs: Sequence[ModeRun]) -> str:
    """The table (a column per mode), then a sentence for each thing that a reader must know."""
    modes = by_mode(runs)
    if not modes:
        return "no mode ran to its end"
    rows = [*number_lines(modes), *(relation_lines(modes) if len(modes) > 1 else [])]
    head, *lines = Table("", "", ("", *modes), rows).padded
    rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
    text = [f"| {' | '.join(line)} |" for line in (head, rule, *lines)]
    return "\n".join([*text, "", *(f"* {note}" for note in notes(modes, runs))])


def number_lines(modes: dict[str, list[ModeRun]]) -> list[tuple[str, ...]]:
    """A line per measured number that some mode has."""
    lines = []
    for label, key, factor, form, divided in NUMBERS:
        values = medians(modes, ModeRun.per_step if divided else ModeRun.number, key, factor)
        if any(value is not None for value in values):
            lines.append((label, *(NOTHING if v is None else format(v, form) for v in values)))
    return lines


def relation_lines(modes: dict[str, list[ModeRun]]) -> list[tuple[str, ...]]:
    """Lines that set every other mode against the first: speed, losses, bits."""
    (base, first), *others = modes.items()
    times = medians(modes, ModeRun.number, "step_ms.median")
    speed, losses, bits = [], [], []
    for (_, group), own in zip(others, times[1:], strict=True):
        word, _ = verdict(spread(first), spread(group))
        speed.append(f"{times[0] / own:.2f}x{word}" if times[0] and own else NOTHING)
        difference = largest_loss_difference(first[0], group[0])
        losses.append(NOTHING if difference is None else f"{difference:.1g}")
        words = []  # of losses and of final state; unknown where a run has no digest
        for key in ("loss_digest", "state_digest"):
            digests = {run.summary.get(key) for run in (first[0], group[0])}
            known = None not in digests
            words.append(("same" if len(digests) == 1 else "differ") if known else NOTHING)
        bits.append(" / ".join(words))
    return [
        (f"speed relative to {base}, by median step", NOTHING, *speed),
        (f"largest relative loss difference to {base}", NOTHING, *losses),
        (f"bits of losses / final state as {base}", NOTHING, *bits),
    ]


def notes(modes: dict[str, list[ModeRun]], runs: Sequence[ModeRun]) -> list[str]:
    """Sentences under the table: what is noise, by which measure, and which modes failed."""
    base = next(iter(modes))
    found = []
    for mode in modes:
        if mode != base:
            one, other = spread(modes[base]), spread(modes[mode])
            ranges = f"{mode}{other or ''} and {base}{one or ''}"
            found.append(f"step time of {ranges}: {verdict(one, other)[1]}")
    failed = [run for run in runs if run.error is not None]
    found += [f"{run.name} failed (exit code {run.exit_code}); its log says why" for run in failed]
    return found


def write_files(out: Path, runs: Sequence[ModeRun], command: str) -> None:
    """Write results.jsonl, table.md and plots.png into the comparison's folder."""
    with (out / "results.jsonl").open("w") as file:
        for run in runs:
            values = {f.name: getattr(run, f.name) for f in fields(run) if f.name != "metrics"}
            values |= {"seconds": round(run.seconds, 3), "summary": run.summary or None}
            file.write(json.dumps(values, default=str) + "\n")
    modes = by_mode(runs)
    drawn = bool(modes) and draw(out / "plots.png", (13, 13), plot, modes)
    places = [run.folder / "environment.json" for group in modes.values() for run in group]
    known = [machine_text(json.loads(path.read_text())) for path in places if path.is_file()]
    parts = ["# Comparison", "", f"`{command}`", "", *known[:1], "", markdown(runs), ""]
    parts += ["![losses, evaluations, throughput, memory, bytes](plots.png)", ""] if drawn else []
    (out / "table.md").write_text("\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
