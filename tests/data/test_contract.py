"""What every source of batches holds, whatever its samples lie in."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from batch_sources import NAMES, make_source, samples_of

from distcache.data.batch import Batch, SlicedSource
from distcache.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def source(name, folder) -> SlicedSource:
    return make_source(name, folder)


def batches(source: SlicedSource, steps, rank: int = 0, size: int = 1) -> list[Batch]:
    return [source.train_batch(step, rank, size).loaded() for step in steps]


def epoch(source: SlicedSource, number: int) -> list[tuple]:
    steps = range(number * source.steps_per_epoch, (number + 1) * source.steps_per_epoch)
    return [sample for batch in batches(source, steps) for sample in samples_of(batch)]


@pytest.mark.parametrize("size", [2, 3, 4, 9, 40])
def test_slices_make_the_global_batch(source, size):
    last = source.steps_per_epoch - 1
    places = [(source.train_batch, step) for step in (0, last, last + 1)]
    places += [(source.eval_batch, at) for at in (0, source.eval_batches - 1)]
    for take, index in places:
        whole = take(index, 0, 1).loaded()
        slices = [take(index, rank, size).loaded() for rank in range(size)]
        assert [s for part in slices for s in samples_of(part)] == samples_of(whole)
        first = 0
        for part in slices:
            b, ids = part.ids.batch_size, part.ids
            assert part.dense.shape == (b, source.dense_features) and part.labels.shape == (b,)
            assert ids.features == source.features and len(ids.features) == len(source.table_rows)
            assert ids.values.dtype == ids.offsets.dtype == torch.int64
            assert len(ids.offsets) == len(ids.features) * b + 1
            assert int(ids.offsets[-1]) == len(ids.values)
            assert (part.index, part.epoch, part.kind) == (index, whole.epoch, whole.kind)
            assert (part.global_size, part.first_sample) == (whole.ids.batch_size, first)
            first += b
        bags = whole.ids.offsets.diff().reshape(len(source.features), -1).sum(1)
        rows = torch.tensor(source.table_rows).repeat_interleave(bags)
        assert ((whole.ids.values >= 0) & (whole.ids.values < rows)).all()
        assert set(whole.labels.tolist()) <= {0.0, 1.0}


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(source, name):
    first, second = epoch(source, 0), epoch(source, 1)
    assert len(first) == source.samples_per_epoch
    assert (first == second) == ("file order" in name)
    if not source.ids_vary:
        assert Counter(first) == Counter(second)
    sizes = [batch.global_size for batch in batches(source, range(source.steps_per_epoch + 1))]
    ragged = source.samples_per_epoch % 16 or 16
    assert sizes == [16] * (source.steps_per_epoch - 1) + [ragged, 16]
    assert source.train_batch(source.steps_per_epoch, 0, 1).epoch == 1
    assert "file order" in name or set(first[:16]) != set(second[:16])


def test_a_stream_is_a_function_of_its_seed(source, name, folder):
    again, other = make_source(name, folder), make_source(name, folder, seed=1)
    assert samples_of(again.train_batch(5, 0, 1).loaded()) == samples_of(
        source.train_batch(5, 0, 1).loaded()
    )  # without having seen the steps before
    assert again.identity == source.identity and other.table_rows == source.table_rows
    assert all(isinstance(value, str) for value in source.identity.values())
    assert (epoch(other, 0) == epoch(source, 0)) == ("file order" in name)


def test_float64_has_the_same_numbers(source, name, folder):
    double = make_source(name, folder, dtype=torch.float64)
    for one, other in zip(batches(source, (0, 3)), batches(double, (0, 3)), strict=True):
        assert one.dense.dtype == one.labels.dtype == torch.float32
        assert other.dense.dtype == other.labels.dtype == torch.float64
        assert samples_of(one) == samples_of(other)


def test_what_is_deferred_has_shapes_until_it_is_loaded(source):
    batch = source.train_batch(1, 0, 1)
    whole = batch.loaded()
    assert batch.dense.shape == whole.dense.shape and batch.labels.shape == whole.labels.shape
    assert whole.ids is batch.ids and whole.loaded() is whole
    assert batch.dense.is_meta == batch.labels.is_meta == (batch.load is not None)


def test_held_out_samples_are_the_same_each_time_and_end(source):
    passes = [
        [samples_of(source.eval_batch(at, 0, 1).loaded()) for at in range(source.eval_batches)]
        for _ in range(2)
    ]
    assert passes[0] == passes[1]
    with pytest.raises(DataError, match=f"batch {source.eval_batches} of {source.eval_batches}"):
        source.eval_batch(source.eval_batches, 0, 1)
