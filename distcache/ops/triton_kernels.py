"""The Triton kernels behind `triton.py`, which has their launches.

A program works on a tile [N, BLOCK]: N bags, segments or rows times all D columns, rounded up to
a power of two and masked. Every operation is rounded once (launches turn fused multiply-adds off;
quotients and square roots are the IEEE ones), so an element's bits depend on its own inputs and on
their order, not on tile, grid or place. Nothing is sorted, and there are no atomics. Indices are
int32 or int64; what is counted by them in elements is int64.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from distcache.ops import formulas

UNROLL = tl.constexpr(4)
"""Rows of a segment whose loads are under way at the same time."""
DIGITS = tl.constexpr(formulas.DIGITS)

_POINTERS = ["values", "starts", "ends", "outer", "inner", "weights", "to", "out", "source"]
_POINTERS += ["source_rows", "target", "target_rows", "weight", "state", "slots", "gradient"]
_POINTERS += ["enabled"]


def _jit(kernel: Callable[..., None]) -> Any:
    """Compile a kernel once for any count of rows and any alignment of its pointers.

    By itself Triton compiles another variant for an argument that is 1 or divisible by 16, and for
    a pointer to a multiple of 16 bytes. Tensors here are pieces of larger ones, so both differ from
    step to step, and a variant that is missing in the middle of training costs up to a second. The
    alignment of rows is a constant of the launch instead, which depends on their width alone.
    """
    names = inspect.signature(kernel).parameters
    pointers = [name for name in _POINTERS if name in names]
    integers = [name for name in ("count", "stride") if name in names]
    options = {"do_not_specialize": integers, "do_not_specialize_on_alignment": pointers}
    return triton.jit(**options)(kernel)


@_jit
def segment_sums(
    values,  # float32 [*, D], rows `stride` apart
    starts,  # [count]: segment i is [starts[i], ends[i])
    ends,
    outer,  # place -> id; read where HOPS = 2
    inner,  # place or id -> row of `values`; read where HOPS >= 1
    weights,  # float32, by id; read where WEIGHTED
    to,  # [count]: row of `out`; read where SCATTER
    out,  # float32 [*, D], contiguous
    count,
    stride,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HOPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCATTER: tl.constexpr,
    MOST: tl.constexpr,
    VALUES_ALIGN: tl.constexpr,  # bytes of whose multiple every row begins at one
    OUT_ALIGN: tl.constexpr,
):
    """out[i or to[i]] = the sum over [starts[i], ends[i]), first to last; 0 for an empty segment.

    Where MOST > 0, longer segments are left out, and so are their rows of `out`.
    """
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    column = tl.arange(0, BLOCK)
    inside = at < count
    start = tl.load(starts + at, mask=inside, other=0)
    length = tl.load(ends + at, mask=inside, other=0) - start
    if MOST > 0:
        inside = inside & (length <= MOST)
        length = tl.where(inside, length, 0)
    total = tl.zeros([N, BLOCK], tl.float32)
    for begin in range(0, tl.max(length, axis=0), UNROLL):
        for ahead in tl.static_range(UNROLL):
            there = begin + ahead < length
            place = start + begin + ahead
            if HOPS == 2:
                place = tl.load(outer + place, mask=there, other=0)
            row = place
            if HOPS >= 1:
                row = tl.load(inner + place, mask=there, other=0)
            mask = there[:, None] & (column < D)[None, :]
            row = row.to(tl.int64)
            # The hint applies to the result of an operation, not to a parameter.
            source = tl.multiple_of(values + row[:, None] * stride, (VALUES_ALIGN, VALUES_ALIGN))
            value = tl.load(source + column[None, :], mask=mask, other=0.0)
            if WEIGHTED:
                value = value * tl.load(weights + place, mask=there, other=0.0)[:, None]
            total += value  # + 0 past the end changes no bit: a sum that began at +0 is never -0
    if SCATTER:
        at = tl.load(to + at, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (column < D)[None, :]
    target = tl.multiple_of(out + at[:, None] * D, (OUT_ALIGN, OUT_ALIGN))
    tl.store(target + column[None, :], total, mask=mask)


@_jit
def copy_rows(
    source,  # [*, D], contiguous
    source_rows,  # [count]; read where FROM
    target,  # [*, D], contiguous, of the same dtype
    target_rows,  # [count]; read where TO
    count,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
):
    """target[target_rows[i] or i] = source[source_rows[i] or i]; programs take turns at tiles."""
    column = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(count, N), tl.num_programs(0)):
        at = (tile * N + tl.arange(0, N)).to(tl.int64)
        inside = at < count
        mask = inside[:, None] & (column < D)[None, :]
        start, end = at, at
        if FROM:
            start = tl.load(source_rows + at, mask=inside, other=0).to(tl.int64)
        if TO:
            end = tl.load(target_rows + at, mask=inside, other=0).to(tl.int64)
        first_source = tl.multiple_of(source + start[:, None] * D, (SOURCE_ALIGN, SOURCE_ALIGN))
        values = tl.load(first_source + column[None, :], mask=mask)
        first_target = tl.multiple_of(target + end[:, None] * D, (TARGET_ALIGN, TARGET_ALIGN))
        tl.store(first_target + column[None, :], values, mask=mask)


@triton.jit
def _folded_column(column, D: tl.constexpr, STEPS: tl.constexpr):
    """The column that `reference.row_sums` has at place `column` of a tree of 2^STEPS leaves, and
    whether there is one. For D = 2^STEPS, every column is at its own place."""
    found = tl.zeros_like(column)
    valid = column >= 0
    for step in tl.static_range(STEPS):
        level = STEPS - 1 - step  # from the last fold back to the first
        half = (D + (2 << level) - 1) >> (level + 1)  # columns left after folds 0 to level
        width = (D + (1 << level) - 1) >> level  # and before fold `level`
        found += ((column >> (STEPS - 1 - level)) & 1) * half
        valid = valid & (found < width)
    return found, valid


# -----------------------------------------------------------------------------
# The formulas of `formulas.py`: their source, with these operations in place of PyTorch's.


@triton.jit
def _div(one, other):
    return tl.math.div_rn(one, other)


@triton.jit
def _sqrt(values):
    return tl.math.sqrt_rn(values)


@triton.jit
def _where(condition, one, other):
    return tl.where(condition, one, other)


@triton.jit
def _mean(values, dim: tl.constexpr):
    """`formulas.mean` of [N, 2^k], 0 where there is no column of `dim`, at the places that
    `_folded_column` says: by halves, additions of two numbers, in the order written here."""
    rows: tl.constexpr = values.shape[0]
    for _ in tl.static_range(32):
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, [rows, 2, values.shape[1] // 2]), axis=1)
    return tl.math.div_rn(values, dim * 1.0)


@triton.jit
def _power(x, digits: tl.constexpr):
    """See `formulas.power`."""
    root, result = x, 1.0
    for place in tl.static_range(DIGITS + 1):
        if place > 0 and digits >> place != 0:
            root = tl.math.sqrt_rn(root)
        if (digits >> place) & 1 == 1:
            result = root * result
    return result


def _compiled(formula: Callable[..., Any]) -> Any:
    """A function of `formulas.py` for kernels to call."""
    own = FunctionType(formula.__code__, _OPERATIONS, formula.__name__)
    own.__module__, own.__qualname__ = formula.__module__, formula.__qualname__
    return triton.jit(own)


_OPERATIONS = {
    **{"div": _div, "sqrt": _sqrt, "where": _where, "mean": _mean},
    **{"power": _power, "tl": tl},
}
_decayed = _compiled(formulas.decayed)
FORMULAS = {name: _compiled(formula.step) for name, formula in formulas.FORMULAS.items()}
"""The formulas by name, as `update_rows` takes them."""


@_jit
def update_rows(
    weight,  # float32 or halves [C, D], rows WEIGHT_STRIDE apart
    state,  # float32 [C, S], rows STATE_STRIDE apart; not read where S = 0
    slots,  # [count]
    gradient,  # float32 [count, D], rows GRADIENT_STRIDE apart
    enabled,  # uint8 of one element; read where MASKED
    count,
    decay,
    number1,  # the numbers of the formula, of which it takes NUMBERS
    number2,
    number3,
    number4,
    WEIGHT_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    GRADIENT_STRIDE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,  # one of `FORMULAS`
    COLUMNS: tl.constexpr,  # of each part of the state: the first, and their number
    NUMBERS: tl.constexpr,
    EXPONENT: tl.constexpr,  # taken after these where it is not 0
    DECAY: tl.constexpr,
    FOLDED: tl.constexpr,
    STEPS: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHT_ALIGN: tl.constexpr,
    STATE_ALIGN: tl.constexpr,
    GRADIENT_ALIGN: tl.constexpr,
):
    """One step of a rule on the rows at `slots`: read, update, write, once."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    inside = at < count
    if MASKED:
        inside = inside & (tl.load(enabled) != 0)
    column = tl.arange(0, BLOCK)
    valid = column < D
    if FOLDED:  # sums of rows are taken by halves
        column, valid = _folded_column(column, D, STEPS)
    mask = inside[:, None] & valid[None, :]
    slot = tl.load(slots + at, mask=inside, other=0).to(tl.int64)
    first = weight + slot[:, None] * WEIGHT_STRIDE
    weights = tl.multiple_of(first, (WEIGHT_ALIGN, WEIGHT_ALIGN)) + column[None, :]
    w = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    first = gradient + at[:, None] * GRADIENT_STRIDE
    gradients = tl.multiple_of(first, (GRADIENT_ALIGN, GRADIENT_ALIGN)) + column[None, :]
    g = tl.load(gradients, mask=mask, other=0.0)
    states = tl.multiple_of(state + slot[:, None] * STATE_STRIDE, (STATE_ALIGN, STATE_ALIGN))
    parts = ()
    for part in tl.static_range(len(COLUMNS)):
        place = states + COLUMNS[part][0]
        if COLUMNS[part][1] == 1:
            parts += (tl.load(place, mask=inside[:, None], other=0.0),)
        else:
            parts += (tl.load(place + column[None, :], mask=mask, other=0.0),)
    w, g = _decayed(w, g, decay, DECAY)
    numbers = (number1, number2, number3, number4)[:NUMBERS]
    if EXPONENT == 0:
        new = RULE(w, g, *parts, D, *numbers)
    else:
        new = RULE(w, g, *parts, D, *numbers, EXPONENT)
    tl.store(weights, new[0].to(weight.dtype.element_ty), mask=mask)  # rounded to nearest
    for part in tl.static_range(len(COLUMNS)):
        place = states + COLUMNS[part][0]
        if COLUMNS[part][1] == 1:
            tl.store(place, new[part + 1], mask=inside[:, None])
        else:
            tl.store(place + column[None, :], new[part + 1], mask=mask)
