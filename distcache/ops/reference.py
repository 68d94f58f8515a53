"""The row operations in plain PyTorch, against which faster bodies are held; host memory rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distcache.compiled import array, compiled, copy_row, fetch_early, i8, in4, in8, types
from distcache.errors import ConfigError, PlanError
from distcache.ops import formulas
from distcache.ops.formulas import FORMULAS
from distcache.ops.long_segments import SegmentChunks


class Rule(NamedTuple):
    """One step of one row optimizer: a formula of `formulas.py` with its numbers.

    Numbers are Python floats, rounded to the dtype of the rows when they are used.
    """

    name: str
    """Of the formula, in `formulas.FORMULAS`."""
    numbers: tuple[float, ...]
    """What it takes after D."""
    exponent: int = 0
    """Digits for `formulas.power`, which it takes after these where they are not 0."""
    decays: str = ""
    """Weight decay: `l2`, `decoupled`, or none."""
    decay: float = 0.0
    """By how much: added to the gradient times the weight, or taken of the weight."""


# -----------------------------------------------------------------------------
# The row operations in plain PyTorch: the bodies that every faster one is compared with.
#
# Letters: U distinct rows of a step, n ids, K bags, R rows that get a gradient, D width, C slots,
# S floats of state per row. All tensors of a call lie on one device; index tensors are int32 or
# int64, all of a call alike. None of these is recorded by autograd, and each result depends on the
# values that enter it and their order alone, never on their labels (positions, row numbers, slots):
# `embedding_bag`'s forward sums every bag by itself, from first to last. Its backward does not have
# that property, hence `row_gradients`.

BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}
"""About how many elements `update_rows` gathers at once, by device type.

On a CPU a block stays in the core's cache (1.3 to 3 times faster than all rows at once at widths
16 and 128); everywhere blocks bound the scratch memory to a few blocks instead of U (D + S) floats.
"""


def _segment_sum(values: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """`out[k]` = sum over o in [offsets[k], offsets[k + 1]) of weights[o] * values[index[o]]."""
    if index.shape[0] == 0 or values.shape[0] == 0:
        return values.new_zeros(max(offsets.shape[0] - 1, 0), values.shape[1])
    if weights is not None:
        weights = weights.detach().to(values.dtype)
    values = values.detach()
    if values.stride(1) != 1:  # `embedding_bag` has other code, with other bits, for such layouts
        values = values.contiguous()
    # Positional: scale_grad_by_freq, mode (0 is sum), sparse, per_sample_weights.
    return torch.embedding_bag(
        values, index, offsets, False, 0, False, weights, include_last_offset=True
    )[0]


def pooled_lookup(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum the rows of each bag: `[K, D]`, in the dtype of `rows`; an empty bag is 0.

    `rows`: float `[U, D]`; `positions`: `[n]`, the row of each id; `offsets`: `[K + 1]`, bag k has
    the ids [offsets[k], offsets[k + 1]); `weights`: float `[n]`, or None for ones; `out`: where the
    sums are to lie, contiguous (None: in new memory).
    """
    sums = _segment_sum(rows, positions, offsets, weights)
    return sums if out is None else out.copy_(sums)


def row_gradients(
    bag_gradients: Tensor,
    bag_of: Tensor,
    order: Tensor,
    segments: Tensor,
    weights: Tensor | None = None,
    chunks: SegmentChunks | None = None,
) -> Tensor:
    """Sum the gradients of each row's occurrences, in occurrence order: `[R, D]`.

    `bag_gradients`: float `[K, D]`; `bag_of`: `[n]`, the bag of each id; `order`: `[n]`, the ids
    sorted by row, in occurrence order within a row; `segments`: `[R + 1]`, row r's ids are
    order[segments[r] : segments[r + 1]]; `weights`: float `[n]` by id (not by `order`), or None.
    `chunks`: unused here; the GPU's body adds long segments in these.
    """
    if weights is not None:
        weights = weights.index_select(0, order)
    return _segment_sum(bag_gradients, bag_of.index_select(0, order), segments, weights)


def update_rows(
    rule: Rule,
    weight: Tensor,
    state: Tensor | None,
    slots: Tensor,
    gradient: Tensor,
    enabled: Tensor | None = None,
) -> None:
    """One optimizer step on the rows at `slots`: gather, update, put back, block by block.

    `weight`: float `[C, D]` and `state`: `[C, S]` (None where S = 0), changed in place; `slots`:
    `[U]`, distinct; `gradient`: `[U, D]`, left as it is, in whose dtype, also the state's, rows are
    updated; weights of another are rounded once, to nearest. `enabled`: bool or uint8 of one
    element on the same device, or None for true; where it is 0, nothing is written, whatever the
    gradient holds. The bits do not depend on blocks or slots.
    """
    if enabled is not None and not enabled.is_cuda:
        if not enabled:
            return
        enabled = None
    elements = BLOCK_ELEMENTS.get(weight.device.type, BLOCK_ELEMENTS["cuda"])
    block = max(1, elements // weight.shape[1])
    for start in range(0, slots.shape[0], block):
        at = slots[start : start + block]
        rows = weight.index_select(0, at).to(gradient.dtype)
        row_state = None if state is None else state.index_select(0, at)
        update(rule, rows, row_state, gradient[start : start + block])
        _put(weight, at, rows.to(weight.dtype), enabled)
        if state is not None and row_state is not None:
            _put(state, at, row_state, enabled)


def _put(into: Tensor, at: Tensor, rows: Tensor, enabled: Tensor | None) -> None:
    """`into[at] = rows`, or what is there already where `enabled` is 0; asks no device."""
    if enabled is not None:
        rows = torch.where(enabled.view(()) != 0, rows, into.index_select(0, at))
    put(into, at, rows)


def update(rule: Rule, weight: Tensor, state: Tensor | None, gradient: Tensor) -> None:
    """Apply a rule to gathered rows `[U, D]` and their state `[U, S]`, in place.

    Element-wise additions, products, quotients and square roots, one after the other: fused forms
    (`addcdiv`, `add` with `alpha`) may round differently in the vectorised body and the scalar
    tail of a CPU loop. `gradient` is left as it is.
    """
    columns = FORMULAS[rule.name].columns(weight.shape[1]).values()
    if state is None and columns:
        raise ConfigError(f"{rule.name} keeps state for each row: pass `state` [U, S]")
    update_parts(rule, weight, [] if state is None else [state[:, at] for at in columns], gradient)


def update_parts(rule: Rule, weight: Tensor, parts: Sequence[Tensor], gradient: Tensor) -> None:
    """The same with the parts of the state one by one."""
    numbers = rule.numbers if rule.exponent == 0 else (*rule.numbers, rule.exponent)
    w, gradient = formulas.decayed(weight, gradient, rule.decay, rule.decays)
    new = FORMULAS[rule.name].step(w, gradient, *parts, weight.shape[-1:].numel(), *numbers)
    for part, value in zip((weight, *parts), new, strict=True):
        if value is not part:
            part.copy_(value)


def copy_rows(
    source: Tensor, source_rows: Tensor | None, target: Tensor, target_rows: Tensor | None
) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]` for all i, in place.

    `source` `[A, D]`, `target` `[B, D]`, of one dtype; rows `[m]`, None for 0, 1, ...;
    `target_rows` distinct.
    """
    values = source if source_rows is None else source.index_select(0, source_rows)
    if target_rows is None:
        target.copy_(values)
    else:
        target.index_copy_(0, target_rows.long(), values)


# -----------------------------------------------------------------------------
# Rows in and out of host memory, on the calling thread.
#
# Not torch: it splits even small copies over its pool of threads, which waits for cores that
# training keeps busy (30 times longer for 6,600 rows of 64 bytes on two busy cores), and the pool
# of a thread beside training is one more pool. Not NumPy, to which a row can be one item: it waits
# for each to come from memory (25 % longer for rows of 64 bytes and more; many rows of 4 bytes
# it takes 15 % faster).

_EARLY = 16
"""Rows ahead of the one that is copied that are on their way to the core's cache."""

_table, _tables = array(types.uint8, False, 2), array(types.uint8, True, 2)


@compiled(*[i8(_table, rows, _tables) for rows in (in4, in8)])
def take_each(source: np.ndarray, rows: np.ndarray, out: np.ndarray) -> int:
    """`take_rows` of bytes, uint8 `[V, size]`; -1, or where in `rows` one is outside."""
    for i in range(len(rows)):
        if np.uint64(rows[i]) >= np.uint64(len(source)):
            return i
    for i in range(len(rows)):
        if i + _EARLY < len(rows):
            fetch_early(source, rows[i + _EARLY])
        copy_row(out, i, source, rows[i])
    return -1


@compiled(*[i8(_tables, rows, _table) for rows in (in4, in8)])
def put_each(target: np.ndarray, rows: np.ndarray, values: np.ndarray) -> int:
    """`put_rows` of bytes, uint8 `[V, size]`; -1, or where in `rows` one is outside."""
    for i in range(len(rows)):
        if np.uint64(rows[i]) >= np.uint64(len(target)):
            return i
    for i in range(len(rows)):
        if i + _EARLY < len(rows):
            fetch_early(target, rows[i + _EARLY])
        copy_row(target, rows[i], values, i)
    return -1


def take_rows(source: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """`out[i] = source[rows[i]]`: `source` `[V, D]`, `rows` int32 or int64 `[m]`, `out` `[m, D]`.

    All contiguous. Raises PlanError for a row outside [0, V), and for `out` of another shape or
    dtype than the rows'. Other threads run meanwhile.
    """
    check_values(source, rows, out)
    rows = np.ascontiguousarray(rows)
    if len(rows) and take_each(source.view(np.uint8), rows, out.view(np.uint8)) >= 0:
        check_rows(rows, len(source))


def put_rows(target: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """`target[rows[i]] = values[i]`: shapes as in `take_rows`, `rows` distinct.

    Raises PlanError for a row outside [0, V), and for values of another shape or dtype than the
    rows', before anything is written.
    """
    check_values(target, rows, values)
    rows = np.ascontiguousarray(rows)
    if len(rows) and put_each(target.view(np.uint8), rows, values.view(np.uint8)) >= 0:
        check_rows(rows, len(target))


def put(target: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """`target` with `target[rows[i]] = values[i]`: shapes as in `put_rows`, `rows` distinct.

    All on one device; not recorded by autograd. On a CPU 2 to 3 times as fast as `index_copy_`.
    """
    if target.device.type != "cpu" or not (target.is_contiguous() and values.is_contiguous()):
        return target.index_copy_(0, rows.long(), values)
    check_values(target, rows, values)
    put_rows(as_numpy(target), rows.numpy(), as_numpy(values))
    return target


def as_numpy(values: Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU, for copies: halves as int16, for NumPy has no bfloat16."""
    values = values.detach()
    return (values.view(torch.int16) if values.itemsize == 2 else values).numpy()


def by_sample(values: Tensor, samples: int, features: int) -> Tensor:
    """`values` of all bags, `[F * b, ...]` feature by feature, sample by sample.

    On the CPU NumPy: a torch operation would start a pool of threads beside that of training.
    """
    if values.is_cuda:
        return values.view(features, samples, *values.shape[1:]).transpose(0, 1).flatten(0, 1)
    by_feature = values.numpy().reshape(features, samples, *values.shape[1:])
    return torch.from_numpy(by_feature.swapaxes(0, 1).reshape(values.shape))


def check_values(
    target: Tensor | np.ndarray, rows: Tensor | np.ndarray, values: Tensor | np.ndarray
) -> None:
    """PlanError for `values` of another shape or dtype than that many `rows` of `target` have."""
    if values.shape != (len(rows), *target.shape[1:]) or values.dtype != target.dtype:
        given, own = (str(of.dtype).removeprefix("torch.") for of in (values, target))
        shapes = list(values.shape), list(target.shape[1:])
        raise PlanError(f"{given} values {shapes[0]} for {len(rows)} rows of {own} {shapes[1]}")


def check_rows(rows: np.ndarray, limit: int, what: str = "row") -> None:
    """PlanError naming the first of `rows` (integers) outside [0, limit), as `what` they are."""
    # As unsigned numbers, negative ones are beyond every limit too: one pass.
    if len(rows) and np.maximum.reduce(rows.view(f"u{rows.itemsize}")) >= limit:
        bad = rows[(rows < 0) | (rows >= limit)][0]
        raise PlanError(f"{what} {bad} is outside [0, {limit})")
