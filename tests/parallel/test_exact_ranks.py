"""Several ranks (four where slow tests run): `data` and `host` have `resident`'s bits at the same
world size, every rank ends with the same replicated rows, all agree with the independent trainer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import OPTIMIZERS, check_against_trainer
from ranks import run_ranks
from scenarios import Outcome, Scenario, run_mode, table

from distcache.comm.world import close_world, open_world
from distcache.parallel.cached import CachedSettings
from distcache.planner.victims import Policy

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
SLOTS = (176, 8)
Jobs = list[tuple[Scenario, CachedSettings, int]]


def run_jobs(rank: int, size: int, jobs: Jobs) -> list[Outcome]:
    world = open_world("cpu", "gloo", 60)
    found = [run_mode(world, case, settings, evals) for case, settings, evals in jobs]
    close_world(world)
    return found


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=12, weighted=True), **changes)


def check_jobs(world: int, jobs: Jobs) -> list[list[Outcome]]:
    """Run all jobs on `world` ranks; the first is the reference whose bits all others have."""
    by_rank = run_ranks(run_jobs, world, jobs, timeout=300)
    reference = by_rank[0][0]
    for rank, outcomes in enumerate(by_rank):
        for outcome in outcomes:
            assert outcome.losses == reference.losses
            assert outcome.state_digest == reference.state_digest
        for mine, first in zip(outcomes, by_rank[0], strict=True):
            assert np.array_equal(mine.cached, first.cached), f"rank {rank}: cached rows differ"
    return by_rank


def caches(case: Scenario, dtype: torch.dtype = torch.float32) -> Jobs:
    tight = tuple(slots + 60 for slots in SLOTS)
    serial = {"dtype": dtype, "schedule": "serial"}
    return [
        (case, CachedSettings("resident", **serial), 0),
        (case, CachedSettings("data", tight, 6, 2, **serial), 0),
        (case, CachedSettings("data", tight, 0, 0, dtype=dtype, validate=True), 0),
        (case, CachedSettings("data", tight, 6, 2, dtype=dtype, validate=True), 7),
        (case, CachedSettings("resident", dtype=dtype), 0),
        (case, CachedSettings("data", tight, 2, 1, Policy("lru"), dtype=dtype), 0),
        (case, CachedSettings("data", tight, 2, 1, Policy("lfu", "lru"), dtype=dtype), 0),
        (case, CachedSettings("host", dtype=dtype), 0),
    ]


FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.mark.parametrize("world", [2, 3, FOUR])
def test_every_cache_has_the_bits_of_resident(world: int) -> None:
    jobs: Jobs = []
    optimizer = {2: "adam", 3: "rowwise_adagrad", 4: "adagrad"}[world]
    jobs += caches(scenario(optimizer, last_batch=3))
    check_jobs(world, jobs)


def test_a_rank_without_a_single_id() -> None:
    check_jobs(3, caches(scenario("adagrad", empty_ranks=True, steps=8)))


@pytest.mark.parametrize("world", [2, 3, FOUR])
def test_agrees_with_the_independent_trainer(world: int) -> None:
    for optimizer in {2: ("sgd", "adam"), 3: ("rowwise_adagrad",), 4: ("adagrad",)}[world]:
        case = scenario(optimizer, dtype=torch.float64, steps=30)
        settings = CachedSettings("data", (240, 12), dtype=torch.float64)
        jobs = [(replace(case, steps=0), settings, 0), (case, settings, 0)]
        start, found = run_ranks(run_jobs, world, jobs, timeout=300)[0]
        check_against_trainer(case, start, found)


def test_native_reduction_agrees_up_to_summation_order() -> None:
    case = scenario("adagrad", dtype=torch.float64)
    ordered = CachedSettings("data", (240, 12), dtype=torch.float64)
    jobs = [(case, ordered, 0), (case, replace(ordered, reduction="native"), 0)]
    for one, other in run_ranks(run_jobs, 3, jobs, timeout=300):
        assert np.allclose(one.losses, other.losses, rtol=1e-12, atol=0)
        assert all(np.allclose(one.tables[t], other.tables[t], atol=1e-12) for t in one.tables)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grid_of_ranks_and_optimizers(world: int, optimizer: str) -> None:
    case = scenario(optimizer, steps=200, last_batch=1)
    check_jobs(world, caches(case))
    for dtype in (torch.float32, torch.float64):
        steps = 200 if dtype is torch.float64 or optimizer == "sgd" else 20
        case = scenario(optimizer, dtype=dtype, steps=steps)
        settings = CachedSettings("data", (240, 12), dtype=dtype)
        jobs = [(replace(case, steps=0), settings, 0), (case, settings, 0)]
        start, found = run_ranks(run_jobs, world, jobs, timeout=300)[0]
        check_against_trainer(case, start, found)
