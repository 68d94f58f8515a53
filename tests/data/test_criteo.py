"""Criteo batches: the real sample, orders, values of fields, files, settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batch_checks import check_slices
from criteo_files import ROWS, line, lines, source, write

from distcache.data.criteo import CriteoSource, CriteoSpec
from distcache.data.files import find_files
from distcache.errors import ConfigError, DataError


def test_real_sample_as_batches(shared_data):
    stream = source(shared_data / "criteo_kaggle_sample.txt", batch=128)
    assert stream.steps_per_epoch == math.ceil(1713 / 128) and stream.eval_batches == 3
    assert stream.bad_lines.count == 0 and stream.dense_features == 13
    check_slices(stream, 0, "train")
    check_slices(stream, stream.steps_per_epoch - 1, "train")
    check_slices(stream, stream.steps_per_epoch, "train")
    check_slices(stream, 2, "eval", world_sizes=(1, 2, 3, 40))
    # The held-out lines are the last 286, in order; the first of them, read by hand:
    text = (shared_data / "criteo_kaggle_sample.txt").read_text().splitlines()
    fields = text[1713].split("\t")
    first = stream.eval_batch(0, 0, 1)
    assert first.labels[0].item() == float(fields[0])
    expected = [math.log(1 + max(int(x), 0)) if x else 0.0 for x in fields[1:14]]
    np.testing.assert_allclose(first.dense[0].numpy(), expected, rtol=1e-6)
    ids = first.ids.values.reshape(26, 128)[:, 0].tolist()
    assert ids == [int(x or "0", 16) % int(r) for x, r in zip(fields[14:], ROWS, strict=True)]


def test_an_epoch_shuffles_the_first_six_sevenths(tmp_path):
    path = write(tmp_path / "a.txt", lines(70))
    stream = source(path, batch=25)
    assert (stream.steps_per_epoch, stream.eval_batches) == (3, 1)

    def seen(steps):
        return [
            round(math.expm1(x))
            for s in steps
            for x in stream.train_batch(s, 0, 1).dense[:, 0].tolist()
        ]

    first, second = seen(range(3)), seen(range(3, 6))
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second and first != list(range(60))
    assert [stream.train_batch(s, 0, 1).global_size for s in range(3)] == [25, 25, 10]
    assert stream.train_batch(4, 0, 1).epoch == 1
    held_out = stream.eval_batch(0, 0, 1)
    assert [round(math.expm1(x)) for x in held_out.dense[:, 0].tolist()] == list(range(60, 70))
    with pytest.raises(DataError, match="batch 1 of 1"):
        stream.eval_batch(1, 0, 1)
    again, other = source(path, batch=25), source(path, batch=25, seed=1)
    assert torch.equal(again.train_batch(1, 0, 1).dense, stream.train_batch(1, 0, 1).dense)
    assert not torch.equal(other.train_batch(1, 0, 1).dense, stream.train_batch(1, 0, 1).dense)


def test_world_size_larger_than_the_batch(tmp_path):
    stream = source(write(tmp_path / "a.txt", lines(14)), batch=4)
    check_slices(stream, 1, "train", world_sizes=(1, 4, 9))


def test_values_of_fields(tmp_path):
    integers = ["", "-3", "0", "7", "-0", "999999999999999999", *["1"] * 7]
    ids = ["", "0", "FFFFFFFF", "ffffffff", "00000000000000000000000000ff", "1" * 20, *["a"] * 20]
    text = [line("1", integers, ids), *lines(6)]
    for end in ("\n", "\r\n"):
        stream = source(write(tmp_path / "a.txt", text, end), batch=7, dtype=torch.float64)
        where = np.flatnonzero(stream._labels == 1)[0]
        assert stream._dense[where, :6].tolist() == [
            0.0,
            0.0,
            0.0,
            float(np.float32(math.log(8))),
            0.0,
            float(np.float32(math.log1p(999999999999999999))),
        ]
        assert stream._ids[where, :7].tolist() == [
            0,
            0,
            0xFFFFFFFF % 10131227,
            0xFFFFFFFF % 2202608,
            255,
            int("1" * 20, 16) % 24,
            10,
        ]
        batch = stream.train_batch(0, 0, 1)
        assert batch.dense.dtype == batch.labels.dtype == torch.float64


def test_large_tables_keep_their_ids(tmp_path):
    rows = ROWS.copy()
    rows[0] = 2**32
    path = write(tmp_path / "a.txt", [line(ids=["fffffffe", *["0"] * 25])] * 7)
    stream = CriteoSource(CriteoSpec(path, rows, 6))
    stream.deferred = False
    assert stream.train_batch(0, 0, 1).ids.values[0].item() == 0xFFFFFFFE


def test_globs_read_files_in_natural_order(tmp_path):
    text = lines(30)
    for name, part in (("day_10", text[20:]), ("day_2", text[10:20]), ("day_1", text[:10])):
        write(tmp_path / name, part)
    found = find_files("data.path", str(tmp_path / "day_*"), "days")
    assert [file.path.name for file in found] == ["day_1", "day_2", "day_10"]
    whole = source(write(tmp_path / "all.txt", text))
    for paths in (
        str(tmp_path / "day_*"),
        [tmp_path / "day_1", tmp_path / "day_2", str(tmp_path / "day_1?")],
    ):
        assert np.array_equal(source(paths)._ids, whole._ids)
    write(tmp_path / "day_2", [*text[:3], "broken"])
    with pytest.raises(DataError, match=r"day_2:4: 1 tab"):
        source(str(tmp_path / "day_*"))


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        source(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="no such file and nothing matches"):
        source(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="is a folder, not a file; for all of its files"):
        source(tmp_path)
    with pytest.raises(DataError, match="names no file"):
        source([])
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        source(empty)
    with pytest.raises(DataError, match="1 good lines"):
        source(write(tmp_path / "one.txt", lines(1)))
    with pytest.raises(
        DataError, match=r"0 good .* \(skipped: 2 malformed lines, the first .*d\.txt:1: 1 t"
    ):
        source(write(tmp_path / "bad.txt", ["bad", "bad"]), on_bad_line="skip")


def test_bad_settings_are_named(tmp_path):
    path = write(tmp_path / "a.txt", lines(7))
    with pytest.raises(ConfigError, match="26 tables"):
        CriteoSource(CriteoSpec(path, [10] * 25))
    with pytest.raises(ConfigError, match=r"data\.on_bad_line='drop'"):
        source(path, on_bad_line="drop")
    with pytest.raises(ConfigError, match="float16"):
        source(path, dtype=torch.float16)


def test_more_zeros_than_python_reads(tmp_path):
    """Leading zeros are no digits; Python's own limit is at 4,300."""
    fields = line().split("\t")
    fields[1], fields[2], fields[20] = "0" * 5000 + "7", "-" + "0" * 5000 + "3", "0" * 5000 + "f"
    stream = source(write(tmp_path / "a.txt", ["\t".join(fields)] * 7), 6)
    batch = stream.train_batch(0, 0, 1)
    assert batch.dense[0, :2].tolist() == pytest.approx([np.log(8), 0])
    assert batch.ids.values[6 * 6].item() == 15 % ROWS[6]
