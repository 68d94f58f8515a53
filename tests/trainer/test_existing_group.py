"""distcache.fit in a process that has initialised torch.distributed itself: its groups stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_items import digests, fit, item
from ranks import run_ranks

from distcache.errors import DistcacheError

MODES = ("data", "resident", "hybrid")
CPU = {"trainer__device": "cpu"}


def loader(rank: int, world: int, bad: bool = False):
    for step in range(8):
        if bad and step == 5:
            raise ValueError("disk on fire")
        yield item(step, rank, world)


def alone(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Runs in fit's own world, which it leaves."""
    torch.set_num_threads(1)
    home, seen = Path(folder), {}
    for mode in MODES:
        seen[mode] = digests(fit(None, home / f"own-{mode}", loader(rank, size), mode, **CPU))
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
        found = fit(None, home / f"existing-{mode}", loader(rank, size), mode, **CPU)
        seen[f"existing {mode}"] = digests(found)
    for mode in MODES:
        try:
            fit(None, home / f"bad-{mode}", loader(rank, size, rank == size - 1), mode, **CPU)
        except DistcacheError as error:
            seen[f"bad {mode}"] = str(error)
    seen["again"] = digests(fit(None, home / "again", loader(rank, size), **CPU))
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
