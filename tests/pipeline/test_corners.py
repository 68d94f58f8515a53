"""Awkward batches, tables and losses through the whole pipeline, on one and three ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from ends import Job
from protocol_cases import batches, caught, make, state, train
from scenarios import Scenario, run_mode, table

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch, JaggedIds
from distcache.engine.groups import TableSettings, make_groups
from distcache.engine.planning import StreamPlanner
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedSettings

ADAM = OptimizerSpec("adam")
MODES = ("resident", "data", "host")


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


def scenarios() -> dict[str, tuple[Scenario, tuple[int, ...]]]:
    """Each with the slots of its groups."""
    wide, narrow = table("a", 30), table("b", 7, dim=4)
    small = {"optimizer": ADAM, "global_batch": 6, "steps": 4}
    return {
        "one group, an empty rank": (Scenario((wide,), **small, empty_ranks=True), (30,)),
        "more ranks than rows": (Scenario((table("a", 1),), **small), (3,)),
        "no ids": (NoIds((wide, narrow), **small), (30, 9)),
        "unread tables": (Unread((wide, narrow), **small), (30, 9)),
        "fewer samples than ranks": (Scenario((wide, narrow), **small, last_batch=1), (30, 9)),
    }


def shapes(world: World) -> dict[str, list]:
    seen = {}
    for name, (case, slots) in scenarios().items():
        seen[name] = []
        for mode, reduction in itertools.product(MODES, ("ordered", "native")):
            settings = CachedSettings(mode, slots, 2, 1, reduction=reduction, validate=True)
            outcome = run_mode(world, case, settings)
            seen[name].append((reduction, outcome.losses, outcome.state_digest))
    return seen


def bad_losses(world: World) -> list:
    """A label that makes the loss of the last rank infinite in step 2; the loop goes on."""
    two = make(world)
    train(two, batches(world, range(2)))
    before, seen = state(two), []
    two.close()

    def source():
        for batch in batches(world, range(5)):
            odd = batch.index == 2 and world.rank == world.size - 1
            yield replace(batch, labels=batch.labels / 0.0) if odd else batch

    for mode_name in MODES:
        mode = make(world, mode=mode_name)
        results = [mode.train_step(step) for step in mode.stream(source())]
        seen.append(([result.bad_ranks for result in results], state(mode) == before))
        mode.close()
    return seen


def late_load(world: World) -> str:
    """A checkpoint is loaded after a step."""
    mode = make(world)
    saved = mode.state_dict()
    train(mode, batches(world, range(1)))
    error = caught(lambda: mode.load_state_dict(saved))
    mode.close()
    return error


def run(rank: int, size: int) -> dict:
    world = open_world("cpu", "gloo", 60)
    seen = {"shapes": shapes(world), "bad": bad_losses(world)}
    seen["late load"] = late_load(world)
    close_world(world)
    return seen


@pytest.fixture(scope="module")
def by_world() -> dict[int, list]:
    """By world size, what every rank saw."""
    jobs = {size: Job(run, size) for size in (1, 3)}
    return {size: [end.value for end in job.ends()] for size, job in jobs.items()}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", scenarios())
def test_awkward_shapes_train_alike_in_all_modes(by_world, size: int, name: str) -> None:
    ranks = by_world[size]
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    for rank in ranks:
        ordered = [end for reduction, *end in rank["shapes"][name] if reduction == "ordered"]
        assert len(ordered) == len(MODES)
        assert all(end == ordered[0] for end in ordered)
        for _, losses, _ in rank["shapes"][name]:
            assert losses == pytest.approx(ordered[0][0], rel=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_after_a_loss_that_is_not_finite_nothing_applies(by_world, size: int) -> None:
    for rank in by_world[size]:
        assert len(rank["bad"]) == len(MODES)
        for bad_ranks, unchanged in rank["bad"]:
            assert bad_ranks == [(), (), *[(size - 1,)] * 3]
            assert unchanged


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_is_loaded_before_the_first_step(by_world, size: int) -> None:
    for rank in by_world[size]:
        assert rank["late load"].startswith("PlanError: a step was run")


def test_more_slots_than_plans_can_number_are_refused() -> None:
    groups = make_groups([TableSpec("a", 2**33, 1, ("f",))], ["f"], 4)
    with pytest.raises(ConfigError, match="up to 2147483647"):
        StreamPlanner(None, groups, [None], [2**31], TableSettings())
