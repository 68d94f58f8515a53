"""Text of files in whole lines: cut anywhere, lines of any length, files that change."""

from __future__ import annotations

import gzip
import os
from itertools import pairwise

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data.files import find_files, inspect, read_range, read_text, unpack, whole_lines
from distcache.errors import DataError


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=9),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 20),
)
@examples(150)
def test_ranges_cover_every_line_once(tmp_path_factory, lines, end, block, size):
    text = b"\n".join(lines) + (b"\n" if end else b"")
    if not text:
        return
    path = tmp_path_factory.mktemp("ranges") / "a.txt"
    path.write_bytes(text)
    file, cuts = inspect(path), [*range(0, len(text), size), len(text)]
    parts = [b"".join(read_range(file, block, a, b)) for a, b in pairwise(cuts)]
    blocks = list(whole_lines(read_range(file, block), 100))
    for pieces in (parts, blocks):
        assert b"".join(pieces) == text
        assert all(piece.endswith(b"\n") for piece in [p for p in pieces if p][:-1])


@pytest.mark.parametrize("block", [1 << 16, 1 << 20, 8 << 20])
@pytest.mark.parametrize("last", [b"", b"\n", b"\nb\n"])
def test_of_a_long_line_only_a_little_more_than_allowed_is_kept(tmp_path, block, last):
    path, longest = tmp_path / "long.txt", 1 << 20
    path.write_bytes(b"a\n" + b"x" * 10_000_000 + last)
    blocks = list(read_text(inspect(path), block, longest))
    assert max(map(len, blocks)) <= longest + 2 * block
    lines = b"".join(blocks).split(b"\n")
    assert [lines[0], *lines[2:]] == (
        [b"a", b"b", b""] if b"b" in last else [b"a"] + [b""] * len(last)
    )
    assert len(lines[1]) > longest


def test_what_is_no_file_with_something_in_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    (tmp_path / "empty").touch()
    for name, message in (
        ("nowhere", "there is no such file and nothing matches"),
        ("*.txt", "there is no such file and nothing matches"),
        ("", "is a folder, not a file; for all of its files give a glob"),
        ("pipe", "is not a file but a pipe or device"),
        ("empty", "empty is empty"),
    ):
        with pytest.raises(DataError, match=f"data.path.*{message}"):
            find_files("data.path", str(tmp_path / name), "text")
    with pytest.raises(DataError, match="names no file"):
        find_files("data.path", [], "text")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"empty\.gz is empty: there is nothing in the gzip data"):
        list(read_text(inspect(tmp_path / "empty.gz"), 10, 10))


def test_the_matches_of_a_glob_are_in_natural_order(tmp_path):
    for name in ("day_10", "day_2", "day_1"):
        (tmp_path / name).write_text("x")
    found = find_files("data.path", [str(tmp_path / "day_*"), tmp_path / "day_2"], "days")
    assert [file.path.name for file in found] == ["day_1", "day_2", "day_10", "day_2"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_vanishes_shrinks_or_changes(tmp_path, packed):
    path = tmp_path / "a.txt"
    body = os.urandom(300_000).hex().encode()
    for change, message, begun in (
        (path.unlink, "cannot be read any more", False),
        (lambda: os.truncate(path, 100), "shrank while it was read", False),
        (lambda: os.truncate(path, 200_000), "shrank while it was read", True),
        (lambda: os.utime(path, ns=(1, 1)), "changed while it was read", True),
    ):
        path.write_bytes(gzip.compress(body) if packed else body)
        blocks = read_text(inspect(path), 1000, 100)
        if begun:
            body = body[:5000] + b"\n" + body[5001:]  # so that there is a first block
            path.write_bytes(gzip.compress(body) if packed else body)
            blocks = read_text(inspect(path), 1000, 100)
            next(blocks)
        change()
        with pytest.raises(DataError, match=rf"a\.txt {message}"):
            list(blocks)


@pytest.mark.parametrize("size", [1, 50, 333, 100_000])
def test_unpacked_pieces_are_whole_lines_cut_the_same_again(tmp_path, size):
    lines = [os.urandom(9).hex().encode()[: i % 18] for i in range(60)]
    text = b"\n".join(lines) + b"\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))

    def pieces(done: set[int]) -> dict[int, bytes]:
        found, read = {}, 0
        file = inspect(tmp_path / "a.gz")
        unpacked = unpack(file, tmp_path / "a", size, 100, done.__contains__)
        for number, (piece, packed) in enumerate(unpacked):
            assert (piece is None) == (number in done)
            if piece is not None:
                found[number] = piece.path.read_bytes()
                piece.path.unlink()
            read += packed
        assert read == file.bytes and not list(tmp_path.glob("a.[0-9]*"))
        return found

    first = pieces(set())
    assert b"".join(first.values()) == text
    assert all(body.endswith(b"\n") for body in first.values())
    some = set(list(first)[::2])
    assert pieces(some) == {key: body for key, body in first.items() if key not in some}
