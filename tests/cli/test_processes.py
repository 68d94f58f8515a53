"""Jobs in processes of their own, what a run records of its machine, and how ranks speak."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import STUB, Forked, environment, run

from distcache.cli import run as module
from distcache.cli.run import (
    commit,
    describe_environment,
    job_environment,
    run_job,
    set_up_logging,
    stop_job,
    train_command,
)


def test_commands():
    assert train_command(1, ["a=1"]) == [sys.executable, "-m", "distcache.train", "a=1"]
    many = train_command(4, ["a=1"])
    assert many[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc-per-node=4" in many and many[-3:] == ["-m", "distcache.train", "a=1"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_idle_threads_of_torch_spin_briefly_unless_the_user_says_otherwise(variables, expected):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    program = (
        "import json, os, sys, distcache; assert 'torch' not in sys.modules; import torch;"
        f"print(json.dumps({{n: os.environ[n] for n in {names} if n in os.environ}}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(run.stdout) == expected, run.stderr


def test_a_job_is_no_rank_of_its_parent(monkeypatch):
    names = {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"}
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    here = job_environment(2)
    assert (here["KEPT"], here["OMP_NUM_THREADS"]) == ("yes", "4") and not names & set(here)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert job_environment(2)["OMP_NUM_THREADS"] == "3"


def test_output_waiting_and_exit_code(tmp_path):
    program = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(0.5)"
    command, told = [sys.executable, "-c", f"{program}; sys.exit(3)"], []
    assert run_job(command, 1, tmp_path / "log", 0.05, lambda: told.append(1)) == 3
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"] and told


def alive(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


DEAF = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_deaf_job_is_killed():
    job = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    stop_job(job, grace_s=0.2)
    assert job.returncode == -signal.SIGKILL


AGENT = """
import os, runpy, sys
if os.fork():
    os.wait()
else:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_a_rank_ends_with_its_agent(tmp_path):
    """The rank sleeps for 50 s, and nobody else would tell it."""
    words = [STUB, "trainer.seed=5", "run.dir=run"]
    own = environment(TORCHELASTIC_RUN_ID="a-test")
    agent = Forked([sys.executable, "-c", AGENT, *words], cwd=tmp_path, env=own)
    deadline = time.monotonic() + 40
    while not (tmp_path / "run" / "asleep").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (rank,) = map(int, Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split())
    agent.kill()
    while alive(rank) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(rank)


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


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_an_interrupted_parent_stops_its_job_first(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environment())
    log = tmp_path / "log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "up" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(number)
    assert parent.wait(60) == 130
    assert log.read_text().split() == ["up", "stopped"]


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_nobody_reads_on():
    says = "import logging; from distcache.cli.run import set_up_logging; set_up_logging()\n"
    says += "for at in range(3): logging.getLogger('distcache').info('line %d', at)"
    read, written = os.pipe()
    os.close(read)
    how = {"env": environment(), "stderr": subprocess.PIPE, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", says], stdout=written, check=False, **how)
    os.close(written)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    assert commit(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = commit(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == {"commit": clean["commit"], "dirty": True}
    inside = tmp_path / "installed"
    inside.mkdir()
    assert commit(inside) is None  # a package inside somebody else's checkout

    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(module.subprocess, "run", missing)
    assert commit(tmp_path) is None


def test_hardware_and_versions():
    found = describe_environment(3)
    hardware, versions = found["hardware"], found["versions"]
    assert hardware["cpu"] and hardware["cores"] >= 1 and hardware["memory_bytes"] > 2**20
    assert versions["torch"] and versions["numpy"] and versions["python"] and found["command"]


@pytest.fixture
def speak(capsys):
    """Set up logging for a rank, say something at each level; (stdout, stderr)."""
    logger = logging.getLogger("distcache")
    before, level, passes = list(logger.handlers), logger.level, logger.propagate

    def spoken(*setting: object) -> tuple[list[str], list[str]]:
        set_up_logging(*setting)
        for word in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("distcache.some.module"), word)("a %s", word)
        said = capsys.readouterr()
        return said.out.splitlines(), said.err.splitlines()

    yield spoken
    logger.handlers[:], logger.propagate = before, passes
    logger.setLevel(level)


def test_rank_0_speaks_and_others_warn_and_name_themselves(speak):
    out, err = speak("info", 0, 1)
    assert [line.split(" ", 1)[1] for line in out] == ["a info"]
    assert err == ["warning: a warning", "error: a error"]
    assert speak("INFO", 2, 4) == ([], ["rank 2: warning: a warning", "rank 2: error: a error"])
    assert speak("ERROR", 2, 4) == ([], ["rank 2: error: a error"])
    out, _ = speak("DEBUG", 2, 4)
    assert len(out) == 2


DRAW = """
import os, sys
from pathlib import Path
from distcache.cli.run import draw
draw(Path(sys.argv[1]), (1, 1), lambda figure: None)
"""


def test_a_backend_that_is_not_there_does_not_matter(tmp_path):
    """A notebook's kernel names its own to every command that it starts."""
    pytest.importorskip("matplotlib")
    path, backend = tmp_path / "figure.png", "module://not_there.backend"
    command = [sys.executable, "-c", DRAW, str(path)]
    here = environment(MPLBACKEND=backend)
    assert run(command, env=here, timeout=100).returncode == 0
    assert path.read_bytes().startswith(b"\x89PNG")
