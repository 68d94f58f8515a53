"""The row operations as Triton kernels, for float32 rows on a GPU; signatures as in `reference.py`.

Bits: `pooled_lookup` adds a bag's rows first to last, `update_rows` rounds as its `Rule` says: both
equal to the reference (but for weights, where CPU bodies of `embedding_bag` may fuse product and
sum). `row_gradients` adds as `long_segments.segment_chunks` says: equal to
`reference.row_gradients` for rows of at most `long_segments.CHUNK` occurrences.

Nothing here waits for the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from distcache.errors import ConfigError
from distcache.layout import HALVES, WIDE_BYTES, RowKind
from distcache.ops import long_segments, reference, triton_kernels
from distcache.ops.formulas import FORMULAS
from distcache.ops.long_segments import SegmentChunks, segment_chunks
from distcache.ops.reference import Rule

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""

_INTERPRETER = threading.Lock()

TILE = 1024
"""Most elements of a program's tile [N, D rounded up to a power of two]: 8 per thread."""
MOST_ROWS = 16
"""Largest N. Up to here Triton keeps the N indices of a tile where the tile's threads are; beyond,
it exchanges them through shared memory, or fails to compile (seen with 32 rows and two warps)."""
LINK_PROGRAMS = 32
"""Most programs that copy rows from or to the host: while its link answers they sit where the
kernels of the step could run, and so many keep it busy (128 KB under way)."""


def fits(*tensors: Tensor | None) -> bool:
    """Whether these bodies can take the float tensors of a call: float32 where kernels run, or,
    of the first, halves, which are computed with in float32."""
    device, taken = "cpu" if INTERPRETED else "cuda", (torch.float32, *HALVES)
    for tensor in tensors:
        if tensor is not None:
            if tensor.device.type != device or tensor.dtype not in taken:
                return False
            taken = (torch.float32,)
    return True


def pooled_lookup(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference.pooled_lookup`; one pass over the bags."""
    rows = _unit_columns(rows)
    if out is None:
        out = rows.new_empty(max(len(offsets) - 1, 0), rows.shape[1])
    if len(rows) == 0:
        return out.zero_()
    _segment_sums(rows, (offsets[:-1], offsets[1:]), out, inner=positions, weights=weights)
    return out


def row_gradients(
    bag_gradients: Tensor,
    bag_of: Tensor,
    order: Tensor,
    segments: Tensor,
    weights: Tensor | None,
    chunks: SegmentChunks,
) -> Tensor:
    """See `reference.row_gradients`, but for the order of additions of long segments.

    `chunks`: `segment_chunks(segments)`, with its table on the device of the others.
    """
    values = _unit_columns(bag_gradients)
    out = values.new_empty(max(len(segments) - 1, 0), values.shape[1])
    if len(values) == 0:
        return out.zero_()
    ids: dict[str, Any] = {"inner": bag_of, "outer": order, "weights": weights}
    most = long_segments.CHUNK if chunks.sizes else 0
    _segment_sums(values, (segments[:-1], segments[1:]), out, most=most, **ids)
    passes = chunks.passes()
    for index, bounds in enumerate(passes):
        last = index == len(passes) - 1
        sums = out if last else values.new_empty(len(bounds[0]), values.shape[1])
        _segment_sums(values, bounds, sums, to=chunks.rows if last else None, **ids)
        values, ids = sums, {}
    return out


def update_rows(
    rule: Rule,
    weight: Tensor,
    state: Tensor | None,
    slots: Tensor,
    gradient: Tensor,
    enabled: Tensor | None = None,
) -> None:
    """See `reference.update_rows`; gather, update and scatter in one pass."""
    count, dim = gradient.shape
    width, constants = _layout(rule.name, dim)
    if width and (state is None or state.shape[1] != width):
        raise ConfigError(f"{rule.name} keeps {width} floats per row: pass `state` [C, {width}]")
    if len(slots) != count:
        raise ConfigError(f"{len(slots)} slots do not go with the gradients of {count} rows")
    if count == 0:
        return
    for name, tensor in (("weight", weight), ("state", state)):
        if tensor is not None and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ConfigError(f"`{name}` has columns {tensor.stride(1)} elements apart, not 1")
    gradient = _unit_columns(gradient)
    held = weight if state is None else state
    flag = weight if enabled is None else enabled.view(torch.uint8)
    # As floats: for whole numbers Triton would compile once more, and take them for int32.
    numbers = map(float, (rule.decay, *rule.numbers, 0.0, 0.0, 0.0)[:5])
    weight_stride, weight_alignment = _row_layout(weight)
    state_stride, state_alignment = _row_layout(held)
    gradient_stride, gradient_alignment = _row_layout(gradient)
    _launch(
        triton_kernels.update_rows,
        (weight, held, slots.contiguous(), gradient, flag, count, *numbers),
        (weight, count, dim),
        WEIGHT_STRIDE=weight_stride,
        STATE_STRIDE=state_stride,
        GRADIENT_STRIDE=gradient_stride,
        WEIGHT_ALIGN=weight_alignment,
        STATE_ALIGN=state_alignment,
        GRADIENT_ALIGN=gradient_alignment,
        NUMBERS=len(rule.numbers),
        EXPONENT=rule.exponent,
        DECAY=rule.decays,
        MASKED=enabled is not None,
        **constants,
    )


@lru_cache(maxsize=64)
def _layout(name: str, dim: int) -> tuple[int, dict[str, Any]]:
    """S of a formula at a width, and what its kernel is compiled for."""
    formula = FORMULAS[name]
    columns = tuple((at.start, at.stop - at.start) for at in formula.columns(dim).values())
    constants = {"RULE": triton_kernels.FORMULAS[name], "COLUMNS": columns}
    folded = "mean" in formula.step.__code__.co_names and dim & (dim - 1) > 0
    return formula.width(dim), constants | {"FOLDED": folded, "STEPS": (dim - 1).bit_length()}


def copy_rows(
    source: Tensor, source_rows: Tensor | None, target: Tensor, target_rows: Tensor | None
) -> None:
    """See `reference.copy_rows`; launched on the device of the index, or of the table that has no
    index. A table on the CPU must lie in memory that is registered with that device."""
    places = source_rows if source_rows is not None else target_rows
    dim, lengths = target.shape[1], {len(source if source_rows is None else source_rows)}
    lengths.add(len(target if target_rows is None else target_rows))
    count = max(lengths)
    if len(lengths) > 1:
        raise ConfigError(f"{min(lengths)} and {count} rows do not go together")
    if count == 0:
        return
    for name, tensor in (("source", source), ("target", target)):
        if tensor.shape[1] != dim or tensor.dtype != target.dtype or not tensor.is_contiguous():
            raise ConfigError(
                f"`{name}` {list(tensor.shape)} of {tensor.dtype}: contiguous rows of {dim} "
                f"{target.dtype} are copied"
            )
    index = source if places is None else places
    start = index if source_rows is None else source_rows.contiguous()
    end = index if target_rows is None else target_rows.contiguous()
    _launch(
        triton_kernels.copy_rows,
        (source, start, target, end, count),
        (source if source.is_cuda else target, count, dim),
        most=None if source.is_cuda and target.is_cuda else LINK_PROGRAMS,
        FROM=source_rows is not None,
        TO=target_rows is not None,
        SOURCE_ALIGN=_row_layout(source)[1],
        TARGET_ALIGN=_row_layout(target)[1],
    )


def put(target: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """See `reference.put`."""
    if not (target.is_contiguous() and values.is_contiguous()):
        return reference.put(target, rows, values)
    reference.check_values(target, rows, values)
    copy_rows(_unit_columns(values), None, target.detach(), rows)
    return target


def compile_kernels(kind: RowKind, rules: Sequence[Rule], device: torch.device) -> None:
    """Launch every variant of the kernels that steps on rows of `kind` use, on a few elements.

    Triton compiles a variant, and loads its machine code, when it is launched for the first time.
    The variants depend on the widths and dtypes of `kind`, on `rules` and on these flags: ids have
    weights, updates are masked, some row has more than `CHUNK` occurrences. Only the first are
    known before training, so all values of the flags are launched. Index tensors are int32, as
    those of plans. Everything is written to new memory, and nobody waits for the device.
    """
    if kind.dtype != torch.float32:
        return  # the reference takes such rows
    most = long_segments.CHUNK**2 + 1  # the least with a pass over sums of sums
    chunks = segment_chunks(torch.tensor([0, most], dtype=torch.int32))
    # All segments are empty: zeros need no copy to the device, for which the host would wait.
    index = torch.zeros(most, dtype=torch.int32, device=device)
    chunks = SegmentChunks(index.new_zeros(len(chunks.table)), chunks.sizes)
    unchunked = SegmentChunks(index[:0], ())
    row = torch.zeros(1, kind.dim, device=device)
    for weights in (None, torch.zeros(most, device=device)):
        pooled_lookup(row, index, index[:2], weights)
        row_gradients(row, index, index, index[:2], weights, chunks)
        row_gradients(row, index, index, index[:2], weights, unchunked)
    weight = row.to(kind.stored)
    state = torch.zeros(1, kind.state_width, device=device) if kind.state_width else None
    for table in (row, weight, state):
        if table is not None:
            put(table, index[:1], table.clone())
    for rule in rules:
        for enabled in (None, torch.zeros(1, dtype=torch.bool, device=device)):
            update_rows(rule, weight, state, index[:1], row, enabled)


def _segment_sums(
    values: Tensor,
    bounds: tuple[Tensor, Tensor],
    out: Tensor,
    inner: Tensor | None = None,
    outer: Tensor | None = None,
    weights: Tensor | None = None,
    to: Tensor | None = None,
    most: int = 0,
) -> None:
    """Launch `triton_kernels.segment_sums`; index tensors that are None are not read."""
    starts, ends = bounds
    if len(starts) == 0:
        return
    if weights is not None:
        weights = weights.detach().to(values.dtype).contiguous()
    stride, alignment = _row_layout(values)
    ids = [starts if given is None else given.contiguous() for given in (outer, inner)]
    scales, places = values if weights is None else weights, starts if to is None else to
    _launch(
        triton_kernels.segment_sums,
        (values, starts, ends, *ids, scales, places, out, len(starts), stride),
        (values, len(starts), values.shape[1]),
        VALUES_ALIGN=alignment,
        OUT_ALIGN=_row_layout(out)[1],
        HOPS=(inner is not None) + (outer is not None),
        WEIGHTED=weights is not None,
        SCATTER=to is not None,
        MOST=most,
    )


def _launch(
    kernel: Any,
    arguments: Sequence[Any],
    about: tuple[Tensor, int, int],
    most: int | None = None,
    **constants: Any,
) -> None:
    """Run a kernel over `count` rows of width D in tiles; `about`: a tensor of the device, and
    these two numbers. `most`: of the programs, each of which takes several tiles then."""
    where, count, dim = about
    block = 1 << (dim - 1).bit_length()
    tile = max(1, min(MOST_ROWS, TILE // block))
    warps = max(1, min(4, tile * block // 256))
    # Without fused multiply-adds: products and sums are rounded separately.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    # Kernels are launched on the current device; Triton's interpreter is one for all threads, which
    # take turns in it.
    with torch.cuda.device(where.device) if where.is_cuda else _INTERPRETER:
        programs = (count + tile - 1) // tile
        programs = programs if most is None else min(programs, most)
        kernel[(programs,)](*arguments, D=dim, N=tile, BLOCK=block, **constants, **options)


def _unit_columns(values: Tensor) -> Tensor:
    """`values` outside autograd, with columns one element apart.

    A copy if rows begin at multiples of fewer bytes than rows of this width do in a tensor of their
    own: these would need one more variant of a kernel.
    """
    values = values.detach()
    if values.stride(1) != 1:
        return values.contiguous()
    alignment = math.gcd(WIDE_BYTES, values.shape[1] * values.itemsize)
    stride_bytes = 0 if values.is_contiguous() else values.stride(0) * values.itemsize
    if stride_bytes % alignment or values.data_ptr() % alignment:
        return values.clone(memory_format=torch.contiguous_format)
    return values


def _row_layout(values: Tensor) -> tuple[int, int]:
    """Return the elements from one row to the next, and the bytes, a power of 2 and at most 16, at
    whose multiples rows begin. For results of `_unit_columns` these depend on the width alone.

    A tensor of one row may have any stride: it counts as contiguous.
    """
    width = values.shape[1]
    stride = width if values.is_contiguous() else values.stride(0)
    row_bytes = math.gcd(width, stride) * values.itemsize
    return stride, math.gcd(WIDE_BYTES, row_bytes, values.data_ptr())
