"""Host buffers between the store and the device: pinned for a GPU, and used again and again."""

from __future__ import annotations

import torch
from torch import Tensor

from distcache.errors import MemoryTooSmallError
from distcache.store.available import describe_bytes
from distcache.streams import Mark, Streams

_SPARE = 1.25
"""How much larger than asked for a buffer is made, so that it seldom grows."""


class StagingRing:
    """`count` buffers of rows and their state, handed out in turn.

    A buffer is pinned where the device is a GPU, so that copies run beside the host and the
    device. It grows to the largest number of rows asked for, and is waited for (by the thread that
    moves rows, never by the training loop) while the copy that reads it is on its way.
    """

    def __init__(
        self, count: int, widths: tuple[int, int], dtype: torch.dtype, streams: Streams
    ) -> None:
        """`widths`: D and S, elements of a row and of its state (S may be 0)."""
        self._widths, self._dtype, self._streams = widths, dtype, streams
        self._buffers: list[tuple[Tensor, Tensor | None]] = [self._make(0)] * count
        self._busy = [Mark()] * count
        self._next = 0

    def take(self, rows: int) -> tuple[int, Tensor, Tensor | None]:
        """The next buffer: its number, for `release`, and views `[rows, D]`, `[rows, S]` or None.

        Raises MemoryTooSmallError where the host does not pin so much.
        """
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        self._streams.wait(self._busy[number])
        if len(self._buffers[number][0]) < rows:
            self._buffers[number] = self._make(int(rows * _SPARE))
        weight, state = self._buffers[number]
        return number, weight[:rows], None if state is None else state[:rows]

    def release(self, number: int, mark: Mark) -> None:
        """The buffer may be written again once `mark` is reached."""
        self._busy[number] = mark

    def _make(self, rows: int) -> tuple[Tensor, Tensor | None]:
        pinned = self._streams.asynchronous
        width, state = self._widths
        try:
            return (
                torch.empty(rows, width, dtype=self._dtype, pin_memory=pinned),
                torch.empty(rows, state, dtype=self._dtype, pin_memory=pinned) if state else None,
            )
        except RuntimeError as error:
            wanted = describe_bytes(rows * (width + state) * self._dtype.itemsize)
            raise MemoryTooSmallError(
                f"the host did not give {wanted} of pinned memory for {rows} rows between the "
                f"store and {self._streams.device}: {str(error).splitlines()[0]}; lower "
                "data.global_batch_size or cache.prefetch, or raise the limit of locked memory "
                "(ulimit -l)"
            ) from error
