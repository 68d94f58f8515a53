"""Runs that stop and go on with other ranks, modes and caches: the same global batches in the same
order, the same bits at the same number of ranks, the same numbers at another and with hybrid."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import KINDS, TABLES, fitting_slots, placement_of
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, Source
from toy_parallel import toy_config

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch
from distcache.engine.groups import Placement
from distcache.parallel.base import Parallel, Step, StepResult
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.trainer.trainer import Run

STEPS = 12
EXAMPLES = 120 if settings.default.max_examples > 25 else 4
"""Each starts ranks two or three times."""


@dataclass(frozen=True)
class Leg:
    """A part of a run, up to step `last`: on `ranks` in `mode`, with what a cache may be; `beside`:
    its checkpoint is written while a step more is trained, which the next part does again;
    `whole_every`: where more than 1, others are written before it, if `last` is no prime."""

    ranks: int
    last: int = STEPS
    mode: str = "data"
    beside: bool = False
    kind: str = "replicated"
    room: int = 0
    ahead: tuple[int, int] = (2, 1)
    schedule: str = "overlapped"
    sharding: str = "row_wise"
    whole_every: int = 1


def made(case: Scenario, leg: Leg, world: World) -> Parallel:
    """The mode of a part."""
    if leg.mode == "hybrid":
        from distcache.parallel.hybrid import HybridParallel, HybridSpec

        spec = HybridSpec(case.tables, case.features, case.optimizer, case.seed, leg.sharding)
        return HybridParallel(world, spec, case.model())
    placement = Placement() if leg.kind == "replicated" else placement_of(leg.kind, case)
    slots = [slots + leg.room * world.size for slots in fitting_slots(case, world.size, placement)]
    how: dict[str, Any] = {"schedule": leg.schedule, "dtype": case.dtype, "placement": placement}
    cached = CachedSettings(leg.mode, tuple(slots), *leg.ahead, **how)
    return CachedParallel(world, case.tables, case.features, case.model(), case.optimizer, cached)


def trained(
    case: Scenario, leg: Leg, world: World, folder: Path, before: Path | None
) -> tuple[list[float], list[np.ndarray], str]:
    """Losses and dense features of each step up to the part's end, and the digest there."""
    mode, seen = made(case, leg, world), list[tuple[Batch, StepResult]]()
    train_step = mode.train_step

    def watched(step: Step, asks: int = 0) -> StepResult:
        seen.append((step.batch, train_step(step, asks)))
        for thread in threading.enumerate() if step.batch.index < leg.last - 1 else ():
            if thread.name == "distcache-checkpoint":
                thread.join(30)
        return seen[-1][1]

    mode.train_step = watched
    keys = {"optim__name": case.optimizer.name, "trainer__dtype": str(case.dtype)[6:]}
    keys |= {"trainer__steps": leg.last + leg.beside, "parallel__mode": leg.mode}
    every = leg.last
    if leg.whole_every > 1:
        every = next((n for n in range(2, leg.last) if leg.last % n == 0), leg.last)
    keys |= {"trainer__checkpoint_every": every, "trainer__keep_checkpoints": 2}
    keys |= {"trainer__checkpoint_whole_every": leg.whole_every}
    keys |= {"trainer__resume": str(before or "never")}
    result = Run(toy_config(**keys), world, folder, Source(case), case.tables, mode).go(
        lambda step: (case.lr, case.lr)
    )
    own = seen[: len(seen) - leg.beside]
    dense = [batch.dense.numpy().copy() for batch, _ in own]
    return [found.loss for _, found in own], dense, result.summary["state_digest"]


def run_leg(rank: int, size: int, home: str, case: Scenario, legs: list[Leg], at: int) -> list:
    """Part `at` of the run and, after the last, the whole on as many ranks that never stopped."""
    world, folder = open_world("cpu", "gloo", 60), Path(home)
    step = f"checkpoints/step_{legs[at - 1].last:08d}"
    before = folder / str(at - 1) / step if at else None
    found = [trained(case, legs[at], world, folder / str(at), before)]
    if at == len(legs) - 1:
        whole = Leg(size, mode="resident")
        found.append(trained(case, whole, world, folder / "whole", None))
    close_world(world)
    return found


def go(case: Scenario, legs: list[Leg], folder: Path) -> tuple[list, list, list]:
    """Losses of the parts and of the whole, digests and values at the end of both."""
    losses, first = [], 0
    for at, leg in enumerate(legs):
        by_rank = run_ranks(run_leg, leg.ranks, str(folder), case, legs, at)
        steps = zip(*(dense for (_, dense, _), *_ in by_rank), strict=True)
        for step, slices in enumerate(steps, first):
            assert np.array_equal(np.concatenate(slices), case.batch(step).dense), (step, leg)
        losses += by_rank[0][0][0]
        first = leg.last
    last = f"checkpoints/step_{STEPS:08d}"
    values = [checkpoints.tensors(folder / name / last) for name in (str(at), "whole")]
    (_, _, digest), (expected, _, whole) = by_rank[0]
    return [losses, expected], [digest, whole], values


def scenario(name: str, dtype: torch.dtype) -> Scenario:
    spec, lr = OPTIMIZERS[name]
    return Scenario(TABLES, spec, lr, global_batch=16, steps=STEPS, dtype=dtype)


@st.composite
def ways(draw: st.DrawFn) -> tuple[str, list[Leg]]:
    """An optimizer, and parts of a run: one number of ranks in half of them."""
    stops = sorted(draw(st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=2)))
    ranks = st.integers(1, 4)
    if draw(st.booleans()):
        ranks = st.just(draw(ranks))
    one = st.builds(
        Leg,
        ranks,
        mode=st.sampled_from(["data", "data", "resident", "host"]),
        kind=st.sampled_from(["replicated", *KINDS]),
        room=st.integers(0, 20),
        ahead=st.tuples(st.integers(0, 6), st.integers(0, 3)),
        schedule=st.sampled_from(["overlapped", "serial"]),
        whole_every=st.sampled_from([1, 3, 9]),
    )
    legs = [replace(draw(one), last=stop, beside=draw(st.booleans())) for stop in stops]
    return draw(st.sampled_from(list(OPTIMIZERS))), [*legs, draw(one)]


@pytest.mark.timeout(900)  # in full: 120 drawn runs
@given(ways())
@settings(max_examples=EXAMPLES)
def test_a_run_that_stopped_has_the_numbers_of_one_that_did_not(way: tuple) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = scenario(way[0], torch.float64)
        (losses, expected), digests, (values, whole) = go(case, way[1], Path(folder))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert values.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(values[name], value, rtol=1e-10, atol=1e-10, msg=name)
    if len({leg.ranks for leg in way[1]}) == 1:
        assert (losses, digests[0]) == (expected, digests[1])
        assert all(torch.equal(values[name], value) for name, value in whole.items())


WAYS = [
    [Leg(2, 6, whole_every=9), Leg(2, mode="hybrid")],
    [
        Leg(2, 4, "hybrid"),
        Leg(2, 8, kind="sharded", whole_every=3),
        Leg(2, mode="hybrid", sharding="table_wise"),
    ],
    [Leg(1, 6, "hybrid", sharding="table_wise"), Leg(3, 9, "resident"), Leg(2, mode="hybrid")],
    [Leg(3, 6, "hybrid"), Leg(2, mode="hybrid", sharding="table_wise")],
]
HAS = ("sgd", "adagrad", "rowwise_adagrad")
MORE = [pytest.param(name, way, marks=pytest.mark.slow) for name in HAS for way in WAYS]
SOME = [("sgd", WAYS[0]), ("adagrad", WAYS[1]), ("rowwise_adagrad", WAYS[2]), ("adagrad", WAYS[3])]


@pytest.mark.parametrize(("name", "way"), SOME + MORE)
def test_to_and_from_hybrid_losses_agree(tmp_path: Path, name: str, way: list[Leg]) -> None:
    (losses, expected), _, (values, whole) = go(scenario(name, torch.float32), way, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert values.keys() == whole.keys()
    for key, value in whole.items():
        torch.testing.assert_close(values[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_row_states_of_column_shards_are_refused_by_name(tmp_path: Path) -> None:
    way = [Leg(2, 5, "hybrid", sharding="column_wise"), Leg(2)]
    case = scenario("rowwise_adagrad", torch.float32)
    with pytest.raises(RuntimeError, match=r"ConfigError: the checkpoint .*sum_by_column_shard"):
        go(case, way, tmp_path)
