"""Which samples a step reads: the order is a function of (seed, epoch, position) alone.

No index of all samples is kept: an epoch's order is a keyed permutation that maps a position to
a sample by itself (a Feistel network over the next power of two, with cycle walking; Black and
Rogaway, 2002). Where samples lie on a disk, blocks of neighbours stay near each other in time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distcache.data.hashing import key_of, mix64
from distcache.errors import ConfigError, DataError

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
        if batch_size < 1:
            raise ConfigError(f"data.global_batch_size={batch_size}: it must be at least 1")
        if samples is not None and samples < 0:
            raise ConfigError(f"{samples} samples: the number must not be negative")
        self.samples = samples
        self.batch_size = batch_size

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


class SampleOrder:
    """The order in which an epoch visits `samples` samples (None: unlimited, in counting order)."""

    def __init__(self, samples: int | None, seed: int, shuffle: bool = True) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle and samples is not None
        bits = max((samples or 1) - 1, 0).bit_length()
        self._left_bits = bits // 2
        self._right_bits = bits - self._left_bits

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Samples int64 `[stop - start]` at positions [start, stop) of `epoch`.

        Over a whole epoch every sample in [0, samples) appears once. Raises DataError for
        positions beyond the epoch.
        """
        if start < 0 or stop < start or (self.samples is not None and stop > self.samples):
            raise DataError(
                f"positions [{start}, {stop}) do not lie in an epoch of {self.samples} samples"
            )
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


class BlockOrder:
    """An order of samples on a disk: blocks of neighbours drawn at random, mixed in pools.

    An epoch goes through pools of `POOL_BLOCKS` random blocks of `block` consecutive samples; in a
    pool every sample may come at any place. So a pool's worth of training reads few places of the
    disk, each of them whole. The last samples, less than a block, are in the last pool; blocks are
    counted from another sample in each epoch. With a single pool it is `SampleOrder`.
    """

    def __init__(self, samples: int, seed: int, block: int) -> None:
        if block < 1:
            raise ConfigError(f"data.shuffle_block={block}: give a number of samples of at least 1")
        self.samples, self.seed, self.block = samples, seed, block
        self._pool = block * POOL_BLOCKS
        self._all = SampleOrder(samples, seed) if samples <= self._pool else None
        self._blocks = SampleOrder(samples // block, key_of(seed, 1))

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Samples int64 `[stop - start]` at positions [start, stop) of `epoch`."""
        if self._all is not None:
            return self._all.positions(epoch, start, stop)
        if start < 0 or stop < start or stop > self.samples:
            raise DataError(
                f"positions [{start}, {stop}) do not lie in an epoch of {self.samples} samples"
            )
        shift = key_of(self.seed, 2, epoch) % self.samples
        pools = range(start // self._pool, -(-stop // self._pool))
        parts = [self._in_pool(epoch, pool, start, stop) for pool in pools]
        samples = np.concatenate([np.empty(0, np.int64), *parts]) + shift
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

    def _in_pool(self, epoch: int, pool: int, start: int, stop: int) -> np.ndarray:
        """Samples at the positions in [start, stop) that lie in one pool."""
        begin = pool * self._pool
        end = min(begin + self._pool, self.samples)
        inner = SampleOrder(end - begin, key_of(self.seed, 3, pool))
        places = inner.positions(epoch, max(start, begin) - begin, min(stop, end) - begin)
        whole = self.samples // self.block
        low, high = pool * POOL_BLOCKS, min((pool + 1) * POOL_BLOCKS, whole)
        blocks = np.append(self._blocks.positions(epoch, low, high), whole)  # then the ragged one
        return blocks[places // self.block] * self.block + places % self.block
