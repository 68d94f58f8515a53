"""The optimizer of the dense parameters: torch.optim with the same settings in every mode."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from distcache.errors import ConfigError


def dense_optimizer(
    parameters: Iterable[nn.Parameter],
    name: str,
    lr: float,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    initial_accumulator: float = 0.0,
) -> torch.optim.Optimizer:
    """The torch optimizer that goes with row optimizer `name`, over all dense parameters.

    SGD for `sgd`, Adagrad for `adagrad` and `rowwise_adagrad`, Adam for `adam`. Set a step's rate
    by `param_groups[0]["lr"]`. The implementation is named, not left to torch's choice, so that
    the same run gives the same bits: multi-tensor kernels on CUDA, one parameter at a time on the
    CPU. Raises ConfigError for an unknown name.
    """
    chosen = list(parameters)
    kernels = {"foreach": bool(chosen) and all(p.is_cuda for p in chosen), "fused": False}
    if name == "sgd":
        return torch.optim.SGD(chosen, lr=lr, **kernels)
    if name in ("adagrad", "rowwise_adagrad"):
        return torch.optim.Adagrad(
            chosen, lr=lr, eps=eps, initial_accumulator_value=initial_accumulator, **kernels
        )
    if name == "adam":
        return torch.optim.Adam(chosen, lr=lr, betas=(betas[0], betas[1]), eps=eps, **kernels)
    raise ConfigError(f"optim={name!r} is not 'sgd', 'adagrad', 'rowwise_adagrad' or 'adam'")
