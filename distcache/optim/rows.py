"""Row optimizers: what one step does to gathered rows and their state.

A lazy optimizer touches the rows that the step read and no others, and a row's result must depend
on its own weight, state and gradient alone: not on its place in the buffer, its neighbours or the
layout of memory. What is here are the settings and their meaning; the formulas are in `ops`
(`ops/rule.py`), one body per kind of device, made of operations that are rounded once each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from distcache import ops
from distcache.errors import ConfigError
from distcache.ops import reference
from distcache.ops.rule import Rule


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

    @property
    def state_place(self) -> str:
        """Where the state of rows that all ranks hold lies best, `home` or `replicated`.

        A home's update and its way back cost less than moving and updating a float or more for
        each element on every rank (docs/results/step/state.md).
        """
        return "home" if self.state_names and not self.state_per_row else "replicated"

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
    def rule(self, lr: float, step: int) -> Rule:
        """The formula of one step with its numbers.

        `lr`: the rate of this step, instead of the attribute. `step`: optimizer steps so far, this
        one included (the first is 1).
        """

    def update(
        self, weight: Tensor, state: Tensor | None, gradient: Tensor, lr: float, step: int
    ) -> None:
        """Apply one step to distinct gathered rows, in place.

        `weight`: float `[U, D]` and `state`: `[U, S]` (None where S = 0), both overwritten;
        `gradient`: `[U, D]`, left as it is. `lr` and `step` as in `rule`.
        """
        reference.update(self.rule(lr, step), weight, state, gradient)

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

    def rule(self, lr: float, step: int) -> Rule:
        """See `RowUpdate.rule`."""
        return Rule(self.name, lr)


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

    def rule(self, lr: float, step: int) -> Rule:
        """See `RowUpdate.rule`."""
        return Rule(self.name, lr, self.eps)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """sum += mean(g^2) over the row; w -= lr / (sqrt(sum) + eps) g: FBGEMM's EXACT_ROWWISE_ADAGRAD.

    One float of state per row.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    state_per_row: ClassVar[bool] = True


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

    def rule(self, lr: float, step: int) -> Rule:
        """See `RowUpdate.rule`."""
        beta1, beta2 = self.betas
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return Rule(self.name, rate, self.eps, 1 - beta1, 1 - beta2)


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


def apply_rows(
    optimizer: RowUpdate,
    weight: Tensor,
    state: Tensor | None,
    slots: Tensor,
    gradient: Tensor,
    lr: float,
    step: int,
    enabled: Tensor | None = None,
) -> None:
    """One optimizer step on the rows at `slots`, in place.

    `weight`: float `[C, D]` and `state`: `[C, S]` (None where S = 0), changed in place; `slots`:
    int64 `[U]`, distinct; `gradient`: `[U, D]`, left as it is; `lr` and `step` as in
    `RowUpdate.rule`; `enabled`: bool or uint8 of one element, or None for true: where it is 0
    nothing is written, and nobody waits for the device to know. All on one device. The bits do not
    depend on C or slots.
    """
    ops.update_rows(optimizer.rule(lr, step), weight, state, slots, gradient, enabled)
