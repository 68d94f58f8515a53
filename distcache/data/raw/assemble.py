"""Parts into arrays: every part writes its samples to their final place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcache.data.criteo_text import IDS, INTEGERS
from distcache.data.raw.part import PartReport
from distcache.data.raw.part_files import read_pieces
from distcache.data.raw.settings import MISSING, OUT_OF_VOCABULARY
from distcache.data.raw.tables import TableReport


@dataclass(frozen=True)
class AssembleTask:
    """Write one part's samples from place `first` of the arrays in `arrays` on.

    `folder`: of the part; `tables`: work folders of the vocabularies with their reports, or empty
    where the part's ids are rows already.
    """

    folder: str
    report: PartReport
    first: int
    arrays: str
    tables: Sequence[tuple[str, TableReport]]


def make_arrays(folder: Path, samples: int, id_dtype: np.dtype) -> None:
    """Files of the final shape for labels uint8, dense float32 and ids, without their values."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
        "labels": (np.dtype(np.uint8), (samples,)),
        "dense": (np.dtype(np.float32), (samples, INTEGERS)),
        "ids": (id_dtype, (samples, IDS)),
    }
    for name, (dtype, shape) in shapes.items():
        partial = folder / f"{name}.npy.partial"
        np.lib.format.open_memmap(partial, "w+", dtype, shape)
        partial.rename(folder / f"{name}.npy")


def assemble_part(task: AssembleTask) -> None:
    """Write one part's samples, and remove what they were made from."""
    folder, arrays, report = Path(task.folder), Path(task.arrays), task.report
    # Killed after this part was marked but before its files were gone: nothing is left to do.
    if not is_assembled(folder):
        for piece in read_pieces(folder, report.samples, np.dtype(report.id_dtype)):
            ids = piece.ids
            if piece.missing is not None:
                ids = _rows_of(ids, piece.missing, task.tables)
            for name, values in (("labels", piece.labels), ("dense", piece.dense), ("ids", ids)):
                _write_at(arrays / f"{name}.npy", task.first + piece.first, values)
        (folder / "assembled").touch()
    for name in ("ids", "missing", "labels", "dense", "values", "counts"):
        (folder / f"{name}.bin").unlink(missing_ok=True)


def is_assembled(folder: Path) -> bool:
    """Whether the part in `folder` is in the arrays."""
    return (folder / "assembled").exists()


def _rows_of(
    values: np.ndarray, missing: np.ndarray, tables: Sequence[tuple[str, TableReport]]
) -> np.ndarray:
    """Rows `[n, 26]` of id values by the vocabularies."""
    dtype = max((np.dtype(report.row_dtype) for _, report in tables), key=lambda d: d.itemsize)
    rows = np.empty(values.shape, dtype=dtype)
    for table, (folder, report) in enumerate(tables):
        column = np.ascontiguousarray(values[:, table])
        found = look_up(column, Path(folder), report)
        found[(missing >> np.uint32(table)) & np.uint32(1) == 1] = MISSING
        rows[:, table] = found
    return rows


def look_up(values: np.ndarray, folder: Path, report: TableReport) -> np.ndarray:
    """Rows of `values` `[n]` by the sorted vocabulary of a table; OUT_OF_VOCABULARY for others."""
    if report.entries == 0 or len(values) == 0:
        return np.full(len(values), OUT_OF_VOCABULARY, dtype=report.row_dtype)
    known = np.memmap(folder / "values.bin", np.dtype(report.value_dtype), "r")
    rows = np.memmap(folder / "rows.bin", np.dtype(report.row_dtype), "r")
    distinct, inverse = distinct_of(values)
    places = np.minimum(np.searchsorted(known, distinct.astype(known.dtype)), len(known) - 1)
    found = np.where(known[places] == distinct, rows[places], OUT_OF_VOCABULARY)
    return found[inverse].astype(rows.dtype)


def distinct_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct unsigned `values`, rising, and the place of each value among them.

    32-bit values are sorted together with their places, in one word each.
    """
    if values.dtype.itemsize > 4 or len(values) == 0:
        return np.unique(values, return_inverse=True)
    words = values.astype(np.uint64) << np.uint64(32)
    words |= np.arange(len(values), dtype=np.uint64)
    words.sort()
    ordered = (words >> np.uint64(32)).astype(np.uint32)
    new = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    inverse = np.empty(len(values), dtype=np.int32)
    inverse[(words & np.uint64(0xFFFFFFFF)).astype(np.int64)] = np.cumsum(new) - 1
    return ordered[new], inverse


def _write_at(path: Path, first: int, values: np.ndarray) -> None:
    """Write rows of an array file from row `first` on."""
    with path.open("r+b") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{path}: array file of version {version}")
        np.lib.format.read_array_header_1_0(file)
        file.seek(file.tell() + first * values[:1].nbytes)
        values.tofile(file)


def settle(path: Path, target: Path) -> None:
    """Move a finished file to its place, once it is on the disk; nothing if it is there."""
    if not path.exists() and target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    shutil.move(path, target)
