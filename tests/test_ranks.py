"""The helper that runs functions on ranks: values, first failure, death, time limit."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()
    return rank, int(value), torch.get_num_threads()


def _as_it_starts(rank: int, size: int) -> tuple[bool, bool, bool]:
    threads = len(list(Path("/proc/self/task").iterdir()))
    return "preloaded" in sys.modules, threads == 1, dist.is_initialized()


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    time.sleep(60)


def _misbehave(rank: int, world_size: int, how: str) -> None:
    if rank == 0:
        if how == "die":
            os._exit(7)
        time.sleep(60)


def test_values_come_back_by_rank() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 21, 1), (1, 21, 1)]


def test_ranks_start_with_everything_imported_and_nothing_started() -> None:
    assert run_ranks(_as_it_starts, 1) == [(True, True, False)]


def test_first_failing_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*_fail_on_one.*the reason"):
        run_ranks(_fail_on_one, 2)
    assert not multiprocessing.active_children()


def test_death_and_time_limit_name_the_rank() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died: exit code 7"):
        run_ranks(_misbehave, 1, "die")
    with pytest.raises(TimeoutError, match=r"ranks \[0.*not done within 1 s"):
        run_ranks(_misbehave, 2, "sleep", timeout=1)
    assert not multiprocessing.active_children()
