"""Evaluation over ranks with uneven slices equals that of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.trainer.record import Evaluation, measure

LENGTHS = [[3, 0, 7], [0, 0, 0], [11, 1, 0]]
"""Samples of each batch by rank; rank 1 of three has none at all."""


def data(rank: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + batch)
    count = LENGTHS[rank][batch]
    logits = torch.randn(count, generator=generator)
    return logits, (torch.rand(count, generator=generator) < 0.4).float()


def evaluate(rank: int, world_size: int) -> tuple:
    """One evaluation of three batches, one of none, one with a NaN."""
    world, results = open_world("cpu", timeout_s=60), []
    for batches, poison in ((range(3), False), ((), False), (range(3), True)):
        evaluation = Evaluation()
        for batch in batches:
            logits, labels = data(rank, batch)
            if poison and rank == 2:
                logits = logits * torch.nan
            evaluation.add(logits, labels)
        results.append(evaluation.finish(world))
    close_world(world)
    return tuple(results)


def test_three_ranks_equal_one():
    ranks = run_ranks(evaluate, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    pairs = [data(rank, batch) for rank in range(3) for batch in range(3)]
    logits, labels = (np.concatenate([p[i].double().numpy() for p in pairs]) for i in (0, 1))
    whole, nothing, poisoned = ranks[0]
    assert whole == measure(logits, labels)
    assert whole.samples == 22
    assert whole.ne == pytest.approx(whole.logloss / entropy(labels.mean()))
    assert (nothing.auc, nothing.logloss, nothing.ne, nothing.samples) == (None, None, None, 0)
    assert (poisoned.auc, poisoned.logloss, poisoned.ne) == (None, None, None)


def entropy(rate: float) -> float:
    return -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
