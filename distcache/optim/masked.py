"""A step of a torch optimizer that a flag on the device may turn into nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from distcache.optim.dense_state import ensure_state


@torch.no_grad()
def masked_step(optimizer: torch.optim.Optimizer, enabled: Tensor) -> None:
    """`optimizer.step()` where `enabled`, bool `[1]` on the parameters' device, is true.

    Where it is false, parameters and state keep their bits, but for step counters on the host:
    take these back with `uncount` once the host knows. Nobody waits for the device; copies of
    parameters and state are the price, so this is for small dense parts.
    """
    ensure_state(optimizer)
    kept = [(value, value.clone()) for value in _values(optimizer) if value.dim()]
    optimizer.step()
    for value, before in kept:
        torch.where(enabled, value, before, out=value)


def uncount(optimizer: torch.optim.Optimizer) -> None:
    """Take back one step of the step counters."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim() == 0:
                value -= 1


def _values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and their state."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(parameter)
            state = optimizer.state.get(parameter, {})
            found += [value for value in state.values() if isinstance(value, Tensor)]
    return found
