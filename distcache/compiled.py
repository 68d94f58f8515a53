"""Loops over index tensors, compiled by Numba: how, and the types that they are called with.

Results go to arrays that the caller made; a loop allocates nothing, and other threads run
meanwhile. All that a loop needs stands in its file, for its machine code is kept on disk until that
file changes; but for what is below, which gets another name when it changes. It is kept beside it,
or in the user's cache folder, or where $NUMBA_CACHE_DIR says. Compiling takes some seconds, once
per installation, when a file of loops is imported and never while one plans; from then on the code
is loaded in milliseconds. Where nothing can be kept, each process compiles for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils

log = logging.getLogger(__name__)

_compiler: Any = numba  # which has no type stubs
types = _compiler.types
Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(*signatures: Any) -> Callable[[Loop], Loop]:
    """Compile a loop for the only types that it is called with; it may allocate nothing."""

    def compile_loop(loop: Loop) -> Loop:
        options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
        try:
            return _compiler.njit(list(signatures), cache=True, **options)(loop)
        except Exception as error:  # no folder can be written, a damaged file, a full disk
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.info("the machine code of %s is not kept: %s", loop.__name__, first)
            return _compiler.njit(list(signatures), cache=False, **options)(loop)

    return compile_loop


def array(dtype: Any, written: bool, dimensions: int = 1) -> Any:
    """The type of a contiguous array, which the loop may write or only reads."""
    return types.Array(dtype, dimensions, "C", readonly=not written)


i4, i8 = types.int32, types.int64
in4, in8, out4, out8 = array(i4, False), array(i8, False), array(i4, True), array(i8, True)
out1 = array(types.uint8, True)


def fetch_early(table: np.ndarray, row: int) -> None:
    """Bring the row of a table, or of an index, to the core's cache; changes nothing."""


@extending.intrinsic
def _prefetch(typing_context: Any, table: Any, row: Any) -> tuple[Any, Any]:
    """LLVM's instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own = context.make_array(table)(context, builder, arguments[0])
        place = [arguments[1]] + [context.get_constant(types.intp, 0)] * (table.ndim - 1)
        at = cgutils.get_item_pointer(context, builder, table, own, place, wraparound=False)
        kind, number = ir.VoidType(), ir.IntType(32)
        of = ir.FunctionType(kind, [at.type, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", (at.type,), of)
        builder.call(call, [at, number(1), number(3), number(1)])  # to write, soon, data
        return context.get_dummy_value()

    return types.void(table, types.intp), generate


@extending.overload(fetch_early, inline="always")
def _fetch_early(table, row):  # type: ignore[no-untyped-def] # the types that Numba has
    return lambda table, row: _prefetch(table, np.int64(row))


def copy_row(target: np.ndarray, to: int, source: np.ndarray, at: int) -> None:
    """`target[to] = source[at]` of two tables of bytes, uint8 `[m, size]`, of one size."""
    target[to] = source[at]


@extending.intrinsic
def _copy(typing_context: Any, target: Any, to: Any, source: Any, at: Any) -> tuple[Any, Any]:
    """C's `memcpy`, of a length that it is told."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, places = context.get_constant(types.intp, 0), []
        for table, index in ((0, 1), (2, 3)):
            kind, place = signature.args[table], [arguments[index], first]
            own = context.make_array(kind)(context, builder, arguments[table])
            of = context, builder, kind, own, place
            places.append(cgutils.get_item_pointer(*of, wraparound=False))
        size = cgutils.unpack_tuple(builder, own.shape)[1]
        cgutils.raw_memcpy(builder, *places, size, 1)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate


@extending.overload(copy_row, inline="always")
def _copy_row(target, to, source, at):  # type: ignore[no-untyped-def] # the types that Numba has
    return lambda target, to, source, at: _copy(target, np.int64(to), source, np.int64(at))
