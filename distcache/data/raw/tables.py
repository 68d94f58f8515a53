"""One table's counts and, in mode `vocabulary`, its rows: the most frequent id comes first.

Row 0 is every id outside the vocabulary and row 1 a missing id; then come the ids that occur
often enough in training samples, by falling count, equal counts by rising id.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from distcache.data.raw.count import Run, fewer_runs, merge_runs
from distcache.data.raw.multi_hot import bags
from distcache.data.raw.settings import FIRST

_CHUNK = 1 << 20
"""Entries that are handled at once."""


@dataclass(frozen=True)
class TableTask:
    """Count table number `table` over `runs`; at most `most` entries are merged at once.

    `rows`: of the table in mode `hash`, None for a vocabulary of ids that occur `min_count` times.
    `missing`: training samples without an id. `bag`: ids per bag. `folder`: work files;
    `counts_path`, `vocabulary_path`: where the results go.
    """

    table: int
    runs: Sequence[Run]
    missing: int
    most: int
    rows: int | None
    min_count: int
    bag: int
    folder: str
    counts_path: str
    vocabulary_path: str


@dataclass(frozen=True)
class TableReport:
    """A table's rows, and the sorted vocabulary in its work folder: entries and dtypes."""

    table: int
    rows: int
    entries: int = 0
    value_dtype: str = ""
    row_dtype: str = ""


def build_table(task: TableTask) -> TableReport:
    """Count one table; leaves `report.json` in its work folder when all is written."""
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    task = replace(task, runs=fewer_runs(task.runs, task.most, folder / "runs"))
    report = _hashed(task) if task.rows is not None else _vocabulary(task)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    if task.bag > 1:
        _count_bags(Path(task.counts_path), task.table, task.bag)
    partial = folder / "report.json.partial"
    partial.write_text(json.dumps(asdict(report)))
    partial.rename(folder / "report.json")
    return report


def read_table_report(folder: Path) -> TableReport | None:
    """The report of a finished table; None where there is none."""
    try:
        return TableReport(**json.loads((folder / "report.json").read_text()))
    except FileNotFoundError:
        return None


def _hashed(task: TableTask) -> TableReport:
    """Counts int64 `[rows]` by row; rows that never occur stay 0."""
    rows = task.rows or 0
    counts = np.lib.format.open_memmap(task.counts_path, "w+", np.int64, (rows,))
    for values, found in merge_runs(task.runs, task.most):
        counts[values] = found
    return TableReport(task.table, rows)


def _vocabulary(task: TableTask) -> TableReport:
    """The vocabulary sorted by id with the row of each, counts by row, and ids by row."""
    folder = Path(task.folder)
    entries, outside, histogram, dtype = _select(task, folder)
    row_dtype = np.dtype(np.int32 if entries + FIRST <= 2**31 else np.int64)
    distinct, numbers = histogram
    _write_counts(Path(task.counts_path), [outside, task.missing], distinct, numbers)
    names = np.lib.format.open_memmap(task.vocabulary_path, "w+", dtype, (entries + FIRST,))
    # Rows of a count begin after all rows of higher counts.
    begin = FIRST + (entries - np.cumsum(numbers))
    with (folder / "rows.bin").open("wb") as rows_file:
        for values, counts in _chunks(folder, dtype, entries):
            kind = np.searchsorted(distinct, counts)
            order = np.argsort(kind, kind="stable")
            kinds = kind[order]
            starts = np.flatnonzero(np.concatenate(([True], kinds[1:] != kinds[:-1])))
            lengths = np.diff(np.append(starts, len(kinds)))
            rank = np.arange(len(kinds)) - np.repeat(starts, lengths)
            rows = np.empty(len(kinds), dtype=row_dtype)
            rows[order] = begin[kinds] + rank
            begin[kinds[starts]] += lengths
            rows.tofile(rows_file)
            names[rows] = values
    return TableReport(task.table, entries + FIRST, entries, dtype.str, row_dtype.str)


def _select(
    task: TableTask, folder: Path
) -> tuple[int, int, tuple[np.ndarray, np.ndarray], np.dtype]:
    """Write ids that are frequent enough, and their counts, by rising id.

    Returns their number, the samples of the other ids, the distinct counts (rising) with the
    number of ids of each, and the dtype of ids.
    """
    wide = any(np.dtype(run.dtype).itemsize > 4 for run in task.runs)
    dtype = np.dtype(np.uint64 if wide else np.uint32)
    entries = outside = 0
    distinct, numbers = np.empty(0, np.int64), np.empty(0, np.int64)
    with (folder / "values.bin").open("wb") as to_values, (folder / "sums.bin").open("wb") as to:
        for values, counts in merge_runs(task.runs, task.most):
            keep = counts >= task.min_count
            outside += int(counts[~keep].sum())
            values, counts = values[keep].astype(dtype), counts[keep]
            entries += len(values)
            values.tofile(to_values)
            counts.tofile(to)
            found, times = np.unique(counts, return_counts=True)
            distinct, places = np.unique(np.concatenate((distinct, found)), return_inverse=True)
            summed = np.zeros(len(distinct), dtype=np.int64)
            np.add.at(summed, places, np.concatenate((numbers, times)))
            numbers = summed
    return entries, outside, (distinct, numbers), dtype


def _chunks(folder: Path, dtype: np.dtype, entries: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with (folder / "values.bin").open("rb") as values, (folder / "sums.bin").open("rb") as sums:
        for _ in range(0, entries, _CHUNK):
            yield np.fromfile(values, dtype, _CHUNK), np.fromfile(sums, np.int64, _CHUNK)


def _write_counts(path: Path, first: list[int], distinct: np.ndarray, numbers: np.ndarray) -> None:
    """Counts by row: `first`, then every distinct count as often as it occurs, falling."""
    array = np.lib.format.open_memmap(path, "w+", np.int64, (len(first) + int(numbers.sum()),))
    array[: len(first)] = first
    at = len(first)
    for count, number in zip(distinct[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        array[at : at + number] = count
        at += number


def _count_bags(path: Path, table: int, size: int) -> None:
    """Counts of the ids in bags of `size`, from those of the ids that the bags come from."""
    single = np.load(path)
    total = np.zeros_like(single)
    step = max(1, _CHUNK // size)
    for start in range(0, len(single), step):
        ids = start + np.flatnonzero(single[start : start + step])
        np.add.at(total, bags(ids, table, len(single), size), single[ids][:, None])
    array = np.lib.format.open_memmap(path, "r+")
    array[:] = total
