"""Two ranks of a program, each a node of its own, at the two ends of a link."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from distcache.bench.links_cable import NONE, End
from distcache.cli.compare_report import log_tail
from distcache.cli.run import job_environment, stop_job
from distcache.errors import ConfigError

_POLL_S = 0.2
_GRACE_S = 10.0
"""How long a rank that is asked to stop may take."""

_PORT = 29500
"""Where rank 0 listens in a namespace of its own."""


def rank_environment(rank: int, ends: Sequence[End], port: int) -> dict[str, str]:
    """Variables of a rank as torchrun's agent number `rank` would give its only one: so the ranks
    are two nodes, which share no store."""
    return {
        **job_environment(len(ends)),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ends)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": ends[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": ends[rank].interface,
    }


def run_ranks(ends: Sequence[End], rate: str, words: Sequence[str], logs: Path) -> None:
    """Run `python -m words` as a rank at each end, and wait until both have ended.

    `logs`: the folder for `rank0.log` and so on. Raises ConfigError with the log of a rank that
    failed. Whatever happens, none of them runs on.
    """
    port = _free_port() if rate == NONE else _PORT
    with ExitStack() as stack:
        children = []
        for rank, end in enumerate(ends):
            log = stack.enter_context((logs / f"rank{rank}.log").open("w"))
            child = subprocess.Popen(
                [*end.prefix, sys.executable, "-m", *words],
                env=rank_environment(rank, ends, port),
                stdout=log,
                stderr=log,
                start_new_session=True,  # the parent decides when it hears of Ctrl-C
            )
            stack.callback(stop_job, child, _GRACE_S)
            children.append(child)
        codes: list[int | None] = [None] * len(children)
        while None in codes and not any(codes):  # where one failed, others would wait for it
            time.sleep(_POLL_S)
            codes = [child.poll() for child in children]
        bad = [rank for rank, code in enumerate(codes) if code]
    if bad:
        tails = "\n".join(log_tail(logs / f"rank{rank}.log") for rank in bad)
        raise ConfigError(f"{words[0]} at rate {rate}: rank {bad[0]} failed:\n{tails}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
