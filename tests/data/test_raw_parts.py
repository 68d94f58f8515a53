"""Parts: written block by block in little memory, widened late, and recounted at the split."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, preprocessed, read_plainly, write_lines

from distcache.data.files import inspect
from distcache.data.raw import parts as part_module
from distcache.data.raw.job import Pool
from distcache.data.raw.parts import PartTask, parse_part, read_pieces, write_runs
from distcache.errors import DataError, MemoryTooSmallError


def parse(path: Path, folder: Path, rows=None, name: str = "p"):
    file = inspect(path)
    return parse_part(PartTask(name, file, 0, file.bytes, str(folder), rows, False, 0))


@pytest.mark.parametrize("where", [None, 0, 350, 699])
def test_values_are_widened_when_one_needs_it(tmp_path, monkeypatch, where):
    """Blocks of a few lines; the id of more than 32 bits is in the first, a middle, the last."""
    monkeypatch.setattr(part_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr("distcache.data.raw.parts.PIECE", 37)
    lines = make_lines(700)
    if where is not None:
        lines[where] = b"\t".join([*lines[where].split(b"\t")[:-1], b"123456789abcdef0"])
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
    assert (
        np.fromfile(tmp_path / "some/values.bin", dtype).tolist()
        == np.concatenate(distinct).tolist()
    )


def test_a_part_takes_the_memory_of_its_blocks(tmp_path):
    """Lines of nothing but tabs are the most samples that a part may have: 26 ids for 41 bytes."""
    text = b"0" + b"\t" * 39 + b"\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text * ((32 << 20) // len(text)))
    code = f"""
import resource, sys
sys.path[:0] = ["tests", "."]
from pathlib import Path
from test_raw_parts import parse
from distcache.data.raw.parts import parse_part
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


def test_an_empty_gzip_file_is_an_error(tmp_path):
    good = write_lines(tmp_path / "a.txt", make_lines(50))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b""))
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"b\.gz is empty: there is nothing in the gzip data"):
            preprocessed([good, tmp_path / "b.gz"], tmp_path / f"out{workers}", workers=workers)


def test_the_largest_table_is_not_a_narrower_one(tmp_path):
    lines = make_lines(20)
    report = parse(write_lines(tmp_path / "a.txt", lines), tmp_path, ROWS)
    assert report.id_dtype == "<i4" and not (tmp_path / "p/missing.bin").stat().st_size


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
