"""Rows of an array file by memory map; a file that is cut meanwhile is an error, not the end.

The kernel kills a process that touches a mapped page beyond the end of its file (SIGBUS), and no
check beforehand helps against a file that is cut between check and read. A system call that reads
such a page fails instead. So the rows are gathered by `pwritev(2)`, from the map into anonymous
memory (`memfd_create(2)`), a thousand at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from distcache.data.files import InputFile, inspect
from distcache.errors import DataError

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
            failed = not self._gather(rows) or self._read(result) != result.nbytes
        if failed:
            self._file.check_unchanged()
            raise DataError(f"{self._file.path} cannot be read: the disk or its network failed")
        return result

    def visit_at_random(self, stop: int) -> None:
        """Read no pages around those of rows before `stop`: these come in no order."""
        self._advise(0, stop, mmap.MADV_RANDOM)

    def will_need(self, start: int, stop: int) -> None:
        """Have the system read rows [start, stop) soon, without waiting for it."""
        self._advise(start, stop, mmap.MADV_WILLNEED)

    def _advise(self, start: int, stop: int, advice: int) -> None:
        """A hint about the pages of some rows; that it is not taken changes nothing."""
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

    def _read(self, result: np.ndarray) -> int:
        """Copy the anonymous memory into `result`; the bytes copied."""
        return os.preadv(self._memory, [result.reshape(-1).view(np.uint8)], 0)
