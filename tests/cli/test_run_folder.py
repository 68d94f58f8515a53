"""Run folders: runs that were killed early go on, two runs at once are refused, and a refused start
leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import STUB, Forked, environment, train

# A file system without locks, in front of the program.
NO_LOCKS = f"""
import errno, fcntl, runpy, sys
def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = refuse
runpy.run_path({STUB!r}, run_name="__main__")
"""


@pytest.mark.parametrize("program", [(STUB,), ("-c", NO_LOCKS)], ids=["locks", "no locks"])
def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(
    tmp_path: Path, program: tuple[str, ...]
) -> None:
    command = [sys.executable, *program, "trainer.seed=5", "run.dir=run"]  # it sleeps
    again = ["trainer.seed=4", "run.dir=run", "run.overwrite=true"]
    first = Forked(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "asleep").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        second = train(again, tmp_path, 1, program)
        assert second.returncode == 1
        assert f"run.dir=run is in use: process {first.pid} on host " in second.stderr
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(60)
    assert (tmp_path / "run" / ".lock").exists(), "a killed process leaves its lock file"
    third = train(["trainer.seed=4", "run.dir=run"], tmp_path, 1, program)
    assert third.returncode == 0, third.stderr
    assert ("without locks (No locks available)" in third.stderr) == ("-c" in program)
    assert not (tmp_path / "run" / ".lock").exists()
