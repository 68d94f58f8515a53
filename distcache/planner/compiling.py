"""Loops of plain Python as machine code, kept on disk where that can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

Loops = Mapping[str, tuple[Callable[..., Any], list[Any]]]
"""By name: a loop, and the only types that it is called with."""


def compile_loops(loops: Loops, what: str) -> dict[str, Any]:
    """Each loop compiled by Numba; they may allocate nothing. `what` they are, for the log.

    Raises whatever Numba does where it cannot compile.
    """
    try:
        return {name: _compile(*loop, cache=True) for name, loop in loops.items()}
    except Exception as error:  # no folder can be written, a damaged file, a full disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.info("the machine code of %s is not kept: %s", what, first)
        return {name: _compile(*loop, cache=False) for name, loop in loops.items()}


def _compile(loop: Callable[..., Any], signatures: list[Any], cache: bool) -> Any:
    import numba

    compiler: Any = numba  # which has no type stubs
    return compiler.njit(
        signatures,
        nogil=True,
        cache=cache,
        error_model="numpy",
        no_cfunc_wrapper=True,
        _nrt=False,
    )(loop)
