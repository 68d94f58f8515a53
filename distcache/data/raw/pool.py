"""Tasks on many processes: bounded, in order of submission, the earliest failure first."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any

from distcache.errors import MemoryTooSmallError

logger = logging.getLogger(__name__)

_held: IO[str] | None = None
"""A worker's lock, held until it ends."""


class Pool:
    """`workers` processes, started at the first task; with one worker, this process alone.

    They hold `lock` shared for as long as they live, so that who has it alone knows that none of
    them is left.
    """

    def __init__(self, workers: int, lock: Path | None = None) -> None:
        self.workers, self._lock = workers, lock
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        function: Callable[[Any], Any],
        tasks: Iterable[Any],
        at_once: int | None = None,
        on_end: Callable[[Any], None] = lambda task: None,
    ) -> Iterator[tuple[Any, Any]]:
        """(task, result) of each task as they finish.

        At most `at_once` tasks are in work or waiting, by default two a worker. After a failure
        no task is started, and of the failures that come to light the one of the earliest task is
        raised. `on_end` hears of a task at once when it is over, maybe in another thread.
        """
        if self.workers == 1:
            for task in tasks:
                try:
                    result = function(task)
                finally:
                    on_end(task)
                yield task, result
            return
        yield from self._spread(function, tasks, at_once or 2 * self.workers, on_end)

    def _spread(
        self,
        function: Callable[[Any], Any],
        tasks: Iterable[Any],
        at_once: int,
        on_end: Callable[[Any], None],
    ) -> Iterator[tuple[Any, Any]]:
        waiting: dict[Future, tuple[int, Any]] = {}
        failures: list[tuple[int, BaseException]] = []
        drawn, more = enumerate(tasks), True
        try:
            while more or waiting:
                while more and len(waiting) < at_once:
                    number, task = next(drawn, (-1, None))
                    more = number >= 0
                    if more:
                        future = self._submit(function, task)
                        future.add_done_callback(lambda _, task=task: on_end(task))
                        waiting[future] = number, task
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    number, task = waiting.pop(future)
                    error = future.exception()
                    if error is not None:
                        failures.append((number, error))
                        more = False
                    elif not failures:
                        yield task, future.result()
            if failures:
                raise _explained(min(failures, key=lambda failure: failure[0])[1])
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, function: Callable[[Any], Any], task: Any) -> Future:
        """A task's future; one that has failed already where a worker died since the last task."""
        try:
            return self._start().submit(function, task)
        except BrokenProcessPool as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed

    def _start(self) -> ProcessPoolExecutor:
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                self.workers, context, _start_worker, (os.getpid(), self._lock)
            )
        return self._executor


def _explained(error: BaseException) -> BaseException:
    """`error`, or what the death of a worker probably means."""
    if isinstance(error, BrokenProcessPool):
        return MemoryTooSmallError(
            "a worker process was killed, most likely for want of memory: give fewer workers "
            "(workers=...), and run the same command again to go on"
        )
    return error


def _start_worker(parent: int, lock: Path | None) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone."""
    global _held
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if lock is not None:
        _held = lock.open("a")
        fcntl.flock(_held, fcntl.LOCK_SH)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
