"""A built wheel, installed elsewhere, is complete: configuration, type marker, commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that nothing is left in it."""
    source = tmp_path_factory.mktemp("source") / "distcache"
    skip = shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info", "tests")
    shutil.copytree(checkout, source, ignore=skip)
    out = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(source)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
    (built,) = out.glob("distcache-*.whl")
    return built


def test_wheel_carries_conf_and_type_marker(wheel: Path, checkout: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {file.relative_to(checkout) for file in (checkout / "conf").rglob("*.yaml")}
    package = {file.relative_to(checkout) for file in (checkout / "distcache").rglob("*.py")}
    assert {f"distcache/{file}" for file in conf} | {str(file) for file in package} <= names
    assert {"distcache/py.typed", "distcache/conf/train.yaml"} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"distcache"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed, outside any environment."""
    target = tmp_path_factory.mktemp("installed")
    place = ["--target", str(target), "--no-deps", "--no-compile", "-q", str(wheel)]
    command = [sys.executable, "-m", "pip", "install", *place]
    subprocess.run(command, check=True, capture_output=True)
    return target


def run_python(*arguments: str, cwd: Path, path: Path) -> str:
    """What Python says on stdout, run in `cwd` with `path` before the environment's packages."""
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(path)}
    run = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_installed_wheel_finds_its_own_conf(installed: Path, tmp_path: Path) -> None:
    code = "import distcache.cli.compose as paths; print(paths.conf_dir())"
    said = run_python("-c", code, cwd=tmp_path, path=installed)
    assert said.strip() == str(installed / "distcache" / "conf")


def test_installed_wheel_composes_a_job_in_another_folder(installed: Path, tmp_path: Path) -> None:
    said = run_python("-m", "distcache.train", "--cfg", "job", cwd=tmp_path, path=installed)
    assert "parallel:" in said
    assert not list(tmp_path.iterdir())
