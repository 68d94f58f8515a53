"""The main command as a user gives it: processes, run folders, digests, resume, Ctrl-C, errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import environment, train

SMALL = (
    "data.table_rows=[4000,300,50,3]",
    "data.global_batch_size=64",
    "model.embedding_dim=8",
    "model.dense_arch=[16,8]",
    "model.over_arch=[16,1]",
    "cache.rows=400",
    "trainer.log_every=5",
    "trainer.device=cpu",
    "trainer.timeout_s=60",
)


PROGRAM = ("-m", "distcache.train")


def run(folder: Path, ranks: int, *overrides: str, code: int = 0, fresh: bool = False) -> str:
    """A run in `folder`: what it said."""
    words = [*SMALL, f"run.dir={folder}", *overrides]
    done = train(words, folder.parent, ranks, PROGRAM, fresh)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def digests(folder: Path) -> tuple[str, str]:
    found = summary(folder)
    assert found["loss_digest"] and found["state_digest"]
    return found["loss_digest"], found["state_digest"]


def traced(folder: Path) -> dict[int, set[str]]:
    """Stages in the trace of a run by process number, its only file of that name."""
    (path,) = folder.glob("trace*")
    stages: dict[int, set[str]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            stages.setdefault(event["pid"], set()).add(event["cat"])
    return stages


@pytest.mark.parametrize("ranks", [1, 2])
def test_modes_and_resume_have_the_same_digests(tmp_path: Path, ranks) -> None:
    adam = ("optim=adam", "optim.embedding_lr=0.01", "optim.dense_lr=0.01", "trainer.steps=24")
    evaluated = ("trainer.eval_every=7", "trainer.eval_steps=2")
    run(tmp_path / "data", ranks, *adam)
    run(tmp_path / "resident", ranks, *adam, "parallel=resident", *evaluated)
    expected = digests(tmp_path / "data")
    assert digests(tmp_path / "resident") == expected
    assert summary(tmp_path / "resident")["eval_auc"] > 0.4
    run(tmp_path / "first", ranks, *adam, "trainer.steps=10")
    resume = f"trainer.resume={tmp_path / 'first'}"
    run(tmp_path / "second", ranks, *adam, resume, "cache.rows=500")
    assert digests(tmp_path / "second") == expected
    found = summary(tmp_path / "second")
    assert (found["first_step"], found["steps"]) == (10, 14)


def test_hybrid_agrees_and_resumes(tmp_path: Path) -> None:
    settings = ("optim=adagrad", "optim.initial_accumulator=0.1", "trainer.steps=16")
    rows = ("parallel=hybrid", "parallel.sharding=row_wise")
    run(tmp_path / "data", 2, *settings)
    run(tmp_path / "hybrid", 2, *settings, *rows, "trainer.trace=true")
    assert traced(tmp_path / "hybrid") == {key: {"wait", "step", "forward"} for key in (1, 2)}
    one, other = summary(tmp_path / "data"), summary(tmp_path / "hybrid")
    assert one["final_loss"] == pytest.approx(other["final_loss"], rel=1e-5)
    assert set(one) == set(other)
    run(tmp_path / "first", 2, *settings, *rows, "trainer.steps=9")
    resume = f"trainer.resume={tmp_path / 'first'}"
    run(tmp_path / "second", 2, *settings, *rows, resume)
    assert digests(tmp_path / "second") == digests(tmp_path / "hybrid")


def test_ctrl_c_leaves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    folder, steps = tmp_path / "stopped", "trainer.steps=100000"
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *SMALL, f"run.dir={folder}", steps, "trainer.trace=true"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline and process.poll() is None, "no first log line"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, output
    stopped = summary(folder)["steps"]
    assert {"plan", "gather", "forward_backward", "wait"} <= traced(folder)[1]
    total = f"trainer.steps={stopped + 5}"
    run(tmp_path / "second", 1, total, f"trainer.resume={folder}")
    run(tmp_path / "whole", 1, total)
    assert digests(tmp_path / "second") == digests(tmp_path / "whole")


def test_errors_name_the_way_out_on_two_ranks(tmp_path: Path) -> None:
    output = run(tmp_path / "tight", 2, "cache.rows=20", code=1, fresh=True)
    assert output.index("set cache.rows=") < output.index("Traceback"), "torchrun's own comes last"
    output = run(tmp_path / "both", 2, "cache.ratio=0.5", code=1)
    assert "cache.rows" in output and "cache.ratio" in output


def test_models_widths_and_bags_from_the_command_line(tmp_path: Path) -> None:
    shape = (
        "model=dcn_v2",
        "model.table_dims=[8,4,8,4]",
        "model.dense_arch=[16,8]",
        "model.over_arch=[16,1]",
        "model.cross_rank=4",
        "data.bag_size=[1,2.5,3,1]",
        "data.weighted=true",
        "data.samples=640",
        "trainer.steps=12",
        "optim=rowwise_adagrad",
        "cache.rows=1800",
        "trainer.amp=bf16",
    )
    for mode in ("data", "resident"):
        output = run(tmp_path / mode, 2, *shape, f"parallel={mode}", "trainer.trace=true")
        assert "trace of 2 rank(s)" in output and "  stall " in output and "| hidden: " in output
        assert set(traced(tmp_path / mode)) == {1, 2}
    assert digests(tmp_path / "data") == digests(tmp_path / "resident")
    found = summary(tmp_path / "data")
    assert 0 < found["hit_rate"] < 1 and found["collective_bytes"] > 0
