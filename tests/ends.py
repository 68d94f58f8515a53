"""Run a function on N local ranks of which some fail or die, and see how each of them ends."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from ranks import forking, free_port


@dataclass
class End:
    """How a rank ended: what its function returned (None if it died), exit code, and when."""

    value: Any
    exitcode: int | None
    at: float


def _child(
    function: Callable,
    rank: int,
    size: int,
    agent: bool,
    port: int,
    pipe: Connection,
    args: tuple,
) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    here |= {"TORCHELASTIC_USE_AGENT_STORE": agent, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({key: str(value) for key, value in here.items()})
    torch.set_num_threads(1)
    try:
        pipe.send(function(rank, size, *args))
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()


class Job:
    """Ranks that run; as under torchrun, their store lives in this process and outlives them.

    `agent=False`: in rank 0, as without torchrun.
    """

    def __init__(self, function: Callable, world_size: int, *args: Any, agent: bool = True) -> None:
        context = forking()
        self._store = None
        if agent:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port if self._store else free_port()
        self._pipes, self._children = {}, []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (function, rank, world_size, agent, port, sender, args)
            child = context.Process(target=_child, args=arguments, daemon=True)
            child.start()
            sender.close()
            self._pipes[receiver] = rank
            self._children.append(child)

    def ends(self, timeout: float = 120, but: Sequence[int] = ()) -> list[End]:
        """How each rank ended, except the ranks `but`, which are killed when the others are done.

        TimeoutError names those that are not done in `timeout` seconds.
        """
        found = {rank: End(None, None, 0.0) for rank in but}
        deadline = time.monotonic() + timeout
        pipes = {pipe: rank for pipe, rank in self._pipes.items() if rank not in but}
        try:
            while pipes:
                ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pipes.values())} not done in {timeout} s")
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        found[rank] = End(pipe.recv(), None, time.monotonic())
                    except EOFError:
                        found[rank] = End(None, None, time.monotonic())
            for rank, child in enumerate(self._children):
                if rank not in but:
                    child.join(max(0.1, deadline - time.monotonic()))
                    found[rank].exitcode = child.exitcode
        finally:
            for child in self._children:
                child.kill()
                child.join()
        return [found[rank] for rank in range(len(self._children))]
