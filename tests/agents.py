"""Several torchrun agents on this machine, each as a node of its own starts one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launching import environment
from ranks import free_port


def agents(
    folder: Path,
    ranks: Sequence[int],
    arguments: Sequence[str],
    prefixes: Sequence[Sequence[str]] = (),
    addresses: Sequence[str] = (),
    timeout: float = 150,
) -> list[tuple[int, str]]:
    """Run `distcache.train` under one agent for each of `ranks` (its number of ranks).

    `prefixes`: commands to start each agent with, such as `ip netns exec ...`; `addresses`: the
    agents' own, 127.0.0.1 where there are none. Returns exit code and output of each. Nothing of
    them runs on afterwards.
    """
    addresses = addresses or ["127.0.0.1"] * len(ranks)
    port, started = free_port(), []
    try:
        for number, count in enumerate(ranks):
            command = [
                *(prefixes[number] if prefixes else ()),
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(ranks))),
                *("--nproc-per-node", str(count), "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"{addresses[0]}:{port}", "--rdzv-id", "a-test"),
                *("--rdzv-conf", f"is_host={int(number == 0)}"),
                *("--local-addr", addresses[number], "-m", "distcache.train", *arguments),
            ]
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            how |= {"cwd": folder, "env": environment(), "start_new_session": True}
            started.append(subprocess.Popen(command, **how))
        texts = [one.communicate(timeout=timeout)[0] for one in started]
        return [(one.returncode, text) for one, text in zip(started, texts, strict=True)]
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGTERM)  # the agent ends its ranks, then itself
                try:
                    one.communicate(timeout=40)
                except subprocess.TimeoutExpired:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
