"""One training, whatever the cache: at a given number of ranks every mode, placement, cache size,
window, policy, schedule and access has the bits of `resident`, and all agree with another trainer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from placement_cases import (
    HALVES,
    KINDS,
    MEANS,
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
from scenarios import OPTIMIZERS, Outcome, Scenario, check_against_trainer, table

from distcache.data.batch import Batch, JaggedIds
from distcache.engine.groups import SHARDED, Placement
from distcache.parallel.cached import CachedSettings
from distcache.planner.home import Parts
from distcache.planner.victims import Policy

FOUR = pytest.param(4, marks=pytest.mark.slow)
COUNTS = ("rows_fetched", "rows_written_back", "hit_rate", "collective_bytes")
WINDOWS = ((0, 0), (0, 8), (64, 8), (6, 2), (1, 1), (3, 5))
"""L and P of twins: one stage after the other, and beside one another under random delays."""

OTHERS = (
    ({"policy": Policy("lru")}, None),
    ({"policy": Policy("lfu", "lru"), "lookahead": 0}, None),
    ({"policy": Policy(tail="frequency"), "access": "zero_copy"}, {"classes": True}),
    ({"policy": Policy("static"), "result_delay": 2}, {"classes": True, "warm_start": 1.0}),
    ({"access": "zero_copy", "prefetch": 0}, {"warm_start": 0.4}),
    ({"mode": "host"}, None),
    ({"mode": "host", "access": "zero_copy"}, None),
    ({"mode": "resident"}, None),
    ({"policy": Policy(resident="none")}, None),
)
"""Changes of the settings of a tight cache, and what is made of statistics."""


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=12, weighted=True, last_batch=3), **changes)


def twins(case: Scenario, world: int, windows=WINDOWS) -> list[Job]:
    """Serial, then overlapped and shaken, for each window, in a cache that just fits."""
    slots, jobs = fitting_slots(case, world, Placement(), 3), []
    for number, ahead in enumerate(windows):
        serial = CachedSettings("data", slots, *ahead, schedule="serial", validate=True)
        shaken = {"schedule": "overlapped", "access": ("staged", "zero_copy")[number % 2]}
        jobs += [Job(case, serial, 3), Job(case, replace(serial, **shaken), 3)]
    return jobs


def others(case: Scenario, world: int) -> list[Job]:
    """Everything else that a cache may be, and each placement where every step just fits."""
    slots = fitting_slots(case, world, Placement())
    roomy = CachedSettings("data", tuple(c + 20 * world for c in slots), 3, 1, validate=True)
    jobs = [Job(case, replace(roomy, **changes), how=how) for changes, how in OTHERS]
    for number, kind in enumerate(KINDS):
        placement, evals = placement_of(kind, case), 4 * (number % 2)
        tight = fitting_slots(case, world, placement, evals)
        how = CachedSettings("data", tight, 5, number % 3, validate=True, placement=placement)
        jobs.append(Job(case, how, evals))
    return jobs


def exact(world: int, *groups: list[Job]) -> list[list[Outcome]]:
    """Run each group's jobs behind its reference; all have its bits, and ranks the same rows."""
    resident = CachedSettings("resident", schedule="serial")
    same = [Job(jobs[0].case, replace(resident, amp=jobs[0].settings.amp)) for jobs in groups]
    all_jobs = [[first, *jobs] for first, jobs in zip(same, groups, strict=True)]
    by_rank = run_ranks(run_jobs, world, all_jobs, timeout=400)
    check_groups(by_rank, all_jobs)
    for of_rank in by_rank:
        for jobs, mine, first in zip(all_jobs, of_rank, by_rank[0], strict=True):
            for job, one, other in zip(jobs, mine, first, strict=True):
                if job.settings.placement.kind == "replicated":
                    assert np.array_equal(one.cached, other.cached), job
    return [outcomes[1:] for outcomes in by_rank[0]]


@pytest.mark.parametrize("world", [1, 2, 3, FOUR])
def test_overlapped_and_serial_have_the_bits_and_counts_of_one_another(world: int) -> None:
    """With bfloat16 in the dense part too, which rounds its products and nothing else."""
    case = scenario({1: "adam", 2: "rowwise_adagrad", 3: "sgd", 4: "adagrad"}[world])
    windows = WINDOWS if world == 1 else WINDOWS[3:]
    rounded = [
        replace(job, settings=replace(job.settings, amp="bf16"))
        for job in twins(case, world, [(6, 2)])
    ]
    found, (one, _) = exact(world, twins(case, world, windows), rounded)
    assert one.losses != found[0].losses, "amp=bf16 does nothing"
    assert np.allclose(one.losses, found[0].losses, rtol=2**-6)
    values = (*one.tables.values(), *one.dense.values())
    assert {value.dtype for value in values} == {np.dtype(np.float32)}
    for serial, shaken in zip(found[::2], found[1::2], strict=True):
        assert [serial.summary[key] for key in COUNTS] == [shaken.summary[key] for key in COUNTS]
        assert np.array_equal(serial.cached, shaken.cached)
        assert 0 < shaken.summary["hit_rate"] < 1 and shaken.summary["rows_written_back"] > 0


@pytest.mark.parametrize("world", [1, 2, 3, FOUR])
def test_every_cache_and_placement_has_the_bits_of_resident(world: int) -> None:
    names = {
        1: ("adagrad", "sgd", "momentum_sgd"),
        2: ("rowwise_adagrad", "counted_adam"),
        3: ("adam", "ftrl"),
        4: ("adagrad", "partial_rowwise_adam"),
    }[world]
    for found in exact(world, *(others(scenario(name), world) for name in names)):
        for kind, outcome in zip(KINDS, found[-len(KINDS) :], strict=True):
            assert outcome.summary["rows_written_back"] > 0, kind
            assert 0 < outcome.summary["hit_rate"] < 1
        assert found[3].summary["warm_start_rows"] > found[4].summary["warm_start_rows"] > 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_halves_have_the_bits_of_resident_in_every_cache_and_placement(world: int) -> None:
    name = {1: "adam", 2: "rowwise_adagrad", 3: "ftrl"}[world]
    case = scenario(name, tables=HALVES)
    (found,) = exact(world, others(case, world))
    for outcome in found[-len(KINDS) :]:
        assert outcome.summary["rows_written_back"] > 0
    for spec in HALVES:
        rows = torch.from_numpy(found[0].tables[spec.name])
        assert spec.dtype is None or torch.equal(rows, rows.to(spec.dtype).float())


@pytest.mark.parametrize(
    ("world", "seeds"),
    [(2, range(1)), (3, range(3, 5)), pytest.param(4, range(5, 6), marks=pytest.mark.slow)],
)
def test_drawn_runs_have_the_bits_of_resident(world: int, seeds: range) -> None:
    groups = [draw_jobs(seed, world, runs=3, steps=8) for seed in seeds]
    check_groups(run_ranks(run_jobs, world, groups, timeout=200), groups)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seed", range(100, 140, 2))
def test_many_drawn_runs_have_the_bits_of_resident(world: int, seed: int) -> None:
    groups = [draw_jobs(seed + at, world, runs=8, steps=40) for at in range(2)]
    check_groups(run_ranks(run_jobs, world, groups, timeout=280), groups)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grid_at_many_steps(world: int, optimizer: str) -> None:
    drawn = np.random.default_rng([world, *optimizer.encode()])
    windows = [(int(drawn.integers(65)), int(drawn.integers(9))) for _ in range(8)]
    case = scenario(optimizer, steps=20, last_batch=5)
    tables = (table("a", 90_000, dim=4), table("b", 9000, dim=4))
    large = scenario(optimizer, tables=tables, global_batch=600, steps=100, skew=2.0)
    groups = [twins(case, world, (*WINDOWS, *windows)), others(replace(case, steps=200), world)]
    exact(world, *groups, others(large, world))


class NoIds(Scenario):
    """Bags without a single id."""

    def batch(self, *args: object, **kwargs: object) -> Batch:
        batch = super().batch(*args, **kwargs)
        ids = batch.ids
        none = JaggedIds(ids.features, ids.values[:0], torch.zeros_like(ids.offsets))
        return replace(batch, ids=none)


class Unread(Scenario):
    """Tables that no feature of the data reads."""

    @property
    def features(self) -> tuple[str, ...]:
        return ("a_0",)

    @property
    def pooled_width(self) -> int:
        return 8


def awkward() -> list[tuple[Scenario, tuple[int, ...]]]:
    """Each with the slots of its groups; in the first one rank of several has no sample."""
    wide, narrow = table("a", 30), table("b", 7, dim=4)
    small = {"optimizer": OPTIMIZERS["adam"][0], "global_batch": 6, "steps": 4}
    return [
        (Scenario((wide,), **small, empty_ranks=True), (30,)),
        (Scenario((table("a", 1),), **small), (3,)),  # more ranks than rows
        (NoIds((wide, narrow), **small), (30, 9)),
        (Unread((wide, narrow), **small, empty_ranks=True), (30, 9)),
        (Scenario((wide, narrow), **small, last_batch=1), (30, 9)),  # than samples
    ]


@pytest.mark.parametrize("world", [1, 3])
def test_awkward_shapes_train_alike_in_all_modes(world: int) -> None:
    groups = []
    for case, slots in awkward():
        how = CachedSettings("data", slots, 2, 1, validate=True)
        modes = [replace(how, mode=mode) for mode in ("data", "host", "resident")]
        groups.append([Job(case, settings) for settings in modes])
        groups.append([Job(case, replace(settings, reduction="native")) for settings in modes])
    empty = [others(scenario("adagrad", empty_ranks=True, steps=5), world)] if world > 1 else []
    ordered = exact(world, *groups[::2], *empty)
    native = run_ranks(run_jobs, world, groups[1::2])[0]
    for one, other in zip(ordered, native, strict=False):
        for outcome in other:
            assert outcome.losses == pytest.approx(one[0].losses, rel=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_homes_that_are_planned_in_parts_have_the_bits_of_resident(world: int) -> None:
    tables = (table("a", 60_000), table("b", 30_000))
    case = Scenario(tables, OPTIMIZERS["adagrad"][0], global_batch=4000, steps=10)
    how = CachedSettings("data", (24_000,), 3, 1, validate=True)
    assert Parts.of(24_000 // world, 90_000 // world).count == 4 // world
    jobs = [Job(case, how), Job(case, replace(how, planner_threads=2))]
    if world > 1:
        jobs.append(Job(case, replace(how, placement=Placement(SHARDED))))
    for outcome in exact(world, jobs)[0]:
        assert outcome.summary["rows_written_back"] > 1000


@pytest.mark.parametrize("world", [1, 2, 3, FOUR])
def test_agrees_with_the_independent_trainer(world: int) -> None:
    names = {
        1: tuple(OPTIMIZERS),
        2: ("sgd", "adam", "partial_rowwise_adam", "l2"),
        3: ("rowwise_adagrad", "counted_adam"),
        4: ("adagrad",),
    }
    double = {"dtype": torch.float64}
    cases = [scenario(o, **double, steps=60 if world == 1 else 30) for o in names[world]]
    groups = [[case, CachedSettings("data", (240, 12), **double)] for case in cases]
    if world == 1:
        means, small = scenario("adagrad", **double, tables=MEANS, weighted=False), groups[0][1]
        groups.append([scenario("adagrad", steps=20), CachedSettings("data", (240, 12))])
        groups.append([means, replace(small, slots=(180, 25, 80))])
        groups.append([scenario("sgd", **double), replace(small, reduction="native")])
    jobs = [[Job(replace(case, steps=0), how), Job(case, how)] for case, how in groups]
    ends = run_ranks(run_jobs, world, jobs, timeout=300)[0]
    for (case, _), (start, found) in zip(groups, ends, strict=True):
        check_against_trainer(case, start, found)


def test_native_reduction_agrees_up_to_summation_order() -> None:
    case = scenario("adagrad", dtype=torch.float64)
    ordered = CachedSettings("data", (240, 12), dtype=torch.float64)
    jobs = [Job(case, ordered), Job(case, replace(ordered, reduction="native"))]
    for one, other in (found for (found,) in run_ranks(run_jobs, 3, [jobs])):
        assert np.allclose(one.losses, other.losses, rtol=1e-12, atol=0)
        assert all(np.allclose(one.tables[t], other.tables[t], atol=1e-12) for t in one.tables)


def test_the_stages_of_placements_work_on_one_rank_too(world, monkeypatch) -> None:
    """Where one rank is its rows' only home; runs on a GPU of what one rank can run rely on it."""
    monkeypatch.setattr(
        CachedSettings,
        "placed",
        lambda self, world: self.placement if self.mode == "data" else Placement(),
    )
    case = scenario("adam")
    jobs = [Job(case, CachedSettings("resident")), *others(case, 1)[-len(KINDS) :]]
    outcomes = [run_job(world, job) for job in jobs]
    check_groups([[outcomes]], [jobs])
    for kind, outcome in zip(KINDS, outcomes[1:], strict=True):
        stages = outcome.summary["stage_ms"]
        assert ("share_late" in stages) == (kind != "home")
        assert ("return_rows" in stages) == ("home" in kind)
