"""What a cached mode keeps on the device, part by part: as the design counts it, and as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distcache.engine.step import Flight
from distcache.parallel.cached import CachedParallel
from distcache.step_plan import StepPlan

INDEX_BYTES = 8
"""Indices on the device are int64."""


class DeviceParts:
    """The largest sizes of any step, in bytes; none of the parts but `slots` and `dense` depends on
    anything but the batch.

    `slots`: C (D + S) elements per group. `ids`: index tensors, dense features and labels of the
    P + 1 steps that are on the device at once. `rows`: a step's rows, their gradients and sums, 3 U
    D, and of N sharded rows, of which H are this home's, (2 N + H) D. `moving`: rows on their way
    in and out. `dense`: parameters, gradients and optimizer state.
    """

    def __init__(self, mode: CachedParallel) -> None:
        self._mode = mode
        self._expected: dict[str, int] = {}
        self._measured: dict[str, int] = {}

    def add(self, flight: Flight) -> None:
        """Take in one training step that was run."""
        mode = self._mode
        ahead = mode.settings.prefetch + 1 if mode.settings.schedule == "overlapped" else 1
        item = mode.settings.dtype.itemsize
        pairs = list(zip(flight.plans, mode.rows, strict=True))
        batch = flight.batch
        samples = len(batch.labels)
        index = sum(
            3 * len(plan.positions) + len(bags.offsets) + 4 * plan.distinct + 2 * _sharded(plan) + 1
            for plan, bags in zip(flight.plans, flight.bags, strict=True)
        )
        floats = samples * (batch.dense.shape[1] + 1) + sum(
            len(part)
            for bags in flight.bags
            for part in (bags.weights, bags.scale)
            if part is not None
        )
        expected = {
            "ids": ahead * (INDEX_BYTES * index + item * floats),
            "rows": sum(_rows(plan) * rows.cache.dim * item for plan, rows in pairs),
            "moving": sum(_moving(plan) * rows.row_bytes for plan, rows in pairs),
        }
        sent = [*flight.where, *(bags for part in flight.lookups for bags in part)]
        ids = [tensor for one in sent for tensor in one.tensors()]
        ids += [part for part in (flight.dense, flight.labels) if part is not None]
        grads = [leaf.grad for leaf in flight.leaves if leaf.grad is not None]
        measured = {
            "ids": ahead * nbytes(ids),
            "rows": nbytes([*flight.leaves, *grads, *flight.result.sums.tensors()]),
            "moving": sum(
                count.host_to_device_bytes + count.device_to_host_bytes for count in flight.counts
            ),
        }
        for into, values in ((self._expected, expected), (self._measured, measured)):
            for name, value in values.items():
                into[name] = max(into.get(name, 0), value)

    def summary(self) -> dict[str, Any]:
        """`{part: {expected, measured}}`, and on CUDA the allocator's `peak`."""
        mode = self._mode
        slots = sum(rows.cache.slots * rows.row_bytes for rows in mode.rows)
        held = [part for rows in mode.rows for part in (rows.cache.weight, rows.cache.state)]
        dense = list(mode.model.parameters())
        state = [
            value
            for values in mode.dense_optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        parameters = nbytes(dense)
        found = {
            "slots": {"expected": slots, "measured": nbytes(held)},
            "dense": {
                "expected": 2 * parameters + nbytes(state),
                "measured": nbytes([*dense, mode.dense.flat, *state]),
            },
        }
        for name, value in self._expected.items():
            found[name] = {"expected": value, "measured": self._measured[name]}
        device = mode.world.device
        if device.type == "cuda":
            found["peak of the allocator"] = {
                "expected": sum(part["expected"] for part in found.values()),
                "measured": torch.cuda.max_memory_allocated(device),
            }
        return found


def _sharded(plan: StepPlan) -> int:
    return 0 if plan.shard is None else plan.shard.rows


def _rows(plan: StepPlan) -> int:
    """Rows that are copied, have a gradient, or a sum: 3 U, and 2 N + H of sharded ones."""
    shard = plan.shard
    return 3 * plan.distinct + (0 if shard is None else 2 * shard.rows + len(shard.slots))


def _moving(plan: StepPlan) -> int:
    shard, moving = plan.shard, plan.misses + len(plan.evict_slots)
    return moving + (0 if shard is None else len(shard.fetch_slots) + len(shard.evict_slots))


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of distinct tensors' elements; one that is named twice counts once."""
    seen = {t.data_ptr(): t.nbytes for t in tensors if t is not None and t.numel()}
    return sum(seen.values())
