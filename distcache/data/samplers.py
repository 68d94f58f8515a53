"""Which samples a step reads: hashed numbers, orders by (seed, epoch), some of the samples.

Everything about a sample is a hash of where it stands, so that any rank draws any slice by itself.
The hash is the finaliser of splitmix64 (Steele, Lea and Flood, 2014) on whole arrays of uint64:
integer arithmetic alone, so that a number does not depend on the slice in which it is drawn.

No index of all samples is kept: an epoch's order is a keyed permutation that maps a position to
a sample by itself (a Feistel network over the next power of two, with cycle walking; Black and
Rogaway, 2002). Where samples lie on a disk, blocks of neighbours stay near each other in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from distcache.errors import DataError

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = (1 << 64) - 1


def mix64(values: np.ndarray) -> np.ndarray:
    """Hash uint64 `values` in place (any shape, at least one dimension) and return them."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= np.uint64(_FIRST)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(_SECOND)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def key_of(*path: int) -> int:
    """One 64-bit key for a path of integers such as (seed, purpose, table)."""
    key = 0
    for part in path:
        key = (key + (part + 1) * GOLDEN) & _ALL
        key = ((key ^ (key >> 30)) * _FIRST) & _ALL
        key = ((key ^ (key >> 27)) * _SECOND) & _ALL
        key ^= key >> 31
    return key


def keys_of(count: int, *path: int) -> np.ndarray:
    """Keys uint64 `[count]` of (path..., 0), (path..., 1), ..."""
    return np.array([key_of(*path, index) for index in range(count)], dtype=np.uint64)


def hash_counters(counters: np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Hash uint64 `counters` under `key` (a key, or an array that broadcasts to them)."""
    return mix64(counters * np.uint64(GOLDEN) + np.asarray(key, dtype=np.uint64))


_ROUNDS = 6
POOL_BLOCKS = 256
"""Blocks whose samples a `BlockOrder` mixes with each other."""


@dataclass(frozen=True)
class SampleSpan:
    """Positions [start, stop) of one epoch that one global batch takes."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """B: samples of this global batch over all ranks."""
        return self.stop - self.start


class BatchSpans:
    """Steps to positions: batches of `batch_size`, the last one of each epoch may be ragged.

    `samples`: positions of one epoch, or None for a single epoch without end.
    """

    def __init__(self, samples: int | None, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    @property
    def per_epoch(self) -> int | None:
        """Batches of one epoch; None: unlimited."""
        return None if self.samples is None else -(-self.samples // self.batch_size)

    def locate(self, step: int) -> SampleSpan:
        """The epoch and positions of step `step`, counted from 0 across epochs."""
        if step < 0 or self.per_epoch == 0:
            raise DataError(f"there is no batch {step}: the data has {self.samples} samples")
        epoch, batch = (0, step) if self.per_epoch is None else divmod(step, self.per_epoch)
        start = batch * self.batch_size
        stop = start + self.batch_size
        return SampleSpan(epoch, start, stop if self.samples is None else min(stop, self.samples))


class SampleOrdering(ABC):
    """An order of `samples` numbers [0, n), a function of (seed, epoch, position).

    `hint(start, stop)`, where it is set, hears that samples [start, stop) are needed soon.
    """

    samples: int | None
    hint: Callable[[int, int], object] | None = None

    @abstractmethod
    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Samples int64 `[stop - start]` at positions [start, stop) of `epoch`, of which every
        sample appears at one."""

    def slice(self, span: SampleSpan, low: int, high: int) -> np.ndarray:
        """Samples [low, high) of the global batch `span`, int64."""
        return self.positions(span.epoch, span.start + low, span.start + high)


class SampleOrder(SampleOrdering):
    """The order in which an epoch visits `samples` samples (None: unlimited, in counting order)."""

    def __init__(self, samples: int | None, seed: int, shuffle: bool = True) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle and samples is not None
        bits = max((samples or 1) - 1, 0).bit_length()
        self._left_bits = bits // 2
        self._right_bits = bits - self._left_bits

    def slice(self, span: SampleSpan, low: int, high: int) -> np.ndarray:
        """See `SampleOrdering.slice`; `hint` hears of the next batch, unless they are shuffled."""
        if self.hint is not None and not self.shuffle:
            self.hint(span.stop, min(span.stop + span.size, self.samples or 0))
        return super().slice(span, low, high)

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """See `SampleOrdering.positions`."""
        where = np.arange(start, stop, dtype=np.int64)
        if not self.shuffle:
            return where
        samples = self._permute(where.view(np.uint64), epoch)
        # A number outside is mapped on until it falls inside: at most half of them each time.
        outside = np.flatnonzero(samples >= self.samples)
        while len(outside):
            moved = self._permute(samples[outside], epoch)
            samples[outside] = moved
            outside = outside[moved >= self.samples]
        return samples.view(np.int64)

    def _permute(self, values: np.ndarray, epoch: int) -> np.ndarray:
        """A permutation of [0, 2^bits) under (seed, epoch), on uint64 `values`."""
        shift = np.uint64(self._right_bits)
        left_mask = np.uint64((1 << self._left_bits) - 1)
        right_mask = np.uint64((1 << self._right_bits) - 1)
        left, right = values >> shift, values & right_mask
        for round_ in range(0, _ROUNDS, 2):
            left ^= mix64(right + np.uint64(key_of(self.seed, epoch, round_))) & left_mask
            right ^= mix64(left + np.uint64(key_of(self.seed, epoch, round_ + 1))) & right_mask
        return (left << shift) | right


class BlockOrder(SampleOrdering):
    """An order of samples on a disk: blocks of neighbours drawn at random, mixed in pools.

    An epoch goes through pools of `POOL_BLOCKS` random blocks of `block` consecutive samples; in a
    pool every sample may come at any place. So a pool's worth of training reads few places of the
    disk, each of them whole. The last samples, less than a block, are in the last pool; blocks are
    counted from another sample in each epoch. With a single pool it is `SampleOrder`.

    The samples of a pool come in no order, each on a page of its own: read when they are touched,
    a batch would wait for thousands of pages one by one. So `hint` hears of them a pool ahead of
    those that are read; every batch hints about as many samples as it takes.
    """

    def __init__(self, samples: int, seed: int, block: int) -> None:
        self.samples, self.seed, self.block = samples, seed, block
        self._pool = block * POOL_BLOCKS
        self._all = SampleOrder(samples, seed) if samples <= self._pool else None
        self._blocks = SampleOrder(samples // block, key_of(seed, 1))
        self._epoch, self._done = -1, 0  # blocks of the epoch that were hinted at

    def slice(self, span: SampleSpan, low: int, high: int) -> np.ndarray:
        """See `SampleOrdering.slice`; the batch is read next."""
        if self.hint is not None:
            first = span.start // self.pool * self.pool // self.block  # of the pool that it is in
            # All of the pools that are read, and of the next one as much as was read of this one.
            until = -(-(span.stop + self.pool) // self.block)
            if span.epoch != self._epoch or not first <= self._done <= until:
                self._epoch, self._done = span.epoch, first  # begun, or taken up elsewhere
            for start, stop in self.spans(span.epoch, self._done, until):
                self.hint(start, stop)
            self._done = until
        return super().slice(span, low, high)

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """See `SampleOrdering.positions`."""
        if self._all is not None:
            return self._all.positions(epoch, start, stop)
        shift = key_of(self.seed, 2, epoch) % self.samples
        whole, parts = self.samples // self.block, [np.empty(0, np.int64)]
        for pool in range(start // self._pool, -(-stop // self._pool)):
            begin = pool * self._pool
            end = min(begin + self._pool, self.samples)
            inner = SampleOrder(end - begin, key_of(self.seed, 3, pool))
            places = inner.positions(epoch, max(start, begin) - begin, min(stop, end) - begin)
            low, high = pool * POOL_BLOCKS, min((pool + 1) * POOL_BLOCKS, whole)
            blocks = np.append(self._blocks.positions(epoch, low, high), whole)  # the ragged one
            parts.append(blocks[places // self.block] * self.block + places % self.block)
        samples = np.concatenate(parts) + shift
        return np.where(samples >= self.samples, samples - self.samples, samples)

    @property
    def pool(self) -> int:
        """Samples that are mixed with each other."""
        return min(self._pool, self.samples)

    def spans(self, epoch: int, low: int, high: int) -> list[tuple[int, int]]:
        """Where the samples of blocks [low, high) of the epoch's order lie: runs [start, stop).

        Of whole blocks alone; where all samples are mixed, they are one block.
        """
        if self._all is not None:
            return [(0, self.samples)] if low == 0 < high else []
        shift = key_of(self.seed, 2, epoch) % self.samples
        whole = self.samples // self.block
        found = []
        for number in self._blocks.positions(epoch, min(low, whole), min(high, whole)).tolist():
            start = (number * self.block + shift) % self.samples
            stop = start + self.block
            found.append((start, min(stop, self.samples)))
            if stop > self.samples:
                found.append((0, stop - self.samples))
        return found


class RowGroupOrder(SampleOrdering):
    """An order of samples in blocks, such as row groups of files.

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
        self._seed, self._window = seed, window
        self._all = SampleOrder(self.samples, key_of(seed, 0), shuffle=window > 0)
        self._epoch = lru_cache(2)(partial(_blocks_of, self.sizes, seed, window))

    @property
    def widest(self) -> int:
        """Samples of the largest window that any epoch may have."""
        return min(self.samples, self._window + int(self.sizes.max(initial=0)))

    def slice(self, span: SampleSpan, low: int, high: int) -> np.ndarray:
        """See `SampleOrdering.slice`: of the whole batch, which is sorted."""
        return self.positions(span.epoch, span.start, span.stop)[low:high]

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Samples int64 `[stop - start]`, counted over all blocks, at positions of `epoch`: those
        of one whole batch."""
        if self._window == 0 or self.samples <= self._window:
            return self._all.positions(epoch, start, stop)
        order, starts, windows = self._epoch(epoch)
        edges, parts = starts[windows], [np.empty(0, dtype=np.int64)]
        first = int(np.searchsorted(edges, start, side="right")) - 1
        for window in range(first, int(np.searchsorted(edges, stop))):
            low, high = int(edges[window]), int(edges[window + 1])
            shuffle = SampleOrder(high - low, key_of(self._seed, 1, window))
            inside = shuffle.positions(epoch, max(start, low) - low, min(stop, high) - low)
            parts.append(inside + low)
        at = np.concatenate(parts)
        places = np.searchsorted(starts, at, side="right") - 1
        sorted_ = np.argsort(places, kind="stable")
        at, places = at[sorted_], places[sorted_]
        return self.edges[order[places]] + at - starts[places]


def _blocks_of(
    sizes: np.ndarray, seed: int, window: int, epoch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks in the order of an epoch, the position at which each begins `[blocks + 1]`, and the
    places in that order at which windows begin, with the end."""
    count = len(sizes)
    blocks = SampleOrder(count, key_of(seed, 2)).positions(epoch, 0, count)
    starts = np.concatenate(([0], np.cumsum(sizes[blocks])))
    windows = [0]
    while windows[-1] < count:
        enough = np.searchsorted(starts, starts[windows[-1]] + window, side="left")
        windows.append(min(int(enough), count))
    return blocks, starts, np.array(windows)


class Subset:
    """The samples whose bit is 1, in ascending order, found by their place among them.

    `bits`: uint64 `[ceil(samples / 64)]`, sample i at bit i % 64 of word i // 64 (little-endian);
    bits after the last sample are 0. Beside them 4 bytes per word are kept (8 beyond 2^32 samples):
    3 bits of memory for 2 samples, where an index takes 4 bytes for each one that is chosen.
    """

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits
        ones = np.bitwise_count(bits).astype(np.int64)
        ends = np.cumsum(ones)
        self.count = int(ends[-1]) if len(ends) else 0
        wide = np.int64 if len(bits) * 64 >= 1 << 32 else np.uint32
        self._starts = (ends - ones).astype(wide)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.bits.nbytes + self._starts.nbytes

    def at(self, places: np.ndarray) -> np.ndarray:
        """The samples int64 `[n]` at `places` int64 `[n]`, each in [0, count)."""
        if not len(places):
            return np.empty(0, dtype=np.int64)
        # In the dtype of the starts, or they would all be converted at every call.
        wanted = places.astype(self._starts.dtype)
        words = np.searchsorted(self._starts, wanted, side="right") - 1
        inside = (wanted - self._starts[words]).astype(np.uint8)
        ones = np.unpackbits(
            self.bits[words].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"
        )
        before = np.cumsum(ones, axis=1, dtype=np.uint8)
        return words * 64 + (before <= inside[:, None]).sum(axis=1)

    def before(self, edges: np.ndarray) -> np.ndarray:
        """How many of the chosen samples come before each sample of `edges`, int64 `[n]`."""
        words, rest = np.divmod(np.asarray(edges, dtype=np.int64), 64)
        inner = np.minimum(words, max(len(self.bits) - 1, 0))
        mask = (np.uint64(1) << rest.astype(np.uint64)) - np.uint64(1)
        ones = np.bitwise_count(self.bits[inner] & mask)
        found = self._starts[inner].astype(np.int64) + ones
        return np.where(words < len(self.bits), found, self.count)


def both(bits: np.ndarray, samples: int) -> tuple[Subset, Subset]:
    """The samples whose bit is 1 and the others. `bits`: uint64 as in `Subset`."""
    others = ~bits
    if samples % 64:
        others[-1] &= np.uint64((1 << samples % 64) - 1)
    return Subset(bits), Subset(others)
