"""Lookups and row gradients of the kernels against the reference: all bits agree.

Expected values are computed on the CPU: products of weights rounded before they are added, and for
row gradients the kernels' own order of additions.
"""

from __future__ import annotations

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from jagged import bag_of, random_bags, segments_of
from triton_here import DIMS, gradients, here, kernels, lookup

from distcache.ops import reference
from distcache.ops.reference import CHUNK, segment_chunks


def expected_lookup(rows, positions, offsets, weights):
    """First to last, products rounded."""
    if weights is None:
        return reference.pooled_lookup(rows, positions, offsets)
    products = rows[positions] * weights.unsqueeze(1)
    return reference.pooled_lookup(products, torch.arange(len(products)), offsets)


@examples(25)
@given(
    seed=st.integers(0, 1 << 30),
    bags=st.integers(0, 40),
    rows=st.integers(1, 12),
    dim=st.sampled_from(DIMS),
    weighted=st.booleans(),
    longest=st.sampled_from([0, 1, 3, 9, 40]),
)
def test_lookup_equals_the_reference(seed, bags, rows, dim, weighted, longest):
    call = random_bags(seed, bags, rows, dim, torch.float32, weighted, longest)
    found = lookup(*call)
    assert found.shape == (bags, dim) and found.dtype == torch.float32
    assert torch.equal(found, expected_lookup(*call))


@examples(25)
@given(
    seed=st.integers(0, 1 << 30),
    bags=st.integers(1, 40),
    rows=st.integers(1, 12),
    dim=st.sampled_from(DIMS),
    weighted=st.booleans(),
    skew=st.sampled_from([0.0, 0.5, 1.0]),
    chunk=st.sampled_from([2, 5, CHUNK]),
)
def test_gradients_equal_the_reference(seed, bags, rows, dim, weighted, skew, chunk):
    """`skew`: the share of ids that name row 0; rows that no id names stay 0."""
    _, positions, offsets, weights = random_bags(seed, bags, rows, 1, torch.float32, weighted, 9)
    generator = torch.Generator().manual_seed(seed)
    positions[torch.rand(len(positions), generator=generator) < skew] = 0
    order, segments = segments_of(positions, rows)
    upstream = torch.randn(bags, dim, generator=generator)
    call = (upstream, bag_of(offsets), order, segments, weights)
    chunks = segment_chunks(segments, chunk)
    found = gradients(*call, chunks)
    assert torch.equal(found, reference.chunked_row_gradients(*call, chunks))
    exact = reference.row_gradients(*(t.double() if t is upstream else t for t in call))
    sums = reference.row_gradients(upstream.abs().double(), *call[1:])
    roundings = chunk * max(1, len(chunks.sizes)) + 1  # of a number on its way into the sum
    assert ((found - exact).abs() <= sums * roundings * 2**-24 * 1.01).all()


@pytest.mark.parametrize("dim", [4, 12])
def test_one_row_with_all_ids(dim):
    """Three passes, derived from the segments where they are not given."""
    count = CHUNK**2 + 77
    offsets = torch.arange(count + 1)
    order, segments = segments_of(torch.zeros(count, dtype=torch.int64), 1)
    upstream = torch.randn(count, dim, generator=torch.Generator().manual_seed(1))
    chunks = segment_chunks(segments)
    assert len(chunks.sizes) == 3
    call = (upstream, bag_of(offsets), order, segments, None)
    found = gradients(*call, chunks)
    assert torch.equal(found, reference.chunked_row_gradients(*call, chunks))
    assert torch.equal(found, gradients(*call))
    exact = upstream.double().sum(0, keepdim=True)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_short_rows_have_the_bits_of_the_reference():
    """Up to CHUNK occurrences the order of additions is that of the plain reference."""
    positions = torch.arange(6).repeat_interleave(torch.tensor([1, 2, 31, 32, 33, 64]))
    generator = torch.Generator().manual_seed(3)
    positions = positions[torch.randperm(len(positions), generator=generator)]
    order, segments = segments_of(positions, 6)
    upstream = torch.randn(len(positions), 20, generator=generator)
    call = (upstream, torch.arange(len(positions)), order, segments)
    found, plain = gradients(*call), reference.row_gradients(*call)
    assert torch.equal(found[:4], plain[:4])
    assert not torch.equal(found[4:], plain[4:])


def test_bits_of_sums_do_not_depend_on_labels_or_company():
    rows, bags, dim = 20, 120, 12
    table, positions, offsets, weights = random_bags(7, bags, rows, dim, torch.float32, True, 8)
    positions[::3] = 5  # one row is long
    generator = torch.Generator().manual_seed(1)
    label = torch.randperm(3 * rows, generator=generator)[:rows]
    larger = torch.randn(3 * rows, dim, generator=generator)
    larger[label] = table
    pooled = lookup(table, positions, offsets, weights)
    assert torch.equal(pooled, lookup(larger, label[positions], offsets, weights))

    upstream = torch.randn(bags, dim, generator=generator)
    bag = bag_of(offsets)
    gradient = gradients(upstream, bag, *segments_of(positions, rows), weights)
    relabelled = gradients(upstream, bag, *segments_of(label[positions], 3 * rows), weights)
    assert torch.equal(gradient, relabelled[label])
    alone = (positions == 5).nonzero().squeeze(1)
    assert len(alone) > CHUNK
    segments = torch.tensor([0, len(alone)])
    one = gradients(upstream, bag, alone, segments, weights)
    assert torch.equal(one[0], gradient[5])


def test_strides_and_autograd():
    table, positions, offsets, _ = random_bags(9, 20, 15, 12, torch.float32, False)
    column_major = table.t().contiguous().t().requires_grad_()
    pooled = kernels.pooled_lookup(here(column_major), here(positions), here(offsets))
    assert not pooled.requires_grad
    assert torch.equal(pooled.cpu(), lookup(table, positions, offsets, None))
