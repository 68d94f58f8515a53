"""Fixtures of the command line's tests."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from launching import Forked

from distcache.cli import run


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that a command starts are forked with all imports done."""
    forking = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
    monkeypatch.setattr(run, "subprocess", forking)
