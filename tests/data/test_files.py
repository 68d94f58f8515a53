"""Text of files in whole lines: cut anywhere, lines of any length, files that change."""

from __future__ import annotations

import gzip
import os
from itertools import pairwise
from pathlib import Path

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.data.criteo_text import MAX_LINE, TOO_LONG
from distcache.data.files import inspect
from distcache.data.raw.text import Spool, gunzip, read_range, read_text, whole_lines
from distcache.errors import DataError


def text_of(path: Path, start: int, stop: int, block: int) -> bytes:
    return b"".join(read_range(inspect(path), start, stop, block))


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
    cuts = [*range(0, len(text), size), len(text)]
    parts = [text_of(path, a, b, block) for a, b in pairwise(cuts)]
    assert b"".join(parts) == text
    assert all(part.endswith(b"\n") for part in [part for part in parts if part][:-1])
    blocks = list(whole_lines(read_range(inspect(path), 0, len(text), block)))
    assert b"".join(piece.text for piece in blocks) == text
    assert all(piece.text.endswith(b"\n") for piece in blocks[:-1])


@pytest.mark.parametrize("block", [1 << 16, 1 << 20, 8 << 20])
@pytest.mark.parametrize("last", [b"", b"\n", b"\nb\n"])
def test_a_line_of_ten_megabytes_is_not_kept(tmp_path, block, last):
    path = tmp_path / "long.txt"
    path.write_bytes(b"a\n" + b"x" * 10_000_000 + last)
    seen, long_lines, number = [], [], 0
    for piece in read_text(inspect(path), block):
        assert len(piece.text) <= MAX_LINE + 2 * block
        lines = piece.text.removesuffix(b"\n").split(b"\n")
        long_lines += [number + at for at in piece.too_long]
        long_lines += [number + at for at, line in enumerate(lines) if len(line) > MAX_LINE]
        number += len(lines)
        seen += [line for line in lines if len(line) < 10]
        assert (
            str(piece.explain(piece.too_long[0], DataError("x"))) == TOO_LONG
            if (piece.too_long)
            else str(piece.explain(0, DataError("x"))) == "x"
        )
    assert long_lines == [1] and number == (3 if last == b"\nb\n" else 2)
    assert [line for line in seen if line] == ([b"a", b"b"] if number == 3 else [b"a"])


def test_missing_empty_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a folder, not a file"):
        inspect(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(DataError, match="is not a file but a pipe or device"):
        inspect(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty is empty"):
        inspect(tmp_path / "empty")


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_vanishes_shrinks_or_changes(tmp_path, packed):
    def fresh() -> tuple[Path, object]:
        path = tmp_path / "a.txt"
        body = os.urandom(300_000).hex().encode()
        path.write_bytes(gzip.compress(body) if packed else body)
        return path, read_text(file := inspect(path), 1000) if packed else read_range(
            (file := inspect(path)), 0, file.bytes, 1000
        )

    path, chunks = fresh()
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read any more"):
        list(chunks)
    path, chunks = fresh()
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"a\.txt shrank while it was read"):
        list(chunks)
    path, _ = fresh()
    file = inspect(path)
    chunks = iter(gunzip(file, 1000) if packed else read_range(file, 0, file.bytes, 1000))
    next(chunks)
    os.truncate(path, 200_000)
    with pytest.raises(DataError, match=r"a\.txt shrank while it was read"):
        list(chunks)
    path, _ = fresh()
    file = inspect(path)
    chunks = iter(gunzip(file, 1000) if packed else read_range(file, 0, file.bytes, 1000))
    next(chunks)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.txt changed while it was read"):
        list(chunks)


def test_truncated_gzip_names_the_line(tmp_path):
    path = tmp_path / "a.gz"
    packed = gzip.compress(b"".join(os.urandom(20).hex().encode() + b"\n" for _ in range(5000)))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        DataError, match=r"a\.gz: the gzip data is damaged or cut off at line \d+ or after"
    ):
        list(read_text(inspect(path), 1000))


@pytest.mark.parametrize("size", [1, 50, 333, 100_000])
def test_spooled_pieces_are_whole_lines_cut_the_same_again(tmp_path, size):
    lines = [os.urandom(9).hex().encode()[: i % 18] for i in range(60)]
    files = []
    for number in range(3):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(gzip.compress(b"\n".join(lines[number:]) + b"\n"))
        files.append((number, inspect(path)))
    first = pieces(tmp_path / "spool", size, files, set())
    for number in range(3):
        text = b"".join(body for (at, _), body in sorted(first.items()) if at == number)
        assert text == b"\n".join(lines[number:]) + b"\n"
    assert all(body.endswith(b"\n") for body in first.values())
    some = set(list(first)[::2])
    again = pieces(tmp_path / "spool", size, files, some)
    assert again == {key: body for key, body in first.items() if key not in some}
    assert not list((tmp_path / "spool").glob("*.txt"))


def pieces(folder: Path, size: int, files: list, done: set) -> dict[tuple[int, int], bytes]:
    spool = Spool(folder, size, ahead=3)
    found = {}
    for number, index, piece, _ in spool.pieces(files, lambda *key: key in done, threads=2):
        found[number, index] = Path(piece.path).read_bytes()
        spool.finished(piece)
    for number, _ in files:
        known = {index for at, index in found.keys() | done if at == number}
        assert spool.known_pieces(number) == len(known)
    return found
