"""Steps on their way between three threads: planned, then moved, then run, always in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from distcache.comm.failure import failure_of_others, record_failure
from distcache.data.batch import Batch
from distcache.engine.movement import GroupRows
from distcache.engine.planning import StreamPlanner
from distcache.engine.step import WAIT, InFlight, Shaker, Span, Stage, run_stages
from distcache.errors import DistcacheError, PeerError, PlanError
from distcache.streams import COMPUTE, Mark, Streams

# -----------------------------------------------------------------------------
# Steps on their way between three threads: planned, then moved, then run, always in order.
#
# The planner's thread puts them in, the movement's thread brings their rows to the device once
# `apply` of the step that they must follow is done, and the training loop takes them out.

_POLL_S = 0.1
"""How often a waiting thread looks whether the others are alive."""

_PATIENCE_S = 3.0
"""How long the loop waits before it looks whether another rank has failed. An error that all ranks
share comes through the planner, which is faster."""

_KEPT = 64
"""Marks of applied steps that are kept; an older step is waited for by a later one's."""

_ALL = 2**62
"""`_last` while every step that is released may move."""

_HELD = -(2**62)
"""`released` while nothing may start to move."""


class StepQueue:
    """At most `depth` planned steps wait for their movement, or for the loop where `moves` is
    False (then the loop moves them itself).

    Movement of a step may start once the step of its `move_after` is `released`; no more than
    P + 1 steps are so far ahead of the loop, so the queue is bounded on that side too.
    """

    def __init__(self, depth: int, moves: bool, prefetch: int) -> None:
        """`prefetch`: P; a step s may move after step s - P - 1 at the earliest."""
        self._depth, self._moves = max(1, depth), moves
        self._change = threading.Condition()
        self._known: deque[InFlight] = deque()
        self._unmoved: deque[InFlight] = deque()
        self._released, self._moving, self._wanted = _HELD, False, False
        self._last = _ALL
        self._prefetch, self._coming = prefetch, _HELD
        self._applied: deque[tuple[int, Mark]] = deque(maxlen=_KEPT)
        self._ended, self._error = False, None
        self._broken: BaseException | None = None
        self.stopping = False
        self._loop = threading.current_thread()
        self.alive: Callable[[], bool] = lambda: True
        self.others: Callable[[], None] = lambda: None
        """Raises PeerError once another rank has failed; asked in the loop's long waits."""
        self.left_alone = False
        """Whether it has: what ended the wait is no error that all ranks share."""

    # --- the planner's thread ---------------------------------------------------------------

    def put(self, flight: InFlight) -> None:
        """Hand in a planned step; waits for room, and drops it once stopping."""
        with self._change:
            self._until(lambda: self._has_room() or self.stopping)
            if not self.stopping:
                self._known.append(flight)
                self._unmoved.append(flight)
                self._coming = flight.step + 1
                self._change.notify_all()

    def _has_room(self) -> bool:
        if self._moves:
            return len(self._unmoved) < self._depth or (self._wanted and not self._known)
        return len(self._known) < self._depth

    def end(self, error: BaseException | None, alone: bool = False) -> None:
        """No more steps come: the stream has ended, or `error` is what follows the last one.

        `alone`: on this rank. Others move the rows of the next step before they exchange those of
        the last one, so this rank may not exchange them at all.
        """
        with self._change:
            self._ended, self._error = True, error
            self._broken = error if alone else self._broken
            self._change.notify_all()

    # --- the movement's thread --------------------------------------------------------------

    def next_unmoved(self) -> InFlight | None:
        """Wait for the next step that may move; None when none will."""

        def over() -> bool:
            return self.stopping or (self._ended and not self._unmoved)

        with self._change:
            self._until(lambda: over() or self._may_move())
            if over():
                return None
            self._moving = True
            flight = self._unmoved[0]
            flight.after = self._mark_of(flight.move_after)
            return flight

    def _mark_of(self, step: int) -> Mark:
        """Where on the device the first step from `step` on that is known was applied."""
        return next((mark for done, mark in self._applied if done >= step), Mark())

    def _may_move(self) -> bool:
        if not self._unmoved or self._unmoved[0].step > self._last:
            return False
        return self._unmoved[0].move_after <= self._released

    def moved(self, flight: InFlight) -> None:
        """The rows of the step that `next_unmoved` gave are on the device."""
        with self._change:
            self._unmoved.popleft()
            flight.moved, self._moving = True, False
            self._change.notify_all()

    def broke(self, error: BaseException) -> None:
        """The movement has failed, on this rank alone: nothing moves any more."""
        with self._change:
            self._moving, self._broken = False, error
            self._change.notify_all()

    # --- the training loop ------------------------------------------------------------------

    def take(self) -> InFlight | None:
        """The next planned step, moved or not; None at the end. Raises what ended the stream."""
        started = time.perf_counter()
        with self._change:
            self._wanted = True
            self._change.notify_all()
            self._until(lambda: self._known or self._ended or self._broken)
            self._wanted = False
            if not self._known:
                self._raise_if_broken()
                if self._error is not None:
                    raise self._error
                return None
            flight = self._known.popleft()
            self._change.notify_all()
        self._waited(flight, started)
        return flight

    def release(self, done: int, mark: Mark = Mark(), last: int | None = None) -> None:  # noqa: B008
        """Let move what may now; `done`: the last step that was applied, and `mark`: where on the
        device it was; `last`: of the steps that may move before `release_rest` is called (None:
        all). Nothing to do where the loop moves rows itself."""
        if self._moves:
            with self._change:
                self._released = done
                self._last = _ALL if last is None else last
                self._applied.append((done, mark))
                self._change.notify_all()

    def release_rest(self) -> None:
        """Let the steps move that `release` held back by their number."""
        with self._change:
            self._last = _ALL
            self._change.notify_all()

    def arrive(self, flight: InFlight) -> None:
        """Wait for the rows of the step just taken, for which all is released."""
        if not self._moves:
            return
        started = time.perf_counter()
        with self._change:
            self._until(lambda: flight.moved or self._broken or self._is_stopped())
            self._raise_if_broken()
            if not flight.moved:
                raise PlanError(f"the look-ahead was stopped before step {flight.step}")
        self._waited(flight, started)

    def _is_stopped(self) -> bool:
        return self.stopping and not self._moving

    def settle(self, deadline: float | None = None) -> InFlight | None:
        """Wait until all that was released has moved; the step that was waited for, if any.

        What has moved then is the same on every rank, whatever its threads' pace. Raises
        TimeoutError after `deadline` (of `time.monotonic`), where there is one.
        """
        if not self._moves:
            return None
        last: InFlight | None = None
        began = time.monotonic()
        with self._change:
            while not self._is_settled():
                last = self._unmoved[0] if self._unmoved else last
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError("rows that may move do not")
                self._wait(began)
            self._raise_if_broken()
        return last

    def _is_settled(self) -> bool:
        if self._broken is not None or self.stopping or self._released == _HELD:
            return not self._moving
        if self._moving or self._may_move():
            return False
        # Of steps whose plans are not there yet: none may move that is more than P + 1 ahead.
        return (
            bool(self._unmoved)
            or self._ended
            or self._coming > min(self._released + self._prefetch + 1, self._last)
        )

    def hold(self) -> None:
        """Let nothing start to move until the next step arrives; waits for what is moving."""
        with self._change:
            self._released = _HELD
            self._until(lambda: not self._moving)
            self._raise_if_broken()

    def stop(self) -> None:
        """No more is planned or moved; what is moving ends first, in its own thread."""
        with self._change:
            self.stopping = True
            self._change.notify_all()

    # --- waits ------------------------------------------------------------------------------

    def _until(self, reached: Callable[[], object]) -> None:
        began = time.monotonic()
        while not reached():
            self._wait(began)

    def _wait(self, began: float) -> None:
        """Wait for a change, in a wait that `began` then.

        Raises PlanError when a thread has gone without a word, and PeerError in a long wait when
        another rank has failed: its planner will not come, and this rank's may be waiting for data.
        """
        if self._change.wait(_POLL_S):
            return
        if not (self._ended or self.stopping or self.alive()):
            raise PlanError("a thread of the look-ahead pipeline has ended without a word")
        here = threading.current_thread() is self._loop
        if here and not self.stopping and time.monotonic() - began > _PATIENCE_S:
            try:
                self.others()
            except BaseException:
                self.left_alone = True
                raise

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _waited(self, flight: InFlight, started: float) -> None:
        flight.waits.append(Span(WAIT, "training", flight.step, started, time.perf_counter()))


# -----------------------------------------------------------------------------
# The two threads beside training: one plans steps ahead, one moves their rows ahead.

DEPTH = 2
"""Planned steps that wait for their movement: slack between the threads."""

_ABANDON_S = 1.0
"""Longest wait for threads whose start was interrupted."""


class Pipeline:
    """Plans `batches` on a thread of its own and, where `movement` has stages, runs these on
    another; the loop takes the steps from `queue`.

    Called by all ranks; without movement at most `depth` steps are planned ahead.
    """

    def __init__(
        self,
        planner: StreamPlanner,
        batches: Iterable[Batch],
        depth: int,
        streams: Streams,
        movement: Sequence[Stage] = (),
        shake: Shaker | None = None,
    ) -> None:
        self._streams = streams
        self._planner, self._batches = planner, batches
        self._movement, self._shake = tuple(movement), shake
        self._settled = True
        prefetch = planner.settings.prefetch
        self.queue = StepQueue(DEPTH if movement else depth, bool(movement), prefetch)
        self.queue.alive = lambda: self._plans.is_alive()
        self.queue.others = self._raise_for_others
        self._plans = threading.Thread(target=self._plan, name="distcache-planner", daemon=True)
        self._moves = threading.Thread(target=self._move, name="distcache-movement", daemon=True)
        try:
            self._plans.start()
            if movement:
                self._moves.start()
        except BaseException:  # Ctrl-C, or no thread to be had: nobody will know this pipeline
            self._abandon()
            raise

    def _abandon(self) -> None:
        """End what has started, or is about to, and give it time for that."""
        self.queue.stop()
        deadline = time.monotonic() + _ABANDON_S
        mine = {self._plans, self._moves}
        while mine.intersection(threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def runs_here(self) -> bool:
        """Whether the caller is one of the pipeline's own threads."""
        return threading.current_thread() in (self._plans, self._moves)

    @property
    def ended(self) -> bool:
        """Whether neither thread runs, and what they moved is the same on all ranks."""
        return self._settled and not (self._plans.is_alive() or self._moves.is_alive())

    def _raise_for_others(self) -> None:
        world = self._planner.link.world
        failure = failure_of_others(world.store, world.rank) if world.size > 1 else None
        if failure is not None:
            raise PeerError(failure.message)

    def quiet(self) -> None:
        """Let no row move until the next step arrives; called by all ranks after the same step.

        What has moved by then is the same on all ranks.
        """
        if self._planner.link.world.size > 1:
            self.queue.settle()
        self.queue.hold()

    def stop(self, timeout_s: float, orderly: bool = True) -> bool:
        """End both threads, with one final exchange of the planners; whether they ended in time.

        Called by all ranks after the same step. Steps not yet run are dropped; `orderly`: those
        that were released have moved before, on all ranks. Raises what went wrong with moving
        them; the threads are told to end all the same.
        """
        deadline = time.monotonic() + timeout_s
        threads = [self._plans, self._moves] if self._movement else [self._plans]
        if self.runs_here():
            self.queue.stop()
            return False
        try:
            if orderly and self._planner.link.world.size > 1 and not self.queue.stopping:
                self._settled = False  # for good, if this is interrupted
                self.queue.settle(deadline)
                self._settled = True
        except TimeoutError:
            return False
        finally:
            self.queue.stop()
        for thread in reversed(threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.ended

    def _plan(self) -> None:
        queue = self.queue
        try:
            for planned in self._planner.planned(self._batches, lambda: queue.stopping):
                self._pause()
                queue.put(InFlight(planned))
            queue.end(None)
        except BaseException as error:
            if not isinstance(error, DistcacheError):
                error.add_note(f"on the planner's thread, {self._planner.ingested} steps read")
            queue.end(error, self._planner.alone)

    def _move(self) -> None:
        queue, streams = self.queue, self._streams
        try:
            streams.bind()
            while (flight := queue.next_unmoved()) is not None:
                run_stages(self._movement, flight, "movement", streams, self._shake)
                self._pause()
                queue.moved(flight)
        except BaseException as error:
            queue.broke(error)

    def _pause(self) -> None:
        if self._shake is not None:
            self._shake()


# -----------------------------------------------------------------------------
# A model's planned steps: one stream at a time, every step run once and in order.
#
# The planner and the movement run ahead of training. When a stream ends with steps that were
# planned
# but not run, the planner is brought back to what the device holds.

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
