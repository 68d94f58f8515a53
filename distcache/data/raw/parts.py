"""One part of the text, parsed: columns, arrays of its samples and counts of its ids."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from distcache.data.criteo_text import (
    FIELDS,
    IDS,
    INTEGERS,
    MAX_LINE,
    CriteoRows,
    dense_of,
    id_dtype,
    parse_block,
)
from distcache.data.files import InputFile
from distcache.data.raw.text import Block, read_range, whole_lines
from distcache.errors import DataError

# -----------------------------------------------------------------------------
# Criteo text to columns with pyarrow: the fast twin of `criteo_text.parse_block`.
#
# `parse_columns` either understands a whole block, and then its rows are those of `parse_line` for
# every line, or says nothing; the caller then takes the exact way. pyarrow splits fields and reads
# integers; ids are decoded here, eight hexadecimal digits to a word.

_ALLOWED = b"0123456789abcdefABCDEF-\t\n\r"
_MOST = 10**18
_NAMES = [f"c{index}" for index in range(FIELDS)]
_TYPES = {name: pa.binary() for name in _NAMES}
_TYPES |= {name: pa.int64() for name in _NAMES[1 : 1 + INTEGERS]}
_PARSE = pyarrow.csv.ParseOptions(
    delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False
)
_CONVERT = pyarrow.csv.ConvertOptions(
    column_types=_TYPES, check_utf8=False, null_values=[""], strings_can_be_null=False
)
_WORD = np.uint64
_ZEROS = _WORD(0x3030303030303030)


def parse_columns(block: bytes, table_rows: np.ndarray | None) -> CriteoRows | None:
    """The rows of a block of whole lines, as `parse_block` gives them; None: not understood.

    `integers` are dense features already, float32 `[n, 13]`. Without `table_rows` ids are values,
    uint32 where all fit, else uint64.
    """
    if block.translate(None, _ALLOWED) or (len(block) > MAX_LINE and b"0" * 64 in block):
        return None
    returns = block.count(b"\r")
    if returns and returns != block.count(b"\r\n"):
        return None
    reading = pyarrow.csv.ReadOptions(
        use_threads=False, block_size=len(block) + 1, column_names=_NAMES
    )
    try:
        table = pyarrow.csv.read_csv(pa.BufferReader(block), reading, _PARSE, _CONVERT)
    except pa.ArrowInvalid:
        return None
    columns = [chunked.combine_chunks() for chunked in table.columns]
    columns = [c.chunk(0) if isinstance(c, pa.ChunkedArray) else c for c in columns]
    labels, dense = _labels(columns[0]), _dense(columns[1 : 1 + INTEGERS])
    if labels is None or dense is None:
        return None
    ids = _ids(columns[1 + INTEGERS :], table_rows)
    return None if ids is None else CriteoRows(labels, dense, *ids)


def _labels(column: pa.Array) -> np.ndarray | None:
    """Labels uint8, where every field is `0` or `1`."""
    offsets, data = _binary(column)
    if len(data) != len(column) or (np.diff(offsets) != 1).any():
        return None
    labels = data - np.uint8(ord("0"))
    return None if (labels > 1).any() else labels


def _dense(columns: list[pa.Array]) -> np.ndarray | None:
    """Dense features float32 `[n, 13]`, where no integer has more than 18 digits."""
    dense = np.empty((len(columns[0]), INTEGERS), dtype=np.float32)
    for index, column in enumerate(columns):
        values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
        if len(values) and not -_MOST < int(values.min()) <= int(values.max()) < _MOST:
            return None
        dense[:, index] = dense_of(values)
    return dense


def _ids(
    columns: list[pa.Array], table_rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Rows (or values, and which are missing) `[n, 26]`."""
    count = len(columns[0])
    if table_rows is None:
        ids, missing = np.empty((count, IDS), dtype=np.uint32), np.empty((count, IDS), dtype=bool)
    else:
        ids, missing = np.empty((count, IDS), dtype=id_dtype(table_rows)), None
    for index, column in enumerate(columns):
        offsets, data = _binary(column)
        lengths = np.diff(offsets)
        values = _hexadecimal(lengths, offsets[1:] - offsets[0], data)
        if values is None:
            return None
        if table_rows is not None:
            ids[:, index] = _modulo(values, int(table_rows[index]))
            continue
        if missing is not None:
            missing[:, index] = lengths == 0
        if values.dtype == np.uint64 and ids.dtype == np.uint32:
            ids = ids.astype(np.uint64)
        ids[:, index] = values
    return ids, missing


def _modulo(values: np.ndarray, rows: int) -> np.ndarray:
    """Unsigned `values` modulo `rows`, in the width of the values where that is exact."""
    if rows > np.iinfo(values.dtype).max:
        return values
    return values % values.dtype.type(rows)


def _binary(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int32 `[n + 1]` and bytes uint8 of a binary column without nulls."""
    _, offsets, data = column.buffers()
    where = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    if data is None or len(column) == 0:
        return where, np.empty(0, dtype=np.uint8)
    return where, np.frombuffer(data, dtype=np.uint8)[where[0] : where[-1]]


def _hexadecimal(lengths: np.ndarray, ends: np.ndarray, data: np.ndarray) -> np.ndarray | None:
    """Values of hexadecimal fields, 0 where empty: uint32, or uint64 where one needs it.

    None for a field with another character or of more than 16 digits. Field i is
    `data[ends[i] - lengths[i] : ends[i]]`.
    """
    if ((data == ord("-")) | (data == ord("\r"))).any():
        return None
    longest = int(lengths.max(initial=0))
    eights = lengths == 8
    if longest <= 8 and int(eights.sum()) * 8 == len(data):
        values = _decode(data.view("<u8"))
        if len(values) == len(lengths):
            return values
        spread = np.zeros(len(lengths), dtype=np.uint32)
        spread[eights] = values
        return spread
    if longest > 16:
        return None
    padded = np.concatenate((np.full(16, ord("0"), dtype=np.uint8), data))
    low = _decode(_windows(padded, ends, np.minimum(lengths, 8)))
    if longest <= 8:
        return low
    high = _decode(_windows(padded, ends - 8, np.maximum(lengths - 8, 0)))
    return (high.astype(np.uint64) << _WORD(32)) | low


def _windows(padded: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The last `lengths` <= 8 characters before `ends`, filled up with zeros on the left.

    `ends` count from character 16 of `padded`.
    """
    words = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded.data, offset=0, strides=(1,))[
        ends.astype(np.int64) + 8
    ]
    shift = (8 * (8 - lengths)).astype(np.uint64)
    keep = np.where(lengths == 0, _WORD(0), ~_WORD(0) << np.minimum(shift, _WORD(63)))
    return (words & keep) | (_ZEROS & ~keep)


def _decode(words: np.ndarray) -> np.ndarray:
    """uint32 of eight hexadecimal digits each, the first in the lowest byte of a word."""
    digits = words & _WORD(0x0F0F0F0F0F0F0F0F)
    letters = words >> _WORD(6)
    letters &= _WORD(0x0101010101010101)
    letters *= _WORD(9)
    digits += letters
    for shift, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0xFFFFFFFF)):
        high = digits << _WORD(shift // 2)
        digits >>= _WORD(shift)
        digits |= high
        digits &= _WORD(mask)
    return digits.astype(np.uint32)


# -----------------------------------------------------------------------------
# The raw files of a part: written block by block, read back piece by piece, never held whole.

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


# -----------------------------------------------------------------------------
# One part of the text, parsed: arrays of its samples and counts of its ids, as raw files.
#
# A part is complete when its folder has its final name; `report.json` in it says what it holds.

BLOCK_BYTES = 4 << 20
"""Bytes of text that are parsed at once."""
SHOWN = 10
"""Malformed lines that a report quotes."""


@dataclass(frozen=True)
class PartTask:
    """Lines that begin in [start, stop) of `file`, to be parsed into `folder`/`name`.

    `table_rows`: rows that ids are hashed to, or None to keep values. `read_bytes`: of the input
    that this part stands for (compressed ones where the input is gzip).
    """

    name: str
    file: InputFile
    start: int
    stop: int
    folder: str
    table_rows: tuple[int, ...] | None
    skip_bad: bool
    read_bytes: int


@dataclass(frozen=True)
class PartReport:
    """What a part holds. `bad`: line (from 0 in the part) and reason of the first malformed ones.

    `lengths`: distinct ids of each table, `missing`: samples without an id of each table.
    A part with `complete` false was given up at its first malformed line.
    """

    name: str
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
    """Parse a part into its folder. Raises DataError for a file that changed meanwhile."""
    parser = _Parser(task)
    partial = Path(task.folder, f"{task.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with PartWriter(partial, id_dtype(task.table_rows)) as part:
        for rows in parser.rows():
            part.add(rows)
    if parser.bad and not task.skip_bad:
        shutil.rmtree(partial)
        return parser.report(complete=False)
    lengths, missing = write_runs(partial, partial, part.samples, part.dtype)
    report = parser.report(
        samples=part.samples,
        id_dtype=part.dtype.str,
        lengths=lengths,
        missing=missing,
    )
    (partial / "report.json").write_text(json.dumps(asdict(report)))
    partial.rename(Path(task.folder, task.name))
    return report


def read_report(folder: Path) -> PartReport | None:
    """The report of a complete part; None where there is none."""
    try:
        return PartReport(**json.loads((folder / "report.json").read_text()))
    except FileNotFoundError:
        return None


class _Parser:
    """Parses a part block by block, and notes malformed lines."""

    def __init__(self, task: PartTask) -> None:
        self.task = task
        rows = task.table_rows
        self.table_rows = None if rows is None else np.array(rows, dtype=np.int64)
        self.text_bytes = self.lines = self.bad_lines = 0
        self.bad: list[tuple[int, str]] = []

    def rows(self) -> Iterator[CriteoRows]:
        """Rows of each block, `integers` as dense features; ends at the first malformed line
        unless they are skipped."""
        task = self.task
        chunks = read_range(task.file, task.start, task.stop, BLOCK_BYTES)
        for block in whole_lines(chunks):
            self.text_bytes += len(block.text)
            rows = None if block.too_long else parse_columns(block.text, self.table_rows)
            if rows is None:
                rows, lines = self._exactly(block)
                self.lines += lines
            else:
                self.lines += len(rows.labels)
            if self.bad and not task.skip_bad:
                return
            yield rows

    def _exactly(self, block: Block) -> tuple[CriteoRows, int]:
        """The rows of a block that has something odd in it, and its number of lines."""

        def on_error(line: int, error: DataError) -> None:
            if len(self.bad) < SHOWN:
                self.bad.append((self.lines + line, str(block.explain(line, error))))
            self.bad_lines += 1

        rows, lines = parse_block(block.text, self.table_rows, on_error)
        return CriteoRows(rows.labels, dense_of(rows.integers), rows.ids, rows.missing), lines

    def report(
        self,
        samples: int = 0,
        id_dtype: str = "",
        lengths: list[int] | None = None,
        missing: list[int] | None = None,
        complete: bool = True,
    ) -> PartReport:
        """The report of what was parsed."""
        return PartReport(
            name=self.task.name,
            text_bytes=self.text_bytes,
            lines=self.lines,
            samples=samples,
            bad_lines=self.bad_lines,
            bad=self.bad,
            id_dtype=id_dtype,
            lengths=lengths or [],
            missing=missing or [],
            complete=complete,
        )
