"""Preprocessing jobs: what the arrays say, refusals, the command; stopped, killed or started again:
on to the same bytes; parts, runs and workers."""

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
import tracemalloc
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import (
    ROWS,
    command,
    in_parts,
    make_lines,
    parsed,
    read_plainly,
    same_files,
    with_fields,
    write_lines,
)
from launching import Forked, run

from distcache import preprocess as entry
from distcache.cli.compose import read_line
from distcache.data import criteo_job as job
from distcache.data import criteo_tables as tables
from distcache.data.criteo_folder import MLPERF_BAGS, PreprocessSettings, read_manifest, verify
from distcache.data.criteo_job import Pool
from distcache.data.criteo_tables import ENTRY, Run, merge_runs
from distcache.errors import ConfigError, DataError, MemoryTooSmallError


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """700 Criteo lines."""
    return write_lines(tmp_path_factory.mktemp("text") / "train.txt", make_lines(700))


def arrays(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.load(folder / f"{name}.npy") for name in ("labels", "dense", "ids"))


@pytest.mark.parametrize(("part", "multi_hot"), [(3_000, None), (10**9, MLPERF_BAGS)])
def test_hashed_arrays_are_the_lines(text, tmp_path, part, multi_hot):
    manifest = in_parts(text, tmp_path / "out", part=part, multi_hot=multi_hot)
    *expected, bad = read_plainly(text.read_bytes(), ROWS)
    found, ids = arrays(tmp_path / "out"), expected[2]
    assert not bad and all(map(np.array_equal, found, expected)) and found[2].dtype == np.int32
    assert (manifest.samples, manifest.train_samples) == (700, 600)
    assert manifest.table_rows == ROWS and manifest.multi_hot == multi_hot
    for table in (2, 5, 17):  # of one id a bag
        counts = np.load(tmp_path / f"out/counts/cat_{table}.npy")
        expected = np.bincount(ids[:600, table].astype(int), minlength=ROWS[table])
        assert counts.dtype == np.int64 and counts.tolist() == expected.tolist()
    assert read_manifest(tmp_path / "out") == manifest == verify(tmp_path / "out")
    assert not (tmp_path / "out/work").exists()
    assert manifest.inputs == [{"name": "train.txt", "bytes": text.stat().st_size}]


@pytest.mark.parametrize(
    ("min_count", "wide"), [(1, None), (4, 0), (4, 300), (1, 699), (10**6, 300)]
)
def test_a_vocabulary_of_training_samples(tmp_path, monkeypatch, min_count, wide):
    """`wide`: the line of an id of more than 32 bits, in the first, a middle or the last piece."""
    sizes = {"_CHUNK": 17, "FAN_IN": 3, "BLOCK_BYTES": 1000, "MOST": 10}
    for name, value in sizes.items():
        monkeypatch.setattr(tables, name, value)  # of about ten parts, merged in many ranges
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
    assert manifest.samples == 280
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
    many, few = (PreprocessSettings(workers=99, memory=m << 20) for m in (2048, 500))
    assert many.workers_for() == 8 and 8 * 208 + 200 <= 2048
    assert few.workers_for() == 1


def test_the_command_line(capsys):
    def settings(*words: str):
        return entry.checked(read_line("preprocess", PreprocessSettings, words).values)

    hashed = ("output=b", "mode=hash")
    one = settings("input=a", *hashed, "rows=kaggle", "multi_hot=true", "min_count=1")
    assert list(one.input) == ["a"] and one.multi_hot == list(MLPERF_BAGS) and one.rows[0] == 1460
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
        ("outptu=c", "outptu: no such key: did you mean output?"),
        ("output=", "output is not set: give output=<folder>"),
    ):
        assert entry.main(["input=a", *["output=b"] * ("out" not in typed), typed]) == 1
        assert f"error: {hint}" in capsys.readouterr().err


def test_command_says_what_went_wrong_and_verifies(text, tmp_path, capsys):
    def ran(*words: str) -> int:
        return entry.main([*words, f"output={tmp_path / 'out'}"])

    assert ran("input=nowhere") == 1 and "error: input=nowhere" in capsys.readouterr().err
    words = command(f"input={text}", "min_count=2", f"output={tmp_path / 'out'}")
    right = subprocess.run(words, capture_output=True, text=True)
    assert right.returncode == 0 and "parse" in right.stderr and "700 samples" in right.stdout
    assert " MB of text in" in right.stdout
    assert ran("verify=true") == 0
    with (tmp_path / "out/dense.npy").open("r+b") as file:
        file.seek(500)
        file.write(b"\x01")
    assert ran("verify=true") == 1
    said = capsys.readouterr().err
    assert "dense.npy has checksum" in said and f"error: output: {tmp_path / 'out'}" in said


class StoppedError(Exception):
    pass


class Stopping:
    """Bars that stop the job after some updates, that is after some finished tasks."""

    def __init__(self, updates: int, stage: str | None = None) -> None:
        self.left, self.stage = updates, stage
        self.starts: dict[str, tuple[int, int]] = {}
        self.ends: dict[str, int] = {}

    def __call__(self, stage: str, total: int, unit: str, done: int):
        self.starts[stage], self.ends[stage], self.at = (done, total), done, stage
        return nullcontext(self)

    def update(self, n: int = 1) -> None:
        self.ends[self.at] += n
        self.left -= self.stage in (None, self.at)
        if self.left < 0:
            raise StoppedError


def run_in_pieces(text: Path, out: Path, every: int, **settings) -> list[Stopping]:
    """Stop after each number of updates; no manifest is there until the job is through."""
    runs: list[Stopping] = []
    while True:
        runs.append(Stopping(every * len(runs)))
        try:
            in_parts(text, out, runs[-1], **settings)
        except StoppedError:
            assert not (out / "manifest.json").exists()
        else:
            return runs


@pytest.mark.parametrize("mode", ["hash", "vocabulary"])
def test_stopped_anywhere_it_goes_on_without_redoing(text, tmp_path, monkeypatch, mode):
    whole, out, done = tmp_path / "whole", tmp_path / "out", {}
    settings = {"mode": mode, "part": 40_000}
    in_parts(text, whole, **settings)
    real = job.parse_part
    monkeypatch.setattr(
        job,
        "parse_part",
        lambda how, part: done.update({part.name: done.get(part.name, 0) + 1}) or real(how, part),
    )
    assert len(run_in_pieces(text, out, 3, **settings)) > 2
    assert len(done) > 3 and set(done.values()) == {1}, "a finished part was parsed again"
    assert same_files(whole, out) and read_manifest(whole) == read_manifest(out)
    in_parts(text, out, **settings)
    assert set(done.values()) == {1}
    os.truncate(out / "labels.npy", 200)  # until it is whole again nobody takes it for whole
    runs = run_in_pieces(text, out, 5, **settings)
    assert len(runs) > 4 and same_files(whole, out) and verify(out) == read_manifest(whole)
    assert runs[0].starts["parse"] == (0, text.stat().st_size)
    killed = tmp_path / "killed"
    with pytest.raises(StoppedError):
        in_parts(text, killed, Stopping(1), **settings)
    (killed / "ids.npy").touch()  # by a run that was killed while it made its arrays
    in_parts(text, killed, **settings)
    assert same_files(whole, killed)


@pytest.mark.parametrize("packed", [False, True])
def test_bars_begin_where_the_last_run_was_stopped(text, tmp_path, packed):
    path, runs = tmp_path / "a.txt", {}
    path.write_bytes(gzip.compress(text.read_bytes()) if packed else text.read_bytes())
    for stage in ("parse", "count", "write"):  # stopped in each of them, but for the first task
        runs[stage] = Stopping(0, stage)
        with pytest.raises(StoppedError):
            in_parts(path, tmp_path / "out", runs[stage], mode="vocabulary")
    size = path.stat().st_size
    assert 0 < runs["count"].starts["parse"][0] < size == runs["count"].starts["parse"][1]
    assert packed or runs["count"].starts["parse"][0] == 20_000
    assert runs["write"].starts["parse"] == (size, size)
    assert runs["write"].starts["count"] == (1, 26)
    last = Stopping(10**9)
    in_parts(path, tmp_path / "out", last, mode="vocabulary")
    assert last.starts["parse"] == (size, size) and last.starts["count"] == (26, 26)
    assert last.starts["write"][0] > 0 and last.starts["write"][1] == 700
    assert all(last.ends[stage] == total for stage, (_, total) in last.starts.items())
    in_parts(text, tmp_path / "whole", mode="vocabulary", part=10**9)
    assert same_files(tmp_path / "whole", tmp_path / "out")


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """What is complete of an unfinished job: reports of parts and tables, with inode and time."""
    reports = [*out.glob("work/parts/????-???????.json"), *out.glob("work/tables/??/report.json")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in reports}


def kill_at_random(arguments: tuple[str, ...], out: Path, seconds: float, dice) -> bool:
    """Start a job, or go on with it, and kill it after some of `seconds`; whether it was alive.

    Its workers are left to notice by themselves. What was complete before stays what it was.
    """
    before, quiet = finished(out), subprocess.PIPE
    process = Forked(command(*arguments, f"output={out}"), stderr=quiet, stdout=quiet)
    with suppress(subprocess.TimeoutExpired):
        process.wait(dice.uniform(0.0, seconds))
    process.send_signal(signal.SIGKILL)
    if process.wait() == 0:
        return False
    after = finished(out)
    if not (out / "manifest.json").exists():  # else the work is on its way out
        assert {name: after[name] for name in before} == before, "a finished part was done again"
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("mode=vocabulary", "min_count=2"),
        ("mode=hash", f"rows={list(ROWS)}"),
        ("mode=vocabulary", "gzip"),
    ],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path, settings):
    """A job is killed again and again, until it gets through; then the next one begins."""
    path = write_lines(tmp_path / "a.txt", make_lines(3000) * 12)
    if "gzip" in settings:
        path.write_bytes(gzip.compress(path.read_bytes(), 1))
    arguments = (f"input={path}", "workers=2", "part=300k", *settings)
    arguments = tuple(word for word in arguments if word != "gzip")
    whole, out = tmp_path / "whole", tmp_path / "out"
    began = time.monotonic()
    subprocess.run(command(*arguments, f"output={whole}"), check=True)
    seconds, dice, done = time.monotonic() - began, random.Random(0), 0
    most = 0  # parts and tables that were complete when a job was killed
    while done < 12 or not most:
        if kill_at_random(arguments, out, seconds, dice):
            done, most = done + 1, max(most, len(finished(out)))
            assert not (out / "manifest.json").exists() or same_files(whole, out)
        else:
            assert same_files(whole, out)
            shutil.rmtree(out)
    last = run(command(*arguments, f"output={out}"), capture_output=True)
    assert last.returncode == 0, last.stderr
    assert same_files(whole, out) and not (out / "work").exists()
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (whole, out)]
    assert manifests[0] == manifests[1] and not list(out.glob("*.partial"))


def test_what_does_not_go_on(text, tmp_path):
    """A changed input; and while a job is at it a second start, which leaves the first alone."""
    out, seen = tmp_path / "out", []
    words = [f"input={text}", f"output={out}", "mode=hash", f"rows={list(ROWS)}", "part=20000"]

    class SecondStart(Stopping):
        def update(self, n=1):
            if not seen:
                second = run(command(*words), capture_output=True)
                seen.append(second.stderr)

    path = shutil.copy(text, tmp_path / "a.txt")
    with pytest.raises(StoppedError):
        in_parts(path, tmp_path / "changed", Stopping(0))
    os.utime(path, ns=(5, 5))
    with pytest.raises(ConfigError, match="unfinished work of another job, or the input has chang"):
        in_parts(path, tmp_path / "changed")
    plan = next((tmp_path / "changed").rglob("plan.json"))
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"format": 2}))
    with pytest.raises(ConfigError, match=r"unfinished work of format 2, .* continues format 3"):
        in_parts(path, tmp_path / "changed")
    manifest = in_parts(text, out, SecondStart(0))
    assert "another process is working on it" in seen[0]
    assert manifest == in_parts(text, tmp_path / "alone")


def test_a_result_with_a_cut_or_missing_file_is_made_again(text, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="distcache")
    out, settings = tmp_path / "out", {"mode": "vocabulary", "min_count": 2}
    manifest = in_parts(text, tmp_path / "whole", **settings)
    for _ in range(2):
        in_parts(text, out, **settings)
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
        assert in_parts(text, out, **settings) == manifest == verify(out)
        assert f"output={out} is damaged, so all of it is made again: {out}" in caplog.text
        assert said in caplog.text and "complete already" not in caplog.text
        assert same_files(tmp_path / "whole", out) and not (out / "work").exists()
    os.truncate(out / "ids.npy", 1000)
    with pytest.raises(ConfigError, match="result of another job"):
        in_parts(text, out, mode="vocabulary")
    os.truncate(out / "manifest.json", 1000)
    with pytest.raises(ConfigError, match=r"output=.*manifest\.json cannot be .*remove the folder"):
        in_parts(text, out, **settings)


def run_code(code: str, **more) -> subprocess.CompletedProcess:
    """A process of its own, which finds what the tests import."""
    words = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    return subprocess.run(words, capture_output=True, text=True, env=env, **more)


def test_a_part_takes_the_memory_of_its_blocks(tmp_path):
    """Lines of nothing but tabs are the most samples that a part may have: 26 ids for 41 bytes."""
    text = b"0" + b"\t" * 39 + b"\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text * ((32 << 20) // len(text)))
    (tmp_path / "few.txt").write_bytes(text * ((4 << 20) // len(text)))
    done = run_code(f"""
import resource
from pathlib import Path
from criteo_lines import parsed
parsed(Path({str(tmp_path / "few.txt")!r}), None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report, _ = parsed(Path({str(path)!r}), None, read=False)
print(report.samples, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""")
    samples, grown = map(int, done.stdout.split())
    assert samples == (32 << 20) // len(text)
    # A few pieces of its arrays, which all together are more.
    assert grown * 1024 < 1.5 * samples * 26 * 4


def test_rows_are_as_wide_as_the_largest_table_needs(tmp_path):
    line = with_fields(make_lines(1, missing=0)[0], {14: b"ffffffff", 15: b"fffffffe"})
    path = write_lines(tmp_path / "a.txt", [line] * 7)
    _, rows = parsed(path, ROWS)
    assert rows.ids.dtype == np.int32 and rows.missing is None
    _, rows = parsed(path, (2**32, *ROWS[1:]))
    assert rows.ids.dtype == np.int64
    assert rows.ids[6, :2].tolist() == [2**32 - 1, 0xFFFFFFFE % ROWS[1]]


def die(task: str) -> None:
    os.kill(os.getpid(), 9)


def test_a_worker_that_died_between_tasks_is_explained():
    """The pool is broken when the next task comes, as when unpacking took long."""

    def tasks():
        yield "first"
        time.sleep(2)
        yield "second"

    with Pool(2) as pool, pytest.raises(MemoryTooSmallError, match="a worker process was killed"):
        list(pool.run(die, tasks()))


def test_workers_end_with_a_parent_that_is_killed():
    found = run_code("""
import os, time
from distcache.data.criteo_job import Pool
with Pool(2) as pool:
    next(pool.run(time.sleep, [0, 99, 99, 99]))
    print(*pool._executor._processes, flush=True)
    os.kill(os.getpid(), 9)
""")
    workers, deadline = [Path(f"/proc/{pid}/cmdline") for pid in found.stdout.split()], 10
    assert len(workers) == 2
    while any(path.exists() and path.read_bytes() for path in workers):  # none: not reaped yet
        time.sleep(0.1)
        deadline -= 0.1
        assert deadline > 0


def test_long_runs_are_merged_in_the_memory_of_a_few_entries(tmp_path):
    """Runs are read a little at a time: what is held is never a run."""
    runs, length = [], 1_000_000
    for number in range(3):
        entries = np.ones(length, ENTRY)
        entries["id"] = np.arange(number, 3 * length, 3)
        runs.append(Run.write(tmp_path / str(number), [entries]))
    most, total, last = 1 << 14, 0, -1
    tracemalloc.start()
    try:
        for entries in merge_runs(runs, most):
            total += int(entries["count"].sum())
            assert len(entries) <= most and entries["id"][0] == last + 1
            last = int(entries["id"][-1])
        assert total == 3 * length
        assert tracemalloc.get_traced_memory()[1] < 2 * most * 64 < 4 * length
    finally:
        tracemalloc.stop()
