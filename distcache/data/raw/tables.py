"""One table's counts over all parts and, in mode `vocabulary`, its rows.

Runs of sorted ids on disk are merged range by range. Memory grows with neither the samples nor the
distinct ids: ranges are chosen from a sample of the runs so that each holds at most a given number
of entries. Row 0 of a vocabulary is every id outside it and row 1 a missing id; then come the ids
that occur often enough in training samples, by falling count, equal counts by rising id.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from distcache.data.files import read_json, write_json
from distcache.data.raw.parts import PartReport, read_pieces
from distcache.data.raw.settings import (
    FIRST,
    IDS,
    INTEGERS,
    MISSING,
    OUT_OF_VOCABULARY,
    bags,
)

ENTRY_BYTES = 64
"""Memory of an entry while its range is merged."""
FAN_IN = 256
"""Runs that are merged at once; more are merged in groups first."""


@dataclass(frozen=True)
class Run:
    """Distinct ids of one part and table, rising: entries [start, start + length) of its files."""

    folder: str
    dtype: str
    start: int
    length: int
    count_dtype: str = "<u4"

    def values(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """The ids at places [low, high) of the run."""
        return self._read("values.bin", np.dtype(self.dtype), low, high)

    def mapped(self) -> np.ndarray:
        """All ids, by memory map: what is not touched is not read."""
        path, dtype = Path(self.folder, "values.bin"), np.dtype(self.dtype)
        return np.memmap(path, dtype, "r", self.start * dtype.itemsize, (self.length,))

    def places(self, ids: np.ndarray) -> np.ndarray:
        """How many ids of the run are smaller than each of the rising `ids`."""
        own = ids[ids <= np.iinfo(self.dtype).max]
        places = np.full(len(ids), self.length, dtype=np.int64)
        places[: len(own)] = np.searchsorted(self.mapped(), own.astype(self.dtype))
        return places

    def counts(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """How often they occur, int64."""
        return self._read("counts.bin", np.dtype(self.count_dtype), low, high).astype(np.int64)

    def _read(self, name: str, dtype: np.dtype, low: int, high: int | None) -> np.ndarray:
        count = (self.length if high is None else high) - low
        offset = (self.start + low) * dtype.itemsize
        return np.fromfile(Path(self.folder, name), dtype, count, offset=offset)


def fewer_runs(runs: Sequence[Run], most: int, folder: Path) -> list[Run]:
    """At most `FAN_IN` runs that say the same; new ones are written into `folder`.

    What a range is cut by grows with the square of the runs that are merged at once.
    """
    level, made = list(runs), []
    while len(level) > FAN_IN:
        groups = [level[at : at + FAN_IN] for at in range(0, len(level), FAN_IN)]
        below, level = made, []
        made = [folder / f"{len(groups)}-{number}" for number in range(len(groups))]
        for target, group in zip(made, groups, strict=True):
            level.append(_write_merged(group, most, target))
        for old in below:
            shutil.rmtree(old)
    return level


def _write_merged(runs: Sequence[Run], most: int, folder: Path) -> Run:
    """One run of several, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dtype = max((np.dtype(run.dtype) for run in runs), key=lambda dtype: dtype.itemsize)
    length = 0
    with (folder / "values.bin").open("wb") as values, (folder / "counts.bin").open("wb") as counts:
        for found, times in merge_runs(runs, most):
            found.astype(dtype).tofile(values)
            times.tofile(counts)
            length += len(found)
    return Run(str(folder), dtype.str, 0, length, np.dtype(np.int64).str)


def merge_runs(runs: Sequence[Run], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Distinct ids (rising over all yields) and their summed counts int64.

    A range has about `most` entries at the most (before equal ones are joined), or as many as
    there are runs where that is more.
    """
    runs = [run for run in runs if run.length]
    if not runs:
        return
    if sum(run.length for run in runs) <= most:
        yield _merge([run.values() for run in runs], [run.counts() for run in runs])
        return
    splitters = _splitters(runs, most)
    places = np.empty((len(runs), len(splitters) + 2), dtype=np.int64)
    for index, run in enumerate(runs):
        places[index, 0], places[index, -1] = 0, run.length
        places[index, 1:-1] = run.places(splitters)
    for step in range(len(splitters) + 1):
        values, counts = [], []
        for run, low, high in zip(runs, places[:, step], places[:, step + 1], strict=True):
            if low < high:
                values.append(run.values(low, high))
                counts.append(run.counts(low, high))
        if values:
            yield _merge(values, counts)


def _splitters(runs: Sequence[Run], most: int) -> np.ndarray:
    """Ids that divide the runs into ranges of about `most` entries."""
    every = max(1, most // (2 * len(runs)))
    sample = np.sort(np.concatenate([run.mapped()[every - 1 :: every] for run in runs]))
    return np.unique(sample[:: max(1, most // (2 * every))])


def _merge(values: list[np.ndarray], counts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values of several rising runs, with the sums of their counts."""
    joined, summed = np.concatenate(values), np.concatenate(counts)
    order = np.argsort(joined, kind="stable")
    joined = joined[order]
    starts = np.flatnonzero(np.concatenate(([True], joined[1:] != joined[:-1])))
    return joined[starts], np.add.reduceat(summed[order], starts)


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
    write_json(folder / "report.json", asdict(report))
    return report


def read_table_report(folder: Path) -> TableReport | None:
    """The report of a finished table; None where there is none."""
    found = read_json(folder / "report.json")
    return found and TableReport(**found)


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
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)


def assemble_part(task: AssembleTask) -> None:
    """Write one part's samples, and remove what they were made from."""
    folder, arrays, report = Path(task.folder), Path(task.arrays), task.report
    # Killed after this part was marked but before its files were gone: nothing is left to do.
    if not is_assembled(folder):
        for first, rows in read_pieces(folder, report.samples, np.dtype(report.id_dtype)):
            ids = rows.ids
            if rows.missing is not None:
                ids = _rows_of(ids, rows.missing, task.tables)
            for name, values in (("labels", rows.labels), ("dense", rows.dense), ("ids", ids)):
                _write_at(arrays / f"{name}.npy", task.first + first, values)
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
    coded = pa.array(values).dictionary_encode()
    distinct, codes = coded.dictionary.to_numpy(), coded.indices.to_numpy()
    order = np.argsort(distinct)  # neighbours lie on the same pages of the vocabulary
    wanted = distinct[order].astype(known.dtype)
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = np.empty(len(distinct), dtype=rows.dtype)
    found[order] = np.where(known[places] == distinct[order], rows[places], OUT_OF_VOCABULARY)
    return found[codes]


def _write_at(path: Path, first: int, values: np.ndarray) -> None:
    """Write rows of an array file from row `first` on."""
    with path.open("r+b") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{path}: array file of version {version}")
        np.lib.format.read_array_header_1_0(file)
        file.seek(file.tell() + first * values[:1].nbytes)
        values.tofile(file)
