"""Whole preprocessing jobs: what the arrays say, stopping and going on, and refusals."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, preprocessed, read_plainly, write_lines

from distcache import preprocess as entry
from distcache.data.criteo_text import dense_of
from distcache.data.files import inspect
from distcache.data.raw import alone, job
from distcache.data.raw.job import preprocess
from distcache.data.raw.manifest import read_manifest, verify
from distcache.data.raw.part import PartTask, parse_part
from distcache.data.raw.settings import MLPERF_BAGS, PreprocessSettings
from distcache.errors import ConfigError, DataError


def run(input, output: Path, **settings):
    return preprocessed(input, output, **{"part": 20_000} | settings)


def arrays(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.load(folder / f"{name}.npy") for name in ("labels", "dense", "ids"))


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(p.relative_to(f) for p in f.rglob("*.npy")) for f in (one, other)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_lines(tmp_path_factory.mktemp("text") / "train.txt", make_lines(700))


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


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("mode", ["hash", "vocabulary"])
def test_stopped_anywhere_it_goes_on_without_redoing(text, tmp_path, monkeypatch, mode):
    """Stop after each number of updates of the bars, that is after each finished task."""
    whole = tmp_path / "whole"
    done = {}

    settings = {"mode": mode, "part": 40_000, "workers": 1}
    run(text, whole, **settings)
    real = job.parse_part
    monkeypatch.setattr(
        job,
        "parse_part",
        lambda task: done.update({task.name: done.get(task.name, 0) + 1}) or real(task),
    )
    stops = 0
    while True:
        left = [stops]

        class StoppingBar:
            def update(self, n=1, left=left):
                left[0] -= 1
                if left[0] < 0:
                    raise StoppedError

        values = settings | {"rows": ROWS if mode == "hash" else None}
        job_settings = PreprocessSettings([str(text)], str(tmp_path / "out"), **values)
        try:
            preprocess(job_settings, lambda *_: nullcontext(StoppingBar()))
            break
        except StoppedError:
            assert not (tmp_path / "out/manifest.json").exists()
            stops += 3
    assert stops > 5
    assert len(done) > 3 and set(done.values()) == {1}, "a finished part was parsed again"
    assert same_files(whole, tmp_path / "out")
    assert read_manifest(whole) == read_manifest(tmp_path / "out")
    run(text, tmp_path / "out", **settings)
    assert set(done.values()) == {1}


def test_a_second_start_leaves_the_first_alone(text, tmp_path, monkeypatch):
    """The same command again while a job is at it: refused, and nothing of the first is touched."""
    monkeypatch.setattr(alone, "_STARTING_S", 0.0)
    seen = []

    class SecondStart:
        def update(self, n=1):
            unfinished = tmp_path / "out/work/parts/0000-0000099.partial-1"
            unfinished.mkdir(exist_ok=True)
            with pytest.raises(ConfigError, match="another process is working on it"):
                run(text, tmp_path / "out")
            seen.append(unfinished.is_dir())
            unfinished.rmdir()

    settings = PreprocessSettings(
        [str(text)], str(tmp_path / "out"), "hash", ROWS, workers=1, part=20_000
    )
    manifest = preprocess(settings, lambda *_: nullcontext(SecondStart()))
    assert len(seen) > 5 and all(seen)
    assert manifest == run(text, tmp_path / "alone")


def test_workers_of_a_killed_run_are_waited_for(text, tmp_path, monkeypatch):
    """A worker that still writes holds a lock: the next run waits, or says so."""
    out = tmp_path / "out"
    holder = f"""
import sys
from pathlib import Path
from distcache.data.raw import pool
import os
pool._start_worker(os.getppid(), Path({str(out / "work/workers")!r}))
print("held", flush=True)
sys.stdin.read()
"""
    (out / "work").mkdir(parents=True)
    worker = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout.readline() == "held\n"
    monkeypatch.setattr(alone, "_LEAVING_S", 0.3)
    with pytest.raises(ConfigError, match=r"workers of a run that was killed .* after 0\.3 s"):
        run(text, out)
    monkeypatch.setattr(alone, "_LEAVING_S", 60.0)
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        worker.stdin.close()
        worker.wait()

    monkeypatch.setattr(alone.time, "sleep", sleep)
    run(text, out)
    assert len(waits) == 1


def test_a_result_with_a_cut_or_missing_file_is_made_again(text, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="distcache")
    out, settings = tmp_path / "out", {"mode": "vocabulary", "min_count": 2}
    manifest = run(text, tmp_path / "whole", **settings)
    run(text, out, **settings)
    run(text, out, **settings)
    assert f"{out} is complete already" in caplog.text and "made again" not in caplog.text
    damages = {
        "ids.npy has 1,000 bytes, not ": lambda: os.truncate(out / "ids.npy", 1000),
        "dense.npy cannot be read (": (out / "dense.npy").unlink,
        "counts/cat_3.npy has": lambda: os.truncate(out / "counts/cat_3.npy", 0),
        "cat_25.npy has": lambda: (out / "vocabulary/cat_25.npy").open("ab").write(b"more"),
    }
    for said, damage in damages.items():
        damage()
        with pytest.raises(DataError):
            verify(out)
        caplog.clear()
        assert run(text, out, **settings) == manifest == verify(out)
        assert f"output={out} is damaged, so all of it is made again: {out}" in caplog.text
        assert said in caplog.text and "complete already" not in caplog.text
        assert same_files(tmp_path / "whole", out) and not (out / "work").exists()
    os.truncate(out / "ids.npy", 1000)
    with pytest.raises(ConfigError, match="result of another job"):
        run(text, out, mode="vocabulary")
    os.truncate(out / "manifest.json", 1000)
    with pytest.raises(ConfigError, match=r"output=.*manifest\.json cannot be .*remove the folder"):
        run(text, out, **settings)


def test_making_a_damaged_result_again_may_be_stopped(text, tmp_path):
    """At any task: until it is whole nobody takes it for whole, and the same command goes on."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(text, whole)
    run(text, out)
    os.truncate(out / "labels.npy", 200)
    starts, stops = [], 0
    while True:
        left = [stops]

        class StoppingBar:
            def update(self, n=1, left=left):
                left[0] -= 1
                if left[0] < 0:
                    raise StoppedError

        def progress(stage, total, unit, done):
            starts.append((stage, done, total))
            return nullcontext(StoppingBar())

        settings = PreprocessSettings([str(text)], str(out), "hash", ROWS, workers=1, part=20_000)
        try:
            preprocess(settings, progress)
            break
        except StoppedError:
            assert not (out / "manifest.json").exists()
            stops += 5
    assert len(starts) > 8 and same_files(whole, out) and verify(out) == read_manifest(whole)
    assert starts[0] == ("parse", 0, text.stat().st_size)


@pytest.mark.parametrize("packed", [False, True])
def test_bars_begin_where_the_last_run_was_stopped(text, tmp_path, packed):
    path, sums, starts = tmp_path / "a.txt", {}, {}
    path.write_bytes(gzip.compress(text.read_bytes()) if packed else text.read_bytes())
    for stage in ("parse", "count", "write"):  # stopped in each of them, but for the first task

        class Bar:
            def __init__(self, at: str, stop: bool) -> None:
                self.at, self.stop = at, stop

            def update(self, n=1):
                sums[self.at] = sums.get(self.at, 0) + n
                if self.stop:
                    raise StoppedError

        def progress(at, total, unit, done, stage=stage, bar=Bar):
            starts.setdefault(stage, {})[at] = done, total
            sums[at] = done
            return nullcontext(bar(at, at == stage))

        settings = PreprocessSettings(
            [str(path)], str(tmp_path / "out"), "vocabulary", workers=1, part=20_000
        )
        with pytest.raises(StoppedError):
            preprocess(settings, progress)
    size = path.stat().st_size
    assert starts["count"]["parse"] == ((0 if packed else 20_000), size)
    assert starts["write"]["parse"] == (size, size) and starts["write"]["count"] == (1, 26)
    ends = {}

    def last(at, total, unit, done):
        sums[at], ends[at] = done, (done, total)
        return nullcontext(Bar(at, False))

    preprocess(settings, last)
    assert ends["parse"] == (size, size) and ends["count"] == (26, 26)
    assert ends["write"][0] > 0 and ends["write"][1] == 700
    assert all(sums[at] == total for at, (_, total) in ends.items()), (sums, ends)


def test_an_output_that_is_no_folder_is_named(text, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for output in (file, file / "below", Path("/proc/nowhere/at/all")):
        with pytest.raises(ConfigError, match=rf"output={output} cannot be made .*: name a new f"):
            run(text, output)
    assert file.read_text() == "mine"


def test_a_changed_input_does_not_go_on(text, tmp_path):
    path = tmp_path / "a.txt"
    shutil.copy(text, path)

    class StoppingBar:
        def update(self, n=1):
            raise StoppedError

    def start():
        settings = PreprocessSettings([str(path)], str(tmp_path / "out"), "hash", ROWS, workers=1)
        preprocess(settings, lambda *_: nullcontext(StoppingBar()))

    with pytest.raises(StoppedError):
        start()
    os.utime(path, ns=(5, 5))
    with pytest.raises(ConfigError, match="unfinished work of another job, or the input has chang"):
        start()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "distcache.preprocess", *arguments]


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """What is complete of an unfinished job: reports of parts and tables, with inode and time."""
    work = out / "work"
    reports = [*work.glob("parts/????-???????/report.json"), *work.glob("tables/??/report.json")]
    found = {}
    for path in reports:
        status = path.stat()
        found[str(path.relative_to(out))] = (status.st_ino, status.st_mtime_ns)
    return found


def kill_at_random(arguments: tuple[str, ...], out: Path, seconds: float, dice) -> bool:
    """Start a job, or go on with it, and kill it after some of `seconds`; whether it was alive.

    Its workers are left to notice by themselves. What was complete before stays what it was.
    """
    before = finished(out)
    process = subprocess.Popen(
        command(*arguments, f"output={out}"), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    with suppress(subprocess.TimeoutExpired):
        process.wait(dice.uniform(0.0, seconds))
    process.send_signal(signal.SIGKILL)
    if process.wait() == 0:
        return False
    after = finished(out)
    if not (out / "manifest.json").exists():  # else the work is on its way out
        assert {name: after[name] for name in before} == before, "a finished part was done again"
    return True


@pytest.mark.parametrize(
    ("kills", "settings"),
    [
        (3, ("mode=vocabulary", "min_count=2")),
        pytest.param(12, ("mode=vocabulary", "min_count=2"), marks=pytest.mark.slow),
        pytest.param(12, ("mode=hash", f"rows={list(ROWS)}"), marks=pytest.mark.slow),
        pytest.param(12, ("mode=vocabulary", "gzip"), marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, kills, settings):
    """A job is killed again and again, until it gets through; then the next one begins."""
    path = write_lines(tmp_path / "a.txt", make_lines(3000) * 12)
    if "gzip" in settings:
        path.write_bytes(gzip.compress(path.read_bytes(), 1))
    arguments = (f"input={path}", "workers=2", "part=300k", *settings)
    arguments = tuple(word for word in arguments if word != "gzip")
    whole, out = tmp_path / "whole", tmp_path / "out"
    began = time.monotonic()
    subprocess.run(command(*arguments, f"output={whole}"), check=True)
    seconds, dice, done = time.monotonic() - began, random.Random(kills), 0
    states = set()
    while done < kills or not any(count for count, _ in states):
        if kill_at_random(arguments, out, seconds, dice):
            done += 1
            names = finished(out)
            states.add((len(names), (out / "manifest.json").exists()))
            assert not (out / "manifest.json").exists() or same_files(whole, out)
            continue
        assert same_files(whole, out)
        shutil.rmtree(out)
    last = subprocess.run(command(*arguments, f"output={out}"), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert same_files(whole, out) and not (out / "work").exists()
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (whole, out)]
    assert manifests[0] == manifests[1]
    assert not list(out.glob("*.partial"))


def test_command_line_in_both_spellings(tmp_path):
    def settings(*words: str):
        return entry.make_settings(entry.parse_arguments(words))

    one = settings(
        "input=a", "output=b", "mode=hash", "rows=kaggle", "multi_hot=true", "min_count=1"
    )
    other = settings("--input", "a", "--output", "b", "--mode=hash", "--rows=kaggle", "--multi-hot")
    assert one == other and one.multi_hot == MLPERF_BAGS and one.rows[0] == 1460
    third = settings(
        "input=[a, c]",
        "output=b",
        "mode=hash",
        f"rows={list(ROWS)}",
        "memory=1g",
        "workers=3",
        "part=1k",
        "on_bad_line=skip",
    )
    assert list(third.input) == ["a", "c"] and tuple(third.rows) == ROWS
    assert (third.memory, third.workers, third.part) == (1 << 30, 3, 1024)
    for words in (
        ["output=b"],
        ["input=a", "output=b", "memory=lots"],
    ):
        with pytest.raises(ConfigError):
            settings(*words)
    for rows in ("big", "[3,big]"):
        with pytest.raises(ConfigError, match=r"give 26 whole numbers .* kaggle or terabyte"):
            settings("input=a", "output=b", "mode=hash", f"rows={rows}")


def test_an_unknown_key_is_shown_as_it_was_typed(capsys):
    for typed, hint in (
        ("min_cuont=1", "min_cuont=1: no such key; did you mean min_count?"),
        ("--min-cuont=1", "--min-cuont=1: no such key; did you mean min_count?"),
        ("colour=red", "colour=red: no such key\n"),
        ("a.txt", "a.txt: no such key\n"),
        ("outptu=c", "outptu=c: no such key; did you mean output?"),
        ("output=", "output is not set: give output=<folder>"),
    ):
        with pytest.raises(SystemExit):
            entry.parse_arguments(["input=a", *["output=b"] * ("out" not in typed), typed])
        assert f"error: {hint}" in capsys.readouterr().err


def test_command_says_what_went_wrong_and_verifies(text, tmp_path):
    wrong = subprocess.run(
        command("input=nowhere", f"output={tmp_path / 'out'}"), capture_output=True, text=True
    )
    assert wrong.returncode == 1 and "nowhere" in wrong.stderr and "Traceback" not in wrong.stderr
    right = subprocess.run(
        command(f"input={text}", f"output={tmp_path / 'out'}", "min_count=2"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        " kB of text in" in right.stdout
        and "kB/s per core" in right.stdout
        and "700 samples" in right.stdout
    )
    assert "parse" in right.stderr
    check = command("--verify", f"output={tmp_path / 'out'}")
    assert subprocess.run(check).returncode == 0
    with (tmp_path / "out/dense.npy").open("r+b") as file:
        file.seek(500)
        file.write(b"\x01")
    bad = subprocess.run(check, capture_output=True, text=True)
    assert bad.returncode == 1 and "dense.npy has checksum" in bad.stderr
    assert bad.stderr.startswith(f"error: output: {tmp_path / 'out'}")


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
