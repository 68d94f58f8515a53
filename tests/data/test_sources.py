"""What every source of batches holds, whatever its samples lie in, and in hot and cold batches."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from batch_sources import NAMES, SYNTHETIC, count, make_source, samples_of, write
from criteo_lines import make_lines, preprocessed, write_lines

from distcache.data.batch import Batch, SlicedSource, slice_bounds
from distcache.data.criteo import CriteoArrays, CriteoSpec
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError, DataError
from distcache.popularity import hot_cold
from distcache.popularity.curve import Curve, most_frequent
from distcache.popularity.hot_cold import COLD, HOT, HotColdSource, HotSet


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


CHANGES = [
    ("arrays", {"shuffle": False}, {"data.shuffle", "data.shuffle_block"}),
    ("arrays", {"shuffle_block": 8}, {"data.shuffle_block"}),
    ("parquet", {"dense_transform": "log1p"}, {"data.dense_transform"}),
    ("parquet", {"string_ids": "hex"}, {"data.string_ids"}),
    ("parquet", {"shuffle_rows": 7}, {"data.shuffle_rows"}),
    ("parquet", {"dense_columns": ("z", "x")}, {"data.dense_columns"}),
    ("parquet", {"held_out": 0.5}, {"data.path"}),
    ("interactions", {"negatives": 3}, {"data.negatives"}),
    ("interactions", {"sampling": "popularity"}, {"data.negative_sampling"}),
]
"""Changes of sources, and the keys of their identity that they change."""


@pytest.mark.parametrize(("name", "changes", "keys"), CHANGES)
def test_what_is_made_of_the_data_is_part_of_a_stream(folder, name, changes, keys):
    plain, other = (make_source(name, folder, **more).identity for more in ({}, changes))
    assert {key for key in plain | other if plain.get(key) != other.get(key)} == keys


FILES = [
    ("text", "a.txt", b"\t"),
    ("parquet", "a.parquet", b""),
    ("interactions", "users.txt", b" "),
]


@pytest.mark.parametrize(("name", "file", "between"), FILES)
def test_content_is_part_of_a_stream_and_its_place_is_not(folder, tmp_path, name, file, between):
    plain, path = make_source(name, folder), tmp_path / "other" / file
    path.parent.mkdir()
    (tmp_path / "copy").mkdir()
    shutil.copy(folder / file, tmp_path / "copy")
    assert make_source(name, tmp_path / "copy").identity == plain.identity
    if between:
        lines = (folder / file).read_bytes().split(b"\n")
        lines[20] = lines[20].rpartition(between)[0] + between + b"1"
        path.write_bytes(b"\n".join(lines))
    else:
        table = pq.read_table(folder / file)
        numbers = table["x"].to_numpy() + np.eye(300)[11]  # one value, in no way the largest
        write(path, table.set_column(table.column_names.index("x"), "x", [numbers]), 17)
    for other in (make_source(name, path.parent), make_source("arrays", folder)):
        assert other.identity["data.path"] != plain.identity["data.path"]


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


def hot_set(of: SlicedSource, share: float | None = None) -> HotSet:
    """A share of the rows that are looked up; None: one that leaves samples of both kinds."""
    if share is None:
        share = 0.85 if len(of.features) == 26 else 0.35
    known = count(of)
    curves = [Curve.of(table, known.samples) for table in known.tables]
    return HotSet(known, most_frequent(curves, int(share * sum(t.distinct for t in known.tables))))


def batches_of(of: HotColdSource, epoch: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """All of an epoch, hot ones first."""
    sizes = zip((HOT, COLD), of.sizes(epoch), strict=True)
    places = [(epoch, kind, number) for kind, n in sizes for number in range(n)]
    return [of.batch(place, 100 + at, rank, size).loaded() for at, place in enumerate(places)]


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_once_and_of_its_kind(folder, monkeypatch, name):
    monkeypatch.setattr(hot_cold, "_CHUNK", 64)
    plain = make_source(name, folder)
    hot = hot_set(plain)
    tables = zip(count(plain).tables, hot.hot_rows, strict=True)
    own = [set(table.order[:rows].tolist()) for table, rows in tables]
    of, orders = HotColdSource(plain, hot), []
    assert of.steps_per_epoch == sum(of.sizes(0))
    cuts = [0, 64, 64, plain.samples_per_epoch]  # as ranks classify
    parts = [hot_cold.classify(plain, hot, 0, pair) for pair in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), hot_cold.classify(plain, hot, 0))
    for epoch in (0, 1):
        batches = batches_of(of, epoch)
        found = [samples_of(batch) for batch in batches]
        steps = range(epoch * plain.steps_per_epoch, (epoch + 1) * plain.steps_per_epoch)
        as_is = [s for step in steps for s in samples_of(plain.train_batch(step, 0, 1).loaded())]
        assert Counter(s for batch in found for s in batch) == Counter(as_is)
        for batch, samples in zip(batches, found, strict=True):
            for _, _, bags, _ in samples:
                only_hot = all(row in own[f] for f, bag in enumerate(bags) for row in bag)
                assert only_hot == (batch.phase == HOT)
        sizes = [batch.global_size for batch in batches]
        hot_batches = of.sizes(epoch)[0]
        assert min(of.sizes(epoch)) > 1
        assert set(sizes[: hot_batches - 1]) | set(sizes[hot_batches:-1]) == {16}
        orders.append([samples for batch in found for samples in batch])
        for size in (2, 3):
            ranks = [batches_of(of, epoch, rank, size) for rank in range(size)]
            for whole, parts in zip(batches, zip(*ranks, strict=True), strict=True):
                assert samples_of(whole) == [s for part in parts for s in samples_of(part)]
                assert all(part.global_size == whole.global_size for part in parts)
                cuts = [slice_bounds(whole.global_size, rank, size)[0] for rank in range(size)]
                assert [part.first_sample for part in parts] == cuts
    assert (orders[0] == orders[1]) == ("file order" in name)


@pytest.mark.parametrize("name", ["synthetic", "arrays", "parquet, window", "interactions"])
def test_steps_in_order_are_hot_ones_then_cold_ones(folder, name):
    plain = make_source(name, folder)
    of = HotColdSource(plain, hot_set(plain))
    first = of.steps_per_epoch
    for step in (0, first - 1, first, first + 1):
        batch = of.train_batch(step, 0, 1).loaded()
        expected = batches_of(of, step // first)[step % first]
        assert samples_of(batch) == samples_of(expected)
        assert batch.index == step
    assert [of.train_batch(step, 0, 1).phase for step in (0, first - 1, first)] == [HOT, COLD, HOT]
    held_out = [it.eval_batch(0, 0, 1).loaded() for it in (of, of.source)]
    assert samples_of(held_out[0]) == samples_of(held_out[1])
    assert of.eval_batches == of.source.eval_batches


def test_what_the_source_says_beyond_its_batches():
    plain = SyntheticSource(SyntheticSpec(**SYNTHETIC))
    of = HotColdSource(plain, hot_set(plain))
    assert of.expected_distinct(0, 100) == plain.expected_distinct(0, 100)
    assert (of.features, of.table_rows) == (plain.features, plain.table_rows)
    added = dict(of.identity.items() - plain.identity.items())
    assert set(added) == {"data.batching", "data.hot_rows"}
    assert HotColdSource(plain, hot_set(plain, 0.3)).identity != of.identity
    seeded = SyntheticSource(SyntheticSpec(**SYNTHETIC, seed=1))
    streams = [HotColdSource(one, of.hot) for one in (plain, plain, seeded)]
    orders = [list(map(samples_of, batches_of(one, 0))) for one in streams]
    assert orders[0] == orders[1] != orders[2]


def test_neighbours_on_the_disk_stay_near_each_other(tmp_path, monkeypatch):
    """A pool's worth of hot samples lies in few places, and the system hears of them before."""
    from distcache.data import samplers

    monkeypatch.setattr(samplers, "POOL_BLOCKS", 4)
    text = write_lines(tmp_path / "a.txt", make_lines(3000))
    preprocessed(text, tmp_path / "out")
    plain = CriteoArrays(CriteoSpec(tmp_path / "out", (), 64, shuffle_block=16))
    hinted = []
    plain.will_need = lambda start, stop: hinted.append((start, stop))
    of = HotColdSource(plain, hot_set(plain, 0.6))
    hot = of.epoch(0)[HOT]
    assert hot.chosen.count > 256
    hinted.clear()
    spread = []
    for number in range(4):  # a pool is one batch of 64
        span = hot.spans.locate(number)
        samples = hot.samples(span, 0, span.size)
        index = np.searchsorted(hot.chosen.at(np.arange(hot.chosen.count)), samples)
        spread.append(len(np.unique(index // 16)))
        assert all(any(low <= s < high for low, high in hinted) for s in samples.tolist())
    assert max(spread) <= 8  # four blocks, each across two of these; without blocks about 40


def test_a_stream_without_an_end_is_refused():
    hot = hot_set(SyntheticSource(SyntheticSpec(**SYNTHETIC)))
    with pytest.raises(ConfigError, match=r"known number of samples.*data\.samples"):
        HotColdSource(SyntheticSource(SyntheticSpec(**SYNTHETIC | {"samples": None})), hot)
    with pytest.raises(ConfigError, match="known number of samples"):
        HotColdSource(object(), hot)


@pytest.mark.parametrize(("share", "kind"), [(0.0, "cold"), (1.0, "hot")])
def test_all_of_one_kind_trains_as_it_is_with_a_warning(caplog, share, kind):
    plain = SyntheticSource(SyntheticSpec(**SYNTHETIC | {"bag_size": 1}))
    with caplog.at_level(logging.INFO, logger="distcache"):
        of = HotColdSource(plain, hot_set(plain, share), show=True)
    assert re.search(f"all samples are {kind}.*nothing is gained over data.batch", caplog.text)
    assert re.search(r"(0|700) of 700 samples are hot \((0|100).00 %\)", caplog.text)
    assert sorted(of.sizes(0)) == [0, 44]
    found = [s for batch in batches_of(of, 0) for s in samples_of(batch)]
    as_is = [s for step in range(44) for s in samples_of(plain.train_batch(step, 0, 1))]
    assert Counter(found) == Counter(as_is)
