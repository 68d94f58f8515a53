"""Optimizers: of rows (lazy, state per row), of the dense part, and their learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distcache.errors import ConfigError, unknown_value
from distcache.ops.formulas import FORMULAS, digits_of
from distcache.ops.reference import Rule, update_parts

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
    """Give Adam, and SGD with momentum, the state that they make at their first step (Adagrad has
    its own from the start); the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    adam, moving = isinstance(optimizer, torch.optim.Adam), optimizer.defaults.get("momentum", 0)
    for parameter in parameters if adam or moving else ():
        state = optimizer.state[parameter]
        if not state and moving:  # a step takes it by its factor, 0, and adds the gradient
            state["momentum_buffer"] = torch.zeros_like(parameter)
        elif not state:
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
    moments move on, and weights decay."""
    settings = optimizer.defaults
    if isinstance(optimizer, torch.optim.Adagrad):
        return settings["eps"] > torch.finfo(torch.float32).tiny and not settings["weight_decay"]
    plain = isinstance(optimizer, torch.optim.SGD)
    return plain and not (settings["momentum"] or settings["weight_decay"])


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
    """The torch optimizer that goes with the row optimizer `rows`, over all dense parameters,
    of which there may be none.

    SGD (with momentum), Adagrad (with row-wise Adagrad too) or Adam (with all its kinds), with its
    settings but the rate; `FormulaOptimizer` where torch.optim has no such one. Set a step's
    rate by `param_groups[0]["lr"]`. The implementation is named, not left to torch's choice, so
    that the same run gives the same bits: multi-tensor kernels on CUDA (for Adam the fused one,
    which takes a flag on the device), one parameter at a time on the CPU.
    """
    chosen = list(parameters)
    decay = rows.weight_decay
    # As a group: torch refuses an empty list, and a model may have no parameters of its own.
    groups: list[dict[str, Any]] = [{"params": chosen}]
    on_gpu = bool(chosen) and all(p.is_cuda for p in chosen)
    how: dict[str, Any] = {"lr": lr, "foreach": on_gpu, "weight_decay": decay}
    if isinstance(rows, Adam):
        how |= {"foreach": False, "fused": on_gpu}
        how["decoupled_weight_decay"] = rows.decoupled_weight_decay
        return torch.optim.Adam(groups, betas=rows.betas, eps=rows.eps, **how)
    if isinstance(rows, SGD):  # whose weights decay the same way, decoupled or not
        return torch.optim.SGD(groups, fused=False, **how)
    if isinstance(rows, RowWiseAdagrad):
        rows = Adagrad(**vars(rows))
    if isinstance(rows, MomentumSGD | Adagrad) and not (decay and rows.decoupled_weight_decay):
        if isinstance(rows, MomentumSGD):
            return torch.optim.SGD(groups, momentum=rows.momentum, fused=False, **how)
        how |= {"eps": rows.eps, "initial_accumulator_value": rows.initial_accumulator}
        return torch.optim.Adagrad(groups, fused=False, **how)
    return FormulaOptimizer(groups, rows, lr)


class FormulaOptimizer(torch.optim.Optimizer):
    """The formula of a row optimizer on dense parameters, element by element: FTRL, and decoupled
    weight decay where torch.optim has none."""

    def __init__(self, parameters: Iterable[Any], rows: RowUpdate, lr: float) -> None:
        """`parameters`: or groups of them, as torch.optim takes; `rows`: one whose formula takes no
        means of rows, and which counts no steps."""
        super().__init__(parameters, {"lr": lr, "fused": False})
        self._rows = rows
        for parameter in self.param_groups[0]["params"]:
            initial = zip(rows.state_columns(1), rows.initial_state(1).tolist(), strict=True)
            self.state[parameter] = {
                name: torch.full_like(parameter, value) for name, value in initial
            }

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """As of `torch.optim.Optimizer`."""
        for group in self.param_groups:
            rule = self._rows.rule(float(group["lr"]), 1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    values = self.state[parameter].values() if FORMULAS[rule.name].state else ()
                    update_parts(rule, parameter, list(values), parameter.grad)


# -----------------------------------------------------------------------------
# Row optimizers: what one step does to gathered rows and their state.
#
# A lazy optimizer touches the rows that the step read and no others, and a row's result must depend
# on its own weight, state and gradient alone: not on its place in the buffer, its neighbours or the
# layout of memory. What is here are the settings and their meaning; the formulas, with the parts of
# a row's state, are in `ops/formulas.py`, made of operations that are rounded once each.


@dataclass(frozen=True)
class RowUpdate:
    """One row optimizer; subclasses add their settings.

    `weight_decay`: of a row, once in each step that names it, however often. It is added to the
    gradient, times the weight, before the formula (L2: g += weight_decay w, as torch.optim and
    FBGEMM's `WeightDecayMode.L2`), or with `decoupled_weight_decay` taken of the weight, beside it
    (w -= lr weight_decay w: Loshchilov and Hutter 2019, FBGEMM's `WeightDecayMode.DECOUPLE`).
    """

    lr: float
    weight_decay: float = field(default=0.0, kw_only=True)
    decoupled_weight_decay: bool = field(default=False, kw_only=True)

    name: ClassVar[str]
    """The value of the key `optim`."""
    formula: ClassVar[str]
    """The name of the formula in `ops.formulas`."""
    takes: ClassVar[tuple[str, ...]] = ()
    """The settings that it takes after the rate."""

    def __post_init__(self) -> None:
        bounds = {"momentum": (0, 1), "lr_power": (-1, 0)}
        least = ("lr", "weight_decay", "eps", "initial_accumulator", "l1", "l2")
        for key, (low, high) in (dict.fromkeys(least, (0, math.inf)) | bounds).items():
            value = getattr(self, key, low)
            if not (math.isfinite(value) and low <= value < high):
                kind = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g})"
                raise ConfigError(f"{type(self).__name__}: {key}={value} must be {kind}")

    def state_width(self, dim: int) -> int:
        """S: floats of state of a row of `dim` elements."""
        return FORMULAS[self.formula].width(dim)

    def state_columns(self, dim: int) -> dict[str, slice]:
        """The columns of each part in state `[U, S]`; parts are named as in torch.optim."""
        return FORMULAS[self.formula].columns(dim)

    def initial_state(self, dim: int) -> Tensor:
        """A new row's state, float64 `[S]`."""
        found = torch.zeros(self.state_width(dim), dtype=torch.float64)
        sums = self.state_columns(dim).get("sum", slice(0))
        found[sums] = getattr(self, "initial_accumulator", 0.0)
        return found

    @property
    def state_place(self) -> str:
        """Where the state of rows that all ranks hold lies best, `home` or `replicated`.

        A home's update and its way back cost less than moving and updating a float or more for
        each element on every rank (docs/results/placements.md).
        """
        return "replicated" if all(by_row for _, by_row in FORMULAS[self.formula].state) else "home"

    def rule(self, lr: float, step: int) -> Rule:
        """The formula of one step with its numbers.

        `lr`: the rate of this step, instead of the attribute. `step`: optimizer steps so far, this
        one included (the first is 1).
        """
        numbers = self.numbers(lr, step)
        if not self.weight_decay:
            return Rule(self.formula, numbers)
        if self.decoupled_weight_decay:
            return Rule(self.formula, numbers, decays="decoupled", decay=lr * self.weight_decay)
        return Rule(self.formula, numbers, decays="l2", decay=self.weight_decay)

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """What the formula takes; arguments as of `rule`."""
        return lr, *(getattr(self, name) for name in self.takes)


@dataclass(frozen=True)
class SGD(RowUpdate):
    """w -= lr g, as torch.optim.SGD without momentum."""

    name: ClassVar[str] = "sgd"
    formula: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class MomentumSGD(RowUpdate):
    """Lazy momentum: b = momentum b + g; w -= lr b, as torch.optim.SGD with momentum on the rows
    that a step names, and TensorFlow's sparse MomentumOptimizer.

    Rows that a step does not name neither move nor lose momentum.
    """

    momentum: float = 0.9

    name: ClassVar[str] = "momentum_sgd"
    formula: ClassVar[str] = "momentum_sgd"
    takes: ClassVar[tuple[str, ...]] = ("momentum",)


@dataclass(frozen=True)
class Adagrad(RowUpdate):
    """sum += g^2; w -= lr g / (sqrt(sum) + eps), as torch.optim.Adagrad on a sparse gradient, but
    that `eps` is 1e-8 where none is given, as FBGEMM's; torch's is 1e-10."""

    eps: float = 1e-8
    initial_accumulator: float = 0.0

    name: ClassVar[str] = "adagrad"
    formula: ClassVar[str] = "adagrad"
    takes: ClassVar[tuple[str, ...]] = ("eps",)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """sum += mean(g^2) over the row; w -= lr / (sqrt(sum) + eps) g: FBGEMM's EXACT_ROWWISE_ADAGRAD.

    One float of state per row.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    formula: ClassVar[str] = "rowwise_adagrad"


@dataclass(frozen=True)
class Adam(RowUpdate):
    """Lazy Adam, as torch.optim.SparseAdam: rows that a step does not name keep their moments.

    m += (1 - beta1) (g - m); v += (1 - beta2) (g^2 - v); w -= lr' m / (sqrt(v) + eps), with
    lr' = lr sqrt(1 - beta2^t) / (1 - beta1^t): the bias corrections count every optimizer step t,
    whether it named the row or not, and eps is added to the square root of the uncorrected v.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    name: ClassVar[str] = "adam"
    formula: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"{type(self).__name__}: betas={tuple(self.betas)} must be two numbers in [0, 1)"
            )

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """See `RowUpdate.numbers`."""
        beta1, beta2 = self.betas
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return rate, self.eps, 1 - beta1, 1 - beta2


@dataclass(frozen=True)
class AdamW(Adam):
    """`Adam` with decoupled weight decay: torch.optim.AdamW on the rows that a step names
    (Loshchilov and Hutter 2019)."""

    weight_decay: float = field(default=0.01, kw_only=True)
    decoupled_weight_decay: bool = field(default=True, kw_only=True)

    name: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """`Adam` with one v for each row, of mean(g^2): FBGEMM's PARTIAL_ROWWISE_ADAM.

    As there, eps is added to the square root of the corrected v:
    w -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps). D + 1 floats of state per row.
    """

    name: ClassVar[str] = "partial_rowwise_adam"
    formula: ClassVar[str] = "partial_rowwise_adam"

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """See `RowUpdate.numbers`."""
        rate, eps, *takes = super().numbers(lr, step)
        return rate, eps * math.sqrt(1 - self.betas[1] ** step), *takes


@dataclass(frozen=True)
class CountedAdam(Adam):
    """`Adam` whose bias corrections count the steps n that named the row: FBGEMM's ADAM with
    `use_rowwise_bias_correction`.

    w -= lr m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps). The count is kept as what is made
    of it, `bias_correction1` and `bias_correction2`, moving averages of 1 with m's and v's decay:
    c += (1 - beta) (1 - c) is 1 - beta^n, without powers, which no two devices round alike.
    """

    name: ClassVar[str] = "counted_adam"
    formula: ClassVar[str] = "counted_adam"

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """See `RowUpdate.numbers`."""
        return lr, self.eps, 1 - self.betas[0], 1 - self.betas[1]


@dataclass(frozen=True)
class Ftrl(RowUpdate):
    """Follow the regularised leader (McMahan et al. 2013) as TensorFlow's FtrlOptimizer and Keras's
    Ftrl have it.

    With p = -lr_power: n' = n + g^2; z += g - (n'^p - n^p) / lr w; then
    w = (sign(z) l1 - z) / (n'^p / lr + 2 l2) where |z| > l1, else 0. n is `sum`, from
    `initial_accumulator` on, z is `linear`. Powers are products of roots, which all devices round
    alike, so p is taken to 20 binary digits. At lr = 0, where TensorFlow divides by 0, rows stay as
    they are. l2 is its weight decay.
    """

    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    initial_accumulator: float = 0.1

    name: ClassVar[str] = "ftrl"
    formula: ClassVar[str] = "ftrl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise ConfigError(f"Ftrl: weight_decay={self.weight_decay}: give l2, which is FTRL's")

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """See `RowUpdate.numbers`."""
        return lr, self.l1, 2 * self.l2

    def rule(self, lr: float, step: int) -> Rule:
        """See `RowUpdate.rule`."""
        if lr == 0:
            return Rule("sgd", (0.0,))
        return Rule(self.formula, self.numbers(lr, step), digits_of(-self.lr_power))


_KINDS = (SGD, MomentumSGD, Adagrad, RowWiseAdagrad, Adam, AdamW, PartialRowWiseAdam, CountedAdam)
ROW_UPDATES: dict[str, type[RowUpdate]] = {kind.name: kind for kind in (*_KINDS, Ftrl)}
"""The row optimizers by name."""


def row_update(name: str, lr: float = 0.0, **settings: Any) -> RowUpdate:
    """The row optimizer of a name in `ROW_UPDATES`.

    Settings that it does not have are ignored. Raises ConfigError for an unknown name.
    """
    kind = ROW_UPDATES.get(name)
    if kind is None:
        raise unknown_value("optim", name, ROW_UPDATES)
    own = {field.name for field in fields(kind)}
    return kind(lr, **{key: value for key, value in settings.items() if key in own})


def kernel_rules(updates: Sequence[RowUpdate]) -> list[Rule]:
    """Rules of `updates` that differ in what a kernel is compiled for: all but their numbers.

    A rate of 0, as a warm-up begins with, may take another formula.
    """
    rules = [update.rule(rate, 1) for update in updates for rate in (update.lr or 1.0, 0.0)]
    return list({(rule.name, rule.exponent, rule.decays): rule for rule in rules}.values())


def by_table(
    optimizer: RowUpdate | Mapping[str, RowUpdate], tables: Sequence[str]
) -> list[RowUpdate]:
    """The row optimizer, one where it is the same for all tables, or that of each table.

    Raises ConfigError where some table has none, or where they differ in more than `lr` and
    `weight_decay`.
    """
    if isinstance(optimizer, RowUpdate):
        return [optimizer]
    if not optimizer or set(optimizer) != set(tables):
        raise ConfigError(f"optimizers of tables {sorted(optimizer)}, not {sorted(tables)}")
    found = [optimizer[name] for name in tables]
    for name, own in zip(tables, found, strict=True):
        if replace(own, lr=found[0].lr, weight_decay=found[0].weight_decay) != found[0]:
            raise ConfigError(
                f"table {name!r} has {own}, and {tables[0]!r} has {found[0]}: the tables of a "
                "collection differ in lr and weight_decay alone; make a collection for each"
            )
    return found if len(set(found)) > 1 else found[:1]


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
