"""The text of input files, plain or gzip, in blocks of whole lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from distcache.data.criteo_text import MAX_LINE, TOO_LONG
from distcache.data.files import InputFile
from distcache.errors import DataError


@dataclass(frozen=True)
class Block:
    """Whole lines of text. `too_long`: indices of lines that were left empty for their length."""

    text: bytes
    too_long: tuple[int, ...] = ()

    def explain(self, line: int, error: DataError) -> DataError:
        """`error` of a line, or that the line was too long to be kept."""
        return DataError(TOO_LONG) if line in self.too_long else error


def read_text(file: InputFile, block_bytes: int) -> Iterator[Block]:
    """All text of a file, plain or gzip, in blocks of whole lines."""
    if file.gzip:
        return whole_lines(gunzip(file, block_bytes))
    return whole_lines(read_range(file, 0, file.bytes, block_bytes))


def read_range(file: InputFile, start: int, stop: int, block_bytes: int) -> Iterator[bytes]:
    """The bytes of the lines that begin in [start, stop) of a plain file, chunk by chunk.

    Raises DataError when the file is gone, or no longer what it was.
    """
    with file.open() as stream:
        start, stop = (_line_start(stream, file, at) for at in (start, stop))
        stream.seek(start)
        while start < stop:
            try:
                chunk = stream.read(min(block_bytes, stop - start))
            except OSError as error:
                raise DataError(f"{file.path} cannot be read ({error.strerror})") from error
            if not chunk:
                break  # shorter than it was
            start += len(chunk)
            yield chunk
        file.check_unchanged(stream)


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

    Raises DataError that names the file and the line where it breaks off, also for no text at all.
    """
    lines, read = 0, 0
    with file.open() as stream:
        try:
            with gzip.GzipFile(fileobj=stream) as text:
                while chunk := text.read(block_bytes):
                    lines, read = lines + chunk.count(b"\n"), read + len(chunk)
                    yield chunk
                    if on_read is not None:
                        on_read(stream.tell())
        except (EOFError, zlib.error, OSError) as error:
            file.check_unchanged(stream)
            raise file.damaged_gzip(lines + 1, error) from error
        file.check_unchanged(stream)
    if not read:
        raise DataError(f"{file.path} is empty: there is nothing in the gzip data")


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
