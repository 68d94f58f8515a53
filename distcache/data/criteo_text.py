"""Parsing lines of the Criteo Kaggle format: whole blocks at once, odd lines one by one.

A line is `label`, 13 integers, 26 hexadecimal ids, separated by tabs; integers and ids may be
empty. `parse_line` is the definition; `parse_block` is the same on arrays and hands every line
that it does not understand to `parse_line`.

An id becomes a row of its table at once (its value modulo the table's rows), or stays a value for
a vocabulary, which knows missing ids from the id 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.data.files import show
from distcache.errors import DataError

INTEGERS, IDS = 13, 26
FIELDS = 1 + INTEGERS + IDS
_TAB, _NEWLINE, _RETURN, _MINUS = b"\t\n\r-"
_HEX_DIGITS, _DECIMAL_DIGITS = 16, 18
_INTEGER = re.compile(rb"(-?)0*([0-9]{1,%d})" % _DECIMAL_DIGITS)
_HEX = re.compile(rb"[0-9a-fA-F]+")

MAX_LINE = 1 << 20
"""Bytes of the longest line; a longer one is malformed, whatever is in it."""
TOO_LONG = f"the line is longer than {MAX_LINE:,} bytes"

_HEX_VALUE = np.full(256, 255, dtype=np.uint8)
for _digit in b"0123456789abcdefABCDEF":
    _HEX_VALUE[_digit] = int(chr(_digit), 16)
_DECIMAL_VALUE = np.where(_HEX_VALUE < 10, _HEX_VALUE, np.uint8(255))


@dataclass(frozen=True)
class CriteoRows:
    """Parsed lines: `labels` uint8 `[n]`, `integers` int64 `[n, 13]` (missing: 0), `ids` `[n, 26]`.

    Ids are rows of their tables, int32 where the tables allow it, else int64; or values, uint64,
    and then `missing` bool `[n, 26]` says which were empty (their value is 0).
    """

    labels: np.ndarray
    integers: np.ndarray
    ids: np.ndarray
    missing: np.ndarray | None = None

    def take(self, keep: np.ndarray) -> CriteoRows:
        """The rows that a mask or an index names."""
        missing = None if self.missing is None else self.missing[keep]
        return CriteoRows(self.labels[keep], self.integers[keep], self.ids[keep], missing)


def dense_of(integers: np.ndarray) -> np.ndarray:
    """Dense features float32 of int64 `integers` of any shape: log(1 + max(x, 0))."""
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def id_dtype(table_rows: Sequence[int] | np.ndarray | None) -> np.dtype:
    """The narrowest of int32 and int64 that holds every row of the tables; uint64 for values."""
    if table_rows is None:
        return np.dtype(np.uint64)
    return np.dtype(np.int32 if int(max(table_rows)) <= 2**31 else np.int64)


def parse_line(line: bytes, table_rows: np.ndarray | None) -> tuple[int, list[int], list[int]]:
    """Label, 13 integers and 26 rows or values of one line (with or without its line end).

    An id becomes its hexadecimal value modulo its table's rows, an empty one row 0; without
    `table_rows` its value. A missing integer is 0. Raises DataError that names the field.
    """
    if len(line) > MAX_LINE:
        raise DataError(TOO_LONG)
    fields = _fields(line)
    if len(fields) != FIELDS:
        raise DataError(
            f"{len(fields)} tab-separated fields instead of {FIELDS} "
            f"(label, {INTEGERS} integers, {IDS} ids)"
        )
    if fields[0] not in (b"0", b"1"):
        raise DataError(f"field 1 (label) is {show(fields[0])}, not 0 or 1")
    integers, ids = [], []
    for index, field in enumerate(fields[1 : 1 + INTEGERS]):
        number = _INTEGER.fullmatch(field or b"0")
        if number is None:
            raise DataError(
                f"field {2 + index} (integer {index + 1}) is {show(field)}, not an integer of "
                f"at most {_DECIMAL_DIGITS} digits"
            )
        # Without its leading zeros: Python reads at most 4,300 digits.
        integers.append(int(number[1] + number[2]))
    for index, field in enumerate(fields[1 + INTEGERS :]):
        if field and not _HEX.fullmatch(field):
            raise DataError(
                f"field {2 + INTEGERS + index} (id {index + 1}, feature cat_{index}) is "
                f"{show(field)}, not hexadecimal"
            )
        if table_rows is None and len(field.lstrip(b"0")) > _HEX_DIGITS:
            raise DataError(
                f"field {2 + INTEGERS + index} (id {index + 1}, feature cat_{index}) is "
                f"{show(field)}, longer than the {_HEX_DIGITS} digits that a vocabulary holds"
            )
        value = int(field or b"0", 16)
        ids.append(value if table_rows is None else value % int(table_rows[index]))
    return int(fields[0]), integers, ids


def parse_block(
    block: bytes, table_rows: np.ndarray | None, on_error: Callable[[int, DataError], None]
) -> tuple[CriteoRows, int]:
    """The rows of whole lines, and how many lines there were.

    `table_rows`: int64 `[26]`, or None for values. A malformed line is left out after
    `on_error(line number from 0, error)` returned; `on_error` may raise instead.
    """
    if not block.endswith(b"\n"):
        block += b"\n"
    text = np.frombuffer(block, dtype=np.uint8)
    separators = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    line_ends = np.flatnonzero(text[separators] == _NEWLINE)
    lines = len(line_ends)
    whole = np.flatnonzero(np.diff(line_ends, prepend=-1) == FIELDS)
    rows, understood = _parse_whole(text, separators, line_ends[whole], table_rows)
    labels = np.zeros(lines, dtype=np.uint8)
    integers = np.zeros((lines, INTEGERS), dtype=np.int64)
    ids = np.zeros((lines, IDS), dtype=id_dtype(table_rows))
    labels[whole], integers[whole], ids[whole] = rows.labels, rows.integers, rows.ids
    missing = np.zeros((lines, IDS), dtype=bool)
    if rows.missing is not None:
        missing[whole] = rows.missing
    keep = np.zeros(lines, dtype=bool)
    keep[whole] = understood
    ends = separators[line_ends] + 1
    for line in np.flatnonzero(~keep):
        start = int(ends[line - 1]) if line else 0
        try:
            text_line = block[start : int(ends[line])]
            labels[line], integers[line], ids[line] = parse_line(text_line, table_rows)
            missing[line] = [not field for field in _fields(text_line)[-IDS:]]
            keep[line] = True
        except DataError as error:
            on_error(int(line), error)
    rows = CriteoRows(labels, integers, ids, missing if table_rows is None else None)
    return rows if keep.all() else rows.take(keep), lines


def _parse_whole(
    text: np.ndarray, separators: np.ndarray, line_ends: np.ndarray, table_rows: np.ndarray | None
) -> tuple[CriteoRows, np.ndarray]:
    """Rows of lines with the right number of fields, and a mask of those understood.

    `line_ends` index `separators`, which are positions in `text`.
    """
    stops = separators[line_ends[:, None] + np.arange(1 - FIELDS, 1)]
    starts = np.empty_like(stops)
    starts[:, 1:] = stops[:, :-1] + 1
    first = line_ends - FIELDS
    starts[:, 0] = np.where(first < 0, 0, separators[np.maximum(first, 0)] + 1)
    stops[:, -1] -= (stops[:, -1] > starts[:, -1]) & (text[stops[:, -1] - 1] == _RETURN)
    label = text[starts[:, 0]]
    understood = (stops[:, 0] - starts[:, 0] == 1) & ((label == ord("0")) | (label == ord("1")))
    starts_int, stops_int = starts[:, 1 : 1 + INTEGERS], stops[:, 1 : 1 + INTEGERS]
    negative = text[starts_int] == _MINUS
    integers, good = _numbers(
        text, starts_int + negative, stops_int, _DECIMAL_VALUE, 10, _DECIMAL_DIGITS
    )
    good &= ~negative | (stops_int - starts_int > 1)
    understood &= good.all(axis=1)
    values, good = _numbers(
        text, starts[:, 1 + INTEGERS :], stops[:, 1 + INTEGERS :], _HEX_VALUE, 16, _HEX_DIGITS
    )
    understood &= good.all(axis=1)
    missing = None
    if table_rows is None:
        missing = stops[:, 1 + INTEGERS :] == starts[:, 1 + INTEGERS :]
    else:
        values = (values % table_rows.astype(np.uint64)).astype(id_dtype(table_rows))
    labels = (label == ord("1")).astype(np.uint8)
    integers = integers.view(np.int64)
    return CriteoRows(labels, np.where(negative, -integers, integers), values, missing), understood


def _numbers(
    text: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    digit_value: np.ndarray,
    base: int,
    most_digits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Values uint64 of the fields [starts, stops) of `text`, and a mask of the valid ones.

    An empty field is 0 and valid; one with another character or more than `most_digits` is not.
    """
    lengths = stops - starts
    good = lengths <= most_digits
    values = np.zeros(starts.shape, dtype=np.uint64)
    for place in range(min(most_digits, int(lengths.max(initial=0)))):
        inside = lengths > place
        digits = digit_value[text[np.minimum(starts + place, len(text) - 1)]]
        good &= ~inside | (digits != 255)
        longer = values * np.uint64(base) + digits
        values = np.where(inside, longer, values)
    return values, good


def _fields(line: bytes) -> list[bytes]:
    """The fields of a line with or without its line end."""
    return line.removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
