"""Criteo lines: blocks are parsed as line by line, and everything that can be wrong with a line."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from criteo_files import ROWS, line, lines, source, write
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data import criteo
from distcache.data.criteo_text import parse_block, parse_line
from distcache.errors import DataError


def plain(text: bytes, rows=ROWS):
    """The definition: every line by itself, good ones and the numbers of the bad."""
    good, bad = [], []
    parts = text.split(b"\n")
    for number, part in enumerate(parts[:-1] if parts[-1] == b"" else parts):
        try:
            good.append(parse_line(part, rows))
        except DataError:
            bad.append(number)
    return good, bad


def same_as_plain(text: bytes) -> None:
    bad = []
    rows, count = parse_block(text, ROWS, lambda number, error: bad.append(number))
    good, expected_bad = plain(text)
    assert bad == expected_bad and count == len(good) + len(bad)
    assert rows.labels.tolist() == [row[0] for row in good]
    assert rows.integers.tolist() == [row[1] for row in good]
    assert rows.ids.tolist() == [row[2] for row in good]


def test_real_sample_parses_as_line_by_line(shared_data):
    text = (shared_data / "criteo_kaggle_sample.txt").read_bytes()
    same_as_plain(text)
    assert len(plain(text)[0]) == 1999


BAD_LINES = {
    "missing field": ("\t".join(line().split("\t")[:-1]), "39 tab-separated fields instead of 40"),
    "extra field": (line() + "\t", "41 tab-separated fields"),
    "extra field first": ("0\t" + line(), "41 tab-separated fields"),
    "empty line": ("", "1 tab-separated fields"),
    "label 2": (line("2"), r"field 1 \(label\) is '2', not 0 or 1"),
    "label empty": (line(""), r"field 1 \(label\) is ''"),
    "label 01": (line("01"), r"field 1 \(label\) is '01'"),
    "integer": (line(integers=["1", "1.5", *["3"] * 11]), r"field 3 \(integer 2\) is '1\.5'"),
    "minus": (line(integers=["1", "-", *["3"] * 11]), r"field 3 \(integer 2\) is '-'"),
    "minus within": (line(integers=["1-2", *["3"] * 12]), r"field 2 \(integer 1\) is '1-2'"),
    "two minus": (line(integers=["--2", *["3"] * 12]), r"field 2 \(integer 1\) is '--2'"),
    "long integer": (line(integers=["1" * 19, *["3"] * 12]), "at most 18 digits"),
    "space": (line(integers=[" 1", *["3"] * 12]), r"field 2 \(integer 1\) is ' 1'"),
    "not hex": (
        line(ids=["a", "xyz", *["3"] * 24]),
        r"field 16 \(id 2, feature cat_1\) is 'xyz', not hexadecimal",
    ),
    "0x": (line(ids=[*["3"] * 25, "0x1f"]), r"field 40 \(id 26, feature cat_25\) is '0x1f'"),
    "underscore": (line(ids=["1_0", *["3"] * 25]), "'1_0'"),
    "return": (line(ids=["1\r", *["3"] * 25]), r"field 15"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_malformed_line_is_named_or_skipped(tmp_path, caplog, bad, message):
    good = lines(20)
    path = write(tmp_path / "a.txt", [*good[:11], bad, *good[11:]])
    with pytest.raises(DataError, match=message) as error:
        source(path)
    assert f"{path}:12: " in str(error.value)
    assert "data.on_bad_line=skip" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="distcache"):
        stream = source(path, on_bad_line="skip")
    assert stream.bad_lines.count == 1
    assert "skipped 1 malformed lines" in caplog.text and f"{path}:12" in caplog.text
    clean = source(write(tmp_path / "b.txt", good))
    assert torch.equal(clean.train_batch(1, 0, 1).dense, stream.train_batch(1, 0, 1).dense)
    assert torch.equal(
        clean.train_batch(1, 0, 1).ids.values, stream.train_batch(1, 0, 1).ids.values
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 39),
            st.text("0123456789abcdefAFxg-+ _\t\r", max_size=20),
        ),
        max_size=12,
    ),
    st.booleans(),
)
@examples(150)
def test_blocks_equal_lines_on_damaged_text(changes, ends):
    text = [line(index=i).split("\t") for i in range(5)]
    for number, (field, value) in enumerate(changes):
        text[number % 5][field] = value
    block = "\n".join("\t".join(fields) for fields in text) + ("\n" if ends else "")
    same_as_plain(block.encode())


@given(st.binary(max_size=300))
@examples(100)
def test_blocks_equal_lines_on_any_bytes(text):
    if text:
        same_as_plain(text)


def test_blocks_of_a_file_join(tmp_path, monkeypatch):
    text = lines(50)
    path = tmp_path / "a.txt"
    path.write_text("\n".join(text))  # no line end at the end
    whole = source(path)
    for size in (1, 100, 1000, 4096):
        monkeypatch.setattr(criteo, "_BLOCK_BYTES", size)
        parts = source(path)
        assert np.array_equal(parts._ids, whole._ids) and len(parts._ids) == 50
    path.write_text("\n".join([*text[:30], "broken", *text[30:]]))
    with pytest.raises(DataError, match=r"a\.txt:31: "):
        source(path)
