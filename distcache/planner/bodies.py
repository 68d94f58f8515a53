"""Which bodies the planner's loops have: compiled by Numba, or their NumPy twins. Same results.

$DISTCACHE_PLANNER is `compiled`, `numpy` or unset: compiled wherever Numba can. Compiling takes
about a second, once per installation: machine code is kept beside the source, or in the user's
cache folder, or where $NUMBA_CACHE_DIR says, and where none can be written each process compiles
for itself. It happens when the first planner is made, never while one plans; before that, nothing
imports Numba.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from distcache.errors import ConfigError
from distcache.planner import arrays, loops, region_loops
from distcache.planner.compiling import compile_loops

log = logging.getLogger(__name__)

SETTING = "DISTCACHE_PLANNER"
COMPILED, NUMPY = "compiled", "numpy"


@dataclass(frozen=True)
class Bodies:
    """The functions of `loops` and `region_loops`, by one body: `compiled`, `numpy` or a test's."""

    body: str
    name_rows: Callable[..., int]
    find_rows: Callable[..., int]
    group: Callable[..., int]
    want: Callable[..., int]
    look_up: Callable[..., int]
    fill: Callable[..., int]
    idle: Callable[..., int]
    live: Callable[..., tuple[int, int]]
    count_uses: Callable[..., None]
    order_ids: Callable[..., int]
    find_sorted: Callable[..., int]
    divide: Callable[..., int]


NAMES = tuple(field.name for field in fields(Bodies) if field.name != "body")
"""The names of the loops."""

PLAIN: dict[str, Callable[..., Any]] = {
    name: vars(loops)[name] if name in vars(loops) else vars(region_loops)[name] for name in NAMES
}
"""The loops as plain Python."""

_chosen: Bodies | None = None
_made: dict[str, Bodies] = {}


def bodies() -> Bodies:
    """The bodies in use; the first call chooses, and compiles if need be.

    Raises ConfigError if $DISTCACHE_PLANNER asks for what is not there.
    """
    global _chosen
    if _chosen is None:
        _chosen = _choose(os.environ.get(SETTING, ""))
    return _chosen


@contextlib.contextmanager
def using(choice: Bodies | str) -> Iterator[Bodies]:
    """These bodies, or those called `compiled` or `numpy`, in this process while open."""
    global _chosen
    before = _chosen
    _chosen = make(choice) if isinstance(choice, str) else choice
    try:
        yield _chosen
    finally:
        _chosen = before


def make(body: str) -> Bodies:
    """The bodies called `body`. Raises ConfigError for one that is unknown or not there."""
    if body not in (COMPILED, NUMPY):
        raise ConfigError(f"${SETTING}={body} is not {COMPILED} or {NUMPY}")
    if body not in _made:
        try:
            made = _compiled() if body == COMPILED else vars(arrays)
        except Exception as error:  # Numba's own range from ImportError to its internal errors
            raise ConfigError(
                f"${SETTING}={COMPILED}: Numba does not compile the planner's loops here "
                f"({_first_line(error)}); install what requirements/lock.txt names, or set "
                f"{SETTING}={NUMPY} for the same plans at less speed"
            ) from error
        _made[body] = Bodies(body, **{name: made[name] for name in NAMES})
    return _made[body]


def _choose(setting: str) -> Bodies:
    if setting:
        return make(setting)
    try:
        return make(COMPILED)
    except ConfigError as error:
        log.warning("plans are made in NumPy, at less speed: %s", _first_line(error.__cause__))
        return make(NUMPY)


def _compiled() -> dict[str, Callable[..., Any]]:
    """The loops as machine code, from disk where it is already there."""
    started = time.perf_counter()
    import numba

    compiler: Any = numba  # which has no type stubs
    if compiler.config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    signatures = _signatures(compiler.types)
    named = {name: (PLAIN[name], [signatures[name]]) for name in NAMES}
    made = compile_loops(named, "the planner's loops")
    known = all(sum(loop.stats.cache_hits.values()) for loop in made.values())
    done = "loaded from disk" if known else "compiled"
    level = logging.DEBUG if known else logging.INFO
    log.log(level, "planner: loops %s in %.2f s", done, time.perf_counter() - started)
    return made


def _signatures(types: Any) -> dict[str, Any]:
    """Types by loop: arrays that it reads (`in`), arrays that it may write (`out`), numbers."""

    def array(dtype: Any, written: bool) -> Any:
        return types.Array(dtype, 1, "C", readonly=not written)

    i4, i8 = types.int32, types.int64
    in4, in8, out4, out8 = array(i4, False), array(i8, False), array(i4, True), array(i8, True)
    out1 = array(types.uint8, True)
    return {
        "name_rows": i8(in8, out4, i8, out4, out4, out4),
        "find_rows": i8(in8, out4, out8, out4),
        "group": i8(in4, i8, out4, out4),
        "want": i8(in4, in4, out4, i8, out4),
        "look_up": i8(in4, in4, out4, out4, i8, out4, out4),
        "fill": i8(in4, in4, in4, out4, out4, out4, out4, out4),
        "idle": i8(in4, in4, out4),
        "live": types.UniTuple(i8, 2)(in4, in4, in4, in4, i8, out4),
        "count_uses": types.void(in4, in4, i8, i8, in8, in8, out1),
        "order_ids": i8(in4, in4, out8, out4, out8, out8, out8),
        "find_sorted": i8(in8, in8, in4, i8, out4),
        "divide": i8(in4, i8, in4, in4, in8, out8, out8, out8),
    }


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
