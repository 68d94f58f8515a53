"""Bags from a step's row leaf, differentiable: the gradient of a leaf is in canonical order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distcache import ops
from distcache.pipeline.groups import GroupBags
from distcache.step_plan import ShardPlan, StepPlan


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, for which nobody waits; itself where it lies there."""
    if device.type != "cuda" or tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class DeviceShard:
    """The index tensors of a plan's sharded rows on the device, as far as its step reads them."""

    def __init__(self, shard: ShardPlan, device: torch.device) -> None:
        self.slots = to_device(shard.slots, device)
        self.source_rows = to_device(shard.source_rows, device)
        self.late_slots = to_device(shard.late.slots, device)
        self.late_places = to_device(shard.late.places, device)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return list(vars(self).values())


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
        self.leaf_rows = plan.leaf_rows
        self.replicated = move(plan.touched_rows)
        self.shard = None if plan.shard is None else DeviceShard(plan.shard, device)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        own += [] if self.shard is None else self.shard.tensors()
        return own if self.chunks is None else [*own, self.chunks.table]


class PooledLookup(torch.autograd.Function):
    """`(leaf [U + N, D], bags) -> pooled [K, D]`; backward sums occurrences in their order.

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
        """Local gradients of all leaf rows, zero for those that only other ranks named."""
        bags = ctx.bags
        gradient = gradient.contiguous() if bags.scale is None else gradient * bags.scale
        return _row_gradient(bags, gradient), None


def bags_of_one(bags: GroupBags) -> GroupBags:
    """The same ids, each a bag of its own, without weights: n bags."""
    ones = torch.arange(len(bags.rows) + 1)
    return replace(bags, offsets=ones, bag_of=ones[:-1], weights=None, scale=None)


class RowLookup(torch.autograd.Function):
    """`(leaf [U + N, D], bags_of_one, counts) -> the rows of each feature's ids, [n_f, D] each`.

    `counts`: n_f of every feature of the group. Backward is that of `PooledLookup` over bags of
    one id, so its bits depend on nothing but the ids and the rows' gradients.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, bags: DeviceBags, counts: Sequence[int]) -> tuple:
        """Copy every id's row."""
        ctx.bags = bags
        # One tensor for each feature, not views of one: users may change them in place.
        return tuple(leaf.index_select(0, at) for at in bags.positions.split(list(counts)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Local gradients of all leaf rows, zero for those that only other ranks named."""
        return _row_gradient(ctx.bags, torch.cat(gradients)), None, None


def _row_gradient(bags: DeviceBags, gradient: Tensor) -> Tensor:
    """Gradients of bags `[K, D]` summed by leaf row, `[U + N, D]`."""
    touched = ops.row_gradients(
        gradient, bags.bag_of, bags.order, bags.segments, bags.weights, bags.chunks
    )
    if len(bags.touched) == bags.leaf_rows:
        return touched
    out = gradient.new_zeros((bags.leaf_rows, gradient.shape[1]))
    return out.index_copy_(0, bags.touched, touched)
