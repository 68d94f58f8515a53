"""Bags from a step's row leaf, differentiable: the gradient of a leaf is in canonical order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcache import ops
from distcache.engine.groups import GroupBags
from distcache.ops.reference import put
from distcache.step_plan import ShardPlan, StepPlan, Transfer


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, for which nobody waits; itself where it lies there."""
    if device.type != "cuda" or tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def transfer_to_device(transfer: Transfer, device: torch.device) -> Transfer:
    """`transfer` with its tensors on `device`, for which nobody waits."""
    slots, places = (to_device(t, device) for t in (transfer.slots, transfer.places))
    relay = transfer.relay
    if relay is not None:
        passed, order = (to_device(t, device) for t in (relay.passed, relay.order))
        relay = replace(relay, passed=passed, order=order)
    return replace(transfer, slots=slots, places=places, relay=relay)


class DeviceShard:
    """The index tensors of a plan's sharded rows on the device, as far as its step reads them."""

    def __init__(self, shard: ShardPlan, device: torch.device) -> None:
        self.slots = to_device(shard.slots, device)
        self.source_rows = to_device(shard.source_rows, device)
        self.late = transfer_to_device(shard.late, device)
        self.early = None if shard.early is None else transfer_to_device(shard.early, device)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        early = [] if self.early is None else self.early.tensors()
        return [self.slots, self.source_rows, *self.late.tensors(), *early]


class DevicePlan:
    """The index tensors of one group's plan on the device, as far as its step reads them.

    `slots` `[U]`, `source_rows` and `replicated` (`StepPlan.touched_rows`) of the replicated rows,
    `shard` of the sharded ones, if there are any.
    """

    def __init__(self, plan: StepPlan, device: torch.device) -> None:
        self.slots = to_device(plan.slots, device)
        self.source_rows = to_device(plan.source_rows, device)
        self.replicated = to_device(plan.touched_rows, device)
        self.shard = None if plan.shard is None else DeviceShard(plan.shard, device)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        shard = [] if self.shard is None else self.shard.tensors()
        return [self.slots, self.source_rows, self.replicated, *shard]


class DeviceBags:
    """The index tensors of lookups in one group's leaf, on the device: of one (micro-)batch.

    Ids and `offsets` are feature-major, bags come out sample by sample: `bag_of` and `scale` speak
    of those. `shape`: samples and features. `single`: every bag is one id without a weight, and
    `positions` is in the order of the bags that come out, so that nothing is rearranged after.
    `counts`: ids of each feature, where every id is a bag of its own (`bags_of_one`).
    """

    def __init__(
        self,
        bags: GroupBags,
        plan: StepPlan,
        device: torch.device,
        counts: Sequence[int] = (),
    ) -> None:
        def move(tensor: Tensor) -> Tensor:
            return to_device(tensor, device)

        count = bags.offsets.shape[0] - 1
        samples, features = self.shape = (count // max(bags.features, 1), bags.features)
        self.single, self.counts = bags.single, counts
        positions, scale = plan.positions, None if self.single else bags.scale
        place = _places(features, samples)
        if self.single:
            bag_of, positions = place, _by_sample(positions, samples, features)
        else:
            bag_of = torch.from_numpy(place.numpy()[bags.bag_of])
            scale = None if scale is None else _by_sample(scale, samples, features)
        self.offsets, self.bag_of = move(bags.offsets), move(bag_of)
        self.weights = None if bags.weights is None else move(bags.weights)
        self.scale = None if scale is None else move(scale)
        self.positions, self.order = move(positions), move(plan.order)
        self.touched, self.segments = move(plan.touched), move(plan.segments)
        self.chunks = ops.chunks_for(plan.segments, device)
        self.leaf_rows = plan.leaf_rows

    def tensors(self) -> list[Tensor]:
        """All of them."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own if self.chunks is None else [*own, self.chunks.table]


def lookups_of(
    bags: GroupBags,
    plan: StepPlan,
    sizes: Sequence[int],
    pooled: bool,
    device: torch.device,
) -> list[DeviceBags]:
    """What looks up each micro-batch of a step in one group's leaf.

    `sizes`: samples of each micro-batch; `pooled`: bags come out, else the row of every id.
    """
    found, start, total = [], 0, sum(sizes)
    for size in sizes:
        own, seen = bags, plan
        if len(sizes) > 1:
            own, seen = part_of(bags, plan, slice(start, start + size), total)
        counts: tuple[int, ...] = ()
        if not pooled:
            ends = own.offsets.numpy()[:: max(size, 1)][: own.features + 1]
            counts = tuple(np.diff(ends).tolist()) if size else (0,) * own.features
            own = bags_of_one(own)
        found.append(DeviceBags(own, seen, device, counts))
        start += size
    return found


def part_of(
    bags: GroupBags, plan: StepPlan, samples: slice, total: int
) -> tuple[GroupBags, StepPlan]:
    """The bags of `samples` out of `total` joined ones, and the plan as their lookup reads it.

    Of the plan only what a lookup needs is the part's own: positions, order, touched, segments.
    NumPy: it runs beside training.
    """
    first = np.arange(bags.features if total else 0) * total + samples.start
    count = samples.stop - samples.start
    chosen = (first[:, None] + np.arange(count)).reshape(-1)
    offsets = bags.offsets.numpy()
    spans = [np.arange(offsets[at], offsets[at + count]) for at in first]
    ids = np.concatenate(spans) if spans else np.empty(0, np.int64)
    own = GroupBags(
        features=bags.features,
        rows=bags.rows[ids],
        offsets=_ends(np.diff(offsets)[chosen]),
        weights=None if bags.weights is None else torch.from_numpy(bags.weights.numpy()[ids]),
        scale=None if bags.scale is None else torch.from_numpy(bags.scale.numpy()[chosen]),
    )
    positions = plan.positions.numpy()[ids]
    touched, counts = np.unique(positions, return_counts=True)
    seen = replace(
        plan,
        positions=torch.from_numpy(positions),
        order=torch.from_numpy(positions.argsort(kind="stable")),
        touched=torch.from_numpy(touched),
        segments=_ends(counts),
    )
    return own, seen


def _ends(lengths: np.ndarray) -> Tensor:
    """Where pieces of `lengths` `[m]` begin and end, int64 `[m + 1]`."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return torch.from_numpy(ends)


@lru_cache(maxsize=2)
def _places(features: int, samples: int) -> Tensor:
    """Where each bag comes out, sample by sample, int64 `[F * b]`; nobody writes to it."""
    return _by_sample(torch.from_numpy(np.arange(features * samples)), features, samples)


def _by_sample(values: Tensor, samples: int, features: int) -> Tensor:
    """`values` of all bags, `[F * b, ...]` feature by feature, sample by sample.

    NumPy: a torch operation would start a pool of threads beside that of training.
    """
    by_feature = values.numpy().reshape(features, samples, *values.shape[1:])
    return torch.from_numpy(by_feature.swapaxes(0, 1).reshape(values.shape))


class PooledLookup(torch.autograd.Function):
    """`(leaf [U + N, D], bags) -> pooled [b, F * D]`; backward sums occurrences in their order.

    The row gradient is the same code in every mode and depends on nothing but the ids and the
    bag gradients (`embedding_bag`'s own backward changes its bits with the labels).
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, bags: DeviceBags) -> Tensor:
        """Sum (or average) every bag's rows."""
        ctx.bags, ctx.dim = bags, leaf.shape[1]
        (samples, features), dim = bags.shape, ctx.dim
        pooled = ops.pooled_lookup(leaf, bags.positions, bags.offsets, bags.weights)
        if not bags.single:
            pooled = pooled.view(features, samples, dim).transpose(0, 1).reshape(-1, dim)
        pooled = pooled if bags.scale is None else pooled.mul_(bags.scale)
        return pooled.view(samples, features * dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Local gradients of all leaf rows, zero for those that only other ranks named."""
        bags, (samples, features) = ctx.bags, ctx.bags.shape
        gradient = gradient.reshape(samples * features, ctx.dim)
        gradient = gradient if bags.scale is None else gradient * bags.scale
        return _row_gradient(bags, gradient), None


def bags_of_one(bags: GroupBags) -> GroupBags:
    """The same ids, each a bag of its own, without weights: n bags."""
    ones = torch.arange(len(bags.rows) + 1)
    return replace(bags, features=1, offsets=ones, weights=None, scale=None)


class RowLookup(torch.autograd.Function):
    """`(leaf [U + N, D], bags of one id) -> the rows of each feature's ids, [n_f, D] each`.

    n_f: the `counts` of the bags. Backward is that of `PooledLookup` over bags of one id, so its
    bits depend on nothing but the ids and the rows' gradients.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, bags: DeviceBags) -> tuple:
        """Copy every id's row."""
        ctx.bags = bags
        # One tensor for each feature, not views of one: users may change them in place.
        return tuple(leaf.index_select(0, at) for at in bags.positions.split(list(bags.counts)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Local gradients of all leaf rows, zero for those that only other ranks named."""
        return _row_gradient(ctx.bags, torch.cat(gradients)), None


def _row_gradient(bags: DeviceBags, gradient: Tensor) -> Tensor:
    """Gradients of bags `[K, D]` summed by leaf row, `[U + N, D]`."""
    touched = ops.row_gradients(
        gradient, bags.bag_of, bags.order, bags.segments, bags.weights, bags.chunks
    )
    if len(bags.touched) == bags.leaf_rows:
        return touched
    out = gradient.new_zeros((bags.leaf_rows, gradient.shape[1]))
    return put(out, bags.touched, touched)
