"""The row operations in plain PyTorch: the bodies that every faster one is compared with.

Letters: U distinct rows of a step, n ids, K bags, R rows that get a gradient, D width. All tensors
of a call lie on one device; index tensors are int64. None of these is recorded by autograd, and
each result depends on the values that enter it and their order alone, never on their labels
(positions, row numbers): `embedding_bag`'s forward sums every bag by itself, from first to last.
Its backward does not have that property, hence `row_gradients`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SUM = 0  # `torch.embedding_bag` names its modes by number


def _segment_sum(values: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """`out[k]` = sum over o in [offsets[k], offsets[k + 1]) of weights[o] * values[index[o]]."""
    if len(index) == 0 or len(values) == 0:
        return values.new_zeros(max(len(offsets) - 1, 0), values.shape[1])
    if weights is not None:
        weights = weights.detach().to(values.dtype)
    values = values.detach()
    if values.stride(1) != 1:  # `embedding_bag` has other code, with other bits, for such layouts
        values = values.contiguous()
    # Positional: scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset.
    out = torch.embedding_bag(
        values, index, offsets, False, _SUM, False, weights, include_last_offset=True
    )
    return out[0]


def pooled_lookup(
    rows: Tensor, positions: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum the rows of each bag: `[K, D]`, in the dtype of `rows`; an empty bag is 0.

    `rows`: float `[U, D]`; `positions`: `[n]`, the row of each id; `offsets`: `[K + 1]`, bag k has
    the ids [offsets[k], offsets[k + 1]); `weights`: float `[n]`, or None for ones.
    """
    return _segment_sum(rows, positions, offsets, weights)


def row_gradients(
    bag_gradients: Tensor,
    bag_of: Tensor,
    order: Tensor,
    segments: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum the gradients of each row's occurrences, in occurrence order: `[R, D]`.

    `bag_gradients`: float `[K, D]`; `bag_of`: `[n]`, the bag of each id; `order`: `[n]`, the ids
    sorted by row, in occurrence order within a row; `segments`: `[R + 1]`, row r's ids are
    order[segments[r] : segments[r + 1]]; `weights`: float `[n]` by id (not by `order`), or None.
    """
    if weights is not None:
        weights = weights.index_select(0, order)
    return _segment_sum(bag_gradients, bag_of.index_select(0, order), segments, weights)


def weight_gradients(
    bag_gradients: Tensor, bag_of: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """Gradient of each id's weight, `[n]`: the dot of its bag's gradient and its row.

    Shapes as in `pooled_lookup` and `row_gradients`; takes 2 n D floats of scratch memory.
    """
    products = bag_gradients.detach().index_select(0, bag_of)
    return products.mul_(rows.detach().index_select(0, positions)).sum(dim=1)


def mean_scale(offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """What turns sums into means: 1 / max(ids of the bag, 1), `[K, 1]` of `dtype`.

    Multiply the pooled sums by it, and bag gradients before `row_gradients`.
    """
    return offsets.diff().clamp_(min=1).to(dtype).reciprocal_().unsqueeze(1)
