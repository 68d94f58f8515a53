"""MIN is minimal: against every possible choice on tiny traces, and against the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.planner.victims import Policy
from distcache.replay import Case, belady, replay
from distcache.trace import Trace, record_ids


@st.composite
def traces(draw: st.DrawFn, rows: int, steps: int, most: int) -> tuple[list[np.ndarray], Trace]:
    seed, skew = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([1.0, 2.5]))
    rng = np.random.default_rng(seed)
    stream = [
        (rng.random(rng.integers(1, most + 1)) ** skew * rows).astype(np.int64)
        for _ in range(draw(st.integers(1, steps)))
    ]
    return stream, record_ids(stream, rows)


def fewest(steps: Sequence[set[int]], slots: int) -> int:
    """The least rows fetched over all choices of what stays after each step."""
    costs = {frozenset[int](): 0}
    for named in steps:
        after: dict[frozenset[int], int] = {}
        for cached, cost in costs.items():
            spent = cost + len(named - cached)
            others = sorted(cached - named)
            kept = min(len(others), slots - len(named))
            for stays in combinations(others, kept):
                state = frozenset(named) | frozenset(stays)
                after[state] = min(after.get(state, spent), spent)
        costs = after
    return min(costs.values())


@examples(150)
@given(case=traces(rows=7, steps=9, most=5), spare=st.integers(0, 3))
def test_no_choice_fetches_fewer(case: tuple, spare: int) -> None:
    stream, trace = case
    home = trace.homes[1][0]
    slots = int(home.distinct.max()) + spare
    sets = [set(step.tolist()) for step in stream]
    assert belady(home, slots).fetched.sum() == fewest(sets, slots)


@examples(200)
@given(case=traces(rows=60, steps=25, most=20), spare=st.integers(0, 20))
def test_a_window_over_everything_is_the_optimum(case: tuple, spare: int) -> None:
    stream, trace = case
    home = trace.homes[1][0]
    slots = int(home.distinct.max()) + spare
    one = belady(home, slots)
    assert (one.fetched - one.evicted).cumsum().max() <= slots
    least, ahead, lru = replay(
        trace,
        [
            Case(None, (slots,)),
            Case(Policy(), (slots,), lookahead=len(stream), prefetch=0),
            Case(Policy("lru"), (slots,), prefetch=0),
        ],
    )
    assert ahead.fetched == least.fetched == one.fetched.sum()
    assert ahead.written_back == least.written_back
    assert lru.fetched >= least.fetched
    assert least.lookups_hit == one.hits.sum()


def test_known_example() -> None:
    # 3 slots; 0 and 1 come back soon, 2 late, 3 never: 3 and then 2 make room.
    steps = [[0, 1, 2], [3], [0, 1, 4], [0, 1], [2]]
    trace = record_ids([np.array(step) for step in steps])
    counts = belady(trace.homes[1][0], 3)
    assert counts.fetched.tolist() == [3, 1, 1, 0, 1]
    assert counts.evicted.tolist() == [0, 1, 1, 0, 1]
    assert counts.hits.tolist() == [0, 0, 2, 2, 0]


def test_every_home_has_an_optimum_of_its_own() -> None:
    rng = np.random.default_rng(0)
    stream = [(rng.random(40) ** 2 * 90).astype(np.int64) for _ in range(30)]
    trace = record_ids(stream, 90, worlds=(1, 3))
    one, three = replay(trace, [Case(None, (60,)), Case(None, (60,), world_size=3)])
    assert three.fetched >= one.fetched  # a third of the slots for each third of the rows
    parts = [belady(home, 20).fetched.sum() for home in trace.homes[3]]
    assert three.fetched == sum(parts)
    assert (three.ids, three.distinct) == (one.ids, one.distinct)
