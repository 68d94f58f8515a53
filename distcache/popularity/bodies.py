"""Which bodies the counting loops have: those of the planner's loops, by $DISTCACHE_PLANNER.

Compiled at their first use, and kept on disk, as the planner's are (see `planner.bodies`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distcache.planner import calls as planner
from distcache.planner.loops import compile_loops
from distcache.popularity import arrays, loops

NAMES = ("count_rows", "take_counts", "offer", "mark", "observe")
"""The names of the loops."""


@dataclass(frozen=True)
class Bodies:
    """The functions of `loops`, by one body: `compiled` or `numpy`."""

    body: str
    count_rows: Callable[..., int]
    take_counts: Callable[..., int]
    offer: Callable[..., tuple[int, int]]
    mark: Callable[..., int]
    observe: Callable[..., int]


_made: dict[str, Bodies] = {}


def bodies() -> Bodies:
    """The bodies in use: the planner's choice, also while `planner.bodies.using` is open.

    Raises ConfigError if $DISTCACHE_PLANNER asks for what is not there.
    """
    body = planner.bodies().body
    if body not in _made:
        made = _compiled() if body == planner.COMPILED else vars(arrays)
        _made[body] = Bodies(body, **{name: made[name] for name in NAMES})
    return _made[body]


def _compiled() -> dict[str, Callable[..., Any]]:
    """The loops as machine code, from disk where it is already there."""
    import numba

    compiler: Any = numba  # which has no type stubs
    signatures = _signatures(compiler.types)
    named = {name: (getattr(loops, name), signatures[name]) for name in NAMES}
    return compile_loops(named, "the counting loops")


def _signatures(types: Any) -> dict[str, list[Any]]:
    """Types by loop: arrays that it reads (`ids`), arrays that it may write, numbers."""

    def array(dtype: Any, written: bool) -> Any:
        return types.Array(dtype, 1, "C", readonly=not written)

    number, ids = types.int64, array(types.int64, False)
    long, word, byte = (array(t, True) for t in (types.int64, types.uint32, types.uint8))
    return {
        "count_rows": [number(ids, word), number(ids, long)],
        "take_counts": [
            number(word, word, long, long),
            number(word, long, long, long),
            number(long, long, long, long),
        ],
        "offer": [types.UniTuple(number, 2)(ids, ids, long, long, number, number)],
        "mark": [number(ids, byte)],
        "observe": [number(ids, byte)],
    }
