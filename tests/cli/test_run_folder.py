"""Run folders: runs that were killed early go on, two runs at once are refused, and a refused start
leaves nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import STUB, Forked, environment, train

SMALL = (
    *("data.table_rows=[300,30]", "data.global_batch_size=16", "model.embedding_dim=4"),
    *("model.dense_arch=[4]", "model.over_arch=[1]", "cache.rows=150", "optim=adagrad"),
    *("trainer.device=cpu", "trainer.steps=6", "trainer.checkpoint_every=2", "run.digest=true"),
    "trainer.eval_steps=0",
)
TRAIN = ("-m", "distcache.train")
RESTARTS = "no complete checkpoint: the run starts from the beginning"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of six steps with its checkpoints."""
    home = tmp_path_factory.mktemp("finished")
    done = train([*SMALL, "run.dir=run"], home, program=TRAIN)
    assert done.returncode == 0, done.stderr
    return home / "run"


def digests(run: Path) -> tuple[str, str]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["loss_digest"], summary["state_digest"]


def without_checkpoints(run: Path) -> None:
    """Leave what a SIGKILL leaves while the first checkpoint is written."""
    for path in [run / "summary.json", *run.glob("checkpoints/*/manifest.json")]:
        path.unlink()
    (run / ".lock").write_text('{"text": "process 1 on host a", "process": ["boot", 1, "7"]}')


def metrics_alone(run: Path) -> None:
    without_checkpoints(run)
    for path in run.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "metrics.jsonl":
            path.unlink()


def cut_configuration(run: Path) -> None:
    without_checkpoints(run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: len(text) // 2])


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@pytest.mark.parametrize("left", [without_checkpoints, metrics_alone, cut_configuration, empty])
def test_a_run_without_a_complete_checkpoint_starts_again(
    finished: Path, tmp_path: Path, left: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    left(run)
    done = train([*SMALL, "run.dir=run"], tmp_path, program=TRAIN)
    assert done.returncode == 0, done.stderr
    assert digests(run) == digests(finished)
    assert json.loads((run / "summary.json").read_text())["first_step"] == 0
    assert (run / "metrics.jsonl").read_text().count('"loss"') == 1, "lines of the killed run"
    assert done.stdout.count(RESTARTS) == (left is not empty)


def saved_by_hand(run: Path) -> None:
    (run / "summary.json").unlink()
    for path in run.glob("checkpoints/*/manifest.json"):
        path.parent.rename(path.parent.with_name(f"kept-{path.parent.name}"))


@pytest.mark.parametrize(
    ("left", "words", "named"),
    [
        (without_checkpoints, ("optim.eps=1e-3",), "optim.eps was 1e-08, is 0.001"),
        (without_checkpoints, ("trainer.seed=7",), "trainer.seed was 0, is 7"),
        (saved_by_hand, (), "(metrics.jsonl, checkpoints)"),
    ],
)
def test_another_run_without_a_complete_checkpoint_is_refused(
    finished: Path, tmp_path: Path, left: Callable[[Path], None], words: tuple, named: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    left(run)
    before = (run / "metrics.jsonl").read_bytes()
    done = train([*SMALL, "run.dir=run", *words], tmp_path, program=TRAIN)
    assert done.returncode == 1 and named in done.stderr, done.stderr
    assert "run.overwrite=true" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


# A file system without locks, in front of the program.
NO_LOCKS = f"""
import errno, fcntl, runpy, sys
def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = refuse
runpy.run_path({STUB!r}, run_name="__main__")
"""


@pytest.mark.parametrize("program", [(STUB,), ("-c", NO_LOCKS)], ids=["locks", "no locks"])
def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(
    tmp_path: Path, program: tuple[str, ...]
) -> None:
    command = [sys.executable, *program, "trainer.seed=5", "run.dir=run"]  # it sleeps
    again = ["trainer.seed=4", "run.dir=run", "run.overwrite=true"]
    first = Forked(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "asleep").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        second = train(again, tmp_path, 1, program)
        assert second.returncode == 1
        assert f"run.dir=run is in use: process {first.pid} on host " in second.stderr
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(60)
    assert (tmp_path / "run" / ".lock").exists(), "a killed process leaves its lock file"
    third = train(["trainer.seed=4", "run.dir=run"], tmp_path, 1, program)
    assert third.returncode == 0, third.stderr
    assert ("without locks (No locks available)" in third.stderr) == ("-c" in program)
    assert not (tmp_path / "run" / ".lock").exists()


# -----------------------------------------------------------------------------
# Starts that are refused, and commands that fail, leave no empty folder.


def damage(folder: Path) -> None:
    """Change bytes all over the largest file of a checkpoint, whose length stays."""
    path = max(folder.iterdir(), key=lambda own: own.stat().st_size)
    data = bytearray(path.read_bytes())
    data[::64] = bytes(byte ^ 1 for byte in data[::64])
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("train", (*SMALL, "run.dir=new/run", "trainer.resume=other")),
        ("train", (*SMALL, "cache.rows=1", "run.dir=new/run", "cache.placement=sharded")),
        ("train", (*SMALL, "data=criteo", "data.path=other", "run.dir=new/run")),
        ("export", ("resume=run", "output=new/out", "tables=none")),
        ("export", ("resume=run", "output=new/out", "format=csv")),
        ("analyze", ("data=criteo", "data.path=nothing", "output=new/out")),
        ("evaluate", ("resume=run", "metrics=new/out/a.json", "optim=adam")),
    ],
)
def test_a_refusal_leaves_no_folder(
    finished: Path, tmp_path: Path, module: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").symlink_to(finished)
    done = train(words, tmp_path, program=("-m", f"distcache.{module}"))
    assert done.returncode == 1 and "error: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]
    assert list((tmp_path / "other").iterdir()) == []


def test_a_refusal_leaves_a_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    words = (*SMALL, "run.dir=run", "cache.rows=1")
    assert train(words, tmp_path, program=TRAIN).returncode == 1
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("export", ("resume=run", "output=out")),
        ("evaluate", ("resume=run", "metrics=out/a.json", "trainer.eval_steps=1")),
        ("train", (*SMALL, "run.dir=new", "trainer.resume=run")),
    ],
)
def test_an_intact_checkpoint_beside_a_damaged_one_is_named(
    finished: Path, tmp_path: Path, module: str, words: tuple[str, ...]
) -> None:
    run, program = tmp_path / "run", ("-m", f"distcache.{module}")
    shutil.copytree(finished, run)
    oldest, *others = sorted((run / "checkpoints").iterdir())
    assert others and others[-1].name == "step_00000006"
    for folder in others:
        damage(folder)
    done = train(words, tmp_path, program=program)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step_00000006 is damaged" in done.stderr
    intact = f"run/checkpoints/{oldest.name}"
    assert re.search(rf"intact beside it is \S*{intact}$", done.stderr, re.MULTILINE), done.stderr
    named = [word.replace("resume=run", f"resume={intact}") for word in words]
    done = train(named, tmp_path, program=program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("seconds", "shown"), [(3600, [1, 6]), (0, [1, 2, 3, 4, 5, 6])])
def test_the_screen_shows_steps_by_time_and_stage_times_once(tmp_path, seconds, shown) -> None:
    words = ("trainer.log_every=1", f"trainer.log_seconds={seconds}", "run.dir=run")
    done = train([*SMALL, *words], tmp_path, program=TRAIN)
    assert done.returncode == 0, done.stderr
    assert [int(step) for step in re.findall(r"step (\d+)/6  loss ", done.stdout)] == shown
    assert done.stdout.count("ms/step: forward_backward ") == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all("stage_ms" in json.loads(line) for line in lines)
