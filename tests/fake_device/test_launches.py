"""What the cost model has a step launch is what the device that is not there counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_device.fake_cuda import DEVICE
from fake_device.process import run
from scenarios import Scenario, make_mode, table
from torch import nn

from distcache.comm.world import close_world, open_world
from distcache.models import build_model, initialise
from distcache.parallel.cached import CachedSettings
from distcache.sizing.cost import (
    DENSE_LAUNCHES,
    GROUP_LAUNCHES,
    GROUP_MOVES,
    INDEX_BYTES,
    LAUNCHES,
    MOVES,
)
from distcache.streams import TIMED_EVERY

STEPS = 2 * TIMED_EVERY


class WithDlrm(Scenario):
    """Two tables of one width, and a DLRM with as many layers as the experiments'."""

    def model(self) -> nn.Module:
        dense = build_model("dlrm", 5, [8] * 2, [32, 16, 8, 8], [16, 8, 1])
        return initialise(dense, self.seed, self.dtype)


ONE = WithDlrm((table("a", 300), table("b", 40)), steps=STEPS, bag=1)
MORE = (table("c", 3000, dim=4),)
"""Of another width: one group more, which SmallNet of two layers takes."""


def counts(call: dict[str, Any]) -> tuple[float, float]:
    """Launches of training's thread and autograd's, and launches and copies of movement, mean of
    the steps that are not timed. `groups`: of tables; `dlrm`: whether that is the model; `graph`:
    whether its dense part is replayed."""
    case = ONE if call["dlrm"] else Scenario(ONE.tables, steps=STEPS, bag=1)
    case = replace(case, tables=case.tables + MORE * (call["groups"] - 1))
    world, found = open_world("cuda", "gloo", 60), [Counter[str](), Counter[str]()]
    settings = CachedSettings("data", (180,) * call["groups"], 2, 1, cuda_graph=call["graph"])
    mode = make_mode(world, case, settings)
    for step in mode.stream(case.batch(s) for s in range(STEPS)):
        before = Counter(DEVICE.counts)
        mode.train_step(step)
        if step.batch.index >= TIMED_EVERY and step.batch.index % TIMED_EVERY > 2:
            for (what, thread), count in (Counter(DEVICE.counts) - before).items():
                found[thread == "distcache-movement"][what] += count
    mode.close()
    close_world(world)
    training, moving = found
    steps = TIMED_EVERY - 3
    copies = moving["to device, pinned"] + moving["to host, pinned"]
    return training["launch"] / steps, (moving["launch"] + copies) / steps


def test_launches_are_those_that_are_counted(guard: Path) -> None:
    shapes = [(True, 1, True), (True, 1, False), (False, 1, True), (False, 2, True)]
    calls = [dict(zip(("dlrm", "groups", "graph"), of, strict=True)) for of in shapes]
    (dlrm,), (launched,), (one,), (two,) = run(guard, counts, calls)
    assert dlrm[0] == pytest.approx(LAUNCHES + GROUP_LAUNCHES, abs=3)
    assert launched[0] == pytest.approx(DENSE_LAUNCHES + LAUNCHES + GROUP_LAUNCHES, abs=3)
    assert dlrm[1] == pytest.approx(MOVES + GROUP_MOVES, rel=0.25)
    assert two[0] - one[0] == pytest.approx(GROUP_LAUNCHES, abs=3)
    assert two[1] - one[1] == pytest.approx(GROUP_MOVES, abs=3)


def sent(samples: int) -> tuple[float, float]:
    """Bytes that movement brings to the device in all steps, beside the batch and rows, which it
    reads in place; and those of indices that the cost model has."""
    case = replace(ONE, global_batch=samples, skew=1.0)
    world, settings = open_world("cuda", "gloo", 60), CachedSettings("data", (340,), 2, 1)
    mode = make_mode(world, case, replace(settings, access="zero_copy"))
    batches, rows = [case.batch(step) for step in range(STEPS)], 0
    for step in mode.stream(iter(batches)):
        rows += step.context.plans[0].distinct
        mode.train_step(step)
    mode.close()
    close_world(world)
    total = DEVICE.counts["bytes to device", "distcache-movement"]
    own = sum(batch.dense.nbytes + batch.labels.nbytes for batch in batches)
    ids = [len(batch.ids.values) for batch in batches]
    common = 4 * (2 * ids[0] + 1)  # once: what all batches have in common
    by_row = INDEX_BYTES[1] + INDEX_BYTES[2]
    return total - own - common, INDEX_BYTES[0] * sum(ids) + by_row * rows


def test_indices_take_the_bytes_that_are_predicted(guard: Path) -> None:
    (((own, predicted),),) = run(guard, sent, [16_384])
    assert own == pytest.approx(predicted, rel=0.1)
