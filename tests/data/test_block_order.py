"""Shuffling by blocks: every sample once an epoch, few places of the disk at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data import samplers
from distcache.data.samplers import BlockOrder, SampleOrder
from distcache.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(samplers, "POOL_BLOCKS", 4)


@given(st.integers(1, 900), st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
@examples(100)
def test_every_sample_once_in_any_slices(samples, block, seed, epoch):
    samplers.POOL_BLOCKS = 4  # the fixture is not undone between examples, but hypothesis asks
    order = BlockOrder(samples, seed, block)
    whole = order.positions(epoch, 0, samples)
    assert sorted(whole.tolist()) == list(range(samples))
    cuts = sorted({0, samples, samples // 3, samples // 2, min(7, samples)})
    parts = [order.positions(epoch, a, b).tolist() for a, b in pairwise(cuts)]
    assert [x for part in parts for x in part] == whole.tolist()
    assert order.positions(epoch, samples, samples).tolist() == []


def test_order_depends_on_seed_and_epoch_and_mixes():
    order = BlockOrder(5000, 1, 16)
    first, second = order.positions(0, 0, 5000), order.positions(1, 0, 5000)
    other = BlockOrder(5000, 2, 16).positions(0, 0, 5000)
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
    assert np.array_equal(first, BlockOrder(5000, 1, 16).positions(0, 0, 5000))
    # A pool is 4 blocks of 16 neighbours, from anywhere, in no order.
    pool = first[:64]
    assert len(np.unique((pool - key(1, 0)) % 5000 // 16)) == 4
    assert abs(np.corrcoef(np.arange(5000), first)[0, 1]) < 0.1
    assert not np.array_equal(np.sort(pool[:16]), np.arange(pool.min(), pool.min() + 16))


def key(seed: int, epoch: int) -> int:
    return samplers.key_of(seed, 2, epoch) % 5000


def test_one_pool_is_the_full_shuffle():
    assert np.array_equal(
        BlockOrder(64, 5, 16).positions(2, 0, 64), SampleOrder(64, 5).positions(2, 0, 64)
    )


def test_refusals():
    with pytest.raises(ConfigError, match=r"data\.shuffle_block=0"):
        BlockOrder(10, 0, 0)
    for samples in (10, 1000):
        with pytest.raises(DataError, match="do not lie in an epoch"):
            BlockOrder(samples, 0, 4).positions(0, 5, samples + 1)
