"""User-item interactions as clicks: every interaction is a positive, with sampled negatives.

They come as text: lines `user item item ...`, or CSV of user, item, rating, time. `line_numbers`
and `csv_numbers` are the definitions, line by line; blocks of clean CSV go through pyarrow.
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
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_FIELDS = ("user", "item", "rating", "time")
FEATURES = _FIELDS[:2]
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
    """A hint where a line looks like CSV."""
    for delimiter in ("::", ",", ";", "|"):
        if delimiter.encode() in line:
            given = "" if delimiter == "," else f" data.delimiter='{delimiter}'"
            return f"; for CSV give data.format=csv{given}"
    return ""


def csv_numbers(
    line: bytes, delimiter: bytes, fields: int, header: bytes | None = None
) -> tuple[int, int, float, float]:
    """User, item, rating and time (0 where the line has none) of one line of `fields` fields.

    Raises DataError that says what is wrong; an id beyond 2^53 - 1 is not held by float64.
    """
    if len(line) > LONGEST:
        raise DataError(_TOO_LONG)
    if line == header:
        raise DataError("the header stands here again")
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
    ids = _whole(parts[0]), _whole(parts[1])
    if max(ids) >= 2**53:
        raise DataError(f"id {max(ids)} is beyond 2^53 - 1")
    return *ids, *numbers


def _whole(digits: bytes) -> int:
    """An id's number; Python reads at most 4,300 digits, and most of these may be zeros."""
    return int(digits[-18:])


def read_user_lines(files: Sequence[InputFile], bad: BadLines) -> np.ndarray:
    """The interactions `[P]` of files of lines `user item item ...`, in file order."""
    users, items = array("q"), array("q")
    for file in files:
        for first, block in _blocks(file):
            for user, *own in good_lines(block, first, line_numbers, partial(bad.add, file.path)):
                items.extend(own)
                users.extend([user] * len(own))
    found = np.zeros(len(users), INTERACTION)
    found["user"], found["item"] = users, items
    return found


def read_csv(
    files: Sequence[InputFile], delimiter: str, bad: BadLines
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The interactions `[P]` of CSV files, in file order, and the fields that these have (2 to 4),
    as many as the first line of the first; a first line without a single number is a header."""
    separator, fields = delimiter.encode(), 0
    parts: list[np.ndarray] = []
    for file in files:
        header: bytes | None = None
        for first, block in _blocks(file):
            if first == 1:
                line, after = block.split(b"\n", 1)
                fields = fields or line.count(separator) + 1
                if not 2 <= fields <= len(_FIELDS):
                    raise DataError(
                        f"{file.path}:1: {fields} fields separated by {show(separator)}; 2 to 4 "
                        f"are read: {', '.join(_FIELDS)} (data.delimiter says what separates them)"
                    )
                if not any(map(_NUMBER.fullmatch, line.split(separator))):
                    header, block, first = line, after, 2
            numbers = _fast_block(block, separator, fields)
            if numbers is None:
                parse = partial(csv_numbers, delimiter=separator, fields=fields, header=header)
                good = list(good_lines(block, first, parse, partial(bad.add, file.path)))
                numbers = np.array(good, dtype=np.float64).reshape(-1, 4)
            parts.append(numbers)
    whole = np.concatenate(parts)
    found = np.empty(len(whole), INTERACTION)
    for at, name in enumerate(_FIELDS):
        found[name] = whole[:, at]
    return found, _FIELDS[:fields]


def _blocks(file: InputFile) -> Iterator[tuple[int, bytes]]:
    """(number of the first line, whole lines that each end with a newline alone)."""
    first = 1
    for block in read_text(file, _BLOCK_BYTES, LONGEST):
        if not block.endswith(b"\n"):
            block += b"\n"
        block = block.replace(b"\r\n", b"\n")
        yield first, block
        first += block.count(b"\n")


def _fast_block(block: bytes, separator: bytes, fields: int) -> np.ndarray | None:
    """The numbers float64 `[n, 4]` of a block of plain decimal lines; None for any other."""
    odd = block.translate(None, b"0123456789.\n" + separator)
    if len(separator) != 1 or odd or len(block) > LONGEST:
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


_DRAWS = 16
"""Draws for one negative; the last one stays even if the user has that item."""


@dataclass(frozen=True)
class InteractionsSpec:
    """Which files to read, and how.

    `paths`: a file, a glob, or a sequence of either; `format`: `lines` (user item item ...), `csv`
    (user, item, and maybe rating and time, separated by `delimiter`), or `auto`: csv for names
    that end in .csv or .csv.gz; `min_rating`: interactions rated below are left out; `negatives`:
    sampled for each positive, all items alike (`uniform`) or as often as they occur (`popularity`);
    `held_out_by`: each user's `last` interaction (of users with two or more), or by `time` the
    latest share `held_out` of all; `table_rows`: users and items, empty for the largest id + 1.
    """

    paths: str | Path | Sequence[str | Path]
    format: str = "auto"
    delimiter: str = ","
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
            f"{len(found)} interactions of {users} users with {items} items: {len(train)} train, "
            f"{len(rest)} are held out, {spec.negatives} negatives each; tables of "
            f"{self.table_rows[0]} and {self.table_rows[1]} rows"
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
        files = find_files("data.path", spec.paths, "a file of interactions")
        kind = spec.format
        if kind == "auto":
            name = files[0].path.name.removesuffix(".gz")
            kind = "csv" if name.endswith(".csv") else "lines"
        if kind == "csv":
            found, fields = read_csv(files, spec.delimiter, self.bad_lines)
        else:
            found = read_user_lines(files, self.bad_lines)
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
                f"data.path: the ids reach {users - 1} (user) and {items - 1} (item), too far for "
                "tables of a row per id; number them from 0, or give data.table_rows=[users,items] "
                "with data.on_bad_id=hash"
            )
        for name, at, rows in zip(FEATURES, largest, (users, items), strict=True):
            if spec.on_bad_id == "error" and at >= rows:
                raise DataError(
                    f"data.path: {name} {at} is not in its table, which has {rows} rows "
                    "(data.table_rows); leave data.table_rows out, or take such ids modulo the "
                    "rows with data.on_bad_id=hash"
                )
            found[name] %= rows
        return found, (users, items)

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
