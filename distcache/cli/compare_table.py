"""The comparison as Markdown, CSV and JSON lines, with what is noise and what is the same bits."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distcache.cli.compare_plots import plot
from distcache.cli.compare_runs import (
    ModeRun,
    Spread,
    by_chance,
    is_noise,
    largest_loss_difference,
    spread,
)

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

        def read(run: ModeRun, key: str = key, divided: bool = divided) -> float | None:
            return run.per_step(key) if divided else run.number(key)

        values = [median_of(group, read) for group in modes.values()]
        if any(value is not None for value in values):
            lines.append(
                (label, [NOTHING if v is None else format(v * factor, form) for v in values])
            )
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
            file.write(json.dumps(record(run)) + "\n")
    write_csv(out / "table.csv", runs)
    drawn = plot(out / "plots.png", by_mode(runs))
    parts = ["# Comparison", "", f"`{command}`", "", *hardware(runs), "", markdown(runs), ""]
    parts += ["![losses, throughput, memory, bytes](plots.png)", ""] if drawn else []
    (out / "table.md").write_text("\n".join(parts))


def record(run: ModeRun) -> dict[str, Any]:
    """One run as a JSON value: what it was, how it ended, its summary."""
    return {
        "mode": run.mode,
        "name": run.name,
        "folder": str(run.folder),
        "exit_code": run.exit_code,
        "seconds": round(run.seconds, 3),
        "error": run.error,
        "summary": run.summary or None,
    }


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
