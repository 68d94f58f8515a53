"""The bodies of the planner's loops are equal bit for bit, call by call."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from planner_bodies import ALL, equal, using
from policy_reference import counted

from distcache.errors import PlanError
from distcache.planner import loops
from distcache.planner.loops import distinct_rows, divided, grouped, hashed_rows, occurrences
from distcache.planner.shard import HotRows, in_tail
from distcache.planner.victims import ByCount


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


@examples(150)
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


@examples(150)
@given(ids, kinds, st.sampled_from([1, 3, 2**20, 2**33 + 1, 2**56]))
def test_hashed_rows(values: list[int], kind: str, stride: int) -> None:
    rows = as_rows(values, kind) * stride
    distinct, labels = by_all(hashed_rows, rows)
    assert distinct.tolist() == list(dict.fromkeys(rows.tolist()))
    assert (distinct[labels] == rows).all()


@examples(100)
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


@examples(150)
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
    assert (in_tail(rows, HotRows(known)) == in_tail(rows, known)).all()
    if len(hot) > 1:
        assert (found >= 0).any() and (found < 0).any()


@examples(200)
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


@pytest.mark.parametrize("rows", [70_000, 200_000])
def test_order_of_more_rows_than_one_digit_counts(rows: int) -> None:
    labels = np.random.default_rng(0).integers(0, rows, 30_000).astype(np.int32)
    result = by_all(occurrences, labels, None, rows)
    assert (result.order == np.argsort(labels, kind="stable")).all()
