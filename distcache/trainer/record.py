"""What a run says of itself: metrics of evaluations, `metrics.jsonl`, a line per logged step."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.link import Waiting, run_on_rank0
from distcache.comm.rendezvous import shutdown_timeout
from distcache.comm.world import World
from distcache.engine.step import WAIT
from distcache.parallel.base import Parallel, StepResult
from distcache.popularity.hot_cold import Phase
from distcache.trainer.schedule import Schedule

# -----------------------------------------------------------------------------
# AUC, log loss and normalised entropy of click predictions: NumPy, float64, exact.
#
# torchmetrics' `binary_auroc` squeezes logits through a float32 sigmoid and sums a float32
# trapezoid, which merges scores that differ and depends on their range; the rank formula does not.


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Area under the ROC curve: the share of (positive, negative) pairs that are in order.

    `scores` `[n]` on any monotone scale (logits), `labels` `[n]`, positive above 0.5. Tied pairs
    count one half; pairs are counted in integers. None where a class is missing or a score is NaN.
    """
    positive = labels > 0.5
    total = int(positive.sum())
    if total in (0, len(labels)) or np.isnan(scores).any():
        return None
    _, level = np.unique(scores, return_inverse=True)
    positives = np.bincount(level, weights=positive).astype(np.int64)
    negatives = np.bincount(level, weights=~positive).astype(np.int64)
    below = np.cumsum(negatives) - negatives
    twice = int((positives * (2 * below + negatives)).sum())
    return twice / (2 * total * (len(labels) - total))


def log_loss(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Mean binary cross-entropy in nats of `logits` `[n]` against `labels` `[n]` in [0, 1].

    None for no samples or where it is not finite (a NaN logit, or an infinite one that is wrong).
    """
    if len(logits) == 0:
        return None
    logits = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        negative, positive = np.logaddexp(0.0, logits), np.logaddexp(0.0, -logits)
        mixed = (1.0 - labels) * negative + labels * positive
        hard = np.where(labels == 1, positive, negative)  # 0 * inf would be NaN
        mean = float(np.where((labels == 0) | (labels == 1), hard, mixed).mean())
    return mean if np.isfinite(mean) else None


def normalized_entropy(loss: float | None, labels: np.ndarray) -> float | None:
    """`loss` over the entropy of the base rate of `labels` (He et al., 2014); below 1 is useful.

    None where the loss is, or where only one class is there (the entropy is 0).
    """
    if loss is None or len(labels) == 0:
        return None
    rate = float(labels.mean())
    if rate in (0.0, 1.0):
        return None
    return loss / -(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate))


@dataclass(frozen=True)
class EvalResult:
    """Metrics over `samples` held-out samples of all ranks; None where one does not exist."""

    auc: float | None = None
    logloss: float | None = None
    ne: float | None = None
    samples: int = 0

    @property
    def values(self) -> dict[str, float | None]:
        """The metrics by their names in summaries, log lines and checkpoints."""
        return {"eval_auc": self.auc, "eval_logloss": self.logloss, "eval_ne": self.ne}

    def __str__(self) -> str:
        shown = ["none" if v is None else f"{v:.6f}" for v in self.values.values()]
        metrics = "AUC {}  log loss {}  NE {}".format(*shown)
        return f"{metrics}  on {self.samples:,} held-out samples"


class Evaluation:
    """Collects this rank's logits and labels of one evaluation; the same batches on all ranks."""

    def __init__(self, take: Callable[[np.ndarray, np.ndarray], None] | None = None) -> None:
        """`take`: called on rank 0 with all logits and labels, float64 `[n]`, in the order of the
        held-out samples."""
        self.batches = 0
        self._parts: list[np.ndarray] = []
        self._take = take

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Keep the logits `[b]` (any device) and labels `[b]` of one slice (b may be 0)."""
        pair = [logits.detach().reshape(-1), labels.reshape(-1)]
        self._parts.append(torch.stack([p.to("cpu", torch.float64) for p in pair]).numpy())
        self.batches += 1

    def finish(self, world: World) -> EvalResult:
        """The metrics over all ranks, equal on every rank; all ranks call this."""
        parts: list[Any] | None = [None] * world.size if world.is_first else None
        try:
            dist.gather_object(self._parts, parts, dst=0, group=world.host_group)
        except RuntimeError as error:
            raise Waiting(world, "the host group", "evaluation").explain(error) from error

        def measured() -> EvalResult:
            # A batch is the slices of all ranks, in rank order.
            batches = [part for batch in zip(*(parts or ()), strict=True) for part in batch]
            logits, labels = np.concatenate([np.zeros((2, 0)), *batches], axis=1)
            if self._take is not None:
                self._take(logits, labels)
            return measure(logits, labels)

        return run_on_rank0(world, measured)


def measure(logits: np.ndarray, labels: np.ndarray) -> EvalResult:
    """All metrics of float64 `logits` `[n]` and `labels` `[n]`, warning of what does not exist."""
    bad, ones = int(np.isnan(logits).sum()), int((labels > 0.5).sum())
    if bad:
        text = "%d of %d logits are NaN, so AUC, log loss and NE do not exist"
        logger.warning(f"evaluation: {text}", bad, len(logits))
    elif ones in (0, len(labels)):
        text = "%d of %d held-out labels are 1, so AUC and NE do not exist: both classes are needed"
        way_out = "raise trainer.eval_steps or data.global_batch_size"
        logger.warning(f"evaluation: {text}; {way_out}", ones, len(labels))
    loss = log_loss(logits, labels)
    return EvalResult(auc(logits, labels), loss, normalized_entropy(loss, labels), len(labels))


# -----------------------------------------------------------------------------
# What a run writes about itself: `metrics.jsonl`, a line at a time, and `summary.json`.

SUMMARY_KEYS = (
    "mode", "world_size", "first_step", "steps", "global_batch_size", "final_loss", "eval_auc",
    "eval_logloss", "eval_ne", "samples_per_second", "step_ms", "stage_ms", "stage_hidden_ms",
    "hit_rate", "hit_rate_lookups", "rows_fetched", "rows_written_back", "warm_start_rows",
    "hot_rows_by_table", "host_to_device_bytes", "device_to_host_bytes", "collective_bytes",
    "dense_collective_bytes", "planning_bytes", "inter_node_bytes", "peak_device_bytes",
    "embedding_device_bytes", "cache_rows", "lookahead", "prefetch", "placement", "cache_state",
    "home_rows_mean", "home_rows_max", "early_rows", "exchange_ms", "exchange_hidden",
    "hot_samples", "phase_rate", "hot_steps", "cold_steps", "hot_rows_fetched",
    "cold_rows_fetched", "hot_host_bytes", "cold_host_bytes", "table_rows", "loss_digest",
    "state_digest",
)  # fmt: skip
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


WARM_UP_STEPS = 10
"""First steps of a process that count for no time: warm-up of caches and allocators."""

KEPT = 65_536
"""Intervals that are kept: the last ones."""


class StepTimes:
    """Host times of training steps, in memory that does not grow with them.

    An interval reaches from the end of the step (or evaluation) before to the end of this one,
    waits for batches and plans included; samples are those of all ranks. Count and sum are of all
    steps, `kept` is of the last `KEPT`.
    """

    def __init__(self, skip: int = WARM_UP_STEPS, keep: int = KEPT) -> None:
        self.kept = deque[float](maxlen=keep)
        self.count, self.total, self._samples = 0, 0.0, 0
        self._skip = skip
        self._recent = (0, 0.0, 0)  # steps, seconds, samples

    def add(self, interval_s: float, samples: int) -> None:
        """Record one training step."""
        steps, seconds, recent = self._recent
        self._recent = (steps + 1, seconds + interval_s, recent + samples)
        if self._skip:
            self._skip -= 1
            return
        self.count += 1
        self.total += interval_s
        self._samples += samples
        self.kept.append(interval_s)

    def step_ms(self) -> dict[str, float | None]:
        """`median` and `p90` of the intervals in milliseconds, linear between neighbours, without
        the first ten; None where none is."""
        if not self.count:
            return {"median": None, "p90": None}
        median, p90 = np.percentile(self.kept, (50, 90)).tolist()
        return {"median": 1e3 * median, "p90": 1e3 * p90}

    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second of interval, without the first ten steps."""
        return self._samples / self.total if self.total > 0 else None

    def lap(self) -> tuple[float, float]:
        """Of the steps since the last lap, or the beginning: mean interval in seconds, samples per
        second."""
        steps, seconds, samples = self._recent
        self._recent = (0, 0.0, 0)
        spent = max(seconds, 1e-9)
        return spent / max(steps, 1), samples / spent


# -----------------------------------------------------------------------------
# Values of every logged step in `metrics.jsonl`, and from time to time a line on the screen.

logger = logging.getLogger("distcache.trainer.trainer")


class Progress(AbstractContextManager):
    """The report of a run while it goes on; silent on ranks without a file."""

    def __init__(
        self,
        path: Path | None,
        schedule: Schedule,
        log_every: int,
        begun: Callable[[], None] | None = None,
        log_seconds: float = 0.0,
    ) -> None:
        """`path`: `metrics.jsonl`, on rank 0; `log_every`: training steps between its lines;
        `begun`: called there after the first step; `log_seconds`: least time from one line on the
        screen to the next. The lines of the first and the last step are always on the screen.

        What is in the file stays as far as it is of the steps that are done.
        """
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_back(path, schedule.first_step)
            self._file = path.open("a", encoding="utf-8", buffering=1)  # a line at a time
        self._steps, self._log_every, self._begun = schedule.steps, max(log_every, 1), begun
        self._log_seconds = log_seconds
        self._shown_at: float | None = None
        """Time of the last line on the screen, in seconds of `time.monotonic`."""
        self._unshown = ""
        """Line of the last step; empty once it is on the screen."""

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._show_last()
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
        if self._begun is not None:
            self._begun()
            self._begun = None
        if self._file is None:
            return
        loss = "no samples" if math.isnan(result.loss) else f"loss {result.loss:.6f}"
        text = f"{self._step_text(done)}  {loss}"
        if done % self._log_every and done != self._steps:
            self._unshown = text
            if self._shown_at is None:  # the first step, whose rates come with the next line
                self._show_last()
            return
        interval_s, rate = times.lap()
        live = mode.progress()
        values = {"step": done, "epoch": epoch, "loss": result.loss}
        values |= {"samples_per_second": rate, "step_ms": 1e3 * interval_s} | live
        if phase is not None:
            values |= {"phase": phase.kind, "phase_rate": phase.rate}
        self._write(values)
        speed = f"{rate:,.0f} samples/s  {1e3 * interval_s:.2f} ms"
        more = ("" if phase is None else f"  {phase.kind}") + shares(live)
        if self._steps is not None and done < self._steps:
            left = timedelta(seconds=round(interval_s * (self._steps - done)))
            more += f"  ETA {left}"
        self._unshown = f"{text}  {speed}{more}"
        waited_s = math.inf if self._shown_at is None else time.monotonic() - self._shown_at
        if waited_s >= self._log_seconds or done == self._steps:
            self._show_last()
            if live.get("stage_ms"):
                logger.debug(stages(live["stage_ms"], live["stage_hidden_ms"]))

    def _show_last(self) -> None:
        """Log the line of the last step, unless it is on the screen."""
        if self._unshown:
            logger.info(self._unshown)
            self._unshown = ""
            self._shown_at = time.monotonic()

    def _step_text(self, done: int) -> str:
        return f"step {done:,}" if self._steps is None else f"step {done:,}/{self._steps:,}"

    def _write(self, values: dict[str, Any]) -> None:
        """Add a line to the file."""
        self._file.write(json.dumps(plain(values), allow_nan=False) + "\n")

    def evaluation(self, done: int, result: EvalResult, phase: Phase | None = None) -> None:
        """Report an evaluation after `done` training steps; `phase`: with the rate after it."""
        if self._file is None:
            return
        rate = {} if phase is None else {"phase_rate": phase.rate}
        self._show_last()  # the loss beside the evaluation of the same step
        self._write({"step": done} | result.values | rate)
        logger.info(f"{self._step_text(done)}  {result}")


def cut_back(path: Path, step: int) -> None:
    """Leave of a `metrics.jsonl`, if there is one, the lines of the first `step` steps."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        kept = 0
        with suppress(ValueError, LookupError, TypeError):  # at the line that a killed process left
            for line in file if step > 0 else ():
                if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                    break
                kept += len(line)
        file.truncate(kept)


def shares(live: dict[str, Any]) -> str:
    """Stall, hidden share and hit rate as the log line shows them, where a mode has them."""
    shown = {
        "stall_ms": lambda ms: f"  stall {ms:.2f} ms",
        "hidden_share": lambda share: f"  hidden {100 * share:.0f} %",
        "hit_rate": lambda rate: f"  hit {100 * rate:.2f} %",
    }
    return "".join(show(live[key]) for key, show in shown.items() if live.get(key) is not None)


def stages(took: dict[str, float | None], hidden: dict[str, float]) -> str:
    """Milliseconds per step of each stage: those of the loop, then those beside it; none below
    0.05 ms, and none that a mode does not have.

    Where at least a hundredth of a stage beside the loop was waited for, its hidden part follows.
    """
    loop, beside = [], []
    for name, ms in took.items():
        if name == WAIT or ms is None or ms < 0.05:
            continue
        if name not in hidden:
            loop.append(f"{name} {_short(ms)}")
        else:
            share = hidden[name] / ms
            note = "" if share > 0.99 else f" ({100 * share:.0f}%)"
            beside.append(f"{name} {_short(ms)}{note}")
    parts = [" ".join(loop), f"hidden: {' '.join(beside)}" if beside else ""]
    return f"ms/step: {' | '.join(filter(None, parts))}"


def _short(ms: float) -> str:
    return f"{ms:.1f}" if ms < 9.95 else f"{ms:.0f}"


# -----------------------------------------------------------------------------
# How long a stop takes: it writes a checkpoint, for which whoever asks for it may not wait.

PROBE_BYTES = 64 << 20
"""What is written, and removed, to see how fast the disk is."""


def announce_stop(folder: Path, nbytes: int) -> None:
    """Say how long a stop takes that writes a checkpoint of `nbytes` into `folder`, by what the
    disk does now; a warning where torchrun kills the ranks before. For rank 0."""
    if nbytes < 4 * PROBE_BYTES:
        return  # before anybody loses patience
    data = os.urandom(PROBE_BYTES)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        logger.warning("a stop will not leave a checkpoint in %s: %s", folder, error)
        return
    zlib.crc32(data)
    rate = PROBE_BYTES / (time.perf_counter() - began)
    takes, limit = nbytes / rate, shutdown_timeout()
    text = f"a stop (Ctrl-C, SIGTERM) writes a checkpoint of {nbytes / 2**30:.2f} GiB: about "
    text += f"{takes:.0f} s at {rate / 2**20:.0f} MiB/s"
    enough = math.ceil(2 * takes)  # disks slow down, and the step before must end
    if limit is None or enough <= limit:
        logger.info(text)
    else:
        way_out = f"give it --shutdown-timeout={enough}, or there may be no checkpoint"
        logger.warning(f"{text}; torchrun kills ranks {limit:.0f} s after a signal: {way_out}")
