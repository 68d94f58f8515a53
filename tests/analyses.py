"""Analyses from their command line, for tests: of small data, their reports, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distcache.analyze import main

SMALL = (
    *("data=synthetic", "data.table_rows=[20000,3000,40]", "data.global_batch_size=256"),
    *("trainer.steps=60", "cache.ratio=0.1"),
)


def run(folder: Path, *arguments: str) -> dict:
    """The report of an analysis that goes well."""
    out = folder / "out"
    assert main([*arguments, f"output={out}"]) == 0
    return json.loads((out / "report.json").read_text())


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """What is said of a command line that does not work."""
    assert main(list(arguments)) == 1
    return capsys.readouterr().err
