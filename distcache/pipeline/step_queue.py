"""Steps on their way between three threads: planned, then moved, then run, always in order.

The planner's thread puts them in, the movement's thread brings their rows to the device once
`apply` of the step that they must follow is done, and the training loop takes them out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from distcache.errors import PlanError
from distcache.pipeline.clock import WAIT, Span
from distcache.pipeline.schedule import InFlight
from distcache.streams import Mark

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
