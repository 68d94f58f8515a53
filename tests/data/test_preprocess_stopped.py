"""Preprocessing jobs that are stopped, killed or started again: on to the same bytes."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from criteo_lines import ROWS, command, in_parts, make_lines, same_files, write_lines

from distcache.data.raw import job
from distcache.data.raw.settings import read_manifest, verify
from distcache.errors import ConfigError, DataError


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
        lambda task: done.update({task.name: done.get(task.name, 0) + 1}) or real(task),
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


def test_a_changed_input_does_not_go_on(text, tmp_path):
    path = tmp_path / "a.txt"
    shutil.copy(text, path)
    with pytest.raises(StoppedError):
        in_parts(path, tmp_path / "out", Stopping(0))
    os.utime(path, ns=(5, 5))
    with pytest.raises(ConfigError, match="unfinished work of another job, or the input has chang"):
        in_parts(path, tmp_path / "out")


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """What is complete of an unfinished job: reports of parts and tables, with inode and time."""
    reports = [*out.glob("work/parts/????-???????.json"), *out.glob("work/tables/??/report.json")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in reports}


def kill_at_random(arguments: tuple[str, ...], out: Path, seconds: float, dice) -> bool:
    """Start a job, or go on with it, and kill it after some of `seconds`; whether it was alive.

    Its workers are left to notice by themselves. What was complete before stays what it was.
    """
    before, quiet = finished(out), subprocess.DEVNULL
    process = subprocess.Popen(command(*arguments, f"output={out}"), stderr=quiet, stdout=quiet)
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
            states.add((len(finished(out)), (out / "manifest.json").exists()))
            assert not (out / "manifest.json").exists() or same_files(whole, out)
            continue
        assert same_files(whole, out)
        shutil.rmtree(out)
    last = subprocess.run(command(*arguments, f"output={out}"), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert same_files(whole, out) and not (out / "work").exists()
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (whole, out)]
    assert manifests[0] == manifests[1] and not list(out.glob("*.partial"))


def test_a_second_start_leaves_the_first_alone(text, tmp_path):
    """The same command again while a job is at it: refused, and nothing of the first is touched."""
    out, seen = tmp_path / "out", []
    words = [f"input={text}", f"output={out}", "mode=hash", f"rows={list(ROWS)}", "part=20000"]

    class SecondStart(Stopping):
        def update(self, n=1):
            if not seen:
                second = subprocess.run(command(*words), capture_output=True, text=True)
                seen.append(second.stderr)

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
