"""Ways of rows between a store and its device: through staging buffers, or read in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from distcache.cache.staging import StagingRing
from distcache.store.base import Rows
from distcache.store.direct import DirectRows
from distcache.store.rows import RowStore
from distcache.streams import COPY_IN, Mark, Streams


@dataclass(frozen=True)
class Gathered:
    """Fetched rows of one step before they go to their slots.

    `read`: the rows, for work of the current stream, `[M_h, D]`, and their state `[M_h, S]` or
    None, on the host or the device; `release`: after all that reads them was issued on COPY_IN.
    """

    read: Callable[[], Rows]
    release: Callable[[], None]


class Access(Protocol):
    """How rows of one group get to the device and back; one thread at a time uses it."""

    def gather(self, rows: Tensor) -> Gathered:
        """What the host does before `rows` (int64 `[m]`, on the CPU) can go to the device."""
        ...

    def put(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Bring `rows`, with values on the device, to the store, in order of calls."""
        ...

    def settle(self) -> None:
        """Let the host wait until what was put is in the store."""
        ...


class Staged:
    """`store.access=staged`: host threads gather into pinned buffers, which are copied as a whole;
    what comes back is copied to a buffer, waited for, and scattered."""

    def __init__(
        self,
        store: RowStore,
        device: torch.device,
        widths: tuple[int, int],
        streams: Streams,
        prefetch: int,
    ) -> None:
        """`widths`: D and S; `prefetch`: P, which bounds the steps whose rows lie in buffers."""
        self._store, self._device, self._streams = store, device, streams
        self._arriving = StagingRing(prefetch + 2, widths, store.dtype, streams)
        self._leaving = StagingRing(1, widths, store.dtype, streams)

    def gather(self, rows: Tensor) -> Gathered:
        """Copies of the rows in the next staging buffer."""
        number, weight, state = self._arriving.take(len(rows))
        found = self._store.gather(rows, out=(weight, state))
        return Gathered(lambda: found, partial(self._release, number))

    def _release(self, number: int) -> None:
        """The buffer may be used again once the copies from it are through."""
        self._arriving.release(number, self._streams.mark(COPY_IN))

    def put(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Scatter the rows; the calling thread waits until they are there."""
        if self._streams.asynchronous:
            number, host_weight, host_state = self._leaving.take(len(rows))
            host_weight.copy_(weight, non_blocking=True)
            if state is not None and host_state is not None:
                host_state.copy_(state, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            weight, state = host_weight, host_state
            self._leaving.release(number, Mark())
        self._store.scatter(rows, weight, state)

    def settle(self) -> None:
        """Nothing is on its way: `put` waits."""


class InPlace:
    """`store.access=zero_copy`: the device reads and writes rows in host memory (`store.direct`).

    Reads come after the write-backs of their own and of earlier steps, as `fill` does.
    """

    def __init__(self, rows: DirectRows, wait: Callable[[Mark], None]) -> None:
        """`rows`: of a store that is open to the device; `wait`: of the host for a mark."""
        self._rows, self._wait = rows, wait

    def gather(self, rows: Tensor) -> Gathered:
        """Nothing to do on the host."""
        return Gathered(partial(self._rows.read, rows), lambda: None)

    def put(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Write the rows on the current stream."""
        self._rows.write(rows, weight, state)

    def settle(self) -> None:
        """Wait for what was read and written."""
        for mark in self._rows.marks():
            self._wait(mark)
