"""Ids outside their tables and malformed bags are named; batches are loaded ahead of a step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from distcache.data.batch import Batch, JaggedIds, Prefetch, check_ids, unloaded
from distcache.errors import ConfigError, DataError

ROWS, NAMES = [10, 5], ["t_item", "t_user"]


def jagged(values=(1, 9, 0, 4, 2), offsets=(0, 2, 2, 3, 5), weights=None, dtype=torch.int64):
    """Two features, two samples: bags [1, 9], [], [0], [4, 2]."""
    return JaggedIds(
        ("item", "user"), torch.tensor(values, dtype=dtype), torch.tensor(offsets), weights
    )


def test_good_ids_pass_through_untouched():
    ids = jagged(weights=torch.ones(5))
    assert check_ids(ids, ROWS, NAMES) is ids
    assert check_ids(ids, ROWS, NAMES, on_bad_id="hash") is ids

    found = check_ids(jagged(dtype=torch.int32), ROWS, NAMES)
    assert found.values.dtype == torch.int64 and found.values.tolist() == [1, 9, 0, 4, 2]
    empty = JaggedIds(("item", "user"), torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    assert check_ids(empty, ROWS, NAMES) is empty
    no_ids = jagged(values=(), offsets=(0, 0, 0, 0, 0))
    assert check_ids(no_ids, ROWS, NAMES) is no_ids


@pytest.mark.parametrize(
    ("values", "feature", "table", "bad", "rows", "sample"),
    [
        ((1, 10, 0, 4, 2), "item", "t_item", 10, 10, 100),
        ((-1, 9, 0, 4, 2), "item", "t_item", -1, 10, 100),
        ((1, 9, 0, 5, 2), "user", "t_user", 5, 5, 101),
        ((1, 9, 7, 4, -(2**63)), "user", "t_user", 7, 5, 100),
        ((1, 9, 0, 4, -(2**63)), "user", "t_user", -(2**63), 5, 101),
        ((1, 9, 0, 2**63 - 1, 0), "user", "t_user", 2**63 - 1, 5, 101),
    ],
)
def test_a_bad_id_is_named_with_the_way_out(values, feature, table, bad, rows, sample):
    said = f"'{feature}', sample {sample} .*id {bad} is .*'{table}', which has {rows} rows .*=hash"
    with pytest.raises(DataError, match=said):
        check_ids(jagged(values), ROWS, NAMES, first_sample=100)


def test_hash_takes_bad_ids_modulo_the_rows():
    given = jagged((-1, 23, 5, 4, -7))
    found = check_ids(given, ROWS, NAMES, on_bad_id="hash")
    assert found.values.tolist() == [9, 3, 0, 4, 3]
    assert given.values.tolist() == [-1, 23, 5, 4, -7]
    assert found.offsets is given.offsets and found.features == given.features


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (jagged(dtype=torch.float32), "float32"),
        (jagged(dtype=torch.bool), "bool"),
        (jagged(offsets=(0, 2, 1, 3, 5)), "fall from 2 to 1 at feature 'item', sample 1"),
        (jagged(offsets=(0, 2, 3, 6, 5)), "fall from 6 to 5 at feature 'user', sample 1"),
        (jagged(offsets=(0, 2, 2, 3, 4)), "number of ids, 5"),
        (jagged(offsets=(1, 2, 2, 3, 5)), "from 1 to 5"),
        (jagged(offsets=(0, 2, 3, 5)), "4 offsets do not fit 2 features"),
        (jagged(offsets=(0.0, 2.0, 2.0, 3.0, 5.0)), "offsets are torch.float32"),
        (jagged(weights=torch.ones(4)), r"shape \[4\] for 5 ids"),
        (jagged(weights=torch.ones(5, dtype=torch.int64)), "weights are torch.int64"),
    ],
)
@pytest.mark.parametrize("on_bad_id", ["error", "hash"])
def test_malformed_bags_are_named(ids, message, on_bad_id):
    with pytest.raises(DataError, match=message):
        check_ids(ids, ROWS, NAMES, on_bad_id=on_bad_id)


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match=r"data\.on_bad_id='drop'"):
        check_ids(jagged(), ROWS, NAMES, on_bad_id="drop")
    with pytest.raises(DataError, match="2 features, but 1 tables"):
        check_ids(jagged(), [10], NAMES)


def deferred(index: int) -> Batch:
    ids = JaggedIds(("a",), torch.arange(3), torch.arange(4))
    rest = torch.full((3, 2), float(index)), torch.ones(3)
    return Batch(unloaded(3, 2), ids, unloaded(3), 3, index, 0, 0, load=lambda: rest)


def test_prefetch_keeps_the_order_and_runs_a_bounded_way_ahead():
    drawn: list[int] = []

    def source() -> Iterator[Batch]:
        for index in range(20):
            drawn.append(index)
            yield deferred(index)

    with Prefetch(source(), depth=2) as ahead:
        for count, batch in enumerate(ahead):
            assert batch.index == count and batch.dense[0, 0].item() == count
            assert len(drawn) <= count + 1 + 2 + 2  # taken, in the queue, in the thread's hand
            assert ahead.wait_s >= 0 and ahead.load_s >= 0
    assert count == 19


def test_prefetch_raises_in_order_what_went_wrong():
    def source() -> Iterator[Batch]:
        yield deferred(0)
        raise DataError("a.txt:3: broken")

    with Prefetch(source()) as ahead:
        batches = iter(ahead)
        assert next(batches).index == 0
        with pytest.raises(DataError, match=r"a\.txt:3"):
            next(batches)


def test_leaving_early_stops_the_thread():
    with Prefetch(map(deferred, itertools.count())) as ahead:
        assert next(iter(ahead)).index == 0
    assert not any(thread.name == "distcache-load" for thread in threading.enumerate())
