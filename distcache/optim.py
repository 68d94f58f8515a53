"""Optimizers: of rows (lazy, state per row), of the dense part, and their learning rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distcache import ops
from distcache.errors import ConfigError
from distcache.ops.reference import Rule

# -----------------------------------------------------------------------------
# The dense optimizer's state as named tensors, for checkpoints that are filled in place.


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """`<parameter name>.<state name>` -> tensor, for every parameter of `model` that the optimizer
    has; made first if need be: an optimizer that has not stepped yet may have no state to fill."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value
        for parameter in ensure_state(optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def ensure_state(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Give Adam the state that it makes at its first step (Adagrad has its own from the start, SGD
    none); the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters if isinstance(optimizer, torch.optim.Adam) else ():
        state = optimizer.state[parameter]
        if not state:
            on = parameter.device if optimizer.defaults["fused"] else None
            state["step"] = torch.tensor(0.0, device=on)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    return parameters


def load_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Tensor]
) -> None:
    """Copy tensors named as by `state_tensors` into the optimizer; KeyError for a missing one."""
    for name, value in state_tensors(optimizer, model).items():
        value.copy_(saved[name])


# -----------------------------------------------------------------------------
# A step of a torch optimizer that a flag on the device may turn into nothing.

_COUNTER = "step"
"""torch's name for a parameter's step counter, which lies on the host unless Adam is fused."""


@torch.no_grad()
def masked_step(
    optimizer: torch.optim.Optimizer, enabled: Tensor, gradients: Sequence[Tensor]
) -> None:
    """`optimizer.step()` where `enabled`, bool `[1]` on the parameters' device, is true.

    `optimizer`: of `dense_optimizer`; `gradients`: all memory of its parameters' gradients. Where
    it is false, these are spoilt, and parameters and state keep their bits, but for step counters
    on the host: take those back with `uncount` once the host knows. Nobody waits for the device.
    Adam that is not fused copies parameters and state: the plain form, of a CPU.
    """
    off = ~enabled.reshape(())  # which takes the shape of any value, a single number's too
    if optimizer.defaults["fused"]:  # the kernels of Adam look at a flag themselves
        told: Any = optimizer  # as torch's GradScaler tells it
        told.grad_scale, told.found_inf = None, off.float()
        optimizer.step()
        told.found_inf = None
        return
    if _rests_at_zero(optimizer):
        for gradient in gradients:
            gradient.masked_fill_(off, 0.0)
        optimizer.step()
        return
    parameters = ensure_state(optimizer)
    states = (optimizer.state.get(parameter, {}).items() for parameter in parameters)
    values = [value for state in states for name, value in state if name != _COUNTER]
    kept = [(value, value.clone()) for value in (*parameters, *values)]
    optimizer.step()
    put_back(kept, enabled)


def _rests_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with gradients of zero leaves all bits; Adagrad without eps may divide 0 by 0,
    and Adam's moments decay."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return optimizer.defaults["eps"] > torch.finfo(torch.float32).tiny
    return isinstance(optimizer, torch.optim.SGD)


def put_back(kept: Sequence[tuple[Tensor, Tensor]], enabled: Tensor) -> None:
    """Give each value of `kept` what it was before, its pair, unless `enabled`, bool `[1]`; where
    autograd records nothing."""
    flag = enabled.reshape(())  # which takes the shape of any value, a single number's too
    for value, before in kept:
        torch.where(flag, value, before, out=value)


def uncount(optimizer: torch.optim.Optimizer) -> None:
    """Take back one step of the step counters on the host."""
    for state in optimizer.state.values() if not optimizer.defaults["fused"] else ():
        if isinstance(state.get(_COUNTER), Tensor):
            state[_COUNTER] -= 1


# -----------------------------------------------------------------------------
# The optimizer of the dense parameters: torch.optim with the same settings in every mode.


def dense_optimizer(
    parameters: Iterable[nn.Parameter], rows: RowUpdate, lr: float = 0.0
) -> torch.optim.Optimizer:
    """The torch optimizer that goes with the row optimizer `rows`, over all dense parameters.

    SGD, Adagrad (with row-wise Adagrad too) or Adam, with its settings but the rate. Set a step's
    rate by `param_groups[0]["lr"]`. The implementation is named, not left to torch's choice, so
    that the same run gives the same bits: multi-tensor kernels on CUDA (for Adam the fused one,
    which takes a flag on the device), one parameter at a time on the CPU.
    """
    chosen = list(parameters)
    on_gpu = bool(chosen) and all(p.is_cuda for p in chosen)
    how: dict[str, Any] = {"lr": lr, "foreach": on_gpu}
    if isinstance(rows, Adagrad):
        how |= {"eps": rows.eps, "initial_accumulator_value": rows.initial_accumulator}
        return torch.optim.Adagrad(chosen, fused=False, **how)
    if isinstance(rows, Adam):
        how |= {"foreach": False, "fused": on_gpu}
        return torch.optim.Adam(chosen, betas=rows.betas, eps=rows.eps, **how)
    return torch.optim.SGD(chosen, fused=False, **how)


# -----------------------------------------------------------------------------
# Row optimizers: what one step does to gathered rows and their state.
#
# A lazy optimizer touches the rows that the step read and no others, and a row's result must depend
# on its own weight, state and gradient alone: not on its place in the buffer, its neighbours or the
# layout of memory. What is here are the settings and their meaning; the formulas are in `ops`
# (`ops/reference.py`), one body per kind of device, made of operations that are rounded once each.


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


_ROW_UPDATES: dict[str, Any] = {kind.name: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam)}


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
    kind = _ROW_UPDATES.get(name)
    if kind is None:
        raise ConfigError(f"optim={name!r} is not {', '.join(_ROW_UPDATES)}")
    given = {"eps": eps, "betas": tuple(betas), "initial_accumulator": initial_accumulator}
    own = {field.name for field in fields(kind)}
    return kind(lr, **{key: value for key, value in given.items() if key in own})


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
    `[U]`, distinct; `gradient`: `[U, D]`, left as it is; `lr` and `step` as in
    `RowUpdate.rule`; `enabled`: bool or uint8 of one element, or None for true: where it is 0
    nothing is written, and nobody waits for the device to know. All on one device. The bits do not
    depend on C or slots.
    """
    ops.update_rows(optimizer.rule(lr, step), weight, state, slots, gradient, enabled)


# -----------------------------------------------------------------------------
# The learning rate as a function of the step.


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, a constant stretch, quadratic decay to 0: the schedule of MLPerf's DLRM.

    `base`: the full rate; `warmup_steps`: the rate of step t (from 0) below it is
    base (t + 1) / warmup_steps; from `decay_start` on, with e = decay_start + decay_steps, it is
    base ((e - t) / decay_steps)^2, and 0 from step e on. `decay_steps=0`: no decay.
    """

    base: float
    warmup_steps: int = 0
    decay_start: int = 0
    decay_steps: int = 0

    def __call__(self, step: int) -> float:
        """The rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.base * (step + 1) / self.warmup_steps
        if self.decay_steps == 0 or step < self.decay_start:
            return self.base
        left = self.decay_start + self.decay_steps - step
        return self.base * (max(left, 0) / self.decay_steps) ** 2
