"""A model's planned steps: one stream at a time, every step run once and in order.

The planner and the movement run ahead of training. When a stream ends with steps that were planned
but not run, the planner is brought back to what the device holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from distcache.comm.failure import record_failure
from distcache.data.batch import Batch
from distcache.errors import PlanError
from distcache.pipeline.clock import WAIT, Span
from distcache.pipeline.planning import StreamPlanner
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.schedule import InFlight, Stage
from distcache.pipeline.shake import Shaker
from distcache.pipeline.threads import Pipeline
from distcache.streams import COMPUTE, Streams

log = logging.getLogger(__name__)

_STOP_S = 60.0
"""Longest wait for the planner's last exchange after an orderly stop."""

_FAILED_STOP_S = 1.0
"""The same when a step failed: the other planners may never come."""


class StepFeed:
    """Hands out the steps that `planner` plans; those with stages of `movement` have moved.

    `depth`: steps planned ahead of the loop where it moves their rows itself. `run_step`: the last
    step that was run to its end (-1: none); `failed`: whether a step or a movement failed
    half-way, so that this rank's rows are those of no step.
    """

    def __init__(
        self,
        planner: StreamPlanner,
        rows: Sequence[GroupRows],
        depth: int,
        streams: Streams,
        movement: Sequence[Stage] = (),
        shake: Shaker | None = None,
        early: bool = False,
        shares: bool = False,
    ) -> None:
        """`early`: steps are handed out before their rows have arrived; see `arrive`. `shares`:
        a step begins with an exchange of rows, and later ones move after it; see `ahead`."""
        self._streams = streams
        self.last_mark = streams.mark(COMPUTE)
        """Where on the device the last step ended."""
        self.planner, self._rows, self._depth = planner, rows, depth
        self._movement, self._shake, self._early = tuple(movement), shake, early
        self._shares = shares
        self.run_step, self.failed = -1, False
        self._pipeline: Pipeline | None = None
        self._due: InFlight | None = None

    def steps(self, batches: Iterable[Batch]) -> Iterator[InFlight]:
        """Planned steps of `batches`; each must be run before the next is taken.

        Ends at the first rank's end. Raises what went wrong with the batches of some rank, on all
        ranks after the same step; what went wrong with the movement of rows on this one;
        PlanError while another stream is open or after a failed step.
        """
        if self.failed:
            raise PlanError("a step failed half-way: this model cannot go on; load a checkpoint")
        if self._pipeline is not None:
            raise PlanError("another stream of this model is open: end or close it first")
        pipeline = self._pipeline = Pipeline(
            self.planner, batches, self._depth, self._streams, self._movement, self._shake
        )
        try:
            while (flight := self._next(pipeline)) is not None:
                self._due = flight
                yield flight
                if self._due is not None:
                    raise PlanError(
                        f"step {flight.step} of the stream was not run: call train_step or "
                        "eval_step once for each step, before the next is taken"
                    )
        finally:
            self._end(pipeline)

    def _next(self, pipeline: Pipeline) -> InFlight | None:
        """The next step, its rows on the device where movement is overlapped."""
        queue = pipeline.queue
        try:
            flight = queue.take()
        except Exception:
            self.failed |= queue.left_alone or self.planner.alone
            raise
        if flight is not None:
            flight.free = self.last_mark
            if not self._movement:
                flight.after = self.last_mark
            last = flight.step if self._shares else None
            queue.release(self.run_step, self.last_mark, last)
            if not self._early:
                with self.whole():
                    queue.arrive(flight)
        return flight

    def arrive(self, flight: InFlight) -> None:
        """Wait for the rows of the step that was handed out last, inside `running`."""
        if self._pipeline is not None:
            self._pipeline.queue.arrive(flight)

    def ahead(self) -> None:
        """The exchange that a step begins with is done: later steps may move."""
        if self._pipeline is not None:
            self._pipeline.queue.release_rest()

    def settle(self, flight: InFlight) -> None:
        """Before the ranks' exchange of `flight`: wait for the fills that come before it."""
        pipeline = self._pipeline
        if pipeline is None or self.planner.link.world.size == 1:
            return
        started = time.perf_counter()
        waited = pipeline.queue.settle() or flight
        span = Span(WAIT, "training", waited.step, started, time.perf_counter())
        waited.waits.append(span)

    def quiet(self) -> None:
        """Between two steps: let no row move until the next step is taken; called by all ranks."""
        if self._pipeline is not None:
            with self.whole():
                self._pipeline.quiet()

    @contextmanager
    def running(self, flight: InFlight) -> Iterator[None]:
        """The time in which the step that was handed out last is run.

        Raises PlanError for any other step. An error inside is recorded for the other ranks,
        which wait for this one.
        """
        if flight is not self._due:
            raise PlanError(
                f"step {flight.step} is not due: run each step of the stream once, in its order"
            )
        self._due = None
        with self.whole():
            yield
        self._streams.after(COMPUTE, (flight.after,))  # rows may have come back on another stream
        self.run_step, self.last_mark = flight.step, self._streams.mark(COMPUTE)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What fails inside leaves the rows of no step; the other ranks hear of it."""
        try:
            yield
        except BaseException as error:
            self.failed = True
            world = self.planner.link.world
            record_failure(world.store, world.rank, error)
            raise

    def close(self) -> None:
        """End the open stream, if there is one; safe to call twice."""
        if self._pipeline is not None:
            self._end(self._pipeline)

    def _end(self, pipeline: Pipeline) -> None:
        """Stop the threads; forget what was planned beyond the last step that was run."""
        if self._pipeline is not pipeline:
            return
        world = self.planner.link.world
        limit = _FAILED_STOP_S if self.failed else min(world.timeout_s, _STOP_S)
        ended = self._stopped(pipeline, limit)
        self._pipeline = self._due = None
        if self.failed:
            return
        if not ended:
            self.failed = True
            log.warning("the planner did not end within %g s: the batches do not come", limit)
        elif self.planner.ingested != self.run_step + 1:
            rows = self._rows
            self.planner.restore(self.run_step, lambda group, slots: rows[group].held_rows(slots))

    def _stopped(self, pipeline: Pipeline, limit: float) -> bool:
        """Stop the threads of `pipeline`; whether they ended in time and all is whole."""
        try:
            return pipeline.stop(limit, orderly=not self.failed)
        except Exception as error:  # the movement of a step that nobody will run
            self.failed = True
            world = self.planner.link.world
            record_failure(world.store, world.rank, error)
            log.warning("moving rows failed: %s", error)
            return pipeline.stop(_FAILED_STOP_S, orderly=False)
