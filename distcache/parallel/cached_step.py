"""One step of a cached mode: its stages, and what they read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.comm.link import Link
from distcache.coordinator import (
    Agreement,
    ControlRing,
    DenseGradients,
    start_reduce_rows,
    start_to_homes,
    start_to_sharded_homes,
)
from distcache.ops.copies import put
from distcache.optim.masked import masked_step, put_back, uncount
from distcache.parallel.cached_parts import CachedSettings, placement_of, shares_early
from distcache.parallel.precision import predict
from distcache.pipeline.groups import TableGroup, join_pooled
from distcache.pipeline.lookup import DeviceBags, PooledLookup, to_device
from distcache.pipeline.movement import Movement
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.schedule import EARLY, InFlight, Stage
from distcache.pipeline.split import StepPart
from distcache.streams import COMMUNICATION, COMPUTE, Streams


class CachedStep:
    """The stages of training and evaluation steps over `rows` and the dense `model`.

    `applied`: steps applied so far (int64, shared with the checkpoint); `embedding_lr`: the rate of
    the coming steps. A loss that is not finite is sticky: nothing applies after it.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        rows: Sequence[GroupRows],
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        settings: CachedSettings,
        streams: Streams,
        delay: int,
    ) -> None:
        """`delay`: steps after which a step's loss is read; 0: at once."""
        self.groups, self.rows, self.model = groups, rows, model
        self.link: Link = rows[0].link
        self.dense = DenseGradients(model.parameters(), self.link)
        self.dense_optimizer, self.settings = dense_optimizer, settings
        self.embedding_lr = 0.0
        self.applied = torch.zeros((), dtype=torch.int64)
        self._control, self._delay = ControlRing(self.link, streams, delay), delay
        self._bad_ranks: tuple[int, ...] = ()
        world = self.link.world
        self.shares = any(group.hot is not None for group in groups)
        """Whether a step begins with an exchange of rows."""
        self._home_state = placement_of(settings, world).state == "home"
        early = shares_early(settings, world)
        movement = Movement(rows, self.link, streams, True, settings.dtype, early).stages
        first: tuple[Stage, ...] = ()
        late: tuple[Stage, ...] = ()
        back: tuple[Stage, ...] = ()
        if settings.hot is not None:
            first = (Stage(EARLY, COMPUTE, self._forward_backward_hot),)
        if self.shares:
            late = (Stage("share_late", COMMUNICATION, self._share_late),)
        if self._home_state and any(group_rows.slots.replicated for group_rows in rows):
            back = (Stage("return_rows", COMMUNICATION, self._return_rows),)
        self.training = (
            *first,
            *movement,
            *late,
            Stage("forward_backward", COMPUTE, self._forward_backward),
            Stage("sync", COMMUNICATION, self._sync),
            Stage("apply", COMPUTE, self._apply),
            *back,
        )
        self.evaluation = (*movement, *late, Stage("forward", COMPUTE, self._forward))

    def _predict(self, flight: InFlight) -> Tensor:
        """Logits `[b]` of the local batch from the leaves of its rows."""
        pooled = [
            PooledLookup.apply(leaf, bags)
            for leaf, bags in zip(flight.leaves, flight.bags, strict=True)
        ]
        joined = join_pooled(self.groups, pooled)
        return predict(self.model, flight.dense, joined, self.settings.amp)

    @torch.no_grad()
    def _share_late(self, flight: InFlight) -> None:
        """Bring the sharded rows that could not travel before the step."""
        known = flight.sharded or [None] * len(self.rows)
        flight.sharded = []
        parts = (self.rows, flight.planned.plans, flight.bags, known)
        for rows, plan, bags, early in zip(*parts, strict=True):
            if plan.shard is None or bags.shard is None:
                flight.sharded.append(None)
                continue
            what, there = f"late rows {plan.step}", bags.shard.late
            came = rows.send_rows(plan.shard.late, there, self.link, what)
            if early is not None:
                came = put(early, there.places, came)
            flight.sharded.append(came)

    def _take_leaves(self, flight: InFlight) -> list[Tensor]:
        """The rows of the step, `[U + N, D]` for each group."""
        return [self._leaf(place, flight, bags.slots) for place, bags in enumerate(flight.bags)]

    def _leaf(self, place: int, flight: InFlight, where: Tensor) -> Tensor:
        rows, plan = self.rows[place], flight.planned.plans[place]
        sharded = flight.sharded[place] if flight.sharded else None
        if sharded is None:
            return rows.leaf(plan, where)
        return torch.cat((rows.leaf(plan, where), sharded)) if plan.distinct else sharded

    def _forward_backward(self, flight: InFlight) -> None:
        parts = flight.planned.parts
        if parts:
            hot, cold = parts
            if not hot.early:
                self._start(flight)
                self._add_part(flight, hot)
            self._add_part(flight, cold)
            return
        self._start(flight)
        flight.leaves = [leaf.requires_grad_() for leaf in self._take_leaves(flight)]
        logits = self._predict(flight)
        flight.loss = self._loss(logits, flight.labels, flight)
        flight.loss.backward()

    def _start(self, flight: InFlight) -> None:
        self.dense.zero()
        flight.buffers = [(value, value.clone()) for value in self.model.buffers()]

    def _loss(self, logits: Tensor, labels: Tensor, flight: InFlight) -> Tensor:
        """This rank's share of the mean over the global batch."""
        labels = labels.to(logits.dtype)
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total / flight.planned.batch.global_size

    def _forward_backward_hot(self, flight: InFlight) -> None:
        """The hot part of a step, if its rows are all on the device before any moves for it."""
        hot = flight.planned.parts[0]
        if hot.early:
            self._start(flight)
            self._add_part(flight, hot)

    def _add_part(self, flight: InFlight, part: StepPart) -> None:
        """Add a part's loss and gradients to those of its step; the hot part comes first."""
        device = self.link.world.device
        if not flight.gradients:
            flight.gradients = [
                torch.zeros(plan.leaf_rows, rows.cache.dim, dtype=rows.cache.dtype, device=device)
                for rows, plan in zip(self.rows, flight.planned.plans, strict=True)
            ]
            flight.loss = torch.zeros((), dtype=self.settings.dtype, device=device)
        if len(part.samples) == 0:
            return
        dtype = self.settings.dtype
        dense, labels = (to_device(t.to(dtype), device) for t in (part.dense, part.labels))
        bags = [DeviceBags(b, p, device) for b, p in zip(part.bags, part.plans, strict=True)]
        leaves = [leaf.requires_grad_() for leaf in self._leaves_of(part, bags, flight)]
        pooled = [PooledLookup.apply(leaf, b) for leaf, b in zip(leaves, bags, strict=True)]
        joined = join_pooled(self.groups, pooled)
        logits = predict(self.model, dense, joined, self.settings.amp)
        loss = self._loss(logits, labels, flight)
        loss.backward()
        flight.loss = flight.loss + loss.detach()
        for gradient, leaf, b in zip(flight.gradients, leaves, bags, strict=True):
            if leaf.grad is not None:  # rows are distinct within a part: plain additions
                gradient.index_add_(0, b.touched, leaf.grad)

    @torch.no_grad()
    def _leaves_of(
        self, part: StepPart, bags: Sequence[DeviceBags], flight: InFlight
    ) -> list[Tensor]:
        """The rows of a part, `[R, D]` for each group, from those of the step where some came."""
        if not self.shares or part.early:
            of_groups = zip(self.rows, part.plans, bags, strict=True)
            return [rows.leaf(plan, b.slots) for rows, plan, b in of_groups]
        flight.leaves = flight.leaves or self._take_leaves(flight)
        pairs = zip(flight.leaves, bags, strict=True)
        return [leaf.index_select(0, b.touched) for leaf, b in pairs]

    @torch.no_grad()
    def _forward(self, flight: InFlight) -> None:
        flight.leaves = self._take_leaves(flight)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            flight.logits = self._predict(flight)
        finally:
            for module, training in modes:
                module.training = training

    def _sync(self, flight: InFlight) -> None:
        """Program order: row gradients of each group, dense chunks, loss and control; then what
        follows from the first."""
        native = self.settings.reduction == "native"
        gradients = flight.gradients or [
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in flight.leaves
        ]
        if flight.loss is None:
            raise RuntimeError("sync comes after forward_backward")
        parts = (self.rows, flight.planned.plans, gradients, flight.bags)
        replicated: list[Callable[[], Tensor] | None] = []
        sharded: list[Callable[[], Tensor] | None] = []
        for rows, plan, gradient, bags in zip(*parts, strict=True):
            where, shard, sums, own = (bags.replicated, bags.source_rows), plan.shard, None, None
            if rows.slots.replicated:
                summed = gradient[: plan.distinct]
                if self._home_state:
                    sums = start_to_homes(self.link, plan, summed, where)
                else:
                    sums = start_reduce_rows(self.link, plan, summed, native, where)
            if shard is not None and bags.shard is not None:
                named = (gradient[plan.distinct :], bags.shard.source_rows)
                own = start_to_sharded_homes(self.link, plan.step, shard, *named)
            replicated.append(sums)
            sharded.append(own)
        dense, control = self.dense.start_sum(), self._control.start(flight.loss, flight.stop)
        flight.sums += [None if sums is None else sums() for sums in replicated]
        flight.sharded_sums += [None if own is None else own() for own in sharded]
        dense()
        flight.control = control()

    @torch.no_grad()
    def _apply(self, flight: InFlight) -> None:
        """Update rows and dense part; a step whose summed loss is not finite changes nothing."""
        control = flight.control
        if control is None:
            raise RuntimeError("apply comes after sync")
        enabled = control.enabled if self._delay else None
        put_back(flight.buffers, control.enabled)
        if not self._delay and self.agreed(flight).bad_ranks:
            return
        self.applied += 1
        count = int(self.applied)
        update = (self.embedding_lr, count)
        parts = (self.rows, flight.planned.plans, flight.bags, flight.sums, flight.sharded_sums)
        for rows, plan, bags, gradient, own in zip(*parts, strict=True):
            if gradient is not None:
                rows.apply(plan, gradient, update, bags.slots, enabled)
            if plan.shard is not None and own is not None and bags.shard is not None:
                rows.apply_sharded(plan.shard, own, update, bags.shard.slots, enabled)
        if enabled is None:
            self.dense_optimizer.step()
        else:
            masked_step(self.dense_optimizer, enabled)

    @torch.no_grad()
    def _return_rows(self, flight: InFlight) -> None:
        """Bring the rows that homes have updated to all ranks."""
        if flight.agreement is not None and flight.agreement.bad_ranks:
            return
        parts = (self.rows, flight.planned.plans, flight.bags)
        for rows, plan, bags in zip(*parts, strict=True):
            if rows.slots.replicated:
                rows.return_rows(plan, self.link, bags.slots)

    def agreed(self, flight: InFlight) -> Agreement:
        """What all ranks know of a step; to be asked for step after step, in order.

        Sticky: after a loss that is not finite nothing applies, whoever goes on.
        """
        if flight.agreement is None and flight.control is not None:
            agreement = flight.control.read()
            self._bad_ranks = self._bad_ranks or agreement.bad_ranks
            flight.agreement = replace(agreement, bad_ranks=self._bad_ranks)
            if self._bad_ranks and self._delay:  # it counted, before anybody knew
                self.applied -= 1
                uncount(self.dense_optimizer)
        if flight.agreement is None:
            raise RuntimeError("a step that is not through its stages has no result")
        return flight.agreement
