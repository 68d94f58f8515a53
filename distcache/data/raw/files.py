"""Input files: which there are, that they stay as they were, and their text in whole lines."""

from __future__ import annotations

import glob
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distcache.data.criteo_text import MAX_LINE, TOO_LONG
from distcache.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class InputFile:
    """A file of text as it was first seen: a later change is an error."""

    path: str
    bytes: int
    mtime_ns: int
    gzip: bool


@dataclass(frozen=True)
class Block:
    """Whole lines of text. `too_long`: indices of lines that were left empty for their length."""

    text: bytes
    too_long: tuple[int, ...] = ()

    def explain(self, line: int, error: DataError) -> DataError:
        """`error` of a line, or that the line was too long to be kept."""
        return DataError(TOO_LONG) if line in self.too_long else error


def find_files(paths: str | Path | Sequence[str | Path], key: str = "data.path") -> list[Path]:
    """The files that `paths` name, globs resolved; DataError for none, or for a folder."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        literal = Path(path)
        matches = [literal] if literal.exists() else [Path(p) for p in glob.glob(str(path))]
        if not matches:
            raise DataError(
                f"{key}={path}: there is no such file and nothing matches; give a file of "
                "Criteo lines or a quoted glob of files"
            )
        found += sorted(matches, key=_natural_order)
    folders = [path for path in found if not path.is_file()]
    if folders:
        raise DataError(
            f"{key}: {folders[0]} is not a file; for all files of a folder give a glob "
            f"such as '{folders[0]}/*.txt'"
        )
    if not found:
        raise DataError(f"{key} names no file: give a file of Criteo lines or a glob of files")
    return found


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """A sort key by which day_2 comes before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def inspect(path: Path, key: str = "data.path") -> InputFile:
    """A file's size, time and kind. Raises DataError for an empty or unreadable one."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            start = file.read(2)
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror})") from error
    if not start:
        raise DataError(f"{key}: {path} is empty")
    return InputFile(str(path), status.st_size, status.st_mtime_ns, start == _GZIP_MAGIC)


def read_text(file: InputFile, block_bytes: int) -> Iterator[Block]:
    """All text of a file, plain or gzip, in blocks of whole lines."""
    if file.gzip:
        return whole_lines(gunzip(file, block_bytes))
    return whole_lines(read_range(file, 0, file.bytes, block_bytes))


def read_range(file: InputFile, start: int, stop: int, block_bytes: int) -> Iterator[bytes]:
    """The bytes of the lines that begin in [start, stop) of a plain file, chunk by chunk.

    Raises DataError when the file is gone, or no longer what it was.
    """
    with _open(file) as stream:
        start, stop = (_line_start(stream, file, at) for at in (start, stop))
        stream.seek(start)
        while start < stop:
            chunk = stream.read(min(block_bytes, stop - start))
            if not chunk:
                raise _changed(file, os.fstat(stream.fileno()).st_size)
            start += len(chunk)
            yield chunk
        _check_unchanged(stream, file)


def _line_start(stream: BinaryIO, file: InputFile, at: int) -> int:
    """Where the first line that begins at `at` or later begins."""
    if at == 0 or at >= file.bytes:
        return min(at, file.bytes)
    stream.seek(at - 1)
    at -= 1
    while chunk := stream.read(1 << 16):
        found = chunk.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(chunk)
    return file.bytes


def gunzip(
    file: InputFile, block_bytes: int, on_read: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """The text of a gzip file in chunks; `on_read` hears of compressed bytes read so far.

    Raises DataError that names the file and the line where it breaks off.
    """
    lines = 0
    with _open(file) as stream:
        try:
            with gzip.GzipFile(fileobj=stream) as text:
                while chunk := text.read(block_bytes):
                    lines += chunk.count(b"\n")
                    yield chunk
                    if on_read is not None:
                        on_read(stream.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            _check_unchanged(stream, file)
            raise DataError(
                f"{file.path}:{lines + 1}: the gzip data is damaged or cut off here ({error}); "
                "fetch the file again"
            ) from error
        _check_unchanged(stream, file)


def whole_lines(chunks: Iterable[bytes]) -> Iterator[Block]:
    """Blocks of whole lines; of a line longer than MAX_LINE at most that much is kept meanwhile."""
    rest, skipping = b"", False
    for chunk in chunks:
        too_long: tuple[int, ...] = ()
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk, skipping, too_long = chunk[end:], False, (0,)
        text = rest + chunk
        cut = text.rfind(b"\n") + 1
        rest = text[cut:]
        if len(rest) > MAX_LINE:
            rest, skipping = b"", True
        if cut:
            yield Block(text[:cut], too_long)
    if skipping:
        yield Block(b"\n", (0,))
    elif rest:
        yield Block(rest)


def count_lines(file: InputFile, stop: int) -> int:
    """Line ends in the first `stop` bytes of a plain file."""
    lines = 0
    with _open(file) as stream:
        while stop > 0 and (chunk := stream.read(min(1 << 20, stop))):
            lines += chunk.count(b"\n")
            stop -= len(chunk)
    return lines


def _open(file: InputFile) -> BinaryIO:
    try:
        stream = open(file.path, "rb")  # noqa: SIM115 - the callers close it
    except OSError as error:
        raise DataError(
            f"{file.path} cannot be read any more ({error.strerror}): it was there at the start"
        ) from error
    try:
        _check_unchanged(stream, file)
    except DataError:
        stream.close()
        raise
    return stream


def _check_unchanged(stream: BinaryIO, file: InputFile) -> None:
    status = os.fstat(stream.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise _changed(file, status.st_size)


def _changed(file: InputFile, size: int) -> DataError:
    how = "shrank" if size < file.bytes else "changed"
    return DataError(
        f"{file.path} {how} while it was read: {file.bytes:,} bytes at the start, {size:,} now; "
        "start again when it is at rest"
    )
