"""Row operations: one signature, one or more bodies, chosen here and nowhere else.

The reference bodies (`reference.py`, plain PyTorch) say what each operation means; `triton.py` has
kernels for float32 rows on a GPU. `docs/kernels.md` compares them, and
`python -m benchmarks.kernels` measures them, from a checkout.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from distcache.errors import ConfigError
from distcache.layout import RowKind
from distcache.ops import reference
from distcache.ops.long_segments import SegmentChunks, segment_chunks
from distcache.ops.reference import Rule

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "DISTCACHE_OPS"
"""Environment variable, read at the first call: `reference`, `triton` (also on CPU tensors under
Triton's interpreter), or empty for the kernels on CUDA tensors. What the kernels do not take, and
CUDA tensors where Triton is not installed, go to the reference; so does every other CPU tensor."""


@functools.cache
def choice() -> str:
    """The value of `DISTCACHE_OPS`; raises ConfigError for one that cannot be had."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "reference", "triton"):
        raise ConfigError(f"{VARIABLE}={value!r} is not 'reference' or 'triton'")
    if value == "triton" and triton_bodies() is None:
        raise ConfigError(f"{VARIABLE}=triton, but Triton is not installed: unset it")
    return value


@functools.cache
def triton_bodies() -> ModuleType | None:
    """The module of the kernels, None where Triton is not installed."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module("distcache.ops.triton")


def body(*tensors: Any) -> ModuleType:
    """The module whose operations take a call with these float tensors."""
    chosen = choice() or ("triton" if tensors[0].is_cuda else "reference")
    kernels = triton_bodies() if chosen == "triton" else None
    return kernels if kernels is not None and kernels.fits(*tensors) else reference


def chunks_for(segments: Tensor, device: torch.device) -> SegmentChunks | None:
    """What `row_gradients` on `device` wants prepared from a plan's `segments` (`[R + 1]`, CPU), on
    the CPU; None where it runs the reference."""
    chosen = choice() or ("triton" if device.type == "cuda" else "reference")
    if chosen == "reference" or triton_bodies() is None:
        return None
    return segment_chunks(segments)


def _dispatched(operation: Callable[P, R], *floats: int) -> Callable[P, R]:
    """`operation` of the reference, by the body that takes these of its arguments, by position."""
    pick = operator.itemgetter(*floats, floats[0])  # of two and more it gives a tuple

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return getattr(body(*pick(args)), operation.__name__)(*args, **kwargs)

    return call


pooled_lookup = _dispatched(reference.pooled_lookup, 0)
# A kernel needs `chunks_for(segments)`, on its device.
row_gradients = _dispatched(reference.row_gradients, 0)
update_rows = _dispatched(reference.update_rows, 1, 2, 4)
put = _dispatched(reference.put, 0)


def copy_rows(
    source: Tensor, source_rows: Tensor | None, target: Tensor, target_rows: Tensor | None
) -> None:
    """Copy rows of one table into another, in place: see `reference.copy_rows`.

    One of the tables may lie in host memory that is registered with the GPU of the other and of the
    index: a kernel reads or writes it there (`copy_kernel`).
    """
    kernels = triton_bodies() if choice() == "triton" else None
    if source.device != target.device:
        kernels = copy_kernel()
    elif kernels is None or not kernels.fits(source, target):
        kernels = reference
    kernels.copy_rows(source, source_rows, target, target_rows)


def copy_kernel() -> ModuleType:
    """The module whose `copy_rows` copies between host and device: PyTorch has no body for that.

    Raises ConfigError where Triton is not installed, or not to be used.
    """
    kernels = None if choice() == "reference" else triton_bodies()
    if kernels is None:
        why = "is not installed" if choice() != "reference" else f"is ruled out by {VARIABLE}"
        raise ConfigError(
            f"store.access=zero_copy takes a kernel of Triton, which {why}: set store.access=staged"
        )
    return kernels


def compile_kernels(kind: RowKind, rules: Sequence[Rule], device: torch.device) -> None:
    """Compile all kernels for rows of `kind` on `device`, updated by `rules`, and load them.

    One thread calls it before the first step: a kernel that is compiled at its first launch stops
    the thread that launches it for up to a second. Does nothing if the reference runs on `device`.
    """
    kernels = body(torch.empty(0, device=device))
    if kernels is not reference:
        kernels.compile_kernels(kind, rules, device)
