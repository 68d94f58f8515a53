"""Parquet as batches: orders, windows, slices, what is held out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batch_checks import check_slices
from parquet_files import columns, seen, source, write

from distcache.data.hashing import key_of
from distcache.data.parquet import RowGroupOrder
from distcache.data.samplers import SampleOrder
from distcache.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("window", [0, 1, 25, 1000])
def test_an_epoch_has_every_sample_once(window):
    sizes = [10, 3, 25, 1, 10, 10, 8]
    order = RowGroupOrder(sizes, 7, window)
    for epoch in range(3):
        found = []
        for start in range(0, 67, 9):
            blocks, samples = order.places(epoch, start, min(start + 9, 67))
            found += list(zip(blocks.tolist(), samples.tolist(), strict=True))
        every = [(block, at) for block, size in enumerate(sizes) for at in range(size)]
        assert sorted(found) == every
        assert (found == every) == (window == 0)
    if 0 < window < 67:
        assert order.widest <= window + 25


def test_windows_mix_their_blocks_and_no_others():
    order = RowGroupOrder([10] * 30, 3, 40)
    firsts = []
    for epoch in range(4):
        for window in range(7):
            blocks, _ = order.places(epoch, 40 * window, 40 * window + 40)
            assert len(set(blocks.tolist())) == 4
            firsts.append(tuple(sorted(set(blocks.tolist()))))
        blocks, _ = order.places(epoch, 35, 45)  # a batch over the edge of two windows
        assert len(set(blocks.tolist())) > 4 or len(blocks) == 10
    assert len(set(firsts)) > 20  # epochs differ


def test_one_window_is_the_order_of_all_samples():
    order = RowGroupOrder([10, 3, 25], 5, 38)
    blocks, samples = order.places(2, 4, 30)
    expected = SampleOrder(38, key_of(5, 0)).positions(2, 4, 30)
    assert (np.array([0, 10, 13])[blocks] + samples).tolist() == expected.tolist()


@pytest.mark.parametrize("shuffle_rows", [0, 20, 1 << 20])
def test_batches_are_the_same_for_any_number_of_ranks(tmp_path, shuffle_rows):
    for part in range(3):
        data = columns(41, seed=part)
        data["x"] = data["x"] + 41 * part
        write(tmp_path / f"part-{part * 5}.parquet", data)  # 0, 5, 10: numbers by value
    stream = source(str(tmp_path / "part-*.parquet"), shuffle_rows=shuffle_rows)
    train = 123 - math.ceil(123 / 7)
    assert (stream.steps_per_epoch, stream.eval_batches) == (math.ceil(train / 16), 2)
    for step in (0, 3, stream.steps_per_epoch - 1, stream.steps_per_epoch + 2):
        check_slices(stream, step, "train")
    check_slices(stream, 1, "eval")
    first = seen(stream, range(stream.steps_per_epoch))
    second = seen(stream, range(stream.steps_per_epoch, 2 * stream.steps_per_epoch))
    assert sorted(first) == sorted(second) == list(range(train))
    assert (first == second) == (shuffle_rows == 0)
    held_out = [int(x) for i in (0, 1) for x in stream.eval_batch(i, 0, 1).dense[:, 0].tolist()]
    assert held_out == list(range(train, 123))
    with pytest.raises(DataError, match="batch 2 of 2"):
        stream.eval_batch(2, 0, 1)
    again = source(str(tmp_path / "part-*.parquet"), shuffle_rows=shuffle_rows)
    assert seen(again, [9]) == seen(stream, [9])  # without having seen the steps before


def test_a_rank_reads_the_row_groups_of_its_slices(tmp_path):
    write(tmp_path / "a.parquet", columns(400), group=10)
    alone = source(tmp_path / "a.parquet", batch=40, shuffle_rows=80, held_out=0)
    decoded = []
    for rank in (0, 1):
        stream = source(tmp_path / "a.parquet", batch=40, shuffle_rows=80, held_out=0)
        for step in range(10):
            stream.train_batch(step, rank, 2)
        decoded.append(stream._ids.decoded)
        assert stream._rest.decoded == stream._ids.decoded
        assert sum(rows for _, rows in stream._ids._blocks.values()) <= 100
    for step in range(10):
        alone.train_batch(step, 0, 1)
    assert alone._ids.decoded == 40  # each row group once
    assert max(decoded) < 30


def test_dense_features_are_read_when_a_batch_is_loaded(tmp_path):
    stream = source(write(tmp_path / "a.parquet", columns(60)), 16)
    whole = stream.train_batch(1, 0, 1)
    stream = source(tmp_path / "a.parquet", 16)
    stream.deferred = True
    batch = stream.train_batch(1, 0, 1)
    assert stream._ids.decoded > 0 == stream._rest.decoded
    assert batch.dense.shape == (16, 2) and batch.dense.is_meta and batch.labels.is_meta
    assert torch.equal(batch.ids.values, whole.ids.values)
    assert torch.equal(batch.loaded().dense, whole.dense)
    assert torch.equal(batch.loaded().labels, whole.labels)


def test_held_out_files(tmp_path):
    write(tmp_path / "train.parquet", columns(30))
    write(tmp_path / "test.parquet", columns(12, seed=1))
    stream = source(tmp_path / "train.parquet", held_out_paths=str(tmp_path / "te*.parquet"))
    assert sorted(seen(stream, range(stream.steps_per_epoch))) == list(range(30))
    assert stream.eval_batch(0, 0, 1).dense[:, 0].tolist() == list(range(12))
    none = source(tmp_path / "train.parquet", held_out=0)
    assert (none.steps_per_epoch, none.eval_batches) == (2, 0)
