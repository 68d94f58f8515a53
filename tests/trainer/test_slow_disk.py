"""Dense features and labels of coming batches are loaded beside the steps, in every mode."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.trainer import build
from distcache.trainer.trainer import Run

STEPS, PATIENCE_S = 12, 30.0
MODES = ("data", "resident", "host", "hybrid")


class Meeting:
    """The training step s and the load of batch s + 1 wait for each other: neither can end before
    the other one began. `met`: (`step` or `load`, number) of those that found the other."""

    def __init__(self) -> None:
        self.steps = [threading.Event() for _ in range(STEPS + 1)]
        self.loads = [threading.Event() for _ in range(STEPS + 1)]
        self.met: list[tuple[str, int]] = []
        self.threads: set[str] = set()

    def load(self, number: int) -> None:
        """Batch `number` is being loaded."""
        self.loads[number].set()
        self.threads.add(threading.current_thread().name)
        if number and self.steps[number - 1].wait(PATIENCE_S):
            self.met.append(("load", number))

    def step(self, number: int) -> None:
        """Step `number` is being trained."""
        self.steps[number].set()
        if number + 1 < STEPS and self.loads[number + 1].wait(PATIENCE_S):
            self.met.append(("step", number))


class Waiting:
    """A source whose batches wait for the meeting when they are loaded."""

    def __init__(self, source, meeting: Meeting) -> None:
        self._source, self._meeting = source, meeting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train_batch(self, step: int, rank: int, world_size: int):
        """A batch that is loaded late."""
        batch = self._source.train_batch(step, rank, world_size).loaded()

        def load():
            self._meeting.load(step)
            return batch.dense, batch.labels

        return replace(
            batch, dense=batch.dense.to("meta"), labels=batch.labels.to("meta"), load=load
        )


def play(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    world, seen = open_world("cpu", timeout_s=100), {}
    for mode_name in MODES:
        overrides = [
            *("trainer.device=cpu", f"trainer.steps={STEPS}", "trainer.log_level=ERROR"),
            *("trainer.eval_steps=0", "run.save=false", f"parallel={mode_name}"),
            *("data.table_rows=[500,60]", "data.bag_size=1", "data.global_batch_size=16"),
            *("model.embedding_dim=4", "model.dense_arch=[8,4]", "model.over_arch=[8,1]"),
            *("cache.ratio=null", "cache.rows=200"),
        ]
        config, meeting = to_config(compose_overrides(overrides)), Meeting()
        source = Waiting(build.build_source(config), meeting)
        tables = build.build_tables(config, source)
        model = build.build_dense(config, tables, source.dense_features)
        mode = build.build_parallel(config, world, tables, model, source)
        train = mode.train_step

        def train_step(step, stop=False, train=train, meeting=meeting):
            meeting.step(step.batch.index)
            return train(step, stop=stop)

        mode.train_step = train_step
        home = Path(folder, mode_name)
        home.mkdir(exist_ok=True)
        summary = (
            Run(config, world, home, source, tables, mode).go(build.build_rates(config)).summary
        )
        seen[mode_name] = sorted(meeting.met), meeting.threads, summary["stage_ms"]
    close_world(world)
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_a_load_and_the_step_before_it_run_at_one_time(tmp_path, size):
    expected = [("load", number) for number in range(1, STEPS)]
    expected += [("step", number) for number in range(STEPS - 1)]
    for found in run_ranks(play, size, str(tmp_path), timeout=250):
        for mode in MODES:
            met, threads, stages = found[mode]
            assert met == expected, mode
            assert "MainThread" not in threads
            assert stages["load"] > 0 and stages["wait"] >= 0
