"""Seconds until the planner's compiled loops are there: in a new installation, and from then on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from distcache.bench.report import Record
from distcache.errors import DistcacheError

_PROGRAM = """
import sys, time, torch
started = time.perf_counter()
import numba
imported = time.perf_counter()
import distcache.planner.home
sys.stdout.write(f"{imported - started} {time.perf_counter() - imported}")
"""


def measure_start() -> list[Record]:
    """Numba's import and the loops after it, in two fresh processes over one empty folder."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("compiled", "loaded from disk"):
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM],
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise DistcacheError(f"the compiled loops do not load:\n{done.stderr[-2000:]}")
            numba, loops = map(float, done.stdout.split())
            records.append({"kind": "start", "loops": name, "import_s": numba, "loops_s": loops})
    return records
