"""Preprocessing jobs that are stopped or killed: going on without redoing, to the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from criteo_lines import ROWS, make_lines, write_lines
from preprocess_runs import command, run, same_files

from distcache.data.raw import job
from distcache.data.raw.job import preprocess
from distcache.data.raw.settings import PreprocessSettings, read_manifest, verify
from distcache.errors import ConfigError


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
