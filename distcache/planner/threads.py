"""Threads that plan the parts of a home side by side, and ask for a step ahead."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from operator import itemgetter
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

LEAST_S = 2.5e-4
"""Work that is worth a call of its own, seconds: to hand one to another thread took some 0.04 ms of
two shared cores, and the interpreter, which the thread that trains wants too."""

_LEAVING_S = 1.0
"""How long closing waits for a thread; one may be at something that does not come to an end."""


class Shared:
    """Calls that threads share: each that comes makes the next one that nobody has begun."""

    def __init__(self, call: Callable[..., Any], arguments: Sequence[tuple]) -> None:
        self._call, self._left = call, deque(enumerate(arguments))
        self._count, self._told = len(arguments), SimpleQueue[Any]()

    def work(self) -> None:
        """Make calls until all are begun."""
        with suppress(IndexError):  # no more are left
            while True:
                place, of = self._left.popleft()
                try:
                    told = place, self._call(*of), None
                except BaseException as error:
                    told = place, None, error
                self._told.put(told)
                del told  # which an error's traceback would hold, and be held by

    def results(self) -> list:
        """What the calls return, once all are over: they work on what the caller has. Raises what
        the first one that failed did."""
        told = sorted([self._told.get() for _ in range(self._count)], key=itemgetter(0))
        for _, _, error in told:
            if error is not None:
                raise error
        return [result for _, result, _ in told]


class Threads:
    """Runs the parts of a home on `count` threads, this one among them; the others have a `name`.

    Each of the others takes calls from a queue of its own: those of a pool take several times as
    long to begin.
    """

    least_s = LEAST_S
    """Shorter calls are not made for other threads."""

    def __init__(self, count: int = 1, name: str = "distcache-part") -> None:
        self.count = count
        queues = [SimpleQueue[Any]() for _ in range(count - 1)]
        how: dict[str, Any] = {"target": _work, "name": name, "daemon": True}
        self._threads = [Thread(args=(asked,), **how) for asked in queues]
        for thread in self._threads:
            thread.start()
        self._others = list(zip(self._threads, queues, strict=True))
        """Those that are there for calls, until they are closed."""
        self._end = weakref.finalize(self, _end, self._threads, queues)  # where nobody closes them

    def calls(self, most: int, work_s: float) -> int:
        """Into how many calls, `most` of them, to divide work of so many seconds: where there is
        enough of it several for each thread, of which those that are done first make more."""
        worth = min(most, int(work_s / self.least_s)) if self.count > 1 else 1
        return max(1, worth - worth % self.count if worth > self.count else worth)

    def ranges(self, pieces: int, work_s: float) -> list[tuple[int, int]]:
        """What each call gets of so many pieces, see `calls`: from which on, up to which."""
        calls = self.calls(pieces, work_s)
        ends = [pieces * n // calls for n in range(calls + 1)]
        return list(pairwise(ends))

    def each(self, call: Callable[..., object], arguments: Sequence[tuple]) -> list:
        """What `call` returns for each of `arguments`, all at the same time."""
        if not self._others or len(arguments) < 2:
            return [call(*of) for of in arguments]
        shared, here = Shared(call, arguments), current_thread()
        others = [asked for thread, asked in self._others if thread is not here]
        wanted = len(arguments) - 1
        # The first may be at what was begun, and what it shares itself goes to those next to it.
        for asked in others[-wanted:] if len(others) == len(self._others) else others[:wanted]:
            asked.put(shared)
        shared.work()
        return shared.results()

    def begin(self, call: Callable[..., Any], *of: Any) -> Callable[[], Any]:
        """What returns the result of a call. Another thread makes it from now on, one for all of
        these, in their order; where there is none, it is made when its result is wanted."""
        for _, asked in self._others[:1]:
            shared = Shared(call, [of])
            asked.put(shared)
            return lambda: shared.results()[0]
        return partial(call, *of)

    def settle(self) -> None:
        """Wait until all that was begun is over."""
        self.begin(int)()

    def run_here(self) -> bool:
        """Whether the caller is one of the others."""
        return current_thread() in self._threads

    def close(self) -> None:
        """End the threads, but for one that is still at a call after a second."""
        self._others = []
        self._end()


def _end(threads: Sequence[Thread], queues: Sequence[SimpleQueue[Any]]) -> None:
    """End the threads of these queues, but for one that is still at a call after a second."""
    for asked in queues:
        asked.put(None)
    for thread in threads:
        if thread is not current_thread():
            thread.join(_LEAVING_S)


def _work(asked: SimpleQueue[Shared | None]) -> None:
    """What comes, until there is None."""
    while (shared := asked.get()) is not None:
        shared.work()
        del shared  # or what its calls hold would live until the next


ALONE = Threads()
"""The thread that calls."""
