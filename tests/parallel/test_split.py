"""Steps in a hot and a cold part: the bits of `resident` for every cache, values of whole steps,
and the hot part computed while the rows of the cold one still move."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from low_ids import LowIds, low_ids
from oracle import OPTIMIZERS
from ranks import run_ranks
from scenarios import Scenario, run_mode, table

from distcache.comm.world import close_world, open_world
from distcache.parallel.cached import CachedParallel, CachedSettings

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4, pooling="mean"))


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    base = Scenario(TABLES, spec, lr, steps=20, global_batch=60, bag=2)
    return replace(base, **changes)


def settings(mode: str, hot: LowIds | None, *args: object, **more: object) -> CachedSettings:
    return CachedSettings(mode, *args, hot=hot, validate=True, **more)


def compare(rank: int, size: int, optimizer: str) -> dict[str, object]:
    """Every cache against `resident`, and the split step against the whole one."""
    world = open_world("cpu", "gloo", 60)
    case = scenario(optimizer, weighted=optimizer == "sgd", last_batch=3, dtype=torch.float64)
    if case.weighted:
        case = replace(case, tables=(*TABLES[:2], replace(TABLES[2], pooling="sum")))
    hot, float64 = low_ids(case), {"dtype": torch.float64}
    caches = [
        settings("data", hot, (330, 9), 4, 1, **float64),
        settings("data", hot, (250, 9), 0, 0, **float64),
        settings("data", hot, (340, 9), 2, 3, schedule="serial", **float64),
        settings("data", hot, (300, 9), 8, 0, shake_ms=1.0, **float64),
        settings("host", hot, **float64),
    ]
    resident = run_mode(world, case, settings("resident", hot, **float64))
    found = [run_mode(world, case, cache, evals=7) for cache in caches]
    whole = run_mode(world, case, CachedSettings("resident", **float64))
    ends = [run_mode(world, case, settings("resident", low_ids(case, o), **float64))
            for o in ("none", "all")]  # fmt: skip
    close_world(world)
    return {
        "same": [(f.loss_digest, f.state_digest) for f in (resident, *found)],
        "whole": [whole.tables, resident.tables, whole.losses, resident.losses],
        "ends": [(end.loss_digest, end.state_digest) for end in (whole, *ends)],
        "stages": list(found[0].summary["stage_ms"]),
    }


@pytest.mark.parametrize(
    ("world", "optimizer"),
    [(1, "adam"), (2, "sgd"), pytest.param(3, "adagrad", marks=pytest.mark.slow)],
)
def test_every_cache_has_the_bits_of_resident(world: int, optimizer: str) -> None:
    for found in run_ranks(compare, world, optimizer, timeout=300):
        assert len(set(found["same"])) == 1
        assert len(set(found["ends"])) == 1  # one part that is all of the step has its bits
        whole, split, *losses = found["whole"]
        assert found["same"][0][1] != found["ends"][0][1]  # other sums, so other bits
        np.testing.assert_allclose(*losses, rtol=1e-11)
        for name, weight in whole.items():
            np.testing.assert_allclose(split[name], weight, rtol=1e-8, atol=1e-11)
        assert "forward_backward_hot" in found["stages"]


def test_the_hot_part_computes_while_the_rows_of_the_cold_one_move() -> None:
    world = open_world("cpu", "gloo", 60)
    case = scenario("sgd", tables=(table("a", 4000),), bag=1, skew=4.0)
    seen = settings("data", LowIds((20,)), (600,), 4, 0)
    mode = CachedParallel(world, case.tables, case.features, case.model(), case.optimizer, seen)
    computed, early = threading.Event(), []
    hot, gather = mode.step._forward_backward_hot, mode.rows[0].gather

    def hot_then_tell(flight) -> None:
        early.append(flight.planned.parts[0].early and not flight.moved)
        hot(flight)
        computed.set()

    def gather_after_hot(plan, counts):
        assert computed.wait(20), "the rows of a step had to arrive before its hot part ran"
        computed.clear()
        return gather(plan, counts)

    stages = tuple(
        replace(stage, run=hot_then_tell) if stage.name == "forward_backward_hot" else stage
        for stage in mode._train._early
    )
    mode._train._early = stages
    mode.rows[0].gather = gather_after_hot
    for step in mode.stream(case.batch(i) for i in range(case.steps)):
        mode.train_step(step)
    mode.close()
    close_world(world)
    assert sum(early) > case.steps // 2, "hot rows were hardly ever cached"
