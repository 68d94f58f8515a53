"""Parts, runs and workers: in little memory, merged the plain way, ended with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, parsed, with_fields, write_lines

from distcache.data.raw.job import Pool
from distcache.data.raw.parts import CriteoRows
from distcache.data.raw.tables import ENTRY_BYTES, Run, merge_runs, write_runs
from distcache.errors import MemoryTooSmallError


def run_code(code: str, **more) -> subprocess.CompletedProcess:
    """A process of its own, which finds what the tests import."""
    words = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    return subprocess.run(words, capture_output=True, text=True, env=env, **more)


def test_a_part_takes_the_memory_of_its_blocks(tmp_path):
    """Lines of nothing but tabs are the most samples that a part may have: 26 ids for 41 bytes."""
    text = b"0" + b"\t" * 39 + b"\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text * ((32 << 20) // len(text)))
    (tmp_path / "few.txt").write_bytes(text * ((4 << 20) // len(text)))
    done = run_code(f"""
import resource
from pathlib import Path
from criteo_lines import parsed
parsed(Path({str(tmp_path / "few.txt")!r}), None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report, _ = parsed(Path({str(path)!r}), None, read=False)
print(report.samples, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""")
    samples, grown = map(int, done.stdout.split())
    assert samples == (32 << 20) // len(text)
    # A few pieces of its arrays, which all together are more.
    assert grown * 1024 < 1.5 * samples * 26 * 4


def test_rows_are_as_wide_as_the_largest_table_needs(tmp_path):
    line = with_fields(make_lines(1, missing=0)[0], {14: b"ffffffff", 15: b"fffffffe"})
    path = write_lines(tmp_path / "a.txt", [line] * 7)
    report, rows = parsed(path, ROWS)
    assert report.id_dtype == "<i4" and rows.ids.dtype == np.int32 and rows.missing is None
    report, rows = parsed(path, (2**32, *ROWS[1:]))
    assert report.id_dtype == "<i8" and rows.ids.dtype == np.int64
    assert rows.ids[6, :2].tolist() == [2**32 - 1, 0xFFFFFFFE % ROWS[1]]


def die(task: str) -> None:
    os.kill(os.getpid(), 9)


def test_a_worker_that_died_between_tasks_is_explained():
    """The pool is broken when the next task comes, as when unpacking took long."""

    def tasks():
        yield "first"
        time.sleep(2)
        yield "second"

    with Pool(2) as pool, pytest.raises(MemoryTooSmallError, match="a worker process was killed"):
        list(pool.run(die, tasks()))


def test_workers_end_with_a_parent_that_is_killed():
    found = run_code("""
import os, time
from distcache.data.raw.job import Pool
with Pool(2) as pool:
    next(pool.run(time.sleep, [0, 99, 99, 99]))
    print(*pool._executor._processes, flush=True)
    os.kill(os.getpid(), 9)
""")
    workers, deadline = [Path(f"/proc/{pid}/cmdline") for pid in found.stdout.split()], 10
    assert len(workers) == 2
    while any(path.exists() and path.read_bytes() for path in workers):  # none: not reaped yet
        time.sleep(0.1)
        deadline -= 0.1
        assert deadline > 0


def make_runs(tmp_path: Path, columns: list[np.ndarray]) -> list[Run]:
    """A run for each column of ids, as parts leave them (with another table before)."""
    runs, none = [], np.empty(0)
    for number, column in enumerate(columns):
        path, halves = tmp_path / f"run{number}", np.array_split(column, 2)
        ids = [np.stack([half[::-1] // 2, *[half] * 25], axis=1) for half in halves]
        pieces = [CriteoRows(none, none, one) for one in ids]
        lengths, _, dtype = write_runs(pieces, path, column.dtype)
        runs.append(Run(str(path), dtype.str, lengths[0], lengths[1]))
    return runs


def draw(dtype: str, seed: int = 0, parts: int = 5) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    top = 40 if dtype == "<u8" else 30
    return [
        np.floor(2 ** (random.random(random.integers(1, 400)) * top)).astype(dtype)
        for _ in range(parts)
    ]


@pytest.mark.parametrize("dtype", ["<u4", "<u8", "<i4", "mixed"])
@pytest.mark.parametrize("most", [1, 10, 100, 10**6])
def test_merged_runs_are_the_counts_of_all(tmp_path, dtype, most):
    columns = draw("<u4") + draw("<u8", 1) if dtype == "mixed" else draw(dtype)
    expected = np.unique(np.concatenate(columns), return_counts=True)
    chunks = list(merge_runs(make_runs(tmp_path, columns), most))
    assert np.array_equal(np.concatenate([v for v, _ in chunks]), expected[0])
    assert np.array_equal(np.concatenate([c for _, c in chunks]), expected[1])
    if most <= 100:
        assert len(chunks) > 3
        assert max(len(values) for values, _ in chunks) <= max(2 * most, len(columns))


def test_long_runs_are_merged_in_the_memory_of_a_range(tmp_path):
    """Runs are searched and sampled by memory map: what is held is one range, never a run."""
    runs, length = [], 1_000_000
    for number in range(3):
        path = tmp_path / str(number)
        np.arange(number, 3 * length, 3, dtype=np.uint32).tofile(f"{path}.values")
        np.ones(length, dtype=np.int64).tofile(f"{path}.counts")
        runs.append(Run(str(path), "<u4", 0, length))
    most, total = 1 << 14, 0
    tracemalloc.start()
    try:
        for values, counts in merge_runs(runs, most):
            total += int(counts.sum())
            assert len(values) <= 2 * most
        assert total == 3 * length
        assert tracemalloc.get_traced_memory()[1] < 2 * most * ENTRY_BYTES < 4 * length
    finally:
        tracemalloc.stop()
