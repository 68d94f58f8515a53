"""Behind a look-ahead: the batches that its planner has read, and the threads ahead.

Both are known to the thread, so neither knows the look-ahead: dropping that ends the thread.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.comm.failure import record_failure
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.embedding.ids import IdReader, ReadIds
from distcache.embedding.micro import as_batch
from distcache.errors import PeerError
from distcache.pipeline.planning import StreamPlanner
from distcache.pipeline.schedule import InFlight, Stage
from distcache.pipeline.threads import Pipeline
from distcache.streams import COMPUTE, Streams

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 60.0
"""Longest wait for the planner's last exchange with the other ranks, seconds."""

LEAVING_S = 5.0
"""Longest wait for threads whose steps are of no use, seconds: at the interpreter's end, where they
may be waiting for other ranks, which look for this one's failure every second or after three; and
for a look-ahead that nobody holds, which ranks that leave theirs at the same step do in turn."""


class Ahead(Generic[T]):
    """The batches of one plan, kept until the step after it is open."""

    def __init__(self, position: int, batches: list[T], reads: list[ReadIds]) -> None:
        self.position, self.batches, self.reads = position, batches, reads


class Source(Generic[T]):
    """The user's batches as the planner reads them, from its thread; can go back to kept ones."""

    def __init__(
        self,
        batches: Iterable[T],
        reader: IdReader,
        find: Callable[[T], KeyedJaggedTensor],
        accumulate: int,
    ) -> None:
        self._batches, self._iterator = batches, None
        self._reader, self._find, self._accumulate = reader, find, accumulate
        self._next = 0
        self.kept: dict[int, Ahead[T]] = {}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ahead = self.kept.get(self._next)
        if ahead is None:
            if self._iterator is None:
                self._iterator = iter(self._batches)
            batches = list(itertools.islice(self._iterator, self._accumulate))
            if not batches:
                raise StopIteration
            reads = [self._reader.read(self._find(batch)) for batch in batches]
            ahead = self.kept[self._next] = Ahead(self._next, batches, reads)
        self._next += 1
        return as_batch(ahead.reads, ahead.position)

    def go_back(self, position: int) -> None:
        """Give the batches from plan `position` on once more; only while no thread reads."""
        self._next = position


class Runner:
    """The pipeline's threads, which may be halted and started again; knows no Lookahead."""

    def __init__(
        self,
        planner: StreamPlanner,
        depth: int,
        timeout_s: float,
        streams: Streams,
        movement: Sequence[Stage],
    ) -> None:
        """`movement`: the stages that move rows ahead of the loop; none: the loop moves them."""
        self._planner, self._depth, self.timeout_s = planner, depth, timeout_s
        self._streams, self._movement = streams, tuple(movement)
        self._pipeline: Pipeline | None = None
        self._closed = threading.Event()
        self._left: Pipeline | None = None

    @property
    def running(self) -> bool:
        return self._pipeline is not None

    @property
    def halting(self) -> bool:
        """Whether threads that were told to end did not in time."""
        return self._pipeline is not None and self._pipeline.queue.stopping

    def start(self, source: Source) -> None:
        self._pipeline = Pipeline(self._planner, source, self._depth, self._streams, self._movement)
        _pipelines[self._pipeline] = self._planner.link.world

    def take(self) -> InFlight | None:
        """The next planned step, or None at the end."""
        return None if self._pipeline is None else self._pipeline.queue.take()

    def arrive(self, flight: InFlight, done: int) -> None:
        """Wait for the rows of a step; what may follow step `done` moves on."""
        if self._pipeline is not None:
            self._pipeline.queue.release(done, self._streams.mark(COMPUTE))
            self._pipeline.queue.arrive(flight)

    def settle(self) -> None:
        """Wait for the moves that come before the ranks' next exchange."""
        if self._pipeline is not None and self._planner.link.world.size > 1:
            self._pipeline.queue.settle()

    def quiet(self) -> None:
        """Let no row move until the next step arrives."""
        if self._pipeline is not None:
            self._pipeline.quiet()

    def stop(self, limit_s: float | None = None) -> bool:
        """End the threads, with a last word to the other ranks; False if they did not in time.

        After the same step on all ranks, with what was released moved before; threads that did
        not end then still run, for they hold the batches and the planner.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return True
        limit_s = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        ended = pipeline.stop(limit_s)
        if ended:
            self._pipeline = None
        else:
            log.warning("the planner's thread did not end within %g s", limit_s)
        return ended

    def close(self, limit_s: float | None = None) -> None:
        """End the threads for good, in order if the other ranks allow it within `limit_s`.

        Ranks that leave a look-ahead after the same step hold the same rows, and may go on.
        """
        try:
            self.stop(limit_s)
        except Exception as error:
            log.warning("moving rows failed: %s", error)
        finally:
            pipeline, self._pipeline = self._pipeline, None
            if pipeline is not None:
                pipeline.queue.stop()
            self._closed.set()

    def leave(self, leaving: list[Runner]) -> None:
        """Close as nobody holds the look-ahead; ranks that left it at the same step end here.

        One that left it with an error, which a finalizer cannot see, has nobody to end with: after
        a short wait the closing goes on on a thread, so that the error shows. `leaving` holds
        this runner until it is known to have ended.
        """
        self._left = pipeline = self._pipeline
        if pipeline is None or pipeline.ended:
            self.close()
            return
        leaving.append(self)
        closing = threading.Thread(target=self.close, name="distcache-closing", daemon=True)
        closing.start()
        if not pipeline.runs_here():  # the garbage collector runs in any thread
            closing.join(LEAVING_S)

    def ended(self, limit_s: float) -> bool:
        """Wait for the end that `leave` has begun; whether it has come, in order."""
        return self._closed.wait(limit_s) and (self._left is None or self._left.ended)


def end_left(leaving: list[Runner]) -> None:
    """Wait for the look-aheads that were left; PeerError for one that does not end."""
    while leaving:
        runner = leaving[-1]
        if not runner.ended(runner.timeout_s + LEAVING_S):
            raise not_halted(runner.timeout_s)
        leaving.remove(runner)


def not_halted(limit_s: float) -> PeerError:
    """The error for a planner that did not end in time."""
    return PeerError(
        f"the planner did not halt within {limit_s:g} s: another rank goes on without this one, or "
        "the batches that lookahead reads are slower than that"
    )


_pipelines: weakref.WeakKeyDictionary[Pipeline, World] = weakref.WeakKeyDictionary()
"""Those that a look-ahead holds, or their own threads, and their ranks."""


def _at_exit() -> None:
    """End the threads that still run; after an error say so, for the others wait in vain.

    A thread that computes while the interpreter goes away may take the process with it.
    """
    error, open_ones = getattr(sys, "last_value", None), list(_pipelines.items())
    if error is not None:
        for _, world in open_ones:
            record_failure(world.store, world.rank, error)
    for pipeline, world in open_ones:
        limit = min(world.timeout_s, STOP_S) if error is None else LEAVING_S
        if not pipeline.stop(limit, orderly=False):
            log.warning("a look-ahead's threads did not end within %g s", limit)


atexit.register(_at_exit)
