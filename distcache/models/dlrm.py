"""DLRM (arXiv 1906.00091): bottom MLP, pairwise dot products, top MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distcache.errors import ConfigError
from distcache.models.layers import MLP, check_sizes


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
    """DLRM behind F pooled embeddings of one width D.

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
        if dense_features < 1 or num_sparse < 1:
            raise ConfigError(
                f"dlrm needs dense and sparse features, got {dense_features} and {num_sparse}"
            )
        check_sizes("model.dense_arch", dense_arch, last=embedding_dim)
        check_sizes("model.over_arch", over_arch, last=1)
        self.num_sparse, self.embedding_dim = num_sparse, embedding_dim
        self.dense_arch = MLP(dense_features, dense_arch, final_relu=True)
        self.interaction = DotInteraction(num_sparse)
        width = embedding_dim + num_sparse * (num_sparse + 1) // 2
        self.over_arch = MLP(width, over_arch, final_relu=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """`dense [b, dense_features]`, `pooled [b, F * D]` (by feature) -> logits `[b]`."""
        sparse = pooled.view(-1, self.num_sparse, self.embedding_dim)
        return self.over_arch(self.interaction(self.dense_arch(dense), sparse)).squeeze(1)
