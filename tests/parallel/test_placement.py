"""Every placement of cached rows has the bits of `resident` at the same world size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import OPTIMIZERS
from placement_cases import (
    KINDS,
    TABLES,
    Job,
    check_groups,
    draw_jobs,
    fitting_slots,
    placement_of,
    run_job,
    run_jobs,
)
from ranks import run_ranks
from scenarios import Scenario

from distcache.comm.world import close_world, open_world
from distcache.engine.groups import Placement
from distcache.parallel.cached import CachedSettings


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=10, weighted=True), **changes)


def placements(case: Scenario, world: int) -> list[Job]:
    """The reference, and each placement in a cache in which every step just fits."""
    jobs = [Job(case, CachedSettings("resident", schedule="serial"))]
    for number, kind in enumerate(KINDS):
        placement, evals = placement_of(kind, case), 4 * (number % 2)
        slots = fitting_slots(case, world, placement, evals)
        tight = CachedSettings("data", slots, 5, number % 3, validate=True, placement=placement)
        jobs.append(Job(case, tight, evals))
    return jobs


FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.mark.parametrize("world", [2, 3, FOUR])
def test_every_placement_has_the_bits_of_resident(world: int) -> None:
    optimizers = {2: ("adam", "sgd"), 3: ("rowwise_adagrad",), 4: ("adagrad",)}[world]
    groups = [placements(scenario(name, last_batch=3), world) for name in optimizers]
    for found in check_groups(run_ranks(run_jobs, world, groups, timeout=200), groups):
        assert found.summary["rows_written_back"] > found.summary["rows_fetched"] / 2 > 0
        assert 0 < found.summary["hit_rate"] < 1


@pytest.mark.parametrize(
    ("world", "seeds"),
    [(2, range(2)), (3, range(3, 5)), pytest.param(4, range(5, 6), marks=pytest.mark.slow)],
)
def test_drawn_runs_have_the_bits_of_resident(world: int, seeds: range) -> None:
    groups = [draw_jobs(seed, world, runs=3, steps=8) for seed in seeds]
    check_groups(run_ranks(run_jobs, world, groups, timeout=200), groups)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("block", range(8))
def test_many_drawn_runs_have_the_bits_of_resident(world: int, block: int) -> None:
    groups = [draw_jobs(100 + 10 * block + at, world, runs=8, steps=40) for at in range(5)]
    check_groups(run_ranks(run_jobs, world, groups, timeout=280), groups)


def test_one_rank_has_every_row_and_its_state() -> None:
    world = open_world("cpu", "gloo", 60)
    case = scenario("adagrad")
    jobs = placements(case, 1)
    outcomes = [run_job(world, job) for job in jobs]
    check_groups([[outcomes]], [jobs])
    plain = replace(jobs[1].settings, slots=(200, 8))
    kept = [replace(plain, placement=placement_of(kind, case)) for kind in KINDS]
    sizes = {run_job(world, Job(case, how)).summary["embedding_device_bytes"] for how in kept}
    close_world(world)
    assert len(sizes) == 1


def test_the_stages_of_placements_work_on_one_rank_too(monkeypatch) -> None:
    """Where one rank is its rows' only home; runs on a GPU of what one rank can run rely on it."""
    monkeypatch.setattr(Placement, "on", lambda self, world: self)
    world = open_world("cpu", "gloo", 60)
    jobs = placements(scenario("adam"), 1)
    outcomes = [run_job(world, job) for job in jobs]
    close_world(world)
    check_groups([[outcomes]], [jobs])
    for kind, outcome in zip(KINDS, outcomes[1:], strict=True):
        stages = outcome.summary["stage_ms"]
        assert ("share_late" in stages) == (kind != "home")
        assert ("return_rows" in stages) == ("home" in kind)


def test_the_drawn_runs_are_of_all_kinds() -> None:
    """What the grid is meant to cover, it covers; caches are tight in half of the runs."""
    groups = [draw_jobs(seed, 2 + seed % 3, runs=4, steps=8) for seed in range(12)]
    cases, jobs = [jobs[0].case for jobs in groups], [job for jobs in groups for job in jobs[1:]]
    assert {case.optimizer.name for case in cases} == set(OPTIMIZERS)
    assert {case.bag for case in cases} == {1, 2, 3}
    assert any(case.weighted for case in cases) and any(case.empty_ranks for case in cases)
    made = [job.settings for job in jobs]
    assert {how.prefetch for how in made} == {0, 1, 2, 3}
    assert {how.schedule for how in made} == {"overlapped", "serial"}
    assert {how.placement.early for how in made} == {True, False}
    assert len({how.policy for how in made}) > 4
    assert any(job.how and job.how["warm_start"] for job in jobs)
    assert np.mean([how.shake_ms > 0 for how in made]) > 0.2
