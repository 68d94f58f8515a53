"""The same model over other people's tables, on one device: FBGEMM's fused ones, and torch's.

Both start from the modes' initial bits and train with the same settings. They get their ids in
their own form before the timed part, as a data loader of theirs would hand them over.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distcache.bench.contenders import Contender
from distcache.bench.step_batches import Feed
from distcache.config.tree import OptimConfig
from distcache.data.batch import Batch
from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec
from distcache.optim import dense_optimizer
from distcache.parallel.base import OptimizerSpec
from distcache.store.rows import block_rows, initial_rows

_AHEAD = 2
"""Steps that the host may be ahead of a GPU."""

UVM = ("uvm", "uvm_prefetch")
"""FBGEMM's own cache (`uvm_tables`), which is on a GPU."""

YARDSTICKS = ("fused", "bag", *UVM)
"""The values of `modes` that are other libraries' tables."""


def check_yardstick(
    mode: str, optim: OptimConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError for settings that a yardstick does not have."""
    if dtype != torch.float32:
        raise ConfigError(f"modes={mode} trains in float32: set trainer.dtype=float32")
    if mode == "bag":
        if optim.name == "rowwise_adagrad":
            raise ConfigError("modes=bag has no optimizer=rowwise_adagrad: take modes=fused")
        return
    if mode in UVM and device.type == "cpu":
        raise ConfigError(f"modes={mode} is FBGEMM's cache on a GPU: set device=cuda")
    if optim.name == "adam" and device.type == "cpu":
        raise ConfigError("modes=fused has no optimizer=adam on the CPU: take modes=bag")
    if optim.initial_accumulator and optim.name in ("adagrad", "rowwise_adagrad"):
        raise ConfigError(
            f"modes={mode} starts Adagrad's sums at 0: set optim.initial_accumulator=0"
        )


@dataclass(frozen=True)
class YardstickSpec:
    """Tables (of one width, one feature each), optimizer with its constant rates, seed, device;
    `ratio`: slots as a share of the rows, of yardsticks with a cache."""

    tables: Sequence[TableSpec]
    optimizer: OptimizerSpec
    dense_lr: float
    embedding_lr: float
    seed: int
    device: torch.device
    ratio: float = 1.0


class Yardstick(Contender):
    """A dense model behind tables that update themselves in `update`."""

    def __init__(self, spec: YardstickSpec, dense: nn.Module, feed: Feed) -> None:
        self.spec, self.dense = spec, dense.to(spec.device)
        self._feed: Iterable[Batch] = feed
        self._ready: deque[tuple[Batch, Any]] = deque()
        self._issued: deque[torch.cuda.Event] = deque()
        optimizer = spec.optimizer
        self._optimizer = dense_optimizer(
            self.dense.parameters(),
            optimizer.name,
            spec.dense_lr,
            optimizer.eps,
            optimizer.betas,
            optimizer.initial_accumulator,
        )

    @abstractmethod
    def form(self, batch: Batch) -> Any:
        """The ids of a batch in this library's form, on the CPU."""

    @abstractmethod
    def pooled(self, ids: Any) -> Tensor:
        """Pooled rows `[b, sum of widths]`, with gradient."""

    @abstractmethod
    def update(self) -> None:
        """Apply the rows' gradients, where backward has not done it."""

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        batches = iter(self._feed)
        while len(self._ready) < steps:
            batch = next(batches)
            self._ready.append((batch, self.form(batch)))

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        batch, ids = self._ready.popleft()
        self._optimizer.zero_grad()
        logits = self.dense(batch.dense.to(self.spec.device), self.pooled(ids))
        total = binary_cross_entropy_with_logits(logits, batch.labels.to(logits), reduction="sum")
        loss = total / batch.global_size
        loss.backward()
        self.update()
        self._optimizer.step()
        self._keep_pace()
        loss = loss.detach()
        return lambda: loss.item()

    def _keep_pace(self) -> None:
        """Let the host be no more steps ahead of a GPU than the package's own modes are."""
        if self.spec.device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        self._issued.append(done)
        if len(self._issued) > _AHEAD:
            self._issued.popleft().synchronize()

    def close(self) -> None:
        """See `Contender.close`."""
        self._ready.clear()
        self.dense.zero_grad(set_to_none=True)


class FusedTables(Yardstick):
    """TorchRec's `FusedEmbeddingBagCollection`: the rows are updated inside backward."""

    name = "fused"

    def __init__(
        self, spec: YardstickSpec, dense: nn.Module, feed: Feed, torchrec: ModuleType
    ) -> None:
        """`torchrec`: the module of this package that has imported it (`load_torchrec`)."""
        super().__init__(spec, dense, feed)
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        self._torchrec = torchrec
        kinds = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "rowwise_adagrad": torchrec.rowwise_adagrad.RowWiseAdagrad,
            "adam": torch.optim.Adam,
        }
        optimizer = spec.optimizer
        settings: dict[str, Any] = {"lr": spec.embedding_lr}
        if optimizer.name != "sgd":
            settings["eps"] = optimizer.eps
        if optimizer.name == "adam":
            settings["beta1"], settings["beta2"] = optimizer.betas
        self.ebc = FusedEmbeddingBagCollection(
            tables=[torchrec._config(table) for table in spec.tables],
            optimizer_type=kinds[optimizer.name],
            optimizer_kwargs=settings,
            device=spec.device,
        )
        bags = self.ebc.embedding_bags
        initialise_tables(spec, [bags[table.name].weight for table in spec.tables])

    def form(self, batch: Batch) -> Any:
        """A KeyedJaggedTensor."""
        cpu = torch.device("cpu")
        return self._torchrec.jagged(batch.ids, len(batch.labels), cpu)

    def pooled(self, ids: Any) -> Tensor:
        """See `Yardstick.pooled`."""
        return self.ebc(ids.to(self.spec.device)).values()

    def update(self) -> None:
        """Nothing: backward has."""


class TorchTables(Yardstick):
    """`torch.nn.EmbeddingBag` over all rows, with sparse gradients and torch's own optimizer."""

    name = "bag"

    def __init__(self, spec: YardstickSpec, dense: nn.Module, feed: Feed) -> None:
        super().__init__(spec, dense, feed)
        self._layout = RowLayout(spec.tables, 1)
        shape, device = (self._layout.rows, self._layout.dim), spec.device
        self.bag = nn.EmbeddingBag(
            *shape, mode="sum", sparse=True, include_last_offset=True, device="meta"
        )
        weight = torch.empty(shape, device=device)
        self.bag.weight = nn.Parameter(weight)
        initialise_tables(spec, weight.split([table.rows for table in spec.tables]))
        self._rows = self._row_optimizer()

    def _row_optimizer(self) -> torch.optim.Optimizer:
        optimizer, rate = self.spec.optimizer, self.spec.embedding_lr
        if optimizer.name == "sgd":
            return torch.optim.SGD([self.bag.weight], rate)
        if optimizer.name == "adagrad":
            return torch.optim.Adagrad(
                [self.bag.weight],
                rate,
                eps=optimizer.eps,
                initial_accumulator_value=optimizer.initial_accumulator,
            )
        if optimizer.name == "adam":
            return torch.optim.SparseAdam(
                [self.bag.weight], rate, betas=optimizer.betas, eps=optimizer.eps
            )
        raise ConfigError(f"modes=bag has no optimizer={optimizer.name}")

    def form(self, batch: Batch) -> Any:
        """Row numbers int64 `[n]` and offsets int64 `[F b + 1]`, feature-major."""
        ids = batch.ids
        lengths = ids.offsets.diff().view(len(ids.features), -1).sum(1)
        offsets = torch.from_numpy(self._layout.offsets[:-1])
        return ids.values + torch.repeat_interleave(offsets, lengths), ids.offsets

    def pooled(self, ids: Any) -> Tensor:
        """See `Yardstick.pooled`."""
        rows, offsets = (tensor.to(self.spec.device, non_blocking=True) for tensor in ids)
        dim, features = self._layout.dim, len(self.spec.tables)
        bags = self.bag(rows, offsets).view(features, -1, dim)
        return bags.transpose(0, 1).reshape(-1, features * dim)

    def update(self) -> None:
        """Apply the sparse gradient."""
        self._rows.step()
        self._rows.zero_grad()


@torch.no_grad()
def initialise_tables(spec: YardstickSpec, weights: Sequence[Tensor]) -> None:
    """The modes' initial bits into every table's weight."""
    for index, (table, weight) in enumerate(zip(spec.tables, weights, strict=True)):
        size = block_rows(table.dim)
        for start in range(0, table.rows, size):
            stop = min(start + size, table.rows)
            values = initial_rows(spec.seed, index, table.rows, table.dim, start, stop)
            weight[start:stop].copy_(values)
