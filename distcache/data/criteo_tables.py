"""What workers do: parts of the text, counts and vocabularies of tables, the samples' arrays.

A part is three files and a report, which is written last: its samples, piece by piece, and for each
table the run of its distinct ids with their counts. A table merges the runs of all parts range by
range. Memory grows with neither the samples nor the distinct ids: ranges are chosen from a sample
of the runs so that each holds at most a given number of entries. Row 0 of a vocabulary is every id
outside it and row 1 a missing id; then come the ids that occur often enough in training samples, by
falling count, equal counts by rising id.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from distcache.data.criteo_folder import (
    FIRST,
    IDS,
    INTEGERS,
    MISSING,
    OUT_OF_VOCABULARY,
    WORKER_BYTES,
    bags,
)
from distcache.data.criteo_text import MAX_LINE, CriteoRows, id_dtype, parse_blocks
from distcache.data.files import SHOWN, InputFile, read_json, read_range, whole_lines, write_json
from distcache.errors import DataError

BLOCK_BYTES = 4 << 20
"""Bytes of text that are parsed at once."""
PIECE = 1 << 16
"""Samples that are written, and read back, at once; a block more at the most."""


@dataclass(frozen=True)
class PartTask:
    """Lines that begin in [start, stop) of `text`, to be parsed into files of `folder` that are
    called `name`. `file`: number of the input file.

    `table_rows`: rows that ids are hashed to, or None to keep values. `read_bytes`: of the input
    that this part stands for (compressed ones where the input is gzip).
    """

    file: int
    name: str
    text: InputFile
    start: int
    stop: int
    read_bytes: int
    folder: str
    table_rows: tuple[int, ...] | None
    skip_bad: bool


@dataclass(frozen=True)
class PartReport:
    """What a part holds. `bad`: line (from 0 in the part) and reason of the first malformed ones.

    `id_dtype`: of its runs; `lengths`: distinct ids of each table, `missing`: samples without an id
    of each table. A part with `complete` false was given up at its first malformed line.
    """

    file: int
    name: str
    read_bytes: int
    text_bytes: int
    lines: int
    samples: int
    bad_lines: int
    bad: list[tuple[int, str]]
    id_dtype: str
    lengths: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    complete: bool = True


def parse_part(task: PartTask) -> PartReport:
    """Parse a part, or up to its first malformed line unless they are skipped.

    A part is complete when its report is there. Raises DataError for a file that changed meanwhile.
    """
    bad: list[tuple[int, str]] = []
    text_bytes = lines = samples = bad_lines = 0

    def on_error(line: int, error: DataError) -> None:
        nonlocal bad_lines
        bad_lines += 1
        if len(bad) < SHOWN:
            bad.append((line, str(error)))

    def parsed() -> Iterator[CriteoRows]:
        nonlocal text_bytes, lines, samples
        chunks = read_range(task.text, BLOCK_BYTES, task.start, task.stop)
        for rows, text in parse_blocks(whole_lines(chunks, MAX_LINE), task.table_rows, on_error):
            text_bytes += len(text)
            lines += text.count(b"\n") + (not text.endswith(b"\n"))
            if bad and not task.skip_bad:
                return
            samples += len(rows.labels)
            yield rows

    path = Path(task.folder, task.name)
    pieces = save_rows(parsed(), path.with_suffix(".rows"))
    lengths, missing, dtype = write_runs(pieces, path, id_dtype(task.table_rows))
    complete = task.skip_bad or not bad
    about = (task.file, task.name, task.read_bytes, text_bytes, lines, samples, bad_lines, bad)
    report = PartReport(*about, dtype.str, lengths, missing, complete)
    if complete:
        write_json(path.with_suffix(".json"), asdict(report))
    return report


def save_rows(blocks: Iterable[CriteoRows], path: Path) -> Iterator[CriteoRows]:
    """The rows in pieces of about `PIECE` samples, each written to `path` before it is given on."""
    held: list[CriteoRows] = []
    with path.open("wb") as file:

        def written() -> CriteoRows:
            columns = zip(*(vars(rows).values() for rows in held), strict=True)
            piece = CriteoRows(*(None if c[0] is None else np.concatenate(c) for c in columns))
            pickle.dump(piece, file, pickle.HIGHEST_PROTOCOL)
            held.clear()
            return piece

        for rows in blocks:
            held.append(rows)
            if sum(len(one.labels) for one in held) >= PIECE:
                yield written()
        if held:
            yield written()


def read_rows(path: Path) -> Iterator[CriteoRows]:
    """The pieces that `save_rows` wrote."""
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def first_rows(pieces: Iterable[CriteoRows], samples: int) -> Iterator[CriteoRows]:
    """The first `samples` of them."""
    for rows in pieces:
        if samples > 0:
            arrays = vars(rows).values()
            yield CriteoRows(*(None if array is None else array[:samples] for array in arrays))
        samples -= len(rows.labels)


def write_runs(
    pieces: Iterable[CriteoRows], path: Path, dtype: np.dtype
) -> tuple[list[int], list[int], np.dtype]:
    """Write distinct ids (rising) of some samples, and how often each occurs (int64), table after
    table, to `path` with the suffixes `.values` and `.counts`.

    Missing ids are not counted. Returns distinct and missing ids by table, and the dtype of the
    ids: `dtype`, or wider where they need it.
    """
    nothing = np.empty(0, dtype), np.empty(0, np.int64)
    found, absent = [[nothing] for _ in range(IDS)], [0] * IDS
    for rows in pieces:
        for table in range(IDS):
            column = rows.ids[:, table]
            if rows.missing is not None:
                column = column[rows.missing & np.uint32(1 << table) == 0]
            found[table].append(np.unique(column, return_counts=True))
            absent[table] += len(rows.ids) - len(column)
    merged = [_merge(*zip(*own, strict=True)) for own in found]
    dtype = np.result_type(*(values.dtype for values, _ in merged))
    with open(f"{path}.values", "wb") as to_values, open(f"{path}.counts", "wb") as to_counts:
        for values, counts in merged:
            values.astype(dtype).tofile(to_values)
            counts.tofile(to_counts)
    return [len(values) for values, _ in merged], absent, dtype


ENTRY_BYTES = 64
"""Memory of an entry while its range is merged."""
MOST = max(1 << 16, WORKER_BYTES // 2 // ENTRY_BYTES)
"""Entries that are merged at once."""
FAN_IN = 256
"""Runs that are merged at once; more are merged in groups first."""


@dataclass(frozen=True)
class Run:
    """Distinct ids of one part and table, rising, and how often each occurs: entries [start,
    start + length) of the files of `write_runs`."""

    path: str
    dtype: str
    start: int
    length: int

    def mapped(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and counts int64, by memory map: what is not touched is not read."""
        kinds = ((".values", np.dtype(self.dtype)), (".counts", np.dtype(np.int64)))
        values, counts = (
            np.memmap(self.path + suffix, dtype, "r", self.start * dtype.itemsize, (self.length,))
            for suffix, dtype in kinds
        )
        return values, counts


def fewer_runs(runs: Sequence[Run], folder: Path) -> Sequence[Run]:
    """At most `FAN_IN` runs that say the same; new ones are written into `folder`.

    What a range is cut by grows with the square of the runs that are merged at once.
    """
    while len(runs) > FAN_IN:
        groups = [runs[at : at + FAN_IN] for at in range(0, len(runs), FAN_IN)]
        level, runs = len(runs), []
        for number, group in enumerate(groups):
            path, length = folder / f"{level}-{number}", 0
            dtype = np.result_type(*(run.dtype for run in group))
            with open(f"{path}.values", "wb") as values, open(f"{path}.counts", "wb") as counts:
                for found, times in merge_runs(group, MOST):
                    found.astype(dtype).tofile(values)
                    times.tofile(counts)
                    length += len(found)
            runs.append(Run(str(path), dtype.str, 0, length))
    return runs


def merge_runs(runs: Sequence[Run], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Distinct ids (rising over all yields) and their summed counts int64.

    A range has about `most` entries at the most (before equal ones are joined), or as many as
    there are runs where that is more.
    """
    maps = [run.mapped() for run in runs if run.length]
    if not maps:
        return
    every = max(1, most // (2 * len(maps)))
    sample = np.sort(np.concatenate([values[every - 1 :: every] for values, _ in maps]))
    splitters = np.unique(sample[:: max(1, most // (2 * every))])
    edges = np.array([[0, *_places(values, splitters), len(values)] for values, _ in maps])
    for lows, highs in zip(edges.T[:-1].tolist(), edges.T[1:].tolist(), strict=True):
        some = [
            (values[low:high], counts[low:high])
            for (values, counts), low, high in zip(maps, lows, highs, strict=True)
            if low < high
        ]
        if some:
            yield _merge(*zip(*some, strict=True))


def _places(values: np.ndarray, ids: np.ndarray) -> list[int]:
    """How many of the rising `values` are smaller than each of the rising `ids`."""
    inside = ids[ids <= np.iinfo(values.dtype).max].astype(values.dtype)  # else all are converted
    beyond = [len(values)] * (len(ids) - len(inside))
    return np.searchsorted(values, inside).tolist() + beyond


def _merge(
    values: Sequence[np.ndarray], counts: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values of several rising runs, with the sums of their counts."""
    joined, summed = np.concatenate(values), np.concatenate(counts)
    order = np.argsort(joined, kind="stable")
    joined = joined[order]
    starts = np.flatnonzero(np.append(True, joined[1:] != joined[:-1])[: len(joined)])
    return joined[starts], np.add.reduceat(summed[order], starts)


_CHUNK = 1 << 20
"""Entries that are handled at once."""


@dataclass(frozen=True)
class TableTask:
    """Count table number `table` over `runs`, into `counts` and `vocabulary` of `output`.

    `rows`: of the table in mode `hash`, None for a vocabulary of ids that occur `min_count` times.
    `missing`: training samples without an id. `bag`: ids per bag. `folder`: work files.
    """

    table: int
    runs: Sequence[Run]
    missing: int
    rows: int | None
    min_count: int
    bag: int
    folder: str
    output: str


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
    folder, counts = Path(task.folder), Path(task.output, f"counts/cat_{task.table}.npy")
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    counts.parent.mkdir(exist_ok=True)
    task = replace(task, runs=fewer_runs(task.runs, folder / "runs"))
    if task.rows is None:
        report = _vocabulary(task, counts)
    else:
        array = np.lib.format.open_memmap(counts, "w+", np.int64, (task.rows,))
        for values, found in merge_runs(task.runs, MOST):
            array[values] = found  # rows that never occur stay 0
        report = TableReport(task.table, task.rows)
    shutil.rmtree(folder / "runs")
    if task.bag > 1:  # counts of the ids in bags, from those of the ids that these come from
        single = np.load(counts)
        total, step = np.zeros_like(single), max(1, _CHUNK // task.bag)
        for start in range(0, len(single), step):
            ids = start + np.flatnonzero(single[start : start + step])
            of_bags = bags(ids, task.table, len(single), task.bag)
            np.add.at(total, of_bags, single[ids][:, None])
        np.lib.format.open_memmap(counts, "r+")[:] = total
    write_json(folder / "report.json", asdict(report))
    return report


def read_table_report(folder: Path) -> TableReport | None:
    """The report of a finished table; None where there is none."""
    found = read_json(folder / "report.json")
    return found and TableReport(**found)


def _vocabulary(task: TableTask, path: Path) -> TableReport:
    """The vocabulary sorted by id with the row of each, counts by row, and ids by row."""
    folder = Path(task.folder)
    entries, outside, histogram, dtype = _select(task, folder)
    row_dtype = np.dtype(np.int32 if entries + FIRST <= 2**31 else np.int64)
    distinct, numbers = histogram
    by_row = np.lib.format.open_memmap(path, "w+", np.int64, (FIRST + int(numbers.sum()),))
    by_row[:FIRST], at = [outside, task.missing], FIRST
    for count, number in zip(distinct[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        by_row[at : at + number] = count  # every distinct count as often as it occurs, falling
        at += number
    named = Path(task.output, f"vocabulary/cat_{task.table}.npy")
    named.parent.mkdir(exist_ok=True)
    names = np.lib.format.open_memmap(named, "w+", dtype, (entries + FIRST,))
    # Rows of a count begin after all rows of higher counts.
    begin = FIRST + (entries - np.cumsum(numbers))
    with (
        (folder / "values.bin").open("rb") as ids,
        (folder / "sums.bin").open("rb") as sums,
        (folder / "rows.bin").open("wb") as rows_file,
    ):
        for _ in range(0, entries, _CHUNK):
            values, counts = np.fromfile(ids, dtype, _CHUNK), np.fromfile(sums, np.int64, _CHUNK)
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
    dtype = np.result_type(*(run.dtype for run in task.runs))
    entries = outside = 0
    distinct, numbers = np.empty(0, np.int64), np.empty(0, np.int64)
    with (folder / "values.bin").open("wb") as to_values, (folder / "sums.bin").open("wb") as to:
        for values, counts in merge_runs(task.runs, MOST):
            keep = counts >= task.min_count
            outside += int(counts[~keep].sum())
            values, counts = values[keep].astype(dtype), counts[keep]
            entries += len(values)
            values.tofile(to_values)
            counts.tofile(to)
            found, times = np.unique(counts, return_counts=True)
            distinct, numbers = _merge((distinct, found), (numbers, times))
    return entries, outside, (distinct, numbers), dtype


@dataclass(frozen=True)
class AssembleTask:
    """Write the samples in the file `rows` of a part from place `first` of the arrays in `output`
    on.

    `samples`: how many they are; `tables`: work folders of the vocabularies with their reports, or
    empty where the part's ids are rows already.
    """

    rows: Path
    samples: int
    first: int
    output: Path
    tables: Sequence[tuple[Path, TableReport]]


def make_arrays(folder: Path, samples: int, id_dtype: np.dtype) -> None:
    """Files of the final shape for labels uint8, dense float32 and ids, without their values."""
    shapes: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
        "labels": (np.dtype(np.uint8), (samples,)),
        "dense": (np.dtype(np.float32), (samples, INTEGERS)),
        "ids": (id_dtype, (samples, IDS)),
    }
    for name, (dtype, shape) in shapes.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)


def assemble_part(task: AssembleTask) -> None:
    """Write one part's samples, and then remove their file: without it a part is written."""
    first = task.first
    for rows in read_rows(task.rows):
        ids = rows.ids
        if rows.missing is not None:
            ids = _rows_of(ids, rows.missing, task.tables)
        for name, values in (("labels", rows.labels), ("dense", rows.dense), ("ids", ids)):
            with (task.output / f"{name}.npy").open("r+b") as file:
                np.lib.format.read_magic(file)
                np.lib.format.read_array_header_1_0(file)
                file.seek(file.tell() + first * values[:1].nbytes)
                values.tofile(file)
        first += len(ids)
    task.rows.unlink()


def _rows_of(
    values: np.ndarray, missing: np.ndarray, tables: Sequence[tuple[Path, TableReport]]
) -> np.ndarray:
    """Rows `[n, 26]` of id values by the vocabularies."""
    dtype = max((np.dtype(report.row_dtype) for _, report in tables), key=lambda d: d.itemsize)
    rows = np.empty(values.shape, dtype=dtype)
    for table, (folder, report) in enumerate(tables):
        column = np.ascontiguousarray(values[:, table])
        found = _look_up(column, folder, report)
        found[(missing >> np.uint32(table)) & np.uint32(1) == 1] = MISSING
        rows[:, table] = found
    return rows


def _look_up(values: np.ndarray, folder: Path, report: TableReport) -> np.ndarray:
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
