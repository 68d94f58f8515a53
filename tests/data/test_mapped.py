"""Rows by memory map: those of the file, few pages, and no death by a file that is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distcache.data.files import MappedRows
from distcache.errors import DataError


def mapped(path: Path, array: np.ndarray) -> MappedRows:
    np.save(path, array)
    return MappedRows(path, np.load(path, mmap_mode="r"))


@pytest.mark.parametrize("shape", [(5000,), (5000, 26), (5000, 2, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_rows_are_those_of_the_array(tmp_path, shape, dtype):
    random = np.random.default_rng(0)
    array = random.integers(0, 200, shape).astype(dtype)
    rows = mapped(tmp_path / "a.npy", array)
    for wanted in (
        random.permutation(5000),  # more pieces than a system call takes
        np.arange(5000),
        np.arange(4999, -1, -1),
        np.array([7, 7, 8, 9, 9, 0, 4999]),
        np.repeat(np.arange(100, 3100), 2),
        np.empty(0, dtype=np.int64),
    ):
        taken = rows.take(wanted)
        assert taken.dtype == dtype and np.array_equal(taken, array[wanted])
    for wanted in ([5000], [-1]):
        with pytest.raises(IndexError):
            rows.take(np.array(wanted))


CUT = """
import os, sys
from pathlib import Path
import numpy as np
from distcache.data import files as mapped
from distcache.data.files import InputFile
from distcache.errors import DataError

path, wanted = Path(sys.argv[1]), np.array(eval(sys.argv[2]))
rows = mapped.MappedRows(path, np.load(path, mmap_mode="r"))
check = InputFile.check_unchanged

def check_and_cut(self, stream=None):
    check(self, stream)
    os.truncate(path, 8192)

InputFile.check_unchanged = check_and_cut
try:
    rows.take(wanted)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("wanted", ["[90_000]", "range(100, 90_000)", "range(99_999, 0, -7)"])
def test_a_file_that_is_cut_between_check_and_read_is_an_error(tmp_path, wanted):
    """In a process of its own, which a page beyond the end would kill."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100_000))
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(path), wanted], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert f"{path} shrank while it was read: 800,128 bytes at the start, 8,192 now" in done.stdout


def test_a_file_that_vanishes_or_changes_is_an_error(tmp_path):
    path = tmp_path / "a.npy"
    rows = mapped(path, np.arange(1000))
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.npy changed while it was read"):
        rows.take(np.arange(3))
    rows = mapped(path, np.arange(1000))
    path.unlink()
    with pytest.raises(DataError, match=r"a\.npy cannot be read any more"):
        rows.take(np.arange(3))


def test_nothing_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        mapped(tmp_path / "a.npy", np.arange(1000)).take(np.arange(3))
    assert len(os.listdir("/proc/self/fd")) <= before
