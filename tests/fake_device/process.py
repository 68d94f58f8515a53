"""Calls in processes that have the device that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_device import fake_cuda
from ranks import free_port, run_ranks


def run(
    guard: Path, work: Callable, calls: Sequence[Any], ranks: int = 1, timeout: float = 240
) -> list[list[Any]]:
    """What `work(call)` returns for each of `calls`, by rank.

    Every rank is a process of its own with its own device.
    """
    ports = [free_port() for _ in calls]  # a store may outlive its call on the other rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(guard))  # torch looks for devices when it is imported
        patch.setenv("TRITON_INTERPRET", "0")  # kernels are launched
        given = (guard, work, calls, ports)
        found = run_ranks(_on_rank, ranks, *given, timeout=timeout, fresh=True)
    return [list(by_rank) for by_rank in zip(*found, strict=True)]


def _on_rank(
    rank: int, size: int, guard: Path, work: Callable, calls: Sequence, ports: Sequence[int]
) -> list[Any]:
    fake_cuda.load(guard)
    from fake_device import fake_torch, kernels

    fake_torch.install()
    kernels.install()
    found = []
    for call, port in zip(calls, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        found.append(work(call))
    return found
