"""Parquet files as batches: checked before training, their columns as labels, dense features and
bags of ids, by the names of their columns."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from distcache.data.batch import JaggedIds, SlicedSource
from distcache.data.files import InputFile, find_files
from distcache.data.samplers import RowGroupOrder, SampleOrdering, Subset, key_of
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

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
class ParquetSpec:
    """Which files to read, and how. Raises ConfigError that names the key.

    `paths`, `held_out_paths`: a file, a glob, or a sequence of either, in order of time;
    `id_columns`: one feature and one table each, of `table_rows` rows; `weight_columns`: id column
    -> column with a weight for each of its ids; `held_out`: share of the samples, the last ones,
    that is evaluated on (with `held_out_paths`: those files instead); `shuffle_rows`: samples that
    are shuffled together (0: file order); `dtype`: torch.float32 or torch.float64, of dense
    features and labels (the features have float32's precision in both).

    How values become numbers: `nulls`: `error`; `zero`: a dense value or weight that is missing is
    0 (NaN counts as missing), an id is row 0, a list is an empty bag; `empty`: the same, but a
    missing id leaves its bag. `string_ids`: `hash` or `hex` (see `hashed`, `hexadecimal`);
    `on_bad_id`: an integer outside its table is an `error`, or taken modulo the table's rows
    (`hash`); `dense_transform`: `none`, or `log1p`: log(1 + max(x, 0)).
    """

    paths: str | Path | Sequence[str | Path]
    label_column: str
    id_columns: Sequence[str]
    table_rows: Sequence[int]
    dense_columns: Sequence[str] = ()
    weight_columns: Mapping[str, str] = field(default_factory=dict)
    held_out: float = 1 / 7
    held_out_paths: str | Path | Sequence[str | Path] | None = None
    global_batch_size: int = 2048
    seed: int = 0
    shuffle_rows: int = 1 << 20
    nulls: str = "error"
    string_ids: str = "hash"
    on_bad_id: str = "error"
    dense_transform: str = "none"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        ids = list(self.id_columns)
        twice = sorted(name for name in set(ids) if ids.count(name) > 1)
        if twice:
            raise ConfigError(f"data.id_columns names {twice[0]!r} twice: leave one out")

    def wanted(self) -> list[tuple[str, str, tuple[str, ...], bool]]:
        """The columns to read: name, the config key that names it, the kinds that it may have, and
        whether it may be a list."""
        numbers = ("integer", "float", "bool")
        ids = ("integer", "string", "float")
        found = [(self.label_column, "data.label_column", numbers, False)]
        found += [(name, "data.dense_columns", numbers, False) for name in self.dense_columns]
        found += [(name, "data.id_columns", ids, True) for name in self.id_columns]
        weights = self.weight_columns.values()
        return found + [(n, "data.weight_columns", ("float", "integer"), True) for n in weights]


_STRINGS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "integer": pa.types.is_integer,
    "float": pa.types.is_floating,
    "bool": pa.types.is_boolean,
    "string": _STRINGS.__contains__,
}
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def kind_of(type_: pa.DataType) -> tuple[str, bool]:
    """(`integer`, `float`, `bool`, `string` or the type's own name, whether it is a list)."""
    is_list = any(test(type_) for test in _LISTS)
    inner = type_.value_type if is_list else type_
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    kinds = (name for name, test in _KINDS.items() if test(inner))
    return next(kinds, str(inner)), is_list


_RULE = "data.nulls=zero or data.nulls=empty says what to take"
_NULL = f"there is no value (null); {_RULE}"
_NAN = f"the value is NaN, which counts as missing; {_RULE}"


@dataclass(frozen=True)
class Column:
    """A column of a row group, which `spec` says how to turn into numbers.

    `path`, `name`, `first_row`: its file, its name and the file's row at which it begins, for
    messages. Every method raises DataError that names file, row (from 1) and column.
    """

    values: pa.Array
    path: Path
    name: str
    first_row: int
    spec: ParquetSpec

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
        values = self._floats(self.values)
        if self.spec.dense_transform == "log1p":
            values = np.log1p(np.maximum(values, 0.0))
        return self._of_float32(values)

    def bags(self, rows: int, weights: Column | None = None) -> BagColumn:
        """The bags of an id column over a table of `rows` rows; `weights`: of each id, or None."""
        flat, row_of = self._flat()
        ids, missing = self._ids(flat, rows, row_of)
        weight = None if weights is None else weights._weights(row_of)
        self._refuse_nulls(missing, row_of)
        if self.spec.nulls == "empty" and missing.any():
            ids, row_of = ids[~missing], row_of[~missing]
            weight = None if weight is None else weight[~missing]
        lengths = np.bincount(row_of, minlength=len(self.values))
        offsets = None if (lengths == 1).all() else np.concatenate(([0], np.cumsum(lengths)))
        return BagColumn(ids.astype(np.int32 if rows <= 2**31 else np.int64), offsets, weight)

    def _refuse_nulls(self, missing: np.ndarray, row_of: np.ndarray | None = None) -> None:
        if self.spec.nulls == "error":
            self.refuse(missing, lambda at: _NULL, row_of)

    def _flat(self) -> tuple[pa.Array, np.ndarray]:
        """The values in a row, those of lists too, and the row of the column that each is of."""
        column = self.values
        if not kind_of(column.type)[1]:
            return column, np.arange(len(column))
        self._refuse_nulls(column.is_null().to_numpy(zero_copy_only=False))
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return column.flatten(), np.repeat(np.arange(len(column)), lengths)

    def _weights(self, row_of: np.ndarray) -> np.ndarray:
        """Weights float64, one for each of the ids that are of the rows `row_of`."""
        flat, own = self._flat()
        found, wanted = (np.bincount(rows, minlength=len(self.values)) for rows in (own, row_of))
        self.refuse(
            found != wanted,
            lambda at: f"{found[at]} weights for {wanted[at]} ids: give one weight for each id",
        )
        return self._of_float32(self._floats(flat, own), own)

    def _floats(self, flat: pa.Array, row_of: np.ndarray | None = None) -> np.ndarray:
        """Values float64, 0 where null or NaN."""
        values, missing = _decoded(flat)
        values = values.astype(np.float64)
        self._refuse_nulls(missing, row_of)
        is_nan = np.isnan(values)
        if self.spec.nulls == "error":
            self.refuse(is_nan, lambda at: _NAN, row_of)
        return np.where(missing | is_nan, 0.0, values)

    def _of_float32(self, values: np.ndarray, row_of: np.ndarray | None = None) -> np.ndarray:
        """`values`, every one of which float32 can hold."""
        self.refuse(
            np.abs(values) > np.finfo(np.float32).max,
            lambda at: f"{values[at]} is not a finite number of float32; correct the data",
            row_of,
        )
        return values

    def _ids(self, flat: pa.Array, rows: int, row_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 in [0, rows), 0 where null, and a mask of the nulls; `row_of`: row of each."""
        kind = kind_of(flat.type)[0]
        if kind == "string":
            return self._string_ids(flat, rows, row_of)
        values, missing = _decoded(flat)
        if kind == "float":
            values, missing = self._whole_numbers(values, missing, row_of)
        bad = values >= rows
        if values.dtype.kind == "i":
            bad |= values < 0
        if self.spec.on_bad_id == "error":
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

    def _whole_numbers(
        self, values: np.ndarray, missing: np.ndarray, row_of: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Float ids as int64, and a mask of the missing ones, of which NaN is one.

        pandas makes a column of integers with missing values float64. From 2^53 on (float32: 2^24)
        a float may stand for several integers, so that these are refused.
        """
        bits = np.finfo(values.dtype).nmant + 1
        missing = missing | np.isnan(values)
        values = np.where(missing, 0.0, values.astype(np.float64))
        self.refuse(
            (np.abs(values) >= 2.0**bits) | (values != np.floor(values)),
            lambda at: (
                f"id {values[at]:.17g} is not a whole number below 2^{bits}: correct the data, or "
                "write the column as integers (in pandas: dtype 'Int64')"
            ),
            row_of,
        )
        return values.astype(np.int64), missing

    def _string_ids(
        self, flat: pa.Array, rows: int, row_of: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for strings: every distinct one is turned into an id once."""
        coded = flat if pa.types.is_dictionary(flat.type) else flat.dictionary_encode()
        words = coded.dictionary.cast(pa.large_binary()).to_pylist()
        convert = hashed if self.spec.string_ids == "hash" else hexadecimal
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


def _decoded(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values `[n]` (0 where null) and a mask of the nulls."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    missing = column.is_null().to_numpy(zero_copy_only=False)
    filled = pc.fill_null(column, pa.scalar(0, column.type)) if missing.any() else column
    return filled.to_numpy(zero_copy_only=False), missing


@dataclass(frozen=True)
class RowGroup:
    """One row group: its file, its number in it, its samples, and the file's row before it."""

    file: int
    number: int
    rows: int
    first_row: int


class ParquetFiles:
    """Files of one schema, read by row groups; may be used by several threads.

    Raises DataError that names the file: not Parquet, a column that is missing or has another
    type, no row at all; later when a file vanishes, changes or turns out to be damaged.
    """

    def __init__(self, files: Sequence[InputFile], spec: ParquetSpec) -> None:
        self.files, self.spec = list(files), spec
        self._lock = threading.Lock()
        self._opened = lru_cache(16)(_open_file)  # so many files are open at a time
        self.row_groups: list[RowGroup] = []
        first: dict[str, tuple[pa.DataType, InputFile]] = {}
        for index, file in enumerate(self.files):
            opened = self._opened(file)
            _check_schema(file, opened.schema_arrow, spec, first)
            before = 0
            for number in range(opened.metadata.num_row_groups):
                rows = opened.metadata.row_group(number).num_rows
                if rows > 0:
                    self.row_groups.append(RowGroup(index, number, rows, before))
                before += abs(rows)
            with _reading(file):
                if before != opened.metadata.num_rows:
                    raise pa.ArrowInvalid("its row groups do not add up to its rows")
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

    def read(self, index: int, columns: Sequence[str]) -> Mapping[str, Column]:
        """Some columns of row group `index`, whole, by name."""
        group = self.row_groups[index]
        file, columns = self.files[group.file], list(dict.fromkeys(columns))
        with self._lock, _reading(file):
            opened = self._opened(file)
            table = opened.read_row_group(group.number, columns, use_threads=False)
            table.validate(full=True)  # damaged text and dictionaries
        file.check_unchanged()
        found = {name: table.column(name).unify_dictionaries().combine_chunks() for name in columns}
        short = [name for name, column in found.items() if len(column) != group.rows]
        if short:
            raise DataError(
                f"{file.path}: column {short[0]!r} of row group {group.number} has "
                f"{len(found[short[0]])} values instead of {group.rows}: write the file again"
            )
        return {
            name: Column(values, file.path, name, group.first_row, self.spec)
            for name, values in found.items()
        }


def _open_file(file: InputFile) -> pq.ParquetFile:
    """The file's reader, the same file as was found."""
    file.check_unchanged()
    with _reading(file):
        return pq.ParquetFile(file.path, page_checksum_verification=True)


@contextmanager
def _reading(file: InputFile) -> Iterator[None]:
    """A DataError for what pyarrow raises where `file` is damaged, or has changed."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        file.check_unchanged()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{file.path} is no Parquet file that can be read ({first}); write it again, or leave "
            "it out of data.path"
        ) from error


def _check_schema(
    file: InputFile,
    schema: pa.Schema,
    spec: ParquetSpec,
    first: dict[str, tuple[pa.DataType, InputFile]],
) -> None:
    """Every wanted column is there, once, of a kind that it may have, as in the first file."""
    for name, key, kinds, may_be_list in spec.wanted():
        count = schema.names.count(name)
        if count != 1:
            known = ", ".join(schema.names[:12]) + (" ..." if len(schema.names) > 12 else "")
            what = "no column" if count == 0 else f"{count} columns"
            raise DataError(f"{file.path} has {what} {name!r}, which {key} names; it has: {known}")
        type_ = schema.field(name).type
        kind, is_list = kind_of(type_)
        before, where = first.setdefault(name, (type_, file))
        if is_list and not may_be_list:
            wrong = f"holds lists ({type_}); one {' or '.join(kinds)} per sample is needed"
        elif kind not in kinds:
            wrong = f"is {type_}; it must be {' or '.join(kinds)}"
            wrong += ", or a list of these" if may_be_list else ""
        elif not _is_alike(before, type_):
            wrong = f"is {type_}, but {before} in {where.path}: write all files with one schema"
        else:
            continue
        raise DataError(f"{file.path}: column {name!r} ({key}) {wrong}")


def _is_alike(first: pa.DataType, second: pa.DataType) -> bool:
    """Return True if two files may have a column in these types: integers and floats go together,
    since pandas writes integers as floats in a file with missing values."""
    kinds = [kind_of(type_) for type_ in (first, second)]
    numbers = {("integer", kinds[0][1]), ("float", kinds[0][1])}
    return kinds[0] == kinds[1] or set(kinds) == numbers


class ParquetSource(SlicedSource):
    """The `BatchSource` of a `ParquetSpec`; features have the names of their columns.

    Samples are shuffled within windows of row groups (see `RowGroupOrder`), the held-out ones keep
    file order. A rank reads only the row groups that hold its slices, ids and dense features apart,
    and keeps decoded row groups of about `shuffle_rows` samples (at least two row groups).
    Without dense columns there is one dense feature, the constant 1. Raises DataError for missing
    or malformed files. Dense features and labels are read when a batch is loaded.
    """

    def __init__(self, spec: ParquetSpec) -> None:
        self.spec = spec
        self.features = tuple(spec.id_columns)
        self.table_rows = tuple(int(rows) for rows in spec.table_rows)
        self.dense_features = max(1, len(spec.dense_columns))
        files = find_files("data.path", spec.paths, "a Parquet file")
        own = len(files)
        if spec.held_out_paths is not None:
            files += find_files("data.held_out_path", spec.held_out_paths, "a Parquet file")
        self.files = ParquetFiles(files, spec)
        groups = self.files.row_groups
        rows = np.array([group.rows for group in groups], dtype=np.int64)
        if spec.held_out_paths is None:
            total = int(rows.sum())
            share = Fraction(spec.held_out).limit_denominator(10_000)
            train = total - -(-total * share.numerator // share.denominator)
        else:
            train = int(rows[: sum(group.file < own for group in groups)].sum())
        if train == 0:
            raise DataError(
                f"data.path: {files[0].path} leaves nothing to train on: {int(rows.sum())} rows, "
                "of which all are held out; lower data.held_out or give more rows"
            )
        self.first_held_out = train
        self._edges = np.concatenate(([0], np.cumsum(rows)))
        cut = int(np.searchsorted(self._edges, train)) - 1  # the row group that is divided
        sizes = [*rows[:cut].tolist(), train - int(self._edges[cut])]
        self.order = RowGroupOrder(sizes, spec.seed, spec.shuffle_rows)
        super().__init__(train, int(rows.sum()) - train, spec.global_batch_size)
        self.vocabulary = f"parquet columns, strings by {spec.string_ids}"
        self.identity = self._identity(train)
        kept = self.order.widest + int(rows.max())  # those of the largest window, and one more
        self._ids = RecentGroups(kept, rows, partial(_ids_of, self.files))
        self._rest = RecentGroups(kept, rows, partial(_dense_of, self.files))
        logger.info(
            "%d Parquet files with %d row groups: %d samples train, %d are held out; a rank keeps "
            "at most %d decoded samples",
            *(len(files), len(groups), train, int(rows.sum()) - train, kept),
        )

    def _identity(self, train: int) -> dict[str, str]:
        """See `BatchSource.identity`: the samples, what is made of them, and their order."""
        spec = self.spec
        found = {"data.path": f"{self.files.digest()} with {train} training samples"}
        for key in (
            *("label_column", "dense_columns", "id_columns", "shuffle_rows"),
            *("dense_transform", "nulls", "string_ids", "on_bad_id"),
        ):
            value = getattr(spec, key)
            found[f"data.{key}"] = str(value if isinstance(value, str | int) else list(value))
        found["data.weight_columns"] = str(sorted(spec.weight_columns.items()))
        return found

    def in_file_order(self) -> ParquetSource:
        """The same samples, not shuffled."""
        return ParquetSource(replace(self.spec, shuffle_rows=0))

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`."""
        used, places, inside = self._by_group(samples)
        held, parts = [self._ids(group) for group in used], []
        for feature in range(len(self.features)):
            wanted = [(block[feature], at) for block, at in zip(held, inside, strict=True)]
            parts.append(_gather(wanted, places))
        lengths = torch.from_numpy(np.concatenate([part[1] for part in parts]))
        weights = None
        if self.spec.weight_columns:  # ids of a feature without weights have the weight 1
            filled = [np.ones(len(ids)) if own is None else own for ids, _, own in parts]
            weights = torch.from_numpy(np.concatenate(filled)).to(self.spec.dtype)
        values = torch.from_numpy(np.concatenate([ids for ids, _, _ in parts]))
        return JaggedIds.of_lengths(self.features, values, lengths, weights)

    def order_of(self, chosen: Subset, which: int) -> SampleOrdering:
        """See `SlicedSource.order_of`: windows hold as many row groups as those of all samples."""
        share = chosen.count / max(self.order.samples, 1)
        window = max(1, int(self.spec.shuffle_rows * share)) if self.spec.shuffle_rows else 0
        sizes = np.diff(chosen.before(self.order.edges))
        return RowGroupOrder(sizes.tolist(), key_of(self.spec.seed, 0, which), window)

    def dense_and_labels(self, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SlicedSource.dense_and_labels`; reads these alone."""
        dense = torch.empty(len(samples), self.dense_features, dtype=self.spec.dtype)
        labels = torch.empty(len(samples), dtype=self.spec.dtype)
        for group, at, inside in zip(*self._by_group(samples), strict=True):
            own_dense, own_labels = self._rest(group)
            dense.numpy()[at] = own_dense[inside]
            labels.numpy()[at] = own_labels[inside]
        return dense, labels

    def _by_group(
        self, samples: np.ndarray
    ) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
        """The distinct row groups of some samples, ascending; of each one's samples, where in the
        batch they stand, and where in the row group."""
        if not len(samples):
            return [], [], []
        groups = np.searchsorted(self._edges, samples, side="right") - 1
        used, counts = np.unique(groups, return_counts=True)
        places = np.split(np.argsort(groups, kind="stable"), np.cumsum(counts)[:-1])
        inside = [samples[at] - self._edges[group] for group, at in zip(used, places, strict=True)]
        return used.tolist(), places, inside


class RecentGroups:
    """Decoded row groups, by number: those that were asked for last, of at most `samples` samples
    in all, and always one. Their sizes may differ much: a number of groups would say nothing.

    For several threads; each is decoded once at a time, `decoded` says how often any was.
    """

    def __init__(self, samples: int, rows: np.ndarray, decode: Callable[[int], Any]) -> None:
        """`rows`: samples of each row group, int64."""
        self._samples, self._rows, self._decode = samples, rows, decode
        self._held, self._lock, self.decoded = dict[int, Any](), threading.Lock(), 0

    def __call__(self, group: int) -> Any:
        """The row group of this number."""
        with self._lock:
            if (found := self._held.pop(group, None)) is None:
                while self._held and self._rows[[*self._held, group]].sum() > self._samples:
                    del self._held[next(iter(self._held))]  # asked for longest ago
                found, self.decoded = self._decode(group), self.decoded + 1
            self._held[group] = found
            return found


def _ids_of(files: ParquetFiles, index: int) -> list[BagColumn]:
    """The decoded id columns of a row group."""
    spec, weights = files.spec, files.spec.weight_columns
    columns = files.read(index, (*spec.id_columns, *weights.values()))
    return [
        columns[name].bags(rows, columns[weights[name]] if name in weights else None)
        for name, rows in zip(spec.id_columns, spec.table_rows, strict=True)
    ]


def _dense_of(files: ParquetFiles, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The decoded dense features `[rows, F_dense]` and labels `[rows]` of a row group."""
    spec = files.spec
    columns = files.read(index, (spec.label_column, *spec.dense_columns))
    dense = np.ones((files.row_groups[index].rows, max(1, len(spec.dense_columns))), np.float32)
    for at, name in enumerate(spec.dense_columns):
        dense[:, at] = columns[name].dense()
    return dense, columns[spec.label_column].labels()


def _gather(
    groups: Sequence[tuple[BagColumn, np.ndarray]], places: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """`BagColumn.take` of samples that lie in several columns.

    `groups`: columns, each with the samples to take of it; `places`: where those stand in the
    batch, int64, together all of it.
    """
    parts = [column.take(wanted) for column, wanted in groups]
    if len(parts) == 1:
        return parts[0]  # one column has all samples, in the order of the batch
    none = np.zeros(0, dtype=np.int64)
    ids, lengths = (np.concatenate([none, *(part[at] for part in parts)]) for at in (0, 1))
    weights = [part[2] for part in parts if part[2] is not None]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    joined = BagColumn(ids, offsets, np.concatenate(weights) if weights else None)
    return joined.take(np.argsort(np.concatenate([none, *places])))
