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
from typing import Any

import triton
import triton.language as tl

UNROLL = tl.constexpr(4)
"""Rows of a segment whose loads are under way at the same time."""

_INDEX = ["starts", "ends", "outer", "inner", "to", "source_rows", "target_rows", "slots"]


def _jit(kernel: Callable[..., None]) -> Any:
    """Compile once for any count of rows and any alignment of index tensors, which are pieces of
    larger ones: machine code that is missing in the midst of training costs up to a second."""
    index = [name for name in _INDEX if name in inspect.signature(kernel).parameters]
    how = {"do_not_specialize": ["count"], "do_not_specialize_on_alignment": index}
    return triton.jit(**how)(kernel)


@_jit
def segment_sums(
    values,  # float32 [*, D], rows STRIDE apart
    starts,  # [count]: segment i is [starts[i], ends[i])
    ends,
    outer,  # place -> id; read where HOPS = 2
    inner,  # place or id -> row of `values`; read where HOPS >= 1
    weights,  # float32, by id; read where WEIGHTED
    to,  # [count]: row of `out`; read where SCATTER
    out,  # float32 [*, D], contiguous
    count,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HOPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCATTER: tl.constexpr,
    MOST: tl.constexpr,
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
            value = tl.load(values + row[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)
            if WEIGHTED:
                value = value * tl.load(weights + place, mask=there, other=0.0)[:, None]
            total += value  # + 0 past the end changes no bit: a sum that began at +0 is never -0
    if SCATTER:
        at = tl.load(to + at, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (column < D)[None, :]
    tl.store(out + at[:, None] * D + column[None, :], total, mask=mask)


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
        values = tl.load(source + start[:, None] * D + column[None, :], mask=mask)
        tl.store(target + end[:, None] * D + column[None, :], values, mask=mask)


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


@triton.jit
def _row_sums(values, N: tl.constexpr, STEPS: tl.constexpr):
    """[N, 2^STEPS] -> [N], by halves: additions of two numbers, in the order written here."""
    for step in tl.static_range(STEPS):
        values = tl.sum(tl.reshape(values, [N, 2, 1 << (STEPS - 1 - step)]), axis=1)
    return tl.reshape(values, [N])


@_jit
def update_rows(
    weight,  # float32 [C, D], rows WEIGHT_STRIDE apart
    state,  # float32 [C, S], rows STATE_STRIDE apart; not read by sgd
    slots,  # [count]
    gradient,  # float32 [count, D], rows GRADIENT_STRIDE apart
    enabled,  # uint8 of one element; read where MASKED
    count,
    rate,
    eps,
    take1,
    take2,
    WEIGHT_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    GRADIENT_STRIDE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    RULE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of `RULE` (`reference.Rule`) on the rows at `slots`: read, update, write, once."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    column = tl.arange(0, BLOCK)
    inside = at < count
    if MASKED:
        inside = inside & (tl.load(enabled) != 0)
    mask = inside[:, None] & (column < D)[None, :]
    slot = tl.load(slots + at, mask=inside, other=0).to(tl.int64)
    weights = weight + slot[:, None] * WEIGHT_STRIDE + column[None, :]
    gradients = gradient + at[:, None] * GRADIENT_STRIDE
    w = tl.load(weights, mask=mask, other=0.0)
    g = tl.load(gradients + column[None, :], mask=mask, other=0.0)
    if RULE == "sgd":
        w = w - g * rate
    if RULE == "adagrad":
        sums = state + slot[:, None] * STATE_STRIDE + column[None, :]
        total = tl.load(sums, mask=mask, other=0.0) + g * g
        w = w - tl.math.div_rn(g, tl.math.sqrt_rn(total) + eps) * rate
        tl.store(sums, total, mask=mask)
    if RULE == "rowwise_adagrad":
        folded = g
        if D != BLOCK:  # the same numbers again, from the cache, where row_sums has them
            place, valid = _folded_column(column, D, STEPS)
            there = inside[:, None] & valid[None, :]
            folded = tl.load(gradients + place[None, :], mask=there, other=0.0)
        mean = tl.math.div_rn(_row_sums(folded * folded, N, STEPS), D * 1.0)
        sums = state + slot * STATE_STRIDE
        total = tl.load(sums, mask=inside, other=0.0) + mean
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(total) + eps) * rate
        w = w - g * scale[:, None]
        tl.store(sums, total, mask=inside)
    if RULE == "adam":
        firsts = state + slot[:, None] * STATE_STRIDE + column[None, :]
        m = tl.load(firsts, mask=mask, other=0.0)
        v = tl.load(firsts + D, mask=mask, other=0.0)
        m = m + (g - m) * take1
        v = v + (g * g - v) * take2
        w = w - tl.math.div_rn(m, tl.math.sqrt_rn(v) + eps) * rate
        tl.store(firsts, m, mask=mask)
        tl.store(firsts + D, v, mask=mask)
    tl.store(weights, w, mask=mask)
