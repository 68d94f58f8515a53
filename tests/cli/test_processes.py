"""Jobs in processes of their own: their environment, output, end and interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import environment

from distcache.cli.run import descendants, job_environment, run_job, stop_job, train_command


def test_commands():
    assert train_command(1, ["a=1"]) == [sys.executable, "-m", "distcache.train", "a=1"]
    many = train_command(4, ["a=1"])
    assert many[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc-per-node=4" in many and many[-3:] == ["-m", "distcache.train", "a=1"]


def test_a_job_is_no_rank_of_its_parent(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    here = job_environment(2)
    assert here["KEPT"] == "yes"
    assert here["OMP_NUM_THREADS"] == "4"
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"} & set(
        here
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert job_environment(2)["OMP_NUM_THREADS"] == "3"


def test_output_and_exit_code(tmp_path):
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert run_job([sys.executable, "-c", program], 1, tmp_path / "log") == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_waiting_is_told(tmp_path):
    told = []
    program = "import time; time.sleep(0.5)"
    run_job([sys.executable, "-c", program], 1, None, 0.05, lambda: told.append(1))
    assert told


FAMILY = """
import subprocess, sys, time, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"],
                         start_new_session=True)
print("ready", child.pid, flush=True)
time.sleep(100)
"""


def alive(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_deaf_job_is_killed_with_its_family():
    job = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    grandchild = int(job.stdout.readline().split()[1])
    assert descendants(job.pid) == {grandchild}
    stop_job(job, grace_s=0.2)
    assert job.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(grandchild)


PARENT = """
import sys
from pathlib import Path
from distcache.cli.run import run_job
child = ("import signal, sys, time\\n"
         "def stop(*_):\\n    print('stopped', flush=True); sys.exit(0)\\n"
         "signal.signal(signal.SIGINT, stop)\\nprint('up', flush=True)\\ntime.sleep(100)")
try:
    run_job([sys.executable, "-c", child], 1, Path("log"))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_parent_stops_its_job_first(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environment())
    log = tmp_path / "log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "up" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(number)
    assert parent.wait(60) == 130
    assert log.read_text().split() == ["up", "stopped"]
