"""A few decoded blocks, the most recently used ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockCache(Generic[T]):
    """Keeps blocks of at most `samples` samples in all, and always the last one.

    May be used by several threads; a block is decoded once at a time.
    """

    def __init__(self, samples: int) -> None:
        self._limit, self._held = samples, 0
        self._blocks: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.decoded = 0

    def get(self, key: Hashable, samples: int, decode: Callable[[], T]) -> T:
        """The block `key` of `samples` samples, decoded where it is not here (`decoded` counts)."""
        with self._lock:
            known = self._blocks.get(key)
            if known is not None:
                self._blocks.move_to_end(key)
                return known[0]
            while self._blocks and self._held + samples > self._limit:
                self._held -= self._blocks.popitem(last=False)[1][1]
            block = decode()
            self._blocks[key] = (block, samples)
            self._held += samples
            self.decoded += 1
            return block
