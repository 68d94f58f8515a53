"""The two threads beside training: one plans steps ahead, one moves their rows ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from distcache.comm.failure import failure_of_others
from distcache.data.batch import Batch
from distcache.errors import DistcacheError, PeerError
from distcache.pipeline.planning import StreamPlanner
from distcache.pipeline.schedule import InFlight, Stage, run_stages
from distcache.pipeline.shake import Shaker
from distcache.pipeline.step_queue import StepQueue
from distcache.streams import Streams

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
