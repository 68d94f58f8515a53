"""Streams that end, stop or fail at random points, on ranks of random speed, in one run each.

Whatever happens, all ranks train the same steps, and the next stream goes on to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from ends import Job
from placement_cases import KINDS, placement_of
from protocol_cases import CASE, batches, make, planner_threads, state

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch
from distcache.planner.victims import Policy

STEPS = 6
NEVER = 99


class Plan:
    """What happens in one run, the same on all ranks: drawn from a seed."""

    def __init__(self, seed: int, world: int) -> None:
        rng = np.random.default_rng(seed)
        self.mode = str(rng.choice(["data", "data", "data", "host", "resident"]))
        self.policy = str(rng.choice(["lookahead", "lookahead", "lru", "lfu"]))
        self.lookahead, self.prefetch = int(rng.choice([0, 1, 3, 9])), int(rng.choice([0, 1, 3, 9]))
        self.lengths = rng.integers(0, STEPS + 1, world) if rng.random() < 0.4 else [STEPS] * world
        self.stop = int(rng.integers(0, STEPS)) if rng.random() < 0.5 else NEVER
        self.fail = int(rng.integers(0, STEPS)) if rng.random() < 0.4 else NEVER
        self.stopping, self.failing = (int(rank) for rank in rng.integers(0, world, 2))
        self.pauses = rng.choice([0.0, 0.0, 0.0, 0.02], (world, 2))
        self.kind = ""  # every other plan is of a placement
        if seed % 2:
            self.mode, self.kind = "data", KINDS[seed // 2 % len(KINDS)]

    @property
    def steps(self) -> int:
        """How many steps are trained."""
        return min(*self.lengths, self.fails, self.stop + 1, STEPS)

    @property
    def fails(self) -> int:
        """The step whose batch cannot be read (`NEVER`: the failing rank ends before it)."""
        return self.fail if self.fail < self.lengths[self.failing] else NEVER

    @property
    def raises(self) -> bool:
        """Whether all ranks raise; a stop or an end before the failing step comes first."""
        return self.fails == self.steps and self.stop + 1 > self.fails


def one(world: World, plan: Plan) -> tuple:
    how = {"mode": plan.mode, "policy": Policy(plan.policy)}
    if plan.kind:
        how |= {"placement": placement_of(plan.kind, CASE), "slots": (48, 12)}
    mode = make(world, plan.lookahead, plan.prefetch, **how)
    read_pause, step_pause = plan.pauses[world.rank]
    losses, error = [], ""

    def source() -> Iterator[Batch]:
        fail_at = plan.fails if world.rank == plan.failing else None
        steps = range(plan.lengths[world.rank])
        yield from batches(world, steps, fail_at=fail_at, pause=read_pause)

    try:
        for step in mode.stream(source()):
            wish = step.batch.index == plan.stop and world.rank == plan.stopping
            result = mode.train_step(step, stop=wish)
            losses.append(result.loss)
            time.sleep(step_pause)
            if result.stop:
                break
    except Exception as caught:
        error = type(caught).__name__
    first, threads = len(losses), planner_threads()
    for step in mode.stream(batches(world, range(first, STEPS))):
        losses.append(mode.train_step(step).loss)
    end = state(mode)
    mode.close()
    return first, threads, error, losses, end


def run(rank: int, size: int, seeds: range) -> dict:
    world = open_world("cpu", "gloo", 60)
    seen = {seed: one(world, Plan(seed, size)) for seed in seeds}
    close_world(world)
    return seen


def check(world: int, seeds: range) -> None:
    ends = Job(run, world, seeds).ends(60 + 10 * len(seeds))
    assert all(isinstance(end.value, dict) for end in ends), ends
    whole = {(tuple(losses), end) for seen in ends for *_, losses, end in seen.value.values()}
    assert len(whole) == 1
    for rank, seen in enumerate(ends):
        for seed, (first, threads, error, losses, _) in seen.value.items():
            plan = Plan(seed, world)
            assert (first, threads, len(losses)) == (plan.steps, 0, STEPS), (rank, seed)
            expected = "OSError" if rank == plan.failing else "PeerError"
            assert error == (expected if plan.raises else ""), (rank, seed)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_streams(world: int) -> None:
    check(world, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_many_random_streams(world: int) -> None:
    check(world, range(100, 180))


def test_the_plans_are_of_all_kinds() -> None:
    plans = [Plan(seed, 3) for seed in range(8)]
    assert any(plan.raises for plan in plans) and any(plan.stop < NEVER for plan in plans)
    assert len({plan.steps for plan in plans}) >= 3
    assert len({plan.kind for plan in plans}) == len(KINDS) + 1
    assert len({plan.mode for plan in plans}) == 3
