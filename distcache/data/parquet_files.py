"""Parquet files: what they hold, checked before training, and their columns as arrays."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distcache.data.files import InputFile
from distcache.errors import DataError

_HEX = re.compile(rb"[0-9a-fA-F]*")


def hashed(texts: Sequence[bytes], rows: int) -> np.ndarray:
    """Ids int64 `[n]` in [0, rows) of strings: the 8-byte BLAKE2b digest (RFC 7693, no key) of the
    UTF-8 bytes, read as a little-endian unsigned number, modulo the rows."""
    digests = b"".join([hashlib.blake2b(text, digest_size=8).digest() for text in texts])
    return (np.frombuffer(digests, dtype="<u8") % np.uint64(rows)).astype(np.int64)


def hexadecimal(texts: Sequence[bytes], rows: int) -> np.ndarray:
    """Ids int64 `[n]` in [0, rows): the hexadecimal value modulo the rows, an empty string row 0,
    as in Criteo's tab-separated files; -1 where a string is none."""
    matches = _HEX.fullmatch
    return np.array(
        [int(text or b"0", 16) % rows if matches(text) else -1 for text in texts], dtype=np.int64
    )


@dataclass(frozen=True)
class BagColumn:
    """The bags of one feature for n samples.

    `values`: int32 or int64 `[m]`; `offsets`: int64 `[n + 1]`, or None where every bag has one id
    (m = n); `weights`: float64 `[m]` or None.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    def take(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Ids int64 `[k]`, bag lengths int64 `[b]` and weights `[k]` of some samples, in order."""
        if self.offsets is None:
            at, lengths = samples, np.ones(len(samples), dtype=np.int64)
        else:
            starts = self.offsets[samples]
            lengths = self.offsets[samples + 1] - starts
            ends = np.cumsum(lengths)
            at = np.arange(ends[-1] if len(ends) else 0)
            at += np.repeat(starts - (ends - lengths), lengths)
        weights = None if self.weights is None else self.weights[at]
        return self.values[at].astype(np.int64, copy=False), lengths, weights


@dataclass(frozen=True)
class ColumnRules:
    """How values become numbers.

    `nulls`: `error`; `zero`: a dense value or weight that is missing is 0 (NaN counts as missing),
    an id is row 0, a list is an empty bag; `empty`: the same, but a missing id leaves its bag.
    `string_ids`: `hash` or `hex` (see `string_ids`); `on_bad_id`: an integer outside its table is
    an `error`, or taken modulo the table's rows (`hash`); `log1p`: dense values become
    log(1 + max(x, 0)).
    """

    nulls: str = "error"
    string_ids: str = "hash"
    on_bad_id: str = "error"
    log1p: bool = False


_KINDS = {
    "integer": (pa.types.is_integer,),
    "float": (pa.types.is_floating,),
    "bool": (pa.types.is_boolean,),
    "string": (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    ),
}
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def kind_of(type_: pa.DataType) -> tuple[str, bool]:
    """(`integer`, `float`, `bool`, `string` or the type's own name, whether it is a list)."""
    is_list = any(test(type_) for test in _LISTS)
    inner = type_.value_type if is_list else type_
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    for name, tests in _KINDS.items():
        if any(test(inner) for test in tests):
            return name, is_list
    return str(inner), is_list


_NULL = "there is no value (null); data.nulls=zero or data.nulls=empty says what to take"


@dataclass(frozen=True)
class Column:
    """A column of a row group, which `rules` turn into numbers.

    `path`, `name`, `first_row`: its file, its name and the file's row at which it begins, for
    messages. Every method raises DataError that names file, row (from 1) and column.
    """

    values: pa.Array
    path: Path
    name: str
    first_row: int
    rules: ColumnRules

    def refuse(
        self, bad: np.ndarray, what: Callable[[int], str], row_of: np.ndarray | None = None
    ) -> None:
        """Raise DataError where a value is `bad`: `what` says it of the first one, whose row in the
        column is `row_of` it (None: its own place)."""
        if bad.any():
            at = int(np.argmax(bad))
            row = self.first_row + int(at if row_of is None else row_of[at]) + 1
            raise DataError(f"{self.path}, row {row}, column {self.name!r}: {what(at)}")

    def labels(self) -> np.ndarray:
        """Labels uint8 `[n]`, each 0 or 1."""
        values, missing = _decoded(self.values)
        self.refuse(
            missing | ~((values == 0) | (values == 1)),
            lambda at: f"the label is {'null' if missing[at] else f'{values[at]:g}'}, not 0 or 1",
        )
        return values.astype(np.uint8)

    def dense(self) -> np.ndarray:
        """Dense values float64 `[n]` that float32 can hold."""
        values, missing = _floats(self.values)
        self._refuse_nulls(missing)
        if self.rules.log1p:
            values = np.log1p(np.maximum(values, 0.0))
        self.refuse(
            np.abs(values) > np.finfo(np.float32).max,
            lambda at: f"{values[at]} is not a finite number of float32; correct the data",
        )
        return values

    def bags(self, rows: int, weights: Column | None = None) -> BagColumn:
        """The bags of an id column over a table of `rows` rows; `weights`: of each id, or None."""
        flat, lengths = self._flat()
        row_of = _rows_of(lengths, len(self.values))
        ids, missing = self._ids(flat, rows, row_of)
        weight = None if weights is None else weights._weights(lengths)
        self._refuse_nulls(missing, row_of)
        if self.rules.nulls == "empty" and missing.any():
            lengths = np.bincount(row_of[~missing], minlength=len(self.values))
            ids, weight = ids[~missing], None if weight is None else weight[~missing]
        offsets = None if lengths is None else np.concatenate(([0], np.cumsum(lengths)))
        return BagColumn(ids.astype(np.int32 if rows <= 2**31 else np.int64), offsets, weight)

    def _refuse_nulls(self, missing: np.ndarray, row_of: np.ndarray | None = None) -> None:
        if self.rules.nulls == "error":
            self.refuse(missing, lambda at: _NULL, row_of)

    def _flat(self) -> tuple[pa.Array, np.ndarray | None]:
        """The values in a row and the lengths of the lists int64 `[n]`; None if there are none."""
        column = self.values
        if not kind_of(column.type)[1]:
            return column, None
        self._refuse_nulls(column.is_null().to_numpy(zero_copy_only=False))
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return column.flatten(), lengths.astype(np.int64)

    def _weights(self, lengths: np.ndarray | None) -> np.ndarray:
        """Weights float64, one per id, for bags of `lengths` (None: one id each)."""
        flat, own = self._flat()
        kinds = ("one number", "a list")
        self.refuse(
            np.array([(own is None) != (lengths is None)]),
            lambda at: (
                f"the weights are {kinds[own is not None]} per sample, the ids are "
                f"{kinds[lengths is not None]}: give one weight for each id"
            ),
        )
        if own is not None and lengths is not None:
            self.refuse(
                own != lengths,
                lambda at: f"{own[at]} weights for {lengths[at]} ids: give one weight for each id",
            )
        values, missing = _floats(flat)
        far = np.abs(values) > np.finfo(np.float32).max
        text = "the weight {} is not a finite number of float32; correct the data"
        self.refuse(
            far | (missing if self.rules.nulls == "error" else False),
            lambda at: _NULL if missing[at] else text.format(values[at]),
            _rows_of(own, len(self.values)),
        )
        return values

    def _ids(self, flat: pa.Array, rows: int, row_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 in [0, rows), 0 where null, and a mask of the nulls; `row_of`: row of each."""
        if kind_of(flat.type)[0] == "string":
            return self._string_ids(flat, rows, row_of)
        values, missing = _decoded(flat)
        bad = values >= rows
        if values.dtype.kind == "i":
            bad |= values < 0
        if self.rules.on_bad_id == "error":
            self.refuse(
                bad,
                lambda at: (
                    f"id {values[at]} is not in its table, which has {rows} rows (ids 0 to "
                    f"{rows - 1}); {int(bad.sum())} such ids in this row group. Correct the data "
                    "or data.table_rows, or take such ids modulo the rows with data.on_bad_id=hash"
                ),
                row_of,
            )
        if bad.any():
            wide = values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
            values = wide % wide.dtype.type(rows)
        return values.astype(np.int64), missing

    def _string_ids(
        self, flat: pa.Array, rows: int, row_of: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for strings: every distinct one is turned into an id once."""
        coded = flat if pa.types.is_dictionary(flat.type) else flat.dictionary_encode()
        words = [
            text.encode() if isinstance(text, str) else text
            for text in coded.dictionary.to_pylist()
        ]
        convert = hashed if self.rules.string_ids == "hash" else hexadecimal
        table = convert([text or b"" for text in words], rows)
        codes, missing = _decoded(coded.indices)
        if not len(words):
            return np.zeros(len(codes), dtype=np.int64), missing
        missing |= np.array([text is None for text in words])[codes]
        ids = np.where(missing, 0, table[codes])
        self.refuse(
            ids < 0,
            lambda at: (
                f"{words[codes[at]][:40].decode(errors='replace')!r} is not hexadecimal; "
                "data.string_ids=hash takes any string"
            ),
            row_of,
        )
        return ids, missing


def _rows_of(lengths: np.ndarray | None, count: int) -> np.ndarray:
    """The row of each value in lists of `lengths`; None: one value in each of `count` rows."""
    return np.arange(count) if lengths is None else np.repeat(np.arange(count), lengths)


def _decoded(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values `[n]` (0 where null) and a mask of the nulls."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    missing = column.is_null().to_numpy(zero_copy_only=False)
    filled = pc.fill_null(column, pa.scalar(0, column.type)) if missing.any() else column
    return filled.to_numpy(zero_copy_only=False), missing


def _floats(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values float64 `[n]`, 0 where null or NaN, and a mask of these."""
    values, missing = _decoded(column)
    values = values.astype(np.float64)
    missing = missing | np.isnan(values)
    return np.where(missing, 0.0, values), missing


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

    def read(
        self, group: RowGroup, columns: Sequence[str], rules: ColumnRules
    ) -> Mapping[str, Column]:
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
        return {
            name: Column(values, file.path, name, group.first_row, rules)
            for name, values in found.items()
        }

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
