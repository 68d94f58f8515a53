"""Ranks: this process as one, or others as processes, on one node or each a node of its own."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcache.cli.run import job_environment, stop_job
from distcache.comm.world import World, close_world, open_world
from distcache.compare import log_tail
from distcache.errors import ConfigError

_POLL_S = 0.2
_GRACE_S = 10.0
"""How long a rank that is asked to stop may take."""

_PORT = 29500
"""Where rank 0 listens in a network namespace of its own."""


@dataclass(frozen=True)
class End:
    """Where a rank runs: the words that start a command there, the interface, its address."""

    prefix: tuple[str, ...] = ()
    interface: str = "lo"
    address: str = "127.0.0.1"


def rank_environment(
    rank: int, ends: Sequence[End], port: int, one_node: bool = False
) -> dict[str, str]:
    """Variables of a rank as torchrun would give it: of one agent for all, where they are one node,
    else of agent number `rank` for its only one, and the ranks share no store."""
    size = len(ends)
    place = (rank, size, 0) if one_node else (0, 1, rank)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return {
        **job_environment(size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        **{name: str(value) for name, value in zip(names, place, strict=True)},
        "MASTER_ADDR": ends[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": ends[rank].interface,
    }


@contextmanager
def started(
    words: Sequence[str],
    ends: Sequence[End],
    logs: Path,
    *,
    one_node: bool = False,
    more: Mapping[str, str] | None = None,
    pipes: Sequence[int] = (),
) -> Iterator[list[subprocess.Popen]]:
    """`python *words` as a rank at each end; none of them runs on afterwards, whatever happens.

    `logs`: the folder for `rank0.log` and so on; `more`: further variables; `pipes`: a descriptor
    for each rank, which it finds in `$RANK_PIPE`. SIGTERM comes as KeyboardInterrupt, once.
    """
    port = _free_port() if ends[0].address == End().address else _PORT
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, previous)
        children = []
        for rank, end in enumerate(ends):
            log = stack.enter_context((logs / f"rank{rank}.log").open("w"))
            mine = pipes[rank : rank + 1]
            environment = rank_environment(rank, ends, port, one_node) | dict(more or {})
            environment |= {"RANK_PIPE": str(mine[0])} if mine else {}
            child = subprocess.Popen(
                [*end.prefix, sys.executable, *words],
                env=environment,
                pass_fds=mine,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the parent decides when it hears of Ctrl-C
            )
            stack.callback(stop_job, child, _GRACE_S)
            children.append(child)
        yield children


def run_ranks(words: Sequence[str], ends: Sequence[End], logs: Path) -> None:
    """Run `python *words` as a rank at each end, a node of its own, until all have ended.

    Raises ConfigError with the log of a rank that failed.
    """
    with started(words, ends, logs) as children:
        codes: list[int | None] = [None] * len(children)
        while None in codes and not any(codes):  # where one failed, others would wait for it
            time.sleep(_POLL_S)
            codes = [child.poll() for child in children]
    bad = [rank for rank, code in enumerate(codes) if code]
    if bad:
        raise failed(logs, bad)


def failed(logs: Path, ranks: Sequence[int]) -> ConfigError:
    """The error that says which ranks failed, with the ends of their logs."""
    tails = "\n".join(log_tail(logs / f"rank{rank}.log") for rank in ranks)
    return ConfigError(f"rank {ranks[0]} failed:\n{tails}")


def _free_port() -> int:
    """A TCP port that nobody listens on now, and that no outgoing connection is given meanwhile:
    below those that the system gives by itself."""
    while True:
        port = random.SystemRandom().randrange(_PORT + 1, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def opened_world(*arguments: Any) -> Iterator[World]:
    """This process's world, opened with `open_world`'s arguments."""
    world = open_world(*arguments)
    try:
        yield world
        close_world(world)
    finally:
        close_world(world, orderly=False)
