"""The planner's thread: planned steps ahead of training, at most so many of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator

from distcache.data.batch import Batch
from distcache.errors import PlanError
from distcache.pipeline.planning import PlannedStep, StreamPlanner

_POLL_S = 0.1
"""How often a waiting thread looks whether it should stop."""


class PlanningThread:
    """Runs a StreamPlanner's loop ahead of training, at most `depth` planned steps ahead."""

    def __init__(self, planner: StreamPlanner, batches: Iterable[Batch], depth: int) -> None:
        self._planner, self._batches = planner, batches
        self._queue: queue.Queue[PlannedStep | BaseException | None] = queue.Queue(max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distcache-planner", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[PlannedStep]:
        while True:
            began = time.perf_counter()
            item = self._take()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            item.seconds["wait"] = time.perf_counter() - began
            yield item

    def _take(self) -> PlannedStep | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    return PlanError("the planner's thread has ended without a word")

    def stop(self, timeout_s: float) -> bool:
        """Ask for one final exchange and wait for the thread; whether it ended in time.

        Called by all ranks after the same step; plans not yet taken are dropped.
        """
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for step in self._planner.planned(self._batches, self._stop.is_set):
                self._put(step)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: PlannedStep | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
