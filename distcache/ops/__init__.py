"""Row operations: one signature, one or more bodies, chosen here and nowhere else.

The reference bodies (`reference.py`, plain PyTorch) say what each operation means.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from distcache.ops import reference

_BODIES: dict[str, ModuleType] = {}
"""Faster bodies by device type; every other device runs the reference."""


def _body(tensor: Tensor) -> ModuleType:
    """The module whose bodies run where `tensor` lies."""
    return _BODIES.get(tensor.device.type, reference)


def pooled_lookup(
    rows: Tensor, positions: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum the rows `[U, D]` of each bag to `[K, D]`: see `reference.pooled_lookup`."""
    return _body(rows).pooled_lookup(rows, positions, offsets, weights)


def row_gradients(
    bag_gradients: Tensor,
    bag_of: Tensor,
    order: Tensor,
    segments: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum bag gradients `[K, D]` over each row's ids to `[R, D]`: see `reference.row_gradients`."""
    return _body(bag_gradients).row_gradients(bag_gradients, bag_of, order, segments, weights)


def weight_gradients(
    bag_gradients: Tensor, bag_of: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """Gradient of each id's weight, `[n]`: see `reference.weight_gradients`."""
    return _body(rows).weight_gradients(bag_gradients, bag_of, rows, positions)


def mean_scale(offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / max(ids of the bag, 1), `[K, 1]`: see `reference.mean_scale`."""
    return _body(offsets).mean_scale(offsets, dtype)
