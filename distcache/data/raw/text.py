"""The text of input files, plain or gzip, in blocks of whole lines, and gzip files as parts."""

from __future__ import annotations

import gzip
import json
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distcache.data.criteo_text import MAX_LINE, TOO_LONG
from distcache.data.files import InputFile, inspect
from distcache.errors import DataError

# -----------------------------------------------------------------------------
# The text of input files, plain or gzip, in blocks of whole lines.


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


# -----------------------------------------------------------------------------
# Gzip files as parts: a thread a file unpacks into pieces on disk, a few ahead of the parsers.

_CHUNK = 1 << 20
_POLL_S = 0.2


class Spool:
    """Pieces of about `part_bytes` of text of gzip files: whole lines, cut at the same places in
    every run, so that pieces whose parts are `done` need not be written again.

    `folder`: where pieces lie until `finished`; at most `ahead` of them at a time.
    """

    def __init__(self, folder: Path, part_bytes: int, ahead: int) -> None:
        self.folder, self.part_bytes = folder, part_bytes
        self._slots = threading.Semaphore(ahead)
        self._stop = threading.Event()

    def finished(self, piece: InputFile) -> None:
        """A piece has been parsed: remove it."""
        piece.path.unlink(missing_ok=True)
        self._slots.release()

    def pieces(
        self,
        files: Sequence[tuple[int, InputFile]],
        done: Callable[[int, int], bool],
        threads: int,
    ) -> Iterator[tuple[int, int, InputFile, int]]:
        """(file number, piece number, the piece, compressed bytes) as they are unpacked.

        Leaves `pieces-<file>.json` with their number when a file has been read to its end.
        Raises DataError for a damaged file, after its earlier pieces.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found: queue.Queue = queue.Queue()
        todo = iter(files)
        lock = threading.Lock()

        def work() -> None:
            try:
                while not self._stop.is_set():
                    with lock:
                        number, file = next(todo, (-1, None))
                    if file is None:
                        break
                    self._unpack(number, file, done, found.put)
                found.put(None)
            except BaseException as error:
                found.put(error)

        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            running = threads
            while running:
                item = found.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            self._stop.set()
            for worker in workers:
                worker.join()

    def _unpack(
        self,
        number: int,
        file: InputFile,
        done: Callable[[int, int], bool],
        put: Callable[[object], None],
    ) -> None:
        read = [0, 0]  # compressed bytes until now, and until the last piece
        piece = _Piece(self, number, done)

        def on_read(at: int) -> None:
            read[0] = at

        def hand_over(finished: InputFile | None) -> None:
            if finished is not None:
                put((number, piece.index - 1, finished, read[0] - read[1]))
                read[1] = read[0]

        for chunk in gunzip(file, _CHUNK, on_read):
            while chunk:
                chunk, whole = piece.take(chunk)
                if whole:
                    hand_over(piece.close())
            if self._stop.is_set():
                return
        if piece.size:
            hand_over(piece.close())
        marker = self.folder / f"pieces-{number}.json"
        partial = marker.with_suffix(".partial")
        partial.write_text(json.dumps(piece.index))
        partial.rename(marker)

    def known_pieces(self, number: int) -> int | None:
        """How many pieces a file has; None where it was not read to its end yet."""
        try:
            return json.loads((self.folder / f"pieces-{number}.json").read_text())
        except FileNotFoundError:
            return None

    def acquire(self) -> bool:
        """Wait for room for a piece; false when all is to stop."""
        while not self._slots.acquire(timeout=_POLL_S):
            if self._stop.is_set():
                return False
        return True


class _Piece:
    """The piece that is being written: it ends at the first line end after `part_bytes`."""

    def __init__(self, spool: Spool, number: int, done: Callable[[int, int], bool]) -> None:
        self.spool, self.number, self.done = spool, number, done
        self.index = self.size = 0
        self._file = None
        self._path = Path()

    def take(self, chunk: bytes) -> tuple[bytes, bool]:
        """Write what belongs to this piece; the rest, and whether the piece is whole."""
        if self.size == 0 and not self.done(self.number, self.index):
            self.spool.acquire()
            self._path = self.spool.folder / f"{self.number}-{self.index}.txt"
            self._file = self._path.open("wb")
        room = self.spool.part_bytes - self.size
        end = chunk.find(b"\n", max(0, room - 1)) + 1 if len(chunk) >= room else 0
        mine, rest = (chunk[:end], chunk[end:]) if end else (chunk, b"")
        if self._file is not None:
            self._file.write(mine)
        self.size += len(mine)
        return rest, end > 0

    def close(self) -> InputFile | None:
        """End the piece; None where its part is done already."""
        self.index, self.size = self.index + 1, 0
        if self._file is None:
            return None
        self._file.close()
        self._file = None
        return inspect(self._path)
