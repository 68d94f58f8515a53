"""The reference row operations against loops and autograd, and their independence of labels; who
runs an operation: the device, the dtype, `DISTCACHE_OPS` and what is installed decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from jagged import bag_of, random_bags, segments_of

from distcache import ops
from distcache.errors import ConfigError, PlanError
from distcache.layout import HALVES
from distcache.ops import reference
from distcache.ops.long_segments import segment_chunks
from distcache.ops.reference import Rule, as_numpy, put, take_rows

DTYPES = [torch.float32, torch.float64]
DIMS = [1, 3, 4, 12, 16, 20, 33]


def loop_lookup(rows, positions, offsets, weights):
    out = torch.zeros(len(offsets) - 1, rows.shape[1], dtype=rows.dtype)
    for bag in range(len(offsets) - 1):
        for at in range(int(offsets[bag]), int(offsets[bag + 1])):
            scale = 1.0 if weights is None else weights[at]
            out[bag] += rows[positions[at]] * scale
    return out


@examples(60)
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
    assert pooled.dtype == dtype and pooled.shape == (bags, dim) and not pooled.requires_grad
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_bits_do_not_depend_on_labels_or_company(dim, dtype, weighted):
    """Permuted rows, relabelled positions, more rows around, strides, company: the same bits."""
    rows, bags = 50, 300
    table, positions, offsets, weights = random_bags(7, bags, rows, dim, dtype, weighted, 20)
    pooled = ops.pooled_lookup(table, positions, offsets, weights)
    generator = torch.Generator().manual_seed(1)
    label = torch.randperm(3 * rows, generator=generator)[:rows]
    larger = torch.randn(3 * rows, dim, generator=generator).to(dtype)
    larger[label] = table
    for other in (larger, larger.t().contiguous().t(), torch.cat([larger, larger], dim=1)[:, :dim]):
        again = ops.pooled_lookup(other, label[positions], offsets, weights)
        assert torch.equal(pooled, again)
    for bag in range(0, bags, 5):  # and alone
        at = slice(int(offsets[bag]), int(offsets[bag + 1]))
        own = None if weights is None else weights[at]
        ends = torch.tensor([0, at.stop - at.start])
        assert torch.equal(ops.pooled_lookup(table, positions[at], ends, own)[0], pooled[bag])

    upstream = torch.randn(bags, dim, generator=generator).to(dtype)
    order, segments = segments_of(positions, rows)
    gradient = ops.row_gradients(upstream, bag_of(offsets), order, segments, weights)
    order, segments = segments_of(label[positions], 3 * rows)
    relabelled = ops.row_gradients(upstream, bag_of(offsets), order, segments, weights)
    assert torch.equal(gradient, relabelled[label])
    assert relabelled.count_nonzero() == relabelled[label].count_nonzero()


def test_repeats_bit_for_bit_with_two_threads():
    table, positions, offsets, weights = random_bags(5, 3000, 500, 16, torch.float32, True, 8)
    order, segments = segments_of(positions, 500)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        pooled = ops.pooled_lookup(table, positions, offsets, weights)
        gradient = ops.row_gradients(pooled, bag_of(offsets), order, segments, weights)
        results.append((pooled, gradient))
    torch.set_num_threads(threads)
    for pooled, gradient in results[1:]:
        assert torch.equal(pooled, results[0][0]) and torch.equal(gradient, results[0][1])


def test_nothing_to_look_up():
    empty = torch.zeros(0, dtype=torch.int64)
    for rows, bags in ((torch.zeros(0, 4), 3), (torch.ones(2, 4), 0)):
        found = ops.pooled_lookup(rows, empty, torch.zeros(bags + 1, dtype=torch.int64))
        assert torch.equal(found, torch.zeros(bags, 4))
    one = torch.zeros(1, dtype=torch.int64)
    assert ops.row_gradients(torch.zeros(0, 4), empty, empty, one, one[:0]).shape == (0, 4)


def test_chunks_of_a_segment_begin_at_its_start_and_cover_it():
    segments = torch.tensor([0, 3, 3, 103, 104, 137, 169])
    chunks = segment_chunks(segments)
    (starts, ends), (first, last) = chunks.passes()
    assert chunks.rows.tolist() == [2, 4]
    assert starts.tolist() == [3, 35, 67, 99, 104, 136]
    assert ends.tolist() == [35, 67, 99, 103, 136, 137]
    assert first.tolist() == [0, 4] and last.tolist() == [4, 6]
    assert chunks.sizes == (6, 2)
    for none in (torch.tensor([0]), torch.tensor([0, 32, 64])):
        assert segment_chunks(none).passes() == [] and len(segment_chunks(none).rows) == 0


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
def test_a_disabled_update_writes_nothing(kind):
    rule = Rule("adam", (0.1, 1e-8, 0.1, 0.01))
    weight, state, slots = torch.randn(9, 4), torch.rand(9, 8), torch.tensor([7, 0, 3])
    before, state_before = weight.clone(), state.clone()
    broken = torch.full((3, 4), float("nan"))
    ops.update_rows(rule, weight, state, slots, broken, torch.zeros((), dtype=kind))
    assert torch.equal(weight, before) and torch.equal(state, state_before)
    reference._put(weight, slots, broken, torch.zeros(1, dtype=kind))  # as on a GPU
    assert torch.equal(weight, before)
    gradient = torch.randn(3, 4)
    ops.update_rows(rule, weight, state, slots, gradient, torch.ones((), dtype=kind))
    ops.update_rows(rule, before, state_before, slots, gradient)
    assert torch.equal(weight, before) and torch.equal(state, state_before)
    reference._put(weight, slots, gradient, torch.ones(1, dtype=kind))
    assert torch.equal(weight[slots], gradient)


def test_what_makes_no_sense_is_refused():
    weight = torch.ones(1, 2)
    with pytest.raises(ConfigError, match="adagrad keeps state"):
        reference.update(Rule("adagrad", (0.1, 0.0)), weight, None, weight)


@examples(100)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([1, 2, 3, 16, 17, 64, 511]),
    dtype=st.sampled_from([*DTYPES, *HALVES]),
    strided=st.booleans(),
)
def test_rows_are_taken_and_put_as_by_plain_indexing(seed, width, dtype, strided) -> None:
    """Into a part of a larger table too, and from values that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    total, first = (int(n) for n in torch.randint(1, 900, (2,), generator=generator))
    table = torch.randn(total + first, width, generator=generator).to(dtype)
    table[::7] = float("nan")
    count = int(torch.randint(0, total + 1, (1,), generator=generator))
    rows = torch.randperm(total, generator=generator)[:count]
    out = np.empty((count, width), as_numpy(table).dtype)
    take_rows(as_numpy(table[first:]), rows.numpy(), out)
    assert out.tobytes() == as_numpy(table[first:][rows]).tobytes()
    values = torch.randn(count, 2 * width, generator=generator).to(dtype)
    values = values[:, ::2] if strided else values[:, :width].contiguous()
    want = table.clone()
    want[first:].index_copy_(0, rows, values)
    part = table[first:]
    assert put(part, rows, values) is part
    assert as_numpy(table).tobytes() == as_numpy(want).tobytes()


def test_halves_of_two_kinds_do_not_mix() -> None:
    with pytest.raises(PlanError, match=r"bfloat16 values .* of float16"):
        put(torch.zeros(3, 2).half(), torch.tensor([1]), torch.ones(1, 2).bfloat16())


@pytest.mark.parametrize(
    "values", [torch.ones(2, 4), torch.ones(4, 4), torch.ones(3, 5), torch.ones(3, 4).double()]
)
def test_what_does_not_fit_is_refused_before_anything_is_written(values: torch.Tensor) -> None:
    table = torch.zeros(6, 4)
    with pytest.raises(PlanError, match=r"for [23] rows of float32"):
        put(table, torch.tensor([0, 2, 4]), values)
    for bad in (-1, 6):
        with pytest.raises(PlanError, match=rf"row {bad} is outside \[0, 6\)"):
            put(table, torch.tensor([0, bad]), torch.ones(2, 4))
        with pytest.raises(PlanError, match=f"row {bad}"):
            take_rows(table.numpy(), np.array([bad]), np.empty((1, 4), np.float32))
    assert not table.any()


@pytest.fixture
def choose(monkeypatch):
    """Set `DISTCACHE_OPS` for one test."""

    def choose(value):
        monkeypatch.setenv(ops.VARIABLE, value)
        ops.choice.cache_clear()

    yield choose
    ops.choice.cache_clear()


class OnGpu:
    """What the dispatch looks at of a tensor on a GPU."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cuda")


def test_cpu_tensors_go_to_the_reference(choose):
    for value in ("", "reference"):
        choose(value)
        assert ops.body(torch.ones(2, 2)) is reference
        assert ops.chunks_for(torch.tensor([0, 40]), torch.device("cpu")) is None


def test_triton_takes_float32_only(choose):
    pytest.importorskip("triton", reason="Triton is not installed")
    choose("triton")
    device = torch.device("cpu" if ops.triton_bodies().INTERPRETED else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1")
    floats = torch.ones(2, 2, device=device)
    assert ops.body(floats) is ops.body(floats, None, floats) is ops.triton_bodies()
    assert ops.body(floats.double()) is ops.body(floats, floats.double(), floats) is reference
    chunks = ops.chunks_for(torch.tensor([0, 40]), device)
    assert chunks is not None and chunks.sizes == (2, 1) and chunks.table.device.type == device.type


def test_what_gpu_tensors_run(choose, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    kernels = ops.triton_bodies()
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    choose("")
    assert ops.body(OnGpu()) is kernels
    choose("reference")
    assert ops.body(OnGpu()) is reference
    assert ops.chunks_for(torch.tensor([0, 40]), torch.device("cuda")) is None
    choose("cuda")
    with pytest.raises(ConfigError, match="DISTCACHE_OPS='cuda' is not 'reference' or 'triton'"):
        ops.pooled_lookup(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), torch.arange(2))
    monkeypatch.setattr(ops, "triton_bodies", lambda: None)
    choose("")
    assert ops.body(OnGpu()) is reference
    choose("triton")
    with pytest.raises(ConfigError, match="DISTCACHE_OPS=triton, but Triton is not installed"):
        ops.body(OnGpu())
