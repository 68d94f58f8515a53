"""Models by name, and initial weights that are a function of the seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from distcache.errors import ConfigError
from distcache.models.dcn import DCNv2
from distcache.models.dlrm import DLRM

ModelT = TypeVar("ModelT", bound=nn.Module)


def build_model(
    name: str,
    dense_features: int,
    pooled_dims: Sequence[int],
    dense_arch: Sequence[int],
    over_arch: Sequence[int],
    cross_layers: int = 3,
    cross_rank: int = 512,
) -> DLRM | DCNv2:
    """Build the model `dlrm` or `dcn_v2` on the CPU.

    `pooled_dims`: width of each feature's pooled vector, in feature order. Weights are torch's
    defaults until `initialise`. Raises ConfigError for sizes that do not fit together.
    """
    if name == "dcn_v2":
        return DCNv2(
            dense_features, sum(pooled_dims), dense_arch, over_arch, cross_layers, cross_rank
        )
    if name != "dlrm":
        raise ConfigError(f"model={name!r} is not 'dlrm' or 'dcn_v2'")
    widths = sorted(set(pooled_dims))
    if len(widths) != 1:
        raise ConfigError(
            f"dlrm needs tables of one width, got {widths}: "
            "take model=dcn_v2, or leave model.table_dims null"
        )
    return DLRM(dense_features, len(pooled_dims), widths[0], dense_arch, over_arch)


@torch.no_grad()
def initialise(model: ModelT, seed: int, dtype: torch.dtype = torch.float32) -> ModelT:
    """Draw all parameters anew as a function of `seed` and their order; returns the model.

    Normal, as in DLRM: a matrix `[m, n]` with standard deviation sqrt(2 / (m + n)), a vector `[m]`
    with sqrt(1 / m). Drawn on the CPU in float32 whatever the dtype and device, so that every mode,
    rank and dtype starts from the same values. Floating parameters and buffers become `dtype`.
    """
    model.to(dtype)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for parameter in model.parameters():
        matrix = parameter.dim() > 1
        variance = 2.0 / sum(parameter.shape) if matrix else 1.0 / max(parameter.numel(), 1)
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(values.mul_(math.sqrt(variance)))
    return model
