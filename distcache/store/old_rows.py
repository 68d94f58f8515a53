"""Rows of a store as they were before they were first overwritten, since a snapshot began.

Copy on write, as file systems take snapshots: each home writes a row's old values to a file before
they go, so that whoever reads a block of the store, at any time later, puts back what has changed
since. It takes a bit of memory for each row of a home, however long it lasts, and no time from
steps that overwrite nothing new.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distcache.compiled import compiled, i8, in8, out1, out8
from distcache.ops.reference import as_numpy
from distcache.store.rows import RowStore

PIECES = 32
"""Pieces of a group's rows, each with a file of old ones: a block is looked up in few of them."""

PIECE_ROWS = 1 << 18
"""Rows of a piece at least: each step writes to all of these files."""


@compiled(i8(out1, in8, out8))
def mark_new(bits: np.ndarray, numbers: np.ndarray, places: np.ndarray) -> int:
    """Set the bits `numbers`, int64 `[m]`, of `bits`, uint8. At which places in `numbers` they were
    not set goes to `places`, int64 `[m]`; returns how many."""
    count = 0
    for i in range(len(numbers)):
        byte, bit = numbers[i] >> 3, 1 << (numbers[i] & 7)
        if not bits[byte] & bit:
            bits[byte] |= bit
            places[count] = i
            count += 1
    return count


class OldRows:
    """The rows of one group at home on one rank that were overwritten since a snapshot began, as
    they were before; in files under `folder`, named after group, home and piece. A record in a file
    is m, int64, the places in the store of m rows, int64, their weights `[m, D]` and state
    `[m, S]`.

    `keep` and `close` may be called by different threads. `error`: why a row could not be kept, for
    then the snapshot is lost, and training is not.
    """

    def __init__(self, folder: Path, group: int, home: int, store: RowStore) -> None:
        self.error: OSError | None = None
        self._store, self._name = store, folder / f"{group}.{home}"
        self._size = _piece_rows(store)
        self._bits = np.zeros(-(-store.layout.local_rows // 8), np.uint8)
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def keep(self, rows: Tensor) -> None:
        """Before `rows`, int64 `[m]`, distinct and of this home, are overwritten in the store."""
        with self._lock:
            if self.error is not None:
                return
            local = np.ascontiguousarray(self._store.layout.local(rows.numpy()))
            new = np.empty(len(local), np.int64)
            new = new[: mark_new(self._bits, local, new)]
            if not len(new):
                return
            places = self._store.part.places(rows.numpy()[new])
            pieces = (places // self._size).astype(np.uint8)
            order = pieces.argsort(kind="stable")
            old = self._store.gather(rows[torch.from_numpy(new[order])])
            places, ends = places[order], np.bincount(pieces, minlength=PIECES).cumsum()
            try:
                for piece in np.unique(pieces).tolist():
                    own = slice(int(ends[piece - 1]) if piece else 0, int(ends[piece]))
                    self._append(piece, places[own], [at[own] for at in old if at is not None])
            except OSError as error:
                self.error = error

    def _append(self, piece: int, places: np.ndarray, values: Sequence[Tensor]) -> None:
        if piece not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._files[piece] = os.open(f"{self._name}.{piece}", flags, 0o600)
        count = np.array([len(places)], np.int64)
        record = b"".join(part.data for part in (count, places, *map(as_numpy, values)))
        written = memoryview(record)
        while len(written):
            written = written[os.write(self._files[piece], written) :]

    def close(self) -> None:
        """Keep no more rows, and remove the files; safe to call twice."""
        with self._lock:
            self.error = self.error or OSError("the snapshot has ended")
            for piece, file in self._files.items():
                os.close(file)
                Path(f"{self._name}.{piece}").unlink(missing_ok=True)
            self._files.clear()


def _piece_rows(store: RowStore) -> int:
    """Places of the store that one piece has."""
    return max(PIECE_ROWS, -(-store.part.rows // PIECES))


def read_old(
    folder: Path, group: int, store: RowStore, first: int, last: int, state: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places from `first` to `last` of the store whose rows were overwritten, int64 `[m]`, and
    their old weights `[m, D]`, or their `state` `[m, S]`, as `as_numpy` has them; by several
    records.

    What was read in the store before this is called, and is not among these, is old.
    """
    size, layout = _piece_rows(store), store.layout
    kinds = [None if of is None else as_numpy(of).dtype for of in (store.weight, store.state)]
    widths = (layout.dim, store.state_width)
    sizes = [w * k.itemsize for w, k in zip(widths, kinds, strict=True) if k is not None]
    for piece in range(first // size, -(-last // size)):
        for path in sorted(folder.glob(f"{group}.*.{piece}")):
            with path.open("rb") as file:
                # What of a record is not written yet speaks of rows that still stand.
                while len(header := file.read(8)) == 8:
                    count = int(np.frombuffer(header, np.int64)[0])
                    after = file.tell() + count * (8 + sum(sizes))
                    if len(read := file.read(8 * count)) < 8 * count:
                        break
                    places = np.frombuffer(read, np.int64)
                    at = np.flatnonzero((places >= first) & (places < last))
                    if len(at):
                        file.seek(state * count * sizes[0], os.SEEK_CUR)
                        nbytes = count * sizes[state]
                        if len(read := file.read(nbytes)) < nbytes:
                            break
                        values = np.frombuffer(read, kinds[state]).reshape(count, widths[state])
                        yield places[at], values[at]
                    file.seek(after)
