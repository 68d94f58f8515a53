"""Every placement where a stream does not just end: bad losses, new streams, resumption."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from placement_cases import KINDS, fitting_slots, placement_of
from protocol_cases import CASE, batches, state, train
from ranks import run_ranks
from scenarios import OPTIMIZERS, make_mode

from distcache.comm.world import World, close_world, open_world
from distcache.parallel.cached import CachedParallel, CachedSettings

BAD, STEPS = 3, 6
ALL = ("replicated", *KINDS)


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


def test_a_loss_that_is_not_finite_changes_no_row_and_is_sticky() -> None:
    for found in run_ranks(spoil, 3):
        for key, (bad, after, expected, applied) in found.items():
            assert after == expected and applied == BAD, key
            assert bad[:BAD] == [()] * BAD, key
            # Whoever goes on is told again, and nothing applies any more.
            assert bad[BAD:] == [(2,)] * (STEPS - BAD), key


def leave(rank: int, size: int, folder: str) -> list[list]:
    """Losses and the state, for each placement, of one stream, of three that are left early, and of
    two of which the second is of another placement's model that goes on from a checkpoint."""
    world, found = open_world("cpu", "gloo", 60), []
    for kind, other in zip(ALL, (*ALL[1:], ALL[0]), strict=True):
        runs = []
        for cuts, goes_on in (((), kind), ((1, 4), kind), ((3,), other)):
            mode, losses = mode_of(world, kind, "adagrad", prefetch=3, lookahead=5), []
            for start, stop in zip((0, *cuts), (*cuts, STEPS), strict=True):
                if start > 1:
                    mode.flush()  # rows stay cached and are clean
                if start and goes_on != kind:
                    dcp.save(mode.state_dict(), checkpoint_id=f"{folder}/{kind}")
                    mode.close()
                    mode = mode_of(world, goes_on, "adagrad")
                    saved = mode.blank_state()
                    dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
                    mode.load_state_dict(saved)
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


def test_streams_left_early_and_other_placements_go_on_to_the_same_bits(tmp_path) -> None:
    for found in run_ranks(leave, 3, str(tmp_path)):
        for kind, (whole, *parts) in zip(ALL, found, strict=True):
            assert parts == [whole, whole], kind
        assert len({whole[1] for whole, *_ in found}) == 1
