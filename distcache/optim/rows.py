"""Row optimizers: what one step does to gathered rows and their state.

A lazy optimizer touches the rows that the step read and no others, and a row's result must depend
on its own weight, state and gradient alone: not on its place in the buffer, its neighbours or the
layout of memory. So `update` is made of element-wise additions, products, quotients and square
roots, each rounded once: fused forms (`addcdiv`, `add` with `alpha`) may round differently in the
vectorised body and the scalar tail of a CPU loop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distcache.errors import ConfigError


class RowUpdate(ABC):
    """One row optimizer; subclasses are frozen dataclasses of its settings."""

    name: ClassVar[str]
    """The value of the key `optim`."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """The parts of a row's state, in the order of its columns; named as in torch.optim."""
    state_per_row: ClassVar[bool] = False
    """Whether each part is one float per row rather than one per element."""

    lr: float

    def state_width(self, dim: int) -> int:
        """S: floats of state of a row of `dim` elements."""
        return len(self.state_names) * (1 if self.state_per_row else dim)

    def state_columns(self, dim: int) -> dict[str, slice]:
        """The columns of each part in state `[U, S]`."""
        width = 1 if self.state_per_row else dim
        return {
            name: slice(index * width, (index + 1) * width)
            for index, name in enumerate(self.state_names)
        }

    def initial_state(self, dim: int) -> float:
        """The value of every float of a new row's state."""
        return 0.0

    @abstractmethod
    def update(
        self, weight: Tensor, state: Tensor | None, gradient: Tensor, lr: float, step: int
    ) -> None:
        """Apply one step to distinct gathered rows, in place.

        `weight`: float `[U, D]` and `state`: `[U, S]` (None where S = 0), both overwritten;
        `gradient`: `[U, D]`, left as it is. `lr`: the rate of this step, instead of the attribute.
        `step`: optimizer steps so far, this one included (the first is 1).
        """

    def _check(self, **bounds: tuple[float, float]) -> None:
        """Raise ConfigError unless each attribute lies in [low, high)."""
        for key, (low, high) in bounds.items():
            value = getattr(self, key)
            if not (math.isfinite(value) and low <= value < high):
                kind = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g})"
                raise ConfigError(f"{type(self).__name__}: {key}={value} must be {kind}")


@dataclass(frozen=True)
class SGD(RowUpdate):
    """w -= lr g, as torch.optim.SGD without momentum."""

    lr: float

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        self._check(lr=(0, math.inf))

    def update(
        self, weight: Tensor, state: Tensor | None, gradient: Tensor, lr: float, step: int
    ) -> None:
        """See `RowUpdate.update`."""
        weight.sub_(gradient * lr)


@dataclass(frozen=True)
class Adagrad(RowUpdate):
    """sum += g^2; w -= lr g / (sqrt(sum) + eps), as torch.optim.Adagrad on a sparse gradient."""

    lr: float
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    name: ClassVar[str] = "adagrad"
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __post_init__(self) -> None:
        self._check(lr=(0, math.inf), eps=(0, math.inf), initial_accumulator=(0, math.inf))

    def initial_state(self, dim: int) -> float:
        """See `RowUpdate.initial_state`."""
        return self.initial_accumulator

    def update(
        self, weight: Tensor, state: Tensor | None, gradient: Tensor, lr: float, step: int
    ) -> None:
        """See `RowUpdate.update`."""
        total = _required(state)
        scratch = gradient * gradient
        total.add_(scratch)
        torch.sqrt(total, out=scratch).add_(self.eps)
        weight.sub_(torch.div(gradient, scratch, out=scratch).mul_(lr))


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """sum += mean(g^2) over the row; w -= lr / (sqrt(sum) + eps) g: FBGEMM's EXACT_ROWWISE_ADAGRAD.

    One float of state per row.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    state_per_row: ClassVar[bool] = True

    def update(
        self, weight: Tensor, state: Tensor | None, gradient: Tensor, lr: float, step: int
    ) -> None:
        """See `RowUpdate.update`."""
        total, scratch = _required(state), gradient * gradient
        total.add_(_row_sums(scratch).div_(gradient.shape[1]))
        rate = total.sqrt().add_(self.eps).reciprocal_().mul_(lr)
        weight.sub_(torch.mul(gradient, rate, out=scratch))


@dataclass(frozen=True)
class Adam(RowUpdate):
    """Lazy Adam, as torch.optim.SparseAdam: rows that a step does not name keep their moments.

    The bias corrections count every optimizer step, whether it named the row or not, and eps is
    added to the square root of the uncorrected second moment.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    name: ClassVar[str] = "adam"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        self._check(lr=(0, math.inf), eps=(0, math.inf))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"Adam: betas={tuple(self.betas)} must be two numbers in [0, 1)")

    def update(
        self, weight: Tensor, state: Tensor | None, gradient: Tensor, lr: float, step: int
    ) -> None:
        """See `RowUpdate.update`."""
        (beta1, beta2), dim = self.betas, weight.shape[1]
        exp_avg, exp_avg_sq = _required(state)[:, :dim], _required(state)[:, dim:]
        scratch = gradient - exp_avg
        exp_avg.add_(scratch.mul_(1 - beta1))
        torch.mul(gradient, gradient, out=scratch)
        exp_avg_sq.add_(scratch.sub_(exp_avg_sq).mul_(1 - beta2))
        torch.sqrt(exp_avg_sq, out=scratch).add_(self.eps)
        size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weight.sub_(torch.div(exp_avg, scratch, out=scratch).mul_(size))


def _required(state: Tensor | None) -> Tensor:
    """The state, which only optimizers without one may leave out."""
    if state is None:
        raise ConfigError("this optimizer keeps state for each row: pass `state` [U, S]")
    return state


def _row_sums(values: Tensor) -> Tensor:
    """Sum each row of `values [U, D]`, which is overwritten, to `[U, 1]`.

    By halving: the order of additions depends on D alone, while `sum(dim=1)` chooses it by shape
    and strides.
    """
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half].add_(values[:, half:width])
        width = half
    return values[:, :1]


def row_update(
    name: str,
    lr: float,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    initial_accumulator: float = 0.0,
) -> RowUpdate:
    """The row optimizer of a name: `sgd`, `adagrad`, `rowwise_adagrad` or `adam`.

    Settings that it does not have are ignored. Raises ConfigError for an unknown name.
    """
    if name == SGD.name:
        return SGD(lr)
    if name == Adagrad.name:
        return Adagrad(lr, eps, initial_accumulator)
    if name == RowWiseAdagrad.name:
        return RowWiseAdagrad(lr, eps, initial_accumulator)
    if name == Adam.name:
        return Adam(lr, (betas[0], betas[1]), eps)
    raise ConfigError(f"optim={name!r} is not 'sgd', 'adagrad', 'rowwise_adagrad' or 'adam'")


BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}
"""About how many elements `apply_rows` gathers at once, by device type.

On a CPU a block stays in the core's cache (1.3 to 3 times faster than all rows at once at widths
16 and 128); everywhere blocks bound the scratch memory to a few blocks instead of U (D + S) floats.
"""


def apply_rows(
    optimizer: RowUpdate,
    weight: Tensor,
    state: Tensor | None,
    slots: Tensor,
    gradient: Tensor,
    lr: float,
    step: int,
) -> None:
    """One optimizer step on the rows at `slots`: gather, update, put back, block by block.

    `weight`: float `[C, D]` and `state`: `[C, S]` (None where S = 0), changed in place; `slots`:
    int64 `[U]`, distinct; `gradient`: `[U, D]`, left as it is; `lr` and `step` as in
    `RowUpdate.update`. All on one device. The bits do not depend on blocks or slots.
    """
    elements = BLOCK_ELEMENTS.get(weight.device.type, BLOCK_ELEMENTS["cuda"])
    block = max(1, elements // weight.shape[1])
    for start in range(0, len(slots), block):
        at = slots[start : start + block]
        rows = weight.index_select(0, at)
        row_state = None if state is None else state.index_select(0, at)
        optimizer.update(rows, row_state, gradient[start : start + block], lr, step)
        weight.index_copy_(0, at, rows)
        if state is not None and row_state is not None:
            state.index_copy_(0, at, row_state)
