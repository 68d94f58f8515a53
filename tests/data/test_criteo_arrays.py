"""Batches from preprocessed folders: those of the text, deferred, and damage that is noticed."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_checks import check_slices
from criteo_lines import ROWS, make_lines, preprocessed, write_lines

from distcache.data.criteo import BatchSettings, CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.hashing import bags
from distcache.data.raw.settings import MLPERF_BAGS
from distcache.errors import ConfigError, DataError


def prepare(folder: Path, lines: list[bytes], **settings) -> tuple[Path, Path]:
    """A text file and the folder made from it."""
    text = write_lines(folder / "a.txt", lines)
    preprocessed(text, folder / "out", **settings)
    return text, folder / "out"


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    return prepare(tmp_path_factory.mktemp("both"), make_lines(350))


class Whole(CriteoArrays):
    """Loads at once, for checks that look at everything."""

    deferred = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shuffle_block", [1, 4096])
def test_the_same_batches_as_the_text(both, dtype, shuffle, shuffle_block, monkeypatch):
    monkeypatch.setattr("distcache.data.samplers.POOL_BLOCKS", 32)
    text, folder = both
    settings = BatchSettings(64, 3, dtype, shuffle, shuffle_block)
    arrays = CriteoArrays(folder, settings)
    lines = CriteoSource(CriteoSpec.of(text, ROWS, "error", settings))
    assert arrays.table_rows == lines.table_rows == ROWS
    assert (arrays.steps_per_epoch, arrays.eval_batches) == (5, 1)
    for take in ("train_batch", "eval_batch"):
        for step in range(7 if take == "train_batch" else 1):
            one = getattr(arrays, take)(step, 1, 2)
            other = getattr(lines, take)(step, 1, 2)
            assert one.dense.is_meta and one.labels.is_meta and one.load is not None
            assert other.dense.is_meta and other.labels.is_meta
            other = other.loaded()
            assert one.dense.shape == other.dense.shape and len(one.labels) == len(other.labels)
            loaded = one.loaded()
            assert loaded.dense.dtype == loaded.labels.dtype == dtype
            assert torch.equal(loaded.dense, other.dense)
            assert torch.equal(loaded.labels, other.labels)
            assert torch.equal(one.ids.values, other.ids.values)
            assert torch.equal(one.ids.offsets, other.ids.offsets)
            assert replace(loaded, dense=0, labels=0, ids=0) == replace(
                other, dense=0, labels=0, ids=0
            )
    if not shuffle:
        first = arrays.train_batch(0, 0, 1).ids.values.reshape(26, 64)
        assert np.array_equal(first.numpy(), np.load(folder / "ids.npy")[:64].T)


def test_slices(both):
    source = Whole(both[1], BatchSettings(64))
    check_slices(source, 0, "train")
    check_slices(source, 4, "train")
    check_slices(source, 0, "eval", world_sizes=(1, 3, 70))


def test_look_ahead_reads_ids_alone(both, monkeypatch):
    source = CriteoArrays(both[1], BatchSettings(64))
    read = []
    real = type(source._arrays["ids"]).take

    def noted(self, lines):
        read.append((self._file.path.name, len(lines)))
        return real(self, lines)

    monkeypatch.setattr(type(source._arrays["ids"]), "take", noted)
    batches = [source.train_batch(step, 1, 4) for step in range(3)]
    assert read == [("ids.npy", 16)] * 3
    batches[1].loaded()
    assert sorted(read[3:]) == [("dense.npy", 16), ("labels.npy", 16)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_that_is_dropped_lets_go_of_its_files(both, shuffle):
    def in_use() -> int:
        return Path("/proc/self/maps").read_text().count(f"{both[1]}/")

    before, handles = in_use(), len(os.listdir("/proc/self/fd"))
    source = CriteoArrays(both[1], BatchSettings(64, shuffle=shuffle))
    batch = source.train_batch(0, 0, 1).loaded()
    assert in_use() >= before + 3
    gc.disable()
    try:
        del source, batch  # without waiting for the garbage collector
        assert in_use() == before and len(os.listdir("/proc/self/fd")) <= handles
    finally:
        gc.enable()


def test_bags_of_several_ids(tmp_path):
    _, folder = prepare(tmp_path, make_lines(70), multi_hot=MLPERF_BAGS)
    source = Whole(folder, BatchSettings(12, shuffle=False))
    check_slices(source, 1, "train")
    batch, ids = source.train_batch(1, 0, 1), np.load(folder / "ids.npy")[12:24]
    assert len(batch.ids.values) == 12 * sum(MLPERF_BAGS) == 12 * 214
    for table, size in enumerate(MLPERF_BAGS):
        low, high = (int(batch.ids.offsets[12 * (table + more)]) for more in (0, 1))
        drawn = batch.ids.values[low:high].reshape(12, size)
        expected = bags(ids[:, table].astype(np.int64), table, ROWS[table], size)
        assert np.array_equal(drawn.numpy(), expected)
    seen = np.zeros(ROWS[20], dtype=np.int64)
    for step in range(source.steps_per_epoch):
        batch = source.train_batch(step, 0, 1)
        low, high = (int(batch.ids.offsets[batch.ids.batch_size * at]) for at in (20, 21))
        np.add.at(seen, batch.ids.values[low:high].numpy(), 1)
    assert np.array_equal(source.counts(20), seen)


def test_rows_of_the_folder_and_of_the_config(both):
    folder = both[1]
    assert CriteoArrays(folder, BatchSettings(), ROWS).table_rows == ROWS
    with pytest.raises(ConfigError, match=r"data\.table_rows=.*was preprocessed to"):
        CriteoArrays(folder, BatchSettings(), [10] * 26)
    with pytest.raises(ConfigError, match="float16"):
        BatchSettings(dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"data\.shuffle_block=0"):
        CriteoArrays(folder, BatchSettings(shuffle_block=0))


def test_a_label_that_is_none_is_named(tmp_path):
    _, folder = prepare(tmp_path, make_lines(70))
    labels = np.load(folder / "labels.npy", mmap_mode="r+")
    labels[13] = 77
    labels.flush()
    source = CriteoArrays(folder, BatchSettings(16, shuffle=False))
    with pytest.raises(DataError, match=r"sample 13 has the label 77, not 0 or 1.*verify=true"):
        source.train_batch(0, 0, 1).loaded()


def test_damage_is_named(tmp_path):
    _, folder = prepare(tmp_path, make_lines(70))
    source = CriteoArrays(folder, BatchSettings(16))
    batch = source.train_batch(0, 0, 1)
    size = (folder / "dense.npy").stat().st_size
    os.truncate(folder / "dense.npy", size - 1000)
    with pytest.raises(DataError, match=r"dense\.npy shrank while it was read"):
        batch.loaded()
    with pytest.raises(DataError, match=r"dense\.npy has .* run the same command of"):
        CriteoArrays(folder, BatchSettings())
    (folder / "ids.npy").unlink()
    with pytest.raises(DataError, match=r"ids\.npy cannot be read any more"):
        source.train_batch(1, 0, 1)
    with pytest.raises(DataError, match=r"dense\.npy has 2,768 bytes|cannot be read"):
        CriteoArrays(folder, BatchSettings())
    manifest = json.loads((folder / "manifest.json").read_text())
    for broken, message in (
        ("{", "cannot be read"),
        ("[]", "not a manifest of format 1"),
        (json.dumps(manifest | {"format": 2}), "not a manifest of format 1"),
        (json.dumps({"format": 1}), "lacks or misspells"),
        (json.dumps(manifest | {"arrays": {}}), "does not have its fingerprint"),
        (json.dumps(manifest | {"train_samples": 61}), "does not have its fingerprint"),
    ):
        (folder / "manifest.json").write_text(broken)
        with pytest.raises(DataError, match=message):
            CriteoArrays(folder, BatchSettings())
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no manifest\.json.*unfinished"):
        CriteoArrays(folder, BatchSettings())
