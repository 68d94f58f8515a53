"""Damaged files: an error that names file and line, or exactly the rows of the intact lines."""

from __future__ import annotations

import gzip
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, read_plainly
from damaged import ODD, damage

from distcache.data.criteo import CriteoSource, CriteoSpec
from distcache.data.files import inspect
from distcache.data.raw.parts import PartTask, parse_part
from distcache.errors import DataError

LINES = make_lines(14, seed=5)
TEXT = b"\n".join(LINES) + b"\n"


def read_source(path: Path, on_bad_line: str) -> tuple[list[np.ndarray], int]:
    source = CriteoSource(CriteoSpec(path, ROWS, on_bad_line=on_bad_line))
    return [source._labels, source._dense, source._ids], source.bad_lines.count


def read_part(path: Path, folder: Path, rows) -> tuple[list[np.ndarray], list[int]]:
    """The arrays of the whole (plain) file as a part, and the numbers of its malformed lines."""
    file = inspect(path)
    report = parse_part(PartTask("p", file, 0, file.bytes, str(folder), rows, True, 0))
    kinds = (("labels", "u1", 1), ("dense", "<f4", 13), ("ids", report.id_dtype, 26))
    arrays = [np.fromfile(folder / f"p/{n}.bin", d).reshape(-1, width) for n, d, width in kinds]
    shutil.rmtree(folder / "p")
    return [arrays[0].ravel(), *arrays[1:]], [1 + line for line, _ in report.bad]


def same(found: list[np.ndarray], expected: tuple) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected[:3], strict=True))


def check_plain(path: Path, text: bytes) -> None:
    """Both readers, in both ways with malformed lines, against line by line."""
    path.write_bytes(text)
    hashed, bad = (parsed := read_plainly(text, ROWS)), parsed[3]
    if text.startswith(b"\x1f\x8b"):
        return
    found, numbers = read_part(path, path.parent, ROWS)
    assert same(found, hashed) and numbers == bad[:10]
    valued = read_plainly(text, None)
    found, numbers = read_part(path, path.parent, None)
    assert same(found, valued) and numbers == valued[3][:10]
    if len(hashed[0]) < 2:
        with pytest.raises(DataError, match=re.escape(str(path))):
            read_source(path, "skip")
        return
    found, skipped = read_source(path, "skip")
    assert same(found, hashed) and skipped == len(bad)
    if bad:
        with pytest.raises(DataError, match=re.escape(f"{path}:{bad[0]}: ")):
            read_source(path, "error")
    else:
        assert same(read_source(path, "error")[0], hashed)


def check_packed(path: Path, text: bytes) -> None:
    """A damaged gzip file is an error at a line, unless what was changed says nothing."""
    path.write_bytes(text)
    for on_bad_line in ("error", "skip"):
        try:
            found, _ = read_source(path, on_bad_line)
        except DataError as error:
            named = re.search(
                re.escape(str(path)) + r"(:.* line \d+ |:\d+: | \(skipped: | is empty)", str(error)
            )
            assert named, str(error)
        else:
            assert same(found, read_plainly(TEXT, ROWS))


def fuzz(folder: Path, seeds: range) -> None:
    packed = gzip.compress(TEXT, mtime=0)
    for seed in seeds:
        dice = random.Random(seed)
        try:
            if seed % 5 == 4:
                check_packed(folder / "a.gz", damage(packed, dice))
            else:
                check_plain(folder / "a.txt", damage(TEXT, dice))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_damaged_files(tmp_path):
    fuzz(tmp_path, range(300))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_twenty_thousand_damaged_files(tmp_path, part):
    fuzz(tmp_path, range(1000 * part, 1000 * (part + 1)))


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_one_odd_thing_in_each_place(tmp_path, odd):
    for at in (0, 1, 2, TEXT.index(LINES[3]), TEXT.index(LINES[4]) + 60, len(TEXT) - 1, len(TEXT)):
        check_plain(tmp_path / "a.txt", TEXT[:at] + odd + TEXT[at:])


def test_a_line_of_ten_megabytes(tmp_path):
    for filler in (b"a", b"0", b"\t", b"-", b"\x00"):
        long_field = LINES[0] + filler * 10_000_000
        for text in ([*LINES[:5], long_field, *LINES[5:]], [*LINES, long_field]):
            at = text.index(long_field) + 1
            path = tmp_path / "a.txt"
            path.write_bytes(b"\n".join(text) + b"\n")
            with pytest.raises(DataError, match=f"a.txt:{at}: the line is longer than 1,048,576"):
                read_source(path, "error")
            found, skipped = read_source(path, "skip")
            assert skipped == 1 and same(found, read_plainly(TEXT, ROWS))
            found, numbers = read_part(path, tmp_path, ROWS)
            assert numbers == [at] and same(found, read_plainly(TEXT, ROWS))


def test_empty_and_folder(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty is empty"):
        read_source(tmp_path / "empty", "skip")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"empty\.gz is empty"):
        read_source(tmp_path / "empty.gz", "skip")
    with pytest.raises(DataError, match="not a file"):
        read_source(tmp_path, "skip")
