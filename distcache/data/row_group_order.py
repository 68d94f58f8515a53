"""The order of samples that lie in blocks which are costly to open (the row groups of Parquet).

An epoch visits the blocks in an order of its own and shuffles the samples of a *window* of them
together: the fewest blocks in a row that hold `window` samples. The order is a function of (seed,
epoch, position) alone, and what it needs in memory grows with the number of blocks, not of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.data.hashing import key_of
from distcache.data.samplers import SampleOrder


@dataclass(frozen=True)
class _Epoch:
    """Blocks in the epoch's order, `starts` `[blocks + 1]`: position at which each begins, and
    `windows`: places in that order at which a window begins, with the end."""

    blocks: np.ndarray
    starts: np.ndarray
    windows: np.ndarray


class RowGroupOrder:
    """Positions of an epoch to (block, sample inside it).

    `sizes`: samples of each block; `window`: samples shuffled together, at least; 0 keeps the
    order of the blocks. If all samples fit into one window, an epoch's order is that of
    `SampleOrder(samples, key_of(seed, 0))`: the same as for sources that shuffle all samples.
    Otherwise the samples of a batch are put in the order of their blocks, so that the slices of
    several ranks share the blocks among them.
    """

    def __init__(self, sizes: Sequence[int], seed: int, window: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.edges = np.concatenate(([0], np.cumsum(self.sizes)))
        self.samples = int(self.edges[-1])
        self.one_window = self.samples <= window
        self._seed, self._window = seed, window
        self._all = SampleOrder(self.samples, key_of(seed, 0), shuffle=window > 0)
        self._epochs: dict[int, _Epoch] = {}

    @property
    def widest(self) -> int:
        """Samples of the largest window that any epoch may have."""
        return min(self.samples, self._window + int(self.sizes.max(initial=0)))

    def places(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Block and sample inside it, int64 `[stop - start]` each, at positions of `epoch`.

        The positions must be those of one whole batch: ranks take slices of the result.
        """
        if self.one_window or self._window == 0:
            return self.locate(self._all.positions(epoch, start, stop))
        parts = list(self._window_places(epoch, start, stop))
        at = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        order = self._epoch(epoch)
        places = np.searchsorted(order.starts, at, side="right") - 1
        sorted_ = np.argsort(places, kind="stable")
        at, places = at[sorted_], places[sorted_]
        return order.blocks[places], at - order.starts[places]

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples of `places`, counted over all blocks in their own order; int64."""
        blocks, inside = self.places(epoch, start, stop)
        return self.edges[blocks] + inside

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and sample inside it of samples that are counted over all blocks; int64 each."""
        blocks = np.searchsorted(self.edges, samples, side="right") - 1
        return blocks, samples - self.edges[blocks]

    def _window_places(self, epoch: int, start: int, stop: int):
        """Shuffled positions in the epoch's order of blocks, window by window."""
        order = self._epoch(epoch)
        edges = order.starts[order.windows]
        first = int(np.searchsorted(edges, start, side="right")) - 1
        for window in range(first, len(edges) - 1):
            low, high = int(edges[window]), int(edges[window + 1])
            if low >= stop:
                return
            shuffle = SampleOrder(high - low, key_of(self._seed, 1, window))
            inside = shuffle.positions(epoch, max(start, low) - low, min(stop, high) - low)
            yield inside + low

    def _epoch(self, epoch: int) -> _Epoch:
        """The order of blocks in an epoch; the last two are remembered."""
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        blocks = SampleOrder(len(self.sizes), key_of(self._seed, 2)).positions(
            epoch, 0, len(self.sizes)
        )
        starts = np.concatenate(([0], np.cumsum(self.sizes[blocks])))
        windows = [0]
        while windows[-1] < len(blocks):
            enough = np.searchsorted(starts, starts[windows[-1]] + self._window, side="left")
            windows.append(min(int(enough), len(blocks)))
        made = _Epoch(blocks, starts, np.array(windows))
        for old in [e for e in self._epochs if e < epoch - 1]:
            self._epochs.pop(old, None)
        self._epochs[epoch] = made
        return made
