"""What workers do: parts of the text, counts and vocabularies of tables, the samples' arrays.

A part is two files and a report, which is written last: its samples, piece by piece, and for each
table the run of its distinct ids with their counts. A table merges the runs of all parts, of which
a little is held at a time: memory grows with neither the samples nor the distinct ids. Row 0 of a
vocabulary is every id outside it and row 1 a missing id; then come the ids that occur often enough
in training samples, by falling count, equal counts by rising id.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
    PreprocessSettings,
    bags,
)
from distcache.data.criteo_text import MAX_LINE, CriteoRows, id_dtype, parse_blocks
from distcache.data.files import SHOWN, InputFile, read_chunks, whole_lines, write_json
from distcache.errors import DataError

BLOCK_BYTES = 4 << 20
"""Bytes of text that are parsed at once; their samples are a piece."""


@dataclass(frozen=True)
class Part:
    """Lines that begin in [start, stop) of `text`. `file`: number of the input file; `name`: of the
    part's own files; names sort as the text goes.

    `read_bytes`: of the input that this part stands for (compressed ones where that is gzip).
    """

    file: int
    name: str
    text: InputFile
    start: int
    stop: int
    read_bytes: int


@dataclass(frozen=True)
class PartReport:
    """What a part holds. `bad`: line (from 1 in the part) and reason of the first malformed ones.

    `lengths`: distinct ids of each table, `missing`: samples without an id of each table. Unless
    malformed lines are skipped, a part with such is given up at the first one.
    """

    file: int
    name: str
    read_bytes: int
    text_bytes: int
    lines: int
    samples: int
    bad_lines: int
    bad: list[tuple[int, str]]
    lengths: list[int]
    missing: list[int]


def part_file(settings: PreprocessSettings, name: str, suffix: str) -> Path:
    """A file of the part `name`."""
    return settings.work / "parts" / f"{name}{suffix}"


def parse_part(settings: PreprocessSettings, part: Part) -> PartReport:
    """Parse a part, or up to its first malformed line unless they are skipped.

    A part is complete when its report is there. Raises DataError for a file that changed meanwhile.
    """
    bad: list[tuple[int, str]] = []
    text_bytes = lines = samples = bad_lines = 0
    skip = settings.on_bad_line == "skip"

    def on_error(line: int, error: DataError) -> None:
        nonlocal bad_lines
        bad_lines += 1
        if len(bad) < SHOWN:
            bad.append((line, str(error)))

    def parsed() -> Iterator[CriteoRows]:
        nonlocal text_bytes, lines, samples
        blocks = whole_lines(read_chunks(part.text, BLOCK_BYTES, part.start, part.stop), MAX_LINE)
        with part_file(settings, part.name, ".rows").open("wb") as file:
            for rows, text in parse_blocks(blocks, settings.rows, on_error):
                text_bytes += len(text)
                lines += text.count(b"\n") + (not text.endswith(b"\n"))
                if bad and not skip:
                    return
                samples += len(rows.labels)
                pickle.dump(rows, file, pickle.HIGHEST_PROTOCOL)
                yield rows

    counts = write_runs(parsed(), part_file(settings, part.name, ".runs"))
    about = (part.file, part.name, part.read_bytes, text_bytes, lines, samples, bad_lines, bad)
    report = PartReport(*about, *counts)
    if skip or not bad:
        write_json(part_file(settings, part.name, ".json"), asdict(report))
    return report


def read_rows(path: Path) -> Iterator[CriteoRows]:
    """The pieces of a part."""
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


ENTRY = np.dtype([("id", np.uint64), ("count", np.int64)])
"""An id, and how often it occurs; a run is distinct ids, rising."""
MOST = max(1 << 16, WORKER_BYTES // 2 // 64)
"""Entries that are merged at once: each takes 64 bytes meanwhile."""
FAN_IN = 256
"""Runs that are merged at once; more are merged in groups first."""


def counted(values: np.ndarray) -> np.ndarray:
    """The distinct ones of `values` as a run."""
    distinct, times = np.unique(values, return_counts=True)
    entries = np.empty(len(distinct), ENTRY)
    entries["id"], entries["count"] = distinct, times
    return entries


def joined(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Several runs as one."""
    entries = np.concatenate(runs)
    entries = entries[np.argsort(entries["id"], kind="stable")]
    ids = entries["id"]
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
    result = entries[starts]
    result["count"] = np.add.reduceat(entries["count"], starts)
    return result


def write_runs(
    pieces: Iterable[CriteoRows], path: Path, most: int = sys.maxsize
) -> tuple[list[int], list[int]]:
    """Write the run of each table over the first `most` samples, table after table.

    Missing ids are not counted. Returns distinct and missing ids by table.
    """
    found, absent = [[np.empty(0, np.uint8)] for _ in range(IDS)], [0] * IDS
    for rows in pieces:
        ids, missing = rows.ids[:most], None if rows.missing is None else rows.missing[:most]
        most -= len(ids)
        for table in range(IDS):
            column = ids[:, table]
            if missing is not None:
                column = column[missing & np.uint32(1 << table) == 0]
            found[table].append(column)
            absent[table] += len(ids) - len(column)
    lengths = []
    with path.open("wb") as file:
        for columns in found:
            run = counted(np.concatenate(columns))
            run.tofile(file)
            lengths.append(len(run))
    return lengths, absent


@dataclass(frozen=True)
class Run:
    """A run of one table: entries [start, stop) of the file at `path`."""

    path: Path
    start: int
    stop: int

    def read(self, start: int, most: int) -> np.ndarray:
        """At most `most` entries from `start` on."""
        return np.fromfile(
            self.path, ENTRY, min(most, self.stop - start), offset=start * ENTRY.itemsize
        )

    @classmethod
    def write(cls, path: Path, pieces: Iterable[np.ndarray]) -> Run:
        """The run that consists of `pieces`, in a file of its own."""
        length = 0
        with path.open("wb") as file:
            for entries in pieces:
                entries.tofile(file)
                length += len(entries)
        return cls(path, 0, length)


def fewer_runs(runs: Sequence[Run], folder: Path) -> Sequence[Run]:
    """At most `FAN_IN` runs that say the same; new ones are written into `folder`."""
    while len(runs) > FAN_IN:
        groups = [runs[at : at + FAN_IN] for at in range(0, len(runs), FAN_IN)]
        runs = [
            Run.write(folder / f"{len(runs)}-{number}", merge_runs(group, MOST))
            for number, group in enumerate(groups)
        ]
    return runs


def merge_runs(runs: Sequence[Run], most: int) -> Iterator[np.ndarray]:
    """All runs as one, piece by piece.

    About `most` entries are held at a time (before equal ones are joined), or one of each run where
    that is more.
    """
    each = max(1, most // max(1, len(runs)))
    held, places = [np.empty(0, ENTRY)] * len(runs), [run.start for run in runs]
    while True:
        for at, run in enumerate(runs):
            more = run.read(places[at], each - len(held[at]))
            held[at], places[at] = np.concatenate((held[at], more)), places[at] + len(more)
        if not any(map(len, held)):
            return
        # Nothing is smaller than this in what is not read yet.
        lasts = [h["id"][-1] for h, p, run in zip(held, places, runs, strict=True) if p < run.stop]
        bound = min(lasts, default=np.uint64(2**64 - 1))
        cuts = [int(np.searchsorted(entries["id"], bound, side="right")) for entries in held]
        yield joined([entries[:cut] for entries, cut in zip(held, cuts, strict=True)])
        held = [entries[cut:] for entries, cut in zip(held, cuts, strict=True)]


_CHUNK = 1 << 20
"""Entries that are handled at once."""


@dataclass
class TableTask:
    """Count table number `table` over `runs`. `missing`: training samples without an id."""

    table: int
    runs: list[Run]
    missing: int


def table_folder(settings: PreprocessSettings, table: int) -> Path:
    """Work files of one table; the number of its rows is in `report.json` when all is written."""
    return settings.work / "tables" / f"{table:02d}"


def build_table(settings: PreprocessSettings, task: TableTask) -> None:
    """Count one table, and make its vocabulary where its ids are not rows already."""
    table, folder = task.table, table_folder(settings, task.table)
    counts = Path(settings.output, f"counts/cat_{table}.npy")
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    counts.parent.mkdir(exist_ok=True)
    entries = merge_runs(fewer_runs(task.runs, folder / "runs"), MOST)
    if settings.rows is None:
        rows = _vocabulary(settings, task, entries, counts)
    else:
        rows = settings.rows[table]
        array = np.lib.format.open_memmap(counts, "w+", np.int64, (rows,))
        for some in entries:
            array[some["id"]] = some["count"]  # rows that never occur stay 0
    shutil.rmtree(folder / "runs")
    bag = settings.multi_hot[table] if settings.multi_hot else 1
    if bag > 1:  # counts of the ids in bags, from those of the ids that these come from
        single, of_bags = np.load(counts, mmap_mode="r"), folder / "counts.npy"
        total = np.lib.format.open_memmap(of_bags, "w+", np.int64, single.shape)
        step = max(1, _CHUNK // bag)
        for start in range(0, rows, step):
            ids = start + np.flatnonzero(single[start : start + step])
            np.add.at(total, bags(ids, table, rows, bag), single[ids][:, None])
        of_bags.rename(counts)
    write_json(folder / "report.json", rows)


def _vocabulary(
    settings: PreprocessSettings, task: TableTask, entries: Iterable[np.ndarray], path: Path
) -> int:
    """The vocabulary, sorted by id with the row of each, and counts by row, to `path`; its rows."""
    folder, outside = table_folder(settings, task.table), 0
    histogram = np.empty(0, ENTRY)  # of the counts

    def frequent() -> Iterator[np.ndarray]:
        nonlocal outside, histogram
        for some in entries:
            keep = some["count"] >= settings.min_count
            outside += int(some["count"][~keep].sum())
            histogram = joined((histogram, counted(some["count"][keep])))
            yield some[keep]

    known = Run.write(folder / "known", frequent())
    total = FIRST + known.stop
    by_row = np.lib.format.open_memmap(path, "w+", np.int64, (total,))
    by_row[:FIRST] = [outside, task.missing]
    last = known.read(max(0, known.stop - 1), 1)["id"]
    dtype = np.uint32 if last.max(initial=0) < 2**32 else np.uint64
    named = Path(settings.output, f"vocabulary/cat_{task.table}.npy")
    named.parent.mkdir(exist_ok=True)
    names = np.lib.format.open_memmap(named, "w+", dtype, (total,))
    # Rows of a count begin after all rows of higher counts.
    begin = total - np.cumsum(histogram["count"])
    with (folder / "ids").open("wb") as ids_file, (folder / "rows").open("wb") as rows_file:
        for start in range(0, known.stop, _CHUNK):
            some = known.read(start, _CHUNK)
            counts, kinds, times = np.unique(some["count"], return_inverse=True, return_counts=True)
            at = np.searchsorted(histogram["id"], counts.astype(np.uint64))
            rows = np.empty(len(some), np.int64)
            rows[np.argsort(kinds, kind="stable")] = np.arange(len(some)) + np.repeat(
                begin[at] - (np.cumsum(times) - times), times
            )
            begin[at] += times
            names[rows], by_row[rows] = some["id"], some["count"]
            some["id"].tofile(ids_file)
            rows.tofile(rows_file)
    return total


def make_arrays(settings: PreprocessSettings, samples: int, table_rows: Sequence[int]) -> None:
    """Files of the final shape for labels uint8, dense float32 and ids, without their values."""
    for name, dtype, shape in (
        ("labels", np.uint8, (samples,)),
        ("dense", np.float32, (samples, INTEGERS)),
        ("ids", id_dtype(table_rows), (samples, IDS)),
    ):
        np.lib.format.open_memmap(Path(settings.output, f"{name}.npy"), "w+", dtype, shape)


def assemble_part(
    settings: PreprocessSettings, table_rows: Sequence[int], part: tuple[str, int, int]
) -> None:
    """Write one part's samples to their place in the arrays, and then remove their file: without it
    a part is written. `part`: its name, the place of its first sample, and how many they are."""
    name, first, _ = part
    path = part_file(settings, name, ".rows")
    for rows in read_rows(path):
        ids = rows.ids
        if rows.missing is not None:
            ids = _rows_of(settings, ids, rows.missing, table_rows)
        for kind, values in (("labels", rows.labels), ("dense", rows.dense), ("ids", ids)):
            array = Path(settings.output, f"{kind}.npy")
            with array.open("r+b") as file:  # no map, which a full disk would end with a signal
                np.lib.format.read_magic(file)
                np.lib.format.read_array_header_1_0(file)
                file.seek(file.tell() + first * values[:1].nbytes)
                values.tofile(file)
        first += len(ids)
    path.unlink()


def _rows_of(
    settings: PreprocessSettings,
    values: np.ndarray,
    missing: np.ndarray,
    table_rows: Sequence[int],
) -> np.ndarray:
    """Rows `[n, 26]` of id values by the vocabularies."""
    rows = np.empty(values.shape, id_dtype(table_rows))
    for table in range(IDS):
        found = _look_up(values[:, table], table_folder(settings, table))
        found[(missing >> np.uint32(table)) & np.uint32(1) == 1] = MISSING
        rows[:, table] = found
    return rows


def _look_up(values: np.ndarray, folder: Path) -> np.ndarray:
    """Rows of `values` `[n]` by the sorted vocabulary of a table; OUT_OF_VOCABULARY for others."""
    if not (folder / "ids").stat().st_size or not len(values):
        return np.full(len(values), OUT_OF_VOCABULARY)
    known, rows = (
        np.memmap(folder / "ids", np.uint64, "r"),
        np.memmap(folder / "rows", np.int64, "r"),
    )
    coded = pa.array(np.ascontiguousarray(values)).dictionary_encode()
    distinct, codes = coded.dictionary.to_numpy(), coded.indices.to_numpy()
    order = np.argsort(distinct)  # neighbours lie on the same pages of the vocabulary
    wanted = distinct[order].astype(np.uint64)
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = np.empty(len(distinct), np.int64)
    found[order] = np.where(known[places] == wanted, rows[places], OUT_OF_VOCABULARY)
    return found[codes]
