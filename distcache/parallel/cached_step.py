"""One step of a cached mode: its stages, and what they read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.comm.link import Link
from distcache.coordinator import DenseGradients, agree, reduce_rows
from distcache.parallel.cached_parts import CachedSettings
from distcache.parallel.precision import predict
from distcache.pipeline.groups import TableGroup, join_pooled
from distcache.pipeline.lookup import PooledLookup
from distcache.pipeline.movement import Movement
from distcache.pipeline.planning import PlannedStep
from distcache.pipeline.rows import GroupRows
from distcache.pipeline.schedule import InFlight, Stage


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
    ) -> None:
        self.groups, self.rows, self.model = groups, rows, model
        self.link: Link = rows[0].link
        self.dense = DenseGradients(model.parameters(), self.link)
        self.dense_optimizer, self.settings = dense_optimizer, settings
        self.embedding_lr = 0.0
        self.applied = torch.zeros((), dtype=torch.int64)
        self._bad_ranks: tuple[int, ...] = ()
        movement = Movement(rows, self.link, with_bags=True).stages
        self.training = (
            *movement,
            Stage("forward_backward", "compute", self._forward_backward),
            Stage("sync", "communication", self._sync),
            Stage("apply", "compute", self._apply),
        )
        self.evaluation = (*movement, Stage("forward", "compute", self._forward))

    def _predict(self, flight: InFlight) -> Tensor:
        """Logits `[b]` of the local batch from the leaves of its rows."""
        pooled = [
            PooledLookup.apply(leaf, bags)
            for leaf, bags in zip(flight.leaves, flight.bags, strict=True)
        ]
        batch = flight.planned.batch
        dense = batch.dense.to(self.link.world.device, self.settings.dtype)
        joined = join_pooled(self.groups, pooled, len(batch.labels))
        return predict(self.model, dense, joined, self.settings.amp)

    def _take_leaves(self, planned: PlannedStep) -> list[Tensor]:
        return [rows.leaf(plan) for rows, plan in zip(self.rows, planned.plans, strict=True)]

    def _forward_backward(self, flight: InFlight) -> None:
        batch = flight.planned.batch
        flight.leaves = [leaf.requires_grad_() for leaf in self._take_leaves(flight.planned)]
        self.dense.zero()
        logits = self._predict(flight)
        labels = batch.labels.to(logits)
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        flight.loss = total / batch.global_size
        flight.loss.backward()

    @torch.no_grad()
    def _forward(self, flight: InFlight) -> None:
        flight.leaves = self._take_leaves(flight.planned)
        flight.logits = self._predict(flight)

    def _sync(self, flight: InFlight) -> None:
        """Program order: row gradients of each group, dense chunks, loss and control."""
        native = self.settings.reduction == "native"
        for leaf, plan in zip(flight.leaves, flight.planned.plans, strict=True):
            gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            flight.sums.append(reduce_rows(self.link, plan, gradient, native))
        self.dense.sum()
        if flight.loss is None:
            raise RuntimeError("sync comes after forward_backward")
        agreement = agree(self.link, flight.loss, flight.stop)
        if not agreement.bad_ranks and not math.isfinite(agreement.loss):
            agreement = replace(agreement, bad_ranks=tuple(range(self.link.world.size)))
        # Sticky: after a loss that is not finite nothing applies, whoever goes on.
        self._bad_ranks = self._bad_ranks or agreement.bad_ranks
        agreement = replace(agreement, bad_ranks=self._bad_ranks)
        flight.agreement = agreement

    @torch.no_grad()
    def _apply(self, flight: InFlight) -> None:
        """Update rows and dense part; a step whose summed loss is not finite changes nothing."""
        if flight.agreement is None or flight.agreement.bad_ranks:
            return
        self.applied += 1
        count = int(self.applied)
        for rows, plan, gradient in zip(self.rows, flight.planned.plans, flight.sums, strict=True):
            rows.apply(plan, gradient, self.embedding_lr, count)
        self.dense_optimizer.step()
