"""The same model over other libraries' tables, on one device: FBGEMM's and torch's.

All start from the initial bits of the package's modes and train with the same settings. Their
batches are in their own form, on a GPU in pinned memory, before the timed part, as a data loader of
theirs would deliver them.
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

from benchmarks.turns import Contender, Feed, Pace
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import Batch
from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec
from distcache.optim import dense_optimizer
from distcache.store.rows import draw_tables, put_block
from distcache.trainer import build
from distcache.versions import fbgemm_here, require_hybrid

log = logging.getLogger("distcache.benchmarks.baselines")

UVM_MODES = ("uvm", "uvm_prefetch")
"""FBGEMM's own cache, which needs a GPU."""

BASELINES = ("fused", "bag", *UVM_MODES)

FBGEMM_OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
}


def check_baseline(mode: str, config: Config, world: World) -> str:
    """Return `mode`, or `bag` instead of `fused` on a GPU without FBGEMM's kernels.

    Raises ConfigError for a baseline that cannot run here or does not have such settings.
    """
    optim = config.optim
    cuda = world.device.type == "cuda"
    if world.size > 1:
        raise ConfigError(f"modes={mode} runs on one rank: leave it out, or take modes=hybrid")
    if build.dtype_of(config) != torch.float32:
        raise ConfigError(f"modes={mode} trains in float32: set trainer.dtype=float32")
    if mode in UVM_MODES and not cuda:
        raise ConfigError(f"modes={mode} is FBGEMM's cache on a GPU: set device=cuda")
    missing = why_no_fbgemm(world.device) if mode != "bag" and cuda else ""
    if missing and mode in UVM_MODES:
        raise ConfigError(f"modes={mode} is FBGEMM's cache on a GPU: {missing}")
    if missing:
        log.warning("modes=bag (torch.nn.EmbeddingBag) replaces modes=fused: %s", missing)
        return "bag"
    if mode == "bag":
        return mode
    require_hybrid()
    if optim.name == "adam" and not cuda:
        raise ConfigError("modes=fused has no optimizer=adam on the CPU: take modes=bag")
    if optim.initial_accumulator and optim.name in ("adagrad", "rowwise_adagrad"):
        raise ConfigError(f"modes={mode} starts sums at 0: set optim.initial_accumulator=0")
    return mode


def why_no_fbgemm(device: torch.device) -> str:
    """Return the reason why FBGEMM's tables cannot run on a device; empty if they can."""
    try:
        require_hybrid()
    except ConfigError as error:
        return str(error)
    has_kernels = device.type == "cpu" or "fbgemm-gpu" in fbgemm_here()
    return "" if has_kernels else "the fbgemm here is the CPU build"


class Baseline(ABC, Contender):
    """A dense model behind tables that are updated by `update` or inside backward."""

    def __init__(
        self,
        name: str,
        config: Config,
        world: World,
        parts: tuple[Any, Sequence[TableSpec], nn.Module],
        feed: Feed,
    ) -> None:
        """Take source, tables (of one width, one feature each) and dense model in `parts`."""
        self.name = name
        self.device = world.device
        self.seed = config.trainer.seed
        self.tables = parts[1]
        self.dense = parts[2].to(world.device)
        self.optim: Any = build.optimizer_spec(config)
        dense_lr, self.lr = build.build_rates(config)(0)
        self._optimizer = dense_optimizer(self.dense.parameters(), self.optim, dense_lr)
        self._feed = feed
        self._prepared: deque[tuple[int, list[Tensor]]] = deque()
        self._pace = Pace(world.device)

    def convert(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return ids int64 `[n]` in this library's numbers and offsets int64 `[F b + 1]`.

        Both are feature-major and on the CPU.
        """
        return batch.ids.values, batch.ids.offsets

    @abstractmethod
    def pooled(self, ids: Sequence[Tensor]) -> Tensor:
        """Return pooled rows `[b, sum of widths]` with a gradient."""

    def update(self) -> None:
        """Apply the rows' gradients, unless backward has done it."""

    def initialize(self, weights: Sequence[Tensor]) -> None:
        """Write the modes' initial bits into every table's weight."""
        for index, (table, weight) in enumerate(zip(self.tables, weights, strict=True)):
            put = partial(put_block, weight.detach())
            draw_tables(self.seed, [index], RowLayout([table], 1), put)

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._prepared) < steps:
            batch = next(self._feed)
            tensors = [batch.dense, batch.labels, *self.convert(batch)]
            if self.device.type == "cuda":
                # A copy from pageable memory would wait for the device.
                tensors = [tensor.pin_memory() for tensor in tensors]
            self._prepared.append((batch.global_size, tensors))

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        size, (dense, labels, *ids) = self._prepared.popleft()
        self._optimizer.zero_grad()
        logits = self.dense(dense.to(self.device, non_blocking=True), self.pooled(ids))
        labels = labels.to(logits, non_blocking=True)
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / size
        loss.backward()
        self.update()
        self._optimizer.step()
        self._pace.step()
        return loss.detach().item

    def close(self) -> None:
        """See `Contender.close`."""
        self._prepared.clear()
        self.dense.zero_grad(set_to_none=True)


class TorchTables(Baseline):
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
        self.initialize(weight.split([table.rows for table in self.tables]))
        rows = [self.bag.weight]
        spec = self.optim
        if spec.name == "sgd":
            self._row_optimizer: Any = torch.optim.SGD(rows, self.lr)
        elif spec.name == "adagrad":
            initial = spec.initial_accumulator
            self._row_optimizer = torch.optim.Adagrad(
                rows, self.lr, eps=spec.eps, initial_accumulator_value=initial
            )
        elif spec.name == "adam":
            self._row_optimizer = torch.optim.SparseAdam(
                rows, self.lr, betas=spec.betas, eps=spec.eps
            )
        else:
            raise ConfigError(f"modes=bag has no optimizer={spec.name}: take modes=fused")

    def convert(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Baseline.convert`: row numbers over all tables."""
        ids = batch.ids
        lengths = ids.offsets.diff().view(len(ids.features), -1).sum(1)
        first_rows = torch.from_numpy(self._layout.offsets[:-1])
        return ids.values + torch.repeat_interleave(first_rows, lengths), ids.offsets

    def pooled(self, ids: Sequence[Tensor]) -> Tensor:
        """See `Baseline.pooled`."""
        rows, offsets = (tensor.to(self.device, non_blocking=True) for tensor in ids)
        dim = self._layout.dim
        features = len(self.tables)
        bags = self.bag(rows, offsets).view(features, -1, dim)
        return bags.transpose(0, 1).reshape(-1, features * dim)

    def update(self) -> None:
        """Apply the sparse gradient."""
        self._row_optimizer.step()
        self._row_optimizer.zero_grad()


class FbgemmTables(Baseline):
    """FBGEMM's table-batched embeddings, the base of TorchRec's fused collections.

    Rows are updated inside backward. `fused`: all rows on the device. `uvm`: FBGEMM's cache
    (`MANAGED_CACHING`, TorchRec's `fused_uvm_caching`) with slots for `cache.ratio` of the rows;
    tables lie in unified memory, the cache is 32-way set-associative, and optimizer state is never
    cached. `uvm_prefetch`: the rows of the next batch are fetched on a stream of their own, as
    TorchRec's `PrefetchTrainPipelineSparseDist` does. On a CPU all tables are in host memory.
    """

    def __init__(self, name: str, config: Config, *more: Any) -> None:
        super().__init__(name, config, *more)
        prefetch = name == "uvm_prefetch" and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if prefetch else None
        self._prefetched: tuple[Tensor, Tensor] | None = None
        beta1, beta2 = config.optim.betas
        self.bags = fbgemm_tables(
            [(table.rows, table.dim) for table in self.tables],
            self.optim.name,
            self.device,
            "MANAGED_CACHING" if name in UVM_MODES else "DEVICE",
            learning_rate=self.lr,
            eps=config.optim.eps,
            beta1=beta1,
            beta2=beta2,
            **(uvm_settings(config, prefetch) if name in UVM_MODES else {}),
        )
        self.initialize(self.bags.split_embedding_weights())

    def pooled(self, ids: Sequence[Tensor]) -> Tensor:
        """See `Baseline.pooled`."""
        if self._stream is None:
            return self.bags(*self._to_device(ids))
        inputs = self._prefetched or self._to_device(ids)
        self._prefetched = None
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in inputs:
            tensor.record_stream(current)
        pooled = self.bags(*inputs)
        if self._prepared:
            # Fetch the rows of the next batch after this lookup has been issued.
            with torch.cuda.stream(self._stream):
                self._prefetched = self._to_device(self._prepared[0][1][2:])
                self.bags.prefetch(*self._prefetched, forward_stream=current)
        return pooled

    def _to_device(self, ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        values, offsets = (tensor.to(self.device, non_blocking=True) for tensor in ids)
        return values, offsets


def uvm_settings(config: Config, prefetch: bool) -> dict[str, Any]:
    """Return the settings of FBGEMM's cache.

    The tables are in locked host memory that is mapped for the GPU: FBGEMM's own choice,
    `cudaMallocManaged`, is not available or hangs on some drivers and virtual machines.
    """
    return {
        "cache_load_factor": config.cache.ratio or 1.0,
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
    """Build a `SplitTableBatchedEmbeddingBagsCodegen` of float32 tables.

    `sizes` are rows and width of every table, `optimizer` is the package's name of the update that
    backward applies, and `location` is FBGEMM's name of the tables' place on a GPU; on a CPU they
    are in host memory. `settings` are further arguments of the constructor.
    """
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    kinds = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    cuda = device.type == "cuda"
    place = getattr(common.EmbeddingLocation, location if cuda else "HOST")
    compute = training.ComputeDevice.CUDA if cuda else training.ComputeDevice.CPU
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, place, compute) for rows, width in sizes],
        optimizer=getattr(kinds, FBGEMM_OPTIMIZERS[optimizer]),
        stochastic_rounding=False,
        device=device if cuda else None,
        **settings,
    )
