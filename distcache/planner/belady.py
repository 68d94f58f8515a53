"""Belady's MIN over a whole trace: the fewest rows that any policy could fetch.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966, at the granularity of batches: all rows of a step are in the cache in that
step, and what stays between steps are those whose next use is nearest. No policy that must have
a step's rows resident, whatever it knows, fetches fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from distcache.planner.bodies import COMPILED, NUMPY, bodies
from distcache.planner.compiling import compile_loops
from distcache.planner.trace import HomeTrace

_FETCHED, _HITS, _EVICTED = 0, 1, 2
_COUNTS = 3


@dataclass(frozen=True)
class MinCounts:
    """What MIN does at one home in each step; int64 `[steps]`: rows `fetched`, ids that find their
    row cached (`hits`), and rows `evicted`, as late as can be: in the step that needs their
    room."""

    fetched: np.ndarray
    hits: np.ndarray
    evicted: np.ndarray


def belady(home: HomeTrace, slots: int, body: str | None = None) -> MinCounts:
    """MIN for `slots` slots; every step of `home` must fit. `body`: `compiled`, `numpy`, or that
    of the planner's loops (None).

    Rows with the same next use leave in the reverse of the order in which they were used last; any
    other choice among them fetches as many. Time O(n) for n distinct rows of all steps, and a scan
    over steps for the farthest; memory 4 n bytes, 9 for each row and 4 for each step. The NumPy
    twin sorts the cache in every step.
    """
    counts = np.zeros((home.steps, _COUNTS), dtype=np.int64)
    args = (home.starts, home.numbers, home.counts, len(home.names), slots)
    if (bodies().body if body is None else body) == NUMPY:
        belady_arrays(*args, counts)
    else:
        next_use = np.empty(len(home.numbers), np.int32)
        seen = np.full(len(home.names), home.steps, np.int32)
        _compiled()[0](home.starts, home.numbers, seen, next_use)
        link, cached = np.full(len(home.names), -1, np.int32), np.zeros(len(home.names), np.uint8)
        heads = np.full(home.steps + 1, -1, np.int32)
        _compiled()[1](*args[:3], next_use, slots, heads, link, cached, counts)
    return MinCounts(*np.ascontiguousarray(counts.T))


def name_next(
    starts: np.ndarray, numbers: np.ndarray, seen: np.ndarray, next_use: np.ndarray
) -> None:
    """Write to `next_use` the step that uses each entry of `numbers` next, the number of steps for
    none. `seen` int32 `[D]`, all the number of steps, is scratch."""
    for back in range(len(starts) - 1):
        step = len(starts) - 2 - back
        for i in range(starts[step], starts[step + 1]):
            row = numbers[i]
            next_use[i] = seen[row]
            seen[row] = step


def run_min(
    starts: np.ndarray,
    numbers: np.ndarray,
    counts: np.ndarray,
    next_use: np.ndarray,
    slots: int,
    heads: np.ndarray,
    link: np.ndarray,
    cached: np.ndarray,
    out: np.ndarray,
) -> None:
    """The loop of MIN: cached rows lie in one list for each next use.

    `heads` int32 `[steps + 1]` and `link` int32 `[D]`: first row of each list and the one after
    each row, -1 for none; `cached` uint8 `[D]`. A step's hits are the whole list of that step.
    Writes `out` int64 `[steps, 3]`: rows fetched, ids that hit, rows evicted.
    """
    steps = len(starts) - 1
    size = 0  # rows cached
    far = 0  # no list beyond it has a row
    for step in range(steps):
        low, high = starts[step], starts[step + 1]
        fetched = hits = evicted = 0
        for i in range(low, high):
            if cached[numbers[i]]:
                hits += counts[i]
            else:
                fetched += 1
        heads[step] = -1
        size += fetched
        far = max(far, step)
        while size > slots:
            while heads[far] < 0:
                far -= 1
            row = heads[far]
            heads[far] = link[row]
            cached[row] = 0
            size -= 1
            evicted += 1
        for i in range(low, high):
            row, use = numbers[i], next_use[i]
            link[row] = heads[use]
            heads[use] = row
            cached[row] = 1
            far = max(far, use)
        out[step, 0] = fetched
        out[step, 1] = hits
        out[step, 2] = evicted


def belady_arrays(
    starts: np.ndarray,
    numbers: np.ndarray,
    counts: np.ndarray,
    rows: int,
    slots: int,
    out: np.ndarray,
) -> None:
    """The same in NumPy, as it is defined: in every step the farthest next uses leave.

    `next_use` of a row and the place of its last use rank it; both are looked up, not linked.
    """
    steps = len(starts) - 1
    next_use = np.full(rows, steps, np.int64)
    used_at = np.full(rows, -1, np.int64)  # index of the last use in `numbers`, -1: not cached
    uses = np.repeat(np.arange(steps), np.diff(starts))
    order = np.lexsort((uses, numbers))
    following = np.full(len(numbers), steps, np.int64)
    same = numbers[order[1:]] == numbers[order[:-1]]
    following[order[:-1][same]] = uses[order[1:][same]]
    for step in range(steps):
        here = np.arange(starts[step], starts[step + 1])
        named = numbers[here]
        hit = used_at[named] >= 0
        out[step, _FETCHED] = np.count_nonzero(~hit)
        out[step, _HITS] = counts[here][hit].sum()
        used_at[named] = -1
        others = np.flatnonzero(used_at >= 0)
        leave = max(0, len(others) + len(named) - slots)
        last = np.lexsort((-used_at[others], -next_use[others]))[:leave]
        used_at[others[last]] = -1
        out[step, _EVICTED] = leave
        used_at[named], next_use[named] = here, following[here]


@cache
def _compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    """`name_next` and `run_min` as machine code, kept where the planner's loops are."""
    import numba

    compiler: Any = numba
    types = compiler.types
    i4, i8, u1 = types.int32, types.int64, types.uint8

    def array(dtype: Any, ndim: int = 1, readonly: bool = False) -> Any:
        return types.Array(dtype, ndim, "C", readonly=readonly)

    signatures = {
        name_next: types.void(array(i8), array(i4), array(i4), array(i4)),
        run_min: types.void(
            array(i8), array(i4), array(i4), array(i4), i8, array(i4), array(i4), array(u1),
            array(i8, 2),
        ),
    }  # fmt: skip
    named = {loop.__name__: (loop, [signature]) for loop, signature in signatures.items()}
    made = compile_loops(named, "MIN")
    return made[name_next.__name__], made[run_min.__name__]


BODIES = (COMPILED, NUMPY)
"""What `body` may be."""
