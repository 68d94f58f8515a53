"""Run a function on N local ranks, each in a process of its own: collect what they return, or see
how each of them ends where some are meant to fail or die.

The processes are forked from one that has imported everything and started nothing: `preloaded.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distcache.planner.threads import Threads

_PORTS = 1500
"""Of each process that runs tests: those of others, and what the system hands out (from 32768 on),
do not come between finding a port free and listening on it."""

_SAYING_S = 0.5
"""How long ranks that do not come to an end get to say where they are."""

TESTS = Path(__file__).resolve().parent


def share_all() -> None:
    """Let threads that plan share steps of any size: those of tests are too small to be worth
    it."""
    Threads.least_s = 1e-12


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


def starting() -> BaseContext:
    """Return the context that starts ranks: processes are forked where there is no GPU.

    On a machine with a GPU they are spawned. Importing TorchRec counts the devices, and torch then
    refuses to open CUDA in a process that is forked from the one that counted.
    """
    return mp.get_context("spawn") if torch.cuda.is_available() else forking()


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    first = 20000 + _PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
    while True:
        port = first + random.SystemRandom().randrange(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def agent_store() -> dist.TCPStore:
    """A store as torchrun's agent has it for its ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def set_variables(
    environment: MutableMapping[str, str], here: dict[str, int], port: int, agent: bool
) -> None:
    """Tell a rank its place, `here`, and where the store is; `agent`: as torchrun does."""
    told: dict[str, Any] = here | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if agent:
        told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        told["TORCHELASTIC_RUN_ID"] = f"forked-{port}"
    environment.update({name: str(value) for name, value in told.items()})


def _child(
    function: Callable, rank: int, size: int, agent: bool, port: int, pipe: Connection, args: tuple
) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    set_variables(os.environ, here | {"OMP_NUM_THREADS": 1}, port, agent)
    mp.set_start_method(None, force=True)  # Python's own, not how this process was started
    torch.set_num_threads(1)
    share_all()
    faulthandler.register(signal.SIGUSR1)  # says on stderr where its threads are
    try:
        pipe.send((function(rank, size, *args), 0.0))
    except BaseException:
        pipe.send((f"rank {rank} failed:\n{traceback.format_exc()}", time.monotonic()))
    pipe.close()


@dataclass
class End:
    """How a rank ended: what its function returned (its traceback if that failed, None if the rank
    died), when that failed (0.0: it did not), and the exit code."""

    value: Any = None
    failed_at: float = 0.0
    exitcode: int | None = None


class Job:
    """Ranks that run; as under torchrun, their store lives in this process and outlives them.

    `agent=False`: in rank 0, as without torchrun; `context`: how they are started, as `forking`.
    """

    def __init__(
        self,
        function: Callable,
        world_size: int,
        *args: Any,
        agent: bool = True,
        context: BaseContext | None = None,
    ) -> None:
        context = context or starting()
        self._store = agent_store() if agent else None
        port = self._store.port if self._store else free_port()
        self._pipes, self._children = {}, []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (function, rank, world_size, agent, port, sender, args)
            child = context.Process(target=_child, args=arguments, daemon=True)
            child.start()
            sender.close()  # so that the death of the child is seen as end of file
            self._pipes[receiver] = rank
            self._children.append(child)

    def ends(
        self, timeout: float = 120, but: Sequence[int] = (), raising: bool = False
    ) -> list[End]:
        """How each rank ended, except the ranks `but`, which are killed when the others are done.

        TimeoutError names those that are not done in `timeout` seconds; `raising`: the first that
        fails or dies is a RuntimeError. Before that, the others say on stderr where they are.
        """
        found, deadline = [End() for _ in self._children], time.monotonic() + timeout
        pipes = {pipe: rank for pipe, rank in self._pipes.items() if rank not in but}
        try:
            while pipes:
                ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(pipes.values())
                    raise TimeoutError(f"ranks {missing} not done within {timeout} s")
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        found[rank] = End(*pipe.recv())
                    except EOFError:
                        self._children[rank].join(10)
                        found[rank] = End(None, time.monotonic())
                failed = [rank for rank, end in enumerate(found) if end.failed_at]
                if raising and failed:
                    rank = min(failed, key=lambda rank: found[rank].failed_at)
                    died = f"rank {rank} died: exit code {self._children[rank].exitcode}"
                    raise RuntimeError(found[rank].value or died)
            for rank, child in enumerate(self._children):
                if rank not in but:
                    child.join(10 if raising else max(0.1, deadline - time.monotonic()))
                    found[rank].exitcode = child.exitcode
        except (RuntimeError, TimeoutError):
            self._tell_where(list(pipes.values()))
            raise
        finally:
            for child in self._children:
                child.kill()
                child.join()
        return found

    def _tell_where(self, ranks: Sequence[int]) -> None:
        """Let these ranks say where they are."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._children[rank].pid, signal.SIGUSR1)
        time.sleep(_SAYING_S)


def run_ranks(function: Callable, world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank; the return values by rank.

    `function` is at module level and its values can be pickled (tensors: return NumPy arrays).
    Raises RuntimeError with the traceback of the rank that failed first, or when a rank dies
    without a word; TimeoutError naming the ranks that are missing. No process outlives the call.
    """
    job = Job(function, world_size, *args, agent=False)
    return [end.value for end in job.ends(timeout, raising=True)]
