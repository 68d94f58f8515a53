"""The comparison as Markdown, CSV and JSON lines, with what is noise and what is the same bits."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from distcache.cli.run import new_figure

# -----------------------------------------------------------------------------
# What a finished run left behind, and how much its step time scatters.

TAIL_LINES = 25
WARM_UP_STEPS = 10
"""Steps left out of the spread, as they are left out of `step_ms`."""


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
            value = value.get(part) if isinstance(value, dict) else None
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return value * factor if known else None

    def per_step(self, key: str, factor: float = 1) -> float | None:
        """A number of the summary divided by the steps that it covers."""
        value, steps = self.number(key, factor), self.number("steps")
        return None if value is None or not steps else value / steps

    def losses(self) -> dict[int, float]:
        """Loss by step, of the logged steps."""
        return {line["step"]: line["loss"] for line in self.metrics if line.get("loss") is not None}

    def window_ms(self) -> list[float]:
        """Step time of each logged window, ms, without the first steps."""
        batch, first = self.number("global_batch_size"), self.number("first_step") or 0
        rated = [line for line in self.metrics if line.get("samples_per_second")]
        # A window reaches back to the line before it.
        starts = [first, *(line["step"] for line in rated)]
        return [
            1000 * batch / line["samples_per_second"]
            for start, line in zip(starts, rated, strict=False)
            if batch and start >= first + WARM_UP_STEPS
        ]


@dataclass(frozen=True)
class Spread:
    """Median of a mode's step time and the range that noise covers, ms; `of`: what scatters;
    `runs`: how many runs' medians it is of, or 1: windows of one run, which say nothing of others.
    """

    median: float
    low: float
    high: float
    of: str
    runs: int = 1


def read_run(
    mode: str, name: str, folder: Path, exit_code: int, seconds: float, log_file: Path
) -> ModeRun:
    """Read a run folder. `error` is the log's tail where the run failed or left no summary."""
    path = folder / "summary.json"
    if exit_code != 0 or not path.is_file():
        tail = log_tail(log_file) if exit_code else f"no {path}\n{log_tail(log_file)}"
        return ModeRun(mode, name, folder, exit_code, seconds, error=tail)
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
    """How the step time of one mode's runs scatters; None where nothing was measured.

    Several runs: the range of their medians. One run: its middle eighty per cent of windows.
    """
    medians = [value for run in runs if (value := run.number("step_ms.median")) is not None]
    if not medians:
        return None
    middle = statistics.median(medians)
    if len(medians) > 1:
        return Spread(middle, min(medians), max(medians), f"{len(medians)} runs", len(medians))
    windows = sorted(runs[0].window_ms())
    if len(windows) < 5:
        return None
    cut = len(windows) // 10
    low, high = windows[cut], windows[-1 - cut]
    return Spread(middle, min(low, middle), max(high, middle), f"{len(windows)} windows of one run")


def is_noise(one: Spread, other: Spread) -> bool:
    """Whether two modes' ranges overlap, so that their difference may be noise."""
    return one.low <= other.high and other.low <= one.high


def by_chance(one: Spread, other: Spread) -> int | None:
    """N, where the ranges of two modes of equal speed would lie apart about 1 time in N.

    The number of ways to divide all runs into two sets of these sizes, over the two that lie apart.
    None for single runs: how runs differ from one another is not known.
    """
    if min(one.runs, other.runs) < 2:
        return None
    return math.comb(one.runs + other.runs, one.runs) // 2


def largest_loss_difference(one: ModeRun, other: ModeRun) -> float | None:
    """Largest relative difference of the losses at the steps that both runs logged."""
    ours, theirs = one.losses(), other.losses()
    common = ours.keys() & theirs.keys()
    scale = {step: max(abs(ours[step]), abs(theirs[step])) for step in common}
    return max(
        (abs(ours[step] - theirs[step]) / scale[step] if scale[step] else 0.0 for step in common),
        default=None,
    )


# -----------------------------------------------------------------------------
# The comparison as one picture of four panels: losses, throughput, device memory, bytes.

LINKS = {
    "host_to_device_bytes": "host to device,\nall ranks",
    "device_to_host_bytes": "device to host,\nall ranks",
    "collective_bytes": "rows and their\ngradients,\nper rank",
    "dense_collective_bytes": "dense\ngradients,\nper rank",
    "planning_bytes": "planning",
}
MEMORY = {"embedding_device_bytes": "embeddings", "peak_device_bytes": "peak"}


def plot(path: Path, modes: dict[str, list[ModeRun]]) -> bool:
    """Draw the picture; False, with a warning, where matplotlib is missing or nothing ran."""
    figure = new_figure(13, 9) if modes else None
    if figure is None:
        return False
    losses, rates, memory, links = figure.subplots(2, 2).flat
    draw_losses(losses, modes)
    draw_throughput(rates, modes)
    draw_bars(memory, modes, MEMORY, lambda run, key: run.number(key, MIB))
    memory.set(title="device memory per rank, MiB")
    draw_bars(links, modes, LINKS, lambda run, key: run.per_step(key, KIB))
    links.set(title="KiB per step by link")
    for panel in (losses, rates, memory, links):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    return True


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


def draw_throughput(panel: Any, modes: dict[str, list[ModeRun]]) -> None:
    """Samples per second; the lines span the noise range of the step time."""
    told = False
    for place, runs in enumerate(modes.values()):
        rate = median_of(runs, lambda run: run.number("samples_per_second"))
        if rate is None:
            continue
        scatter, batch = spread(runs), runs[0].number("global_batch_size")
        bar = panel.bar(place, rate, 0.6, color=f"C{place}")
        panel.bar_label(bar, fmt="{:,.0f}", label_type="center", color="white")
        if scatter is not None and batch:
            told = True
            ends = [[rate - 1000 * batch / scatter.high], [1000 * batch / scatter.low - rate]]
            panel.errorbar(place, rate, np.maximum(ends, 0), color="black", capsize=4)
    panel.set_xticks(range(len(modes)), list(modes))
    panel.yaxis.set_major_formatter("{x:,.0f}")
    noise = "the line spans the noise" if told else "noise unknown: too few steps"
    panel.set(title=f"throughput ({noise})", ylabel="samples/s")


def draw_bars(
    panel: Any,
    modes: dict[str, list[ModeRun]],
    keys: Mapping[str, str],
    read: Callable[[ModeRun, str], float | None],
) -> None:
    """A group of bars per key, a bar per mode; logarithmic where values lie far apart."""
    width, places = 0.8 / len(modes), np.arange(len(keys))
    rotation, seen = 0 if len(keys) * len(modes) <= 12 else 90, []
    for order, (mode, runs) in enumerate(modes.items()):
        values = [read(runs[0], key) for key in keys]
        at = places + (order - (len(modes) - 1) / 2) * width
        bars = panel.bar(at, [v or 0 for v in values], 0.92 * width, color=f"C{order}", label=mode)
        texts = ["n/a" if value is None else f"{value:,.4g}" for value in values]
        panel.bar_label(bars, texts, padding=2, fontsize=8, rotation=rotation)
        seen += [value for value in values if value]
    if seen and max(seen) > 20 * min(seen):
        panel.set_yscale("log")
        panel.set_ylim(min(seen) / 4, max(seen) * 3)
    else:
        panel.margins(y=0.15)
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set_xticks(places, list(keys.values()))


# -----------------------------------------------------------------------------
# The comparison as Markdown, CSV and JSON lines, with what is noise and what is the same bits.

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


def median_of(runs: Sequence[ModeRun], read: Callable[[ModeRun], float | None]) -> float | None:
    """Median over a mode's runs of a number; None where no run has it."""
    values = [value for run in runs if (value := read(run)) is not None]
    return statistics.median(values) if values else None


def markdown(runs: Sequence[ModeRun]) -> str:
    """The table (a column per mode), then a sentence for each thing that a reader must know."""
    modes = by_mode(runs)
    if not modes:
        return "no mode ran to its end"
    lines = [("", list(modes)), *number_lines(modes), *relation_lines(modes)]
    widths = [max(len(label) for label, _ in lines)]
    widths += [max(len(cells[i]) for _, cells in lines) for i in range(len(modes))]
    text = []
    for label, cells in lines:
        padded = [label.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append(f"| {' | '.join(padded)} |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    text.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join([*text, "", *(f"* {note}" for note in notes(modes, runs))])


def number_lines(modes: dict[str, list[ModeRun]]) -> list[tuple[str, list[str]]]:
    """A line per measured number that some mode has."""
    lines = []
    for label, key, factor, form, divided in NUMBERS:
        read = ModeRun.per_step if divided else ModeRun.number
        values = [
            median_of(group, partial(read, key=key, factor=factor)) for group in modes.values()
        ]
        if any(value is not None for value in values):
            lines.append((label, [NOTHING if v is None else format(v, form) for v in values]))
    return lines


def relation_lines(modes: dict[str, list[ModeRun]]) -> list[tuple[str, list[str]]]:
    """Lines that set every mode against the first: speed, losses, bits."""
    base = next(iter(modes))
    speed, losses, bits = [], [], []
    for mode, group in modes.items():
        speed.append(ratio(modes, mode))
        difference = largest_loss_difference(modes[base][0], group[0])
        losses.append(NOTHING if mode == base or difference is None else f"{difference:.1g}")
        bits.append(NOTHING if mode == base else same_bits(modes[base][0], group[0]))
    if len(modes) == 1:
        return []
    return [
        (f"speed relative to {base}, by median step", speed),
        (f"largest relative loss difference to {base}", losses),
        (f"bits of losses / final state as {base}", bits),
    ]


def ratio(modes: dict[str, list[ModeRun]], mode: str) -> str:
    """A mode's speed over the first mode's, and whether the difference is noise."""
    base = next(iter(modes))
    times = [
        median_of(modes[name], lambda run: run.number("step_ms.median")) for name in (base, mode)
    ]
    if mode == base or not times[0] or not times[1]:
        return NOTHING
    one, other = spread(modes[base]), spread(modes[mode])
    if one is None or other is None:
        word = " (noise unknown)"
    elif is_noise(one, other):
        word = " (noise)"
    else:
        odds = by_chance(one, other)
        word = " (one run)" if odds is None else f" (chance 1 in {odds})" if odds < RARE else ""
    return f"{times[0] / times[1]:.2f}x{word}"


def same_bits(one: ModeRun, other: ModeRun) -> str:
    """`same / same`, `differ / differ`, or a dash where a run has no digest."""
    words = []
    for key in ("loss_digest", "state_digest"):
        ours, theirs = one.summary.get(key), other.summary.get(key)
        known = ours is not None and theirs is not None
        words.append(("same" if ours == theirs else "differ") if known else NOTHING)
    return " / ".join(words)


def notes(modes: dict[str, list[ModeRun]], runs: Sequence[ModeRun]) -> list[str]:
    """Sentences under the table: what is noise, by which measure, and which modes failed."""
    base = next(iter(modes))
    chosen = {str(run.summary.get("placement") or "") for run in modes.get("auto", ())} - {""}
    found = [f"auto is {' and '.join(sorted(chosen))}"] if chosen else []
    found += [noise_note(base, mode, modes) for mode in modes if mode != base]
    failed = [run for run in runs if run.error is not None]
    found += [f"{run.name} failed (exit code {run.exit_code}); its log says why" for run in failed]
    return found


def noise_note(base: str, mode: str, modes: dict[str, list[ModeRun]]) -> str:
    """Whether the step times of two modes differ by more than they scatter."""
    one, other = spread(modes[base]), spread(modes[mode])
    if one is None or other is None:
        return (
            f"step time of {mode} and {base}: too few measurements to tell a difference from "
            "noise; use repeats=4, or more steps"
        )
    odds = by_chance(one, other)
    if is_noise(one, other):
        verdict = "noise: the ranges overlap"
    elif odds is None:
        verdict = "apart within one run; whether runs differ as much is not known: use repeats=4"
    else:
        verdict = f"apart, as modes of one speed would be 1 time in {odds}"
    return (
        f"step time of {mode} {_range(other)} and {base} {_range(one)}: {verdict} "
        f"(ranges over {one.of})"
    )


def _range(value: Spread) -> str:
    return f"{value.median:,.2f} ms [{value.low:,.2f} to {value.high:,.2f}]"


def write_files(out: Path, runs: Sequence[ModeRun], command: str) -> None:
    """Write results.jsonl, table.csv, table.md and plots.png into the comparison's folder."""
    with (out / "results.jsonl").open("w") as file:
        for run in runs:
            values = {f.name: getattr(run, f.name) for f in fields(run) if f.name != "metrics"}
            values |= {"seconds": round(run.seconds, 3), "summary": run.summary or None}
            file.write(json.dumps(values, default=str) + "\n")
    write_csv(out / "table.csv", runs)
    drawn = plot(out / "plots.png", by_mode(runs))
    parts = ["# Comparison", "", f"`{command}`", "", *hardware(runs), "", markdown(runs), ""]
    parts += ["![losses, throughput, memory, bytes](plots.png)", ""] if drawn else []
    (out / "table.md").write_text("\n".join(parts))


def write_csv(path: Path, runs: Sequence[ModeRun]) -> None:
    """A line per run, a column per value of the summary; nested values by dotted name."""
    rows = []
    for run in runs:
        row: dict[str, Any] = {"name": run.name, "exit_code": run.exit_code, "mode": run.mode}
        for key, value in run.summary.items():
            nested = value.items() if isinstance(value, dict) else [(None, value)]
            row |= {key if inner is None else f"{key}.{inner}": item for inner, item in nested}
        rows.append(row)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def hardware(runs: Sequence[ModeRun]) -> list[str]:
    """Lines on the machine, the versions and the commit, as the first run recorded them."""
    places = [run.folder / "environment.json" for run in runs if run.error is None]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    here = json.loads(path.read_text())
    machine, commit = here["hardware"], here.get("commit") or {}
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    memory = (machine["memory_bytes"] or 0) / 2**30
    versions = [f"{name} {version}" for name, version in here["versions"].items() if version]
    changed = ", with changes" if commit.get("dirty") else ""
    return [
        f"Hardware: {machine['cpu']}, {machine['cores']} cores, {memory:.1f} GiB, "
        f"{', '.join(gpus) if gpus else 'no GPU'}. {here['world_size']} rank(s), "
        f"{here['threads']} thread(s) each.",
        f"Versions: {', '.join(versions)}. Commit: {commit.get('commit', 'unknown')}{changed}.",
    ]
