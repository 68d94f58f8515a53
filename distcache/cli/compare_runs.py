"""What a finished run left behind, and how much its step time scatters."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

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

    def number(self, key: str) -> float | None:
        """A number of the summary by dotted key; None where there is none."""
        value: Any = self.summary
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def per_step(self, key: str) -> float | None:
        """A number of the summary divided by the steps that it covers."""
        value, steps = self.number(key), self.number("steps")
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
