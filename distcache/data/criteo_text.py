"""Criteo text parsed: blocks of lines to arrays.

A line is `label`, 13 integers, 26 hexadecimal ids, separated by tabs; integers and ids may be
empty. `parse_line` is the definition. pyarrow reads whole blocks (it splits fields and reads
integers; ids are decoded here); a block in which it meets something odd is halved, until the few
lines around that are left to `parse_line`.

An id becomes a row of its table at once (its value modulo the table's rows), or stays a value for
a vocabulary, which knows missing ids from the id 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from distcache.data.criteo_folder import IDS, INTEGERS
from distcache.data.files import good_lines, show
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
_DIGITS = np.array([int(chr(at), 16) if chr(at) in string.hexdigits else 0 for at in range(256)])


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


def parse_line(
    line: bytes, table_rows: Sequence[int] | None
) -> tuple[int, list[int], list[int], int]:
    """Label, 13 integers and 26 rows or values of one line, without its line end, and which ids are
    missing (bit t: that of table t).

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
    integers, ids, missing = [], [], 0
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
        missing |= (not entry) << index
    return int(fields[0]), integers, ids, missing


def parse_blocks(
    blocks: Iterable[bytes],
    table_rows: Sequence[int] | None,
    on_error: Callable[[int, DataError], None],
) -> Iterator[tuple[CriteoRows, bytes]]:
    """The rows of `blocks` of whole lines, piece by piece, each with the text that it is of.

    `table_rows`: of the 26 tables, or None for values. A malformed line is left out after
    `on_error(line number from 1 over all blocks, error)` returned; `on_error` may raise instead.
    """
    line = 1
    for block in blocks:
        todo = [block]
        while todo:
            text = todo.pop()
            rows, count = _parse_columns(text, table_rows), text.count(b"\n")
            cut = text.find(b"\n", len(text) // 2) + 1
            if rows is None and count > _FEW and 0 < cut < len(text):
                todo += [text[cut:], text[:cut]]
                continue
            yield rows or _parse_each(text, table_rows, on_error, line), text
            line += count


def _parse_each(
    text: bytes,
    table_rows: Sequence[int] | None,
    on_error: Callable[[int, DataError], None],
    first: int,
) -> CriteoRows:
    """The rows of lines by their definition; `first`: number of the first line."""
    parse = partial(parse_line, table_rows=table_rows)
    found = list(good_lines(text, first, parse, on_error))
    labels, integers, ids, missing = zip(*found, strict=True) if found else ((),) * 4
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
    labels = pc.index_in(columns[0], pa.array([b"0", b"1"]))
    dense = None if labels.null_count else _dense(columns[1 : 1 + INTEGERS])
    ids = None if dense is None else _ids(columns[1 + INTEGERS :], table_rows)
    return None if ids is None else CriteoRows(labels.to_numpy().astype(np.uint8), dense, *ids)


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
    missing = np.zeros(count, dtype=np.uint32)
    for index, column in enumerate(columns):
        offsets, data = _binary(column)
        lengths = np.diff(offsets)
        values = _hexadecimal(lengths, offsets[1:] - offsets[0], data)
        if values is None:
            return None
        if table_rows is None:
            missing |= (lengths == 0).astype(np.uint32) << np.uint32(index)
            ids = ids.astype(np.result_type(ids, values), copy=False)
        elif int(table_rows[index]) <= np.iinfo(values.dtype).max:  # else they are rows already
            values = values % values.dtype.type(table_rows[index])
        ids[:, index] = values
    return ids, missing if table_rows is None else None


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
        values = np.zeros(len(lengths), dtype=np.uint32)
        values[eights] = np.frombuffer(bytes.fromhex(data.tobytes().decode()), dtype=">u4")
        return values
    if longest > 16:
        return None
    values = np.zeros(len(lengths), np.uint64 if longest > 8 else np.uint32)
    for place in range(longest):  # from the last digit on
        some = np.flatnonzero(lengths > place)
        digits = _DIGITS[data[ends[some] - 1 - place]].astype(values.dtype)
        values[some] |= digits << values.dtype.type(4 * place)
    return values
