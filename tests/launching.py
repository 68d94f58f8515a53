"""Start commands as a user gives them: forked with all imports done, or in fresh interpreters.

`Forked` and `run` take what `subprocess.Popen` and `subprocess.run` take and run the command in
processes of the fork server (`ranks.forking`): tenths of a second and not seconds. They read
`python -m module`, `python -c code`, `python script`, and torchrun's `--nproc-per-node` in front of
these. What an interpreter does by itself (imports, its last breath) and what torchrun's agent does
is seen only in fresh ones: tests of that use `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from node_cases import place_of
from ranks import agent_store, forking, set_variables

CHECKOUT = Path(__file__).resolve().parent.parent
STUB = str(CHECKOUT / "tests" / "cli" / "stub_train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE_S = 30.0
"""How long ranks may go on once one of them has failed, until they are asked to end; torchrun asks
at once, which would hide what they find out by themselves."""


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: this checkout, one thread, no rank of ours."""
    kept = {name: value for name, value in os.environ.items() if name not in _RANK}
    return kept | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"} | more


def train(
    arguments: Sequence[str],
    folder: Path,
    ranks: int = 1,
    program: Sequence[str] = (STUB,),
    fresh: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a training program with `ranks` ranks in `folder`, and wait at most 100 s for its end;
    `fresh`: in interpreters of its own, under torchrun where there are several; `how`: more for
    `Forked`."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [*TORCHRUN, "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    return (subprocess.run if fresh else run)(
        [*launcher, *program, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        **how,
    )


def run(
    command: Sequence[str],
    capture_output: bool = False,
    timeout: float | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` for a `Forked` command."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    job = Forked(command, **how)
    try:
        out = job.communicate(timeout=timeout)
    finally:
        job.kill()
    return subprocess.CompletedProcess(list(command), job.returncode, *out)


class Forked:
    """A command that runs: as much of `subprocess.Popen` as is used here.

    With torchrun in front it is that many ranks; signals go to all of them, `pid` is the first's,
    and the code is 1 where a rank failed. Their store lives in this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = True,
        start_new_session: bool = False,
    ) -> None:
        ranks, program = _ranks_of(list(command))
        self.args, self.returncode, self._failed_at = list(command), None, None
        self._job, self._store = ranks is not None, agent_store() if ranks is not None else None
        self._pipes = [
            tempfile.NamedTemporaryFile("r") if target == subprocess.PIPE else None  # noqa: SIM115
            for target in (stdout, stderr)
        ]
        files = {
            number: (pipe or target).name
            for number, pipe, target in zip((1, 2), self._pipes, (stdout, stderr), strict=True)
            if target is not None
        }
        self._ranks = []
        for rank in range(ranks or 1):
            own = dict(os.environ if env is None else env)
            if self._job:
                here = {"RANK": rank, "WORLD_SIZE": ranks} | place_of(rank, (ranks,))
                set_variables(own, here, self._store.port, agent=True)
            place = str(Path.cwd() if cwd is None else cwd)
            args = (program, self.args, place, own, files, start_new_session)
            self._ranks.append(forking().Process(target=_become, args=args))
            self._ranks[-1].start()
        self.pid = self._ranks[0].pid

    def poll(self) -> int | None:
        """The exit code, None while a process runs."""
        codes = [rank.exitcode for rank in self._ranks]
        now = time.monotonic()
        if any(codes) and None in codes:
            self._failed_at = self._failed_at or now
            if now - self._failed_at > _GRACE_S:
                self.send_signal(signal.SIGTERM)
        elif None not in codes and self.returncode is None:
            self.returncode = int(any(codes)) if self._job else codes[0]
            self._store = None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            left = min(1.0, deadline - time.monotonic())
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            wait([rank.sentinel for rank in self._ranks if rank.exitcode is None], left)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Wait for the end; what was written to the pipes that were asked for."""
        self.wait(timeout)
        out, err = (None if pipe is None else pipe.read() for pipe in self._pipes)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal to all that run."""
        for rank in self._ranks:
            if rank.exitcode is None:
                os.kill(rank.pid, number)

    def kill(self) -> None:
        """End all that run."""
        for rank in self._ranks:
            rank.kill()
            rank.join()


def _ranks_of(command: list[str]) -> tuple[int | None, list[str]]:
    """How many ranks torchrun would start (None: it is not in front), and the program's words."""
    program, ranks = command[1:], None
    if program[:2] == ["-m", "torch.distributed.run"]:
        program = program[2:]
        while program[0].startswith("--"):
            word = program.pop(0)
            if word.startswith("--nproc-per-node"):
                ranks = int(word.partition("=")[2] or program.pop(0))
    return ranks, program


def _become(
    program: list[str],
    command: list[str],
    folder: str,
    environment: dict[str, str],
    files: dict[int, str],
    new_session: bool,
) -> None:
    """Be the process that this command would have started."""
    if new_session:
        os.setsid()
    for number, path in files.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # not how this process was started
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    try:
        _execute(program, command)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def _execute(program: list[str], command: list[str]) -> None:
    """Run `-m module`, `-c code` or a script as the main module."""
    sys.orig_argv = list(command)
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(program[1], None)  # run anew, not what the fork server has imported
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = program
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
