"""No override of the training command ends in a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import environment, run

SCRIPT = Path(__file__).resolve().parents[1] / "override_fuzz.py"


@pytest.mark.parametrize(
    ("count", "seed"), [(20, 7), pytest.param(2000, 0, marks=pytest.mark.slow)]
)
def test_drawn_overrides_train_or_end_with_an_error_in_words(tmp_path, count, seed) -> None:
    command = [sys.executable, str(SCRIPT), str(count), str(seed), str(tmp_path)]
    done = run(command, env=environment(), capture_output=True, timeout=60 + 3 * count)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"0 of {count} command lines" in done.stdout
