"""Steps on their way between three threads: planned, then moved, then run, always in order."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from distcache.comm.rendezvous import failure_of_others
from distcache.data.batch import Batch
from distcache.engine.movement import Mover
from distcache.engine.planning import StreamPlanner
from distcache.engine.step import MOVEMENT_LANE, Flight, Shake
from distcache.errors import DistcacheError, PeerError, PlanError
from distcache.streams import Mark, Streams

_POLL_S = 0.1
"""How often a waiting thread looks whether the others are alive."""

_PATIENCE_S = 3.0
"""How long the loop waits before it looks whether another rank has failed. An error that all ranks
share comes through the planner, which is faster."""

_KEPT = 64
"""Marks of applied steps that are kept; an older step is waited for by a later one's."""

_ALL, _HELD = 2**62, -(2**62)
"""`_last` while every step that is released may move; `_released` while nothing may start to."""

_HELD_ON_TO = 2
"""Steps that are over and yet kept: training may still have the batch of one."""

DEPTH = 2
"""Planned steps that wait for their movement: slack between the threads."""

_ABANDON_S = 1.0
"""Longest wait for threads whose start was interrupted."""

STOP_S = 60.0
"""Longest wait for threads to end: for the planner's last exchange with the other ranks, or for a
batch that one reads, seconds."""

SWITCH_S = 5e-5
"""How long a thread has the interpreter while another wants it, beside a GPU: in Python's own 5 ms,
for which the loop that launches kernels may stand still at each call, a GPU does two steps."""


_turns, _found = threading.Lock(), list[float]()
"""Of each thread within `quick_switches`, the interval that the first has found."""


@contextmanager
def quick_switches() -> Iterator[None]:
    """Within it threads take turns after `SWITCH_S`, in the whole process; the last of all threads
    that leaves restores what the first has found."""
    with _turns:
        _found.append(_found[0] if _found else sys.getswitchinterval())
        sys.setswitchinterval(min(_found[0], SWITCH_S))
    try:
        yield
    finally:
        with _turns:
            before = _found.pop()
            if not _found:
                sys.setswitchinterval(before)


class StepStream:
    """The planned steps of a stream of batches, in order; made by all ranks for batches alike.

    One thread plans `batches` and one moves rows to the device (`mover`; None: the training thread
    moves a step's rows itself). The training thread takes the steps out. A step may move once the
    step of its `move_after` is `release`d; no more than P + 1 steps are so far ahead of training,
    so the queue is bounded on that side too. `depth`: steps planned ahead where nothing moves them.
    """

    def __init__(
        self,
        planner: StreamPlanner,
        batches: Iterable[Batch],
        depth: int,
        streams: Streams,
        mover: Mover | None,
        shake: Shake,
    ) -> None:
        self._planner, self._batches, self._streams = planner, batches, streams
        self._world = planner.link.world
        self._mover, self._moves, self._shake = mover, mover is not None, shake
        self._depth, self._prefetch = DEPTH if mover else max(1, depth), planner.settings.prefetch
        # One lock, and a condition for each thread, so that nobody wakes up for another's news.
        self._lock = threading.Lock()
        self._room, self._work, self._news = (threading.Condition(self._lock) for _ in range(3))
        # Planned steps: those that training has not taken, and those that have not moved.
        self._known: deque[Flight] = deque()
        self._unmoved: deque[Flight] = deque()
        self._released, self._last = _HELD, _ALL
        self._applied: deque[tuple[int, Mark]] = deque(maxlen=_KEPT)
        self._over: deque[Flight] = deque()
        """Steps that were run, of which `forget` tells."""
        self._issuing, self._moving, self._wanted = False, False, False
        self._coming = _HELD
        """The step that the planner hands in next, once it has handed in one."""
        self._ended = False
        self._error: BaseException | None = None
        self._broken: BaseException | None = None
        self.stopping = False
        """Whether the threads were told to end."""
        self._settled, self._left_alone = True, False
        self._loop = threading.current_thread()
        self._plans = self._thread(self._plan, "distcache-planner")
        self._movement = self._thread(self._move, "distcache-movement")
        try:
            self._plans.start()
            if self._moves:
                self._movement.start()
        except BaseException:  # Ctrl-C, or no thread to be had: nobody will know this stream
            self._abandon()
            raise

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        """A thread beside training that does `work`."""

        def run() -> None:
            with quick_switches() if self._streams.asynchronous else nullcontext():
                work()

        return threading.Thread(target=run, name=name, daemon=True)

    def _abandon(self) -> None:
        """End what has started, or is about to, and give it time for that."""
        self.tell()
        deadline = time.monotonic() + _ABANDON_S
        mine = {self._plans, self._movement}
        while mine.intersection(threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)

    # --- what it is at ----------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether neither thread runs, and what they moved is the same on all ranks."""
        return self._settled and not (self._plans.is_alive() or self._movement.is_alive())

    @property
    def alone(self) -> bool:
        """Whether what ended it is no error that all ranks share."""
        return self._left_alone or self._planner.alone

    def runs_here(self) -> bool:
        """Whether the caller is one of its own threads."""
        own = threading.current_thread() in (self._plans, self._movement)
        return own or self._planner.runs_here()

    # --- the planner's thread ---------------------------------------------------------------

    def _plan(self) -> None:
        try:
            for flight in self._planner.planned(self._batches, lambda: self.stopping):
                self._shake()
                flight.stream = self
                self._put(flight)
        except BaseException as error:  # which follows the last step
            self._error = error
            if not isinstance(error, DistcacheError):
                error.add_note(f"on the planner's thread, {self._planner.ingested} steps read")
        with self._lock:  # no more steps come
            self._ended = True
            if self._planner.alone:
                # Others move the rows of the next step before they exchange those of the last one,
                # so this rank may not exchange them at all.
                self._broken = self._error
            self._tell_all()
        self._planner.settle()  # no batch is being read once this thread has ended

    def _put(self, flight: Flight) -> None:
        """Hand in a planned step; waits for room, and drops it once stopping."""
        with self._lock:
            while not (self.stopping or self._has_room()):
                self._wait(self._room)
            if not self.stopping:
                self._known.append(flight)
                if self._moves:
                    self._unmoved.append(flight)
                self._coming = flight.step + 1
                self._work.notify()
                self._news.notify()

    def _has_room(self) -> bool:
        if self._moves:
            return len(self._unmoved) < self._depth or (self._wanted and not self._known)
        return len(self._known) < self._depth

    # --- the movement's thread --------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def _move(self) -> None:
        try:
            self._streams.bind()
            while self._mover is not None and (flight := self._next_unmoved()) is not None:
                how = flight, MOVEMENT_LANE, self._shake
                self._mover.prepare(*how)
                if not self._let_go(flight):
                    return
                self._mover.issue(*how)
                self._shake()
                with self._lock:  # the ranks' order is fixed, and the device will have its rows
                    self._unmoved.popleft()
                    self._issuing = False
                    self._room.notify()
                    self._news.notify()
                self._mover.land(*how)
                self._shake()
                with self._lock:
                    flight.moved, self._moving = True, False
                    self._news.notify()
                with suppress(IndexError):  # training may let go of all meanwhile
                    while len(self._over) > _HELD_ON_TO:
                        self._over.popleft()
        except BaseException as error:
            with self._lock:  # on this rank alone: nothing moves any more
                self._issuing, self._moving, self._broken = False, False, error
                self._tell_all()

    def _next_unmoved(self) -> Flight | None:
        """Wait for the next planned step; None when none will come."""
        with self._lock:
            while not (self._unmoved or self.stopping or self._ended):
                self._wait(self._work)
            return self._unmoved[0] if self._unmoved and not self.stopping else None

    def _let_go(self, flight: Flight) -> bool:
        """Wait until the step that is next may move; False when it will not."""
        with self._lock:
            while not (self._may_move() or self.stopping):
                self._wait(self._work)
            if self.stopping:
                return False
            self._issuing = self._moving = True
            for done, mark in self._applied:  # of the steps from move_after on, the first known
                if done >= flight.move_after:
                    flight.after = mark
                    break
            return True

    def _may_move(self) -> bool:
        if not self._unmoved or self._unmoved[0].step > self._last:
            return False
        return self._unmoved[0].move_after <= self._released

    # --- the training loop ------------------------------------------------------------------

    def __iter__(self) -> StepStream:
        return self

    def __next__(self) -> Flight:
        """The next planned step, moved or not. Raises what ended the stream."""
        started = time.perf_counter()
        with self._lock:
            if not self._known:
                self._wanted = True
                self._room.notify()
                began = time.monotonic()
                while not (self._known or self._ended or self._broken):
                    self._wait(self._news, began)
                self._wanted = False
            if not self._known:
                self._raise_if_broken()
                if self._error is not None:
                    raise self._error
                raise StopIteration
            flight = self._known.popleft()
            if not self._moves:
                self._room.notify()
        flight.waited(started)
        return flight

    def release(self, done: int, mark: Mark = None, last: int | None = None) -> None:
        """Let move what may now; `done`: the last step that was applied, and `mark`: where on the
        device it was; `last`: of the steps that may move before `release_rest` is called (None:
        all). Nothing to do where the loop moves rows itself."""
        if self._moves:
            with self._lock:
                self._released = done
                self._last = _ALL if last is None else last
                self._applied.append((done, mark))
                self._work.notify()

    def forget(self, flight: Flight) -> None:
        """A step is over, and training lets go of it: where movement has more to do, it gives the
        step's memory back, which took a sixth of training's own work."""
        if self._moves and self._unmoved and not self.stopping:
            self._over.append(flight)

    def release_rest(self) -> None:
        """Let the steps move that `release` held back by their number."""
        with self._lock:
            self._last = _ALL
            self._work.notify()

    def arrive(self, flight: Flight) -> None:
        """Wait for the rows of the step just taken, for which all is released."""
        if not self._moves or (flight.moved and self._broken is None):
            return
        started = time.perf_counter()
        with self._lock:
            began = time.monotonic()
            while not (flight.moved or self._broken or (self.stopping and not self._moving)):
                self._wait(self._news, began)
            self._raise_if_broken()
            if not flight.moved:
                raise PlanError(f"the look-ahead was stopped before step {flight.step}")
        flight.waited(started)

    def settle(self, deadline: float | None = None) -> Flight | None:
        """Wait until the movement of all that was released is issued; the step that was waited
        for, if any.

        What is issued then is the same on every rank, whatever its threads' pace; one rank alone
        has nobody to agree with. Rows that leave may be on their way to the store. Raises
        TimeoutError after `deadline` (of `time.monotonic`), where there is one.
        """
        if not self._moves or self._world.size == 1:
            return None
        last: Flight | None = None
        began = time.monotonic()
        with self._lock:
            while not self._is_settled():
                last = self._unmoved[0] if self._unmoved else last
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError("rows that may move do not")
                self._wait(self._news, began)
            self._raise_if_broken()
        return last

    def _is_settled(self) -> bool:
        if self._broken is not None or self.stopping or self._released == _HELD:
            return not self._moving
        if self._issuing or self._may_move():
            return False
        # Of steps whose plans are not there yet: none may move that is more than P + 1 ahead.
        return (
            bool(self._unmoved)
            or self._ended
            or self._coming > min(self._released + self._prefetch + 1, self._last)
        )

    def quiet(self) -> None:
        """Let no row move until the next step arrives; called by all ranks after the same step.

        What has moved by then is the same on all ranks.
        """
        self.settle()
        with self._lock:
            self._released = _HELD
            began = time.monotonic()
            while self._moving:
                self._wait(self._news, began)
            self._raise_if_broken()

    def tell(self) -> None:
        """Tell the threads to end: no more is planned or moved; what is moving ends first."""
        with self._lock:
            self.stopping = True
            self._tell_all()
        self._over.clear()

    def _tell_all(self) -> None:
        for condition in (self._room, self._work, self._news):
            condition.notify_all()

    # --- waits ------------------------------------------------------------------------------

    def _wait(self, on: threading.Condition, began: float = math.inf) -> None:
        """Wait for a change that `on` tells of, in a wait that `began` then.

        Raises PlanError when a thread has gone without a word, and PeerError in a long wait when
        another rank has failed: its planner will not come, and this rank's may be waiting for data.
        """
        if on.wait(_POLL_S):
            return
        if not (self._ended or self.stopping or self._plans.is_alive()):
            raise PlanError("a thread of the look-ahead pipeline has ended without a word")
        here = threading.current_thread() is self._loop
        if here and not self.stopping and time.monotonic() - began > _PATIENCE_S:
            world = self._world
            failure = failure_of_others(world.store, world.rank) if world.size > 1 else None
            if failure is not None:
                self._left_alone = True
                raise PeerError(failure.message)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    # --- the end ----------------------------------------------------------------------------

    def stop(self, timeout_s: float, orderly: bool = True) -> bool:
        """End both threads, with one final exchange of the planners; whether they ended in time.

        Called by all ranks after the same step. Steps not yet run are dropped; `orderly`: those
        that were released have moved before, on all ranks. Raises what went wrong with moving
        them; the threads are told to end all the same.
        """
        deadline = time.monotonic() + timeout_s
        if self.runs_here():
            self.tell()
            return False
        try:
            if orderly and not self.stopping:
                self._settled = False  # for good, if this is interrupted
                self.settle(deadline)
                self._settled = True
        except TimeoutError:
            return False
        finally:
            self.tell()
        return self._end_by(deadline)

    def has_ended(self) -> bool:
        """Whether it has `ended`; where all its steps are taken and moved, threads get time to, for
        one may still read a batch."""
        with self._lock:
            over = self._ended and not (self._known or self._unmoved)
        limit_s = min(self._world.timeout_s, STOP_S)
        return self.ended or (over and self._end_by(time.monotonic() + limit_s))

    def _end_by(self, deadline: float) -> bool:
        """Wait until then for the threads to end; whether they have."""
        for thread in (self._movement, self._plans) if self._moves else (self._plans,):
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.ended
