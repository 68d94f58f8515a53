"""The compiled loops are there in every environment: kept on disk where that can be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from planner_bodies import NAMES

from distcache.planner import loops


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter that runs `program`, then plans a step; it tells what it fetched."""
    return subprocess.run(
        [sys.executable, "-c", program + PLAN],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


PLAN = """
import sys, numpy as np
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner
home = HomePlanner(RowLayout([TableSpec("t", 9, 4, ("f",))], 1), 0, 3, 1)
home.ingest(0, "train", [np.array([7, 2, 7])])
sys.stdout.write(str(home.plan().fetch_rows.tolist()))
"""
FETCHED = "[7, 2]"


def test_the_package_alone_brings_no_numba() -> None:
    done = run_python("import sys, distcache\nassert 'numba' not in sys.modules\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, FETCHED, "")


@pytest.mark.parametrize(
    "broken",
    [
        "caching.CacheImpl._locator_classes = []",
        "caching.IndexDataCacheFile.save = lambda *a: (_ for _ in ()).throw(OSError('full'))",
    ],
)
def test_where_nothing_can_be_kept_the_loops_compile_all_the_same(broken: str, tmp_path) -> None:
    program = f"from numba.core import caching\n{broken}\n"
    done = run_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == FETCHED, done.stderr
    assert not list(tmp_path.rglob("*.nbc"))


def test_machine_code_is_kept_where_numba_is_told(tmp_path) -> None:
    done = run_python("", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == FETCHED, done.stderr
    kept = sorted(file.name.split("-")[0] for file in tmp_path.rglob("*.nbc"))
    assert kept == sorted(f"loops.{name}" for name in NAMES[loops])


def test_a_setting_that_went_is_named() -> None:
    done = run_python("", DISTCACHE_PLANNER="numpy")
    assert done.stdout == FETCHED
    assert "$DISTCACHE_PLANNER=numpy is not read any more" in done.stderr
