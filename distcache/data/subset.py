"""Some of the samples of an epoch, chosen by one bit each."""

from __future__ import annotations

import numpy as np

_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)
"""Bits of each byte that are 1."""

_CHUNK = 1 << 20


class Subset:
    """The samples whose bit is 1, in ascending order, found by their place among them.

    `bits`: uint64 `[ceil(samples / 64)]`, sample i at bit i % 64 of word i // 64 (little-endian);
    bits after the last sample are 0. Beside them 4 bytes per word are kept (8 beyond 2^32 samples):
    3 bits of memory for 2 samples, where an index takes 4 bytes for each one that is chosen.
    """

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits
        ones = np.empty(len(bits), dtype=np.int64)
        for start in range(0, len(bits), _CHUNK):
            some = bits[start : start + _CHUNK].view(np.uint8)
            ones[start : start + _CHUNK] = _ONES[some].reshape(-1, 8).sum(axis=1)
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
        part = (self.bits[inner] & mask).view(np.uint8).reshape(-1, 8)
        found = self._starts[inner].astype(np.int64) + _ONES[part].sum(axis=1)
        return np.where(words < len(self.bits), found, self.count)


def both(bits: np.ndarray, samples: int) -> tuple[Subset, Subset]:
    """The samples whose bit is 1 and the others. `bits`: uint64 as in `Subset`."""
    others = ~bits
    if samples % 64:
        others[-1] &= np.uint64((1 << samples % 64) - 1)
    return Subset(bits), Subset(others)
