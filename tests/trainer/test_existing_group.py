"""distcache.fit in a process that has initialised torch.distributed itself: its groups stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scenarios import Scenario, table

import distcache
from distcache.errors import DistcacheError
from distcache.parallel.base import OptimizerSpec

SCENARIO = Scenario((table("t", 300, 8, 3),), OptimizerSpec("adagrad"), steps=8, weighted=False)
MODES = ("data", "resident", "hybrid")


def loader(rank: int, world: int, bad: bool = False):
    for step in range(8):
        if bad and step == 5:
            raise ValueError("disk on fire")
        batch = SCENARIO.batch(step, rank, world)
        yield batch.dense, (batch.ids.values, batch.ids.offsets), batch.labels


def fit(folder: Path, rank: int, world: int, mode: str, bad: bool = False) -> tuple[str, str]:
    settings = {"cache.rows": 160, "cache.lookahead": 3, "run.dir": str(folder), "run.save": True}
    settings |= {"optim.dense_lr": 0.1, "optim.embedding_lr": 0.1, "trainer.device": "cpu"}
    items = loader(rank, world, bad)
    model = SCENARIO.model()
    summary = distcache.fit(items, SCENARIO.tables, model, parallel=mode, settings=settings).summary
    assert summary["world_size"] == world
    return summary["loss_digest"], summary["state_digest"]


def alone(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Runs in fit's own world, which it leaves."""
    torch.set_num_threads(1)
    seen = {mode: fit(Path(folder, f"own-{mode}"), rank, size, mode) for mode in MODES}
    assert not dist.is_initialized()
    return seen


def play(rank: int, size: int, folder: str, launched: bool) -> dict[str, Any]:
    """Runs in the caller's world, before and after some that fail."""
    torch.set_num_threads(1)
    home, seen = Path(folder), {}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    if not launched:  # by mp.spawn, say
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)
    groups = len(dist.distributed_c10d._world.pg_map)
    for mode in MODES:
        seen[f"existing {mode}"] = fit(home / f"existing-{mode}", rank, size, mode)
    for mode in MODES:
        try:
            fit(home / f"bad-{mode}", rank, size, mode, bad=rank == size - 1)
        except DistcacheError as error:
            seen[f"bad {mode}"] = str(error)
    seen["again"] = fit(home / "again", rank, size, "data")
    seen["groups"] = len(dist.distributed_c10d._world.pg_map) - groups
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    seen["sum"] = number.item()
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize(("size", "launched"), [(1, True), (2, False)])
def test_the_callers_groups_are_used_and_stay(tmp_path, size, launched):
    own = run_ranks(alone, size, str(tmp_path), timeout=200)[0]
    ranks = run_ranks(play, size, str(tmp_path), launched, timeout=200)
    for found in ranks:
        for mode in MODES:
            assert found[f"existing {mode}"] == own[mode]
            said = f"rank {size - 1}{':' if mode == 'hybrid' else ' failed'}"
            assert said in found[f"bad {mode}"] or found is ranks[-1]
            assert "disk on fire" in ranks[-1][f"bad {mode}"]
        assert found["again"] == own["data"]
        assert found["groups"] == 0 and found["sum"] == size * (size + 1) / 2
