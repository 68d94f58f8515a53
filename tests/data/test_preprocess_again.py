"""Preprocessing jobs started again: beside the first, after a killed one, over a damaged result."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from criteo_lines import ROWS
from preprocess_runs import run, same_files

from distcache.data.raw import job as alone
from distcache.data.raw.job import preprocess
from distcache.data.raw.settings import PreprocessSettings, verify
from distcache.errors import ConfigError, DataError


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
from distcache.data.raw import job as pool
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
