"""User-item interactions as clicks: every interaction is a positive, with sampled negatives.

They come as text: lines `user item item ...`, or columns of user, item, rating and time.
`line_numbers` and `csv_numbers` define the two formats, line by line; blocks of clean columns go
through pyarrow.
"""

from __future__ import annotations

import logging
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from distcache.data.batch import Batch, BatchSlice, JaggedIds, SlicedSource, one_each
from distcache.data.files import (
    BadLines,
    InputFile,
    digest_of,
    find_files,
    good_lines,
    read_text,
    show,
)
from distcache.data.samplers import SampleOrder, Subset, hash_counters, key_of
from distcache.errors import DataError

logger = logging.getLogger(__name__)

_LINE = re.compile(rb"[ \t]*0*[0-9]{1,18}([ \t]+0*[0-9]{1,18})+[ \t]*")
_ID = re.compile(rb"0*[0-9]{1,18}")
_ZERO_FRACTION = re.compile(rb"(?<=[0-9])\.0+\Z")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FIELDS = ("user", "item", "rating", "time")
FEATURES = _FIELDS[:2]
COLUMN_SUFFIXES = (".csv", ".tsv", ".data", ".inter")
"""Ends of the names of files that have columns; `.gz` may follow."""
_BLOCK_BYTES = 16 << 20
LONGEST = 64 << 20
"""Bytes of the longest line; a longer one is malformed."""
_TOO_LONG = f"the line is longer than {LONGEST >> 20} MiB"


_NUMBERS = (np.int64, np.int64, np.float64, np.float64)
INTERACTION = np.dtype(list(zip(_FIELDS, _NUMBERS, strict=True)))
"""An interaction; rating and time are 0 where the files have none."""


def line_numbers(line: bytes) -> list[int]:
    """User and items of one line; DataError that says what is wrong with it."""
    if len(line) > LONGEST:
        raise DataError(_TOO_LONG)
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
    """The setting that reads a line that looks like columns, or nothing."""
    has_decimals = all(map(_NUMBER.fullmatch, line.split()))
    if _delimiter_of(line) == " " and not has_decimals:
        return ""
    return "; for columns (user, item, rating, time) give data.format=csv"


_DELIMITERS = ("\t", "::", ",", ";", "|", " ")
"""Delimiters that `auto` recognises; the first one that a line has."""
_DELIMITER_NAMES = {"tab": "\t", "\\t": "\t", "space": " "}


def _delimiter_of(line: bytes) -> str:
    """The delimiter of a line of columns."""
    found = [delimiter for delimiter in _DELIMITERS if delimiter.encode() in line]
    return found[0] if found else ","


def show_delimiter(delimiter: str) -> str:
    """A delimiter as `data.delimiter` takes it."""
    return {"\t": "tab", " ": "space"}.get(delimiter, delimiter)


def csv_numbers(
    line: bytes, delimiter: bytes, columns: Sequence[str], header: bytes | None = None
) -> tuple[int, int, float, float]:
    """User, item, rating and time (0 where the line has none) of one line of columns.

    `columns`: of `_FIELDS`, or empty for a column that is not read. Raises DataError that names
    the field; float64 does not hold an id beyond 2^53 - 1.
    """
    if len(line) > LONGEST:
        raise DataError(_TOO_LONG)
    if line == header:
        raise DataError("the header stands here again")
    parts = line.split(delimiter)
    if len(parts) != len(columns):
        raise DataError(
            f"{len(parts)} fields instead of {len(columns)} ({_column_names(columns)}), separated "
            f"by {show(delimiter)}; lines of a user and its items are data.format=lines"
        )
    fields = {name: part for name, part in zip(columns, parts, strict=True) if name}
    for name in FEATURES:
        fields[name] = _ZERO_FRACTION.sub(b"", fields[name])  # pandas writes some ids as 7.0
        if not _ID.fullmatch(fields[name]):
            raise DataError(
                f"{name} {show(fields[name])} is not a whole number from 0 to 10^18 - 1"
            )
    numbers = {"rating": 0.0, "time": 0.0}
    for name in numbers.keys() & fields.keys():
        part = fields[name]
        numbers[name] = float(part) if _NUMBER.fullmatch(part) else math.nan
        if not math.isfinite(numbers[name]):
            raise DataError(f"{name} {show(part)} is not a finite number")
    user = _whole(fields["user"])
    item = _whole(fields["item"])
    if max(user, item) >= 2**53:
        raise DataError(f"id {max(user, item)} is beyond 2^53 - 1")
    return user, item, numbers["rating"], numbers["time"]


def _column_names(columns: Sequence[str]) -> str:
    return ", ".join(name or "not read" for name in columns)


_HEADER_NAMES = {
    "user": ("user", "userid", "uid", "u", "reviewerid", "visitorid"),
    "item": ("item", "itemid", "iid", "i", "movie", "movieid", "bookid", "productid", "asin"),
    "rating": ("rating", "ratings", "score", "stars", "overall"),
    "time": ("time", "timestamp", "ts", "date", "datetime", "unixreviewtime"),
}
_FIELD_OF_NAME = {name: field for field, names in _HEADER_NAMES.items() for name in names}


def _header_columns(header: bytes, separator: bytes, place: str) -> tuple[str, ...]:
    """The columns that a header names, such as `userId,movieId` or `user_id:token`.

    Where it names user and item, other unknown columns are not read. Where it does not, columns
    are read by position. Raises DataError where a name contradicts its position.
    """
    names = [name.decode(errors="replace").strip("\"' ") for name in header.split(separator)]
    plain = [name.partition(":")[0].replace("_", "").replace(" ", "").lower() for name in names]
    columns = tuple(_FIELD_OF_NAME.get(name, "") for name in plain)
    twice = [name for name in _FIELDS if columns.count(name) > 1]
    if twice:
        raise DataError(f"{place}: the header names two columns of the {twice[0]}: leave one out")
    if set(FEATURES) <= set(columns):
        return columns
    by_position = _position_columns(len(names), separator, place)
    for name, column, expected in zip(names, columns, by_position, strict=True):
        if column not in ("", expected):
            raise DataError(
                f"{place}: column {name!r} stands in the place of the {expected}: name the columns "
                f"{', '.join(_FIELDS)} in the header, or write them in this order"
            )
    return by_position


def _position_columns(count: int, separator: bytes, place: str) -> tuple[str, ...]:
    """The columns of a file whose header does not name them."""
    if not 2 <= count <= len(_FIELDS):
        raise DataError(
            f"{place}: {count} fields separated by {show(separator)}; 2 to 4 are read: "
            f"{', '.join(_FIELDS)} (data.delimiter says what separates them, and "
            "data.format=lines reads a user and its items)"
        )
    return _FIELDS[:count]


def _whole(digits: bytes) -> int:
    """An id's number; Python reads at most 4,300 digits, and most of these may be zeros."""
    return int(digits[-18:])


def read_user_lines(files: Sequence[InputFile], bad: BadLines, is_named: bool = True) -> np.ndarray:
    """The interactions `[P]` of files of lines `user item item ...`, in file order.

    `is_named`: data.format=lines was given. Raises DataError where it was not, and all lines have
    the same three or four fields, which may be user, item, rating and time.
    """
    users, items = array("q"), array("q")
    widths = set[int]()
    for file in files:
        for first, block in _blocks(file):
            for user, *own in good_lines(block, first, line_numbers, partial(bad.add, file.path)):
                widths.add(1 + len(own))
                items.extend(own)
                users.extend([user] * len(own))
    if not is_named and widths in ({3}, {4}):
        (width,) = widths
        raise DataError(
            f"data.path: every line of {files[0].path} has {width} fields, so they may be "
            f"{', '.join(_FIELDS[:width])} or a user and {width - 1} items: give data.format=csv "
            "for the first, or data.format=lines for the second"
        )
    found = np.zeros(len(users), INTERACTION)
    found["user"], found["item"] = users, items
    return found


def read_csv(
    files: Sequence[InputFile], delimiter: str, bad: BadLines
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The interactions `[P]` of files of columns, in file order, and the names of the columns.

    `delimiter`: a text, `tab`, `space`, or `auto` for the one that the first line has. A first
    line without a single number is a header. Raises DataError for headers that differ.
    """
    delimiter = _DELIMITER_NAMES.get(delimiter, delimiter)
    separator = b"" if delimiter == "auto" else delimiter.encode()
    columns: tuple[str, ...] = ()
    parts: list[np.ndarray] = []
    for file in files:
        header: bytes | None = None
        for first, block in _blocks(file):
            if first == 1:
                line, after = block.split(b"\n", 1)
                separator = separator or _delimiter_of(line).encode()
                place = f"{file.path}:1"
                if not any(map(_NUMBER.fullmatch, line.split(separator))):
                    header, block, first = line, after, 2
                    named = _header_columns(line, separator, place)
                    if columns and named != columns:
                        raise DataError(
                            f"{place}: the header names {_column_names(named)}, but that of "
                            f"{files[0].path} {_column_names(columns)}: write all alike"
                        )
                    columns = named
                columns = columns or _position_columns(line.count(separator) + 1, separator, place)
            numbers = _fast_block(block, separator, columns)
            if numbers is None:
                parse = partial(csv_numbers, delimiter=separator, columns=columns, header=header)
                good = list(good_lines(block, first, parse, partial(bad.add, file.path)))
                numbers = np.array(good, dtype=np.float64).reshape(-1, 4)
            parts.append(numbers)
    logger.info(
        "%s: columns %s, separated by %s",
        *(files[0].path, _column_names(columns), show_delimiter(separator.decode())),
    )
    whole = np.concatenate(parts)
    found = np.empty(len(whole), INTERACTION)
    for at, name in enumerate(_FIELDS):
        found[name] = whole[:, at]
    return found, columns


def _blocks(file: InputFile) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines that each end with a newline alone)."""
    first = 1
    for block in read_text(file, _BLOCK_BYTES, LONGEST):
        if not block.endswith(b"\n"):
            block += b"\n"
        block = block.replace(b"\r\n", b"\n")
        yield first, block
        first += block.count(b"\n")


def _fast_block(block: bytes, separator: bytes, columns: Sequence[str]) -> np.ndarray | None:
    """The numbers float64 `[n, 4]` of a block of plain decimal lines; None for any other."""
    odd = block.translate(None, b"0123456789.\n" + separator)
    if len(separator) != 1 or odd or len(block) > LONGEST or "" in columns:
        return None
    import pyarrow as pa
    from pyarrow import csv

    types = {name: pa.int64() if name in FEATURES else pa.float64() for name in columns}
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
    for name, column in zip(columns, table.columns, strict=True):
        numbers[:, _FIELDS.index(name)] = column.to_numpy()
    # float64 holds whole numbers up to 2^53: longer ids take the slow path, which refuses them, and
    # so do numbers too large for float64.
    good = (numbers[:, :2] < 2**53).all() and np.isfinite(numbers[:, 2:]).all()
    return numbers if good else None


_DRAWS = 16
"""Draws for one negative; the last one stays even if the user has that item."""


@dataclass(frozen=True)
class InteractionsSpec:
    """Which files to read, and how.

    `paths`: a file, a glob, or a sequence of either; `format`: `lines` (user item item ...), `csv`
    (user, item, and maybe rating and time, separated by `delimiter`), or `auto`: csv where a
    delimiter is given or the name ends in one of `COLUMN_SUFFIXES`; `min_rating`: interactions
    rated below are left out; `negatives`: sampled for each positive, all items alike (`uniform`)
    or as often as they occur (`popularity`);
    `held_out_by`: each user's `last` interaction (of users with two or more), or by `time` the
    latest share `held_out` of all; `table_rows`: users and items, empty for the largest id + 1.
    """

    paths: str | Path | Sequence[str | Path]
    format: str = "auto"
    delimiter: str = "auto"
    min_rating: float | None = None
    negatives: int = 4
    sampling: str = "uniform"
    held_out_by: str = "last"
    held_out: float = 1 / 7
    table_rows: Sequence[int] = ()
    on_bad_id: str = "error"
    on_bad_line: str = "error"
    global_batch_size: int = 2048
    seed: int = 0
    dtype: torch.dtype = torch.float32


_RENUMBER = "number them from 0, or give data.table_rows=[users,items] with data.on_bad_id=hash"
_LARGE_TABLE = 1_000_000
_SPARSE = 100
"""Rows for each id that occurs, and rows of a table, above which a warning names the largest id."""


class InteractionsSource(SlicedSource):
    """The `BatchSource` of an `InteractionsSpec`; features `user` and `item`, one id each.

    An epoch has 1 + `negatives` samples for each training positive, all shuffled; a negative is an
    item that the user has not in training (held out: not at all), drawn from (seed, epoch,
    position). The held-out positives keep their order and one set of negatives. There is one dense
    feature, the constant 1. All interactions are in memory, about 32 bytes each on every rank.
    """

    dense_features = 1
    features = FEATURES
    ids_vary = True
    first_held_out = 0

    def __init__(self, spec: InteractionsSpec) -> None:
        self.spec = spec
        self.bad_lines = BadLines(spec.on_bad_line)
        self._files = find_files("data.path", spec.paths, "a file of interactions")
        found, self.table_rows = self._in_tables(self._read())
        train, rest = self._split(found)
        if not len(train):
            raise DataError(
                f"data.path={spec.paths}: {len(found)} interactions leave none to train on; "
                "lower data.held_out or data.min_rating, or give more lines"
            )
        parts = [np.ascontiguousarray(part[name]) for part in (train, rest) for name in FEATURES]
        self._train, self._eval = parts[:2], parts[2:]  # users and items
        # Items to draw, each entry alike; user * items + item of training and of all positives.
        self._pool = np.unique(parts[1]) if spec.sampling == "uniform" else parts[1]
        items = self.table_rows[1]
        self._known = np.unique(parts[0] * items + parts[1])
        self._everything = np.union1d(self._known, parts[2] * items + parts[3])
        self.identity = {
            "data.path": digest_of(*parts),
            "data.negatives": str(spec.negatives),
            "data.negative_sampling": spec.sampling,
        }
        self.vocabulary = "ids"  # the data's own numbers
        each = 1 + spec.negatives
        self.order = SampleOrder(len(train) * each, key_of(spec.seed, 0))
        super().__init__(len(train) * each, len(rest) * each, spec.global_batch_size)
        users, items = (len(np.unique(found[name])) for name in FEATURES)
        logger.info(
            f"{len(found):,} interactions of {users:,} users and {items:,} items: {len(train):,} "
            f"train, {len(rest):,} are held out, {spec.negatives} negatives each; tables of "
            f"{self.table_rows[0]:,} and {self.table_rows[1]:,} rows"
        )

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """See `SlicedSource.take`: 1 + negatives in a row for each positive, the positive first."""
        ids, positive = self._ids(samples, part.span.epoch if part.kind == "train" else None)
        labels = torch.from_numpy(positive).to(self.spec.dtype)
        return part.batch(torch.ones(len(labels), 1, dtype=self.spec.dtype), ids, labels)

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`."""
        return self._ids(samples, epoch)[0]

    def order_of(self, chosen: Subset, which: int) -> SampleOrder:
        """See `SlicedSource.order_of`."""
        return SampleOrder(chosen.count, key_of(self.spec.seed, 0, which))

    def _ids(self, samples: np.ndarray, epoch: int | None) -> tuple[JaggedIds, np.ndarray]:
        """Ids of some samples, and which of them are positives; `epoch` None: held-out ones."""
        positives = self._eval if epoch is None else self._train
        which, place = np.divmod(samples, 1 + self.spec.negatives)
        users, items = (column[which] for column in positives)
        negative = np.flatnonzero(place)
        items[negative] = self._negatives(users[negative], samples[negative], epoch)
        values = torch.from_numpy(np.concatenate((users, items)))
        return JaggedIds(FEATURES, values, one_each(len(values))), place == 0

    def _negatives(self, users: np.ndarray, samples: np.ndarray, epoch: int | None) -> np.ndarray:
        """An item int64 that it has not for each user; `samples`: numbers of the samples in the
        epoch's data. `epoch` None: for held-out samples, the same every time.
        """
        seed, items = self.spec.seed, self.table_rows[1]
        key = key_of(seed, 4) if epoch is None else key_of(seed, 3, epoch)
        taken = self._everything if epoch is None else self._known
        drawn = np.empty(len(users), dtype=np.int64)
        open_ = np.arange(len(users))
        for attempt in range(_DRAWS):
            counters = samples[open_].astype(np.uint64) * np.uint64(_DRAWS) + np.uint64(attempt)
            places = hash_counters(counters, key) % np.uint64(len(self._pool))
            drawn[open_] = self._pool[places.astype(np.int64)]
            pairs = users[open_] * items + drawn[open_]
            at = np.minimum(np.searchsorted(taken, pairs), len(taken) - 1)
            open_ = open_[taken[at] == pairs]
            if not len(open_):
                break
        return drawn

    def _read(self) -> np.ndarray:
        """All interactions in file order, those rated too low left out."""
        spec, fields = self.spec, FEATURES
        files = self._files
        kind = spec.format
        if kind == "auto":
            name = files[0].path.name.lower().removesuffix(".gz")
            has_columns = spec.delimiter != "auto" or name.endswith(COLUMN_SUFFIXES)
            kind = "csv" if has_columns else "lines"
        if kind == "csv":
            found, fields = read_csv(files, spec.delimiter, self.bad_lines)
        else:
            found = read_user_lines(files, self.bad_lines, is_named=spec.format == "lines")
        self._columns = fields if kind == "csv" else ()
        self.bad_lines.report()
        for key, wanted, column in (
            ("min_rating", spec.min_rating is not None, "rating"),
            ("held_out_by=time", spec.held_out_by == "time", "time"),
        ):
            if wanted and column not in fields:
                raise DataError(
                    f"data.{key} was set, but {files[0].path} has no such column: give a CSV of "
                    "user, item, rating, time, or leave the key out"
                )
        if spec.min_rating is not None:
            found = found[found["rating"] >= spec.min_rating]
        if not len(found):
            raise DataError(
                f"data.path: {files[0].path} has no interaction that could be used "
                f"(data.min_rating={spec.min_rating}; {self.bad_lines.example()})"
            )
        return found

    def _in_tables(self, found: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """The interactions with every id inside its table, and the rows of both tables."""
        spec, largest = self.spec, [int(found[name].max()) for name in FEATURES]
        users, items = (int(rows) for rows in spec.table_rows or (at + 1 for at in largest))
        if users * items >= 2**62:
            raise DataError(
                f"data.path: the ids reach user {users - 1}{self._place(0, users - 1)} and item "
                f"{items - 1}{self._place(1, items - 1)}, too far for tables of a row per id: "
                f"{_RENUMBER}"
            )
        for at, (name, most, rows) in enumerate(
            zip(FEATURES, largest, (users, items), strict=True)
        ):
            if spec.on_bad_id == "error" and most >= rows:
                raise DataError(
                    f"data.path: {name} {most}{self._place(at, most)} is not in its table, which "
                    f"has {rows} rows (data.table_rows); leave data.table_rows out, or take such "
                    "ids modulo the rows with data.on_bad_id=hash"
                )
            distinct = len(np.unique(found[name]))
            if not spec.table_rows and rows > max(_SPARSE * distinct, _LARGE_TABLE):
                logger.warning(
                    f"data.path: {name} {most:,}{self._place(at, most)} gives its table {rows:,} "
                    f"rows, but the data have {distinct:,} different ids: {_RENUMBER}"
                )
            found[name] %= rows
        return found, (users, items)

    def _place(self, field: int, value: int) -> str:
        """Return the file and line that first has the id `value` of a user (0) or item (1), in
        parentheses; empty if no line is found."""
        for file in self._files:
            separator = b""
            for first, block in _blocks(file):
                for number, line in enumerate(block.split(b"\n"), first):
                    if not self._columns:
                        fields = line.split()
                        ids = fields[:1] if field == 0 else fields[1:]
                    else:
                        separator = separator or self._separator(line)
                        fields = line.split(separator)
                        place = self._columns.index(FEATURES[field])
                        ids = fields[place : place + 1]
                    if any(_NUMBER.fullmatch(text) and float(text) == value for text in ids):
                        return f" ({file.path}:{number})"
        return ""

    def _separator(self, line: bytes) -> bytes:
        """The bytes between the columns of a file whose first line is `line`."""
        delimiter = _DELIMITER_NAMES.get(self.spec.delimiter, self.spec.delimiter)
        return (_delimiter_of(line) if delimiter == "auto" else delimiter).encode()

    def _split(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those to train on, in file order, and the held-out ones in order of time."""
        count, by_time = len(found), np.argsort(found["time"], kind="stable")
        if self.spec.held_out_by == "time":
            latest = by_time[count - int(count * self.spec.held_out) :]
        else:
            order = np.lexsort((found["time"], found["user"]))
            users = found["user"][order]
            again = users[1:] == users[:-1]
            latest = order[np.append(False, again) & np.append(~again, True)]
        held_out = np.zeros(count, dtype=bool)
        held_out[latest] = True
        return found[~held_out], found[by_time[held_out[by_time]]]
