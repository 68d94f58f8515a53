"""The planner's loops against plain definitions, compiled and as Python runs them; what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import BODIES, NAMES, PYTHON, make_layout, shelvings, using
from policy_reference import counted

from distcache.errors import PlanError, StepTooLargeError
from distcache.layout import RowLayout, TableSpec
from distcache.planner import loops, request_loops
from distcache.planner.home import HomeDecision, HomePlanner, Parts
from distcache.planner.rank import HomePart, RankPlanner, one_piece
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.planner.threads import Threads
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


def distinct_rows(
    ids: np.ndarray, pieces: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct rows of ids by first occurrence within each table, the place of each id's among
    them, and how often each occurs."""
    pieces = one_piece(len(ids)) if pieces is None else pieces
    size = 1 << (2 * max(int(pieces[4].max()), 1) - 1).bit_length()
    rows, (labels, occurs) = np.empty(len(ids), np.int64), np.empty((2, len(ids)), np.int32)
    room = np.empty(size, np.int32), np.empty(size, np.int64), rows, labels, occurs
    count = request_loops.name_rows(ids, pieces, 0, pieces.shape[1], *room)
    return rows[:count], labels, occurs[:count]


ids = st.lists(st.integers(0, 40), max_size=120)
kinds = st.sampled_from(["as drawn", "all equal", "distinct"])


def as_rows(values: list[int], kind: str) -> np.ndarray:
    """The ids as drawn, or one id as often, or as many different ones."""
    if kind == "all equal":
        values = values[:1] * len(values)
    rows = np.array(values, np.int64)
    return rows if kind != "distinct" else np.arange(len(rows))[::-1].copy()


@examples(150)
@given(ids, kinds, st.sampled_from([1, 3, 2**33, 2**48]))
def test_distinct_rows(values: list[int], kind: str, stride: int) -> None:
    rows = as_rows(values, kind)
    distinct, labels, occurs = by_all(distinct_rows, rows * stride)
    assert distinct.tolist() == [stride * row for row in dict.fromkeys(rows.tolist())]
    assert (distinct[labels] == rows * stride).all()
    assert occurs.tolist() == np.bincount(labels, minlength=len(distinct)).tolist()


@examples(150)
@given(ids, kinds, st.sampled_from([1, 2**33]), st.booleans())
def test_distinct_rows_by_table(values: list[int], kind: str, stride: int, late: bool) -> None:
    """Features 0 and 2 share a table, which comes before that of feature 1, or after it."""
    rows = as_rows(values, kind)
    features = [rows * stride, rows[::2] * stride, rows[::-1] * stride]
    edges, ids = np.cumsum([0, *map(len, features)]), np.concatenate(features)
    order, first = np.array([1, 0, 2] if late else [0, 2, 1]), np.array([7, 2**40, 7])
    many, shared = 1 + stride * int(rows.max(initial=0)), 2 * len(rows)
    rooms = [len(rows[::2]), shared, 0] if late else [shared, 0, len(rows[::2])]
    pieces = np.stack([edges[order], edges[order + 1], first[order], [many] * 3, rooms])
    distinct, labels, occurs = by_all(distinct_rows, ids, pieces)
    named = np.concatenate([of + start for of, start in zip(features, first, strict=True)])
    by_table = np.concatenate([features[at] + first[at] for at in order])
    assert distinct.tolist() == list(dict.fromkeys(by_table.tolist()))
    assert (distinct[labels] == named).all()
    assert occurs.tolist() == np.bincount(labels, minlength=len(distinct)).tolist()
    threads = Threads(2)
    rank = RankPlanner(make_layout(1, 1), threads=threads)
    spans = rank.request(ids, pieces).spans
    threads.close()
    own = [rank._room.rows[slice(*of[2:])] for of in rank._room.spans[: len(spans)].tolist()]
    assert [row for part in own for row in part.tolist()] == distinct.tolist()
    assert [span[:2] for span in spans] == ([(0, 1), (1, 3)] if late else [(0, 2), (2, 3)])[
        : 2 * len(rows)
    ]


@examples(150)
@given(ids, st.integers(1, 130), shelvings(), st.integers(1, 3))
def test_a_home_names_rows_by_shelf_then_by_first_occurrence_over_the_ranks(
    values: list[int], size: int, shape: tuple[int, int], world: int
) -> None:
    rows, parts = np.array(values, np.int64) % size, Parts(size << shape[1], size, *shape)
    last = dict.fromkeys(range(size), -1)
    home = HomePlanner(make_layout(size, 1), 0, parts.slots, 1, parts=parts)
    for step in range(3):
        by_rank = np.array_split(np.roll(rows, 7 * step)[: len(rows) - 9 * step], world)
        asked = [parts.divide(own) for own in by_rank]
        counts = np.stack([np.diff(starts) for _, starts, _ in asked])
        home.ingest(step, "train", [own for own, _, _ in asked], counts)
        decision = home.plan()
        found = list(dict.fromkeys(np.concatenate(by_rank).tolist()))
        found.sort(key=lambda row: request_loops.shelf_of(row, shape[0]))
        assert decision.previous.tolist() == [last[row] for row in found]
        assert decision.fetch_rows.tolist() == [row for row in found if last[row] < 0]
        for own, reply, (_, _, places) in zip(by_rank, decision.replies, asked, strict=True):
            assert [found[at] for at in reply[places]] == own.tolist()
        last |= dict.fromkeys(found, step)


def test_requests_that_wait_keep_their_room() -> None:
    """The second has fewer ids, and more of them of one table."""
    layout = RowLayout([TableSpec(name, 900, 4, (name,)) for name in "ab"], 1)
    rank, home = RankPlanner(layout), HomePlanner(layout, 0, 1800, 1)
    sizes = [(300, 300), (520, 10)]
    with using(PYTHON):  # which looks at every index
        asked = []
        for step, (first, second) in enumerate(sizes):
            ids = np.concatenate([np.arange(first), np.arange(second)])
            ends = first, first + second
            pieces = np.array([[0, ends[0]], [*ends], [0, 900], [900, 900], [first, second]])
            asked.append((ids + 900 * (np.arange(len(ids)) >= first), rank.request(ids, pieces)))
            home.ingest(step, "train", asked[-1][1].replicated.rows)
        for rows, request in asked:
            own = home.plan()
            part = HomePart(own.slots, own.replies[0], len(own.fetch))
            plan = rank.assemble(request, [part], own, -1)
            found = np.empty(len(own.slots), np.int64)
            found[plan.positions.numpy()] = rows
            assert found[own.fetch].tolist() == own.fetch_rows.tolist()


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=60))
def test_slots_that_a_home_tells_have_what_is_fetched(rows: list[tuple[int, bool]]) -> None:
    """From the decision of a home to the plan of a rank, and the same as where one has both."""
    slots = np.array([slot for slot, _ in rows], np.int32)
    fetch = np.array([i for i, (_, comes) in enumerate(rows) if comes], np.int32)
    none = np.empty(0, np.int32)
    of = HomeDecision(0, "train", (none,), slots, fetch, none, none, none, -1, none)
    told = by_all(lambda: replace(of).told)
    assert told.dtype == np.int32 and of.slots.tolist() == slots.tolist()

    def untold() -> list[list[int]]:
        outs = told.copy(), np.full(len(fetch), -1, np.int32), np.zeros(len(slots), np.uint8)
        fetched = np.full(len(fetch), -1, np.int32)
        request_loops.decode_slots(*outs, fetched)
        return [out.tolist() for out in (*outs, fetched)]

    missing, fetched = np.zeros(len(slots), np.uint8), np.empty(len(fetch), np.int32)
    request_loops.mark(slots, fetch, missing, fetched)
    both = [slots, fetch, missing, fetched]
    assert by_all(untold) == [out.tolist() for out in both]


@pytest.mark.parametrize("size", [3, 10**6])
def test_an_id_outside_its_table_is_told(size: int) -> None:
    """Where rows have an index of their own, and where they are hashed."""
    pieces = np.array([[0, 2], [2, 5], [0, 7], [7, size], [2, 3]])
    for row in (size, -1):
        ids = np.array([0, 6, 1, row, 2])
        told = by_all(lambda ids: RankPlanner(make_layout(1, 1)).request(ids, pieces), ids)
        assert told == f"id 3 is {row}: ids must lie within their tables"


def test_a_row_that_a_home_does_not_have_is_told() -> None:
    home = HomePlanner(make_layout(9, 1), 0, 9, 1)
    with pytest.raises(PlanError, match=r"step 4: \[\[1\]\] do not count 2 rows by shelf"):
        home.ingest(4, "train", [np.array([3, 4])], np.array([[1]]))
    for row in (9, -1):
        with pytest.raises(PlanError, match=f"step 4: id 1 is row {row} of a home that has 9: ids"):
            home.ingest(4, "train", [np.array([3, row])])


@pytest.mark.parametrize(("shelves", "bits"), [(0, 0), (1, 0), (4, 2), (4, 4)])
@pytest.mark.parametrize("rows", [1, 15, 16, 1000])
def test_rows_fall_evenly_into_parts_and_out_again(shelves: int, bits: int, rows: int) -> None:
    parts, local = Parts(77, rows, shelves, bits), np.arange(rows)
    shelf = np.array(by_all(lambda: [request_loops.shelf_of(row, shelves) for row in range(rows)]))
    whole = shelf[: rows >> shelves << shelves].reshape(-1, 1 << shelves)
    assert (np.sort(whole, axis=1) == np.arange(1 << shelves)).all(), "runs visit each once"
    _, starts, places = by_all(parts.divide, local)
    assert (np.searchsorted(starts, places, side="right") - 1 == shelf).all()
    part, number = by_all(parts.parts_of, local)
    assert part.tolist() == (shelf >> (shelves - bits)).tolist()
    assert number.max() < parts.part_rows <= (rows >> bits) + (2 << (shelves - bits))
    back = by_all(lambda: [loops.row_in(*at, parts.shape) for at in zip(part, number, strict=True)])
    assert back == local.tolist()
    assert parts.spread(local.astype(np.int32))[part, number].tolist() == local.tolist()
    assert np.diff(parts.edges).sum() == 77 and np.ptp(np.diff(parts.edges)) <= 1


def test_homes_are_in_parts_where_these_are_large() -> None:
    of = [Parts.of(slots, 10**7).count for slots in (1, 8191, 8192, 65_535, 65_536, 10**6)]
    assert of == [1, 1, 2, 8, 16, 16]
    assert Parts.of(10**6, 10**6).count == Parts.of(8192, 8191).count == 1
    assert Parts.of(10**9, 10**9).part_rows < 2**23 and Parts.of(10**9, 10**9).count == 128
    shelves = {Parts.of(slots, 10**6).shelves for slots in (1, 8192, 10**6)}
    assert shelves == {4}, "canonical order knows no slots"


def test_the_likeliest_rows_have_the_last_slots_of_their_parts() -> None:
    parts, local = Parts(21, 50, 2, 1), np.arange(50)[::-1].copy()
    seats, part = parts.seats(local, 0.5), parts.parts_of(local)[0]
    for which, (start, stop) in enumerate([(0, 10), (10, 21)]):
        own = seats[part == which].tolist()
        most = (stop - start) // 2
        assert own == [*range(stop - 1, stop - 1 - most, -1), *[-1] * (len(own) - most)]


@pytest.mark.parametrize("count", [5, 6000, 9000, 40_000])
def test_slots_that_are_enough_for_a_step_hold_it(count: int) -> None:
    layout, rng = make_layout(10**6, 1), np.random.default_rng(count)
    local = rng.choice(10**6, count, replace=False)
    small = HomePlanner(layout, 0, count - 1 - count // 8, 1)
    small.ingest(0, "train", *asked_of(small, local))
    with pytest.raises(StepTooLargeError) as refused:
        small.plan()
    enough = HomePlanner(layout, 0, refused.value.rows, 1)
    enough.ingest(0, "train", *asked_of(enough, local))
    assert len(enough.plan().fetch) == count <= refused.value.rows <= 1.1 * count + 300


def asked_of(home: HomePlanner, local: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """These rows as one rank asks for them."""
    rows, starts, _ = home.parts.divide(local)
    return [rows], np.diff(starts)[None]


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
    own = ReplicatedRows(make_layout(1, 1), known)
    found, (known, _, *where) = own.find(rows), own.known
    assert by_all(lambda: [request_loops.find_row(row, known, *where) for row in rows]) == [*found]
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
    rng, ranking = np.random.default_rng(seed), ByCount(1, 5.0)
    back = (step * rng.random(len(levels)) ** rng.choice([1, 9])).astype(int).tolist()
    uses = [(level, min(b + 1, 2**30) * rate, row, step)
            for row, (level, b) in enumerate(zip(levels, back, strict=True))]  # fmt: skip
    tables = ranking.values, ranking.factors, ranking.nearest
    result = by_all(lambda: [loops.count_use(*use, *tables) for use in uses])
    assert result == [counted(level, row, step, age) for level, age, row, step in uses]


def peak_bytes(rows: int, count: int, world: int) -> int:
    """The most that planning one batch of `count` ids adds to a planner whose scratch has grown,
    bytes."""
    layout = make_layout(rows, world)
    home = HomePlanner(layout, 0, count, 1)
    rank = RankPlanner(layout, None, (home.parts, None))
    assert home.index_bytes == 8 * layout.local_rows
    rng, peaks = np.random.default_rng(0), []
    tracemalloc.start()
    try:
        for step in range(6):
            ids = rng.integers(0, rows, count)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            request = rank.request(ids)
            asked, counts = request.replicated.rows[0], request.replicated.counts[:1]
            others = np.concatenate([counts] + [0 * counts] * (world - 1))
            home.ingest(step, "train", [asked] + [asked[:0]] * (world - 1), others)
            home.plan()
            missing = np.zeros(len(request.places), np.uint8)
            places = np.empty((2, count), np.int32)
            rank.occurrences(request, request.places, missing, *places)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return min(peaks)


@pytest.mark.parametrize("world", [1, 2])
def test_memory_beside_the_index_grows_with_the_batch_alone(world: int) -> None:
    few, many = (peak_bytes(rows, 2000, world) for rows in (50_000, 3_000_000))
    larger = peak_bytes(3_000_000, 8000, world)
    assert many < 1.1 * few + 4096
    assert larger < 6 * many


PLAN = """
import sys, numpy as np
import distcache.data.batch
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
    assert set(kept) == (set() if broken else set(NAMES))
