"""Losses that are read steps later, as on a GPU: same run, same stop, and the state before a bad
step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from scenarios import SmallNet
from toy_parallel import TABLES, ToySource, toy_config

from distcache.comm.world import World, close_world, open_world
from distcache.errors import NonFiniteLossError
from distcache.models import initialise
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.trainer.trainer import Run

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adam")
BAD, STOP = 6, 4


class Net(SmallNet):
    def __init__(self) -> None:
        super().__init__(3, 8)


def make(world: World, optimizer: str, delay: int | None, stop_at: int | None) -> CachedParallel:
    settings = CachedSettings("data", (28,), 3, 2, dtype=torch.float64, result_delay=delay)
    features = ("cat_0", "cat_1")
    model = initialise(Net(), 0, torch.float64)
    mode = CachedParallel(world, TABLES, features, model, OptimizerSpec(optimizer), settings)
    step_of = mode.train_step

    def train_step(step, stop=False):
        if step.batch.index == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step_of(step, stop)

    mode.train_step = train_step
    return mode


def run(world, folder, optimizer, delay, stop_at=None, bad=None, **changes):
    changes = {
        "optim__name": optimizer,
        "trainer__eval_every": 5,
        "trainer__eval_steps": 2,
    } | changes
    mode = make(world, optimizer, delay, stop_at)
    source = ToySource(bad=bad)
    whole = Run(toy_config(**changes), world, Path(folder), source, TABLES, mode)
    return whole.go(lambda step: (0.05, 0.05))


def found(result) -> dict:
    keys = ("loss_digest", "state_digest", "final_loss", "eval_auc", "steps", "hit_rate")
    return {key: result.summary[key] for key in keys}


def cases(rank: int, size: int, folder: str) -> dict:
    """Whole runs, stopped ones, ones with a bad step and their resumption, by optimizer."""
    world, home, seen = open_world("cpu", "gloo", 60), Path(folder), {}
    for optimizer in OPTIMIZERS:
        at_once = run(world, home / "at_once", optimizer, 0)
        late = run(world, home / "late", optimizer, 2)
        seen[optimizer, "whole"] = found(at_once), found(late)
        stopped = run(world, home / "stopped", optimizer, 2, stop_at=STOP)
        seen[optimizer, "stopped"] = stopped.stopped_by, stopped.summary["steps"]
        rest = run(world, home / "rest", optimizer, 2, trainer__resume=str(home / "stopped"))
        seen[optimizer, "resumed"] = found(rest)
        bad = (BAD, size - 1)
        texts = []
        for delay in (0, 2):
            with pytest.raises(NonFiniteLossError) as caught:
                run(world, home / f"bad{delay}", optimizer, delay, bad=bad)
            texts.append(str(caught.value).replace(f"bad{delay}", "bad"))
        seen[optimizer, "bad"] = texts
        # The state that a bad step leaves is that before it: the run goes on to the same end.
        good = run(world, home / "good", optimizer, 2, trainer__resume=str(home / "bad2"))
        seen[optimizer, "repaired"] = found(good)
    close_world(world)
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_same_run_same_stop_and_the_state_before_a_bad_step(tmp_path, size) -> None:
    ranks = run_ranks(cases, size, str(tmp_path), timeout=300)
    for rank in ranks:
        for optimizer in OPTIMIZERS:
            at_once, late = rank[optimizer, "whole"]
            assert late == at_once and late["steps"] == 14
            by, steps = rank[optimizer, "stopped"]
            assert by == signal.SIGINT and STOP < steps <= STOP + 1 + 2
            assert steps == ranks[0][optimizer, "stopped"][1]
            for name in ("resumed", "repaired"):
                found = rank[optimizer, name]
                for key in ("loss_digest", "state_digest", "final_loss", "eval_auc"):
                    assert found[key] == at_once[key], (name, key)
            at_once, late = rank[optimizer, "bad"]
            assert late == at_once
            assert late.startswith(f"step {BAD}: the loss is not finite on rank {size - 1};")
