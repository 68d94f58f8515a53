"""The package's Triton kernels on the device that is not there: one operation for each launch.

All that the tests replace of the package is named here: the kernels of `distcache.ops`, which are
called as Triton's are, after every check that comes before a launch. Their sums are those of the
references. What else a kernel is told (tile, warps) says nothing about its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from fake_device.fake_torch import launch_kernel

from distcache.ops import reference, triton_kernels
from distcache.ops.formulas import FORMULAS
from distcache.ops.reference import Rule


def install() -> None:
    """Replace the kernels, for good."""
    for body in (segment_sums, update_rows, copy_rows):
        setattr(triton_kernels, body.__name__, _Kernel(body))


class _Kernel:
    """`kernel[grid](*arguments, **constants)`."""

    def __init__(self, body: Callable) -> None:
        self._body = body

    def __getitem__(self, grid: tuple[int]) -> Callable:
        return lambda *args, **constants: launch_kernel(partial(self._body, **constants), *args)


def segment_sums(
    values, starts, ends, outer, inner, weights, to, out, count,
    *, HOPS, WEIGHTED, SCATTER, MOST, **_,
):  # fmt: skip
    """See `triton_kernels.segment_sums`: each segment's rows, added first to last."""
    lengths = ends - starts
    taken = (lengths <= MOST).nonzero()[:, 0] if MOST else torch.arange(count)
    lengths = lengths[taken]
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    shift = (starts[taken] - offsets[:-1]).repeat_interleave(lengths)
    place = torch.arange(len(shift)) + shift
    place = outer[place] if HOPS == 2 else place
    parts = values[inner[place] if HOPS else place]
    parts = parts * weights[place][:, None] if WEIGHTED else parts
    sums = reference.pooled_lookup(parts, torch.arange(len(parts)), offsets)
    out[to[taken] if SCATTER else taken] = sums


def update_rows(
    weight, state, slots, gradient, enabled, count, decay, *numbers,
    RULE, NUMBERS, EXPONENT, DECAY, MASKED, **_,
):  # fmt: skip
    """See `triton_kernels.update_rows`."""
    name = next(name for name, formula in triton_kernels.FORMULAS.items() if formula is RULE)
    rule = Rule(name, numbers[:NUMBERS], EXPONENT, DECAY, decay)
    kept, flag = state if FORMULAS[name].state else None, enabled if MASKED else None
    reference.update_rows(rule, weight, kept, slots, gradient, flag)


def copy_rows(source, source_rows, target, target_rows, count, *, FROM, TO, **_):
    """See `triton_kernels.copy_rows`."""
    rows = source_rows if FROM else torch.arange(count)
    target[target_rows if TO else torch.arange(count)] = source[rows]
