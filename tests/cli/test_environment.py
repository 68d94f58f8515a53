"""What a run records about the machine, how its ranks speak, and figures without a display."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment as child_environment
from launching import run

from distcache.cli import run as environment
from distcache.cli.run import commit, describe_environment, set_up_logging, write_environment


def test_hardware_versions_and_command(tmp_path):
    write_environment(tmp_path, 3)
    found = json.loads((tmp_path / "environment.json").read_text())
    assert found["world_size"] == 3
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**20
    assert found["hardware"]["cpu"]
    assert found["versions"]["torch"] and found["versions"]["numpy"] and found["versions"]["python"]
    assert found["command"]
    assert found.keys() == describe_environment(1).keys()


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_the_commit_of_a_checkout(tmp_path):
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


def test_no_git_is_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()

    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", missing)
    assert commit(tmp_path) is None


@pytest.fixture
def speak(capsys):
    """Set up logging for a rank, say something at each level; (stdout, stderr)."""
    logger = logging.getLogger("distcache")
    before, level, passes = list(logger.handlers), logger.level, logger.propagate

    def run(*setting: object) -> tuple[list[str], list[str]]:
        set_up_logging(*setting)
        for word in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("distcache.some.module"), word)("a %s", word)
        said = capsys.readouterr()
        return said.out.splitlines(), said.err.splitlines()

    yield run
    logger.handlers[:], logger.propagate = before, passes
    logger.setLevel(level)


def test_rank_0_speaks(speak):
    out, err = speak("info", 0, 1)
    assert [line.split(" ", 1)[1] for line in out] == ["a info"]
    assert err == ["warning: a warning", "error: a error"]


def test_other_ranks_warn_and_name_themselves(speak):
    assert speak("INFO", 2, 4) == ([], ["rank 2: warning: a warning", "rank 2: error: a error"])
    assert speak("ERROR", 2, 4) == ([], ["rank 2: error: a error"])
    out, _ = speak("DEBUG", 2, 4)
    assert len(out) == 2


DRAW = """
import os, sys
from distcache.cli.run import new_figure
figure = new_figure(1, 1)
figure.savefig(sys.argv[1])
print(os.environ["MPLBACKEND"])
"""


def test_a_backend_that_is_not_there_does_not_matter(tmp_path) -> None:
    """A notebook's kernel names its own backend to every command that it starts."""
    pytest.importorskip("matplotlib")
    name, path = "module://not_there.backend", tmp_path / "figure.png"
    done = run(
        [sys.executable, "-c", DRAW, str(path)],
        env=child_environment(MPLBACKEND=name),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name
    assert path.read_bytes().startswith(b"\x89PNG")
