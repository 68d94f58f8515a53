"""Calls in processes that have the device that is not there.

They are forked from one that has imported everything with the library of guard.cpp, and started
nothing: it is made by the first call, and ends with `stop`.
"""

from __future__ import annotations

import importlib
import multiprocessing.process
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from fake_device import fake_cuda
from ranks import Job, agent_store

LAZY = ("lazy", 0)
"""A scheduler, with its seed."""

_SERVERS: list[tuple[Connection, Any]] = []


def run(
    guard: Path,
    work: Callable,
    calls: Sequence[Any],
    ranks: int = 1,
    timeout: float = 240,
    under: Sequence[tuple[str, int]] = (),
) -> list[list[Any]]:
    """What `work(call)` returns for each of `calls`, by rank; `under`: the scheduler of each.

    Every rank is a process of its own with its own device.
    """
    stores = [agent_store() for _ in calls]  # of each call its own, here, whose ports nobody takes
    pipe = _SERVERS[0][0] if _SERVERS else _start(guard)
    pipe.send(
        (
            ranks,
            (work, calls, under or [LAZY] * len(calls), [store.port for store in stores]),
            timeout,
        )
    )
    assert pipe.poll(timeout + 60), "the server of ranks does not answer"
    found, error = pipe.recv()
    if error is not None:
        raise error
    return [list(by_rank) for by_rank in zip(*found, strict=True)]


def _start(guard: Path) -> Connection:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(guard))  # torch looks for devices when it is imported
        patch.setenv("TRITON_INTERPRET", "0")  # kernels are launched
        patch.setenv("OMP_NUM_THREADS", "1")
        server = context.Process(target=_serve, args=(guard, there))
        server.start()
        multiprocessing.process._children.discard(server)  # other tests look for what is left
    there.close()
    _SERVERS.append((here, server))
    return here


def stop() -> None:
    """End the process that the others are forked from."""
    for pipe, server in _SERVERS:
        pipe.close()
        server.join()
    _SERVERS.clear()


def _serve(guard: Path, pipe: Connection) -> None:
    os.environ.pop("LD_PRELOAD")
    fake_cuda.load(guard)
    importlib.import_module("preloaded")
    while True:
        try:
            ranks, given, timeout = pipe.recv()
        except EOFError:
            return
        try:
            fork = mp.get_context("fork")
            job = Job(_on_rank, ranks, *given, agent=False, context=fork)
            pipe.send(([end.value for end in job.ends(timeout, raising=True)], None))
        except Exception as error:
            pipe.send((None, error))


def _on_rank(
    rank: int,
    size: int,
    work: Callable,
    calls: Sequence,
    under: Sequence[tuple[str, int]],
    ports: Sequence[int],
) -> list[Any]:
    from fake_device import fake_torch, kernels

    fake_torch.install()
    kernels.install()
    found = []
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for call, (scheduler, seed), port in zip(calls, under, ports, strict=True):
        fake_cuda.DEVICE.give_up()
        fake_cuda.DEVICE.scheduler = fake_cuda.SCHEDULERS[scheduler](seed + rank)
        os.environ["MASTER_PORT"] = str(port)
        found.append(work(call))
    return found
