"""A masked step: all or nothing, for parameters and state of any shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distcache.optim import dense_optimizer, masked_step, state_tensors, uncount


class Shapes(nn.Module):
    """A single number, a vector and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.vector = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
        self.matrix = nn.Parameter(torch.full((2, 3), 0.5))


def give(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
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
