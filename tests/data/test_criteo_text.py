"""Criteo text: blocks are read as line by line, and everything that can be wrong with a line."""

from __future__ import annotations

import gzip
import logging
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import (
    ROWS,
    counted_lines,
    make_lines,
    parsed,
    read_plainly,
    with_fields,
    write_lines,
)
from damaged import damage

from distcache.data import criteo
from distcache.data.criteo import CriteoSource, CriteoSpec
from distcache.data.raw import parts
from distcache.data.raw.parts import parse_blocks
from distcache.errors import DataError

LINES = make_lines(14, seed=5)
TEXT = b"\n".join(LINES) + b"\n"
THOUSANDS = range(0, 20_000, 1000)
LARGE = (*ROWS[:3], 2**33, *ROWS[4:])


@pytest.fixture(autouse=True)
def odd_lines_are_searched_for(monkeypatch):
    """Blocks of these few lines are halved too."""
    monkeypatch.setattr(parts, "_FEW", 2)


def source(path, on_bad_line: str = "error", rows=ROWS, **spec) -> CriteoSource:
    return CriteoSource(CriteoSpec(path, rows, on_bad_line=on_bad_line, **spec))


def same(found, expected) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected[:3], strict=True))


def check_block(text: bytes) -> list[int]:
    """The rows of a block in every form of ids are those of its lines; the bad lines."""
    for rows in (ROWS, LARGE, None):
        found, bad = [], []
        for part, _ in parse_blocks([text], rows, lambda line, error, bad=bad: bad.append(line)):
            found.append((part.labels, part.dense, part.ids))
            assert (part.missing is None) == (rows is not None)
        expected = read_plainly(text, rows)
        assert [line + 1 for line in bad] == expected[3]
        assert same([np.concatenate(kind) for kind in zip(*found, strict=True)], expected)
    return expected[3]


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_ordinary_lines_take_the_fast_way(missing, end):
    lines = make_lines(300, missing=missing)
    for block in (end.join(lines), end.join(lines) + end):
        assert check_block(block) == []
        assert parts._parse_columns(block, ROWS) is not None
        found = parts._parse_columns(block, None)
        empty = [[field == b"" for field in line.split(b"\t")[14:]] for line in lines]
        assert found is not None
        assert (found.missing[:, None] >> np.arange(26) & 1).tolist() == empty


GOOD = [(5, value) for value in (b"-0", b"-12", b"0012", b"9" * 18, b"-" + b"9" * 18)]
GOOD += [(5, b"0" * zeros + b"1") for zeros in (17, 18, 30, 5000)]
GOOD += [(20, value) for value in (b"a", b"ABCDEF01", b"0000000001", b"123456789abcdef0", b"0")]
BAD = [(0, value) for value in (b"", b"2", b"01", b"00", b"-1", b"a", b"1\r")]
BAD += [(5, value) for value in (b"1" * 19, b"+1", b" 1", b"0x1", b"1e3", b"--1", b"-", b"1.0")]
BAD += [(5, value) for value in (b"a", b"1\r", b'"1"', b"\x00", b"\xff", b"9" * 30, b"1-")]
BAD += [(20, value) for value in (b"-1", b"x", b"0x1f", b" a", b"a\rb", b"\r", b"\x00", b"\xc3")]
BAD += [(39, value) for value in (b"a\tb", b"\t", b"a\r\r", b"-")]


@pytest.mark.parametrize(("field", "value"), GOOD + BAD)
def test_odd_fields(field, value):
    lines = make_lines(3)
    block = b"\n".join([lines[0], with_fields(lines[1], {field: value}), lines[2]]) + b"\n"
    assert check_block(block) == ([2] if (field, value) in BAD else [])


def test_long_ids_are_rows_and_no_values():
    lines = make_lines(3)
    block = b"\n".join([lines[0], with_fields(lines[1], {20: b"1" * 17}), lines[2]]) + b"\n"
    assert read_plainly(block, ROWS)[2][1, 6] == int("1" * 17, 16) % ROWS[6]
    errors = []
    list(parse_blocks([block], None, lambda line, error: errors.append((line, str(error)))))
    assert [line for line, _ in errors] == [1] and check_block(block) == [2]
    assert "field 21" in errors[0][1] and "16 digits" in errors[0][1]


BAD_LINES = {
    "missing field": ({}, b"\t".join(LINES[0].split(b"\t")[:-1]), "39 tab-separated fields inste"),
    "extra field": ({39: b"a\t"}, None, "41 tab-separated fields"),
    "empty line": ({}, b"", "1 tab-separated fields"),
    "label 2": ({0: b"2"}, None, r"field 1 \(label\) is '2', not 0 or 1"),
    "label empty": ({0: b""}, None, r"field 1 \(label\) is ''"),
    "integer": ({2: b"1.5"}, None, r"field 3 \(integer 2\) is '1\.5'"),
    "minus within": ({1: b"1-2"}, None, r"field 2 \(integer 1\) is '1-2'"),
    "long integer": ({1: b"1" * 19}, None, "at most 18 digits"),
    "not hex": ({15: b"xyz"}, None, r"field 16 \(id 2, feature cat_1\) is 'xyz', not hexadec"),
    "0x": ({39: b"0x1f"}, None, r"field 40 \(id 26, feature cat_25\) is '0x1f'"),
}


@pytest.mark.parametrize(("changes", "line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_malformed_line_is_named_or_skipped(tmp_path, caplog, changes, line, message):
    good = make_lines(20)
    bad = with_fields(good[3], changes) if line is None else line
    path = write_lines(tmp_path / "a.txt", [*good[:11], bad, *good[11:]])
    with pytest.raises(DataError, match=message) as error:
        source(path)
    assert f"{path}:12: " in str(error.value) and "data.on_bad_line=skip" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="distcache"):
        stream = source(path, "skip")
    assert stream.bad_lines.count == 1
    assert "skipped 1 malformed lines" in caplog.text and f"{path}:12" in caplog.text
    assert stream.identity == source(write_lines(tmp_path / "b.txt", good)).identity


def test_blocks_of_a_file_join(tmp_path, monkeypatch):
    text, path = counted_lines(50), tmp_path / "a.txt"
    path.write_bytes(b"\n".join(text))  # no line end at the end
    whole = source(path)
    for size in (1, 100, 1000, 4096):
        monkeypatch.setattr(criteo, "_BLOCK_BYTES", size)
        assert source(path).identity == whole.identity
    path.write_bytes(b"\n".join([*text[:30], b"broken", *text[30:]]))
    with pytest.raises(DataError, match=r"a\.txt:31: "):
        source(path)


def test_values_of_fields(tmp_path):
    integers = [b"", b"-3", b"0", b"7", b"-0", b"9" * 18]
    ids = [b"", b"0", b"FFFFFFFF", b"ffffffff", b"0" * 26 + b"ff", b"1" * 20]
    changes = dict(enumerate(integers, 1)) | dict(enumerate(ids, 14)) | {0: b"1"}
    others = [with_fields(line, {0: b"0"}) for line in make_lines(6)]
    path = write_lines(tmp_path / "a.txt", [with_fields(LINES[0], changes), *others])
    large = (*ROWS[:2], 2**32, *ROWS[3:])
    batch = source(path, rows=large, global_batch_size=6, shuffle=False).train_batch(0, 0, 1)
    logs = [0.0, 0.0, 0.0, math.log(8), 0.0, math.log1p(10**18 - 1)]
    assert batch.loaded().dense[0, :6].tolist() == np.float32(logs).tolist()
    expected = [0, 0, 0xFFFFFFFF, 0xFFFFFFFF % ROWS[3], 255 % ROWS[4], int("1" * 20, 16) % ROWS[5]]
    assert batch.ids.values.reshape(26, 6)[:6, 0].tolist() == expected


def read_source(path: Path, on_bad_line: str):
    stream = source(path, on_bad_line)
    return [stream._labels, stream._dense, stream._ids], stream.bad_lines.count


def read_part(path: Path, rows) -> tuple[list[np.ndarray], list[int]]:
    """The arrays of the whole (plain) file as a part, and the numbers of its malformed lines."""
    report, found = parsed(path, rows)
    return [found.labels, found.dense, found.ids], [1 + line for line, _ in report.bad]


def check_plain(path: Path, text: bytes) -> None:
    """Both readers, in both ways with malformed lines, against line by line."""
    path.write_bytes(text)
    if text.startswith(b"\x1f\x8b"):
        return
    for rows in (ROWS, None):
        expected = read_plainly(text, rows)
        found, numbers = read_part(path, rows)
        assert same(found, expected) and numbers == expected[3][:10]
    expected = read_plainly(text, ROWS)
    if len(expected[0]) < 2:
        with pytest.raises(DataError, match=re.escape(str(path))):
            read_source(path, "skip")
        return
    found, skipped = read_source(path, "skip")
    assert same(found, expected) and skipped == len(expected[3])
    if expected[3]:
        with pytest.raises(DataError, match=re.escape(f"{path}:{expected[3][0]}: ")):
            read_source(path, "error")


def check_packed(path: Path, text: bytes) -> None:
    """A damaged gzip file is an error at a line, unless what was changed says nothing."""
    path.write_bytes(text)
    for on_bad_line in ("error", "skip"):
        try:
            found, _ = read_source(path, on_bad_line)
        except DataError as error:
            where = r"(:.* line \d+ |:\d+: | \(skipped: | is empty)"
            assert re.search(re.escape(str(path)) + where, str(error)), str(error)
        else:
            assert same(found, read_plainly(TEXT, ROWS))


@pytest.mark.parametrize(
    "seeds",
    [range(300), *(pytest.param(range(n, n + 1000), marks=pytest.mark.slow) for n in THOUSANDS)],
    ids=str,
)
def test_damaged_files(tmp_path, seeds):
    packed = gzip.compress(TEXT, mtime=0)
    for seed in seeds:
        dice = random.Random(seed)
        try:
            if seed % 5 == 4:
                check_packed(tmp_path / "a.gz", damage(packed, dice))
            else:
                check_plain(tmp_path / "a.txt", damage(TEXT, dice))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("filler", [b"a", b"0", b"\t", b"-", b"\x00"])
def test_a_line_of_ten_megabytes(tmp_path, filler):
    long_field = LINES[0] + filler * 10_000_000
    for text in ([*LINES[:5], long_field, *LINES[5:]], [*LINES, long_field]):
        path, at = write_lines(tmp_path / "a.txt", text), text.index(long_field) + 1
        with pytest.raises(DataError, match=f"a.txt:{at}: the line is longer than 1,048,576"):
            read_source(path, "error")
        found, skipped = read_source(path, "skip")
        assert skipped == 1 and same(found, read_plainly(TEXT, ROWS))
        found, numbers = read_part(path, ROWS)
        assert numbers == [at] and same(found, read_plainly(TEXT, ROWS))
