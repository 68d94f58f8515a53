"""The kernels as the GPU's compiler sees them: Triton compiles for a GPU that need not be there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ptxas is only tried on x86-64")
@pytest.mark.parametrize(
    ("capability", "widths"),
    [(80, (128,)), pytest.param(90, (4, 16, 33, 128), marks=pytest.mark.slow)],
)
def test_every_launch_compiles_and_rounds_as_it_says(
    capability: int, widths: tuple[int, ...], checkout: Path, tmp_path: Path
) -> None:
    """No fused multiply-add, no approximate quotient or root, no atomics; 16-byte loads for widths
    of 4 floats; no exchange between threads in sums."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(tmp_path)}
    script = checkout / "tests" / "compile_kernels.py"
    command = [sys.executable, str(script), str(capability), *map(str, widths)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {one["width"] for one in found} == set(widths)
    for width in widths:
        sums = [one for one in found if (one["kernel"], one["width"]) == ("segment_sums", width)]
        updates = [one for one in found if (one["kernel"], one["width"]) == ("update_rows", width)]
        copies = [one for one in found if (one["kernel"], one["width"]) == ("copy_rows", width)]
        assert {one["HOPS"] for one in sums} == {0, 1, 2} and len(updates) == 8
        assert {(one["FROM"], one["TO"]) for one in copies} == {(True, False), (False, True)}
        for one in sums + updates + copies:
            assert one["bytes"] > 0
            assert one["fused"] == one["approximate"] == one["atomics"] == 0, one
            # At width 4 a program has fewer elements than its threads can load at once.
            assert (one["wide_loads"] > 0) == (width % 4 == 0 and width > 4), one
        assert all(one["barriers"] == 0 for one in sums + copies)
        for one in updates:
            rooted = one["RULE"] != "sgd"
            assert (one["sqrt"] > 0) == (one["division"] > 0) == rooted, one
