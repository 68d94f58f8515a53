"""A built wheel, installed elsewhere, is complete: configuration, type marker, commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def run_python(*arguments: str, cwd: Path, path: Path) -> str:
    """What Python says on stdout, run in `cwd` with `path` before the environment's packages."""
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(path)}
    run = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_wheel_is_complete_and_runs_in_another_folder(checkout: Path, tmp_path: Path) -> None:
    source, out, target, folder = (tmp_path / name for name in ("source", "out", "target", "empty"))
    folder.mkdir()
    # Built from a copy of the checkout, so that nothing is left in it.
    skip = shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info", "tests")
    shutil.copytree(checkout, source, ignore=skip)
    pip("wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(source))
    (wheel,) = out.glob("distcache-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {file.relative_to(checkout) for file in (checkout / "conf").rglob("*.yaml")}
    package = {file.relative_to(checkout) for file in (checkout / "distcache").rglob("*.py")}
    assert {f"distcache/{file}" for file in conf} | {str(file) for file in package} <= names
    assert {"distcache/py.typed", "distcache/conf/train.yaml"} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"distcache"}
    pip("install", "--target", str(target), "--no-deps", "--no-compile", "-q", str(wheel))
    code = "import distcache.cli.compose as paths; print(paths.conf_dir())"
    said = run_python("-c", code, cwd=folder, path=target)
    assert said.strip() == str(target / "distcache" / "conf")
    said = run_python("-m", "distcache.train", "--cfg", "job", cwd=folder, path=target)
    assert "parallel:" in said
    assert not list(folder.iterdir())
