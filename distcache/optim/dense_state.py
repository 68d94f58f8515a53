"""The dense optimizer's state as named tensors, for checkpoints that are filled in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def state_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, Tensor]:
    """`<parameter name>.<state name>` -> tensor, for every parameter; made first if need be.

    An optimizer that has not stepped yet has no state to fill; a step of zero rate with zero
    gradients makes it, and weights and gradients are put back as they were.
    """
    parameters = ensure_state(optimizer)
    return {
        f"{names[parameter]}.{key}": value
        for parameter in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def ensure_state(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Make the state of an optimizer that has not stepped yet; its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if parameters and not optimizer.state:
        _make_state(optimizer, parameters)
    return parameters


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    kept = [(p.detach().clone(), p.grad) for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, (value, gradient) in zip(parameters, kept, strict=True):
        parameter.copy_(value)
        parameter.grad = gradient
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.dim() == 0:
                value.zero_()  # the step counter has not counted this one


def load_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Mapping[str, Tensor],
) -> None:
    """Copy tensors named as by `state_tensors` into the optimizer; KeyError for a missing one."""
    for name, value in state_tensors(optimizer, names).items():
        value.copy_(saved[name])
