"""The formulas of row optimizers, each written once: PyTorch runs them, Triton compiles them.

A formula takes rows of weight `w` and gradient `g`, `[U, D]`, the parts of their state, `[U, D]` or
one number a row, `[U, 1]`, then D and the numbers of the step; it gives weight and parts as they
are after it. It is made of + - * and of `div`, `sqrt`, `mean`, `power` and `where`, whose bodies
for PyTorch are here, and for kernels in `triton_kernels.py`. Every operation is rounded once, in
the order in which it stands, so that all bodies give the same bits (but for `sqrt` on a CPU).
Changes in place (`+=`) spare PyTorch memory; Triton compiles them too, and knows no other types
than its own: the formulas have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

where = torch.where


def div(one: Any, other: Any) -> Any:
    """`one / other`, numbers or tensors."""
    return one / other


def sqrt(values: Tensor) -> Tensor:
    """PyTorch's square root: on a GPU rounded as IEEE says; its vectorised CPU body may be one unit
    in the last place off, the same for a value at every place."""
    return torch.sqrt(values)


def mean(values: Tensor, dim: int) -> Tensor:
    """The means of rows, `[U, 1]` of `[U, dim]`, which is overwritten."""
    return row_sums(values).div_(dim)


def row_sums(values: Tensor) -> Tensor:
    """Sum each row of `values [U, D]`, which is overwritten, to `[U, 1]`.

    By halves: element i of the first half (the larger one, where D is odd) plus element i of the
    second, until one is left. The order of additions depends on D alone, while `sum(dim=1)`
    chooses it by shape and strides.
    """
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half].add_(values[:, half:width])
        width = half
    return values[:, :1]


DIGITS = 20
"""Binary digits after the point of an exponent of `power`."""


def power(x: Tensor, digits: int) -> Tensor:
    """x^p of x >= 0 as a product of roots, which are rounded alike everywhere; powers are not.

    Digit i of `digits` stands for 2^-i in p; there is one at least.
    """
    root, result = x, torch.ones_like(x)
    for place in range(digits.bit_length()):
        root = root if place == 0 else sqrt(root)
        result = root * result if digits >> place & 1 else result
    return result


def digits_of(exponent: float) -> int:
    """The digits of an exponent in (0, 1], to `DIGITS` places, as `power` takes them."""
    number = max(1, round(exponent * 2**DIGITS))
    return int(f"{number:0{DIGITS + 1}b}"[::-1], 2)


# -----------------------------------------------------------------------------
# The formulas. What they are and where they come from is told in `distcache.optim`.


def decayed(w, g, decay, how):
    """Weight and gradient after weight decay `how`: none, `l2` or `decoupled`."""
    if how == "l2":
        g = g + w * decay
    if how == "decoupled":
        w = w - w * decay
    return w, g


def sgd(w, g, dim, rate):
    """No state."""
    w -= g * rate
    return (w,)


def momentum_sgd(w, g, moving, dim, rate, kept):
    """moving `[D]`; kept: of it in a step."""
    moving *= kept
    moving += g
    w -= moving * rate
    return w, moving


def adagrad(w, g, total, dim, rate, eps):
    """total `[D]`."""
    total += g * g
    w -= div(g, sqrt(total) + eps) * rate
    return w, total


def rowwise_adagrad(w, g, total, dim, rate, eps):
    """total `[1]`."""
    total += mean(g * g, dim)
    w -= g * (div(1.0, sqrt(total) + eps) * rate)
    return w, total


def adam(w, g, m, v, dim, rate, eps, take1, take2):
    """m, v `[D]`; rate: with the bias corrections of the step; take: 1 - beta."""
    m += (g - m) * take1
    v += (g * g - v) * take2
    w -= div(m, sqrt(v) + eps) * rate
    return w, m, v


def partial_rowwise_adam(w, g, m, v, dim, rate, eps, take1, take2):
    """m `[D]`, v `[1]`; else as `adam`."""
    m += (g - m) * take1
    v += (mean(g * g, dim) - v) * take2
    w -= m * (div(1.0, sqrt(v) + eps) * rate)
    return w, m, v


def counted_adam(w, g, m, v, c1, c2, dim, rate, eps, take1, take2):
    """m, v `[D]`; c1, c2 `[1]`: 1 - beta^n after n steps of the row, as moving averages of 1."""
    c1 += (1.0 - c1) * take1
    c2 += (1.0 - c2) * take2
    m += (g - m) * take1
    v += (g * g - v) * take2
    root = sqrt(c2)
    w -= div(m, sqrt(v) + root * eps) * (div(root, c1) * rate)
    return w, m, v, c1, c2


def ftrl(w, g, total, z, dim, rate, l1, l2, digits):
    """total, z `[D]`; l2: twice that of the setting; digits: of the exponent, for `power`."""
    before = power(total, digits)
    total += g * g
    now = power(total, digits)
    z += g - div(now - before, rate) * w
    shrunk = where(z > l1, l1 - z, where(z < -l1, -l1 - z, 0.0))
    w = div(shrunk, where(shrunk == 0.0, 1.0, div(now, rate) + l2))
    return w, total, z


class Formula(NamedTuple):
    """A formula, and the parts of a row's state: name, and whether it is one number a row."""

    step: Callable[..., Any]
    state: tuple[tuple[str, bool], ...] = ()

    def columns(self, dim: int) -> dict[str, slice]:
        """The columns of each part in state `[U, S]` of rows of `dim` elements."""
        found, first = {}, 0
        for name, by_row in self.state:
            found[name] = slice(first, first + (1 if by_row else dim))
            first = found[name].stop
        return found

    def width(self, dim: int) -> int:
        """S: floats of state of a row of `dim` elements."""
        return sum(1 if by_row else dim for _, by_row in self.state)


FORMULAS = {
    "sgd": Formula(sgd),
    "momentum_sgd": Formula(momentum_sgd, (("momentum_buffer", False),)),
    "adagrad": Formula(adagrad, (("sum", False),)),
    "rowwise_adagrad": Formula(rowwise_adagrad, (("sum", True),)),
    "adam": Formula(adam, (("exp_avg", False), ("exp_avg_sq", False))),
    "partial_rowwise_adam": Formula(
        partial_rowwise_adam, (("exp_avg", False), ("exp_avg_sq", True))
    ),
    "counted_adam": Formula(
        counted_adam,
        (
            ("exp_avg", False),
            ("exp_avg_sq", False),
            ("bias_correction1", True),
            ("bias_correction2", True),
        ),
    ),
    "ftrl": Formula(ftrl, (("sum", False), ("linear", False))),
}
