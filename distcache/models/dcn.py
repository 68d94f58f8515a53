"""DCN v2 (arXiv 2008.13535): cross layers over dense and pooled vectors, then an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distcache.errors import ConfigError
from distcache.models.layers import MLP, LowRankCross, check_sizes


class DCNv2(nn.Module):
    """DCN v2 in its stacked form, as in MLPerf's DLRM-DCNv2: bottom MLP, cross layers, top MLP.

    `pooled_dim`: sum of the pooled widths, which may differ; `dense_arch`: sizes of the bottom MLP
    (ReLU after each); `over_arch`: sizes of the top MLP (ReLU between), ending in 1;
    `cross_layers` cross layers of rank `cross_rank` and width dense_arch[-1] + pooled_dim.
    """

    def __init__(
        self,
        dense_features: int,
        pooled_dim: int,
        dense_arch: Sequence[int],
        over_arch: Sequence[int],
        cross_layers: int = 3,
        cross_rank: int = 512,
    ) -> None:
        super().__init__()
        if dense_features < 1 or pooled_dim < 1:
            raise ConfigError(
                f"dcn_v2 needs dense features and tables, got {dense_features} dense features "
                f"and pooled vectors of {pooled_dim} elements in all"
            )
        if cross_layers < 0 or cross_rank < 1:
            raise ConfigError(
                f"model.cross_layers={cross_layers} must be at least 0, "
                f"model.cross_rank={cross_rank} at least 1"
            )
        check_sizes("model.dense_arch", dense_arch)
        check_sizes("model.over_arch", over_arch, last=1)
        width = dense_arch[-1] + pooled_dim
        self.dense_arch = MLP(dense_features, dense_arch, final_relu=True)
        self.cross = LowRankCross(width, cross_layers, cross_rank)
        self.over_arch = MLP(width, over_arch, final_relu=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """`dense [b, dense_features]`, `pooled [b, pooled_dim]` -> logits `[b]`."""
        x = torch.cat((self.dense_arch(dense), pooled), dim=1)
        return self.over_arch(self.cross(x)).squeeze(1)
