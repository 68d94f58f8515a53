"""Criteo text parsed: blocks of lines to arrays, and parts of the text as raw files.

A line is `label`, 13 integers, 26 hexadecimal ids, separated by tabs; integers and ids may be
empty. `parse_line` is the definition. pyarrow reads whole blocks (it splits fields and reads
integers; ids are decoded here); a block in which it meets something odd is halved, until the few
lines around that are left to `parse_line`.

An id becomes a row of its table at once (its value modulo the table's rows), or stays a value for
a vocabulary, which knows missing ids from the id 0.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from distcache.data.files import InputFile, read_json, read_range, show, whole_lines, write_json
from distcache.data.raw.settings import IDS, INTEGERS
from distcache.errors import DataError

FIELDS = 1 + INTEGERS + IDS
_HEX_DIGITS, _DECIMAL_DIGITS = 16, 18
_INTEGER = re.compile(rb"(-?)0*([0-9]{1,%d})" % _DECIMAL_DIGITS)
_HEX = re.compile(rb"[0-9a-fA-F]+")

MAX_LINE = 1 << 20
"""Bytes of the longest line; a longer one is malformed, whatever is in it."""
_FEW = 64
"""Lines that are parsed one by one when a block has something odd in it."""
_ALLOWED = b"0123456789abcdefABCDEF-\t\n\r"
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


@dataclass(frozen=True)
class CriteoRows:
    """Parsed lines: `labels` uint8 `[n]`, `dense` float32 `[n, 13]` (missing: 0), `ids` `[n, 26]`.

    Ids are rows of their tables, int32 where the tables allow it, else int64; or values, uint32
    where all fit, else uint64, and then `missing` uint32 `[n]` says which were empty (value 0): bit
    t that of table t.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    missing: np.ndarray | None = None


def dense_of(integers: np.ndarray) -> np.ndarray:
    """Dense features float32 of int64 `integers` of any shape: log(1 + max(x, 0))."""
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def id_dtype(table_rows: Sequence[int] | None) -> np.dtype:
    """The narrowest of int32 and int64 that holds every row of the tables; uint32 for values, the
    first choice."""
    if table_rows is None:
        return np.dtype(np.uint32)
    return np.dtype(np.int32 if int(max(table_rows)) <= 2**31 else np.int64)


def parse_line(line: bytes, table_rows: Sequence[int] | None) -> tuple[int, list[int], list[int]]:
    """Label, 13 integers and 26 rows or values of one line, without its line end.

    An id becomes its hexadecimal value modulo its table's rows, an empty one row 0; without
    `table_rows` its value. A missing integer is 0. Raises DataError that names the field.
    """
    if len(line) > MAX_LINE:
        raise DataError(f"the line is longer than {MAX_LINE:,} bytes")
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != FIELDS:
        raise DataError(
            f"{len(fields)} tab-separated fields instead of {FIELDS} "
            f"(label, {INTEGERS} integers, {IDS} ids)"
        )
    if fields[0] not in (b"0", b"1"):
        raise DataError(f"field 1 (label) is {show(fields[0])}, not 0 or 1")
    integers, ids = [], []
    for index, entry in enumerate(fields[1 : 1 + INTEGERS]):
        number = _INTEGER.fullmatch(entry or b"0")
        if number is None:
            raise DataError(
                f"field {2 + index} (integer {index + 1}) is {show(entry)}, not an integer of "
                f"at most {_DECIMAL_DIGITS} digits"
            )
        # Without its leading zeros: Python reads at most 4,300 digits.
        integers.append(int(number[1] + number[2]))
    for index, entry in enumerate(fields[1 + INTEGERS :]):
        if entry and not _HEX.fullmatch(entry):
            raise DataError(
                f"field {2 + INTEGERS + index} (id {index + 1}, feature cat_{index}) is "
                f"{show(entry)}, not hexadecimal"
            )
        if table_rows is None and len(entry.lstrip(b"0")) > _HEX_DIGITS:
            raise DataError(
                f"field {2 + INTEGERS + index} (id {index + 1}, feature cat_{index}) is "
                f"{show(entry)}, longer than the {_HEX_DIGITS} digits that a vocabulary holds"
            )
        value = int(entry or b"0", 16)
        ids.append(value if table_rows is None else value % int(table_rows[index]))
    return int(fields[0]), integers, ids


def parse_blocks(
    blocks: Iterable[bytes],
    table_rows: Sequence[int] | None,
    on_error: Callable[[int, DataError], None],
) -> Iterator[tuple[CriteoRows, bytes]]:
    """The rows of `blocks` of whole lines, piece by piece, each with the text that it is of.

    `table_rows`: of the 26 tables, or None for values. A malformed line is left out after
    `on_error(line number from 0 over all blocks, error)` returned; `on_error` may raise instead.
    """
    lines = 0
    for block in blocks:
        todo = [block]
        while todo:
            text = todo.pop()
            rows, count = _parse_columns(text, table_rows), text.count(b"\n")
            cut = text.find(b"\n", len(text) // 2) + 1
            if rows is None and count > _FEW and 0 < cut < len(text):
                todo += [text[cut:], text[:cut]]
                continue
            yield rows or _parse_each(text, table_rows, on_error, lines), text
            lines += count


def _parse_each(
    text: bytes,
    table_rows: Sequence[int] | None,
    on_error: Callable[[int, DataError], None],
    first: int,
) -> CriteoRows:
    """The rows of lines by their definition; `first`: number of the first line."""
    labels, integers, ids, missing = [], [], [], []
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=first):
        try:
            label, own, values = parse_line(line, table_rows)
        except DataError as error:
            on_error(number, error)
            continue
        labels.append(label)
        integers.append(own)
        ids.append(values)
        entries = line.removesuffix(b"\r").split(b"\t")[-IDS:]
        missing.append(sum(1 << table for table, entry in enumerate(entries) if not entry))
    wide = table_rows is None and any(max(values) >= 2**32 for values in ids)
    return CriteoRows(
        np.array(labels, dtype=np.uint8),
        dense_of(np.array(integers, dtype=np.int64).reshape(-1, INTEGERS)),
        np.array(ids, dtype=np.uint64 if wide else id_dtype(table_rows)).reshape(-1, IDS),
        np.array(missing, dtype=np.uint32) if table_rows is None else None,
    )


def _parse_columns(block: bytes, table_rows: Sequence[int] | None) -> CriteoRows | None:
    """The rows of a block as those of `parse_line` for every line; None: something in it is odd."""
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
        if len(values) and max(-int(values.min()), int(values.max())) >= 10**_DECIMAL_DIGITS:
            return None
        dense[:, index] = dense_of(values)
    return dense


def _ids(
    columns: list[pa.Array], table_rows: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Rows `[n, 26]`; or values, and which are missing (bits of uint32 `[n]`)."""
    count = len(columns[0])
    ids = np.empty((count, IDS), dtype=id_dtype(table_rows))
    missing = np.zeros(count, dtype=np.uint32) if table_rows is None else None
    for index, column in enumerate(columns):
        offsets, data = _binary(column)
        lengths = np.diff(offsets)
        values = _hexadecimal(lengths, offsets[1:] - offsets[0], data)
        if values is None:
            return None
        if table_rows is not None:
            rows = int(table_rows[index])  # in the width of the values where that is exact
            beyond = rows > np.iinfo(values.dtype).max
            ids[:, index] = values if beyond else values % values.dtype.type(rows)
            continue
        if missing is not None:
            missing |= (lengths == 0).astype(np.uint32) << np.uint32(index)
        if values.dtype == np.uint64 and ids.dtype == np.uint32:
            ids = ids.astype(np.uint64)
        ids[:, index] = values
    return ids, missing


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
    return np.frombuffer(bytes.fromhex(words.tobytes().decode()), dtype=">u4").astype(np.uint32)


PIECE = 1 << 18
"""Samples that are read back at once."""


class PartWriter:
    """Writes blocks of rows to the files of a part in `folder`.

    Ids are written as `dtype`; values (uint32) are widened to uint64 when one needs it.
    `samples`: rows written so far.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self.folder, self.samples, self.dtype = folder, 0, dtype
        names = ("labels", "dense", "ids", "missing")
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in names}

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, rows: CriteoRows) -> None:
        """Write one block."""
        narrow = self.dtype == np.uint32 and rows.ids.dtype == np.uint64
        if narrow and int(rows.ids.max(initial=0)) >= 2**32:
            self._widen()
        rows.labels.tofile(self._files["labels"])
        rows.dense.tofile(self._files["dense"])
        rows.ids.astype(self.dtype, copy=False).tofile(self._files["ids"])
        if rows.missing is not None:
            rows.missing.tofile(self._files["missing"])
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


def read_pieces(folder: Path, samples: int, id_dtype: np.dtype) -> Iterator[tuple[int, CriteoRows]]:
    """All samples of a part, `PIECE` at a time, each with the number of its first."""
    packed = (folder / "missing.bin").stat().st_size > 0
    for first in range(0, samples, PIECE):
        count = min(PIECE, samples - first)

        def some(name: str, dtype: type | np.dtype, width: int, at=first, n=count) -> np.ndarray:
            path, offset = folder / f"{name}.bin", at * width * np.dtype(dtype).itemsize
            return np.fromfile(path, dtype, n * width, offset=offset)

        yield (
            first,
            CriteoRows(
                some("labels", np.uint8, 1),
                some("dense", np.float32, INTEGERS).reshape(count, INTEGERS),
                some("ids", id_dtype, IDS).reshape(count, IDS),
                some("missing", np.uint32, 1) if packed else None,
            ),
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
    """Parse a part into its folder, or up to its first malformed line unless they are skipped.

    A part is complete when its folder has its final name; `report.json` in it says what it holds.
    Raises DataError for a file that changed meanwhile.
    """
    partial = Path(task.folder, f"{task.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    bad: list[tuple[int, str]] = []
    text_bytes = lines = bad_lines = 0

    def on_error(line: int, error: DataError) -> None:
        nonlocal bad_lines
        bad_lines += 1
        if len(bad) < SHOWN:
            bad.append((line, str(error)))

    chunks = read_range(task.file, BLOCK_BYTES, task.start, task.stop)
    blocks = whole_lines(chunks, MAX_LINE)
    with PartWriter(partial, id_dtype(task.table_rows)) as part:
        for rows, text in parse_blocks(blocks, task.table_rows, on_error):
            text_bytes += len(text)
            lines += text.count(b"\n") + (not text.endswith(b"\n"))
            if bad and not task.skip_bad:
                break
            part.add(rows)
    report = PartReport(task.name, text_bytes, lines, part.samples, bad_lines, bad, part.dtype.str)
    if bad and not task.skip_bad:
        shutil.rmtree(partial)
        return replace(report, complete=False)
    lengths, missing = write_runs(partial, partial, part.samples, part.dtype)
    report = replace(report, lengths=lengths, missing=missing)
    write_json(partial / "report.json", asdict(report))
    partial.rename(Path(task.folder, task.name))
    return report


def read_report(folder: Path) -> PartReport | None:
    """The report of a complete part; None where there is none."""
    found = read_json(folder / "report.json")
    return found and PartReport(**found)
