"""Threads that plan the parts of a home side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Threads:
    """Runs the parts of a home on `count` threads, this one among them.

    They take calls from one queue: those of a pool take several times as long to begin.
    """

    def __init__(self, count: int = 1) -> None:
        self.count, self._asked = count, SimpleQueue[Any]()
        how: dict[str, Any] = {"target": self._work, "name": "distcache-part", "daemon": True}
        self._others = [Thread(**how) for _ in range(count - 1)]
        for thread in self._others:
            thread.start()

    def _work(self) -> None:
        """Calls, until there is None, with what takes the place of each, its result and error."""
        while (asked := self._asked.get()) is not None:
            told, place, call, of = asked
            try:
                told.put((place, call(*of), None))
            except BaseException as error:
                told.put((place, None, error))
            del asked, told, call, of  # or what they hold would live until the next call

    def ranges(self, pieces: int) -> list[tuple[int, int]]:
        """What each thread gets of so many pieces: from which on, up to which."""
        ends = [pieces * n // self.count for n in range(self.count + 1)]
        return [(first, last) for first, last in pairwise(ends) if first < last]

    def each(self, call: Callable[..., object], arguments: Sequence[tuple]) -> list:
        """What `call` returns for each of `arguments`, all at the same time."""
        if not self._others or len(arguments) < 2:
            return [call(*of) for of in arguments]
        told = SimpleQueue[Any]()
        for place, of in enumerate(arguments[1:]):
            self._asked.put((told, place, call, of))
        try:
            own = call(*arguments[0])
        finally:  # whatever comes of this: they work on what this thread has
            others = sorted([told.get() for _ in arguments[1:]], key=itemgetter(0))
        for _, _, error in others:
            if error is not None:
                raise error
        return [own, *(result for _, result, _ in others)]

    def close(self) -> None:
        """End the threads."""
        for _ in self._others:
            self._asked.put(None)
        for thread in self._others:
            thread.join()
        self._others = []


ALONE = Threads()
"""The thread that calls."""
