"""The kernels against the reference, to the bit: compiled on a GPU, else in Triton's interpreter.

Expected values are computed on the CPU: products of weights rounded before they are added, row
gradients in the kernels' own order of additions, and IEEE square roots (PyTorch's vectorised ones
are up to one unit in the last place off).
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from jagged import bag_of, chunked_row_gradients, chunks_of, random_bags, segments_of

from distcache import ops
from distcache.errors import ConfigError
from distcache.layout import HALVES
from distcache.ops import formulas, long_segments, reference
from distcache.ops.long_segments import CHUNK, SegmentChunks, segment_chunks
from distcache.ops.reference import Rule
from distcache.versions import installed, minor

pytest.importorskip("triton", reason="Triton is not installed")
kernels = ops.triton_bodies()

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not kernels.INTERPRETED and not CUDA:
    pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1", True)
if kernels.INTERPRETED and CUDA:
    pytest.skip("TRITON_INTERPRET=1 is set: unset it to test the kernels on the GPU", True)
if kernels.INTERPRETED and minor(installed("triton")) < "3.7" and np.__version__ >= "2.4":
    pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4", True)

DIMS = [1, 2, 3, 4, 5, 8, 12, 16, 20, 33, 64, 100, 128, 260, 512]


def here(value):
    """A tensor, None or chunk tables on the device of the kernels."""
    if isinstance(value, SegmentChunks):
        return replace(value, table=value.table.to(DEVICE))
    return None if value is None else value.to(DEVICE)


def lookup(*call):
    """`pooled_lookup` of the kernels, on the CPU."""
    return kernels.pooled_lookup(*map(here, call)).cpu()


def gradients(*call):
    """`row_gradients` of the kernels, on the CPU."""
    return kernels.row_gradients(*map(here, call)).cpu()


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
    with patch.object(long_segments, "CHUNK", chunk):
        chunks, twin = segment_chunks(segments), chunks_of(segments, chunk)
        found = gradients(*call, chunks)
    assert chunks.sizes == twin.sizes and torch.equal(chunks.table, twin.table)
    assert torch.equal(found, chunked_row_gradients(*call, chunks))
    if weights is None:  # up to `chunk` occurrences the order is that of the plain reference
        short = segments.diff() <= chunk
        assert torch.equal(found[short], reference.row_gradients(*call)[short])
    exact = reference.row_gradients(*(t.double() if t is upstream else t for t in call))
    sums = reference.row_gradients(upstream.abs().double(), *call[1:])
    roundings = chunk * max(1, len(chunks.sizes)) + 1  # of a number on its way into the sum
    assert ((found - exact).abs() <= sums * roundings * 2**-24 * 1.01).all()


def test_strides_and_autograd():
    table, positions, offsets, _ = random_bags(9, 20, 15, 12, torch.float32, False)
    column_major = table.t().contiguous().t().requires_grad_()
    pooled = kernels.pooled_lookup(here(column_major), here(positions), here(offsets))
    assert not pooled.requires_grad
    assert torch.equal(pooled.cpu(), lookup(table, positions, offsets, None))


TAKEN = (1 - 0.9, 1 - 0.999)
RULES = [
    Rule("sgd", (0.05,)),
    Rule("momentum_sgd", (0.05, 0.9)),
    Rule("adagrad", (0.05, 1e-8)),
    Rule("rowwise_adagrad", (0.05, 1e-8)),
    Rule("adam", (0.043, 1e-8, *TAKEN)),
    Rule("partial_rowwise_adam", (0.043, 1e-8, *TAKEN)),
    Rule("counted_adam", (0.05, 1e-8, *TAKEN)),
    Rule("ftrl", (0.05, 0.01, 0.02), 2),
    Rule("ftrl", (0.05, 0.01, 0.02), 0b1101100),
    Rule("ftrl", (0.05, 0.0, 0.0), 1),
    Rule("sgd", (0.05,), decays="decoupled", decay=0.01),
    Rule("rowwise_adagrad", (0.05, 1e-8), decays="l2", decay=0.1),
    Rule("adam", (0.043, 1e-8, *TAKEN), decays="decoupled", decay=0.01),
    Rule("partial_rowwise_adam", (0.043, 1e-8, *TAKEN), decays="l2", decay=0.1),
]
NAMED = [f"{rule.name}{rule.decays and '_'}{rule.decays}{rule.exponent or ''}" for rule in RULES]
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=NAMED)


@pytest.fixture
def ieee_sqrt(monkeypatch):
    """Square roots of the reference are correctly rounded: float64's, rounded to float32."""

    def sqrt(values):
        return values.double().sqrt().to(values.dtype)

    monkeypatch.setattr(formulas, "sqrt", sqrt)


def random_rows(seed, rule, count, capacity, dim):
    """weight [C, D], state [C, S] or None, slots [U], gradient [U, D]."""
    generator = torch.Generator().manual_seed(seed)
    width = formulas.FORMULAS[rule.name].width(dim)
    return (
        torch.randn(capacity, dim, generator=generator),
        torch.rand(capacity, width, generator=generator) if width else None,
        torch.randperm(capacity, generator=generator)[:count],
        torch.randn(count, dim, generator=generator),
    )


def updated(rule, weight, state, slots, gradient, enabled=None):
    """Weight and state after the kernel, on the CPU; the arguments stay as they are."""
    weight, state = weight.clone().to(DEVICE), None if state is None else state.clone().to(DEVICE)
    kernels.update_rows(rule, weight, state, here(slots), here(gradient), here(enabled))
    return weight.cpu(), torch.empty(0) if state is None else state.cpu()


@EACH_RULE
@pytest.mark.parametrize("dim", DIMS)
def test_updates_have_the_bits_of_the_reference(rule, dim, ieee_sqrt):
    for count, capacity in ((1, 1), (1, 5), (23, 50), (40, 40)):
        weight, state, slots, gradient = random_rows(dim, rule, count, capacity, dim)
        gradient[0, 1:2] = 0.0
        found = updated(rule, weight, state, slots, gradient)
        before = weight.clone()
        reference.update_rows(rule, weight, state, slots, gradient)
        assert torch.equal(found[0], weight) and not torch.equal(weight, before)
        assert state is None or torch.equal(found[1], state)


@EACH_RULE
@pytest.mark.parametrize("dtype", HALVES[:1] if kernels.INTERPRETED else HALVES)
def test_halves_are_updated_in_float32_and_rounded_to_nearest(rule, dtype, ieee_sqrt):
    """Triton's interpreter cuts bfloat16 off; what is compiled rounds (`test_triton_compiles`)."""
    weight, state, slots, gradient = random_rows(3, rule, 23, 50, 6)
    weight = weight.to(dtype)
    wide, kept = weight.float(), None if state is None else state.clone()
    found = updated(rule, weight, state, slots, gradient)
    reference.update_rows(rule, weight, state, slots, gradient)
    assert torch.equal(found[0], weight)
    reference.update_rows(rule, wide, kept, slots, gradient)
    assert torch.equal(weight, wide.to(dtype)) and not torch.equal(wide, weight.float())
    assert state is None or (torch.equal(found[1], state) and torch.equal(kept, state))


@EACH_RULE
def test_bits_of_updates_depend_on_the_row_alone(rule):
    """Other slots, capacity, order, company and strides: the same bits."""
    dim, count = 20, 30
    weight, state, slots, gradient = random_rows(9, rule, count, 40, dim)
    first = updated(rule, weight, state, slots, gradient)
    generator = torch.Generator().manual_seed(10)
    moved, order = torch.randperm(90, generator=generator)[:count], torch.randperm(count)
    wide = torch.full((90, dim + 8), 7.0)
    wide[moved, 4 : dim + 4] = weight[slots]
    wide_state = None
    if state is not None:
        wide_state = torch.zeros(90, state.shape[1])
        wide_state[moved] = state[slots]
    held = wide.to(DEVICE)
    view = held[:, 4 : dim + 4]
    wide_state = here(wide_state)
    apart = torch.cat((gradient, gradient), dim=1)[:, :dim]
    kernels.update_rows(rule, view, wide_state, here(moved[order]), here(apart[order]))
    assert torch.equal(view.cpu()[moved], first[0][slots])
    wide[moved, 4 : dim + 4] = first[0][slots]
    assert torch.equal(held.cpu(), wide)  # and nothing else has changed
    if state is not None:
        assert torch.equal(wide_state.cpu()[moved], first[1][slots])
    for row in (0, 17):
        at = slice(row, row + 1)
        alone = updated(rule, weight, state, slots[at], gradient[at])
        assert torch.equal(alone[0][slots[row]], first[0][slots[row]])


@EACH_RULE
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
def test_a_disabled_update_writes_nothing(rule, kind):
    weight, state, slots, gradient = random_rows(5, rule, 7, 11, 6)
    on = updated(rule, weight, state, slots, gradient, torch.ones((), dtype=kind))
    plain = updated(rule, weight, state, slots, gradient)
    assert torch.equal(on[0], plain[0]) and torch.equal(on[1], plain[1])
    assert not torch.equal(on[0], weight)
    gradient[:] = float("nan")
    off = updated(rule, weight, state, slots, gradient, torch.zeros(1, dtype=kind))
    assert torch.equal(off[0], weight) and (state is None or torch.equal(off[1], state))


def test_nothing_to_do():
    none, zero = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for rows, bags in ((torch.zeros(0, 4), 3), (torch.ones(2, 4), 0), (torch.ones(2, 4), 2)):
        found = lookup(rows, none, torch.zeros(bags + 1, dtype=torch.int64), None)
        assert torch.equal(found, torch.zeros(bags, 4))
        assert gradients(rows, none, none, zero, None, segment_chunks(zero)).shape == (0, 4)
    weight, _ = updated(RULES[0], torch.ones(3, 4), None, none, torch.zeros(0, 4))
    assert (weight == 1).all()


@examples(40)
@given(
    seed=st.integers(0, 2**16),
    dim=st.sampled_from(DIMS),
    sizes=st.tuples(st.integers(1, 90), st.integers(0, 90)),
    double=st.booleans(),
    indexed=st.sampled_from(["source", "target", "both", "neither"]),
)
def test_copies_equal_the_reference(seed, dim, sizes, double, indexed) -> None:
    rows, count = max(sizes), min(sizes)
    dtype, rng = torch.float64 if double else torch.float32, torch.Generator().manual_seed(seed)
    tall, short = (torch.randn(n, dim, generator=rng, dtype=dtype) for n in (rows, count))
    at, to = (torch.randperm(rows, generator=rng)[:count] for _ in range(2))
    source, source_rows = (tall, at) if indexed in ("source", "both") else (short, None)
    target, target_rows = (tall + 1, to) if indexed in ("target", "both") else (short + 1, None)
    found, wanted = target.to(DEVICE, copy=True), target.clone()
    with patch.object(kernels, "LINK_PROGRAMS", 1 + seed % 3):  # which take turns
        kernels.copy_rows(here(source), here(source_rows), found, here(target_rows))
    reference.copy_rows(source, source_rows, wanted, target_rows)
    assert torch.equal(found.cpu(), wanted)
    if len(wanted) > count:
        assert len(wanted) - count <= (wanted == target).all(1).sum()


def test_what_does_not_fit_is_refused():
    weight, slots, gradient = torch.ones(4, 3), torch.tensor([1, 2]), torch.ones(2, 3)
    across, rows, index = here(torch.ones(3, 4)).t(), torch.zeros(2, 8), torch.arange(2)
    for says, call in (
        ("adam keeps 6 floats", (RULES[4], weight, torch.ones(4, 3), slots, gradient)),
        ("adagrad keeps 3 floats", (RULES[2], weight, None, slots, gradient)),
        (
            "2 slots do not go with the gradients of 1",
            (RULES[0], weight, None, slots, gradient[:1]),
        ),
        ("`weight` has columns 4 elements apart", (RULES[0], across, None, slots, gradient)),
    ):
        with pytest.raises(ConfigError, match=says):
            kernels.update_rows(call[0], *map(here, call[1:]))
    wrong = torch.zeros(4, 5), torch.zeros(4, 8, dtype=torch.float64), torch.zeros(8, 4).t()
    for source in map(here, wrong):
        with pytest.raises(ConfigError, match=r"`source` .* contiguous rows of 8 torch.float32"):
            kernels.copy_rows(source, here(index), here(rows), None)
