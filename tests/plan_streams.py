"""Random streams of rows for the planner, by rank and step, with a layout and settings that fit;
its compiled loops, and the same as Python runs them, where NumPy checks every index."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from simulator import PlannerSettings

import distcache.layout
from distcache.data import batch
from distcache.layout import RowLayout, TableSpec
from distcache.planner import loops, request_loops
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.planner.victims import PINNED, POLICIES, RESIDENT, TAILS, Policy


def make_layout(rows: int, world: int, cuts: Sequence[int] = ()) -> RowLayout:
    """One table, or one from each of `cuts` on."""
    sizes = np.diff([0, *sorted(cuts), rows]).tolist()
    tables = [TableSpec(f"t{at}", size, 4, (f"f{at}",)) for at, size in enumerate(sizes)]
    return RowLayout(tables, world)


def layouts(rows: int, world: int) -> st.SearchStrategy[RowLayout]:
    """So many rows of one table, or with small tables before or behind it."""
    inside = st.sampled_from([1, 2, 3, rows - 2, rows - 1]).filter(lambda cut: 0 < cut < rows)
    cuts = st.sets(inside, max_size=3) if rows > 1 else st.just(())
    return cuts.map(lambda of: make_layout(rows, world, of))


@st.composite
def policies(draw: st.DrawFn, rows: int) -> tuple:
    """A policy, and popularity classes of so many rows with pins among them, where it takes them.

    Half of the time `lookahead` with the tail `lru`, most often with nothing else.
    """
    plain = draw(st.booleans())
    name = "lookahead" if plain else draw(st.sampled_from(POLICIES))
    tail = "lru" if plain or name != "lookahead" else draw(st.sampled_from(TAILS))
    half_life = draw(st.sampled_from([None, 1.0, 2.5, 40.0, 1e9]))
    policy = Policy(name, tail, half_life, draw(st.sampled_from(RESIDENT)))
    if not policy.needs_popularity and draw(st.sampled_from([True, True, False])):
        return policy, None
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    classes = rng.integers(0, draw(st.sampled_from([1, 4, PINNED])), rows).astype(np.uint8)
    pinned = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    classes[rng.random(rows) < pinned] = PINNED
    return policy, classes


@st.composite
def steps_of(draw: st.DrawFn, world: int, rows: int, longest: int, most: int) -> tuple:
    """Steps of at most `most` ids a rank, few of them or skewed at times, and their generator."""
    steps, most = draw(st.integers(1, longest)), draw(st.integers(0, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from([1.0, 3.0]))
    stream = [
        [(rng.random(rng.integers(0, most + 1)) ** skew * rows).astype(np.int64)
         for _ in range(world)]
        for _ in range(steps)
    ]  # fmt: skip
    return stream, rng


@st.composite
def streams(draw: st.DrawFn, longest: int = 14) -> tuple:
    """Steps by rank, at most `longest`, with a layout and settings whose slots hold every step."""
    world, rows = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 60))
    stream, _ = draw(steps_of(world, rows, longest, 12))
    layout, shape = draw(layouts(rows, world)), draw(shelvings())
    need = most_rows(stream, layout, layout.local, np.arange(rows), *shape)
    slots = world * (need + draw(st.integers(0, 12)))
    policy, popularity = draw(policies(rows))
    ahead, prefetch = draw(st.integers(0, 16)), draw(st.integers(0, 6))
    return (
        stream,
        layout,
        PlannerSettings(
            slots, ahead, prefetch, policy, popularity, shelves=shape[0], bits=shape[1]
        ),
    )


def shelvings() -> st.SearchStrategy[tuple[int, int]]:
    """How many shelves and parts a home has, as powers of two."""
    return st.sampled_from([(0, 0), (0, 0), (1, 0), (1, 1), (2, 1), (2, 2)])


def shelves_of(local: np.ndarray, bits: int) -> np.ndarray:
    """The shelf of each local row of a home with 2^`bits`."""
    return np.array([request_loops.shelf_of(row, bits) for row in local.tolist()], np.int64)


def most_rows(
    stream: list,
    layout: RowLayout,
    local: Callable[[np.ndarray], np.ndarray],
    region: np.ndarray,
    shelves: int,
    bits: int,
) -> int:
    """The fewest slots of a home, of 2^`shelves` shelves in 2^`bits` parts, in which the rows of
    `region` that any step names find room; `local`: their local numbers."""
    most = 1
    for step in stream:
        rows = np.intersect1d(np.concatenate(step), region)
        part = shelves_of(local(rows), shelves) >> (shelves - bits)
        where = (layout.home(rows) << bits) + part
        most = max(most, int(np.bincount(where, minlength=1).max()))
    return most << bits


@st.composite
def sharded_streams(draw: st.DrawFn, longest: int = 12) -> tuple:
    """Streams as those of `streams`, whose settings shard some rows or all; slots of either region
    hold every step, often just so."""
    world = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 40))
    stream, rng = draw(steps_of(world, rows, longest, 10))
    layout = draw(layouts(rows, world))
    share = draw(st.sampled_from([0.0, 0.0, 0.2, 0.7, 1.0]))
    hot = np.flatnonzero(rng.random(rows) < share)
    tail = np.setdiff1d(np.arange(rows), hot)
    spare, shape = [draw(st.integers(0, most)) for most in (4, 8)], draw(shelvings())
    among = ReplicatedRows(layout, hot)
    need = most_rows(stream, layout, among.local, hot, *shape)
    replicated = world * (need + spare[0]) if len(hot) else 0
    policy, popularity = draw(policies(rows))
    config = PlannerSettings(
        slots=replicated + most_rows(stream, layout, layout.local, tail, *shape) + spare[1],
        lookahead=draw(st.integers(0, 8)),
        prefetch=draw(st.integers(0, 5)),
        policy=policy,
        popularity=popularity,
        hot=hot,
        replicated=replicated,
        early=draw(st.sampled_from([True, True, True, False])),
        shelves=shape[0],
        bits=shape[1],
    )
    return stream, layout, config


COMPILED, PYTHON = BODIES = ("compiled", "python")

LOOPS = [
    (module, name)
    for module in (batch, distcache.layout, loops, request_loops)
    for name, value in vars(module).items()
    if hasattr(value, "py_func")
]
NAMES = [f"{module.__name__.rpartition('.')[2]}.{name}" for module, name in LOOPS]
"""The names of the loops, behind that of their file."""


@contextlib.contextmanager
def using(body: str) -> Iterator[None]:
    """The loops by one body while open."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        for module, name in LOOPS if body == PYTHON else ():
            patch.setattr(module, name, getattr(module, name).py_func)
        yield
