"""Batches made in advance, outside the timed turns, and handed to every mode in the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from distcache.data.batch import Batch, BatchSource


class BatchBank:
    """One rank's training batches from step 0 on, drawn by `fill`, shared by all feeds.

    A batch is dropped once every feed has given it out.
    """

    def __init__(self, source: BatchSource, rank: int, world_size: int) -> None:
        self._source, self._rank, self._world = source, rank, world_size
        self._batches: dict[int, Batch] = {}
        self._feeds: list[Feed] = []
        self.changed = threading.Condition()
        self.filled = 0
        self.finished = False

    def feed(self) -> Feed:
        """A new reader, from step 0 on; make all of them before the first `fill`."""
        self._feeds.append(Feed(self))
        return self._feeds[-1]

    def fill(self, steps: int) -> None:
        """Draw batches until the first `steps` steps are there."""
        for step in range(self.filled, steps):
            batch = self._source.train_batch(step, self._rank, self._world)
            with self.changed:
                self._batches[step] = batch
                self.filled = step + 1
                self.changed.notify_all()
        with self.changed:
            read = min((feed.read for feed in self._feeds), default=0)
            for step in [step for step in self._batches if step < read]:
                del self._batches[step]

    def finish(self) -> None:
        """No more than what is there: feeds end after it."""
        with self.changed:
            self.finished = True
            self.changed.notify_all()

    def take(self, step: int) -> Batch | None:
        """The batch of a step once it is there, None when it will never be."""
        with self.changed:
            self.changed.wait_for(lambda: step < self.filled or self.finished)
            return self._batches.get(step)


class Feed:
    """An iterator over a bank's batches that waits for the next `fill`, for one thread."""

    def __init__(self, bank: BatchBank) -> None:
        self._bank = bank
        self.read = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._bank.take(self.read)
        if batch is None:
            raise StopIteration
        self.read += 1
        return batch
