"""Input files: which there are, that they stay as they were, their lines, arrays by memory map."""

from __future__ import annotations

import ctypes
import glob
import gzip
import hashlib
import json
import logging
import mmap
import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from distcache.errors import DataError

logger = logging.getLogger(__name__)

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
        self.check_unchanged()
        try:
            return self.path.open("rb")
        except OSError as error:
            raise self._gone(error) from error

    def check_unchanged(self, stream: BinaryIO | None = None) -> None:
        """Raise DataError if the file (the open `stream`, or what has its name) is another one."""
        try:
            now = self.path.stat() if stream is None else os.fstat(stream.fileno())
        except OSError as error:
            raise self._gone(error) from error
        if (now.st_size, now.st_mtime_ns) != (self.bytes, self.mtime_ns):
            how = "shrank" if now.st_size < self.bytes else "was written to"
            raise DataError(
                f"{self.path} {how} while it was read: {self.bytes:,} bytes at the start, "
                f"{now.st_size:,} now; start again when it is at rest, and leave it in place"
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


def read_text(file: InputFile, block_bytes: int, longest: int) -> Iterator[bytes]:
    """All text of a file, plain or gzip, in blocks of `whole_lines`."""
    return whole_lines(read_chunks(file, block_bytes), longest)


def read_chunks(
    file: InputFile,
    block_bytes: int,
    start: int = 0,
    stop: int | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """The text of a file in chunks; of a plain one the lines that begin in [start, stop).

    `on_read` hears of the file's bytes that are read so far, compressed ones where it is gzip.
    Raises DataError when the file is gone, or no longer what it was; for gzip data that break off,
    with the line, and for those without any text.
    """
    lines = read = 0
    with file.open() as stream:
        text: BinaryIO | gzip.GzipFile = stream
        if file.gzip:
            text, left = gzip.GzipFile(fileobj=stream), sys.maxsize
        else:
            begin = _line_start(stream, file, start)
            left = _line_start(stream, file, file.bytes if stop is None else stop) - begin
            stream.seek(begin)
        try:
            while chunk := text.read(min(block_bytes, left - read)):
                lines, read = lines + chunk.count(b"\n"), read + len(chunk)
                if on_read is not None:
                    on_read(stream.tell())
                yield chunk
        except (EOFError, zlib.error, OSError) as error:
            file.check_unchanged(stream)
            what = "the gzip data is damaged or cut off" if file.gzip else "it cannot be read"
            raise DataError(
                f"{file.path}: {what} at line {lines + 1} or after it ({error}); fetch the file "
                "again"
            ) from error
        file.check_unchanged(stream)
    if file.gzip and not read:
        raise DataError(f"{file.path} is empty: there is nothing in the gzip data")


def _line_start(stream: BinaryIO, file: InputFile, at: int) -> int:
    """Where the first line that begins at `at` or later begins."""
    if at == 0 or at >= file.bytes:
        return min(at, file.bytes)
    stream.seek(at - 1)
    while (piece := stream.readline(1 << 16)) and not piece.endswith(b"\n"):
        pass
    return min(stream.tell(), file.bytes)


def whole_lines(chunks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Blocks of whole lines; a line of which more than `longest` bytes cross a chunk's end is cut
    to one byte more than that, so that who reads it sees that it is too long."""
    rest = b""
    for chunk in chunks:
        if len(rest) > longest:  # nothing more of this line is kept
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk = chunk[end:]
        text = rest + chunk
        cut = text.rfind(b"\n") + 1
        rest = text[cut:][: longest + 1]
        if cut:
            yield text[:cut]
    if rest:
        yield rest


T = TypeVar("T")


def good_lines(
    text: bytes,
    first: int,
    parse: Callable[[bytes], T],
    on_error: Callable[[int, DataError], None],
) -> Iterator[T]:
    """What `parse` makes of each line of `text`; `on_error` hears of those that it refuses.

    `first`: number of the first line.
    """
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    for number, line in enumerate(lines, start=first):
        try:
            found = parse(line)
        except DataError as error:
            on_error(number, error)
        else:
            yield found


SHOWN = 10
"""Bad lines that a report quotes."""


class BadLines:
    """What becomes of malformed lines: an error, or a count with the first ten in the log."""

    def __init__(self, on_bad_line: str, key: str = "data.on_bad_line") -> None:
        self.skip, self._key = on_bad_line == "skip", key
        self.count = 0
        self.first: list[str] = []

    def add(self, path: Path, line: int, why: DataError | str) -> None:
        """Line `line` (from 1) of `path` is left out; DataError where that is not wanted."""
        message = f"{path}:{line}: {why}"
        if not self.skip:
            raise DataError(
                f"{message}; correct the line, or leave such lines out with {self._key}=skip"
            )
        self.count += 1
        if len(self.first) < SHOWN:
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


def show(text: bytes) -> str:
    """A piece of a line as an error prints it: quoted, at most 40 characters."""
    shown = text.decode("utf-8", errors="replace")
    return repr(shown if len(shown) <= 40 else shown[:40] + "...")


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that `path` holds either the old text or the whole new one.

    ValueError for NaN and infinities.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def digest_of(*arrays: np.ndarray) -> str:
    """A digest of arrays in memory (C order): their dtypes, shapes and values."""
    digest = hashlib.blake2b(digest_size=32)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


_CHUNK = 1 << 20


def unpack(
    file: InputFile, paths: Iterable[Path], part_bytes: int, longest: int
) -> Iterator[tuple[Path, int]]:
    """Unpack a gzip file into `paths`: pieces of whole lines of about `part_bytes`, cut at the same
    places in every run, each when it is asked for; its path, and its compressed bytes.

    Lines are cut as by `whole_lines`. Raises DataError for a damaged file, after earlier pieces.
    """
    read, told = [0], 0
    chunks = read_chunks(file, min(_CHUNK, part_bytes), on_read=read.append)
    blocks = whole_lines(chunks, longest)
    for path in paths:
        size = 0
        with path.open("wb") as to:
            for block in blocks:
                size += to.write(block)
                if size >= part_bytes:
                    break
        if not size:
            path.unlink()
            return
        yield path, read[-1] - told
        told = read[-1]


# The kernel kills a process that touches a mapped page beyond the end of its file (SIGBUS), and no
# check beforehand helps against a file that is cut between check and read. A system call that reads
# such a page fails instead. So the rows are gathered by `pwritev(2)`, from the map into anonymous
# memory (`memfd_create(2)`), a thousand at a time.
_PIECES = 1024
"""Pieces of memory that one call takes (Linux's UIO_MAXIOV)."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_LIBC.pwritev.restype = ctypes.c_ssize_t
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedRows:
    """The rows of `array`, a memory map (C order, at least 1-D) of the file at `path`.

    Only the pages of the rows that are taken are read. May be used by several threads.
    """

    def __init__(self, path: Path, array: np.ndarray) -> None:
        self._file: InputFile = inspect(path)
        self._values = array.view(np.ndarray)  # keeps the map open
        self._row_bytes = self._values[:1].nbytes
        self._address = self._values.ctypes.data
        self._memory = os.memfd_create("distcache-rows", os.MFD_CLOEXEC)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None:
            os.close(memory)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows `rows` int64 `[b]`, copied. Raises DataError where the file is not what it was."""
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self._values):
            raise IndexError(f"{self._file.path}: rows {rows.min()} to {rows.max()}")
        self._file.check_unchanged()
        result = np.empty((len(rows), *self._values.shape[1:]), self._values.dtype)
        with self._lock:
            whole = self._gather(rows)
            bytes_read = os.preadv(self._memory, [result.reshape(-1).view(np.uint8)], 0)
        if not whole or bytes_read != result.nbytes:
            self._file.check_unchanged()
            raise DataError(f"{self._file.path} cannot be read: the disk or its network failed")
        return result

    def advise(self, start: int, stop: int, advice: int) -> None:
        """A hint (`mmap.MADV_...`) about the pages of rows [start, stop), without waiting; that it
        is not taken changes nothing."""
        low, high = (self._address + row * self._row_bytes for row in (start, stop))
        low -= low % mmap.PAGESIZE
        _LIBC.madvise(low, high - low, advice)

    def _gather(self, rows: np.ndarray) -> bool:
        """Bring rows into the anonymous memory; False where a page of theirs cannot be read."""
        first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)  # neighbours are one piece
        pieces = np.empty((len(first), 2), dtype=np.int64)
        pieces[:, 0] = self._address + rows[first] * self._row_bytes
        pieces[:, 1] = np.diff(first, append=len(rows)) * self._row_bytes
        at = 0
        for start in range(0, len(pieces), _PIECES):
            some = pieces[start : start + _PIECES]
            size = int(some[:, 1].sum())
            if _LIBC.pwritev(self._memory, some.ctypes.data, len(some), at) != size:
                return False
            at += size
        return True
