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
        self, done: int, epoch: int, result: StepResult, times: StepTimes, mode: Parallel
    ) -> None:
        """Report the step that made it `done` steps, if its turn has come or it is the last.

        `mode.progress()`, where a mode has it, adds values of this rank, such as `hit_rate`.
        """
        if self._file is None or (done % self._log_every and done != self._steps):
            return
        interval_s, rate = times.recent(self._log_every)
        live: dict[str, Any] = getattr(mode, "progress", dict)()
        self._file.write(
            step=done,
            epoch=epoch,
            loss=result.loss,
            samples_per_second=rate,
            step_ms=1e3 * interval_s,
            **live,
        )
        hits = live.get("hit_rate")
        logger.info(
            "step %s  loss %.6f  %s samples/s  %.2f ms%s%s",
            self._done(done),
            result.loss,
            f"{rate:,.0f}",
            1e3 * interval_s,
            "" if hits is None else f"  hit {100 * hits:.2f} %",
            self._eta(interval_s, done),
        )

    def _done(self, done: int) -> str:
        """`done` of how many steps, where that is known."""
        return f"{done:,}" if self._steps is None else f"{done:,}/{self._steps:,}"

    def _eta(self, interval_s: float, done: int) -> str:
        if self._steps is None:
            return ""
        return f"  ETA {timedelta(seconds=round(interval_s * max(0, self._steps - done)))}"

    def evaluation(self, done: int, result: EvalResult) -> None:
        """Report an evaluation after `done` training steps."""
        if self._file is None:
            return
        values = {"eval_auc": result.auc, "eval_logloss": result.logloss, "eval_ne": result.ne}
        self._file.write(step=done, **values)
        shown = ("none" if value is None else f"{value:.6f}" for value in values.values())
        logger.info(
            "step %s  AUC %s  log loss %s  NE %s  on %s held-out samples",
            self._done(done),
            *shown,
            f"{result.samples:,}",
        )
