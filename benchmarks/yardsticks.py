"""The same model over other people's tables, on one device: FBGEMM's fused ones and their cache on
a GPU, and torch's.

All start from the modes' initial bits and train with the same settings. They get their batches in
their own form, on a GPU in pinned memory, before the timed part, as a data loader of theirs would
hand them over.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.stream import Contender, Feed, Pace
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import Batch
from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec
from distcache.optim import dense_optimizer
from distcache.store.rows import draw_tables, put_block
from distcache.trainer import build
from distcache.versions import fbgemm_here, require_hybrid

log = logging.getLogger("distcache.benchmarks.step")

UVM = ("uvm", "uvm_prefetch")
"""FBGEMM's own cache, which is on a GPU."""

YARDSTICKS = ("fused", "bag", *UVM)
"""The values of `modes` that are other libraries' tables."""

_KINDS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
}
"""FBGEMM's names of the optimizers."""


def who_stands_in(mode: str, config: Config, world: World) -> str:
    """The yardstick `mode`, or `bag` for `fused` on a GPU for which FBGEMM has no kernels here.

    Raises ConfigError for one that cannot run here, or has not such settings.
    """
    optim, cuda = config.optim, world.device.type == "cuda"
    if world.size > 1:
        raise ConfigError(f"modes={mode} runs on one rank: leave it out, or take modes=hybrid")
    if build.dtype_of(config) != torch.float32:
        raise ConfigError(f"modes={mode} trains in float32: set trainer.dtype=float32")
    if mode in UVM and not cuda:
        raise ConfigError(f"modes={mode} is FBGEMM's cache on a GPU: set device=cuda")
    reason = why_no_fbgemm(world.device) if mode != "bag" and cuda else ""
    if reason and mode in UVM:
        raise ConfigError(f"modes={mode} is FBGEMM's cache on a GPU: {reason}")
    if reason:
        log.warning("`bag` (torch.nn.EmbeddingBag) stands in for `fused`: %s", reason)
    if reason or mode == "bag":
        if optim.name == "rowwise_adagrad":
            raise ConfigError("modes=bag has no optimizer=rowwise_adagrad: take modes=fused")
        return "bag"
    require_hybrid()
    if optim.name == "adam" and not cuda:
        raise ConfigError("modes=fused has no optimizer=adam on the CPU: take modes=bag")
    if optim.initial_accumulator and optim.name in ("adagrad", "rowwise_adagrad"):
        raise ConfigError(f"modes={mode} starts sums at 0: set optim.initial_accumulator=0")
    return mode


def why_no_fbgemm(device: torch.device) -> str:
    """Why FBGEMM's tables cannot run on a device here; empty where they can."""
    try:
        require_hybrid()
    except ConfigError as error:
        return str(error)
    kernels = device.type == "cpu" or "fbgemm-gpu" in fbgemm_here()
    return "" if kernels else "the fbgemm here is the CPU build"


class Yardstick(ABC, Contender):
    """A dense model behind tables that update themselves in `update`, or inside backward."""

    def __init__(
        self,
        name: str,
        config: Config,
        world: World,
        parts: tuple[Any, Sequence[TableSpec], nn.Module],
        feed: Feed,
    ) -> None:
        """`parts`: source, tables (of one width, one feature each), and dense model."""
        self.name, self.device, self.seed = name, world.device, config.trainer.seed
        self.tables, self.dense = parts[1], parts[2].to(world.device)
        self._feed = feed
        self._ready: deque[tuple[int, list[Tensor]]] = deque()
        self._pace = Pace(world.device)
        self.optim: Any = build.optimizer_spec(config)
        dense_lr, self.lr = build.build_rates(config)(0)
        self._optimizer = dense_optimizer(self.dense.parameters(), self.optim, dense_lr)

    def form(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Ids int64 `[n]` in this library's numbers and offsets int64 `[F b + 1]`, feature-major,
        on the CPU."""
        return batch.ids.values, batch.ids.offsets

    @abstractmethod
    def pooled(self, ids: Sequence[Tensor]) -> Tensor:
        """Pooled rows `[b, sum of widths]`, with gradient."""

    def update(self) -> None:
        """Apply the rows' gradients, where backward has not done it."""

    def initialise(self, weights: Sequence[Tensor]) -> None:
        """The modes' initial bits into every table's weight."""
        for index, (table, weight) in enumerate(zip(self.tables, weights, strict=True)):
            put = partial(put_block, weight.detach())
            draw_tables(self.seed, [index], RowLayout([table], 1), put)

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._ready) < steps:
            batch = next(self._feed)
            tensors = [batch.dense, batch.labels, *self.form(batch)]
            if self.device.type == "cuda":  # from other memory a copy would wait
                tensors = [tensor.pin_memory() for tensor in tensors]
            self._ready.append((batch.global_size, tensors))

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        size, (dense, labels, *ids) = self._ready.popleft()
        self._optimizer.zero_grad()
        logits = self.dense(dense.to(self.device, non_blocking=True), self.pooled(ids))
        labels = labels.to(logits, non_blocking=True)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / size
        loss.backward()
        self.update()
        self._optimizer.step()
        self._pace.keep()
        loss = loss.detach()
        return lambda: loss.item()

    def close(self) -> None:
        """See `Contender.close`."""
        self._ready.clear()
        self.dense.zero_grad(set_to_none=True)


class TorchTables(Yardstick):
    """`torch.nn.EmbeddingBag` over all rows, with sparse gradients and torch's own optimizer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._layout = RowLayout(self.tables, 1)
        shape = (self._layout.rows, self._layout.dim)
        self.bag = nn.EmbeddingBag(
            *shape, mode="sum", sparse=True, include_last_offset=True, device="meta"
        )
        weight = torch.empty(shape, device=self.device)
        self.bag.weight = nn.Parameter(weight)
        self.initialise(weight.split([table.rows for table in self.tables]))
        rows, of, torchs = [self.bag.weight], self.optim, torch.optim
        self._rows = {
            "sgd": lambda: torchs.SGD(rows, self.lr),
            "adagrad": lambda: torchs.Adagrad(
                rows, self.lr, eps=of.eps, initial_accumulator_value=of.initial_accumulator
            ),
            "adam": lambda: torchs.SparseAdam(rows, self.lr, betas=of.betas, eps=of.eps),
        }[of.name]()

    def form(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Yardstick.form`: row numbers over all tables."""
        ids = batch.ids
        lengths = ids.offsets.diff().view(len(ids.features), -1).sum(1)
        offsets = torch.from_numpy(self._layout.offsets[:-1])
        return ids.values + torch.repeat_interleave(offsets, lengths), ids.offsets

    def pooled(self, ids: Sequence[Tensor]) -> Tensor:
        """See `Yardstick.pooled`."""
        rows, offsets = (tensor.to(self.device, non_blocking=True) for tensor in ids)
        dim, features = self._layout.dim, len(self.tables)
        bags = self.bag(rows, offsets).view(features, -1, dim)
        return bags.transpose(0, 1).reshape(-1, features * dim)

    def update(self) -> None:
        """Apply the sparse gradient."""
        self._rows.step()
        self._rows.zero_grad()


class FbgemmTables(Yardstick):
    """FBGEMM's table-batched embeddings, which TorchRec's fused collections are made of: the rows
    are updated inside backward.

    `fused`: all rows on the device. `uvm`: its cache (`MANAGED_CACHING`, TorchRec's
    `fused_uvm_caching`), with slots for `cache.ratio` of the rows: whole tables lie in unified
    memory, the cache is 32-way set-associative, least recently used rows leave first and are always
    written back, misses are read from host memory by kernels, and optimizer state is never cached.
    `uvm_prefetch`: the rows of the next batch come in on a stream of their own, issued after the
    lookup of this one, as TorchRec's `PrefetchTrainPipelineSparseDist` does. On a CPU, all tables
    lie in host memory, and there is no cache.
    """

    def __init__(self, name: str, config: Config, *more: Any) -> None:
        super().__init__(name, config, *more)
        prefetch = name == "uvm_prefetch" and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if prefetch else None
        self._next: tuple[Tensor, Tensor] | None = None
        settings = uvm_settings(config, prefetch) if name in UVM else {}
        beta1, beta2 = config.optim.betas
        self.bags = fbgemm_tables(
            [(table.rows, table.dim) for table in self.tables],
            self.optim.name,
            self.device,
            "MANAGED_CACHING" if name in UVM else "DEVICE",
            learning_rate=self.lr,
            eps=config.optim.eps,
            beta1=beta1,
            beta2=beta2,
            **settings,
        )
        self.initialise(self.bags.split_embedding_weights())

    def pooled(self, ids: Sequence[Tensor]) -> Tensor:
        """See `Yardstick.pooled`."""
        found, self._next = self._next, None
        if self._stream is None:
            return self.bags(*self._arrive(ids))
        here = torch.cuda.current_stream(self.device)
        here.wait_stream(self._stream)
        for tensor in found or ():
            tensor.record_stream(here)
        pooled = self.bags(*(found or self._arrive(ids)))
        if self._ready:  # the rows of the next batch come into the cache
            with torch.cuda.stream(self._stream):
                self._next = self._arrive(self._ready[0][1][2:])
                self.bags.prefetch(*self._next, forward_stream=here)
        return pooled

    def _arrive(self, ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        values, offsets = (tensor.to(self.device, non_blocking=True) for tensor in ids)
        return values, offsets


def uvm_settings(config: Config, prefetch: bool) -> dict[str, Any]:
    """What FBGEMM's cache is told beside the tables.

    Their unified memory is locked host memory that is mapped for the GPU: `cudaMallocManaged`, its
    own choice, is not to be had, or hangs, on some drivers and virtual machines.
    """
    ratio = config.cache.ratio or 1.0
    return {
        "cache_load_factor": ratio,
        "prefetch_pipeline": prefetch,
        "uvm_host_mapped": True,
    }


def fbgemm_tables(
    sizes: Sequence[tuple[int, int]],
    optimizer: str,
    device: torch.device,
    location: str = "DEVICE",
    **settings: Any,
) -> Any:
    """A `SplitTableBatchedEmbeddingBagsCodegen` of tables of `sizes` (rows, width), float32.

    `optimizer`: its name here, which backward applies; `location`: FBGEMM's name for where tables
    lie on a GPU; on a CPU they are in host memory. `settings`: of its constructor.
    """
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    kinds = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    cuda = device.type == "cuda"
    place = getattr(common.EmbeddingLocation, location if cuda else "HOST")
    where = training.ComputeDevice.CUDA if cuda else training.ComputeDevice.CPU
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, place, where) for rows, width in sizes],
        optimizer=getattr(kinds, _KINDS[optimizer]),
        stochastic_rounding=False,
        device=device if cuda else None,
        **settings,
    )
