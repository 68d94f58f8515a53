"""Processes with the device that is not there: one, or one for each rank.

python process.py <library made of guard.cpp> <module:function> <ranks> <arguments as JSON>
prints, in its last line, what the function returned for each of the arguments on each rank.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


def run(
    guard: Path, function: str, calls: Sequence[Any], ranks: int = 1, timeout: float = 240
) -> list[list[Any]]:
    """What `module:function(call)` returns for each of `calls`, by rank.

    All in processes of their own, one for each rank, each with its own device. Raises RuntimeError
    with what they wrote to stderr, also where they took too long.
    """
    # Kernels are launched, not interpreted.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    command = [sys.executable, __file__, str(guard), function, str(ranks), json.dumps(calls)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            out, err = process.communicate()
            err += f"\nnot done within {timeout} s"
    if process.returncode != 0:
        raise RuntimeError(err)
    return json.loads(out.splitlines()[-1])


def main(guard: str, name: str, ranks: str, calls: str) -> None:
    """What the process does."""
    from fake_device import fake_cuda

    fake_cuda.load(Path(guard))
    import torch

    fake_cuda.install()
    module, _, function = name.partition(":")
    work: Callable = getattr(importlib.import_module(module), function)
    from fake_device import kernels

    kernels.install()
    torch.set_num_threads(1)
    print(json.dumps(on_ranks(work, json.loads(calls), int(ranks))), flush=True)
    # Autograd's thread may still be in a callback of guard.cpp: an orderly end would abort there.
    os._exit(0)


def on_ranks(work: Callable[[Any], Any], calls: Sequence[Any], size: int) -> list[list[Any]]:
    """What `work` returns for each of `calls`, by rank; RuntimeError where a rank failed."""
    from ranks import free_port

    if size == 1:
        return [[work(call)] for call in calls]
    ports = [free_port() for _ in calls]  # a store may outlive its call on the other rank
    pipes, children = [], []
    for rank in range(size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.environ |= dict(zip(("RANK", "LOCAL_RANK"), str(rank) * 2, strict=True))
            os.environ |= dict(zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size) * 2, strict=True))
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            with os.fdopen(writer, "w") as pipe:
                for call, port in zip(calls, ports, strict=True):
                    os.environ["MASTER_PORT"] = str(port)
                    pipe.write(json.dumps(work(call)) + "\n")
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
        children.append(child)
    found = [os.fdopen(pipe).readlines() for pipe in pipes]
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise RuntimeError("a rank failed")
    return [[json.loads(value) for value in by_rank] for by_rank in zip(*found, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
