"""Models with modes and buffers: what evaluation sees, and what a step undone leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scenarios import Scenario, table
from torch import Tensor, nn

from distcache.comm.world import close_world, open_world
from distcache.parallel.cached import CachedParallel, CachedSettings


class Moody(nn.Module):
    """A model whose training differs from its evaluation: dropout, and running means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop, self.over = (
            nn.BatchNorm1d(width),
            nn.Dropout(0.5),
            nn.Linear(width, 1),
        )

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over(self.drop(self.norm(torch.cat([dense, pooled], 1)))).squeeze(1)


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
def test_evaluation_is_made_in_evaluation_mode(world, schedule: str) -> None:
    run = Scenario((table("a", 30), table("b", 7)))
    batch = run.batch(0)
    model = Moody(batch.dense.shape[1] + run.pooled_width)
    chosen = CachedSettings("data", (40,), 1, 1, schedule=schedule)
    mode = CachedParallel(world, run.tables, run.features, model, run.optimizer, chosen)
    before = {name: value.clone() for name, value in model.named_buffers()}
    stream = mode.stream(run.batch(0, kind="eval") for _ in range(2))
    first, second = (mode.eval_step(step) for step in stream)
    assert torch.equal(first, second)
    assert model.training and model.drop.training
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name])
    mode.close()


@pytest.mark.parametrize("delay", [0, 2])
def test_buffers_are_those_before_a_loss_that_is_not_finite(world, delay: int) -> None:
    run = Scenario((table("a", 30), table("b", 7)))
    found = []
    for bad in (3, None):
        torch.manual_seed(0)
        model = Moody(5 + run.pooled_width)
        chosen = CachedSettings("data", (40,), 1, 1, result_delay=delay)
        mode = CachedParallel(world, run.tables, run.features, model, run.optimizer, chosen)
        batches = [run.batch(at) for at in range(3 if bad is None else 6)]
        if bad is not None:
            batches[bad] = replace(batches[bad], dense=batches[bad].dense * torch.nan)
        for step in mode.stream(batches):
            mode.train_step(step)
        mode.flush()
        found.append({name: value.clone() for name, value in model.named_buffers()})
        mode.close()
    assert int(found[0]["norm.num_batches_tracked"]) == 3
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
