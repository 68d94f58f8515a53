"""The order of samples is a permutation per epoch, drawn without an index."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data.samplers import BatchSpans, SampleOrder
from distcache.errors import ConfigError, DataError


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 8, 9, 100, 1023, 1024, 1025, 50_000])
def test_every_epoch_is_a_permutation(samples):
    order = SampleOrder(samples, seed=3)
    for epoch in range(3):
        positions = order.positions(epoch, 0, samples)
        assert positions.dtype == np.int64
        assert np.array_equal(np.sort(positions), np.arange(samples))


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 5), st.data())
@examples(60)
def test_any_slice_is_that_of_the_whole_epoch(samples, seed, epoch, data):
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    order = SampleOrder(samples, seed)
    whole = order.positions(epoch, 0, samples)
    assert np.array_equal(order.positions(epoch, start, stop), whole[start:stop])


def test_epochs_and_seeds_differ_and_look_random():
    samples = 20_000
    orders = [
        SampleOrder(samples, seed).positions(epoch, 0, samples)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, one in enumerate(orders):
        # Few samples stay in place (1 is expected), and there is no correlation with the position.
        assert np.sum(one == np.arange(samples)) < 10
        assert abs(np.corrcoef(one, np.arange(samples))[0, 1]) < 0.03
        assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
        for other in orders[:i]:
            assert np.sum(one == other) < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_small_sets_reach_many_orders():
    seen = {tuple(SampleOrder(5, seed).positions(0, 0, 5)) for seed in range(2000)}
    assert len(seen) > 100  # of 120


def test_without_shuffle_the_order_is_that_of_the_file():
    assert np.array_equal(SampleOrder(10, 1, shuffle=False).positions(4, 3, 9), np.arange(3, 9))


def test_unlimited_order_counts():
    assert np.array_equal(SampleOrder(None, 1).positions(0, 2**40, 2**40 + 3), 2**40 + np.arange(3))


def test_positions_beyond_the_epoch_are_refused():
    with pytest.raises(DataError, match="epoch of 10 samples"):
        SampleOrder(10, 1).positions(0, 5, 11)


def test_spans_cover_epochs_with_a_ragged_last_batch():
    spans = BatchSpans(10, 4)
    assert spans.per_epoch == 3
    found = [spans.locate(step) for step in range(7)]
    assert [(s.epoch, s.start, s.stop) for s in found] == [
        (0, 0, 4),
        (0, 4, 8),
        (0, 8, 10),
        (1, 0, 4),
        (1, 4, 8),
        (1, 8, 10),
        (2, 0, 4),
    ]
    assert [s.size for s in found[:3]] == [4, 4, 2]


def test_unlimited_spans_never_repeat():
    spans = BatchSpans(None, 4)
    assert spans.per_epoch is None
    assert spans.locate(10**9) == type(spans.locate(0))(0, 4 * 10**9, 4 * 10**9 + 4)


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match="global_batch_size=0"):
        BatchSpans(10, 0)
    with pytest.raises(DataError, match="no batch -1"):
        BatchSpans(10, 2).locate(-1)
    with pytest.raises(DataError, match="0 samples"):
        BatchSpans(0, 2).locate(0)
