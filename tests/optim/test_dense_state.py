"""The dense optimizer's state by name: made without changing anything, filled back exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distcache.optim import dense_optimizer, load_state, state_tensors


def parts(name: str, seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = dense_optimizer(model.parameters(), name, 0.1, eps=0.0)
    return model, optimizer, {p: n for n, p in model.named_parameters()}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_naming_the_state_changes_nothing(name: str) -> None:
    plain, named = parts(name), parts(name)
    found = state_tensors(named[1], named[2])
    assert all(torch.isfinite(value).all() for value in found.values())
    assert named[1].param_groups[0]["lr"] == 0.1
    for model, optimizer, _ in (plain, named):
        steps(model, optimizer, 3)
    for one, other in zip(plain[0].parameters(), named[0].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_loaded_state_goes_on_with_the_same_bits(name: str) -> None:
    model, optimizer, names = parts(name)
    steps(model, optimizer, 4)
    saved = {key: value.clone() for key, value in state_tensors(optimizer, names).items()}
    again, fresh, fresh_names = parts(name, seed=1)
    again.load_state_dict(model.state_dict())
    load_state(fresh, fresh_names, saved)
    steps(model, optimizer, 2)
    steps(again, fresh, 2)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_missing_tensor_is_named() -> None:
    _, optimizer, names = parts("adam")
    with pytest.raises(KeyError, match=r"weight\.step"):
        load_state(optimizer, names, {})
