"""Input files: which there are by name or glob, and that they stay as they were first seen."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distcache.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class InputFile:
    """A file as it was first seen: length in bytes, time of modification (ns), whether it is gzip.

    A later change is an error.
    """

    path: Path
    bytes: int
    mtime_ns: int
    gzip: bool = False

    def open(self) -> BinaryIO:
        """The file, opened for reading. Raises DataError if it has gone or is another one."""
        try:
            stream = self.path.open("rb")
        except OSError as error:
            raise self._gone(error) from error
        try:
            self.check_unchanged(stream)
        except DataError:
            stream.close()
            raise
        return stream

    def check_unchanged(self, stream: BinaryIO | None = None) -> None:
        """Raise DataError if the file (the open `stream`, or what has its name) is another one."""
        try:
            now = self.path.stat() if stream is None else os.fstat(stream.fileno())
        except OSError as error:
            raise self._gone(error) from error
        if (now.st_size, now.st_mtime_ns) != (self.bytes, self.mtime_ns):
            how = "shrank" if now.st_size < self.bytes else "changed"
            raise DataError(
                f"{self.path} {how} while it was read: {self.bytes:,} bytes at the start, "
                f"{now.st_size:,} now; start again when it is at rest, and leave it in place"
            )

    def damaged_gzip(self, line: int, error: Exception) -> DataError:
        """The error of compressed data that break off at line `line` of the text, or after it."""
        return DataError(
            f"{self.path}: the gzip data is damaged or cut off at line {line} or after it "
            f"({error}); fetch the file again"
        )

    def _gone(self, error: OSError) -> DataError:
        return DataError(
            f"{self.path} cannot be read any more ({error.strerror}): it was there at the start; "
            "leave the files in place until all is read"
        )


def find_files(key: str, paths: str | Path | Sequence[str | Path], what: str) -> list[InputFile]:
    """The files that `paths` name, in order, the matches of a glob sorted (numbers by value).

    `key`: the config key that names them; `what`: what such a file holds, for messages. Raises
    DataError for a name without a match, and for what is no file, is empty or cannot be read.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        literal = Path(path)
        matches = [literal] if literal.exists() else [Path(p) for p in glob.glob(str(path))]
        if not matches:
            raise DataError(
                f"{key}={path}: there is no such file and nothing matches (working directory "
                f"{Path.cwd()}); give {what} or a quoted glob"
            )
        found += sorted(matches, key=_natural_order)
    if not found:
        raise DataError(f"{key} names no file: give {what} or a quoted glob")
    return [inspect(path, key, what) for path in found]


def inspect(path: Path, key: str = "data.path", what: str = "a file") -> InputFile:
    """A file's size, time and kind. Raises DataError for an empty or unreadable one."""
    if path.is_dir():
        raise DataError(
            f"{key}: {path} is a folder, not a file; for all of its files give a glob such as "
            f"'{path}/*' ({what})"
        )
    # Opening a pipe would wait for its writer.
    if path.exists() and not path.is_file():
        raise DataError(
            f"{key}: {path} is not a file but a pipe or device, and files are read more than "
            f"once: give {what}"
        )
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            start = file.read(2)
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror})") from error
    if not start:
        raise DataError(f"{key}: {path} is empty")
    return InputFile(path, status.st_size, status.st_mtime_ns, start == _GZIP_MAGIC)


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """A sort key by which part-2 comes before part-10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
