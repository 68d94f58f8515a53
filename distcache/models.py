"""The dense networks behind the tables: pure modules, (dense, pooled) -> logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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


class DotInteraction(nn.Module):
    """Dot products of all pairs of F + 1 vectors of a sample, after the dense vector itself.

    The pairs are those above the diagonal, row by row (each pair once, none with itself).
    """

    pairs: Tensor
    back: Tensor

    def __init__(self, num_sparse: int) -> None:
        super().__init__()
        count = num_sparse + 1
        first, second = torch.triu_indices(count, count, offset=1)
        # One flat index: `index_select` takes half the time of x[:, i, j].
        self.register_buffer("pairs", first * count + second, persistent=False)
        back = torch.zeros(count, count, dtype=torch.int64)
        back[first, second] = back[second, first] = torch.arange(len(first))
        self.register_buffer("back", back.flatten(), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """`dense [b, D]`, `sparse [b, F, D]` -> `[b, D + F (F + 1) / 2]`."""
        vectors = torch.cat((dense.unsqueeze(1), sparse), dim=1)
        return torch.cat((dense, _PairProducts.apply(vectors, self.pairs, self.back)), dim=1)


class _PairProducts(torch.autograd.Function):
    """Dot products of pairs of n vectors of a sample: `[b, n, D]` -> `[b, pairs]`.

    As its matrix of products is symmetric, so is that of their gradients: it is read, not
    scattered, from those of the pairs, and one product of matrices gives the vectors' gradients
    (autograd's own backward takes a scatter and two).
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, back: Tensor) -> Tensor:
        """`pairs` int64 `[pairs]`: their places in the flat matrix `[n * n]`; `back` int64
        `[n * n]`: the pair of every place (any on the diagonal)."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        ctx.save_for_backward(vectors, back)
        ctx.dtype = products.dtype  # another one than the vectors' under autocast
        return products.flatten(start_dim=1).index_select(1, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """`gradient` `[b, pairs]` -> that of the vectors."""
        vectors, back = ctx.saved_tensors
        count = vectors.shape[1]
        products = gradient.to(ctx.dtype).index_select(1, back).view(-1, count, count)
        products.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(products, vectors.to(ctx.dtype)).to(vectors.dtype), None, None


class DLRM(nn.Module):
    """DLRM (arXiv 1906.00091) behind F pooled embeddings of one width D.

    `dense_arch`: sizes of the bottom MLP (ReLU after each), ending in D; `over_arch`: sizes of the
    top MLP (ReLU between), ending in 1.
    """

    def __init__(
        self,
        dense_features: int,
        num_sparse: int,
        embedding_dim: int,
        dense_arch: Sequence[int],
        over_arch: Sequence[int],
    ) -> None:
        super().__init__()
        self.num_sparse, self.embedding_dim = num_sparse, embedding_dim
        self.dense_arch = MLP(dense_features, dense_arch, final_relu=True)
        self.interaction = DotInteraction(num_sparse)
        width = embedding_dim + num_sparse * (num_sparse + 1) // 2
        self.over_arch = MLP(width, over_arch, final_relu=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """`dense [b, dense_features]`, `pooled [b, F * D]` (by feature) -> logits `[b]`."""
        sparse = pooled.view(-1, self.num_sparse, self.embedding_dim)
        return self.over_arch(self.interaction(self.dense_arch(dense), sparse)).squeeze(1)


class DCNv2(nn.Module):
    """DCN v2 (arXiv 2008.13535) in its stacked form, as in MLPerf's DLRM-DCNv2: bottom MLP, cross
    layers over dense and pooled vectors, top MLP.

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
        width = dense_arch[-1] + pooled_dim
        self.dense_arch = MLP(dense_features, dense_arch, final_relu=True)
        self.cross = LowRankCross(width, cross_layers, cross_rank)
        self.over_arch = MLP(width, over_arch, final_relu=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """`dense [b, dense_features]`, `pooled [b, pooled_dim]` -> logits `[b]`."""
        x = torch.cat((self.dense_arch(dense), pooled), dim=1)
        return self.over_arch(self.cross(x)).squeeze(1)


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
    defaults until `initialise`. The sizes are those of the checked group `model`.
    """
    arches = dense_arch, over_arch
    if name == "dcn_v2":
        return DCNv2(dense_features, sum(pooled_dims), *arches, cross_layers, cross_rank)
    return DLRM(dense_features, len(pooled_dims), pooled_dims[0], *arches)


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
