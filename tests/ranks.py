"""Run a function on N local ranks, each in a process of its own, and collect what they return.

The processes are forked from one that has imported everything and started nothing: `preloaded.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

_PORTS = 1500
"""Of each process that runs tests: those of others, and what the system hands out (from 32768 on),
do not come between finding a port free and listening on it."""

TESTS = Path(__file__).resolve().parent


def forking() -> ForkServerContext:
    """The context whose processes are forked with all imports done, its server started.

    The server is one of this process: several that run tests have one each.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    mine = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    # A server finds modules by the environment alone (CPython 3.11 drops the path it is given), and
    # the arithmetic libraries that it loads ask then how many threads they may start.
    path = [str(TESTS), str(TESTS.parent), *filter(None, [mine["PYTHONPATH"]])]
    try:
        os.environ.update({"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"})
        forkserver.ensure_running()
    finally:
        for name, value in mine.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    first = 20000 + _PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
    while True:
        port = first + random.SystemRandom().randrange(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _child(function: Callable, rank: int, size: int, port: int, pipe: Connection, args: tuple):
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ.update({key: str(value) for key, value in here.items()})
    mp.set_start_method(None, force=True)  # Python's own, not how this process was started
    torch.set_num_threads(1)
    try:
        pipe.send((0.0, function(rank, size, *args)))
    except BaseException:
        pipe.send((time.monotonic(), f"rank {rank} failed:\n{traceback.format_exc()}"))
    pipe.close()


def run_ranks(function: Callable, world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank; the return values by rank.

    `function` is at module level and its values can be pickled (tensors: return NumPy arrays).
    Raises RuntimeError with the traceback of the rank that failed first, or when a rank dies
    without a word; TimeoutError naming the ranks that are missing. No process outlives the call.
    """
    context, port = forking(), free_port()
    results: dict[int, Any] = {}
    pipes, children = {}, []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(
                target=_child, args=(function, rank, world_size, port, sender, args), daemon=True
            )
            child.start()
            sender.close()  # so that the death of the child is seen as end of file
            pipes[receiver] = rank
            children.append(child)
        deadline = time.monotonic() + timeout
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} not done within {timeout} s")
            failures = []
            for pipe in ready:
                rank = pipes.pop(pipe)
                failed_at, results[rank] = _receive(pipe, rank, children[rank])
                if failed_at:
                    failures.append((failed_at, results[rank]))
            if failures:
                raise RuntimeError(min(failures)[1])
        for child in children:
            child.join(10)
    finally:
        for child in children:
            child.kill()
            child.join()
    return [results[rank] for rank in range(world_size)]


def _receive(pipe: Connection, rank: int, child: mp.Process) -> tuple[float, Any]:
    """When the rank failed (0.0: it did not), and its value or its traceback."""
    try:
        return pipe.recv()
    except EOFError:
        child.join(10)
        return time.monotonic(), f"rank {rank} died: exit code {child.exitcode}"
