"""Row optimizers against torch.optim and FBGEMM, whatever the place and layout of a row; the dense
optimizer: its state by name, and steps that a mask turns into nothing; the schedule of rates.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from reference_trainer import Settings, optimizers
from torch import nn

from distcache.errors import ConfigError
from distcache.ops import reference, update_rows
from distcache.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    CountedAdam,
    Ftrl,
    LearningRate,
    MomentumSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    by_table,
    dense_optimizer,
    load_state,
    masked_step,
    row_update,
    state_tensors,
    uncount,
)

LR, EPS, BETAS, INITIAL = 0.05, 1e-8, (0.9, 0.99), 0.1
APART = {"weight_decay": 0.2, "decoupled_weight_decay": True}
SPECS = {
    "sgd": SGD(LR),
    "sgd_apart": SGD(LR, **APART),
    "momentum_sgd": MomentumSGD(LR, 0.8),
    "momentum_sgd_l2": MomentumSGD(LR, 0.8, weight_decay=0.2),
    "momentum_sgd_apart": MomentumSGD(LR, 0.8, **APART),
    "adagrad": Adagrad(LR, EPS, INITIAL),
    "adagrad_l2": Adagrad(LR, EPS, INITIAL, weight_decay=0.2),
    "rowwise_adagrad": RowWiseAdagrad(LR, EPS, INITIAL),
    "rowwise_adagrad_l2": RowWiseAdagrad(LR, EPS, INITIAL, weight_decay=0.2),
    "rowwise_adagrad_apart": RowWiseAdagrad(LR, EPS, INITIAL, **APART),
    "adam": Adam(LR, BETAS, EPS),
    "adam_l2": Adam(LR, BETAS, EPS, weight_decay=0.2),
    "adamw": AdamW(LR, BETAS, EPS),
    "partial_rowwise_adam": PartialRowWiseAdam(LR, BETAS, 1e-3),
    "partial_rowwise_adam_apart": PartialRowWiseAdam(LR, BETAS, EPS, **APART),
    "counted_adam": CountedAdam(LR, BETAS, 1e-3),
    "counted_adam_l2": CountedAdam(LR, BETAS, EPS, weight_decay=0.2),
    "ftrl": Ftrl(LR),
    "ftrl_l1_l2": Ftrl(LR, 0.05, 0.1, -0.75, 0.0),
    "ftrl_linear": Ftrl(LR, 0.05, 0.1, -1.0, 0.2),
}
DENSE = pytest.mark.parametrize("name", SPECS)


def spec(name):
    return SPECS[name]


def update(optimizer, weight, state, gradient, lr, step):
    """One step on gathered rows [U, D] and their state [U, S], in place."""
    reference.update(optimizer.rule(lr, step), weight, state, gradient)


def new_state(optimizer, count, dim, dtype=torch.float64):
    width = optimizer.state_width(dim)
    return optimizer.initial_state(dim).to(dtype).repeat(count, 1) if width else None


def column_major(values):
    """The same values [U, D], a copy with other strides."""
    return values.t().clone(memory_format=torch.contiguous_format).t()


def torch_optimizer(name, parameter):
    own = vars(spec(name))
    own = {key: value for key, value in own.items() if key != "lr"}
    settings = Settings(spec(name).name, (), LR, LR, **own)
    return optimizers(settings, nn.Linear(1, 1), {"t": SimpleNamespace(weight=parameter)})[1]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@examples(40)
@given(
    name=st.sampled_from(list(SPECS)),
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 20),
    dim=st.sampled_from([1, 2, 3, 8, 16, 20]),
)
def test_equal_to_torch_over_random_rows(name, seed, count, dim):
    """Random touched rows (at times none), some named with a zero gradient, a changing rate."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    parameter = nn.Parameter(weight.clone())
    theirs, optimizer = torch_optimizer(name, parameter), spec(name)
    state = new_state(optimizer, count, dim)
    for step in range(1, 9):
        touched = (torch.rand(count, generator=generator) < 0.4).nonzero().squeeze(1)
        if step == 4:
            touched = touched[:0]
        gradient = torch.randn(len(touched), dim, generator=generator, dtype=torch.float64)
        gradient[: len(touched) // 3] = 0
        parameter.grad = torch.sparse_coo_tensor(touched.unsqueeze(0), gradient, weight.shape)
        theirs.param_groups[0]["lr"] = lr = LR / step
        theirs.step()
        order = torch.randperm(len(touched), generator=generator)
        update_rows(optimizer.rule(lr, step), weight, state, touched[order], gradient[order])
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-14, atol=1e-15)
    for key, columns in optimizer.state_columns(dim).items():
        found = theirs.state[parameter]
        expected = found.get(key, state[:, columns]).view(count, -1)
        if key.startswith("bias_correction"):
            expected = 1 - optimizer.betas[int(key[-1]) - 1] ** found["row_counter"]
        torch.testing.assert_close(state[:, columns], expected, rtol=1e-14, atol=1e-15)


TWINS = {
    "sgd_apart": (torch.optim.SGD, {"weight_decay": 0.2}),
    "momentum_sgd": (torch.optim.SGD, {"momentum": 0.8}),
    "momentum_sgd_l2": (torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.2}),
    "adagrad_l2": (
        torch.optim.Adagrad,
        {"eps": EPS, "initial_accumulator_value": INITIAL, "weight_decay": 0.2},
    ),
    "counted_adam": (torch.optim.Adam, {"betas": BETAS, "eps": 1e-3}),
    "counted_adam_l2": (torch.optim.Adam, {"betas": BETAS, "eps": EPS, "weight_decay": 0.2}),
    "partial_rowwise_adam": (torch.optim.Adam, {"betas": BETAS, "eps": 1e-3}),
    "partial_rowwise_adam_apart": (
        torch.optim.AdamW,
        {"betas": BETAS, "eps": EPS, "weight_decay": 0.2},
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_on_rows_of_one_element_that_are_all_named_it_is_torchs_dense_one(name):
    kind, settings = TWINS[name]
    generator, count, optimizer = torch.Generator().manual_seed(3), 9, spec(name)
    weight = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    parameter, state = nn.Parameter(weight.clone()), new_state(optimizer, count, 1)
    theirs = kind([parameter], lr=LR, **settings)
    for step in range(1, 8):
        gradient = torch.randn(count, 1, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        theirs.step()
        update_rows(optimizer.rule(LR, step), weight, state, torch.arange(count), gradient)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-13, atol=1e-14)


def test_ftrl_by_hand():
    """Two steps of one weight, from TensorFlow's formula; at a rate of 0 nothing moves."""
    optimizer, weight = Ftrl(0.5, 0.1, 0.25, -0.5, 0.0), torch.tensor([[2.0]], dtype=torch.float64)
    state, found = new_state(optimizer, 1, 1), []
    for step, (gradient, lr) in enumerate([(3.0, 0.5), (-4.0, 0.5), (7.0, 0.0)], 1):
        gradient = torch.full((1, 1), gradient, dtype=torch.float64)
        update_rows(optimizer.rule(lr, step), weight, state, torch.tensor([0]), gradient)
        found.append([*weight[0].tolist(), *state[0].tolist()])
    first = (-0.1 + 9) / (3 / 0.5 + 0.5)  # sum = 9, linear = 3 - 3 / 0.5 2 = -9
    linear = -9 - 4 - (5 - 3) / 0.5 * first
    second = (-0.1 - linear) / (5 / 0.5 + 0.5)
    assert found[0] == pytest.approx([first, 9, -9], rel=1e-14)
    assert found[1] == pytest.approx([second, 25, linear], rel=1e-14)
    assert found[2] == found[1]
    small = Ftrl(0.5, 100.0)
    update_rows(small.rule(0.5, 1), weight, new_state(small, 1, 1), torch.tensor([0]), weight + 1)
    assert weight.item() == 0.0


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dim", [1, 3, 5, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_has_the_bits_it_has_in_company(name, dim, dtype):
    count, optimizer = 101, spec(name)
    generator = torch.Generator().manual_seed(dim)
    weight, gradient = torch.randn(2, count, dim, generator=generator, dtype=dtype)
    width = optimizer.state_width(dim)
    state = torch.rand(count, width, generator=generator, dtype=dtype)

    def updated(rows, own, values):
        rows, own = rows.clone(), own.clone()
        update(optimizer, rows, own if width else None, values, LR, 3)
        return rows, own

    run_on_all_ranks, together_state = updated(weight, state, gradient)
    assert not torch.equal(run_on_all_ranks, weight)
    for row in range(count):
        at = slice(row, row + 1)
        one, one_state = updated(weight[at], state[at], gradient[at])
        assert torch.equal(one, run_on_all_ranks[at]) and torch.equal(one_state, together_state[at])
    wide = torch.randn(count, dim + 3, generator=generator, dtype=dtype)
    wide[:, 2 : dim + 2] = gradient
    for other in (wide[:, 2 : dim + 2], column_major(gradient)):
        again, again_state = updated(column_major(weight), column_major(state), other)
        assert torch.equal(again, run_on_all_ranks) and torch.equal(again_state, together_state)


@pytest.mark.parametrize("name", SPECS)
def test_blocks_and_slots_change_no_bit(name, monkeypatch):
    dim, count, optimizer = 12, 40, spec(name)
    generator = torch.Generator().manual_seed(5)
    weight, gradient = torch.randn(2, count, dim, generator=generator)
    expected, kept = weight.clone(), gradient.clone()
    update(optimizer, expected, new_state(optimizer, count, dim, torch.float32), gradient, LR, 1)
    assert torch.equal(gradient, kept)
    for elements in (1, 5 * dim, 1 << 20):
        monkeypatch.setitem(reference.BLOCK_ELEMENTS, "cpu", elements)
        cache = torch.full((3 * count, dim), 7.0)
        cache_state = new_state(optimizer, 3 * count, dim, torch.float32)
        slots = torch.randperm(3 * count, generator=generator)[:count]
        cache[slots] = weight
        update_rows(optimizer.rule(LR, 1), cache, cache_state, slots, gradient)
        assert torch.equal(cache[slots], expected)
        others = torch.ones(3 * count, dtype=torch.bool).index_fill_(0, slots, False)
        assert (cache[others] == 7.0).all()
        if cache_state is not None:
            assert (cache_state[others] == optimizer.initial_state(dim).float()).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(-1.0), "SGD: lr=-1.0"),
        (lambda: SGD(float("nan")), "lr=nan"),
        (lambda: Adagrad(0.1, eps=-1e-8), "eps=-1e-08"),
        (lambda: RowWiseAdagrad(0.1, initial_accumulator=-1), "initial_accumulator=-1"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: MomentumSGD(0.1, 1.0), "MomentumSGD: momentum=1.0 must be in"),
        (lambda: AdamW(0.1, weight_decay=-1.0), "AdamW: weight_decay=-1.0"),
        (lambda: Ftrl(0.1, lr_power=0.0), r"Ftrl: lr_power=0.0 must be in \[-1, 0\)"),
        (lambda: Ftrl(0.1, weight_decay=0.1), "Ftrl: weight_decay=0.1: give l2"),
        (lambda: row_update("lion"), "optim=lion is unknown: choose sgd, momentum_sgd"),
        (lambda: update(Adam(0.1), torch.ones(1, 1), None, torch.ones(1, 1), 0.1, 1), "state"),
    ],
)
def test_settings_are_checked(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_tables_differ_in_rate_and_decay_alone():
    own = {"a": Adam(0.1), "b": Adam(0.2, weight_decay=0.1)}
    assert by_table(own, ["b", "a"]) == [own["b"], own["a"]]
    assert by_table(SGD(0.1), ["a", "b"]) == [SGD(0.1)]
    with pytest.raises(ConfigError, match=r"optimizers of tables \['a', 'b'\], not \['a'\]"):
        by_table(own, ["a"])
    for other in (Adam(0.1, eps=1e-3), AdamW(0.1)):
        with pytest.raises(ConfigError, match=r"table 'b' has Adam.* and 'a' has Adam.* alone"):
            by_table({"a": Adam(0.1), "b": other}, ["a", "b"])


def test_settings_are_values():
    assert Adagrad(lr=0.01) == Adagrad(0.01, 1e-8, 0.0) != RowWiseAdagrad(0.01)
    assert row_update("adamw", 0.1, momentum=0.5) == AdamW(0.1) != Adam(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SGD(0.1).lr = 0.2


@pytest.mark.parametrize("name", SPECS)
def test_the_dense_optimizer_has_the_settings_of_the_rows(name):
    weight = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Linear(3, 7, bias=False), nn.Linear(3, 7, bias=False)
    own = {key: value for key, value in vars(spec(name)).items() if key != "lr"}
    settings = Settings(spec(name).name, (), LR, LR, **own)
    table = {"t": SimpleNamespace(weight=nn.Parameter(weight.clone()))}
    for model in (ours, theirs):
        model.weight = nn.Parameter(weight.clone())
    optimizer, other = (
        dense_optimizer(iter(ours.parameters()), spec(name), LR),
        optimizers(settings, theirs, table)[0],
    )
    for _ in range(5):
        gradient = torch.randn(weight.shape, dtype=weight.dtype)
        ours.weight.grad, theirs.weight.grad = gradient, gradient.clone()
        optimizer.step()
        other.step()
    assert not torch.equal(ours.weight, weight)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-13)
    assert optimizer.param_groups[0].get("foreach", False) is False


class Shapes(nn.Module):
    """A single number, a vector and a matrix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.single, self.vector = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(3))
        self.matrix = nn.Parameter(torch.randn(2, 3))


def parts(name: str, seed: int = 0, **settings: float):
    """A model and its optimizer."""
    model = Shapes(seed)
    own = dataclasses.replace(spec(name), **settings)
    return model, dense_optimizer(model.parameters(), own, 0.1)


def give(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *values: float) -> None:
    for value in values:
        give(model, value)
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@DENSE
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_step_that_is_masked_leaves_all_bits(name: str, eps: float) -> None:
    own = {"eps": eps} if hasattr(spec(name), "eps") else {}
    (model, masked), (plain, other) = parts(name, **own), parts(name, **own)
    for value in (torch.inf, 0.5, torch.nan, -0.25):
        give(model, value)
        enabled = torch.tensor([math.isfinite(value)])
        masked_step(masked, enabled, [p.grad for p in model.parameters()])
        if enabled:
            steps(plain, other, value)
        else:
            uncount(masked)
    assert same(model, plain)
    found, wanted = state_tensors(masked, model), state_tensors(other, plain)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in found.items())


@DENSE
def test_naming_the_state_changes_nothing_and_loaded_state_goes_on(name: str) -> None:
    plain, named = parts(name), parts(name)
    found = state_tensors(*named[::-1])
    assert all(torch.isfinite(value).all() for value in found.values())
    for model, optimizer in (plain, named):
        steps(model, optimizer, 0.5, 1.5, 2.5)
    assert same(plain[0], named[0])
    assert {key: value.dtype for key, value in found.items()} == {
        key: value.dtype for key, value in state_tensors(*plain[::-1]).items()
    }
    saved = {key: value.clone() for key, value in state_tensors(*named[::-1]).items()}
    again, fresh = parts(name, seed=1)
    again.load_state_dict(named[0].state_dict())
    load_state(fresh, again, saved)
    steps(*plain, 0.5, 1.5)
    steps(again, fresh, 0.5, 1.5)
    assert same(plain[0], again)


def test_a_missing_tensor_is_named() -> None:
    model, optimizer = parts("adam")
    with pytest.raises(KeyError, match=r"single\.step"):
        load_state(optimizer, model, {})


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ((2.0, 4, 10, 5), {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0, 9: 2.0, 10: 2.0}),
        ((2.0, 4, 10, 5), {11: 2.0 * 0.8**2, 14: 2.0 * 0.2**2, 15: 0.0, 16: 0.0, 10**9: 0.0}),
        ((0.3,), {0: 0.3, 10**9: 0.3}),
        ((0.3, 1), {0: 0.3}),
        ((1.0, 2, 2, 2), {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.25, 4: 0.0}),
    ],
)
def test_the_schedule_at_its_corners(schedule, rates):
    rate = LearningRate(*schedule)
    assert {step: rate(step) for step in rates} == pytest.approx(rates, rel=1e-15, abs=0)
