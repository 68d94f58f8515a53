"""Parquet files: what they hold, checked before training, and their row groups, read one by one."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from distcache.data.files import InputFile
from distcache.data.parquet_columns import kind_of
from distcache.errors import DataError

_OPEN_FILES = 16
"""Files that are kept open at a time."""

_DAMAGE = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError)
"""What pyarrow raises for a damaged file."""

NUMBERS = ("integer", "float", "bool")
IDS = ("integer", "string")


@dataclass(frozen=True)
class RowGroup:
    """One row group: its file, its number in it, its samples, and the file's row before it."""

    file: int
    number: int
    rows: int
    first_row: int


@dataclass(frozen=True)
class WantedColumn:
    """A column by name: the kinds that it may have, and whether it may be a list.

    `key`: the config key that names it, for messages.
    """

    name: str
    key: str
    kinds: tuple[str, ...]
    may_be_list: bool = False


class ParquetFiles:
    """Files of one schema, read by row groups; may be used by several threads.

    Raises DataError that names the file: not Parquet, a column that is missing or has another
    type, no row at all; later when a file vanishes, changes or turns out to be damaged.
    """

    def __init__(self, files: Sequence[InputFile], columns: Sequence[WantedColumn]) -> None:
        self.files = list(files)
        self._lock = threading.Lock()
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self.row_groups: list[RowGroup] = []
        first: dict[str, tuple[pa.DataType, InputFile]] = {}
        for index, file in enumerate(self.files):
            opened = self._opened(index)
            _check_schema(file, opened.schema_arrow, columns, first)
            before = 0
            for number in range(opened.metadata.num_row_groups):
                rows = opened.metadata.row_group(number).num_rows
                if rows > 0:
                    self.row_groups.append(RowGroup(index, number, rows, before))
                before += abs(rows)
            if before != opened.metadata.num_rows:
                raise _damaged(file, ValueError("its row groups do not add up to its rows"))
        if not self.row_groups:
            raise DataError(
                f"data.path: {self.files[0].path}"
                f"{f' and {len(self.files) - 1} more' if len(self.files) > 1 else ''}: no rows in "
                "any row group; write at least one sample"
            )

    def digest(self) -> str:
        """A digest of the files' lengths and footers, which have the place, size and statistics of
        every column of every row group: not of the values themselves."""
        found = hashlib.blake2b(digest_size=32)
        for file in self.files:
            with file.open() as stream:
                stream.seek(-8, os.SEEK_END)  # the footer's length and the magic number
                length = int.from_bytes(stream.read(4), "little")
                stream.seek(-8 - length, os.SEEK_END)
                found.update(f"{file.bytes} {length} ".encode() + stream.read(length))
        return found.hexdigest()

    def read(self, group: RowGroup, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        """Some columns of a row group, whole, by name."""
        file = self.files[group.file]
        with self._lock:
            opened = self._opened(group.file)
            try:
                table = opened.read_row_group(group.number, list(columns), use_threads=False)
                table.validate(full=True)  # damaged text and dictionaries
            except _DAMAGE as error:
                self._open.pop(group.file, None)
                file.check_unchanged()
                raise _damaged(file, error) from error
        file.check_unchanged()
        found = {name: _whole(table.column(name)) for name in columns}
        short = [name for name, column in found.items() if len(column) != group.rows]
        if short:
            raise DataError(
                f"{file.path}: column {short[0]!r} of row group {group.number} has "
                f"{len(found[short[0]])} values instead of {group.rows}: write the file again"
            )
        return found

    def _opened(self, index: int) -> pq.ParquetFile:
        """The file's reader, the same file as was found; the least recently used one is closed."""
        known = self._open.get(index)
        if known is not None:
            self._open.move_to_end(index)
            return known
        file = self.files[index]
        file.check_unchanged()
        try:
            opened = pq.ParquetFile(file.path, page_checksum_verification=True)
        except _DAMAGE as error:
            file.check_unchanged()
            raise _damaged(file, error) from error
        self._open[index] = opened
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return opened


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], type=column.type)
    return pa.concat_arrays(column.unify_dictionaries().chunks)


def _damaged(file: InputFile, error: BaseException) -> DataError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataError(
        f"{file.path} is no Parquet file that can be read ({first}); write it again, or leave it "
        "out of data.path"
    )


def _check_schema(
    file: InputFile,
    schema: pa.Schema,
    columns: Sequence[WantedColumn],
    first: dict[str, tuple[pa.DataType, InputFile]],
) -> None:
    """Every wanted column is there, once, of a kind that it may have, as in the first file."""
    for column in columns:
        count = schema.names.count(column.name)
        if count != 1:
            known = ", ".join(schema.names[:12]) + (" ..." if len(schema.names) > 12 else "")
            what = "no column" if count == 0 else f"{count} columns"
            raise DataError(
                f"{file.path} has {what} {column.name!r}, which {column.key} names; it has: {known}"
            )
        type_ = schema.field(column.name).type
        kind, is_list = kind_of(type_)
        if is_list and not column.may_be_list:
            raise DataError(
                f"{file.path}: column {column.name!r} ({column.key}) holds lists ({type_}); one "
                f"{' or '.join(column.kinds)} per sample is needed"
            )
        if kind not in column.kinds:
            raise DataError(
                f"{file.path}: column {column.name!r} ({column.key}) is {type_}; it must be "
                f"{' or '.join(column.kinds)}{', or a list of these' if column.may_be_list else ''}"
            )
        before, where = first.setdefault(column.name, (type_, file))
        if kind_of(before) != (kind, is_list):
            raise DataError(
                f"{file.path}: column {column.name!r} ({column.key}) is {type_}, but {before} in "
                f"{where.path}: write all files with one schema"
            )
