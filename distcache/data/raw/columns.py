"""Criteo text to columns with pyarrow: the fast twin of `criteo_text.parse_block`.

`parse_columns` either understands a whole block, and then its rows are those of `parse_line` for
every line, or says nothing; the caller then takes the exact way. pyarrow splits fields and reads
integers; ids are decoded here, eight hexadecimal digits to a word.
"""

from __future__ import annotations

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
)

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
