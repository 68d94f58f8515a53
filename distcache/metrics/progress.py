"""One dense line per logged step on the screen, and the same values in `metrics.jsonl`."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

from distcache.evaluate import EvalResult
from distcache.metrics.record import MetricsFile
from distcache.metrics.timing import StepTimes
from distcache.parallel.base import Parallel, StepResult
from distcache.pipeline.clock import WAIT
from distcache.run.phases import Phase
from distcache.run.schedule import Schedule

logger = logging.getLogger("distcache.trainer")


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
