"""The bodies of the planner's loops are equal bit for bit, and each is there when it should be."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_streams import BODIES, make_layout, sharded_streams, streams
from policy_reference import counted

from distcache.errors import ConfigError, PlanError
from distcache.planner import region_loops
from distcache.planner.assemble import make_request
from distcache.planner.bodies import NAMES, NUMPY, SETTING, Bodies, bodies, make, using
from distcache.planner.bodies import PLAIN as BY_NAME
from distcache.planner.calls import distinct_rows, divided, grouped, hashed_rows, occurrences
from distcache.planner.home import HomePlanner
from distcache.planner.policy import POLICIES, Policy
from distcache.planner.rankings import ByCount
from distcache.planner.regions import HotRows, in_tail
from distcache.planner.simulator import PlannerSettings, simulate

PLAIN = Bodies("python", **BY_NAME)
"""The loops as Python runs them, so that NumPy checks every index."""

ALL = (NUMPY, "compiled", PLAIN)


def equal(one: object, other: object) -> bool:
    """Whether two results are the same: arrays by dtype and value."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, tuple) and not hasattr(one, "_fields"):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__dict__"):
        return all(equal(value, vars(other)[name]) for name, value in vars(one).items())
    return one == other


def by_all(call, *arguments, written: int | None = None) -> object:
    """`call(*arguments)` by every body: one result for all, or the error's text.

    `written`: the argument that it may change, of which each body gets a copy.
    """
    results = []
    for body in ALL:
        given_ = list(arguments)
        if written is not None:
            given_[written] = arguments[written].copy()
        with using(body), np.errstate(over="ignore"):
            try:
                result = call(*given_)
            except PlanError as error:
                result = str(error)
        results.append((result, *([] if written is None else [given_[written]])))
    for other in results[1:]:
        assert equal(results[0], other)
    return results[0][0]


ids = st.lists(st.integers(0, 40), max_size=120)
kinds = st.sampled_from(["as drawn", "all equal", "distinct"])


def as_rows(values: list[int], kind: str) -> np.ndarray:
    """The ids as drawn, or one id as often, or as many different ones."""
    if kind == "all equal":
        values = values[:1] * len(values)
    rows = np.array(values, np.int64)
    return rows if kind != "distinct" else np.arange(len(rows))[::-1].copy()


@settings(max_examples=150, deadline=None)
@given(ids, kinds, st.integers(1, 130), st.integers(0, 5))
def test_distinct_rows(values: list[int], kind: str, size: int, step: int) -> None:
    rows = as_rows(values, kind)
    position = np.random.default_rng(size).integers(-1, step, size, dtype=np.int32)
    result = by_all(distinct_rows, rows, position, step, written=1)
    if len(rows) and rows.max() >= size:
        bad = int(np.argmax(rows >= size))
        assert result == (
            f"step {step}: id {bad} is row {rows[bad]} of a home that has {size}: "
            "ids must lie within their tables"
        )
        return
    distinct, previous, labels = result
    assert distinct.tolist() == list(dict.fromkeys(rows.tolist()))
    assert (distinct[labels] == rows).all() and (previous == position[distinct]).all()


@settings(max_examples=150, deadline=None)
@given(ids, kinds, st.sampled_from([1, 3, 2**20, 2**33 + 1, 2**56]))
def test_hashed_rows(values: list[int], kind: str, stride: int) -> None:
    rows = as_rows(values, kind) * stride
    distinct, labels = by_all(hashed_rows, rows)
    assert distinct.tolist() == list(dict.fromkeys(rows.tolist()))
    assert (distinct[labels] == rows).all()


@settings(max_examples=100, deadline=None)
@given(ids, kinds, st.integers(-1, 30), st.integers(1, 45))
def test_grouped(values: list[int], kind: str, low: int, groups: int) -> None:
    keys = as_rows(values, kind).astype(np.int32)
    result = by_all(grouped, keys, low, groups)
    if len(keys) and keys.max() >= low + groups:
        assert isinstance(result, str) and str(low + groups) in result
        return
    order, starts = result
    parts = np.split(order, starts[1:-1])
    place = np.maximum(keys - low, 0)
    assert [part.tolist() for part in parts] == [
        np.flatnonzero(place == g).tolist() for g in range(groups)
    ]


@settings(max_examples=150, deadline=None)
@given(ids, kinds, st.integers(0, 45), st.booleans())
def test_occurrences(values: list[int], kind: str, total: int, looked_up: bool) -> None:
    canonical = as_rows(values, kind)
    labels, lookup = canonical.astype(np.int32), None
    if looked_up:
        lookup, labels = (part.astype(np.int32) for part in np.unique(canonical, False, True))
    result = by_all(occurrences, labels, lookup, total)
    if len(canonical) and canonical.max() >= total:
        assert result == (
            f"id {int(np.argmax(canonical >= total))} names none of the {total} rows of its step"
        )
        return
    assert (result.positions == canonical).all()
    assert (result.order == np.argsort(canonical, kind="stable")).all()
    assert (result.touched == np.unique(canonical)).all()
    for row, low, high in zip(
        result.touched, result.segments[:-1], result.segments[1:], strict=True
    ):
        assert (canonical[result.order[low:high]] == row).all()
    assert (result.starts == [(canonical < k).sum() for k in range(total + 1)]).all()


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 90), max_size=60),
    st.sampled_from([0, 1, 7, 2**31]),
    st.sampled_from([1, 3, 1000, 2**33 + 1]),
    ids,
)
def test_hot_rows(hot: set[int], first: int, stride: int, values: list[int]) -> None:
    """Runs of neighbours and scattered rows, and rows below, between and beyond them."""
    known = first + stride * np.array(sorted(hot), np.int64)
    rows = np.concatenate([first + stride * np.array(values, np.int64), np.array(values, np.int64)])
    rows = np.concatenate([rows, known, known + 1, [0, first + 91 * stride, 2**62]])
    found = by_all(lambda asked: HotRows(known).find(asked), rows)
    place = {row: index for index, row in enumerate(known.tolist())}
    assert found.dtype == np.int32
    assert found.tolist() == [place.get(row, -1) for row in rows.tolist()]
    assert (in_tail(rows, HotRows(known)) == in_tail(rows, known)).all()
    if len(hot) > 1:
        assert (found >= 0).any() and (found < 0).any()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(-3, 12),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(0, 2**32 - 1),
)
def test_divided(lengths: list[int], bound: int, pool: int | None, seed: int) -> None:
    rng, count = np.random.default_rng(seed), sum(lengths)
    items, index = None, np.arange(count)
    values = rng.integers(-2, 11, count if pool is None else pool).astype(np.int32)
    of = np.arange(count)
    if pool is not None:
        index, of = rng.integers(0, pool, count), rng.permutation(pool).astype(np.int32)
        items = index.astype(np.int32), of
    above, others, counts = by_all(divided, values, bound, lengths, items)
    pieces = np.split(index, np.cumsum(lengths)[:-1]) if lengths else []
    high = [[i for i in piece if values[i] > bound] for piece in pieces]
    low = [i for piece in pieces for i in piece if values[i] <= bound]
    assert counts == [len(piece) for piece in high]
    assert above.tolist() == [of[i] for piece in high for i in piece]
    assert others.tolist() == [of[i] for i in low]
    assert above.dtype == others.dtype == np.int64


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=40),
    st.integers(0, 2**30),
    st.sampled_from([0, 1, 2**20 + 7, 2**32 // 9, 2**31, 2**32]),
    st.integers(0, 2**32 - 1),
)
def test_counts(levels: list[int], step: int, rate: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(levels)).astype(np.int32)
    back = (step * rng.random(len(levels)) ** rng.choice([1, 9])).astype(np.int32)
    ranking = ByCount(len(levels), 1, 5.0)

    def count(counts: np.ndarray) -> np.ndarray:
        tables = ranking._values, ranking._factors
        bodies().count_uses(rows, step - back - 1, step, rate, *tables, counts)
        return counts

    counts = np.array(levels, np.uint8)
    result = by_all(count, counts, written=0)
    expected = [counted(levels[r], int(r), step, min(int(b) + 1, 2**30) * rate)
                for r, b in zip(rows, back, strict=True)]  # fmt: skip
    assert result[rows].tolist() == expected


@pytest.mark.parametrize("rows", [70_000, 200_000])
def test_order_of_more_rows_than_one_digit_counts(rows: int) -> None:
    labels = np.random.default_rng(0).integers(0, rows, 30_000).astype(np.int32)
    result = by_all(occurrences, labels, None, rows)
    assert (result.order == np.argsort(labels, kind="stable")).all()


def plans_of(body: object, case: tuple) -> list:
    """All plans of a stream."""
    stream, layout, config = case
    with using(body), np.errstate(over="ignore"):
        return [plan for plans in simulate(layout, config, stream) for plan in plans]


def check_equal_plans(case: tuple) -> None:
    """Every body makes the same plans, field by field."""
    expected, *others = [plans_of(body, case) for body in ALL]
    for plans in others:
        assert len(plans) == len(expected)
        assert all(map(equal, plans, expected))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(streams())
def test_plans_of_random_streams(case: tuple) -> None:
    check_equal_plans(case)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sharded_streams())
def test_plans_of_random_sharded_streams(case: tuple) -> None:
    check_equal_plans(case)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(streams())
def test_plans_of_random_streams_campaign(case: tuple) -> None:
    check_equal_plans(case)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_plans_of_a_long_stream_in_a_tight_cache(world: int, name: str) -> None:
    rng = np.random.default_rng(world)
    stream = [
        [(rng.random(60) ** 3 * 4000).astype(np.int64) for _ in range(world)] for _ in range(80)
    ]
    largest = max(len(np.unique(np.concatenate(step))) for step in stream)
    classes = rng.integers(0, 250, 4000).astype(np.uint8)
    policy = Policy(name, "lfu" if name == "lookahead" else "lru", admission=world > 2)
    config = PlannerSettings(world * largest, 5, 1, policy, classes)
    check_equal_plans((stream, make_layout(4000, world), config))


def test_a_step_out_of_order_is_refused() -> None:
    for body in BODIES:
        with using(body):
            home = HomePlanner(make_layout(10, 1), 0, 5, 1)
            home.ingest(0, "train", [np.array([1, 2])])
            home.plan()
            with pytest.raises(PlanError, match="steps come in order"):
                home.ingest(0, "train", [np.array([2, 3])])


def peak_bytes(rows: int, count: int, world: int) -> int:
    """The most that planning one batch of `count` ids adds to a warm planner, bytes."""
    layout = make_layout(rows, world)
    home = HomePlanner(layout, 0, count, 1)
    assert home.index_bytes == 9 * layout.local_rows
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for step in range(4):
            ids = rng.integers(0, rows, count)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            request = make_request(layout, ids)
            asked = request.rows[0]
            home.ingest(step, "train", [asked] + [asked[:0]] * (world - 1))
            decision = home.plan()
            occurrences(decision.replies[0], None, len(decision.slots))
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world", [1, 2])
def test_memory_beside_the_index_grows_with_the_batch_alone(world: int, body: str) -> None:
    with using(body):
        few, many = (peak_bytes(rows, 2000, world) for rows in (50_000, 3_000_000))
        larger = peak_bytes(3_000_000, 8000, world)
    assert many < 1.1 * few + 4096
    assert larger < 6 * many


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter without $DISTCACHE_PLANNER, unless `environment` has it."""
    kept = {name: value for name, value in os.environ.items() if name != SETTING}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


PLAN = """
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner
import distcache.planner.bodies as bodies
assert "numba" not in sys.modules
HomePlanner(RowLayout([TableSpec("t", 9, 4, ("f",))], 1), 0, 3, 1)
sys.stdout.write(bodies.bodies().body)
sys.stdout.flush()
"""


def test_numba_is_imported_by_the_first_planner_alone() -> None:
    program = "import sys, distcache, distcache.trainer, distcache.embedding" + PLAN
    done = run_python(program + "assert 'numba' in sys.modules")
    assert (done.returncode, done.stdout) == (0, "compiled"), done.stderr
    done = run_python("import sys" + PLAN + "assert 'numba' not in sys.modules", **{SETTING: NUMPY})
    assert (done.returncode, done.stdout) == (0, NUMPY), done.stderr


@pytest.mark.parametrize(
    "hidden", ["sys.modules['numba'] = None", "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'"]
)
def test_without_numba_plans_are_made_in_numpy(hidden: str) -> None:
    program = f"import sys; {hidden}\n" + PLAN.replace('assert "numba" not in sys.modules', "")
    done = run_python(program)
    assert done.stdout == NUMPY and "at less speed" in done.stderr, done.stderr
    done = run_python(program, **{SETTING: "compiled"})
    assert done.returncode == 1
    assert f"${SETTING}=compiled: Numba does not compile" in done.stderr


@pytest.mark.parametrize(
    "broken",
    [
        "caching.CacheImpl._locator_classes = []",
        "caching.IndexDataCacheFile.save = lambda *a: (_ for _ in ()).throw(OSError('full'))",
    ],
)
def test_where_nothing_can_be_kept_the_loops_compile_all_the_same(broken: str, tmp_path) -> None:
    program = f"import sys\nfrom numba.core import caching\n{broken}\n"
    program += PLAN.replace('assert "numba" not in sys.modules', "")
    done = run_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "compiled", done.stderr
    assert not list(tmp_path.rglob("*.nbc"))


def test_machine_code_is_kept_where_numba_is_told(tmp_path) -> None:
    done = run_python("import sys" + PLAN, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "compiled", done.stderr
    kept = sorted(file.name.split("-")[0] for file in tmp_path.rglob("*.nbc"))
    files = {name: "region_loops" if name in vars(region_loops) else "loops" for name in NAMES}
    assert kept == sorted(f"{file}.{name}" for name, file in files.items())


def test_an_unknown_body_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"\${SETTING}=fast is not compiled or numpy"):
        make("fast")
