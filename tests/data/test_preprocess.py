"""Whole preprocessing jobs: what the arrays say, lines that are bad, refusals, the command."""

from __future__ import annotations

import gzip
import logging
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import (
    ROWS,
    command,
    in_parts,
    make_lines,
    read_plainly,
    same_files,
    with_fields,
    write_lines,
)

from distcache import preprocess as entry
from distcache.cli.compose import read_line
from distcache.data.raw import tables
from distcache.data.raw.settings import MLPERF_BAGS, PreprocessSettings, read_manifest, verify
from distcache.errors import ConfigError, DataError


def arrays(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.load(folder / f"{name}.npy") for name in ("labels", "dense", "ids"))


@pytest.mark.parametrize("part", [3_000, 10**9])
def test_hashed_arrays_are_the_lines(text, tmp_path, part):
    manifest = in_parts(text, tmp_path / "out", part=part)
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
    about = {"name": "train.txt", "bytes": text.stat().st_size, "lines": 700, "samples": 700}
    assert manifest.inputs == [about]


@pytest.mark.parametrize(
    ("min_count", "wide"), [(1, None), (4, 0), (4, 300), (1, 699), (10**6, 300)]
)
def test_a_vocabulary_of_training_samples(tmp_path, monkeypatch, min_count, wide):
    """`wide`: the line of an id of more than 32 bits, in the first, a middle or the last piece."""
    for name, value in (("_CHUNK", 17), ("FAN_IN", 3), ("BLOCK_BYTES", 1000), ("PIECE", 37)):
        monkeypatch.setattr(tables, name, value)  # of about ten parts
    lines = make_lines(700)
    if wide is not None:
        lines[wide] = with_fields(lines[wide], {39: b"123456789abcdef0"})
    path = write_lines(tmp_path / "a.txt", lines)
    manifest = in_parts(path, tmp_path / "out", mode="vocabulary", min_count=min_count)
    labels, dense, values, _ = read_plainly(path.read_bytes(), None)
    found = arrays(tmp_path / "out")
    assert np.array_equal(found[0], labels) and np.array_equal(found[1], dense)
    empty = np.array([[field == b"" for field in line.split(b"\t")[14:]] for line in lines])
    for table in range(26):
        column, absent = values[:, table], empty[:, table]
        counted = Counter(column[:600][~absent[:600]].tolist())
        often = [value for value, count in counted.items() if count >= min_count]
        kept = sorted(often, key=lambda value: (-counted[value], value))
        row = {value: at for at, value in enumerate(kept, start=2)}
        pairs = zip(column.tolist(), absent.tolist(), strict=True)
        expected = [1 if gone else row.get(value, 0) for value, gone in pairs]
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
    one, two = tmp_path / "one", tmp_path / "two"
    whole = in_parts(write_lines(tmp_path / "all.txt", lines), one, split="none")
    days = in_parts(tmp_path / "day_*", two, split="last_file", part=500)
    assert [entry["name"] for entry in days.inputs] == ["day_1", "day_2", "day_10"]
    assert (whole.train_samples, days.train_samples, days.samples) == (90, 60, 90)
    assert [a.tobytes() for a in arrays(one)] == [a.tobytes() for a in arrays(two)]
    counts, ids = np.load(two / "counts/cat_3.npy"), np.load(two / "ids.npy")
    assert counts.tolist() == np.bincount(ids[:60, 3], minlength=ROWS[3]).tolist()
    with pytest.raises(DataError, match=r"split=last_file holds out .*day_1, the only file"):
        in_parts(tmp_path / "day_1", tmp_path / "three", split="last_file")


def test_gzip_and_two_workers_give_the_same_files(text, tmp_path):
    (tmp_path / "train.txt").write_bytes(gzip.compress(text.read_bytes()))
    for settings in ({}, {"mode": "vocabulary", "min_count": 2}):
        plain, packed = tmp_path / "plain", tmp_path / "packed"
        first = in_parts(text, plain, **settings)
        second = in_parts(tmp_path / "train.txt", packed, workers=2, part=9_000, **settings)
        assert same_files(plain, packed) and first.fingerprint == second.fingerprint
        assert second.inputs[0]["bytes"] == (tmp_path / "train.txt").stat().st_size
        shutil.rmtree(plain), shutil.rmtree(packed)


def test_bags_are_counted_and_named(text, tmp_path):
    single, many = tmp_path / "one", tmp_path / "many"
    in_parts(text, single)
    manifest = in_parts(text, many, multi_hot=MLPERF_BAGS)
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
        with pytest.raises(DataError, match=rf"{path}:151: 1 tab.*on_bad_line=skip"):
            in_parts(path, tmp_path / "error", part=3000, workers=workers)
    assert not (tmp_path / "error/manifest.json").exists()
    in_parts(good, tmp_path / "good")
    with caplog.at_level(logging.WARNING, logger="distcache"):
        manifest = in_parts(path, tmp_path / "skip", on_bad_line="skip", part=3000)
    assert same_files(tmp_path / "good", tmp_path / "skip")
    first = manifest.skipped["first"]
    assert manifest.skipped["count"] == 16 and first[0].startswith(f"{path}:151: 1 tab-separated")
    assert [int(line.split(":")[1]) for line in first[1:]] == [201 + 2 * i for i in range(9)]
    assert "skipped 16 malformed lines" in caplog.text and "bad.txt:151" in caplog.text
    assert (manifest.samples, manifest.inputs[0]["lines"]) == (280, 296)
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(good.read_bytes())[:-2000])
    with pytest.raises(DataError, match=r"cut off at line \d+ or after it"):
        in_parts(packed, tmp_path / "cut", on_bad_line="skip", part=3000, workers=2)
    packed.write_bytes(gzip.compress(b""))
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"cut\.gz is empty: there is nothing in the gzip data"):
            in_parts([good, packed], tmp_path / f"empty{workers}", workers=workers)
    none = r"0 good lines .*\(1 malformed lines, the first .*none:1: 1 "
    with pytest.raises(DataError, match=none):
        in_parts(write_lines(tmp_path / "none", [b"x"]), tmp_path / "none-out", on_bad_line="skip")


def test_refusals(text, tmp_path):
    with pytest.raises(DataError, match=r"input=.*no such file"):
        in_parts(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        in_parts(text, tmp_path / "full")
    for output in (tmp_path / "full/mine", tmp_path / "full/mine/below", Path("/proc/nowhere/all")):
        with pytest.raises(ConfigError, match=rf"output={output} cannot be made .*: name a new f"):
            in_parts(text, output)
    in_parts(text, tmp_path / "out")
    with pytest.raises(ConfigError, match="result of another job"):
        in_parts(text, tmp_path / "out", split="none")
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
            in_parts(text, tmp_path / "other", **settings)


def test_workers_fit_into_memory():
    many, few = (PreprocessSettings(["a"], "b", workers=99, memory=m << 20) for m in (2048, 500))
    assert many.workers_for() == 8 and 8 * 208 + 200 <= 2048
    assert few.workers_for() == many.workers_for(3 << 30) == 1


def test_the_command_line(capsys):
    def settings(*words: str):
        return entry.make_settings(read_line("preprocess", entry.PreprocessConfig, words).values)

    hashed = ("output=b", "mode=hash")
    one = settings("input=a", *hashed, "rows=kaggle", "multi_hot=true", "min_count=1")
    assert list(one.input) == ["a"] and one.multi_hot == MLPERF_BAGS and one.rows[0] == 1460
    assert list(settings("input=a b.txt,day_*.gz", "output=b").input) == ["a b.txt", "day_*.gz"]
    sizes = ("memory=1g", "workers=3", "part=1k", "on_bad_line=skip")
    third = settings("input=[a, c]", *hashed, f"rows={list(ROWS)}", *sizes)
    assert list(third.input) == ["a", "c"] and tuple(third.rows) == ROWS
    assert (third.memory, third.workers, third.part) == (1 << 30, 3, 1024)
    for words in (["output=b"], ["input=a", "output=b", "memory=lots"]):
        with pytest.raises(ConfigError):
            settings(*words)
    for rows in ("big", "[3,big]"):
        with pytest.raises(ConfigError, match=r"give 26 whole numbers .* kaggle or terabyte"):
            settings("input=a", *hashed, f"rows={rows}")
    for typed, hint in (
        ("min_cuont=1", "min_cuont: no such key: did you mean min_count?"),
        ("--min-count=1", "--min-count=1: write min_count=..."),
        ("outptu=c", "outptu: no such key: did you mean output?"),
        ("output=", "output is not set: give output=<folder>"),
    ):
        assert entry.main(["input=a", *["output=b"] * ("out" not in typed), typed]) == 1
        assert f"error: {hint}" in capsys.readouterr().err


def test_command_says_what_went_wrong_and_verifies(text, tmp_path):
    def ran(*words: str) -> subprocess.CompletedProcess:
        words = command(*words, f"output={tmp_path / 'out'}")
        return subprocess.run(words, capture_output=True, text=True)

    wrong = ran("input=nowhere")
    assert wrong.returncode == 1 and "nowhere" in wrong.stderr and "Traceback" not in wrong.stderr
    right = ran(f"input={text}", "min_count=2")
    assert right.returncode == 0 and "parse" in right.stderr and "700 samples" in right.stdout
    assert " MB of text in" in right.stdout
    assert ran("verify=true").returncode == 0
    with (tmp_path / "out/dense.npy").open("r+b") as file:
        file.seek(500)
        file.write(b"\x01")
    bad = ran("verify=true")
    assert bad.returncode == 1 and "dense.npy has checksum" in bad.stderr
    assert bad.stderr.startswith(f"error: output: {tmp_path / 'out'}")
