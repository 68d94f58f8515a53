"""Bags from a step's row leaf, differentiable: the gradient of a leaf is in canonical order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distcache import ops
from distcache.pipeline.groups import GroupBags
from distcache.step_plan import StepPlan


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, for which nobody waits; itself where it lies there."""
    if device.type != "cuda" or tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceBags:
    """The index tensors of one local batch and its plan on the device, for one group."""

    def __init__(self, bags: GroupBags, plan: StepPlan, device: torch.device) -> None:
        def move(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        self.offsets, self.bag_of = move(bags.offsets), move(bags.bag_of)
        self.weights = None if bags.weights is None else move(bags.weights)
        self.scale = None if bags.scale is None else move(bags.scale)
        self.positions, self.order = move(plan.positions), move(plan.order)
        self.touched, self.segments = move(plan.touched), move(plan.segments)
        self.slots, self.source_rows = move(plan.slots), move(plan.source_rows)
        self.chunks = ops.chunks_for(plan.segments, device)
        self.distinct = plan.distinct

    def tensors(self) -> list[Tensor]:
        """All of them."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own if self.chunks is None else [*own, self.chunks.table]


class PooledLookup(torch.autograd.Function):
    """`(leaf [U, D], bags) -> pooled [K, D]`; backward sums occurrences in their order.

    The row gradient is the same code in every mode and depends on nothing but the ids and the
    bag gradients (`embedding_bag`'s own backward changes its bits with the labels).
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, bags: DeviceBags) -> Tensor:
        """Sum (or average) every bag's rows."""
        ctx.bags = bags
        pooled = ops.pooled_lookup(leaf, bags.positions, bags.offsets, bags.weights)
        return pooled if bags.scale is None else pooled.mul_(bags.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Local row gradients `[U, D]`, zero for rows that only other ranks named."""
        bags = ctx.bags
        gradient = gradient.contiguous() if bags.scale is None else gradient * bags.scale
        touched = ops.row_gradients(
            gradient, bags.bag_of, bags.order, bags.segments, bags.weights, bags.chunks
        )
        if len(bags.touched) == bags.distinct:
            return touched, None
        out = gradient.new_zeros((bags.distinct, gradient.shape[1]))
        return out.index_copy_(0, bags.touched, touched), None
