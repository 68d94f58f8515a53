"""The raw files of a part: written block by block, read back piece by piece, never held whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcache.data.criteo_text import IDS, INTEGERS, CriteoRows

PIECE = 1 << 18
"""Samples that are read back at once."""


class PartWriter:
    """Writes blocks of rows, `integers` as dense features, to the files of a part in `folder`.

    Ids are written as `dtype`; values (without table rows) as uint32 until one needs uint64, when
    what was written is widened. `samples`: rows written so far.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self.folder, self.samples = folder, 0
        self.dtype = np.dtype(np.uint32) if dtype == np.uint64 else dtype
        names = ("labels", "dense", "ids", "missing")
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in names}

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, rows: CriteoRows) -> None:
        """Write one block."""
        if self.dtype == np.uint32 and not _fits(rows.ids):
            self._widen()
        rows.labels.tofile(self._files["labels"])
        rows.integers.tofile(self._files["dense"])
        rows.ids.astype(self.dtype, copy=False).tofile(self._files["ids"])
        if rows.missing is not None:
            pack_missing(rows.missing).tofile(self._files["missing"])
        self.samples += len(rows.labels)

    def _widen(self) -> None:
        """Write the ids so far again, as uint64."""
        self._files["ids"].close()
        old, new = self.folder / "ids.bin", self.folder / "wide.bin"
        self._files["ids"] = new.open("wb")
        with old.open("rb") as narrow:
            while len(ids := np.fromfile(narrow, np.uint32, PIECE * IDS)):
                ids.astype(np.uint64).tofile(self._files["ids"])
        new.replace(old)
        self.dtype = np.dtype(np.uint64)


def _fits(ids: np.ndarray) -> bool:
    """Whether every value is below 2^32."""
    return ids.dtype == np.uint32 or not len(ids) or int(ids.max()) < 2**32


def pack_missing(missing: np.ndarray) -> np.ndarray:
    """uint32 `[n]`: bit t says that the id of table t is missing. `missing`: bool `[n, 26]`."""
    bits = np.zeros(len(missing), dtype=np.uint32)
    for table in range(missing.shape[1]):
        bits |= missing[:, table].astype(np.uint32) << np.uint32(table)
    return bits


@dataclass(frozen=True)
class PartPiece:
    """Samples [first, first + n) of a part: `labels` uint8 `[n]`, `dense` float32 `[n, 13]`, `ids`
    `[n, 26]`, `missing` uint32 `[n]` (`pack_missing`) or None."""

    first: int
    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    missing: np.ndarray | None


def read_pieces(folder: Path, samples: int, id_dtype: np.dtype) -> Iterator[PartPiece]:
    """All samples of a part, `PIECE` at a time."""
    for first in range(0, samples, PIECE):
        count = min(PIECE, samples - first)

        def some(name: str, dtype: type | np.dtype, width: int, at=first, n=count) -> np.ndarray:
            path, offset = folder / f"{name}.bin", at * width * np.dtype(dtype).itemsize
            return np.fromfile(path, dtype, n * width, offset=offset)

        packed = (folder / "missing.bin").stat().st_size > 0
        yield PartPiece(
            first,
            some("labels", np.uint8, 1),
            some("dense", np.float32, INTEGERS).reshape(count, INTEGERS),
            some("ids", id_dtype, IDS).reshape(count, IDS),
            some("missing", np.uint32, 1) if packed else None,
        )


def write_runs(
    source: Path, target: Path, samples: int, id_dtype: np.dtype
) -> tuple[list[int], list[int]]:
    """Write distinct ids (rising) of the first samples of a part, and how often each occurs, table
    after table.

    Missing ids are not counted. Returns distinct and missing ids by table.
    """
    lengths, absent = [], []
    ids = missing = None
    if samples:
        ids = np.memmap(source / "ids.bin", id_dtype, "r", shape=(samples, IDS))
        if (source / "missing.bin").stat().st_size:
            missing = np.memmap(source / "missing.bin", np.uint32, "r", shape=(samples,))
    with (target / "values.bin").open("wb") as values, (target / "counts.bin").open("wb") as counts:
        for table in range(IDS):
            column = np.empty(0, id_dtype) if ids is None else np.array(ids[:, table])
            if missing is not None:
                column = column[missing & np.uint32(1 << table) == 0]
            distinct, occurrences = np.unique(column, return_counts=True)
            distinct.tofile(values)
            occurrences.astype(np.uint32).tofile(counts)
            lengths.append(len(distinct))
            absent.append(samples - len(column))
    return lengths, absent
