"""Classes counted from a trace, and how many rows a static policy may pin."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.planner.victims import PINNED, Policy
from distcache.replay import Case, pinned_rows, popularity_of, replay
from distcache.trace import Trace, record_ids


@pytest.fixture(scope="module", params=[1, 2])
def trace(request: pytest.FixtureRequest) -> Trace:
    rng = np.random.default_rng(0)
    stream = [(rng.random(60) ** 4 * 500).astype(np.int64) for _ in range(40)]
    return record_ids(stream, 520, worlds=(request.param,))


def case_of(name: str, trace: Trace, slots: int = 120, prefetch: int = 1) -> Case:
    (world,) = trace.homes
    return Case(Policy(name), (slots,), 0, prefetch, world)


def test_classes_are_counts_and_pins_the_hottest(trace: Trace) -> None:
    rows, counts = trace.row_counts()
    dense = np.zeros(520, np.int64)
    dense[rows] = counts
    popularity = popularity_of([trace])
    assert popularity(case_of("lru", trace), 0) is None
    plain = popularity(case_of("frequency", trace), 0)
    assert plain is not None and plain.dtype == np.uint8 and plain.shape == (520,)
    seen = dense > 0
    assert (plain[~seen] == 0).all()
    assert plain[seen].tolist() == (1 + np.rint(8 * np.log2(dense[seen]))).tolist()
    pinned = popularity(case_of("static", trace), 0)
    assert pinned is not None
    hot = pinned == PINNED
    assert (pinned[~hot] == plain[~hot]).all() and hot.any()
    assert dense[hot].min() >= dense[~hot].max()


def room_needed(trace: Trace, hot: set[int], home: int, steps: int) -> int:
    """Pinned rows of a home, and the most others that any so many steps in a row need."""
    (world,) = trace.homes
    recorded = trace.homes[world][home]
    cold = []
    for step in range(recorded.steps):
        span = slice(recorded.starts[step], recorded.starts[step + 1])
        named = recorded.names[recorded.numbers[span]].tolist()
        cold.append(sum(row not in hot for row in named))
    most = max(sum(cold[step : step + steps]) for step in range(recorded.steps))
    return sum(row in hot for row in recorded.names.tolist()) + most


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_pins_leave_room_for_the_other_rows(trace: Trace, prefetch: int) -> None:
    case = case_of("static", trace, 160, prefetch)
    rows, counts = trace.row_counts()
    hottest = rows[np.argsort(-counts, kind="stable")]
    count = pinned_rows(trace, hottest, case)
    slots = case.home_slots[0]

    def most(hot: int) -> int:
        named = set(hottest[:hot].tolist())
        return max(room_needed(trace, named, home, prefetch + 1) for home in range(case.world_size))

    assert count == 0 or most(count) <= slots
    assert count == len(hottest) or most(count + 1) > slots
    (outcome,) = replay(trace, [case], popularity_of([trace]))
    assert outcome.refused is None
    assert count == 0 or outcome.tight_steps == 0
    largest = max(home.distinct.max() for homes in trace.homes.values() for home in homes)
    too_small = case_of("static", trace, int(largest) * case.world_size)
    assert pinned_rows(trace, rows, too_small) == 0
    assert pinned_rows(trace, rows, case_of("static", trace, 2000)) == len(rows)
