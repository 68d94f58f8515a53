"""User-item interactions as text: lines `user item item ...`, or CSV of user, item, rating, time.

`line_numbers` and `csv_numbers` are the definitions, line by line; blocks of clean CSV go through
pyarrow, any other block through the definition.
"""

from __future__ import annotations

import io
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.data.files import InputFile
from distcache.data.lines import BadLines, read_lines, show
from distcache.errors import DataError

_LINE = re.compile(rb"[ \t]*0*[0-9]{1,18}([ \t]+0*[0-9]{1,18})+[ \t]*")
_ID = re.compile(rb"0*[0-9]{1,18}")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FIELDS = ("user", "item", "rating", "time")
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Interactions:
    """P interactions in file order: `users`, `items` int64 `[P]`; `ratings`, `times` float64
    `[P]`, or None where the files have none."""

    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray | None = None
    times: np.ndarray | None = None

    def take(self, keep: np.ndarray) -> Interactions:
        """Those that a mask or an index names."""
        parts = (self.users, self.items, self.ratings, self.times)
        return Interactions(*(None if part is None else part[keep] for part in parts))


def line_numbers(line: bytes) -> list[int]:
    """User and items of one line; DataError that says what is wrong with it."""
    if _LINE.fullmatch(line):
        return [_whole(field) for field in line.split()]
    fields = line.split()
    if not fields:
        raise DataError("the line is empty; write a user and its items")
    for field, name in zip(fields, ("user", *["item"] * len(fields)), strict=False):
        if not _ID.fullmatch(field):
            raise DataError(
                f"{name} {show(field)} is not a whole number from 0 to 10^18 - 1{_csv_hint(line)}"
            )
    if len(fields) == 1:
        raise DataError(f"user {show(fields[0])} has no items")
    raise DataError("fields are separated by something other than spaces and tabs")


def _csv_hint(line: bytes) -> str:
    """A hint where a line looks like CSV."""
    for delimiter in ("::", ",", ";", "|"):
        if delimiter.encode() in line:
            given = "" if delimiter == "," else f" data.delimiter='{delimiter}'"
            return f"; for CSV give data.format=csv{given}"
    return ""


def csv_numbers(line: bytes, delimiter: bytes, fields: int) -> tuple[int, int, float, float]:
    """User, item, rating and time (0 where the line has none) of one line of `fields` fields."""
    parts = line.split(delimiter)
    if len(parts) != fields:
        raise DataError(
            f"{len(parts)} fields instead of {fields} ({', '.join(_FIELDS[:fields])}), separated "
            f"by {show(delimiter)}"
        )
    for part, name in zip(parts[:2], _FIELDS, strict=False):
        if not _ID.fullmatch(part):
            raise DataError(f"{name} {show(part)} is not a whole number from 0 to 10^18 - 1")
    numbers = [0.0, 0.0]
    for at, (part, name) in enumerate(zip(parts[2:], _FIELDS[2:], strict=False)):
        numbers[at] = float(part) if _NUMBER.fullmatch(part) else math.nan
        if not math.isfinite(numbers[at]):
            raise DataError(f"{name} {show(part)} is not a finite number")
    return _whole(parts[0]), _whole(parts[1]), numbers[0], numbers[1]


def _whole(digits: bytes) -> int:
    """An id's number; Python reads at most 4,300 digits, and most of these may be zeros."""
    return int(digits[-18:])


def read_user_lines(files: Sequence[InputFile], bad: BadLines) -> Interactions:
    """The interactions of files of lines `user item item ...`."""
    users, items = array("q"), array("q")
    for file in files:
        for number, line in read_lines(file, bad):
            try:
                user, *own = line_numbers(line)
            except DataError as error:
                bad.add(file.path, number, str(error))
                continue
            items.extend(own)
            users.extend([user] * len(own))
    return Interactions(np.array(users, dtype=np.int64), np.array(items, dtype=np.int64))


def read_csv(files: Sequence[InputFile], delimiter: str, bad: BadLines) -> Interactions:
    """The interactions of CSV files; a first line without a single number is a header.

    All files have the number of fields (2 to 4) of the first line of the first.
    """
    separator, fields = delimiter.encode(), 0
    parts: list[np.ndarray] = []
    for file in files:
        header: bytes | None = None
        for first, block in _blocks(file, bad):
            if first == 1:
                line = block.split(b"\n", 1)[0].removesuffix(b"\r")
                fields = fields or _count_fields(file, line, separator)
                if not any(map(_NUMBER.fullmatch, line.split(separator))):
                    header, block = line, block[block.find(b"\n") + 1 or len(block) :]
                    first = 2
            numbers = _fast_block(block, separator, fields)
            if numbers is None:
                reader = _CsvBlock(file, separator, fields, header)
                numbers = reader.read(block, first, bad)
            parts.append(numbers)
    whole = np.concatenate(parts) if parts else np.zeros((0, 4))
    extra = [whole[:, at] if fields > at else None for at in (2, 3)]
    return Interactions(whole[:, 0].astype(np.int64), whole[:, 1].astype(np.int64), *extra)


def _count_fields(file: InputFile, line: bytes, separator: bytes) -> int:
    fields = line.count(separator) + 1
    if not 2 <= fields <= len(_FIELDS):
        raise DataError(
            f"{file.path}:1: {fields} fields separated by {show(separator)}; 2 to 4 are read: "
            f"{', '.join(_FIELDS)} (data.delimiter says what separates them)"
        )
    return fields


def _blocks(file: InputFile, bad: BadLines) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines) in blocks of about `_BLOCK_BYTES`."""
    block, first, lines = io.BytesIO(), 1, 0
    for number, line in read_lines(file, bad):
        if number != first + lines or block.tell() >= _BLOCK_BYTES:
            if lines:
                yield first, block.getvalue()
            block, first, lines = io.BytesIO(), number, 0
        block.write(line + b"\n")
        lines += 1
    if lines:
        yield first, block.getvalue()


def _fast_block(block: bytes, separator: bytes, fields: int) -> np.ndarray | None:
    """The numbers float64 `[n, 4]` of a block of plain decimal lines; None for any other."""
    if len(separator) != 1 or block.translate(None, b"0123456789.\n" + separator):
        return None
    import pyarrow as pa
    from pyarrow import csv

    types = dict(zip(_FIELDS[:fields], [pa.int64()] * 2 + [pa.float64()] * 2, strict=False))
    try:
        table = csv.read_csv(
            pa.BufferReader(block),
            csv.ReadOptions(use_threads=False, column_names=list(types), block_size=len(block) + 1),
            csv.ParseOptions(
                delimiter=separator.decode(), quote_char=False, ignore_empty_lines=False
            ),
            csv.ConvertOptions(column_types=types, null_values=[], strings_can_be_null=False),
        )
    except pa.ArrowInvalid:
        return None
    numbers = np.zeros((table.num_rows, 4))
    for at, column in enumerate(table.columns):
        numbers[:, at] = column.to_numpy()
    # float64 holds whole numbers up to 2^53: longer ids take the slow path, which refuses them, and
    # so do numbers too large for float64.
    good = (numbers[:, :2] < 2**53).all() and np.isfinite(numbers[:, 2:]).all()
    return numbers if good else None


@dataclass(frozen=True)
class _CsvBlock:
    """Reads a block line by line."""

    file: InputFile
    separator: bytes
    fields: int
    header: bytes | None

    def read(self, block: bytes, first: int, bad: BadLines) -> np.ndarray:
        """The numbers float64 `[n, 4]` of the good lines."""
        numbers = []
        for number, line in enumerate(block.split(b"\n")[:-1], start=first):
            try:
                if line == self.header:
                    raise DataError("the header stands here again")
                values = csv_numbers(line, self.separator, self.fields)
                if max(values[:2]) >= 2**53:
                    raise DataError(f"id {max(values[:2])} is beyond 2^53 - 1")
                numbers.append(values)
            except DataError as error:
                bad.add(self.file.path, number, str(error))
        return np.array(numbers, dtype=np.float64).reshape(-1, 4)
