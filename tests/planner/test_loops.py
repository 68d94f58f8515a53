"""The planner's loops against plain definitions, compiled and as Python runs them; what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import BODIES, NAMES, make_layout, using
from policy_reference import counted

from distcache.errors import PlanError
from distcache.planner import loops
from distcache.planner.home import HomePlanner, distinct_rows
from distcache.planner.shard import HotRows, hashed_rows, make_request, occurrences
from distcache.planner.victims import ByCount


def by_all(call, *arguments, written: int | None = None) -> object:
    """`call(*arguments)` by every body: one result for all, or the error's text.

    `written`: the argument that it may change, of which each body gets a copy.
    """
    results = []
    for body in BODIES:
        given_ = list(arguments)
        if written is not None:
            given_[written] = arguments[written].copy()
        with using(body):
            try:
                result = call(*given_)
            except PlanError as error:
                result = str(error)
        results.append((result, *([] if written is None else [given_[written]])))
    for other in results[1:]:
        np.testing.assert_equal(other, results[0])
    return results[0][0]


ids = st.lists(st.integers(0, 40), max_size=120)
kinds = st.sampled_from(["as drawn", "all equal", "distinct"])


def as_rows(values: list[int], kind: str) -> np.ndarray:
    """The ids as drawn, or one id as often, or as many different ones."""
    if kind == "all equal":
        values = values[:1] * len(values)
    rows = np.array(values, np.int64)
    return rows if kind != "distinct" else np.arange(len(rows))[::-1].copy()


@examples(150)
@given(ids, kinds, st.integers(1, 130), st.integers(0, 5), st.sampled_from([1, 3, 2**33, 2**56]))
def test_distinct_rows(values: list[int], kind: str, size: int, step: int, stride: int) -> None:
    rows = as_rows(values, kind)
    distinct, labels = by_all(hashed_rows, rows * stride)
    assert distinct.tolist() == [stride * row for row in dict.fromkeys(rows.tolist())]
    assert (distinct[labels] == rows * stride).all()
    position = np.random.default_rng(size).integers(-1, step, size, dtype=np.int32)
    result = by_all(distinct_rows, rows, position, step, written=1)
    if len(rows) and rows.max() >= size:
        bad = int(np.argmax(rows >= size))
        assert result == (
            f"step {step}: id {bad} is row {rows[bad]} of a home that has {size}: "
            "ids must lie within their tables"
        )
        return
    known, previous, again = result
    assert (known.astype(np.int64) * stride == distinct).all() and (again == labels).all()
    assert (previous == position[known]).all()


def test_an_id_of_no_row_is_told() -> None:
    canonical = np.array([1, 2], np.int32)
    told = by_all(occurrences, canonical, canonical[:0], 2)
    assert told == "id 1 names none of the 2 rows of its step"


@examples(200)
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
    if len(hot) > 1:
        assert (found >= 0).any() and (found < 0).any()


@examples(150)
@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=40),
    st.integers(0, 2**30),
    st.sampled_from([0, 1, 2**20 + 7, 2**32 // 9, 2**31, 2**32]),
    st.integers(0, 2**32 - 1),
)
def test_counts(levels: list[int], step: int, rate: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(levels)).astype(np.int32)
    names = np.arange(1, len(levels) + 1, dtype=np.int32)[: seed % 2 * len(levels)]
    back = (step * rng.random(len(levels)) ** rng.choice([1, 9])).astype(np.int32)
    ranking = ByCount(len(levels), 1, 5.0)

    def count(counts: np.ndarray) -> np.ndarray:
        tables = ranking._values, ranking._factors
        loops.count_uses(rows, names, step - back - 1, step, rate, *tables, counts)
        return counts

    counts = np.array(levels, np.uint8)
    result = by_all(count, counts, written=0)
    expected = [counted(levels[r], int(r) + seed % 2, step, min(int(b) + 1, 2**30) * rate)
                for r, b in zip(rows, back, strict=True)]  # fmt: skip
    assert result[rows].tolist() == expected


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
            occurrences(decision.replies[0], decision.replies[0][:0], len(decision.slots))
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("world", [1, 2])
def test_memory_beside_the_index_grows_with_the_batch_alone(world: int) -> None:
    few, many = (peak_bytes(rows, 2000, world) for rows in (50_000, 3_000_000))
    larger = peak_bytes(3_000_000, 8000, world)
    assert many < 1.1 * few + 4096
    assert larger < 6 * many


PLAN = """
import sys, numpy as np
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner
home = HomePlanner(RowLayout([TableSpec("t", 9, 4, ("f",))], 1), 0, 3, 1)
home.ingest(0, "train", [np.array([7, 2, 7])])
sys.stdout.write(str(home.plan().fetch_rows.tolist()))
"""


def kept_by(program: str, **environment: str) -> list[str]:
    """The machine code that a fresh interpreter keeps, which runs `program`, then plans a step."""
    done = subprocess.run(
        [sys.executable, "-c", program + PLAN],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[7, 2]", "")
    kept = Path(environment.get("NUMBA_CACHE_DIR", os.devnull)).rglob("*.nbc")
    return sorted(file.name.split("-")[0] for file in kept)


def test_the_package_alone_brings_no_numba() -> None:
    kept_by("import sys, distcache\nassert 'numba' not in sys.modules\n")


@pytest.mark.parametrize(
    "broken",
    [
        "caching.CacheImpl._locator_classes = []",
        "caching.IndexDataCacheFile.save = lambda *a: (_ for _ in ()).throw(OSError('full'))",
        "",
    ],
)
def test_machine_code_is_kept_where_numba_is_told_if_it_can_be(broken: str, tmp_path) -> None:
    kept = kept_by(f"from numba.core import caching\n{broken}\n", NUMBA_CACHE_DIR=str(tmp_path))
    assert kept == ([] if broken else sorted(f"loops.{name}" for name in NAMES))
