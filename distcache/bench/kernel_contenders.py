"""Who takes part in the kernels' bench: our bodies, FBGEMM's tables and PyTorch's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distcache import ops
from distcache.bench.fbgemm_tables import fbgemm_tables
from distcache.bench.kernel_work import Shape, Work, slots_of
from distcache.errors import ConfigError
from distcache.ops import reference
from distcache.optim import row_update
from distcache.versions import fbgemm_here, require_hybrid

LR, EPS, BETAS = 0.05, 1e-8, (0.9, 0.999)

Piece = tuple[str, Callable[[], None]]


class Contender(ABC):
    """Tables with an optimizer, for steps of lookup, row gradients and update."""

    def __init__(self, name: str, shape: Shape, optimizer: str, device: torch.device) -> None:
        self.name, self.shape, self.optimizer, self.device = name, shape, optimizer, device
        self.pooled: Any = None

    @abstractmethod
    def pieces(self, work: Work) -> list[Piece]:
        """The pieces of one step, to be called in this order."""

    @abstractmethod
    def weight_by_row(self) -> Tensor:
        """float32 `[C, D]` by row number, on the CPU."""

    def pooled_by_bag(self) -> Tensor:
        """The last step's pooled bags `[K, D]`, table-major, on the CPU."""
        return self.pooled.detach().cpu()


class Ours(Contender):
    """Rows in scattered slots, a leaf per step, and the bodies of one module of `ops`."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        optimizer: str,
        device: torch.device,
        weight: Tensor,
        seed: int,
    ) -> None:
        super().__init__(name, shape, optimizer, device)
        self._body = body_of(name)
        self._update = row_update(optimizer, LR, EPS, BETAS)
        self._slots = slots_of(shape, seed)
        self._weight = torch.empty_like(weight).index_copy_(0, self._slots, weight).to(device)
        width = self._update.state_width(shape.width)
        self._state = torch.zeros(shape.capacity, width, device=device) if width else None
        self._step = 0
        self._leaf = self._gradient = self._weight

    def pieces(self, work: Work) -> list[Piece]:
        """See `Contender.pieces`."""
        body = self._body

        def gather() -> None:
            self._leaf = self._weight.index_select(0, work.slots)

        def lookup() -> None:
            self.pooled = body.pooled_lookup(self._leaf, work.positions, work.offsets)

        def gradient() -> None:
            self._gradient = body.row_gradients(
                work.upstream, work.bag_of, work.order, work.segments, None, work.chunks
            )

        def update() -> None:
            self._step += 1
            rule = self._update.rule(LR, self._step)
            body.update_rows(rule, self._weight, self._state, work.slots, self._gradient)

        return [("gather", gather), ("lookup", lookup), ("gradient", gradient), ("update", update)]

    def weight_by_row(self) -> Tensor:
        """See `Contender.weight_by_row`."""
        return self._weight.cpu()[self._slots]


class TorchTables(Contender):
    """`torch.nn.EmbeddingBag` with sparse gradients, and SGD or SparseAdam."""

    def __init__(
        self, name: str, shape: Shape, optimizer: str, device: torch.device, weight: Tensor
    ) -> None:
        super().__init__(name, shape, optimizer, device)
        self._bag = nn.EmbeddingBag.from_pretrained(
            weight.clone().to(device), False, mode="sum", sparse=True, include_last_offset=True
        )
        parameters = [self._bag.weight]
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, LR)
            if optimizer == "sgd"
            else torch.optim.SparseAdam(parameters, LR, BETAS, EPS)
        )

    def pieces(self, work: Work) -> list[Piece]:
        """See `Contender.pieces`."""

        def lookup() -> None:
            self.pooled = self._bag(work.rows, work.offsets)

        def gradient() -> None:
            self.pooled.backward(work.upstream)

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad()

        return [("lookup", lookup), ("gradient", gradient), ("update", update)]

    def weight_by_row(self) -> Tensor:
        """See `Contender.weight_by_row`."""
        return self._bag.weight.detach().cpu()


class FbgemmTables(Contender):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`: backward updates the rows."""

    def __init__(
        self, name: str, shape: Shape, optimizer: str, device: torch.device, weight: Tensor
    ) -> None:
        super().__init__(name, shape, optimizer, device)
        self._tables = fbgemm_tables(
            [(shape.rows, shape.width)] * shape.tables,
            optimizer,
            device,
            learning_rate=LR,
            eps=EPS,
            beta1=BETAS[0],
            beta2=BETAS[1],
        )
        parts = weight.split(shape.rows)
        for table, part in zip(self._tables.split_embedding_weights(), parts, strict=True):
            table.data.copy_(part)

    def pieces(self, work: Work) -> list[Piece]:
        """See `Contender.pieces`."""

        def lookup() -> None:
            self.pooled = self._tables(work.ids, work.offsets)

        def backward() -> None:
            self.pooled.backward(work.by_sample)

        return [("lookup", lookup), ("gradient + update", backward)]

    def weight_by_row(self) -> Tensor:
        """See `Contender.weight_by_row`."""
        return torch.cat([part.detach().cpu() for part in self._tables.split_embedding_weights()])

    def pooled_by_bag(self) -> Tensor:
        """See `Contender.pooled_by_bag`."""
        shape = self.shape
        pooled = self.pooled.detach().cpu().view(shape.batch, shape.tables, shape.width)
        return pooled.transpose(0, 1).reshape(shape.bags, shape.width)


CONTENDERS = ("triton", "reference", "fbgemm", "torch")
"""The values of `contenders`: our two bodies, then others' tables."""


def body_of(name: str) -> ModuleType:
    """The module of `ops` called `triton` or `reference`; ConfigError where it is not installed."""
    bodies = reference if name == "reference" else ops.triton_bodies()
    if bodies is None:
        raise ConfigError("Triton is not installed")
    return bodies


def why_not(name: str, optimizer: str, device: torch.device) -> str:
    """Why a contender cannot run here; empty where it can."""
    if name == "triton":
        kernels = ops.triton_bodies()
        if kernels is None:
            return "Triton is not installed"
        if not kernels.fits(torch.empty(0, device=device)):
            return "no GPU (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if name == "fbgemm":
        try:
            require_hybrid()
        except ConfigError as error:
            return str(error)
        if device.type == "cuda" and "fbgemm-gpu" not in fbgemm_here():
            return "the fbgemm here is the CPU build"
        if device.type == "cpu" and optimizer == "adam":
            return "FBGEMM has no Adam on the CPU"
    return ""


def make_contender(
    name: str, shape: Shape, optimizer: str, device: torch.device, weight: Tensor, seed: int
) -> Contender:
    """A contender that starts from `weight` `[C, D]`, by row number."""
    if name == "fbgemm":
        return FbgemmTables(name, shape, optimizer, device, weight)
    if name == "torch":
        return TorchTables(name, shape, optimizer, device, weight)
    return Ours(name, shape, optimizer, device, weight, seed)
