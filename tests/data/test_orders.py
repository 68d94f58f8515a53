"""Which samples a step reads: permutations drawn without an index, hints, numbers that stay."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data import samplers
from distcache.data.files import digest_of
from distcache.data.parquet import hashed, hexadecimal
from distcache.data.raw.settings import bags
from distcache.data.samplers import (
    BatchSpans,
    BlockOrder,
    ReadAhead,
    RowGroupOrder,
    SampleOrder,
    Subset,
    both,
    hash_counters,
    key_of,
)
from distcache.errors import DataError


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    """Pools of four blocks."""
    monkeypatch.setattr(samplers, "POOL_BLOCKS", 4)


def test_numbers_that_must_never_change():
    """Runs and preprocessed folders of other versions rest on them."""
    assert (key_of(0), key_of(3, 1)) == (16294208416658607535, 11810286367831575873)
    counters = hash_counters(np.arange(2, dtype=np.uint64), 7)
    assert counters.tolist() == [1346066267577507604, 7191089600892374487]
    words = [b"", b"abc", "\u00e9".encode()]
    assert hashed(words, 1 << 40).tolist() == [499686352612, 222668569560, 1028841741003]
    assert hexadecimal([b"", b"ff", b"123456789abcdef01"], 1000).tolist() == [0, 255, 121]
    assert bags(np.array([0, 5]), 2, 1000, 4).tolist() == [[0, 797, 258, 761], [5, 673, 566, 66]]
    assert bags(np.array([5]), 1, 1000, 4).tolist() == [[5, 419, 540, 655]]
    digest = digest_of(np.arange(3), np.zeros((2, 2), np.float32))
    assert digest == "e3c7f331537fe5fb4347ea5333f3290713afaf02165fb9df51fbb629baa9fa03"
    assert SampleOrder(1000, 5).positions(2, 0, 5).tolist() == [520, 706, 713, 96, 574]
    order = BlockOrder(1001, 5, 16)
    assert order.positions(3, 60, 68).tolist() == [486, 649, 343, 345, 151, 800, 155, 32]
    groups, samples = RowGroupOrder([10, 20, 5, 30, 7], 5, 25).places(1, 0, 8)
    assert groups.tolist() == [4, 3, 3, 3, 3, 3, 3, 3]
    assert samples.tolist() == [1, 3, 14, 2, 15, 4, 27, 29]


@given(st.integers(1, 3000), st.integers(0, 40), st.integers(0, 2**63), st.integers(0, 5))
@examples(150)
def test_every_sample_once_in_any_slices(samples, block, seed, epoch):
    samplers.POOL_BLOCKS = 4  # the fixture is not undone between examples, but hypothesis asks
    order = BlockOrder(samples, seed, block) if block else SampleOrder(samples, seed)
    whole = order.positions(epoch, 0, samples)
    assert whole.dtype == np.int64 and sorted(whole.tolist()) == list(range(samples))
    cuts = sorted({0, samples, samples // 3, samples // 2, min(7, samples)})
    parts = [order.positions(epoch, a, b).tolist() for a, b in pairwise(cuts)]
    assert [x for part in parts for x in part] == whole.tolist()
    assert order.positions(epoch, samples, samples).tolist() == []


@pytest.mark.parametrize("block", [0, 16])
def test_epochs_and_seeds_differ_and_look_random(block):
    samples, orders = 20_000, []
    for seed in (0, 1):
        order = BlockOrder(samples, seed, block) if block else SampleOrder(samples, seed)
        orders += [order.positions(epoch, 0, samples) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        # Few samples stay in place (1 is expected), and there is no correlation with the position.
        assert np.sum(one == np.arange(samples)) < 10
        assert abs(np.corrcoef(one, np.arange(samples))[0, 1]) < (0.1 if block else 0.03)
        assert block or abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
        assert all(np.sum(one == other) < 10 for other in orders[:i])


def test_small_sets_reach_many_orders():
    seen = {tuple(SampleOrder(5, seed).positions(0, 0, 5)) for seed in range(2000)}
    assert len(seen) > 100  # of 120


def test_a_pool_is_a_few_blocks_from_anywhere_in_no_order():
    pool = BlockOrder(5000, 1, 16).positions(0, 0, 64)
    shift = key_of(1, 2, 0) % 5000  # blocks are counted from another sample in each epoch
    assert len(np.unique((pool - shift) % 5000 // 16)) == 4
    assert not np.array_equal(np.sort(pool[:16]), np.arange(pool.min(), pool.min() + 16))
    alone = BlockOrder(64, 5, 16).positions(2, 0, 64)
    assert np.array_equal(alone, SampleOrder(64, 5).positions(2, 0, 64))


def test_orders_without_shuffle_and_without_end():
    assert SampleOrder(10, 1, shuffle=False).positions(4, 3, 9).tolist() == list(range(3, 9))
    assert SampleOrder(None, 1).positions(0, 2**40, 2**40 + 2).tolist() == [2**40, 2**40 + 1]


def test_spans_cover_epochs_with_a_ragged_last_batch():
    found = [BatchSpans(10, 4).locate(step) for step in range(4)]
    assert [(s.epoch, s.start, s.stop) for s in found] == [
        (0, 0, 4),
        (0, 4, 8),
        (0, 8, 10),
        (1, 0, 4),
    ]
    assert [s.size for s in found] == [4, 4, 2, 4] and BatchSpans(10, 4).per_epoch == 3
    far = BatchSpans(None, 4).locate(10**9)
    assert (far.epoch, far.start, far.stop) == (0, 4 * 10**9, 4 * 10**9 + 4)


def test_refusals():
    for order in (SampleOrder(10, 0), BlockOrder(10, 0, 4), BlockOrder(1000, 0, 4)):
        with pytest.raises(DataError, match="do not lie in an epoch"):
            order.positions(0, 5, order.samples + 1)
    for samples, step in ((10, -1), (0, 0)):
        with pytest.raises(DataError, match=f"no batch {step}.* {samples} samples"):
            BatchSpans(samples, 2).locate(step)


def touched(spans: list[tuple[int, int]], samples: int) -> np.ndarray:
    """How often each sample was hinted."""
    counts = np.zeros(samples, dtype=np.int64)
    for start, stop in spans:
        assert 0 <= start < stop <= samples
        counts[start:stop] += 1
    return counts


@pytest.mark.parametrize("samples", [1, 15, 16, 64, 65, 1000, 1024, 1039])
@pytest.mark.parametrize("batch", [1, 7, 48, 300])
def test_all_that_a_batch_touches_was_hinted_once(samples, batch):
    order, spans = BlockOrder(samples, 5, 16), []
    ahead = ReadAhead(order, lambda *span: spans.append(span))
    for epoch in range(3):
        spans.clear()
        for start in range(0, samples, batch):
            stop, before = min(start + batch, samples), len(spans)
            ahead.reach(epoch, start, stop)
            missed = touched(spans, samples)[order.positions(epoch, start, stop)] == 0
            assert missed.sum() <= samples % 16  # less than a block of them is in no block
            new = sum(stop - start for start, stop in spans[before:])
            assert start == 0 or new <= stop - start + 16
        counts = touched(spans, samples)
        assert counts.max() == 1 and (counts == 0).sum() == (samples % 16 if samples > 64 else 0)


def test_hints_of_an_epoch_taken_up_in_its_middle():
    order, spans = BlockOrder(1000, 5, 16), []
    ahead = ReadAhead(order, lambda *span: spans.append(span))
    for epoch, start in ((2, 500), (2, 510), (0, 200), (0, 900), (0, 100)):
        ahead.reach(epoch, start, start + 10)
        assert touched(spans, 1000)[order.positions(epoch, start, start + 10)].all()
    assert sum(stop - start for start, stop in spans) < 5 * 3 * 64


def words(mask: np.ndarray) -> np.ndarray:
    """The mask as 64-bit words."""
    packed = np.zeros((len(mask) + 63) // 64 * 8, dtype=np.uint8)
    bits = np.packbits(mask, bitorder="little")
    packed[: len(bits)] = bits
    return packed.view(np.uint64)


@pytest.mark.parametrize("samples", [0, 1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_samples_by_their_place_among_the_chosen(samples, share):
    rng = np.random.default_rng(samples)
    mask = rng.random(samples) < share
    for subset, own in zip(both(words(mask), samples), (mask, ~mask), strict=True):
        index = np.flatnonzero(own)
        places = rng.permutation(len(index))
        found = subset.at(places)
        assert subset.count == len(index) and found.dtype == np.int64
        assert np.array_equal(found, index[places])
        if samples:
            edges = np.arange(samples + 1)
            assert np.array_equal(subset.before(edges), np.searchsorted(index, edges))
    assert Subset(words(np.ones(64_000, bool))).nbytes == 1000 * 12  # bits, and not an index


SIZES = [10, 3, 25, 1, 10, 10, 8]


@pytest.mark.parametrize("window", [0, 1, 25, 1000])
def test_row_groups_in_windows_have_every_sample_once(window):
    order = RowGroupOrder(SIZES, 7, window)
    for epoch in range(3):
        found = []
        for start in range(0, 67, 9):
            blocks, samples = order.places(epoch, start, min(start + 9, 67))
            found += list(zip(blocks.tolist(), samples.tolist(), strict=True))
        every = [(block, at) for block, size in enumerate(SIZES) for at in range(size)]
        assert sorted(found) == every and (found == every) == (window == 0)
    assert not 0 < window < 67 or order.widest <= window + 25


def test_windows_mix_their_row_groups_and_no_others():
    order, firsts = RowGroupOrder([10] * 30, 3, 40), set()
    for epoch in range(4):
        for window in range(7):
            blocks, _ = order.places(epoch, 40 * window, 40 * window + 40)
            assert len(set(blocks.tolist())) == 4
            firsts.add(tuple(sorted(set(blocks.tolist()))))
    assert len(firsts) > 20  # epochs differ
    blocks, samples = RowGroupOrder([10, 3, 25], 5, 38).places(2, 4, 30)
    expected = SampleOrder(38, key_of(5, 0)).positions(2, 4, 30)  # one window is the whole order
    assert (np.array([0, 10, 13])[blocks] + samples).tolist() == expected.tolist()
