"""Figures need no display and no backend."""

from __future__ import annotations

import sys

import pytest
from launching import environment, run

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
        env=environment(MPLBACKEND=name),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name
    assert path.read_bytes().startswith(b"\x89PNG")
