"""Gzip files as parts: a thread a file unpacks into pieces on disk, a few ahead of the parsers."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distcache.data.files import InputFile, inspect
from distcache.data.raw.text import gunzip

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
