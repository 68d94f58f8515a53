"""Each body of the planner's loops is there when it should be: compiled, or NumPy's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distcache.errors import ConfigError
from distcache.planner.calls import NAMES, NUMPY, SETTING, make


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter without $DISTCACHE_PLANNER, unless `environment` has it."""
    kept = {name: value for name, value in os.environ.items() if name != SETTING}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


PLAN = """
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner
import distcache.planner.calls as bodies
assert "numba" not in sys.modules
HomePlanner(RowLayout([TableSpec("t", 9, 4, ("f",))], 1), 0, 3, 1)
sys.stdout.write(bodies.bodies().body)
sys.stdout.flush()
"""


def test_numba_is_imported_by_the_first_planner_alone() -> None:
    program = "import sys, distcache, distcache.trainer.trainer, distcache.embedding" + PLAN
    done = run_python(program + "assert 'numba' in sys.modules")
    assert (done.returncode, done.stdout) == (0, "compiled"), done.stderr
    done = run_python("import sys" + PLAN + "assert 'numba' not in sys.modules", **{SETTING: NUMPY})
    assert (done.returncode, done.stdout) == (0, NUMPY), done.stderr


@pytest.mark.parametrize(
    "hidden", ["sys.modules['numba'] = None", "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'"]
)
def test_without_numba_plans_are_made_in_numpy(hidden: str) -> None:
    program = f"import sys; {hidden}\n" + PLAN.replace('assert "numba" not in sys.modules', "")
    done = run_python(program)
    assert done.stdout == NUMPY and "at less speed" in done.stderr, done.stderr
    done = run_python(program, **{SETTING: "compiled"})
    assert done.returncode == 1
    assert f"${SETTING}=compiled: Numba does not compile" in done.stderr


@pytest.mark.parametrize(
    "broken",
    [
        "caching.CacheImpl._locator_classes = []",
        "caching.IndexDataCacheFile.save = lambda *a: (_ for _ in ()).throw(OSError('full'))",
    ],
)
def test_where_nothing_can_be_kept_the_loops_compile_all_the_same(broken: str, tmp_path) -> None:
    program = f"import sys\nfrom numba.core import caching\n{broken}\n"
    program += PLAN.replace('assert "numba" not in sys.modules', "")
    done = run_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "compiled", done.stderr
    assert not list(tmp_path.rglob("*.nbc"))


def test_machine_code_is_kept_where_numba_is_told(tmp_path) -> None:
    done = run_python("import sys" + PLAN, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout == "compiled", done.stderr
    kept = sorted(file.name.split("-")[0] for file in tmp_path.rglob("*.nbc"))
    assert kept == sorted(f"loops.{name}" for name in NAMES)


def test_an_unknown_body_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"\${SETTING}=fast is not compiled or numpy"):
        make("fast")
