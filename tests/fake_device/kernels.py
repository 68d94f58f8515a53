"""The package's Triton kernels on the device that is not there: one operation for each launch.

All that the tests replace of the package is named here: the kernels of `distcache.ops`, which are
called as Triton's are, after every check that comes before a launch. Their sums are those of the
references. What else a kernel is told (tile, warps) says nothing about its result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from fake_device.fake_torch import launch_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from distcache.ops import reference, triton_kernels
from distcache.ops.formulas import FORMULAS
from distcache.ops.reference import Rule


def install() -> None:
    """Replace the kernels, for good."""
    for body in (segment_sums, update_rows, copy_rows):
        setattr(triton_kernels, body.__name__, _Kernel(body))


class Launch(NamedTuple):
    """A launch of a kernel: `variant` is all that Triton compiles it for, `thread` a name."""

    variant: str
    thread: str


_recorded: list[list[Launch]] = []


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Context manager that returns the list of the launches within it, in their order."""
    launches: list[Launch] = []
    _recorded.append(launches)
    try:
        yield launches
    finally:
        _recorded.remove(launches)


class _Kernel:
    """`kernel[grid](*arguments, **constants)`."""

    def __init__(self, body: Callable) -> None:
        self._body = body
        kernel = getattr(triton_kernels, body.__name__)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._specialize = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid: tuple[int]) -> Callable:
        return self._launch

    def _launch(self, *args: Any, **constants: Any) -> None:
        if _recorded:
            hosts = [getattr(value, "host", value) for value in args]
            # Triton's own key: types, divisibility of arguments, constants, options.
            _, types, options = self._specialize(*hosts, **constants)
            variant = f"{self._body.__name__} {types} {options}"
            for launches in _recorded:
                launches.append(Launch(variant, threading.current_thread().name))
        launch_kernel(partial(self._body, **constants), *args)


def segment_sums(
    values, starts, ends, outer, inner, weights, to, out, count, stride,
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
