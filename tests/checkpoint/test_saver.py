"""Checkpoints while a run goes on: any of them leads to the end of the run that never stopped, a
damaged one is passed over, and what is kept is the newest and the best."""

from __future__ import annotations

import json
import logging
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from ranks import run_ranks
from toy_parallel import ToyParallel, ToySource, toy_run

from distcache.checkpoint import manifest, saver
from distcache.checkpoint.manifest import BlockFile, Manifest
from distcache.comm.world import World, close_world, open_world
from distcache.config.checks import cadence
from distcache.errors import ConfigError, DataError
from distcache.trainer import record

EVERY = {"trainer__checkpoint_every": 3, "trainer__keep_checkpoints": 9}


class Waiting(ToyParallel):
    """Waits after each step until no checkpoint is written, so that none that is due does; or, in
    the `front`, has none written beside it."""

    front = False

    def train_step(self, step, asks=0):
        result = super().train_step(step, asks)
        wait_for_writing()
        return result

    def snapshot(self, folder):
        return None if self.front else super().snapshot(folder)


def wait_for_writing() -> None:
    for thread in threading.enumerate():
        if thread.name == "distcache-checkpoint":
            thread.join(30)


def run(world: World, folder: Path, delay: int = 0, **changes: Any) -> tuple[str, str]:
    """A toy run; digests of its losses and its end."""
    result = toy_run(world, folder, Waiting(world, delay), ToySource(), **changes)
    return result.summary["loss_digest"], result.summary["state_digest"]


def steps(folder: Path) -> list[int]:
    """Of the checkpoints of a run folder."""
    return sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step_*"))


def from_every_one(rank: int, size: int, home: str, delay: int, front: bool) -> dict[str, Any]:
    """A run without stop, with checkpoints, and what each of these led to."""
    Waiting.front = front
    world, folder = open_world("cpu", timeout_s=60), Path(home) / "saved"
    whole = run(world, Path(home) / "whole", delay)
    seen = [run(world, folder, delay, trainer__eval_every=5, trainer__eval_steps=2, **EVERY)]
    made = steps(folder)
    for step in made:
        source = folder / "checkpoints" / f"step_{step:08d}"
        again = {"trainer__resume": str(source), "run__save": False}
        seen.append(run(world, Path(home) / f"from-{step}", delay, **again))
    close_world(world)
    return {"whole": whole, "seen": seen, "made": made}


@pytest.mark.parametrize(("size", "delay", "front"), [(1, 0, True), (2, 0, False), (2, 2, False)])
def test_resumed_from_any_checkpoint_a_run_has_its_own_bits(tmp_path, size, delay, front):
    # Where losses are read two steps later, so is whether somebody is still writing.
    for found in run_ranks(from_every_one, size, str(tmp_path), delay, front):
        assert found["made"] == [3, 6, 9, 12, 14]
        assert found["seen"] == [found["whole"]] * 6
    left = {path.name for path in (tmp_path / "saved/checkpoints/step_00000006").iterdir()}
    assert left == {".metadata", "manifest.json", *(f"__{rank}_0.distcp" for rank in range(size))}


def part(rank: int, size: int, home: str, first: int, last: int, mode: str) -> tuple:
    """Steps `first` to `last`, in another folder for each part of a run; its end."""
    world, folder = open_world("cpu", timeout_s=60), Path(home)
    made = ToyParallel(world, mode=mode)
    source = str(folder / f"to-{first}") if first else "never"
    keys = {"trainer__resume": source, "trainer__steps": last, "parallel__mode": mode}
    loss = toy_run(world, folder / f"to-{last}", made, ToySource(), **keys).summary["final_loss"]
    close_world(world)
    values = checkpoints.tensors(max((folder / f"to-{last}").glob("checkpoints/step_*")))
    return loss, {name: value.numpy() for name, value in values.items()}


WAYS = [
    [(1, 4, "data"), (3, 9, "resident"), (2, 14, "host")],
    [(3, 5, "host"), (1, 6, "resident"), (3, 11, "data"), (2, 14, "data")],
    [(2, 3, "resident"), (3, 14, "data")],
]


@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_ranks_goes_on_in_any_mode(tmp_path, way):
    expected = run_ranks(part, 1, str(tmp_path / "whole"), 0, 14, "data")[0]
    first = 0
    for size, last, mode in way:
        found = run_ranks(part, size, str(tmp_path / "parts"), first, last, mode)[0]
        first = last
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    assert found[1].keys() == expected[1].keys() and len(found[1]) > 10
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, 1e-10, 1e-10, err_msg=name)


def test_the_newest_whole_one_is_gone_on_with_and_metrics_are_cut_back(world, tmp_path, caplog):
    every = EVERY | {"trainer__log_every": 1, "trainer__resume": "auto"}
    whole = run(world, tmp_path / "whole", **every)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    run(world, tmp_path / "run", trainer__steps=11, **every)  # then it is killed in step 12
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    for step, damage in ((11, b"1"), (9, None)):
        files = sorted((tmp_path / f"run/checkpoints/step_{step:08d}").iterdir())
        data = next(path for path in files if path.suffix == ".distcp")
        if damage:
            data.write_bytes(damage * data.stat().st_size)
        else:
            data.unlink()
    (tmp_path / "run/checkpoints/step_00000012").mkdir()  # not finished
    caplog.set_level(logging.INFO, logger="distcache")
    assert run(world, tmp_path / "run", **every) == whole
    passed = [line for line in caplog.messages if line.startswith("passed over")]
    for step, line in zip((11, 9), passed, strict=True):
        assert f"step_{step:08d}" in line
    assert "read step 6 " in caplog.text
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    keep = ("step", "epoch", "loss")
    assert [[json.loads(line)[key] for key in keep] for line in again] == [
        [json.loads(line)[key] for key in keep] for line in lines
    ]
    assert steps(tmp_path / "run") == [3, 6, 9, 11, 12, 14]
    for path in (tmp_path / "run").glob("checkpoints/step_*/*.distcp"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no checkpoint in .*run is intact \(6 are damaged\)"):
        run(world, tmp_path / "run", **every)


def test_the_newest_and_the_best_are_kept(world, tmp_path, monkeypatch):
    losses = iter([0.9, 0.5, 0.7, 0.6, 0.8])
    real = record.measure

    def measured(logits, labels):
        found = real(logits, labels)
        return record.EvalResult(found.auc, next(losses), found.ne, found.samples)

    monkeypatch.setattr(record, "measure", measured)
    keys = {"trainer__keep_checkpoints": 1, "trainer__keep_best": "eval_logloss"}
    keys |= {"trainer__eval_every": 3, "trainer__eval_steps": 1, "trainer__checkpoint_every": 4}
    run(world, tmp_path, **keys)
    assert steps(tmp_path) == [6, 14]  # losses of steps 3, 6, 9, 12 and 14
    best = Manifest.read(tmp_path / "checkpoints/step_00000006").header
    assert (best["metrics"]["eval_logloss"], best["step"]) == (0.5, 6)


class Slow:
    """Lets nothing be written to files of values before `go` is set, or half a second."""

    def __init__(self, monkeypatch, fails: bool = False) -> None:
        self.go, self.began, real = threading.Event(), 0, BlockFile.write

        def write(file, data):
            if threading.current_thread().name == "distcache-checkpoint":
                self.began += 1
                self.go.wait(0.5)
                if fails:
                    raise OSError(28, "No space left on device")
            return real(file, data)

        monkeypatch.setattr(manifest.BlockFile, "write", write)


class Watched(ToyParallel):
    """Calls `after` with the number of each step that was trained."""

    after: Callable[[int], None]

    def train_step(self, step, asks=0):
        result = super().train_step(step, asks)
        self.after(step.batch.index)
        return result


def test_one_that_is_due_while_another_is_written_waits_and_training_does_not(
    world, tmp_path, monkeypatch, caplog
):
    slow, mode = Slow(monkeypatch), Watched(world)

    def after(step: int) -> None:
        if step == 3:  # the first is begun after step 2
            until = time.monotonic() + 10
            while not slow.began and time.monotonic() < until:
                time.sleep(0.01)
        if step >= 9:
            slow.go.set()
            wait_for_writing()

    mode.after = after
    expected = run(world, tmp_path / "plain")
    result = toy_run(world, tmp_path / "run", mode, **EVERY)
    assert (result.summary["loss_digest"], result.summary["state_digest"]) == expected
    # Of step 6 it waits for the word of step 11 that nobody writes, of step 12 for that of 13.
    assert steps(tmp_path / "run") == [3, 11, 13, 14]
    assert caplog.text.count("is still being written: it waits") == 1


def test_a_full_disk_ends_a_checkpoint_and_not_the_run(world, tmp_path, monkeypatch, caplog):
    expected = run(world, tmp_path / "plain")
    Slow(monkeypatch, fails=True).go.set()
    assert run(world, tmp_path / "run", **EVERY) == expected
    assert steps(tmp_path / "run") == [14]
    assert "no checkpoint at step 3: the checkpoint" in caplog.text and "No space" in caplog.text


def test_cadences():
    found = [cadence(every) for every in (1000, "7", "90s", "30min", "1.5h", "end")]
    assert found == [(1000, None), (7, None), (None, 90), (None, 1800), (None, 5400), (None, None)]
    for every in (0, -1, "", "x", "0s", "5m", "5 min", True, None):
        with pytest.raises(ConfigError, match=r"trainer\.checkpoint_every=.*30min"):
            cadence(every)


def by_the_clock(rank: int, size: int, home: str) -> tuple[list[int], tuple[str, str]]:
    """Rank 0's clock alone runs."""
    world = open_world("cpu", timeout_s=60)
    if rank:
        saver.time.monotonic = lambda: 0.0
    found = run(
        world, Path(home), trainer__checkpoint_every="0.0001s", trainer__keep_checkpoints=99
    )
    close_world(world)
    return steps(Path(home)), found


def test_minutes_are_those_of_rank_0(tmp_path):
    first, second = run_ranks(by_the_clock, 2, str(tmp_path))
    assert first == second and len(first[0]) > 2


@pytest.mark.parametrize("delay", [0, 2])
def test_what_was_due_for_several_steps_is_written_once(tmp_path, world, monkeypatch, delay):
    """Losses are read steps later, and so is that a checkpoint is due."""
    now = [0.0]
    monkeypatch.setattr(saver, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Waiting):
        def train_step(self, step, asks=0):
            now[0] += 100 * (step.batch.index == 4)
            return super().train_step(step, asks)

    how = {"trainer__checkpoint_every": "60s", "trainer__keep_checkpoints": 9}
    toy_run(world, tmp_path, Slow(world, delay), ToySource(), **how)
    assert steps(tmp_path) == [6 + delay, 14]
