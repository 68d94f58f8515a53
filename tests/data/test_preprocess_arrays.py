"""Whole preprocessing jobs: what the arrays say, lines that are bad, and refusals."""

from __future__ import annotations

import gzip
import logging
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, read_plainly, write_lines
from preprocess_runs import run, same_files

from distcache.data.criteo_text import dense_of
from distcache.data.files import inspect
from distcache.data.raw import job
from distcache.data.raw.parts import PartTask, parse_part
from distcache.data.raw.settings import MLPERF_BAGS, PreprocessSettings, read_manifest, verify
from distcache.errors import ConfigError, DataError


def arrays(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.load(folder / f"{name}.npy") for name in ("labels", "dense", "ids"))


@pytest.mark.parametrize("part", [3_000, 20_000, 10**9])
def test_hashed_arrays_are_the_lines(text, tmp_path, part):
    manifest = run(text, tmp_path / "out", part=part)
    labels, dense, ids, bad = read_plainly(text.read_bytes(), ROWS)
    found = arrays(tmp_path / "out")
    assert not bad and np.array_equal(found[0], labels) and np.array_equal(found[1], dense)
    assert np.array_equal(found[2], ids) and found[2].dtype == np.int32
    assert (manifest.samples, manifest.train_samples) == (700, 600)
    assert manifest.table_rows == ROWS and manifest.multi_hot is None
    for table in (0, 2, 19):
        counts = np.load(tmp_path / f"out/counts/cat_{table}.npy")
        expected = np.bincount(ids[:600, table].astype(int), minlength=ROWS[table])
        assert counts.dtype == np.int64 and counts.tolist() == expected.tolist()
    assert read_manifest(tmp_path / "out") == manifest == verify(tmp_path / "out")
    assert not (tmp_path / "out/work").exists()
    assert manifest.inputs == [
        {"name": "train.txt", "bytes": text.stat().st_size, "lines": 700, "samples": 700}
    ]


def test_the_largest_tables(tmp_path):
    line = make_lines(1, missing=0)[0].split(b"\t")
    line[14:16] = b"ffffffff", b"fffffffe"
    file = inspect(write_lines(tmp_path / "a.txt", [b"\t".join(line)] * 7))
    rows = (2**32, *ROWS[1:])
    task = PartTask("p", file, 0, file.bytes, str(tmp_path), rows, False, file.bytes)
    assert parse_part(task).id_dtype == "<i8"
    ids = np.fromfile(tmp_path / "p/ids.bin", np.int64).reshape(7, 26)
    assert ids[6, :2].tolist() == [2**32 - 1, 0xFFFFFFFE % ROWS[1]]


@pytest.mark.parametrize("min_count", [1, 4])
@pytest.mark.parametrize("wide", [False, True])
def test_a_vocabulary_of_training_samples(tmp_path, min_count, wide):
    lines = make_lines(700)
    if wide:  # an id of more than 32 bits, in a part of its own
        lines[300] = b"\t".join([*lines[300].split(b"\t")[:-1], b"123456789abcdef0"])
    path = write_lines(tmp_path / "a.txt", lines)
    manifest = run(path, tmp_path / "out", mode="vocabulary", min_count=min_count)
    labels, dense, values, _ = read_plainly(path.read_bytes(), None)
    found = arrays(tmp_path / "out")
    assert np.array_equal(found[0], labels) and np.array_equal(found[1], dense)
    empty = np.array([[field == b"" for field in line.split(b"\t")[14:]] for line in lines])
    for table in range(26):
        column, absent = values[:, table], empty[:, table]
        counted = Counter(column[:600][~absent[:600]].tolist())
        kept = sorted(
            (i for i, n in counted.items() if n >= min_count), key=lambda i: (-counted[i], i)
        )
        row = {value: at for at, value in enumerate(kept, start=2)}
        expected = [
            1 if gone else row.get(value, 0)
            for value, gone in zip(column.tolist(), absent.tolist(), strict=True)
        ]
        assert found[2][:, table].tolist() == expected
        assert manifest.table_rows[table] == len(kept) + 2
        counts = np.load(tmp_path / f"out/counts/cat_{table}.npy")
        assert counts.tolist() == np.bincount(expected[:600], minlength=len(kept) + 2).tolist()
        names = np.load(tmp_path / f"out/vocabulary/cat_{table}.npy")
        assert names[2:].tolist() == kept


def test_splits_and_files_in_order(tmp_path):
    lines = make_lines(90)
    for name, part in (("day_10", lines[60:]), ("day_2", lines[20:60]), ("day_1", lines[:20])):
        write_lines(tmp_path / name, part)
    whole = run(write_lines(tmp_path / "all.txt", lines), tmp_path / "one", split="none")
    days = run(tmp_path / "day_*", tmp_path / "two", split="last_file", part=500)
    assert [entry["name"] for entry in days.inputs] == ["day_1", "day_2", "day_10"]
    assert (whole.train_samples, days.train_samples, days.samples) == (90, 60, 90)
    assert [a.tobytes() for a in arrays(tmp_path / "one")] == [
        a.tobytes() for a in arrays(tmp_path / "two")
    ]
    ids = np.load(tmp_path / "two/ids.npy")
    counts = np.load(tmp_path / "two/counts/cat_3.npy")
    assert counts.tolist() == np.bincount(ids[:60, 3], minlength=ROWS[3]).tolist()
    with pytest.raises(DataError, match=r"split=last_file holds out .*day_1, the only file"):
        run(tmp_path / "day_1", tmp_path / "three", split="last_file")


def test_gzip_and_two_workers_give_the_same_files(text, tmp_path):
    lines = text.read_bytes()
    (tmp_path / "train.txt").write_bytes(gzip.compress(lines))
    for settings in ({}, {"mode": "vocabulary", "min_count": 2}):
        plain, packed = tmp_path / "plain", tmp_path / "packed"
        first = run(text, plain, **settings)
        second = run(tmp_path / "train.txt", packed, workers=2, part=9_000, **settings)
        assert same_files(plain, packed) and first.fingerprint == second.fingerprint
        assert second.inputs[0]["bytes"] == (tmp_path / "train.txt").stat().st_size
        shutil.rmtree(plain), shutil.rmtree(packed)


def test_bags_are_counted_and_named(text, tmp_path):
    single, many = tmp_path / "one", tmp_path / "many"
    run(text, single)
    manifest = run(text, many, multi_hot=MLPERF_BAGS)
    assert manifest.multi_hot == MLPERF_BAGS
    for table, size in enumerate(MLPERF_BAGS):
        counts = np.load(many / f"counts/cat_{table}.npy")
        assert counts.sum() == 600 * size and len(counts) == ROWS[table]
        if size == 1:
            assert counts.tolist() == np.load(single / f"counts/cat_{table}.npy").tolist()
    assert (single / "ids.npy").read_bytes() == (many / "ids.npy").read_bytes()


def test_bad_lines_are_named_or_skipped(tmp_path, caplog):
    lines = make_lines(300)
    good = write_lines(tmp_path / "good.txt", lines[:280])
    worse = [*lines[:150], b"broken", *lines[150:280]]
    for at in range(200, 230, 2):
        worse.insert(at, b"0\t1")
    path = write_lines(tmp_path / "bad.txt", worse)
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"bad\.txt:151: 1 tab.*on_bad_line=skip") as caught:
            run(path, tmp_path / "error", part=3000, workers=workers)
        assert str(path) in str(caught.value)
    assert not (tmp_path / "error/manifest.json").exists()
    run(good, tmp_path / "good")
    with caplog.at_level(logging.WARNING, logger="distcache"):
        manifest = run(path, tmp_path / "skip", on_bad_line="skip", part=3000)
    assert same_files(tmp_path / "good", tmp_path / "skip")
    assert manifest.skipped["count"] == 16 and len(manifest.skipped["first"]) == 10
    assert manifest.skipped["first"][0].startswith(f"{path}:151: 1 tab-separated")
    assert [line.split(":")[1] for line in manifest.skipped["first"][1:]] == [
        str(201 + 2 * i) for i in range(9)
    ]
    assert "left out 16 malformed lines" in caplog.text and "bad.txt:151" in caplog.text
    assert (manifest.samples, manifest.inputs[0]["lines"]) == (280, 296)
    with pytest.raises(DataError, match=r"cut off at line \d+ or after it"):
        packed = tmp_path / "cut.gz"
        packed.write_bytes(gzip.compress(good.read_bytes())[:-2000])
        run(packed, tmp_path / "cut", on_bad_line="skip", part=3000, workers=2)
    with pytest.raises(
        DataError, match=r"0 good lines .*\(1 malformed lines, the first .*none:1: 1 "
    ):
        run(write_lines(tmp_path / "none", [b"x"]), tmp_path / "none-out", on_bad_line="skip")


def test_refusals(text, tmp_path):
    with pytest.raises(DataError, match=r"input=.*no such file"):
        run(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(DataError, match="not a file"):
        run(tmp_path, tmp_path / "out")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        run(text, full)
    run(text, tmp_path / "out")
    with pytest.raises(ConfigError, match="result of another job"):
        run(text, tmp_path / "out", split="none")
    for settings, message in (
        ({"mode": "hash", "rows": None}, "needs rows"),
        ({"mode": "vocabulary", "rows": ROWS}, "leave it out"),
        ({"rows": ROWS[:5]}, "26 whole numbers"),
        ({"multi_hot": [1]}, "multi_hot"),
        ({"min_count": 3}, "min_count=3"),
        ({"split": "half"}, "split=half"),
        ({"workers": 0}, "workers=0"),
        ({"memory": 1000}, "memory=1000"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(text, tmp_path / "other", **settings)


def test_an_output_that_is_no_folder_is_named(text, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for output in (file, file / "below", Path("/proc/nowhere/at/all")):
        with pytest.raises(ConfigError, match=rf"output={output} cannot be made .*: name a new f"):
            run(text, output)
    assert file.read_text() == "mine"


def test_workers_fit_into_memory():
    def workers(memory: int) -> int:
        return PreprocessSettings(["a"], "b", workers=99, memory=memory).workers_for()

    assert workers(2 << 30) * 208 + 200 <= 2048 and workers(2 << 30) == 8
    assert workers(500 << 20) == 1
    assert PreprocessSettings(["a"], "b").workers_for(3 << 30) == 1


def test_amounts_have_three_digits():
    shown = [job.amount(n) for n in (0, 812, 1000, 41_234, 181_300, 12.3e6, 2_004e6)]
    assert shown == ["0 B", "812 B", "1.00 kB", "41.2 kB", "181 kB", "12.3 MB", "2,004 MB"]


def test_dense_features_are_float32_of_float64():
    values = np.array([-5, 0, 1, 7, 10**12, 123456789])
    assert dense_of(values).dtype == np.float32
    expected = [np.float32(np.log1p(max(int(v), 0))) for v in values]
    assert dense_of(values).tolist() == expected
