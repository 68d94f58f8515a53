"""A model's planned steps: one stream at a time, every step run once and in order.

The planner runs ahead of the device, so it is brought back to what the device holds when a stream
ends with steps that were planned but not run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from distcache.comm.failure import record_failure
from distcache.data.batch import Batch
from distcache.errors import PlanError
from distcache.pipeline.planning import PlannedStep, StreamPlanner
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.thread import PlanningThread

log = logging.getLogger(__name__)

_STOP_S = 60.0
"""Longest wait for the planner's last exchange after an orderly stop."""

_FAILED_STOP_S = 1.0
"""The same when a step failed: the other planners may never come."""


class StepFeed:
    """Hands out the steps that `planner` plans, at most `depth` of them planned ahead.

    `run_step`: the last step that was run to its end (-1: none); `failed`: whether a step failed
    half-way, so that this rank's rows are those of no step.
    """

    def __init__(self, planner: StreamPlanner, rows: Sequence[GroupRows], depth: int) -> None:
        self.planner, self._rows, self._depth = planner, rows, depth
        self.run_step, self.failed = -1, False
        self._thread: PlanningThread | None = None
        self._due: PlannedStep | None = None

    def steps(self, batches: Iterable[Batch]) -> Iterator[PlannedStep]:
        """Planned steps of `batches`; each must be run before the next is taken.

        Ends at the first rank's end. Raises what went wrong with the batches of some rank, on all
        ranks after the same step; PlanError while another stream is open or after a failed step.
        """
        if self.failed:
            raise PlanError("a step failed half-way: this model cannot go on; load a checkpoint")
        if self._thread is not None:
            raise PlanError("another stream of this model is open: end or close it first")
        thread = self._thread = PlanningThread(self.planner, batches, self._depth)
        try:
            for planned in thread:
                self._due = planned
                yield planned
                if self._due is not None:
                    raise PlanError(
                        f"step {planned.step} of the stream was not run: call train_step or "
                        "eval_step once for each step, before the next is taken"
                    )
        finally:
            self._end(thread)

    @contextmanager
    def running(self, planned: PlannedStep) -> Iterator[None]:
        """The time in which the step that was handed out last is run.

        Raises PlanError for any other step. An error inside is recorded for the other ranks,
        which wait for this one.
        """
        if planned is not self._due:
            raise PlanError(
                f"step {planned.step} is not due: run each step of the stream once, in its order"
            )
        self._due = None
        try:
            yield
        except BaseException as error:
            self.failed = True
            world = self.planner.link.world
            record_failure(world.store, world.rank, error)
            raise
        self.run_step = planned.step

    def close(self) -> None:
        """End the open stream, if there is one; safe to call twice."""
        if self._thread is not None:
            self._end(self._thread)

    def _end(self, thread: PlanningThread) -> None:
        """Stop the planner's thread; forget what it planned beyond the last step that was run."""
        if self._thread is not thread:
            return
        world = self.planner.link.world
        limit = _FAILED_STOP_S if self.failed else min(world.timeout_s, _STOP_S)
        ended = thread.stop(limit)
        self._thread = self._due = None
        if self.failed:
            return
        if not ended:
            self.failed = True
            log.warning("the planner did not end within %g s: the batches do not come", limit)
        elif self.planner.ingested != self.run_step + 1:
            pairs = zip(self._rows, self.planner.planners, strict=True)
            self.planner.restore(self.run_step, [rows.held_rows(p.own_slots) for rows, p in pairs])
