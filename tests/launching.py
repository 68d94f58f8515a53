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
from multiprocessing import reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from node_cases import place_of
from ranks import forking

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
    text: bool = True,
    timeout: float | None = None,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` for a `Forked` command."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    job = Forked(command, text=text, **how)
    try:
        out, err = job.communicate(timeout=timeout)
    finally:
        job.kill()
    done = subprocess.CompletedProcess(list(command), job.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Forked:
    """A command that runs: as much of `subprocess.Popen` as is used here.

    With torchrun in front it is that many ranks, on one node or as `nodes` says (ranks of each);
    signals go to all of them, `pid` is the first's, and the code is 1 where a rank failed. Their
    store lives in this process.
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
        nodes: Sequence[int] | None = None,
    ) -> None:
        ranks, program = _ranks_of(list(command))
        nodes = nodes or (ranks or 1,)
        self.args, self.returncode = list(command), None
        self._job, self._store, self._failed_at = ranks is not None, None, None
        self.stdout, self.stderr = _opened(stdout), _opened(stderr)
        out = stdout if self.stdout is None else self.stdout
        error = stderr if self.stderr is None else self.stderr
        sent = {1: out, 2: out if stderr == subprocess.STDOUT else error}
        files = {number: _Sent(file) for number, file in sent.items() if file is not None}
        here = dict(os.environ if env is None else env)
        if self._job:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = []
        for rank in range(ranks or 1):
            own = here | (_variables(rank, nodes, self._store.port) if self._job else {})
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
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            wait([rank.sentinel for rank in self._ranks if rank.exitcode is None], left)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Wait for the end; what was written to the pipes that were asked for."""
        self.wait(timeout)
        return _read(self.stdout), _read(self.stderr)

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
    if command[0] != sys.executable:
        raise ValueError(f"{command[0]}: only {sys.executable} is forked")
    program, ranks = command[1:], None
    if program[:2] == ["-m", "torch.distributed.run"]:
        program = program[2:]
        while program[0].startswith("--"):
            word = program.pop(0)
            if word.startswith("--nproc-per-node"):
                ranks = int(word.partition("=")[2] or program.pop(0))
            elif word != "--standalone" and not word.startswith("--local-addr="):
                raise ValueError(f"{word}: torchrun itself has to read this")
    return ranks, program


def _variables(rank: int, nodes: Sequence[int], port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    here = {"RANK": rank, "WORLD_SIZE": sum(nodes), "ROLE_RANK": rank, "ROLE_NAME": "default"}
    here |= place_of(rank, nodes) | {"ROLE_WORLD_SIZE": sum(nodes), "GROUP_WORLD_SIZE": len(nodes)}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    here |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    here |= {"TORCHELASTIC_RUN_ID": f"forked-{port}"}
    return {name: str(value) for name, value in here.items()}


class _Sent:
    """An open file on its way to another process."""

    def __init__(self, file: IO | int) -> None:
        self.number = file if isinstance(file, int) else file.fileno()

    def __reduce__(self) -> tuple:
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(sent: Any) -> int:
    return sent.detach()


def _opened(target: Any) -> IO | None:
    """The file behind a pipe or a way to nowhere; None for what the caller has opened."""
    if target == subprocess.PIPE:
        return tempfile.TemporaryFile("w+b")
    return open(os.devnull, "r+b") if target == subprocess.DEVNULL else None


def _read(file: IO | None) -> str | None:
    if file is None or file.name == os.devnull:
        return None
    with file:
        file.seek(0)
        return file.read().decode().replace("\r\n", "\n")


def _become(
    program: list[str],
    command: list[str],
    folder: str,
    environment: dict[str, str],
    files: dict[int, int],
    new_session: bool,
) -> NoReturn:
    """Be the process that this command would have started."""
    if new_session:
        os.setsid()
    for number, file in files.items():
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # not how this process was started
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    code = 1
    try:
        _execute(program, command)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(program: list[str], command: list[str]) -> None:
    """Run `-m module`, `-c code` or a script as the main module."""
    first, *rest = program
    sys.orig_argv = list(command)
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if first == "-m":
        sys.argv = [rest[0], *rest[1:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(rest[0], None)  # run anew, not what the fork server has imported
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
