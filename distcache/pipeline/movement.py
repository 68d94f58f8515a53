"""The stages that bring a step's rows to the device, for all groups of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from distcache.comm.counters import CollectiveCounters
from distcache.comm.link import Link
from distcache.pipeline.lookup import DeviceBags, to_device
from distcache.pipeline.rows import GroupRows, MoveCounts
from distcache.pipeline.schedule import InFlight, Stage
from distcache.step_plan import StepPlan
from distcache.streams import COMPUTE, Streams

T = TypeVar("T")


class Movement:
    """`stages`: write_back, gather and fill, in the order in which they must run.

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
    ) -> None:
        """`with_batch`: the step's batch goes to the device along with its rows, and its dense
        features and labels become `dtype`."""
        self._rows, self._with_batch, self._dtype = list(rows), with_batch, dtype
        self._streams, self._sent = streams, CollectiveCounters()
        self._link = Link(link.world, link.group, self._sent, "the device group (moving rows)")
        self.stages = (
            Stage("write_back", "copy_out", self._write_back),
            Stage("gather", "host", self._gather),
            Stage("fill", "copy_in", self._fill),
        )

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
        before = self._sent.collective_bytes
        for rows, plan, values in self._each(flight, flight.gathered):
            rows.fill(plan, values, self._link)
        flight.fill_bytes = self._sent.collective_bytes - before
        flight.gathered = []
        if self._with_batch:
            self._send_batch(flight)

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
