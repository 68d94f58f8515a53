"""Samples by their place among those whose bit is 1: the same as with an index of them."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.data.samplers import Subset, both


def words(mask: np.ndarray) -> np.ndarray:
    """The mask as 64-bit words."""
    packed = np.zeros((len(mask) + 63) // 64 * 8, dtype=np.uint8)
    bits = np.packbits(mask, bitorder="little")
    packed[: len(bits)] = bits
    return packed.view(np.uint64)


@pytest.mark.parametrize("samples", [1, 2, 63, 64, 65, 127, 128, 1000, 4096])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_places_and_samples(samples, share):
    rng = np.random.default_rng(samples)
    mask = rng.random(samples) < share
    chosen, others = both(words(mask), samples)
    edges = np.arange(samples + 1)
    for subset, own in ((chosen, mask), (others, ~mask)):
        index = np.flatnonzero(own)
        assert subset.count == len(index)
        places = rng.permutation(len(index))
        found = subset.at(places)
        assert found.dtype == np.int64
        assert np.array_equal(found, index[places])
        assert np.array_equal(subset.before(edges), np.searchsorted(index, edges))


def test_memory_is_bits_and_not_an_index():
    samples = 64_000
    chosen, others = both(words(np.arange(samples) % 3 == 0), samples)
    assert chosen.nbytes == others.nbytes == samples // 64 * 12


def test_no_sample():
    empty = Subset(np.zeros(0, dtype=np.uint64))
    assert empty.count == 0
    assert len(empty.at(np.zeros(0, dtype=np.int64))) == 0
