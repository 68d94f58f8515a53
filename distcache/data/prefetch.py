"""Batches drawn and loaded on a thread of their own, a few ahead of the step that takes them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator

from distcache.data.batch import Batch
from distcache.errors import DataError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
"""How often a waiting thread looks whether it should stop."""
_STOP_S = 60.0
"""Longest wait for the thread to finish the batch that it is drawing when it is stopped."""


class Prefetch:
    """Iterates over `batches`, loaded, at most `depth` ahead; what goes wrong is raised in order.

    After each batch `load_s` is what drawing and loading it took (seconds, beside the steps), and
    `wait_s` how long the caller waited for it. A context manager: leaving it stops the thread,
    and drops batches drawn ahead.
    """

    def __init__(self, batches: Iterable[Batch], depth: int = 2) -> None:
        self._batches = batches
        self._queue: queue.Queue[tuple[Batch, float] | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distcache-load", daemon=True)
        self.load_s = self.wait_s = 0.0

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            logger.warning("the thread that loads batches did not end within %g s", _STOP_S)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            item = self._take()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            batch, self.load_s = item
            self.wait_s = time.perf_counter() - began
            yield batch

    def _take(self) -> tuple[Batch, float] | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    raise DataError("the thread that loads batches has ended") from None

    def _run(self) -> None:
        try:
            began = time.perf_counter()
            for batch in self._batches:
                whole = batch.loaded()
                self._put((whole, time.perf_counter() - began))
                if self._stop.is_set():
                    return
                began = time.perf_counter()
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: tuple[Batch, float] | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
