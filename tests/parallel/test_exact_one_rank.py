"""World size 1: `data` and `host` have the bits of `resident`; all agree with another trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import OPTIMIZERS, check_against_trainer
from scenarios import Outcome, Scenario, run_mode, table

from distcache.comm.world import World, close_world, open_world
from distcache.errors import DataError, StepTooLargeError
from distcache.parallel.cached import CachedSettings
from distcache.planner.victims import Policy
from distcache.popularity.statistics import Popularity, Statistics, TableCounts

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr), **changes)


def same_bits(one: Outcome, other: Outcome) -> None:
    assert one.loss_digest == other.loss_digest
    assert one.state_digest == other.state_digest


def popularity_of(case: Scenario) -> Popularity:
    """Classes of rows by counts as they come, a tenth of each table's rows pinned."""
    tables = []
    for spec in case.tables:
        counts = np.random.default_rng(spec.rows).integers(0, 200, spec.rows)
        distinct = int(np.count_nonzero(counts))
        tables.append(TableCounts(spec.name, spec.rows, int(counts.sum()), distinct, counts))
    pinned = tuple(-(-spec.rows // 10) for spec in case.tables)
    statistics = Statistics(tuple(tables), "ids", 100)
    return Popularity(statistics, pinned, classes=True, pinned_rows=pinned)


def slots_of(spare: int) -> tuple[int, ...]:
    return (170 + spare, 7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_cache_size_window_and_policy_has_the_bits_of_resident(world, optimizer) -> None:
    case = scenario(optimizer, steps=20, weighted=True, last_batch=5)
    resident = run_mode(world, case, CachedSettings("resident", schedule="serial"))
    same_bits(run_mode(world, case, CachedSettings("resident")), resident)
    serial = CachedSettings("data", slots_of(0), 8, 3, schedule="serial", validate=True)
    same_bits(run_mode(world, case, serial), resident)
    for spare, lookahead, prefetch, policy in (
        (0, 0, 0, Policy()),
        (0, 8, 3, Policy()),
        (20, 2, 1, Policy("lru")),
        (178, 3, 1, Policy(tail="lfu")),
        (40, 2, 1, Policy("lfu")),
    ):
        settings = CachedSettings(
            "data", slots_of(spare), lookahead, prefetch, policy, validate=True
        )
        found = run_mode(world, case, settings)
        same_bits(found, resident)
        assert 0 < found.summary["hit_rate"] < 1
    for name in ("frequency", "static"):
        settings = CachedSettings("data", slots_of(9), 2, 1, Policy(name), validate=True)
        same_bits(run_mode(world, case, settings, popularity=popularity_of(case)), resident)
    same_bits(run_mode(world, case, CachedSettings("host")), resident)
    same_bits(run_mode(world, case, CachedSettings("data", slots_of(0)), evals=3), resident)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_the_independent_trainer(world: World, optimizer, dtype) -> None:
    steps = 200 if dtype is torch.float64 or optimizer == "sgd" else 20
    case = scenario(optimizer, steps=steps, dtype=dtype, weighted=True)
    start = run_mode(world, replace(case, steps=0), CachedSettings("resident", dtype=dtype))
    found = run_mode(world, case, CachedSettings("data", slots_of(4), dtype=dtype))
    check_against_trainer(case, start, found)


def test_mean_pooling_agrees_with_the_independent_trainer(world: World) -> None:
    tables = (table("a", 300, pooling="mean"), table("b", 40, features=2), table("c", 7, dim=4))
    case = scenario("adagrad", tables=tables, steps=200, dtype=torch.float64)
    start = run_mode(world, replace(case, steps=0), CachedSettings("resident", dtype=case.dtype))
    found = run_mode(world, case, CachedSettings("data", (190, 7), dtype=case.dtype))
    check_against_trainer(case, start, found)


@pytest.mark.parametrize(("batch", "bag"), [(50, 1), (2000, 3)])
def test_small_and_large_batches_with_evictions_in_most_steps(world: World, batch, bag) -> None:
    tables = (table("a", 60_000, dim=4), table("b", 9000, dim=4))
    case = scenario("adagrad", tables=tables, global_batch=batch, bag=bag, steps=60, skew=2.0)
    resident = run_mode(world, case, CachedSettings("resident"))
    slots = 110 if batch == 50 else 6500
    found = run_mode(world, case, CachedSettings("data", (slots,), 4, 1))
    same_bits(found, resident)
    assert found.summary["rows_written_back"] > slots


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", [25, 600, 7000])
def test_grid_of_caches_at_200_steps(world: World, optimizer, batch) -> None:
    tables = (table("a", 90_000, dim=4), table("b", 9000, dim=4))
    case = scenario(optimizer, tables=tables, global_batch=batch, steps=200, skew=2.0, bag=3)
    case = replace(case, weighted=True)
    resident = run_mode(world, case, CachedSettings("resident"))
    need = min(99_000, 2 * (batch * 3 + 40))
    for lookahead, prefetch, policy in (
        (0, 0, Policy()),
        (16, 4, Policy()),
        (4, 2, Policy("lru")),
        (4, 1, Policy(tail="lfu")),
        (0, 1, Policy("lfu", half_life=30)),
        (0, 2, Policy("lru")),
        (8, 1, Policy(tail="frequency")),
        (0, 1, Policy("frequency")),
        (0, 1, Policy("static")),
    ):
        settings = CachedSettings("data", (need,), lookahead, prefetch, policy)
        found = run_mode(world, case, settings, popularity=popularity_of(case))
        same_bits(found, resident)


def test_a_step_that_does_not_fit_is_refused_with_the_number_that_does(world: World) -> None:
    case = scenario("sgd", global_batch=200)
    with pytest.raises(StepTooLargeError, match=r"step 0 .* set cache.rows=(\d+)") as refusal:
        run_mode(world, case, CachedSettings("data", (40, 7)))
    enough = int(str(refusal.value).split("cache.rows=")[1].split()[0])
    assert enough > 40


def test_a_bad_id_is_named_before_it_is_looked_up(world: World) -> None:
    case = scenario("sgd", steps=3)
    good = case.batch
    bad = good(1)
    bad.ids.values[-1] = 10**6
    object.__setattr__(case, "batch", lambda step, *a: bad if step == 1 else good(step, *a))
    with pytest.raises(DataError, match=r"a_0.*1000000.*300 rows"):
        run_mode(world, case, CachedSettings("data", slots_of(0)))


def test_a_loss_that_is_not_finite_changes_nothing(world: World) -> None:
    case = scenario("adam", steps=2)
    clean = run_mode(world, replace(case, steps=1), CachedSettings("resident"))
    good = case.batch
    bad = good(1)
    bad.dense[0, 0] = float("nan")
    object.__setattr__(case, "batch", lambda step, *a: bad if step == 1 else good(step, *a))
    found = run_mode(world, case, CachedSettings("data", slots_of(0)))
    assert found.state_digest == clean.state_digest
    assert found.losses[0] == clean.losses[0] and found.losses[1] != found.losses[1]
