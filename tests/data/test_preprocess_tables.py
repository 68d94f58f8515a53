"""Parts and tables: in little memory, widened late; runs, vocabularies, bags the plain way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, read_plainly, with_fields, write_lines

from distcache.data.files import inspect
from distcache.data.raw import parts, tables
from distcache.data.raw.job import Pool
from distcache.data.raw.parts import PartTask, parse_part, read_pieces, write_runs
from distcache.data.raw.settings import bags
from distcache.data.raw.tables import (
    ENTRY_BYTES,
    Run,
    fewer_runs,
    merge_runs,
)
from distcache.errors import MemoryTooSmallError


def parse(path: Path, folder: Path, rows=None, name: str = "p"):
    file = inspect(path)
    return parse_part(PartTask(name, file, 0, file.bytes, str(folder), rows, False, 0))


@pytest.mark.parametrize("where", [None, 0, 350, 699])
def test_values_are_widened_when_one_needs_it(tmp_path, monkeypatch, where):
    """Blocks of a few lines; the id of more than 32 bits is in the first, a middle, the last."""
    monkeypatch.setattr(parts, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(parts, "PIECE", 37)
    lines = make_lines(700)
    if where is not None:
        lines[where] = with_fields(lines[where], {39: b"123456789abcdef0"})
    path = write_lines(tmp_path / "a.txt", lines)
    report = parse(path, tmp_path)
    assert report.id_dtype == ("<u4" if where is None else "<u8") and report.samples == 700
    labels, dense, ids, _ = read_plainly(path.read_bytes(), None)
    pieces = list(read_pieces(tmp_path / "p", 700, np.dtype(report.id_dtype)))
    assert [piece.first for piece in pieces] == list(range(0, 700, 37))
    for name, expected in (("labels", labels), ("dense", dense), ("ids", ids)):
        assert np.array_equal(np.concatenate([getattr(p, name) for p in pieces]), expected)
    empty = np.array([[field == b"" for field in line.split(b"\t")[14:]] for line in lines])
    bits = np.concatenate([piece.missing for piece in pieces])
    assert np.array_equal(bits[:, None] >> np.arange(26) & 1, empty)
    (tmp_path / "some").mkdir()
    dtype = np.dtype(report.id_dtype)
    lengths, absent = write_runs(tmp_path / "p", tmp_path / "some", 123, dtype)
    assert absent == empty[:123].sum(0).tolist()
    distinct = [np.unique(ids[:123, t][~empty[:123, t]]) for t in range(26)]
    assert lengths == [len(values) for values in distinct]
    written = np.fromfile(tmp_path / "some/values.bin", dtype)
    assert np.array_equal(written, np.concatenate(distinct))


def test_a_part_takes_the_memory_of_its_blocks(tmp_path):
    """Lines of nothing but tabs are the most samples that a part may have: 26 ids for 41 bytes."""
    text = b"0" + b"\t" * 39 + b"\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text * ((32 << 20) // len(text)))
    code = f"""
import resource, sys
sys.path[:0] = ["tests", "."]
from pathlib import Path
from test_preprocess_tables import parse
few = parse(Path({str(tmp_path / "few.txt")!r}), Path({str(tmp_path)!r}), None, "few")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = parse(Path({str(path)!r}), Path({str(tmp_path)!r}))
print(report.samples, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    (tmp_path / "few.txt").write_bytes(text * ((4 << 20) // len(text)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    samples, grown = map(int, done.stdout.split())
    assert samples == (32 << 20) // len(text)
    # The pages of the part's file that were touched count; its arrays, twice that, do not.
    assert grown * 1024 < 1.5 * samples * 26 * 4


def test_rows_are_as_wide_as_the_largest_table_needs(tmp_path):
    line = with_fields(make_lines(1, missing=0)[0], {14: b"ffffffff", 15: b"fffffffe"})
    path = write_lines(tmp_path / "a.txt", [line] * 7)
    assert parse(path, tmp_path, ROWS, "narrow").id_dtype == "<i4"
    assert not (tmp_path / "narrow/missing.bin").stat().st_size
    assert parse(path, tmp_path, (2**32, *ROWS[1:])).id_dtype == "<i8"
    ids = np.fromfile(tmp_path / "p/ids.bin", np.int64).reshape(7, 26)
    assert ids[6, :2].tolist() == [2**32 - 1, 0xFFFFFFFE % ROWS[1]]


def die(task: str) -> None:
    os.kill(os.getpid(), 9)


def test_a_worker_that_died_between_tasks_is_explained():
    """The pool is broken when the next task comes, as when unpacking took long."""
    ended = []

    def tasks():
        yield "first"
        deadline = time.monotonic() + 30
        while "first" not in ended and time.monotonic() < deadline:
            time.sleep(0.01)
        yield "second"

    with Pool(2) as pool, pytest.raises(MemoryTooSmallError, match="a worker process was killed"):
        list(pool.run(die, tasks(), on_end=ended.append))
    assert ended == ["first", "second"]


def make_runs(tmp_path: Path, columns: list[np.ndarray]) -> list[Run]:
    """A run for each column of ids, as parts leave them (with another table before)."""
    runs = []
    for number, column in enumerate(columns):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        ids = np.stack([column[::-1] // 2, *[column] * 25], axis=1)
        ids.tofile(folder / "ids.bin")
        (folder / "missing.bin").touch()
        lengths, _ = write_runs(folder, folder, len(ids), ids.dtype)
        runs.append(Run(str(folder), column.dtype.str, lengths[0], lengths[1]))
    return runs


def draw(dtype: str, seed: int = 0, parts: int = 5) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    top = 40 if dtype == "<u8" else 30
    return [
        np.floor(2 ** (random.random(random.integers(1, 400)) * top)).astype(dtype)
        for _ in range(parts)
    ]


@pytest.mark.parametrize("dtype", ["<u4", "<u8", "<i4"])
@pytest.mark.parametrize("most", [1, 10, 100, 10**6])
def test_merged_runs_are_the_counts_of_all(tmp_path, dtype, most):
    columns = draw(dtype)
    expected = np.unique(np.concatenate(columns), return_counts=True)
    chunks = list(merge_runs(make_runs(tmp_path, columns), most))
    assert np.array_equal(np.concatenate([v for v, _ in chunks]), expected[0])
    assert np.array_equal(np.concatenate([c for _, c in chunks]), expected[1])
    if most <= 100:
        assert len(chunks) > 3
        assert max(len(values) for values, _ in chunks) <= max(2 * most, len(columns))


@pytest.mark.parametrize("fan_in", [2, 3, 7])
def test_many_runs_are_merged_in_groups(tmp_path, monkeypatch, fan_in):
    monkeypatch.setattr(tables, "FAN_IN", fan_in)
    columns = [*draw("<u4", parts=15), np.array([2**40, 2**40, 7], dtype="<u8")]
    runs = fewer_runs(make_runs(tmp_path, columns), 50, tmp_path / "groups")
    assert len(runs) <= fan_in
    assert len(list((tmp_path / "groups").iterdir())) == len(runs)
    distinct, counts = np.unique(np.concatenate(columns).astype(np.uint64), return_counts=True)
    chunks = list(merge_runs(runs, 50))
    assert np.concatenate([v for v, _ in chunks]).tolist() == distinct.tolist()
    assert np.concatenate([c for _, c in chunks]).tolist() == counts.tolist()


def test_long_runs_are_merged_in_the_memory_of_a_range(tmp_path):
    """Runs are searched and sampled by memory map: what is held is one range, never a run."""
    runs, length = [], 1_000_000
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        np.arange(number, 3 * length, 3, dtype=np.uint32).tofile(folder / "values.bin")
        np.ones(length, dtype=np.uint32).tofile(folder / "counts.bin")
        runs.append(Run(str(folder), "<u4", 0, length))
    most, total = 1 << 14, 0
    tracemalloc.start()
    try:
        for values, counts in merge_runs(runs, most):
            total += int(counts.sum())
            assert len(values) <= 2 * most
        assert total == 3 * length
        assert tracemalloc.get_traced_memory()[1] < 2 * most * ENTRY_BYTES < runs[0].values().nbytes
    finally:
        tracemalloc.stop()


def test_bags_are_a_function_of_table_and_id():
    ids = np.array([4, 0, 4, 9_999_999], dtype=np.int64)
    drawn = bags(ids, 2, 10**7, 8)
    assert drawn.shape == (4, 8) and drawn[:, 0].tolist() == ids.tolist()
    assert drawn[0].tolist() == drawn[2].tolist() == bags(ids[:1], 2, 10**7, 8)[0].tolist()
    assert len(np.unique(drawn)) == 3 * 8 and 0 <= drawn.min() <= drawn.max() < 10**7
    assert not np.array_equal(bags(ids, 3, 10**7, 8), drawn)
    assert bags(ids, 2, 10**7, 1).tolist() == ids[:, None].tolist()
