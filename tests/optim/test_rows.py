"""Row optimizers against torch.optim and FBGEMM, and their independence of place and layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.errors import ConfigError
from distcache.ops import reference
from distcache.optim import SGD, Adagrad, Adam, RowWiseAdagrad, apply_rows, row_update

NAMES = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
LR, EPS, BETAS, INITIAL = 0.05, 1e-8, (0.9, 0.99), 0.1


def spec(name):
    return row_update(name, LR, EPS, BETAS, INITIAL)


def update(optimizer, weight, state, gradient, lr, step):
    """One step on gathered rows [U, D] and their state [U, S], in place."""
    reference.update(optimizer.rule(lr, step), weight, state, gradient)


def new_state(optimizer, count, dim, dtype=torch.float64):
    width = optimizer.state_width(dim)
    return torch.full((count, width), optimizer.initial_state(dim), dtype=dtype) if width else None


def column_major(values):
    """The same values [U, D], a copy with other strides."""
    return values.t().clone(memory_format=torch.contiguous_format).t()


class LoopRowWiseAdagrad:
    """Row-wise Adagrad, one row at a time (torch.optim has none)."""

    def __init__(self, parameter):
        self.parameter, self.sums, self.lr = parameter, [INITIAL] * len(parameter), LR

    def step(self):
        gradient = self.parameter.grad.coalesce()
        values = gradient.values()
        for row, value in zip(gradient.indices()[0].tolist(), values, strict=True):
            self.sums[row] += (value * value).mean().item()
            self.parameter.data[row] -= self.lr * value / (self.sums[row] ** 0.5 + EPS)


def torch_optimizer(name, parameter):
    if name == "sgd":
        return torch.optim.SGD([parameter], lr=LR)
    if name == "adagrad":
        return torch.optim.Adagrad([parameter], lr=LR, eps=EPS, initial_accumulator_value=INITIAL)
    if name == "adam":
        return torch.optim.SparseAdam([parameter], lr=LR, eps=EPS, betas=BETAS)
    return LoopRowWiseAdagrad(parameter)


def set_rate(optimizer, lr):
    if isinstance(optimizer, LoopRowWiseAdagrad):
        optimizer.lr = lr
    else:
        optimizer.param_groups[0]["lr"] = lr


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@examples(40)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 20),
    dim=st.sampled_from([1, 2, 3, 8, 16, 20]),
)
def test_equal_to_torch_over_random_rows(name, seed, count, dim):
    """Random touched rows (at times none), some named with a zero gradient, a changing rate."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    theirs, optimizer = torch_optimizer(name, parameter), spec(name)
    state = new_state(optimizer, count, dim)
    for step in range(1, 9):
        touched = (torch.rand(count, generator=generator) < 0.4).nonzero().squeeze(1)
        if step == 4:
            touched = touched[:0]
        gradient = torch.randn(len(touched), dim, generator=generator, dtype=torch.float64)
        gradient[: len(touched) // 3] = 0
        parameter.grad = torch.sparse_coo_tensor(touched.unsqueeze(0), gradient, weight.shape)
        lr = LR / step
        set_rate(theirs, lr)
        theirs.step()
        order = torch.randperm(len(touched), generator=generator)
        apply_rows(optimizer, weight, state, touched[order], gradient[order], lr, step)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-14, atol=1e-15)
    for key, columns in optimizer.state_columns(dim).items():
        if name == "rowwise_adagrad":
            expected = torch.tensor(theirs.sums, dtype=torch.float64).unsqueeze(1)
        else:
            expected = theirs.state[parameter].get(key, state[:, columns])
        torch.testing.assert_close(state[:, columns], expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_equal_to_fbgemm(name):
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    optimizers = pytest.importorskip("fbgemm_gpu.split_embedding_configs").EmbOptimType
    kind = {
        "sgd": optimizers.EXACT_SGD,
        "adagrad": optimizers.EXACT_ADAGRAD,
        "rowwise_adagrad": optimizers.EXACT_ROWWISE_ADAGRAD,
    }[name]
    count, dim = 10, 8
    tables = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(count, dim, common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
        optimizer=kind,
        learning_rate=LR,
        eps=EPS,
    )
    weight = tables.split_embedding_weights()[0]
    weight.data.copy_(torch.randn(count, dim, generator=torch.Generator().manual_seed(1)))
    ours, optimizer = weight.detach().clone(), row_update(name, LR, EPS)
    state = new_state(optimizer, count, dim, torch.float32)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 6):
        ids = torch.randperm(count, generator=generator)[:6]
        gradient = torch.randn(6, dim, generator=generator)
        tables(ids, torch.arange(7)).backward(gradient)
        apply_rows(optimizer, ours, state, ids, gradient, LR, step)
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [1, 3, 5, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_has_the_bits_it_has_in_company(name, dim, dtype):
    count, optimizer = 101, spec(name)
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype)
    gradient = torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype)
    width = optimizer.state_width(dim)
    state = torch.rand(count, width, generator=generator, dtype=torch.float64).to(dtype)
    together, together_state = weight.clone(), state.clone()
    update(optimizer, together, together_state if width else None, gradient, LR, 3)
    assert not torch.equal(together, weight)
    for row in range(count):
        one, one_state = weight[row : row + 1].clone(), state[row : row + 1].clone()
        update(optimizer, one, one_state if width else None, gradient[row : row + 1].clone(), LR, 3)
        assert torch.equal(one[0], together[row]) and torch.equal(one_state[0], together_state[row])
    wide = torch.randn(count, dim + 3, generator=generator).to(dtype)
    wide[:, 2 : dim + 2] = gradient
    for other in (wide[:, 2 : dim + 2], column_major(gradient)):
        again, again_state = column_major(weight), column_major(state)
        update(optimizer, again, again_state if width else None, other, LR, 3)
        assert torch.equal(again, together) and torch.equal(again_state, together_state)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_slots_change_no_bit(name, monkeypatch):
    dim, count, optimizer = 12, 40, spec(name)
    generator = torch.Generator().manual_seed(5)
    weight, gradient = torch.randn(2, count, dim, generator=generator)
    state = new_state(optimizer, count, dim, torch.float32)
    expected = weight.clone()
    kept = gradient.clone()
    update(optimizer, expected, None if state is None else state.clone(), gradient, LR, 1)
    assert torch.equal(gradient, kept)
    for elements in (1, 5 * dim, 1 << 20):
        monkeypatch.setitem(reference.BLOCK_ELEMENTS, "cpu", elements)
        cache = torch.full((3 * count, dim), 7.0)
        cache_state = new_state(optimizer, 3 * count, dim, torch.float32)
        slots = torch.randperm(3 * count, generator=generator)[:count]
        cache[slots] = weight
        apply_rows(optimizer, cache, cache_state, slots, gradient, LR, 1)
        assert torch.equal(cache[slots], expected)
        others = torch.ones(3 * count, dtype=torch.bool).index_fill_(0, slots, False)
        assert (cache[others] == 7.0).all()
        if cache_state is not None:
            assert (cache_state[others] == optimizer.initial_state(dim)).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_state_shapes(name):
    optimizer = spec(name)
    assert (
        optimizer.state_width(6) == {"sgd": 0, "adagrad": 6, "rowwise_adagrad": 1, "adam": 12}[name]
    )
    columns = list(optimizer.state_columns(6).values())
    assert [c.start for c in columns] == [0, 6][: len(columns)]
    assert (columns[-1].stop if columns else 0) == optimizer.state_width(6)
    assert optimizer.name == name and tuple(optimizer.state_columns(6)) == optimizer.state_names
    empty = torch.zeros(0, dtype=torch.int64)
    weight, state = torch.ones(3, 6), new_state(optimizer, 3, 6, torch.float32)
    apply_rows(optimizer, weight, state, empty, torch.zeros(0, 6), LR, 1)
    update(optimizer, torch.zeros(0, 6), None if state is None else state[:0], weight[:0], LR, 1)
    assert (weight == 1).all()


def test_specs_are_frozen_and_checked():
    assert Adagrad(lr=0.01) == Adagrad(0.01, 1e-8, 0.0)
    assert Adagrad(0.01) != RowWiseAdagrad(0.01)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SGD(0.1).lr = 0.2
    for make, words in [
        (lambda: SGD(-1.0), "SGD: lr=-1.0"),
        (lambda: SGD(float("nan")), "lr=nan"),
        (lambda: Adagrad(0.1, eps=-1e-8), "eps=-1e-08"),
        (lambda: RowWiseAdagrad(0.1, initial_accumulator=-1), "initial_accumulator=-1"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: row_update("lamb", 0.1), "'lamb'"),
        (lambda: update(Adam(0.1), torch.ones(1, 1), None, torch.ones(1, 1), 0.1, 1), "state"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make()
