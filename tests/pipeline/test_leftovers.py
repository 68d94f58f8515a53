"""After a run nothing is left: no thread, no file, no shared memory, and every exit code is 0."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launching import run

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "repetitions",
    [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("fails",), 1)])
def test_nothing_is_left(arguments: tuple, code: int, repetitions: int) -> None:
    """Two ranks' short runs: every exit code is `code`, and no file stays."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    before = set(os.listdir("/dev/shm"))
    done = run(
        [sys.executable, str(TESTS / "short_runs.py"), str(repetitions), *arguments],
        env=environment,
        capture_output=True,
        timeout=30 + 20 * repetitions,
    )
    assert done.returncode == 0, done.stderr
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "distcache" in name}
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    assert codes == [[code, code]] * repetitions, (codes, done.stderr)
