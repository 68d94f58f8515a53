"""A step of a torch optimizer that a flag on the device may turn into nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcache.optim.dense_state import ensure_state

_COUNTER = "step"
"""torch's name for a parameter's step counter, which lies on the host."""


@torch.no_grad()
def masked_step(optimizer: torch.optim.Optimizer, enabled: Tensor) -> None:
    """`optimizer.step()` where `enabled`, bool `[1]` on the parameters' device, is true.

    Where it is false, parameters and state keep their bits, but for step counters on the host:
    take these back with `uncount` once the host knows. Nobody waits for the device; copies of
    parameters and state are the price, so this is for small dense parts.
    """
    ensure_state(optimizer)
    kept = [(value, value.clone()) for value in _values(optimizer)]
    optimizer.step()
    put_back(kept, enabled)


@torch.no_grad()
def put_back(kept: Sequence[tuple[Tensor, Tensor]], enabled: Tensor) -> None:
    """Give each value of `kept` what it was before, its pair, unless `enabled`, bool `[1]`."""
    flag = enabled.reshape(())  # which takes the shape of any value, a single number's too
    for value, before in kept:
        torch.where(flag, value, before, out=value)


def uncount(optimizer: torch.optim.Optimizer) -> None:
    """Take back one step of the step counters."""
    for state in optimizer.state.values():
        if isinstance(state.get(_COUNTER), Tensor):
            state[_COUNTER] -= 1


def _values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and their state, without the step counters."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(parameter)
            for name, value in optimizer.state.get(parameter, {}).items():
                if name != _COUNTER and isinstance(value, Tensor):
                    found.append(value)
    return found
