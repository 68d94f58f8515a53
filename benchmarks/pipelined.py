"""Mode `hybrid` as TorchRec's own pipeline trains it. Imported only for that contender, because the
other modes run where TorchRec is not installed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed import comm_ops
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.modes import PIPELINED
from benchmarks.stream import Contender, Feed, Pace
from distcache.comm.link import CollectiveCounters
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import Batch
from distcache.optim import dense_optimizer
from distcache.parallel import hybrid
from distcache.parallel.hybrid import HybridModel, jagged, summing_hook
from distcache.trainer import build


@dataclass
class PipelinedBatch(Pipelineable):
    """A rank's batch as TorchRec's pipelines take it; `size`: samples of all ranks."""

    dense: Tensor
    labels: Tensor
    ids: KeyedJaggedTensor
    size: int

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelinedBatch:
        """A copy there."""
        parts = (self.dense, self.labels, self.ids)
        return PipelinedBatch(
            *(of.to(device, non_blocking=non_blocking) for of in parts), self.size
        )

    def pin_memory(self) -> PipelinedBatch:
        """A copy in pinned memory."""
        return PipelinedBatch(*(of.pin_memory() for of in self.parts()), self.size)

    def record_stream(self, stream: torch.Stream) -> None:
        """The memory stays while work of `stream` uses it."""
        for of in self.parts():
            of.record_stream(stream)

    def parts(self) -> tuple[Tensor, Tensor, KeyedJaggedTensor]:
        """All that moves."""
        return self.dense, self.labels, self.ids


class PipelinedModel(HybridModel):
    """The model of mode `hybrid` from a whole batch to its loss, which TorchRec can trace."""

    def forward(self, batch: PipelinedBatch) -> tuple[Tensor, Tensor]:
        """This rank's share of the mean loss, with a gradient, and without."""
        pooled = self.ebc(batch.ids)
        vectors = torch.cat([pooled[feature] for feature in self.features], dim=1)
        logits = self.dense(batch.dense, vectors)
        total = binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        loss = total / batch.size
        return loss, loss.detach()


class Pipelined(Contender):
    """Mode `hybrid`, whose batches come to the device, and whose ids to the ranks of their tables,
    two steps ahead, on streams of their own. Bags are sums."""

    name, ahead = PIPELINED, 3

    def __init__(
        self, config: Config, world: World, parts: tuple[Any, Any, nn.Module], feed: Feed
    ) -> None:
        source, tables, model = parts
        spec = build.hybrid_spec(config, world, tables, source)
        with mock.patch.object(hybrid, "HybridModel", PipelinedModel):
            dmp = hybrid.build(world, spec, model)
        comm_ops.set_gradient_division(False)
        wrapped: Any = dmp._dmp_wrapped_module
        wrapped.register_comm_hook(world.device_group, summing_hook(CollectiveCounters()))
        dense_lr, rows_lr = build.build_rates(config)(0)
        for group in dmp.fused_optimizer.param_groups:
            group["lr"] = rows_lr
        dmp.fused_optimizer.step()  # updates no row: it hands the rate to the kernels
        dense = dense_optimizer(model.parameters(), spec.optimizer, dense_lr)
        self._world, self._feed, self._size = world, feed, spec.local_batch_size
        self._ready: deque[PipelinedBatch] = deque()
        self._pace, self._batches = Pace(world.device), self._given()
        self._pipeline: TrainPipelineSparseDist[PipelinedBatch, Tensor] = TrainPipelineSparseDist(
            dmp.train(), dense, world.device
        )

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._ready) < steps + self.ahead:
            self._ready.append(self._form(next(self._feed)))

    def _form(self, batch: Batch) -> PipelinedBatch:
        ids = jagged(batch.ids, self._size, torch.device("cpu"))
        formed = PipelinedBatch(batch.dense, batch.labels, ids, batch.global_size)
        return formed.pin_memory() if self._world.device.type == "cuda" else formed

    def _given(self) -> Iterator[PipelinedBatch]:
        while True:
            yield self._ready.popleft() if self._ready else self._form(next(self._feed))

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        loss = self._pipeline.progress(self._batches)
        self._pace.keep()

        def of_all() -> float:
            total = loss.double().cpu()
            dist.all_reduce(total, group=self._world.host_group)
            return total.item()

        return of_all

    def close(self) -> None:
        """See `Contender.close`."""
        self._ready.clear()
        del self._pipeline
