"""The stages that bring a step's rows to the device, for all groups of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from distcache.comm.counters import CollectiveCounters
from distcache.comm.link import Link
from distcache.ops.copies import put
from distcache.pipeline.lookup import DeviceBags, to_device, transfer_to_device
from distcache.pipeline.rows import GroupRows, MoveCounts
from distcache.pipeline.schedule import InFlight, Stage
from distcache.step_plan import StepPlan
from distcache.streams import COMPUTE, Streams

T = TypeVar("T")


class Movement:
    """`stages`: write_back, gather and fill, in the order in which they must run; with sharded rows
    `share_early` after them, which sends those that no step on its way changes to who reads them.

    The ranks' fills go over the device group of `link`, with counters of their own: what a step's
    fill sent is counted with the step, when that is run.
    """

    def __init__(
        self,
        rows: Sequence[GroupRows],
        link: Link,
        streams: Streams,
        with_batch: bool,
        dtype: torch.dtype = torch.float32,
        early: bool = False,
    ) -> None:
        """`with_batch`: the step's batch goes to the device along with its rows, and its dense
        features and labels become `dtype`; `early`: plans have rows that travel early."""
        self._rows, self._with_batch, self._dtype = list(rows), with_batch, dtype
        self._streams = streams
        self._sent = CollectiveCounters(link.world.nodes, link.world.rank)
        self._link = Link(link.world, link.group, self._sent, "the device group (moving rows)")
        self.stages = (
            Stage("write_back", "copy_out", self._write_back),
            Stage("gather", "host", self._gather),
            Stage("fill", "copy_in", self._fill),
        )
        if early:
            self.stages += (Stage("share_early", "copy_in", self._share_early),)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_back(self, flight: InFlight) -> None:
        flight.counts = [MoveCounts() for _ in self._rows]
        for rows, plan, counts in self._each(flight, flight.counts):
            rows.write_back(plan, counts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _gather(self, flight: InFlight) -> None:
        flight.gathered = [
            rows.gather(plan, counts) for rows, plan, counts in self._each(flight, flight.counts)
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill(self, flight: InFlight) -> None:
        self._sent.reset()
        for rows, plan, values in self._each(flight, flight.gathered):
            rows.fill(plan, values, self._link)
        self._count(flight)
        flight.gathered = []
        if self._with_batch:
            self._send_batch(flight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _share_early(self, flight: InFlight) -> None:
        self._sent.reset()
        flight.sharded = []
        for rows, plan in zip(self._rows, flight.planned.plans, strict=True):
            if plan.shard is None or plan.shard.early is None:
                flight.sharded.append(None)
                continue
            transfer = plan.shard.early
            there = transfer_to_device(transfer, self._link.world.device)
            came = rows.send_rows(transfer, there, self._link, f"early rows {plan.step}")
            out = came.new_empty((plan.shard.rows, came.shape[1]))
            put(out, there.places, came)
            self._streams.hand_over((out,), COMPUTE)
            flight.sharded.append(out)
        self._count(flight)

    def _count(self, flight: InFlight) -> None:
        """What was sent since the counters were reset is the step's."""
        flight.fill_bytes += self._sent.collective_bytes
        flight.fill_between_nodes += self._sent.inter_node_bytes

    def _send_batch(self, flight: InFlight) -> None:
        """The batch's tensors to the device, where the compute stream reads them."""
        planned, device = flight.planned, self._link.world.device
        flight.bags = [
            DeviceBags(bags, plan, device)
            for bags, plan in zip(planned.bags, planned.plans, strict=True)
        ]
        batch, dtype = planned.batch, self._dtype
        flight.dense = to_device(batch.dense.to(dtype), device)
        flight.labels = to_device(batch.labels.to(dtype), device)
        sent = [tensor for bags in flight.bags for tensor in bags.tensors()]
        self._streams.hand_over((*sent, flight.dense, flight.labels), COMPUTE)

    def _each(
        self, flight: InFlight, values: Iterable[T]
    ) -> Iterator[tuple[GroupRows, StepPlan, T]]:
        return zip(self._rows, flight.planned.plans, values, strict=True)
