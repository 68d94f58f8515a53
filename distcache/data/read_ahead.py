"""Reading ahead of a shuffled epoch: the disk sees whole blocks, evenly, before they are needed."""

from __future__ import annotations

from collections.abc import Callable

from distcache.data.samplers import BlockOrder


class ReadAhead:
    """Tells the system which samples come, a pool ahead of those that are read.

    The samples of a pool come in no order, each on a page of its own: read when they are touched,
    a batch would wait for thousands of pages one by one. `hint(start, stop)`: samples [start,
    stop) are needed soon. Every batch hints about as many samples as it takes.
    """

    def __init__(self, order: BlockOrder, hint: Callable[[int, int], None]) -> None:
        self._order, self._hint = order, hint
        self._epoch, self._done = -1, 0

    def reach(self, epoch: int, start: int, stop: int) -> None:
        """Positions [start, stop) of `epoch` are read next."""
        pool, block = self._order.pool, self._order.block
        first = start // pool * pool // block  # of the pool that `start` is in
        # All of the pools that are read, and of the next one as much as was read of this one.
        until = -(-(stop + pool) // block)
        if epoch != self._epoch or not first <= self._done <= until:  # begun, or taken up elsewhere
            self._epoch, self._done = epoch, first
        for span in self._order.spans(epoch, self._done, until):
            self._hint(*span)
        self._done = until
