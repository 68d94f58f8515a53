"""Lines of text files: read with a bound on their length, bad ones counted or refused."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from distcache.data.files import InputFile
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

LONGEST = 64 << 20
"""Bytes of the longest line that is read."""
_SHOWN = 10
"""Bad lines that a report quotes."""


class BadLines:
    """What becomes of malformed lines: an error, or a count with the first ten in the log."""

    def __init__(self, on_bad_line: str) -> None:
        if on_bad_line not in ("error", "skip"):
            raise ConfigError(f"data.on_bad_line={on_bad_line!r} is not 'error' or 'skip'")
        self.skip = on_bad_line == "skip"
        self.count = 0
        self.first: list[str] = []

    def add(self, path: Path, line: int, what: str) -> None:
        """Line `line` (from 1) of `path` is left out; DataError where that is not wanted."""
        message = f"{path}:{line}: {what}"
        if not self.skip:
            raise DataError(
                f"{message}; correct the line, or leave such lines out with data.on_bad_line=skip"
            )
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(message)

    def summary(self) -> dict[str, Any]:
        """How many lines were left out, and the first ten: `file:line: reason`."""
        return {"count": self.count, "first": list(self.first)}

    def example(self) -> str:
        """The count, and the first line with its reason, for the error of too few good ones."""
        first = f", the first {self.first[0]}" if self.first else ""
        return f"{self.count} malformed lines{first}"

    def report(self) -> None:
        """Log how many lines were left out, and the first ten."""
        if self.count:
            shown = "\n  ".join(self.first)
            logger.warning("skipped %d malformed lines; the first:\n  %s", self.count, shown)


def read_lines(file: InputFile, bad: BadLines) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end) of a file, plain or gzip; a longer line than `LONGEST`
    is bad.

    Raises DataError for a file that vanishes or changes meanwhile, and for damaged gzip data.
    """
    number = 0
    with file.open() as stream:
        text = gzip.GzipFile(fileobj=stream) if file.gzip else stream
        while line := _next_piece(text, file, stream, number):
            number += 1
            if len(line) == LONGEST and not line.endswith(b"\n"):
                while len(line) == LONGEST and not line.endswith(b"\n"):
                    line = _next_piece(text, file, stream, number)
                bad.add(file.path, number, f"the line is longer than {LONGEST >> 20} MiB")
                continue
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")
        file.check_unchanged(stream)
    if not number:
        raise DataError(f"{file.path} is empty: there is nothing in the gzip data")


def _next_piece(text: IO[bytes], file: InputFile, stream: BinaryIO, number: int) -> bytes:
    """At most `LONGEST` bytes of the next line of `text`, which reads `stream`, after `number`."""
    try:
        return text.readline(LONGEST)
    except (EOFError, zlib.error, OSError) as error:
        file.check_unchanged(stream)
        if file.gzip:
            raise file.damaged_gzip(number + 1, error) from error
        raise DataError(f"{file.path} cannot be read ({error})") from error


def show(text: bytes) -> str:
    """A piece of a line as an error prints it: quoted, at most 40 characters."""
    shown = text.decode("utf-8", errors="replace")
    return repr(shown if len(shown) <= 40 else shown[:40] + "...")
