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
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert "preloaded" in sys.modules and threads == 1 and not dist.is_initialized()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()
    return rank, int(value), torch.get_num_threads()


def _misbehave(rank: int, world_size: int, how: str) -> None:
    if how == "fail" and rank == 1:
        raise ValueError("the reason")
    if how == "die" and rank == 0:
        os._exit(7)
    time.sleep(60)


def test_ranks_start_with_everything_imported_and_their_values_come_back() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 21, 1), (1, 21, 1)]


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("fail", RuntimeError, r"(?s)rank 1 failed:.*_misbehave.*the reason"),
        ("die", RuntimeError, "rank 0 died: exit code 7"),
        ("sleep", TimeoutError, r"ranks \[0.*not done within 2 s"),
    ],
)
def test_the_first_rank_that_fails_dies_or_hangs_is_named(how, error, says) -> None:
    with pytest.raises(error, match=says):
        run_ranks(_misbehave, 2, how, timeout=2 if how == "sleep" else 120)
    assert not multiprocessing.active_children()
