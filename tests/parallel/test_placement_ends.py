"""Every placement where a stream does not just end: bad losses, new streams, resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from placement_cases import KINDS, fitting_slots, placement_of
from protocol_cases import CASE, batches, state, train
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, SmallNet, make_mode
from toy_parallel import TABLES, toy_run

from distcache.comm.world import World, close_world, open_world
from distcache.engine.groups import Placement
from distcache.models import initialise
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedParallel, CachedSettings

BAD, STEPS = 3, 6
ALL = ("replicated", *KINDS)
TOY = Scenario(TABLES, OptimizerSpec("adam"))


def mode_of(world: World, kind: str, optimizer: str, **how: object) -> CachedParallel:
    """`CASE` with a placement, in a cache in which its steps just fit."""
    placement = placement_of(kind, CASE)
    slots = fitting_slots(CASE, world.size, placement, 1)
    spec, lr = OPTIMIZERS[optimizer]
    settings = CachedSettings("data", slots, 4, 2, validate=True, placement=placement)
    return make_mode(world, replace(CASE, optimizer=spec, lr=lr), replace(settings, **how))


def bad_batches(world: World, rank: int):
    """`CASE`, whose step `BAD` has dense features that are not numbers on one rank."""
    for batch in batches(world, range(STEPS)):
        spoilt = batch.index == BAD and world.rank == rank
        yield replace(batch, dense=batch.dense * torch.nan) if spoilt else batch


def spoil(rank: int, size: int) -> dict:
    """By placement and delay: the ranks that were named at each step, and the state at the end;
    and the state after the steps before the bad one."""
    world, found = open_world("cpu", "gloo", 60), {}
    for number, kind in enumerate(ALL):
        optimizer = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
        plain = mode_of(world, kind, optimizer)
        train(plain, batches(world, range(BAD)))
        expected = state(plain)
        plain.close()
        for delay in (0, 2):
            mode, named = mode_of(world, kind, optimizer, result_delay=delay), []
            for step in mode.stream(bad_batches(world, size - 1)):
                named.append(mode.train_step(step))
            bad = [result.bad_ranks for result in named]
            found[kind, delay] = bad, state(mode), expected, int(mode.applied)
            mode.close()
    close_world(world)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_that_is_not_finite_changes_no_row_and_is_sticky(world: int) -> None:
    for found in run_ranks(spoil, world):
        for key, (bad, after, expected, applied) in found.items():
            assert after == expected and applied == BAD, key
            assert bad[:BAD] == [()] * BAD, key
            # Whoever goes on is told again, and nothing applies any more.
            assert bad[BAD:] == [(world - 1,)] * (STEPS - BAD), key


def leave(rank: int, size: int) -> list[list]:
    """Losses and the state, for each placement, of one stream and of three that are left early."""
    world, found = open_world("cpu", "gloo", 60), []
    for kind in ALL:
        runs = []
        for cuts in ((), (1, 4)):
            mode, losses = mode_of(world, kind, "adagrad", prefetch=3, lookahead=5), []
            for start, stop in zip((0, *cuts), (*cuts, STEPS), strict=True):
                if start > 1:
                    mode.flush()  # rows stay cached and are clean
                # All that follows is planned, and much of it has moved, when the stream is left.
                stream = mode.stream(batches(world, range(start, STEPS), evals=True))
                for step in stream:
                    if step.batch.kind == "eval":
                        mode.eval_step(step)
                        continue
                    losses.append(mode.train_step(step).loss)
                    if len(losses) == stop and stop < STEPS:
                        break
                stream.close()
            runs.append((losses, state(mode)))
            mode.close()
        found.append(runs)
    close_world(world)
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_streams_that_are_left_early_go_on_to_the_same_bits(world: int) -> None:
    for found in run_ranks(leave, world):
        for kind, (whole, parts) in zip(ALL, found, strict=True):
            assert parts == whole, kind
        assert len({whole[1] for whole, _ in found}) == 1


def whole_run(world: World, folder: Path, placement: Placement, **changes: object) -> dict:
    """A run of the trainer with checkpoints; its digests."""
    settings = CachedSettings("data", (36,), 3, 2, dtype=torch.float64, placement=placement)
    model = initialise(SmallNet(3, 8), 0, torch.float64)
    features = ("cat_0", "cat_1")
    mode = CachedParallel(world, TABLES, features, model, OptimizerSpec("adam"), settings)
    changes |= {"optim__name": "adam", "trainer__eval_every": 5, "trainer__eval_steps": 2}
    summary = toy_run(world, folder, mode, rates=lambda step: (0.05, 0.05), **changes).summary
    keys = ("loss_digest", "state_digest", "final_loss", "eval_auc")
    return {key: summary[key] for key in keys}


def resume(rank: int, size: int, folder: str) -> dict:
    """Runs that stop half-way in one placement and go on in the next one."""
    world, home, found = open_world("cpu", "gloo", 60), Path(folder), {}
    kinds = [Placement(), *(placement_of(kind, TOY, 0.3) for kind in KINDS)]
    for name, placement, after in zip(ALL, kinds, (*kinds[1:], kinds[0]), strict=True):
        path = home / name
        whole_run(world, path / "half", placement, trainer__steps=8)
        found[name] = whole_run(world, path / "rest", after, trainer__resume=str(path / "half"))
    found["whole"] = whole_run(world, home / "whole", kinds[0])
    close_world(world)
    return found


def test_a_run_resumes_in_another_placement(tmp_path: Path) -> None:
    for found in run_ranks(resume, 2, str(tmp_path), timeout=200):
        for kind, digests in found.items():
            assert digests == found["whole"], kind
