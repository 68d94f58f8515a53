"""Layers that both models are made of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from distcache.errors import ConfigError


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, and after the last one where `final_relu`.

    `[b, in_features] -> [b, sizes[-1]]`.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], *, final_relu: bool) -> None:
        layers: list[nn.Module] = []
        for index, (width, out) in enumerate(zip((in_features, *sizes), sizes, strict=False)):
            layers.append(nn.Linear(width, out))
            if final_relu or index + 1 < len(sizes):
                layers.append(nn.ReLU(inplace=True))  # a linear layer's backward needs no output
        super().__init__(*layers)


class LowRankCross(nn.Module):
    """Cross layers with factorised weights (DCN v2, arXiv 2008.13535, section 3.1).

    x[l + 1] = x[0] * (W[l] V[l] x[l] + b[l]) + x[l], V `[rank, width]`, W `[width, rank]`;
    `[b, width] -> [b, width]`.
    """

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(width, rank, bias=False) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(rank, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers to x `[b, width]`."""
        crossed = x
        for down, up in zip(self.down, self.up, strict=True):
            crossed = x * up(down(crossed)) + crossed
        return crossed


def check_sizes(key: str, sizes: Sequence[int], last: int | None = None) -> None:
    """Raise ConfigError unless `sizes` are positive, not none, and end in `last`."""
    if not sizes or any(size < 1 for size in sizes):
        raise ConfigError(f"{key}={list(sizes)}: give at least one layer, every size at least 1")
    if last is not None and sizes[-1] != last:
        raise ConfigError(f"{key}={list(sizes)} must end in {last}, not {sizes[-1]}")
