"""One rank: how a run ends, and what its folder holds."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import STUB, Forked, environment, train

from distcache import train as entry
from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.rendezvous import Place
from distcache.errors import ConfigError, DataError


def test_a_bug_shows_its_traceback_and_a_user_error_does_not(tmp_path):
    done = train(["trainer.seed=1", "run.dir=run"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: feature f3, table t_3: id 99 is beyond its 10 rows\n"
    done = train(["trainer.seed=3", "run.dir=run"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ZeroDivisionError: a bug\nTraceback")


def test_an_orderly_stop_ends_like_its_signal(tmp_path):
    assert train(["trainer.seed=4", "run.dir=run"], tmp_path).returncode == 130


def test_ctrl_c_in_the_middle(tmp_path):
    rank = Forked(
        [sys.executable, STUB, "trainer.seed=5", "run.dir=run"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "asleep").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    rank.send_signal(signal.SIGINT)
    assert (rank.communicate(timeout=60)[1], rank.returncode) == ("", 130)


@pytest.fixture
def world():
    return SimpleNamespace(size=1, device=SimpleNamespace(type="cpu"), backend="gloo")


def opened(folder: Path, world: SimpleNamespace, *overrides: str) -> None:
    config = to_config(compose_overrides([f"run.dir={folder}", *overrides]))
    entry.open_run_folder(folder, config, world)


def test_a_folder_that_cannot_be_made(world):
    with pytest.raises(ConfigError, match=r"run\.dir=/proc/none .*name another"):
        opened(Path("/proc/none"), world)


def test_another_run_is_overwritten_only_where_that_is_meant(tmp_path, world):
    opened(tmp_path, world)
    opened(tmp_path, world)  # a run that failed before its first step
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"\(summary.json, model\).*run.overwrite=true"):
        opened(tmp_path, world)
    assert (tmp_path / "summary.json").exists()
    for resume in (tmp_path, tmp_path / "model"):
        (tmp_path / "summary.json").write_text("{}")
        opened(tmp_path, world, f"trainer.resume={resume}")
        assert not (tmp_path / "summary.json").exists(), "until the new run has one of its own"
        assert (tmp_path / "model").exists()
    (tmp_path / "metrics.jsonl").write_text("{}")
    opened(tmp_path, world, "run.overwrite=true")
    assert not (tmp_path / "model").exists() and not (tmp_path / "metrics.jsonl").exists()
    assert json.loads((tmp_path / "environment.json").read_text())["world_size"] == 1


@pytest.mark.parametrize(
    ("code", "number"), [(None, 0), (0, 0), (3, 3), ("some words", 1), (True, 1)]
)
def test_exit_codes(code, number):
    assert entry.exit_code(SystemExit(code)) == number


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(4), 4), (KeyboardInterrupt(), 130), (DataError("x"), 1), (ValueError("bug"), 1)],
)
def test_whatever_happens_to_rank_0_is_published(monkeypatch, error, code):
    published = []

    def fail(place: Place) -> None:
        raise error

    monkeypatch.setattr(entry, "compose_command_line", fail)
    monkeypatch.setattr(entry, "publish", lambda store, size, value: published.append(value))
    with contextlib.suppress(ValueError):
        entry.agree(Place(), None)
    assert published == [{"text": None, "exit_code": code}]
