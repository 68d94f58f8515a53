"""Users and items: lines and files that are odd, packed or damaged."""

from __future__ import annotations

import gzip
import logging

import numpy as np
import pytest
from interaction_files import CSV, HEADER, LINES, samples, source, write

from distcache.data.interactions import _fast_block, csv_numbers
from distcache.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_fast_way_is_the_definition():
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.integers(0, 10**9)},{rng.integers(0, 10**6)},{rng.integers(0, 11) / 2},"
        f"{rng.integers(0, 2**40)}"
        for _ in range(500)
    ]
    block = ("\n".join(rows) + "\n").encode()
    found = _fast_block(block, b",", 4)
    assert found is not None
    assert found.tolist() == [list(csv_numbers(row.encode(), b",", 4)) for row in rows]
    for odd in (
        "1,2,,3",
        "1,2,nan,3",
        "1,2,1e3,3",
        "-1,2,3,4",
        "1,2,3",
        "",
        '"1",2,3,4',
        "1.5,2,3,4",
    ):
        assert _fast_block(block + odd.encode() + b"\n", b",", 4) is None, odd


BAD_LINES = {
    "word": ("7 x3 4", "item 'x3' is not a whole number"),
    "negative": ("-7 3", "user '-7' is not a whole number"),
    "fraction": ("7 3.5", "item '3.5' is not a whole number"),
    "no items": ("7 ", "user '7' has no items"),
    "empty": ("", "the line is empty"),
    "nul": ("7 3\0 4", r"item '3\\x00' is not"),
    "too long": ("7 " + "1" * 19, "is not a whole number from 0 to"),
    "underscore": ("7 1_0", "item '1_0'"),
}
BAD_CSV = {
    "word": ("7,x,1,1", "item 'x' is not a whole number"),
    "negative": ("7,-1,1,1", "item '-1' is not a whole number"),
    "nan": ("7,1,nan,1", "rating 'nan' is not a finite number"),
    "no rating": ("7,1,,1", "rating '' is not a finite number"),
    "time": ("7,1,1,yesterday", "time 'yesterday' is not a finite number"),
    "fields": ("7,1,1", r"3 fields instead of 4 \(user, item, rating, time\)"),
    "header": (HEADER, "the header stands here again"),
    "empty": ("", "1 fields instead of 4"),
}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [(LINES, *case) for case in BAD_LINES.values()]
    + [([HEADER, *CSV], *case) for case in BAD_CSV.values()],
    ids=[*BAD_LINES, *(f"csv {name}" for name in BAD_CSV)],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path, caplog, good, bad, message):
    name = "a.csv" if good[0] == HEADER else "a.txt"
    path = write(tmp_path / name, [*good[:3], bad, *good[3:]])
    with pytest.raises(DataError, match=message) as error:
        source(path)
    assert f"{path}:4: " in str(error.value) and "data.on_bad_line=skip" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="distcache"):
        stream = source(path, on_bad_line="skip")
    assert stream.bad_lines.count == 1
    assert "skipped 1 malformed lines" in caplog.text and f"{path}:4: " in caplog.text
    (tmp_path / "clean").mkdir()
    assert samples(stream) == samples(source(write(tmp_path / "clean" / name, good)))


def test_the_report_quotes_the_first_ten(tmp_path):
    stream = source(write(tmp_path / "a.txt", [*LINES, *["bad"] * 30]), on_bad_line="skip")
    assert stream.bad_lines.count == 30 and len(stream.bad_lines.first) == 10
    assert stream.bad_lines.first[0].startswith(f"{tmp_path}/a.txt:6: ")


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("distcache.data.files.LONGEST", 1 << 20)
    path = write(tmp_path / "a.txt", [*LINES, "9 " + "1 " * (1 << 20), "5 1 2"])
    with pytest.raises(DataError, match=r"a\.txt:6: the line is longer than 1 MiB"):
        source(path)
    stream = source(path, on_bad_line="skip")
    assert stream.bad_lines.count == 1 and stream.table_rows == (6, 8)


def test_gzip_is_read_by_its_content(tmp_path):
    """Told by its first bytes; the name without .gz says whether it is CSV."""
    for name, content in (("a.txt", LINES), ("a.csv", [HEADER, *CSV])):
        plain = write(tmp_path / name, content)
        for packed in (tmp_path / f"{name}.gz", tmp_path / "b" / name):
            packed.parent.mkdir(exist_ok=True)
            packed.write_bytes(gzip.compress(plain.read_bytes()))
            stream = source(packed)
            assert stream.identity == source(plain).identity
            assert samples(stream) == samples(source(plain))
    worse = write(tmp_path / "worse.txt", [*LINES, "bad", *LINES])
    packed = tmp_path / "worse.gz"
    packed.write_bytes(gzip.compress(worse.read_bytes()))
    with pytest.raises(DataError, match=r"worse\.gz:6: user 'bad' is not a whole"):
        source(packed)
    assert source(packed, on_bad_line="skip").bad_lines.count == 1


def test_damaged_gzip_is_never_skipped(tmp_path):
    whole = gzip.compress("".join(f"{n} {n * n}\n" for n in range(20_000)).encode())
    path = tmp_path / "a.txt.gz"
    crc = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]
    flipped = whole[:30_000] + bytes(64) + whole[30_064:]
    for damaged in (whole[:-2000], whole[:5], crc, flipped):
        path.write_bytes(damaged)
        # What is unpacked of flipped bytes may be a bad line before it breaks off.
        for how in ("skip",) if damaged is flipped else ("error", "skip"):
            with pytest.raises(
                DataError, match=r"the gzip data is damaged or cut off at line \d+ or"
            ):
                source(path, on_bad_line=how)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"a\.txt\.gz is empty: there is nothing in the gzip"):
        source(path)


def test_lines_that_look_like_csv_are_told_apart(tmp_path):
    for line, hint in (
        ("1::1193::5::978300760", r"'1::1193.* for CSV give data\.format=csv data\.delimiter='::'"),
        ("1,1193,5", r"data\.format=csv; correct the line"),
        ("1;1193", r"data\.delimiter=';'"),
        ("a b", r"10\^18 - 1; correct the line"),
    ):
        path = write(tmp_path / "ratings.dat", [line])
        with pytest.raises(DataError, match=hint):
            source(path)
    write(path, ["1::1193::5", "2::5::5"])
    with pytest.raises(DataError, match=r"2 malformed lines, the first .*dat:1: user .*format=csv"):
        source(path, on_bad_line="skip")
    write(path, ["1::3::5", "1::4::5", "2::5::5"])
    assert source(path, format="csv", delimiter="::").table_rows == (3, 6)


def test_files(tmp_path):
    with pytest.raises(DataError, match="no such file and nothing matches"):
        source(tmp_path / "none.txt")
    with pytest.raises(DataError, match="is a folder"):
        source(tmp_path)
    with pytest.raises(DataError, match=r"a\.txt is empty"):
        source(write(tmp_path / "a.txt", [], end=""))
    with pytest.raises(DataError, match="no interaction that could be used"):
        source(write(tmp_path / "a.csv", [HEADER]))
    with pytest.raises(DataError, match="no interaction that could be used"):
        source(write(tmp_path / "b.csv", CSV), min_rating=9)
    with pytest.raises(DataError, match="5 fields separated by"):
        source(write(tmp_path / "c.csv", ["1,2,3,4,5"]))
    for part in (2, 10):
        write(tmp_path / f"part-{part}.txt", [f"{part} 1 2 3"])
    both = source(str(tmp_path / "part-*.txt"))
    assert [s[0] for s in samples(both, "eval") if s[2]] == [2, 10]
