"""Columns of a Parquet row group as arrays: labels, dense features, bags of ids with weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distcache.data.bags import BagColumn
from distcache.data.string_ids import hashed, hexadecimal
from distcache.errors import DataError

NULLS = ("error", "zero", "empty")
"""What to do with nulls; see `ColumnRules`."""


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


@dataclass(frozen=True)
class Place:
    """Where a column stands: its file, its name and the file's row at which it begins."""

    path: Path
    column: str
    first_row: int

    def error(self, row: int, what: str) -> DataError:
        """What is wrong in the column's row `row`; rows of the file are counted from 1."""
        return DataError(
            f"{self.path}, row {self.first_row + row + 1}, column {self.column!r}: {what}"
        )

    def null_error(self, row: int) -> DataError:
        """A null where `data.nulls=error`."""
        return self.error(
            row, "there is no value (null); data.nulls=zero or data.nulls=empty says what to take"
        )


def kind_of(type_: pa.DataType) -> tuple[str, bool]:
    """(`integer`, `float`, `bool`, `string` or the type's own name, whether it is a list)."""
    is_list = any(
        test(type_)
        for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    )
    inner = type_.value_type if is_list else type_
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    for name, tests in _KINDS.items():
        if any(test(inner) for test in tests):
            return name, is_list
    return str(inner), is_list


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


def labels(column: pa.Array, place: Place) -> np.ndarray:
    """Labels uint8 `[n]`. Raises DataError for a null and for a value other than 0 and 1."""
    values, missing = _numbers(column)
    bad = missing | ~((values == 0) | (values == 1))
    if bad.any():
        row = int(np.argmax(bad))
        found = "null" if missing[row] else f"{values[row]:g}"
        raise place.error(row, f"the label is {found}, not 0 or 1")
    return values.astype(np.uint8)


def dense(column: pa.Array, rules: ColumnRules, place: Place) -> np.ndarray:
    """Dense values float64 `[n]`. Raises DataError for what float32 cannot hold, and for nulls as
    said."""
    values, missing = _numbers(column)
    missing |= np.isnan(values)
    if missing.any():
        if rules.nulls == "error":
            raise place.null_error(int(np.argmax(missing)))
        values = np.where(missing, 0.0, values)
    values = np.log1p(np.maximum(values, 0.0)) if rules.log1p else values
    far = np.abs(values) > np.finfo(np.float32).max
    if far.any():
        row = int(np.argmax(far))
        raise place.error(row, f"{values[row]} is not a finite number of float32; correct the data")
    return values


def bags(
    column: pa.Array,
    weights: tuple[pa.Array, Place] | None,
    rows: int,
    rules: ColumnRules,
    place: Place,
) -> BagColumn:
    """The bags of an id column over a table of `rows` rows, with a weight column or None.

    Raises DataError that names file, row and column.
    """
    flat, lengths = _flat(column, rules, place)
    bag_of = None if lengths is None else np.repeat(np.arange(len(lengths)), lengths)
    ids, missing = _ids(flat, rows, rules, place, bag_of)
    weight = None
    if weights is not None:
        weight = _weights(weights[0], lengths, len(column), rules, weights[1])
    if missing.any():
        if rules.nulls == "error":
            at = int(np.argmax(missing))
            raise place.null_error(at if bag_of is None else int(bag_of[at]))
        if rules.nulls == "empty":
            bag_of = np.arange(len(ids)) if bag_of is None else bag_of
            lengths = np.bincount(bag_of[~missing], minlength=len(column))
            ids, weight = ids[~missing], None if weight is None else weight[~missing]
    offsets = None if lengths is None else np.concatenate(([0], np.cumsum(lengths)))
    return BagColumn(ids.astype(np.int32 if rows <= 2**31 else np.int64), offsets, weight)


def _flat(column: pa.Array, rules: ColumnRules, place: Place) -> tuple[pa.Array, np.ndarray | None]:
    """The values of a column and the lengths of its lists int64 `[n]`; None if it has none."""
    if not kind_of(column.type)[1]:
        return column, None
    if column.null_count and rules.nulls == "error":
        missing = column.is_null().to_numpy(zero_copy_only=False)
        raise place.null_error(int(np.argmax(missing)))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), lengths.astype(np.int64)


def _weights(
    column: pa.Array, lengths: np.ndarray | None, samples: int, rules: ColumnRules, place: Place
) -> np.ndarray:
    """Weights float64, one per id, for bags of `lengths` (None: one id each)."""
    flat, own = _flat(column, rules, place)
    expected = np.ones(samples, dtype=np.int64) if lengths is None else lengths
    found = np.ones(samples, dtype=np.int64) if own is None else own
    if (own is None) != (lengths is None):
        kinds = ("one number", "a list")
        raise place.error(
            0,
            f"the weights are {kinds[own is not None]} per sample, the ids are "
            f"{kinds[lengths is not None]}: give one weight for each id",
        )
    if (expected != found).any():
        row = int(np.argmax(expected != found))
        raise place.error(
            row, f"{found[row]} weights for {expected[row]} ids: give one weight for each id"
        )
    values, missing = _numbers(flat)
    missing |= np.isnan(values)
    far = np.abs(values) > np.finfo(np.float32).max
    bad = far | (missing if rules.nulls == "error" else False)
    if bad.any():
        at = int(np.argmax(bad))
        row = at if own is None else int(np.repeat(np.arange(samples), own)[at])
        if missing[at]:
            raise place.null_error(row)
        raise place.error(
            row, f"the weight {values[at]} is not a finite number of float32; correct the data"
        )
    return np.where(missing, 0.0, values)


def _numbers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values float64 `[n]` (0 where null) and a mask of the nulls."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    filled = pc.fill_null(column, pa.scalar(0, column.type)) if missing.any() else column
    return filled.to_numpy(zero_copy_only=False).astype(np.float64), missing


def _ids(
    flat: pa.Array, rows: int, rules: ColumnRules, place: Place, bag_of: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 in [0, rows), 0 where null, and a mask of the nulls; `bag_of`: row of each."""
    strings = pa.types.is_dictionary(flat.type) and kind_of(flat.type)[0] == "string"
    if strings or kind_of(flat.type)[0] == "string":
        return _string_ids(flat, rows, rules, place, bag_of)
    if pa.types.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    missing = flat.is_null().to_numpy(zero_copy_only=False)
    filled = pc.fill_null(flat, pa.scalar(0, flat.type)) if missing.any() else flat
    values = filled.to_numpy(zero_copy_only=False)
    bad = values >= rows
    if not pa.types.is_unsigned_integer(flat.type):
        bad |= values < 0
    if bad.any():
        if rules.on_bad_id == "error":
            at = int(np.argmax(bad))
            raise place.error(
                at if bag_of is None else int(bag_of[at]),
                f"id {values[at]} is not in its table, which has {rows} rows (ids 0 to "
                f"{rows - 1}); {int(bad.sum())} such ids in this row group. Correct the data or "
                "data.table_rows, or take such ids modulo the rows with data.on_bad_id=hash",
            )
        wide = values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
        values = wide % wide.dtype.type(rows)
    return values.astype(np.int64), missing


def _string_ids(
    flat: pa.Array, rows: int, rules: ColumnRules, place: Place, bag_of: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The same for strings: every distinct one is turned into an id once."""
    coded = flat if pa.types.is_dictionary(flat.type) else flat.dictionary_encode()
    words = [
        text.encode() if isinstance(text, str) else text for text in coded.dictionary.to_pylist()
    ]
    convert = hashed if rules.string_ids == "hash" else hexadecimal
    table = convert([text or b"" for text in words], rows)
    missing = coded.is_null().to_numpy(zero_copy_only=False)
    codes = pc.fill_null(coded.indices, pa.scalar(0, coded.indices.type))
    codes = codes.to_numpy(zero_copy_only=False)
    if not len(words):
        return np.zeros(len(codes), dtype=np.int64), missing
    missing |= np.array([text is None for text in words])[codes]
    ids = np.where(missing, 0, table[codes])
    if (ids < 0).any():
        at = int(np.argmax(ids < 0))
        raise place.error(
            at if bag_of is None else int(bag_of[at]),
            f"{words[codes[at]][:40].decode(errors='replace')!r} is not hexadecimal; "
            "data.string_ids=hash takes any string",
        )
    return ids, missing
