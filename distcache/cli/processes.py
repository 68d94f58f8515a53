"""Processes: fresh ones for a parent that never touches a device, and how a rank ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

STOP_GRACE_S = 60.0
"""How long a stopped job may take to write its checkpoint before it is killed, seconds."""

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
LAUNCH_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")


def train_command(ranks: int, arguments: Sequence[str], module: str = "distcache.train"):
    """The command line of one training job of `ranks` ranks on this machine."""
    if ranks == 1:
        return [sys.executable, "-m", module, *arguments]
    # torchrun by module: the interpreter's own, whatever the PATH says.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [
        *torchrun,
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
        "-m",
        module,
        *arguments,
    ]


def job_environment(ranks: int) -> dict[str, str]:
    """The environment of a job: without the parent's own rank, the cores shared out evenly."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(LAUNCH_PREFIXES)
    }
    cores = len(os.sched_getaffinity(0))
    kept.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return kept


def run_job(
    command: Sequence[str],
    ranks: int,
    log: Path | None = None,
    every_s: float = 10.0,
    on_wait: Callable[[], None] | None = None,
) -> int:
    """Run a job to its end and return its exit code; its output goes to `log` where one is given.

    `on_wait` is called about every `every_s` seconds. Ctrl-C and SIGTERM stop the job, orderly
    first, and are raised as KeyboardInterrupt once it has ended; a second one kills it.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    out = None if log is None else log.open("w")
    try:
        # A session of its own: the parent decides when the job hears of Ctrl-C.
        child = subprocess.Popen(
            command, env=job_environment(ranks), stdout=out, stderr=out, start_new_session=True
        )
        try:
            while True:
                try:
                    return child.wait(every_s)
                except subprocess.TimeoutExpired:
                    if on_wait is not None:
                        on_wait()
        finally:
            stop_job(child)
    finally:
        if out is not None:
            out.close()
        signal.signal(signal.SIGTERM, previous)


def stop_job(child: subprocess.Popen, grace_s: float = STOP_GRACE_S) -> None:
    """End a job that still runs: ask its ranks to stop, and kill them if they do not."""
    if child.poll() is not None:
        return
    family = descendants(child.pid)
    try:
        # torchrun passes a signal on to its ranks, which sit in sessions of their own.
        child.send_signal(signal.SIGINT)
        child.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        family |= descendants(child.pid)
    for process in family | ({child.pid} if child.poll() is None else set()):
        _kill(process)
    child.wait()


def descendants(process: int) -> set[int]:
    """Process ids of all children of a process, and theirs."""
    found: set[int] = set()
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            direct = {int(word) for word in children.read_text().split()}
        except OSError:
            continue
        found |= direct.union(*(descendants(child) for child in direct))
    return found


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def leave(code: int) -> NoReturn:
    """End the process with `code` once everything is written, without the interpreter's teardown.

    The work and the process groups have ended by then; destructors of torch's communication
    threads that run at teardown abort the process now and then, which would turn a finished run
    into a failed one.
    """
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
