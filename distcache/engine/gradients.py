"""A step at the tables: bags from row leaves, their gradients, and what crosses ranks.

A leaf's gradient is in canonical order, summed in the ids' order by the same code in every mode.
Every rank then issues [fill], [late rows], [fills and early rows of the steps ahead], [row
gradients to their homes], [dense chunks by index], [loss and control], [sums to all], in this order
and with zero lengths where it has nothing; who is ready early waits for its turn. The three that
follow backward are under way at once, so that homes add up while the dense part is exchanged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distcache import ops
from distcache.comm.link import DENSE, PLANNING, ROWS, CollectiveCounters, Link, require_equal
from distcache.comm.world import close_world, current_world, require_group
from distcache.engine.groups import GroupBags, TableGroup
from distcache.errors import ConfigError, PlanError
from distcache.ops.long_segments import SegmentChunks
from distcache.ops.reference import by_sample
from distcache.step_plan import Change, StepPlan
from distcache.streams import DeviceEvent, Streams

CHUNK_ELEMENTS = 1 << 20
"""Elements of one all-reduce of the flat dense gradient."""

# -----------------------------------------------------------------------------
# A step's index tensors: on the device once for all that reads them, ahead.


_ALIGNED = 512
"""Bytes at whose multiples tensors of a parcel begin, as the device's own memory does."""


def all_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of CPU tensors on `device`, for which nobody waits; themselves if that is a CPU.

    All come with one copy, from memory that is pinned, and lie in one piece there.
    """
    if device.type != "cuda":
        return list(tensors)
    parcel, starts = packed(tensors, pinned=True)
    return _unpacked(parcel.to(device, non_blocking=True), tensors, starts)


def packed(tensors: Sequence[Tensor], pinned: bool) -> tuple[Tensor, list[int]]:
    """CPU tensors one after the other, as bytes, and where each begins."""
    sizes = [-(-of.nbytes // _ALIGNED) * _ALIGNED for of in tensors]
    *starts, count = accumulate(sizes, initial=0)
    parcel = torch.empty(count, dtype=torch.uint8, pin_memory=pinned)
    for part, of in zip(_unpacked(parcel, tensors, starts), tensors, strict=True):
        np.copyto(part.numpy(), of.detach().numpy())
    return parcel, starts


def _unpacked(parcel: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Views of a parcel, of the shapes and dtypes of the `tensors` that were packed."""
    return [
        parcel[start : start + of.nbytes].view(of.dtype).view(of.shape)
        for start, of in zip(starts, tensors, strict=True)
    ]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`all_to_device` of one, which may lie there already."""
    return tensor if tensor.device == device else all_to_device([tensor], device)[0]


@dataclass(eq=False)
class DeviceBags:
    """The index tensors of lookups in one group's leaf: of one (micro-)batch. Made on the CPU, for
    what `change` brings to the device.

    Ids and `offsets` are feature-major. Bags come out sample by sample: `bag_of` and `divisors` are
    in the order of those. `shape`: samples and features. `single`: every bag is one id without a
    weight, and `positions` is in the order of the bags that come out, so that nothing is rearranged
    after. `counts`: ids of each feature, where every id is a bag of its own (`lookups_of`).
    `touched`: None where that is all `leaf_rows`, in their order.
    """

    shape: tuple[int, int]
    single: bool
    counts: Sequence[int]
    leaf_rows: int
    offsets: Tensor
    bag_of: Tensor
    positions: Tensor
    order: Tensor
    segments: Tensor
    touched: Tensor | None
    weights: Tensor | None
    divisors: Tensor | None
    chunks: SegmentChunks | None

    @classmethod
    def of(
        cls, bags: GroupBags, plan: StepPlan, device: torch.device, counts: Sequence[int] = ()
    ) -> DeviceBags:
        """Those of `plan`, on the CPU, for lookups on `device`; `arrange` them there."""
        count, single = bags.offsets.shape[0] - 1, bags.single
        shape = samples, features = (count // max(bags.features, 1), bags.features)
        offsets = bags.offsets
        divisors = bags.divisors
        bag_of = _places(features, samples)
        if not single:
            offsets, bag_of = offsets.int(), torch.from_numpy(bag_of.numpy()[bags.bag_of])
            divisors = None if divisors is None else by_sample(divisors, samples, features)
        else:
            offsets = _ends_of_one(count)
        # Replicated rows of several ranks are in the order in which each asks its homes for them.
        in_order = len(plan.home_counts) == 1 or plan.distinct == 0
        every = in_order and len(plan.touched) == plan.leaf_rows
        return cls(
            shape=shape,
            single=single,
            counts=counts,
            leaf_rows=plan.leaf_rows,
            offsets=offsets,
            bag_of=bag_of,
            positions=plan.positions,
            order=plan.order,
            segments=plan.segments,
            touched=None if every else plan.touched,
            weights=bags.weights,
            divisors=None if single else divisors,
            chunks=ops.chunks_for(plan.segments, device),
        )

    def change(self, change: Change) -> None:
        """Let every tensor be another."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, change(value))
        if self.chunks is not None:
            self.chunks = replace(self.chunks, table=change(self.chunks.table))

    @property
    def common(self) -> list[Tensor]:
        """Tensors that all batches of this shape have."""
        return [self.offsets, self.bag_of] if self.single else []

    def arrange(self) -> None:
        """Bring `positions`, which a plan has feature by feature, in the order in which they are
        read."""
        if self.single:
            self.positions = by_sample(self.positions, *self.shape)

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
    """What looks up each micro-batch of a step in one group's leaf, on the CPU (`DeviceBags.of`).

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
            ones = _ends_of_one(len(own.ids))
            own = replace(own, features=1, offsets=ones, weights=None, divisors=None)
        found.append(DeviceBags.of(own, seen, device, counts))
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
        ids=bags.ids[ids],
        offsets=_ends(np.diff(offsets)[chosen]),
        weights=None if bags.weights is None else torch.from_numpy(bags.weights.numpy()[ids]),
        divisors=None if bags.divisors is None else torch.from_numpy(bags.divisors.numpy()[chosen]),
    )
    positions = plan.positions.numpy()[ids]
    touched, counts = np.unique(positions, return_counts=True)
    seen = replace(
        plan,
        positions=torch.from_numpy(positions),
        order=torch.from_numpy(positions.argsort(kind="stable").astype(np.int32)),
        touched=torch.from_numpy(touched),
        segments=_ends(counts),
    )
    return own, seen


def _ends(lengths: np.ndarray) -> Tensor:
    """Where pieces of `lengths` `[m]` begin and end, int32 `[m + 1]`."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return torch.from_numpy(ends)


@lru_cache(maxsize=32)
def _places(features: int, samples: int) -> Tensor:
    """Where each bag comes out, sample by sample, int32 `[F * b]`; nobody writes to it."""
    return by_sample(_ends_of_one(features * samples)[:-1], features, samples)


@lru_cache(maxsize=32)
def _ends_of_one(count: int) -> Tensor:
    """0, 1, ... `count`, int32: where so many bags of one id begin and end; nobody writes to it."""
    return torch.from_numpy(np.arange(count + 1, dtype=np.int32))


class PooledLookup(torch.autograd.Function):
    """`(leaf [U + N, D], bags, weights [n] or None, out) -> pooled [b, F * D]`.

    Backward sums occurrences in their order.

    The row gradient is the same code in every mode and depends on nothing but the ids and the
    bag gradients (`embedding_bag`'s own backward changes its bits with the labels). `weights`: of
    the ids, feature by feature, in place of those of `bags`; the gradient of each is the product
    of its row as it was read and the gradient of its bag, as that is averaged. Not reduced over
    the ranks: it is that of this rank's ids. `out`: nothing, or, of `single` bags, where the result
    is to lie, `[b, F * D]`, in one piece; autograd hears nothing of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        bags: DeviceBags,
        weights: Tensor | None,
        out: Sequence[Tensor] = (),
    ) -> Tensor:
        """Sum (or average) every bag's rows."""
        ctx.bags, ctx.dim = bags, leaf.shape[1]
        (samples, features), dim = bags.shape, ctx.dim
        ctx.save_for_backward(*(() if weights is None else (weights.detach(),)))
        ctx.leaf = leaf.detach() if ctx.needs_input_grad[2] else None
        own = bags.weights if weights is None else weights
        if weights is not None and bags.single:
            own = by_sample(weights, samples, features)
        room = out[0].view(-1, dim) if out else None
        pooled = ops.pooled_lookup(leaf, bags.positions, bags.offsets, own, room)
        if not bags.single:
            pooled = pooled.view(features, samples, dim).transpose(0, 1).reshape(-1, dim)
        if bags.divisors is not None:
            pooled = pooled.div_(bags.divisors)  # as torch.nn.functional.embedding_bag
        # autograd refuses in-place operations on a view that a function returns, and this is none.
        return torch.ops.aten._unsafe_view(pooled, [samples, features * dim])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Local gradients of all leaf rows, zero for those that only other ranks named."""
        bags, (samples, features) = ctx.bags, ctx.bags.shape
        gradient = gradient.reshape(samples * features, ctx.dim)
        if bags.divisors is not None:
            gradient = gradient * bags.divisors.reciprocal()
        weights = ctx.saved_tensors  # which checkpointing gives once
        bags = replace(bags, weights=weights[0]) if weights else bags
        rows = _row_gradient(bags, gradient) if ctx.needs_input_grad[0] else None
        if ctx.leaf is None:
            return rows, None, None, None
        positions = bags.positions.index_select(0, bags.bag_of) if bags.single else bags.positions
        products = ctx.leaf.index_select(0, positions) * gradient.index_select(0, bags.bag_of)
        return rows, None, products.sum(1), None


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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Local gradients of all leaf rows, zero for those that only other ranks named."""
        return _row_gradient(ctx.bags, torch.cat(gradients)), None


def _row_gradient(bags: DeviceBags, gradient: Tensor) -> Tensor:
    """Gradients of bags `[K, D]` summed by leaf row, `[U + N, D]`."""
    touched = ops.row_gradients(
        gradient, bags.bag_of, bags.order, bags.segments, bags.weights, bags.chunks
    )
    if bags.touched is None:
        return touched
    out = gradient.new_zeros((bags.leaf_rows, gradient.shape[1]))
    return ops.put(out, bags.touched, touched)


def join_pooled(groups: Sequence[TableGroup], pooled: Sequence[Tensor]) -> Tensor:
    """Pooled bags `[b, F_g * D_g]` of every group -> `[b, sum of widths]` in feature order."""
    if len(groups) == 1:
        return pooled[0]
    columns: dict[int, Tensor] = {}
    for group, bags in zip(groups, pooled, strict=True):
        for place, feature in enumerate(group.features):
            columns[feature] = bags[:, place * group.dim : (place + 1) * group.dim]
    return torch.cat([columns[feature] for feature in sorted(columns)], dim=1)


# -----------------------------------------------------------------------------
# Row gradients over the ranks, in rank order.


def start_reduce_rows(
    link: Link,
    plan: StepPlan,
    gradient: Tensor,
    where: tuple[Tensor | None, Tensor | None],
    native: bool = False,
) -> Callable[[], Tensor]:
    """Sum the local row gradients `[U, D]` (canonical order) over all ranks; call it for the sums.

    Each rank sends the rows that it touched to their homes, which add them in rank order, one
    pass per source, and send the sums `[U_h, D]` to all: the bytes of a ring all-reduce at most,
    and a result that depends on nothing but the contributions. `native` leaves the sum to the
    library's all-reduce, whose bits depend on a row's place in the buffer. `where`: the plan's
    `touched_rows` and `source_rows` on the device; None of a rank alone.
    """
    if link.world.size == 1:
        return lambda: gradient
    if native:
        return link.start_all_reduce(gradient, ROWS, f"row gradients {plan.step}")
    at_home = start_to_homes(link, plan, gradient, where)
    what = f"row sums {plan.step}"
    return lambda: link.all_gather_rows(at_home(), plan.home_counts, what)


def start_to_homes(
    link: Link, plan: StepPlan, gradient: Tensor, where: tuple[Tensor | None, Tensor | None]
) -> Callable[[], Tensor]:
    """The sums over all ranks of the gradients `[U, D]` of this home's rows, `[U_h, D]`, when it
    is called.

    `where` as in `start_reduce_rows`.
    """
    if link.world.size == 1:
        return lambda: gradient
    (touched, sources), what = where, f"row gradients {plan.step}"
    sent, own = gradient.index_select(0, touched), plan.home_counts[link.world.rank]
    return start_sums(link, what, sent, (plan.touched_counts, plan.source_counts), (sources, own))


def start_sums(
    link: Link,
    what: str,
    sent: Tensor,
    counts: tuple[Sequence[int], Sequence[int]],
    own: tuple[Tensor, int],
) -> Callable[[], Tensor]:
    """Send gradients of rows to their homes, and add, when it is called, what came from rank 0,
    then rank 1, ...: the sums of this home's rows.

    `counts`: rows to and from each rank; `own`: which of this home's rows those that come are, on
    the device, and how many it has.
    """
    receive = link.start_all_to_all(sent, *counts, ROWS, what)

    def finish() -> Tensor:
        received, lengths, (sources, rows) = receive(), list(counts[1]), own
        sums = received.new_zeros((rows, received.shape[1]))
        (first, part), *others = zip(sources.split(lengths), received.split(lengths), strict=True)
        ops.put(sums, first, part)
        for at, part in others:
            # Rows are distinct within a source: a pass of plain additions, no atomics.
            ops.put(sums, at, sums.index_select(0, at).add_(part))
        return sums

    return finish


# -----------------------------------------------------------------------------
# The dense part's gradients, and what the ranks agree on at a step's end.


class DenseGradients:
    """Gradients of dense parameters as views of one flat buffer, summed over the ranks in chunks.

    For loops without DDP: what `distcache.train` sums its dense gradients with, so that a loop over
    the same model and batches has its bits. The ranks begin with the same weights (the same seed),
    which the first `sum` checks::

        ebc = distcache.CachedEmbeddingBagCollection(
            tables, rows=100_000, optimizer=distcache.optim.Adagrad(lr=0.01),
            gradient_reduction="sum",
        )
        model = DLRM(ebc, ...)
        dense = distcache.DenseGradients(model, gradient_reduction="sum")
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        for batch in distcache.lookahead(batches, ebc):
            optimizer.zero_grad()
            logits = model(batch.dense_features, batch.sparse_features).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
            (loss / global_batch_size).backward()
            dense.sum()
            ebc.step()
            optimizer.step()

    `flat`: the buffer, one element for each of the `parameters` that train.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[nn.Parameter],
        process_group: dist.ProcessGroup | None = None,
        *,
        gradient_reduction: str = "mean",
        timeout_s: float = 300.0,
        link: Link | None = None,
    ) -> None:
        """`parameters`, or the module that has them: those that require a gradient and are not
        empty, all of one dtype and device. `process_group`: whose ranks sum (None: all), joined by
        all of them at the first `sum`; `timeout_s`: longest wait for another rank, seconds;
        `gradient_reduction`: `mean` or `sum`, as of the collection; `link`: what the engine sums
        by. Raises ConfigError.
        """
        if gradient_reduction not in ("mean", "sum"):
            raise ConfigError(f"gradient_reduction={gradient_reduction!r} is not 'mean' or 'sum'")
        own = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        self._given = [p for p in own if p.numel()]
        self.parameters = [p for p in self._given if p.requires_grad]
        self._frozen = [p for p in self._given if not p.requires_grad]
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ConfigError(f"parameters are {shown}: make one DenseGradients for each kind")
        self._link, self._group, self._timeout_s = link, process_group, timeout_s
        self._made_link, self._is_mean = link is None, gradient_reduction == "mean"
        first = self.parameters[0] if self.parameters else torch.empty(0)
        total = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        parts = self.flat.split([p.numel() for p in self.parameters])
        pairs = zip(self.parameters, parts, strict=True)
        self._pairs = [(parameter, part.view_as(parameter)) for parameter, part in pairs]
        self._chunks = self.flat.split(CHUNK_ELEMENTS)
        for parameter, view in self._pairs:
            parameter.grad = view

    def zero(self) -> None:
        """Forget the last step's gradients, as `zero_grad` of an optimizer does."""
        for parameter in self.parameters:
            parameter.grad = None  # then backward adds nothing to zeros, but hands its own over

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the parameters' gradients over the ranks, in place (then times 1/W for `mean`).

        Called by all ranks after the last backward pass of a step; parameters without a gradient
        count as zeros, and those that are frozen have none after it. Raises ConfigError at first
        where the ranks' weights differ, PlanError where a parameter trains that did not at the
        start.
        """
        if self._link is None:
            self._link = self._joined()
        thawed = next((p for p in self._frozen if p.requires_grad), None)
        if thawed is not None:
            raise PlanError(
                f"a parameter of shape {list(thawed.shape)} was frozen when DenseGradients was "
                "made and trains now, so nobody sums its gradient: make another DenseGradients"
            )
        self.gather()
        self.start_sum()()
        size = self._link.world.size
        if self._is_mean and size > 1:
            self.flat.mul_(1.0 / size)

    def _joined(self) -> Link:
        """A link of groups of its own; the ranks compare what they are about to train."""
        require_group("DenseGradients.sum")
        world = current_world(self.flat.device, self._group, self._timeout_s)
        bits = [p.detach().cpu().reshape(-1).view(torch.uint8).numpy() for p in self._given]
        said = {
            "the shapes of dense parameters": [tuple(p.shape) for p in self._given],
            "which of them train": [p.requires_grad for p in self._given],
            "the checksums of their weights": [zlib.crc32(own.tobytes()) for own in bits],
            "gradient_reduction is mean": self._is_mean,
        }
        require_equal(world, said)
        return Link(world, world.device_group, CollectiveCounters(), "the dense gradients' group")

    def gather(self) -> None:
        """Bring the gradients into `flat`, of which they are views then; of parameters without one,
        zeros. Where autograd records nothing."""
        made = []
        for parameter, view in self._pairs:
            own = parameter.grad
            if own is None:
                view.zero_()
            elif own is not view:
                made.append((view, own))
            # An optimizer would move a frozen one by a gradient of zeros (momentum, Adam, decay).
            parameter.grad = view if parameter.requires_grad else None
        # zero_grad() lets go of a view, backward makes another; copied by one kernel, if by any.
        if made:
            torch._foreach_copy_(*zip(*made, strict=True))

    def close(self) -> None:
        """Let go of the groups that the first `sum` made; called by all ranks."""
        if self._made_link and self._link is not None:
            close_world(self._link.world)
            self._link = None

    def start_sum(self) -> Callable[[], None]:
        """Sum `flat` over the ranks, in place; the sums are there when it has been called."""
        link = self._link
        if link is None:
            raise RuntimeError("sum() joins the ranks first")
        waits = [link.start_all_reduce(chunk, DENSE, "dense gradients") for chunk in self._chunks]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish


class StepResult(NamedTuple):
    """What all ranks agree on after a training step.

    `loss`: mean over the global batch, float64; `bad_ranks`: ranks whose loss is not finite
    (then nothing was applied); `stop`: whether some rank asked to stop after this step; `save`:
    whether some rank asked for a checkpoint, and none is busy with one; `waits`: whether some asked
    for one, and some is busy.
    """

    loss: float
    bad_ranks: tuple[int, ...]
    stop: bool
    save: bool = False
    waits: bool = False


STOP, SAVE, BUSY = 1, 2, 4
"""Bits of what a rank asks for with a step, and of what it is busy with: writing a checkpoint."""


def words(loss: Tensor, asks: int) -> Tensor:
    """What a rank says at the end of a step, float64 `[2]` on the loss' device: its share of the
    global mean loss, and the bits of what it asks for."""
    said = loss.new_full((2,), float(asks), dtype=torch.float64)
    said[0] = loss.detach()
    return said


def agreement(said: Tensor) -> StepResult:
    """What follows from the `words` of all ranks, float64 `[W, 2]`: the same on each.

    Losses are added up in rank order. Where they come to no finite number, `bad_ranks` are those
    whose own is none, or all ranks.
    """
    by_rank, total, asked = said.tolist(), 0.0, 0
    for loss, asks in by_rank:
        total += loss
        asked |= int(asks)
    bad: tuple[int, ...] = ()
    if not math.isfinite(total):  # as it is where one of them is not
        bad = tuple(rank for rank, (loss, _) in enumerate(by_rank) if not math.isfinite(loss))
        bad = bad or tuple(range(len(by_rank)))
    save, busy = bool(asked & SAVE), bool(asked & BUSY)
    return StepResult(total, bad, bool(asked & STOP), save and not busy, save and busy)


class Control(NamedTuple):
    """A step's words on their way to the host: `said` float64 `[W, 2]` there once `mark` is
    reached, and on the device `enabled`, bool `[1]`: whether all losses so far were finite."""

    said: Tensor
    enabled: Tensor
    mark: DeviceEvent
    link: Link

    def read(self) -> StepResult:
        """What was said; waits for it. Raises PeerError naming who is missing."""
        self.link.settle("the step's end", self.mark)
        return agreement(self.said)


class ControlRing:
    """Brings the ranks' losses (shares of the global mean, in float64) and flags to all of them,
    step by step; each adds them up in rank order.

    Nobody waits for a device here: the words are copied to the host beside what follows, into one
    of `delay + 1` buffers that take turns, and read up to `delay` steps later. Whether anything
    may still be applied is known on the device at once; it stays false after a loss that is not
    finite.
    """

    def __init__(self, link: Link, streams: Streams, delay: int, stream: str) -> None:
        """`stream`: of stage `sync`, on which losses and flags travel."""
        world = link.world
        self._link, self._streams, self._stream = link, streams, stream
        pinned = streams.asynchronous
        shape = (delay + 1, world.size, 2)
        self._ring = torch.zeros(shape, dtype=torch.float64, pin_memory=pinned).unbind()
        self._enabled = torch.ones(1, dtype=torch.bool, device=world.device)
        self._turn = 0

    def start(self, loss: Tensor, asks: int) -> Callable[[], Control]:
        """Tell all ranks `loss` (one element, on the device) and what this rank `asks` for; call it
        for what all said."""
        wait = self._link.start_all_gather(words(loss, asks), PLANNING, "loss and control")

        def finish() -> Control:
            said = wait()
            # As `isfinite`, which takes four kernels.
            self._enabled = self._enabled & (said[:, 0].sum().abs() < math.inf)
            on_host = self._ring[self._turn]
            self._turn = (self._turn + 1) % len(self._ring)
            on_host.copy_(said, non_blocking=True)
            mark = self._streams.record_event(self._stream)
            return Control(on_host, self._enabled, mark, self._link)

        return finish
