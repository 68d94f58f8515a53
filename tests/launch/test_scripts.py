"""The launch scripts themselves: dry runs of both branches, errors, the slow tests' budget."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import pick


def bash(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    """Run a launch script outside any activated environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISTCACHE_")}
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"):
        clean.pop(name, None)
    command = ["bash", str(pick.CHECKOUT / "launch" / script), *arguments]
    clean |= {"DISTCACHE_PYTHON": sys.executable} | env
    return subprocess.run(command, env=clean, capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize(
    ("accelerator", "fbgemm"), [("cpu", "fbgemm-gpu-cpu==1.8.0"), ("cuda", "fbgemm-gpu==1.8.0")]
)
def test_dry_run_says_what_it_would_install(accelerator: str, fbgemm: str, tmp_path: Path) -> None:
    run = bash(
        "quickstart.sh",
        "--dry-run",
        "trainer.steps=3",
        DISTCACHE_VENV=str(tmp_path / "new"),
        DISTCACHE_ACCELERATOR=accelerator,
        DISTCACHE_TORCH_INDEX="https://index.example/simple",
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    locked = [line.strip() for line in said if line.startswith("      ")]
    assert locked == pick.lines(pick.LOCK, pick.TEST)
    (torch,) = [line for line in said if f"torch=={pick.TORCH}" in line]
    assert torch.endswith("--extra-index-url https://index.example/simple")
    (pair,) = [line for line in said if "torchrec==" in line]
    assert fbgemm in pair.split()
    assert "--no-deps" in pair
    assert said[-1].endswith("'trainer.steps=3'")
    assert "'modes=data,hybrid' 'world_size=2'" in said[-1]
    assert not (tmp_path / "new").exists()


def test_errors_name_the_variable(tmp_path: Path) -> None:
    run = bash("test.sh", DISTCACHE_ACCELERATOR="tpu", DISTCACHE_VENV=str(tmp_path / "new"))
    assert run.returncode == 1
    assert "DISTCACHE_ACCELERATOR=tpu: use cpu, cuda or auto" in run.stderr
    run = bash("test.sh", DISTCACHE_PYTHON="/no/python")
    assert run.returncode == 1
    assert "DISTCACHE_PYTHON=/no/python is no Python 3.11 or 3.12" in run.stderr


def test_no_python_is_explained(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    setup = pick.CHECKOUT / "launch" / "setup.sh"
    env = {"PATH": str(tmp_path)}
    run = subprocess.run(["/bin/bash", str(setup)], env=env, capture_output=True, text=True)
    assert run.returncode == 1
    assert "no Python 3.11 or 3.12" in run.stderr
    assert "name it in DISTCACHE_PYTHON" in run.stderr


def test_a_failed_import_is_explained(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'OSError: undefined symbol: _ZN' >&2\nexit 1\n")
    python.chmod(0o755)
    code = "import install, sys; print(install.explain(sys.argv[1], None))"
    run = subprocess.run(
        [sys.executable, "-c", code, str(python)],
        cwd=pick.CHECKOUT / "launch",
        capture_output=True,
        text=True,
    )
    assert "undefined symbol: _ZN" in run.stdout
    assert "way out: DISTCACHE_ACCELERATOR=cpu" in run.stdout
    assert str(tmp_path) in run.stdout


@pytest.mark.parametrize(("seconds", "outcome"), [("0", "1 skipped"), ("60", "1 passed")])
def test_slow_tests_stop_when_their_time_is_over(
    seconds: str, outcome: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text((pick.CHECKOUT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_one(): pass\n"
    )
    config = str(pick.CHECKOUT / "pyproject.toml")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", config, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "DISTCACHE_SLOW_S": seconds},
        capture_output=True,
        text=True,
    )
    assert outcome in run.stdout, run.stdout + run.stderr
