"""Preprocessing jobs for tests: run here or as a command, and what they leave compared."""

from __future__ import annotations

import sys
from pathlib import Path

from criteo_lines import preprocessed

from distcache.data.raw.settings import Manifest


def run(input, output: Path, **settings) -> Manifest:
    """A job in parts of few lines, in this process unless said otherwise."""
    return preprocessed(input, output, **{"part": 20_000} | settings)


def same_files(one: Path, other: Path) -> bool:
    """Whether two results have the same arrays, to the byte."""
    names = [sorted(p.relative_to(f) for p in f.rglob("*.npy")) for f in (one, other)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


def command(*arguments: str) -> list[str]:
    """The command line of a job."""
    return [sys.executable, "-m", "distcache.preprocess", *arguments]
