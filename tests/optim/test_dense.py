"""The dense optimizer: its settings, its state by name, steps that a mask turns into nothing; and
the learning-rate schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distcache.errors import ConfigError
from distcache.optim import (
    LearningRate,
    dense_optimizer,
    load_state,
    masked_step,
    state_tensors,
    uncount,
)

NAMES = pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("rowwise_adagrad", torch.optim.Adagrad),
        ("adam", torch.optim.Adam),
    ],
)
def test_dense_optimizer_has_the_settings_it_is_given(name, kind):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = dense_optimizer(iter([parameter]), name, 0.1, 1e-3, (0.5, 0.75), 0.25)
    assert type(optimizer) is kind
    gradient = torch.tensor([2.0, 0.5], dtype=torch.float64)
    parameter.grad = gradient.clone()
    optimizer.step()
    if name == "sgd":
        change = 0.1 * gradient
    elif name == "adam":  # at the first step both corrected moments are those of the gradient
        change = 0.1 * gradient / (gradient.abs() + 1e-3)
    else:
        change = 0.1 * gradient / ((0.25 + gradient**2).sqrt() + 1e-3)
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64) - change
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-14, atol=0)
    assert optimizer.param_groups[0]["foreach"] is False
    assert optimizer.param_groups[0].get("betas", (0.5, 0.75)) == (0.5, 0.75)


def test_dense_optimizer_names_an_unknown_name():
    with pytest.raises(ConfigError, match="'lion'"):
        dense_optimizer([torch.nn.Parameter(torch.ones(1))], "lion", 0.1)


class Shapes(nn.Module):
    """A single number, a vector and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.vector = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
        self.matrix = nn.Parameter(torch.full((2, 3), 0.5))


def give(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


@NAMES
def test_a_step_that_is_masked_leaves_all_bits(name: str) -> None:
    model, plain = Shapes(), Shapes()
    optimizers = [dense_optimizer(m.parameters(), name, 0.1) for m in (model, plain)]
    masked, other = optimizers
    for value in (0.5, torch.nan, -0.25):
        give(model, value)
        enabled = torch.tensor([value == value])
        masked_step(masked, enabled)
        if not enabled:
            uncount(masked)
            continue
        give(plain, value)
        other.step()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    states = [
        state_tensors(optimizer, {p: n for n, p in own.named_parameters()})
        for optimizer, own in zip(optimizers, (model, plain), strict=True)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def parts(name: str, seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = dense_optimizer(model.parameters(), name, 0.1, eps=0.0)
    return model, optimizer, {p: n for n, p in model.named_parameters()}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        give(model, 0.5 + number)
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


@NAMES
def test_naming_the_state_changes_nothing_and_loaded_state_goes_on(name: str) -> None:
    plain, named = parts(name), parts(name)
    found = state_tensors(named[1], named[2])
    assert all(torch.isfinite(value).all() for value in found.values())
    assert named[1].param_groups[0]["lr"] == 0.1
    for model, optimizer, _ in (plain, named):
        steps(model, optimizer, 3)
    assert same(plain[0], named[0])
    saved = {key: value.clone() for key, value in state_tensors(*named[1:]).items()}
    again, fresh, fresh_names = parts(name, seed=1)
    again.load_state_dict(named[0].state_dict())
    load_state(fresh, fresh_names, saved)
    steps(plain[0], plain[1], 2)
    steps(again, fresh, 2)
    assert same(plain[0], again)


def test_a_missing_tensor_is_named() -> None:
    _, optimizer, names = parts("adam")
    with pytest.raises(KeyError, match=r"weight\.step"):
        load_state(optimizer, names, {})


def test_schedule_at_its_corners():
    rate = LearningRate(2.0, warmup_steps=4, decay_start=10, decay_steps=5)
    assert [rate(t) for t in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rate(9) == rate(10) == 2.0
    assert rate(11) == pytest.approx(2.0 * 0.8**2, rel=1e-15)
    assert rate(14) == pytest.approx(2.0 * 0.2**2, rel=1e-15)
    assert rate(15) == rate(16) == rate(10**9) == 0.0


def test_schedule_without_parts():
    constant = LearningRate(0.3)
    assert constant(0) == constant(10**9) == 0.3
    assert LearningRate(0.3, warmup_steps=1)(0) == 0.3
    at_once = LearningRate(1.0, warmup_steps=2, decay_start=2, decay_steps=2)
    assert [at_once(t) for t in range(5)] == [0.5, 1.0, 1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.1, -1), "optim.warmup_steps=-1"),
        ((0.1, 5, 3, 10), "optim.decay_start=3"),
        ((-0.1,), "-0.1"),
        ((float("inf"),), "inf"),
    ],
)
def test_schedule_names_bad_settings(arguments, words):
    with pytest.raises(ConfigError, match=words):
        LearningRate(*arguments)
