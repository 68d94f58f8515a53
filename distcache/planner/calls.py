"""The planner's loops as they are called: compiled or their NumPy twins, checked."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from distcache.errors import ConfigError, PlanError
from distcache.planner import arrays, loops
from distcache.planner import loops as region_loops
from distcache.planner.loops import compile_loops

# -----------------------------------------------------------------------------
# Which bodies the planner's loops have: compiled by Numba, or their NumPy twins. Same results.
#
# $DISTCACHE_PLANNER is `compiled`, `numpy` or unset: compiled wherever Numba can. Compiling takes
# about a second, once per installation: machine code is kept beside the source, or in the user's
# cache folder, or where $NUMBA_CACHE_DIR says, and where none can be written each process compiles
# for itself. It happens when the first planner is made, never while one plans; before that,
# nothing
# imports Numba.

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


# -----------------------------------------------------------------------------
# The loops as the planner calls them: results made, cut to length, and what is wrong raised.


def distinct_rows(
    local: np.ndarray, position: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(distinct [U], previous [U], labels [n])`, int32, of local rows (int64 `[n]`).

    `position` int32: the step that named each row last, -1 for none; it becomes `step` for these.
    Raises PlanError for a row outside it, and leaves it as it was.
    """
    local = np.ascontiguousarray(local, dtype=np.int64)
    distinct, previous, labels = (np.empty(len(local), np.int32) for _ in range(3))
    count = bodies().name_rows(local, position, step, distinct, previous, labels)
    if count < 0:
        raise PlanError(
            f"step {step}: id {-1 - count} is row {local[-1 - count]} of a home that has "
            f"{len(position)}: ids must lie within their tables"
        )
    return distinct[:count].copy(), previous[:count].copy(), labels


def hashed_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(distinct rows int64 [U], labels int32 [n])` of rows int64 `[n]`, whatever their range."""
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    table = np.full(1 << max(1, (2 * len(rows) - 1).bit_length()), -1, np.int32)
    distinct, labels = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    count = bodies().find_rows(rows, table, distinct, labels)
    return distinct[:count].copy(), labels


def grouped(keys: np.ndarray, low: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`(order [n], starts [groups + 1])`, int32: a stable sort of integer keys by value - low.

    Keys below `low` count as `low`. Raises PlanError for one of `low + groups` or more.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int32)
    order, starts = np.empty(len(keys), np.int32), np.empty(max(groups, 0) + 1, np.int32)
    bad = bodies().group(keys, low, order, starts)
    if bad < 0:
        raise PlanError(f"{keys[-1 - bad]} is not below {low + groups}: steps come in order")
    return order, starts


def divided(
    values: np.ndarray,
    bound: int,
    lengths: Sequence[int],
    items: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """`(above, others, counts)`: which items have a value above `bound`, and which have not; int64.

    The items, in pieces of `lengths`, are 0, 1, ... of these `values` (int32 `[n]`), or, with
    `items` = (index int32 `[n]`, of int32 `[U]`), `of[index]` of `values[index]`. `counts`: those
    above in each piece.
    """
    none = np.empty(0, np.int32)
    index, of = (none, none) if items is None or not len(items[1]) else items
    index, of = (np.ascontiguousarray(part, dtype=np.int32) for part in (index, of))
    ends = np.cumsum(lengths, dtype=np.int64)
    count = int(ends[-1]) if len(ends) else 0
    above, others = np.empty(count, np.int64), np.empty(count, np.int64)
    counts = np.empty(len(ends), np.int64)
    values = np.ascontiguousarray(values, dtype=np.int32)
    high = bodies().divide(values, bound, index, of, ends, above, others, counts)
    return above[:high].copy(), others[: count - high].copy(), counts.tolist()


@dataclass(frozen=True)
class Occurrences:
    """Where the ids of a batch occur; see the fields of `StepPlan`. int64, but for `starts` int32
    `[U + 1]`: how many ids have a smaller canonical index."""

    positions: np.ndarray
    order: np.ndarray
    touched: np.ndarray
    segments: np.ndarray
    starts: np.ndarray


def occurrences(labels: np.ndarray, lookup: np.ndarray | None, total: int) -> Occurrences:
    """Canonical indices of the ids, below `total`, and the ids sorted by them.

    `labels` int32 `[n]`: those indices, or indices into `lookup`, which holds them. Raises
    PlanError for one outside.
    """
    count = len(labels)
    labels = np.ascontiguousarray(labels, dtype=np.int32)
    if lookup is None:
        lookup = np.empty(0, np.int32)
    lookup = np.ascontiguousarray(lookup, dtype=np.int32)
    positions, order = np.empty(count, np.int64), np.empty(count, np.int64)
    touched, segments = np.empty(total, np.int64), np.empty(total + 1, np.int64)
    starts = np.empty(total + 2, np.int32)
    found = bodies().order_ids(labels, lookup, positions, starts, order, touched, segments)
    if found < 0:
        raise PlanError(f"id {-1 - found} names none of the {total} rows of its step")
    touched, segments = touched[:found].copy(), segments[: found + 1].copy()
    return Occurrences(positions, order, touched, segments, starts[: total + 1])
