"""The reference row operations against loops and autograd, and their independence of labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcache import ops

DTYPES = [torch.float32, torch.float64]
DIMS = [1, 3, 4, 12, 16, 20, 33]


def random_bags(seed, bags, rows, dim, dtype, weighted, max_ids=5):
    """A random jagged batch: rows [U, D], positions [n], offsets [K + 1], weights [n] or None."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, max_ids + 1, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(offsets[-1])
    positions = torch.randint(0, rows, (n,), generator=generator)
    table = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(n, generator=generator, dtype=torch.float64).to(dtype)
    return table, positions, offsets, weights if weighted else None


def segments_of(positions, rows):
    """The canonical order of a step's ids: by row, in occurrence order; and each row's segment."""
    order = torch.sort(positions, stable=True).indices
    counts = torch.bincount(positions, minlength=rows)
    return order, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def bag_of(offsets):
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())


def loop_lookup(rows, positions, offsets, weights):
    out = torch.zeros(len(offsets) - 1, rows.shape[1], dtype=rows.dtype)
    for bag in range(len(offsets) - 1):
        for at in range(int(offsets[bag]), int(offsets[bag + 1])):
            scale = 1.0 if weights is None else weights[at]
            out[bag] += rows[positions[at]] * scale
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    bags=st.integers(0, 30),
    rows=st.integers(1, 12),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    weighted=st.booleans(),
)
def test_lookup_and_gradients_equal_a_loop(seed, bags, rows, dim, dtype, weighted):
    table, positions, offsets, weights = random_bags(seed, bags, rows, dim, dtype, weighted)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    pooled = ops.pooled_lookup(table, positions, offsets, weights)
    assert pooled.dtype == dtype and pooled.shape == (bags, dim)
    expected = loop_lookup(table, positions, offsets, weights)
    torch.testing.assert_close(pooled, expected, rtol=tolerance, atol=tolerance)

    upstream = torch.randn(bags, dim, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    order, segments = segments_of(positions, rows)
    bag = bag_of(offsets)
    gradient = ops.row_gradients(upstream, bag, order, segments, weights)
    scale = torch.ones(len(bag), dtype=dtype) if weights is None else weights
    by_id = upstream[bag] * scale.unsqueeze(1)
    expected = torch.zeros(rows, dim, dtype=dtype).index_add_(0, positions, by_id)
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_autograd():
    table, positions, offsets, weights = random_bags(3, 40, 9, 5, torch.float64, True)
    table.requires_grad_()
    weights.requires_grad_()
    bag, upstream = bag_of(offsets), torch.randn(40, 5, dtype=torch.float64)
    pooled = torch.zeros(40, 5, dtype=torch.float64).index_add(
        0, bag, table[positions] * weights.unsqueeze(1)
    )
    pooled.backward(upstream)
    order, segments = segments_of(positions, 9)
    rows = ops.row_gradients(upstream, bag, order, segments, weights)
    by_id = ops.weight_gradients(upstream, bag, table, positions)
    assert not rows.requires_grad and not by_id.requires_grad
    assert not ops.pooled_lookup(table, positions, offsets, weights).requires_grad
    torch.testing.assert_close(rows, table.grad, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(by_id, weights.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_bits_do_not_depend_on_labels(dim, dtype, weighted):
    """Permuted rows, relabelled positions, more rows around: every bag keeps its bits."""
    rows, bags = 50, 300
    table, positions, offsets, weights = random_bags(7, bags, rows, dim, dtype, weighted, 20)
    pooled = ops.pooled_lookup(table, positions, offsets, weights)
    generator = torch.Generator().manual_seed(1)
    label = torch.randperm(3 * rows, generator=generator)[:rows]
    larger = torch.randn(3 * rows, dim, generator=generator).to(dtype)
    larger[label] = table
    again = ops.pooled_lookup(larger, label[positions], offsets, weights)
    assert torch.equal(pooled, again)

    upstream = torch.randn(bags, dim, generator=generator).to(dtype)
    order, segments = segments_of(positions, rows)
    gradient = ops.row_gradients(upstream, bag_of(offsets), order, segments, weights)
    order, segments = segments_of(label[positions], 3 * rows)
    relabelled = ops.row_gradients(upstream, bag_of(offsets), order, segments, weights)
    assert torch.equal(gradient, relabelled[label])
    assert relabelled.count_nonzero() == relabelled[label].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bag_alone_has_the_bits_it_has_in_company(dtype):
    table, positions, offsets, weights = random_bags(11, 64, 30, 20, dtype, True, 9)
    pooled = ops.pooled_lookup(table, positions, offsets, weights)
    for bag in range(64):
        start, stop = int(offsets[bag]), int(offsets[bag + 1])
        alone = ops.pooled_lookup(
            table, positions[start:stop], torch.tensor([0, stop - start]), weights[start:stop]
        )
        assert torch.equal(alone[0], pooled[bag])


def test_repeats_bit_for_bit_with_two_threads():
    table, positions, offsets, weights = random_bags(5, 3000, 500, 16, torch.float32, True, 8)
    order, segments = segments_of(positions, 500)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            pooled = ops.pooled_lookup(table, positions, offsets, weights)
            gradient = ops.row_gradients(pooled, bag_of(offsets), order, segments, weights)
            results.append((pooled, gradient))
    finally:
        torch.set_num_threads(threads)
    for pooled, gradient in results[1:]:
        assert torch.equal(pooled, results[0][0]) and torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_strides(dtype):
    table, positions, offsets, weights = random_bags(9, 40, 15, 12, dtype, True)
    pooled = ops.pooled_lookup(table, positions, offsets, weights)
    column_major = table.t().contiguous().t()
    inside = torch.cat([table, table], dim=1)[:, :12]
    assert torch.equal(ops.pooled_lookup(column_major, positions, offsets, weights), pooled)
    assert torch.equal(ops.pooled_lookup(inside, positions, offsets, weights), pooled)


def test_nothing_to_look_up():
    empty = torch.zeros(0, dtype=torch.int64)
    none = ops.pooled_lookup(torch.zeros(0, 4), empty, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(none, torch.zeros(3, 4))
    assert ops.pooled_lookup(torch.ones(2, 4), empty, torch.zeros(1, dtype=torch.int64)).shape == (
        0,
        4,
    )
    gradient = ops.row_gradients(
        torch.zeros(0, 4), empty, empty, torch.zeros(1, dtype=torch.int64), torch.zeros(0)
    )
    assert gradient.shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_scale_gives_the_mean_of_embedding_bag(dtype):
    table, positions, offsets, _ = random_bags(2, 50, 9, 6, dtype, False)
    mean = ops.pooled_lookup(table, positions, offsets) * ops.mean_scale(offsets, dtype)
    expected = torch.nn.functional.embedding_bag(
        positions, table, offsets, mode="mean", include_last_offset=True
    )
    assert (offsets.diff() == 0).any() and mean.dtype == dtype
    torch.testing.assert_close(mean, expected)
