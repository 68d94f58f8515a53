"""What a run writes about itself: `metrics.jsonl`, a dense line per logged step, step times."""

from __future__ import annotations

import json
import logging
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from distcache.engine.step import WAIT
from distcache.parallel.base import Durations, Parallel, StepResult
from distcache.trainer.evaluate import EvalResult
from distcache.trainer.schedule import Phase, Schedule

# -----------------------------------------------------------------------------
# What a run writes about itself: `metrics.jsonl`, a line at a time, and `summary.json`.

SUMMARY_KEYS = (
    "mode",
    "world_size",
    "first_step",
    "steps",
    "global_batch_size",
    "final_loss",
    "eval_auc",
    "eval_logloss",
    "eval_ne",
    "samples_per_second",
    "step_ms",
    "stage_ms",
    "stage_hidden_ms",
    "hit_rate",
    "hit_rate_lookups",
    "rows_fetched",
    "rows_written_back",
    "warm_start_rows",
    "hot_rows_by_table",
    "host_to_device_bytes",
    "device_to_host_bytes",
    "collective_bytes",
    "dense_collective_bytes",
    "planning_bytes",
    "inter_node_bytes",
    "peak_device_bytes",
    "embedding_device_bytes",
    "cache_rows",
    "lookahead",
    "prefetch",
    "placement",
    "cache_state",
    "home_rows_mean",
    "home_rows_max",
    "early_rows",
    "exchange_ms",
    "exchange_hidden",
    "hot_samples",
    "phase_rate",
    "hot_steps",
    "cold_steps",
    "hot_rows_fetched",
    "cold_rows_fetched",
    "hot_host_bytes",
    "cold_host_bytes",
    "table_rows",
    "loss_digest",
    "state_digest",
)
"""The keys of `summary.json`, in order, in every mode."""


def plain(value: Any) -> Any:
    """`value` as strict JSON allows it: NaN and infinities become None, at any depth."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that `path` holds either the old text or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(plain(value), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is written."""

    def __init__(self, path: Path, append: bool) -> None:
        """Open `path`; `append` keeps the lines of the run that is resumed in its own folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if append else "w", encoding="utf-8", buffering=1)

    def write(self, **values: Any) -> None:
        """Add one line."""
        self._file.write(json.dumps(plain(values), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# -----------------------------------------------------------------------------
# Step times and throughput, without the first steps.


class StepTimes:
    """Host times of training steps, in memory that does not grow with them.

    An interval reaches from the end of the step (or evaluation) before to the end of this one,
    waits for batches and plans included; samples are those of all ranks.
    """

    def __init__(self) -> None:
        self._intervals = Durations()
        self._samples = 0
        self._recent = (0, 0.0, 0)  # steps, seconds, samples

    def add(self, interval_s: float, samples: int) -> None:
        """Record one training step."""
        if self._intervals.add(interval_s):
            self._samples += samples
        steps, seconds, recent = self._recent
        self._recent = (steps + 1, seconds + interval_s, recent + samples)

    def step_ms(self) -> dict[str, float | None]:
        """`median` and `p90` of the intervals in milliseconds, without the first ten; None where
        none is. Of more steps than `durations.KEPT`, those of a uniform sample of that many."""
        found = self._intervals.percentiles((50, 90))
        median, p90 = (None, None) if found is None else (1e3 * value for value in found)
        return {"median": median, "p90": p90}

    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second of interval, without the first ten steps."""
        spent = self._intervals.total
        return self._samples / spent if spent > 0 else None

    def lap(self) -> tuple[float, float]:
        """Of the steps since the last lap, or the beginning: mean interval in seconds, samples per
        second."""
        steps, seconds, samples = self._recent
        self._recent = (0, 0.0, 0)
        spent = max(seconds, 1e-9)
        return spent / max(steps, 1), samples / spent


# -----------------------------------------------------------------------------
# One dense line per logged step on the screen, and the same values in `metrics.jsonl`.

logger = logging.getLogger("distcache.trainer.trainer")


class Progress:
    """The report of a run while it goes on; silent on ranks without a file."""

    def __init__(self, path: Path | None, schedule: Schedule, log_every: int) -> None:
        """`path`: `metrics.jsonl`, on rank 0; `log_every`: training steps between lines.

        The file is begun anew, unless steps that another process did are in it.
        """
        self._file = MetricsFile(path, append=schedule.first_step > 0) if path else None
        self._steps, self._log_every = schedule.steps, max(log_every, 1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def step(
        self,
        done: int,
        epoch: int,
        result: StepResult,
        times: StepTimes,
        mode: Parallel,
        phase: Phase | None = None,
    ) -> None:
        """Report the step that made it `done` steps, if its turn has come or it is the last.

        `mode.progress()` adds values of this rank, such as `hit_rate` and the times of stages;
        they, and the rate, are those since the line before. `phase`: the one of this step.
        """
        if self._file is None or (done % self._log_every and done != self._steps):
            return
        interval_s, rate = times.lap()
        live = mode.progress()
        self._file.write(
            step=done,
            epoch=epoch,
            loss=result.loss,
            samples_per_second=rate,
            step_ms=1e3 * interval_s,
            **live,
            **({} if phase is None else {"phase": phase.kind, "phase_rate": phase.rate}),
        )
        logger.info(
            "step %s  loss %.6f  %s samples/s  %.2f ms%s%s%s",
            self._done(done),
            result.loss,
            f"{rate:,.0f}",
            1e3 * interval_s,
            "" if phase is None else f"  {phase.kind}",
            shares(live),
            self._eta(interval_s, done),
        )
        if live.get("stage_ms"):
            logger.info("%s", stages(live["stage_ms"], live["stage_hidden_ms"]))

    def _done(self, done: int) -> str:
        """`done` of how many steps, where that is known."""
        return f"{done:,}" if self._steps is None else f"{done:,}/{self._steps:,}"

    def _eta(self, interval_s: float, done: int) -> str:
        if self._steps is None:
            return ""
        return f"  ETA {timedelta(seconds=round(interval_s * max(0, self._steps - done)))}"

    def evaluation(self, done: int, result: EvalResult, phase: Phase | None = None) -> None:
        """Report an evaluation after `done` training steps; `phase`: with the rate after it."""
        if self._file is None:
            return
        values = {"eval_auc": result.auc, "eval_logloss": result.logloss, "eval_ne": result.ne}
        rate = {} if phase is None else {"phase_rate": phase.rate}
        self._file.write(step=done, **values, **rate)
        shown = ("none" if value is None else f"{value:.6f}" for value in values.values())
        logger.info(
            "step %s  AUC %s  log loss %s  NE %s  on %s held-out samples",
            self._done(done),
            *shown,
            f"{result.samples:,}",
        )


def shares(live: dict[str, Any]) -> str:
    """Stall, hidden share and hit rate as the log line shows them, where a mode has them."""
    text = ""
    if live.get("stall_ms") is not None:
        text += f"  stall {live['stall_ms']:.2f} ms"
    if live.get("hidden_share") is not None:
        text += f"  hidden {100 * live['hidden_share']:.0f} %"
    if live.get("hit_rate") is not None:
        text += f"  hit {100 * live['hit_rate']:.2f} %"
    return text


def stages(took: dict[str, float], hidden: dict[str, float]) -> str:
    """Milliseconds of each stage: those of the loop, then those beside it; none below 0.05 ms.

    Where at least a hundredth of a stage beside the loop was waited for, its hidden part follows.
    """
    loop, beside = [], []
    for name, ms in took.items():
        if name == WAIT or ms < 0.05:
            continue
        if name not in hidden:
            loop.append(f"{name} {_short(ms)}")
        else:
            share = hidden[name] / ms
            note = "" if share > 0.99 else f" ({100 * share:.0f}%)"
            beside.append(f"{name} {_short(ms)}{note}")
    return f"  ms: {' '.join(loop)} | hidden: {' '.join(beside)}"


def _short(ms: float) -> str:
    return f"{ms:.1f}" if ms < 9.95 else f"{ms:.0f}"
