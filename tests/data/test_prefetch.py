"""Deferred dense features and labels, and the thread that loads batches ahead of a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from distcache.data.batch import Batch, JaggedIds, Prefetch, unloaded
from distcache.errors import DataError


def deferred(index: int, loads: list[int] | None = None) -> Batch:
    ids = JaggedIds(("a",), torch.arange(3), torch.arange(4))

    def load():
        if loads is not None:
            loads.append(index)
        return torch.full((3, 2), float(index)), torch.ones(3)

    return Batch(unloaded(3, 2), ids, unloaded(3), 3, index, 0, 0, load=load)


def test_a_deferred_batch_has_shapes_until_it_is_loaded():
    loads: list[int] = []
    batch = deferred(7, loads)
    assert batch.dense.shape == (3, 2) and len(batch.labels) == 3 and not loads
    with pytest.raises((NotImplementedError, RuntimeError)):
        batch.dense.to("cpu")
    whole = batch.loaded()
    assert loads == [7] and whole.dense.tolist() == [[7.0, 7.0]] * 3
    assert whole.loaded() is whole and whole.ids is batch.ids


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
    def endless() -> Iterator[Batch]:
        index = 0
        while True:
            yield deferred(index)
            index += 1

    with Prefetch(endless()) as ahead:
        assert next(iter(ahead)).index == 0
    assert not any(thread.name == "distcache-load" for thread in threading.enumerate())
