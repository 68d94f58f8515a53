"""Tables in files, in original ids, written and read block by block: safetensors, and Parquet.

safetensors is 8 bytes with the length of a header, the header (JSON: dtype, shape and place of each
tensor), and the tensors' bytes. Nothing in such a file is executed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.layout import TableSpec
from distcache.store.memory import describe_bytes

log = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20
"""About how many bytes of a table are in memory at a time."""


@dataclass(frozen=True)
class Stored:
    """A tensor that is read in blocks of its first dimension, wherever it lies.

    `shape`: `[rows, D]` of a table; `block(start, stop)`: rows [start, stop) in `dtype` on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block: Callable[[int, int], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return prod(self.shape) * self.dtype.itemsize

    def ranges(self) -> list[range]:
        """Rows of one block after the other."""
        rows, step = self.shape[0], max(1, BLOCK_BYTES * self.shape[0] // max(1, self.nbytes))
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


# -----------------------------------------------------------------------------
# Writing: a file has its name once it is whole.


@contextmanager
def _new_file(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A file that takes the name `path`, in place of an older one, when it is on the disk.

    Raises DistcacheError where it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if nbytes > (free := shutil.disk_usage(path.parent).free):
            raise DistcacheError(
                f"{path} takes {describe_bytes(nbytes)}, and {path.parent} has "
                f"{describe_bytes(free)} free: make room there, or write to another folder"
            )
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DistcacheError(f"{path} cannot be written: {error.strerror or error}") from error


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""safetensors' names of the dtypes that weights have."""


def write_safetensors(folder: Path, name: str, table: Stored) -> Path:
    """Write `table` as tensor `<name>.weight` to `<name>.safetensors` in `folder`; the file."""
    path, kind = folder / f"{quote(name, safe='')}.safetensors", _name_of(table.dtype)
    place = {"dtype": kind, "shape": table.shape, "data_offsets": (0, table.nbytes)}
    header = json.dumps({"__metadata__": {"format": "pt"}, f"{name}.weight": place}).encode()
    header += b" " * (-len(header) % 8)  # tensors lie at multiples of 8 bytes
    with _new_file(path, 8 + len(header) + table.nbytes) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for rows in table.ranges():
            file.write(table.block(rows.start, rows.stop).contiguous().numpy().data)
    return path


def _name_of(dtype: torch.dtype) -> str:
    return next(name for name, own in _DTYPES.items() if own == dtype)


def write_parquet(folder: Path, name: str, table: Stored, ids: np.ndarray | None = None) -> Path:
    """Write rows of `table` to `<name>.parquet` in `folder`, a row group for each block; the file.

    Columns: `id`, int64, and `vector`, a list of D float32. `ids`, int64, ascending and distinct:
    which rows; None: all. Raises ConfigError without pyarrow.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"Parquet needs pyarrow ({error}): install distcache[data]") from error
    path, width = folder / f"{quote(name, safe='')}.parquet", table.shape[1]
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), width))])
    count = table.shape[0] if ids is None else len(ids)
    with _new_file(path, count * (8 + 4 * width)) as file:
        writer = parquet.ParquetWriter(
            file, schema, use_dictionary=False, write_page_checksum=True, compression="zstd"
        )
        with writer:
            for rows, own in chosen(table, ids):
                block = table.block(rows.start, rows.stop)[torch.from_numpy(own - rows.start)]
                flat = pa.array(block.float().reshape(-1).numpy())
                vectors = pa.FixedSizeListArray.from_arrays(flat, width)
                writer.write_table(pa.table([pa.array(own), vectors], schema))
    return path


def chosen(table: Stored, ids: np.ndarray | None = None) -> Iterator[tuple[range, np.ndarray]]:
    """Ranges of rows, each at most a block, that have any of `ids` (None: all), and which, int64
    `[m]`."""
    for rows in table.ranges():
        if ids is None:
            yield rows, np.arange(rows.start, rows.stop)
            continue
        first, last = np.searchsorted(ids, (rows.start, rows.stop))
        if last > first:
            own = ids[first:last]
            yield range(int(own[0]), int(own[-1]) + 1), own


FORMATS = ("safetensors", "parquet")
"""What tables are written as."""


def write_tables(
    folder: Path,
    form: str,
    tables: Mapping[str, Stored],
    rows: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write tables to `folder`, each to a file of its own, in a format of `FORMATS`.

    `rows`: the ids of each table as of `write_parquet`, for Parquet alone; None: all. Raises
    ConfigError for another format, DistcacheError where a file cannot be written.
    """
    if form not in FORMATS or (rows is not None and form != "parquet"):
        raise ConfigError(
            f"format={form}: give one of {', '.join(FORMATS)}; parquet for chosen rows"
        )
    for name, table in tables.items():
        if form == "parquet":
            path = write_parquet(folder, name, table, None if rows is None else rows[name])
        else:
            path = write_safetensors(folder, name, table)
        log.info("%s: %s", path, describe_bytes(path.stat().st_size))


def read_ids(path: Path, rows: int) -> np.ndarray:
    """The ids that a file names, int64, ascending and distinct: one a line, or column `id` of
    Parquet. Raises DataError for what is no id of a table of `rows` rows."""
    way_out = f"give a text file with one id, 0 to {rows - 1}, a line, or Parquet with a column id"
    try:
        data = path.read_bytes()
        if data[:4] == b"PAR1":
            from pyarrow import parquet

            found = parquet.read_table(path, columns=["id"])["id"].to_numpy()
        else:
            found = np.array(data.split())
        if len(found):
            found = found.astype(np.int64, casting="unsafe" if found.dtype.kind == "S" else "safe")
    except (OSError, ArithmeticError, ValueError, TypeError, LookupError, ImportError) as error:
        raise DataError(f"rows={path} cannot be read ({error}): {way_out}") from error
    ids = np.unique(found).astype(np.int64)
    if len(ids) and (ids[0] < 0 or ids[-1] >= rows):
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise DataError(f"rows={path} names id {wrong} of a table of {rows} rows: {way_out}")
    return ids


# -----------------------------------------------------------------------------
# Reading.


def read_safetensors(folder: Path) -> dict[str, Stored]:
    """The tensors of weights in all `*.safetensors` files of a folder, by name, to be read later.

    Raises ConfigError where there are none, DataError for a file that is damaged, and for a name
    that two files have.
    """
    found: dict[str, Stored] = {}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _tensors(path).items():
            if name in files:
                raise DataError(f"{path} and {files[name]} both have {name!r}: leave one of them")
            found[name], files[name] = tensor, path
    if not found:
        raise ConfigError(f"{folder} has no *.safetensors with weights: give a folder that has")
    return found


def _tensors(path: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            room = os.fstat(file.fileno()).st_size - 8 - length
            if room < 0:
                raise ValueError(f"a header of {length} bytes goes beyond its end")
            header = json.loads(file.read(length))
        for name, place in header.items():
            if name == "__metadata__" or place["dtype"] not in _DTYPES or not place["shape"]:
                continue
            dtype, shape = _DTYPES[place["dtype"]], tuple(place["shape"])
            begin, end = place["data_offsets"]
            size = prod(shape) * dtype.itemsize
            whole = all(isinstance(number, int) and number >= 0 for number in (begin, *shape))
            if not whole or begin + size != end or end > room:
                raise ValueError(f"{name} is not where its header says")
            block = partial(_read_block, path, 8 + length + begin, shape, dtype)
            found[name] = Stored(shape, dtype, block)
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no whole safetensors file ({error}): write it anew") from error
    return found


def _read_block(
    path: Path, begin: int, shape: Sequence[int], dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    """Rows [start, stop) of a tensor that begins at byte `begin` of a file."""
    row = prod(shape[1:]) * dtype.itemsize
    data = bytearray((stop - start) * row)
    with path.open("rb") as file:
        file.seek(begin + start * row)
        if file.readinto(data) != len(data):
            raise DataError(f"{path} became shorter while it was read: leave it in place")
    return torch.frombuffer(data, dtype=dtype).view(stop - start, *shape[1:])


# -----------------------------------------------------------------------------
# Which of the tensors that are there a table starts from.


def find_weights(
    stored: Mapping[str, Stored], tables: Sequence[TableSpec], names: Mapping[str, Any]
) -> dict[int, Stored]:
    """The weights of tables among `stored`, by index of the table.

    Table `t` is tensor `t` or `t.weight`, or the one whose name ends with `.t.weight`, as in the
    `state_dict` of a model; `names[t]` is a name in place of t. Raises ConfigError for a tensor of
    another width or with more rows than the table, for names that are not there or not of one
    tensor alone, and where no table is found.
    """
    if unknown := sorted(set(names) - {table.name for table in tables}):
        known = ", ".join(table.name for table in tables)
        raise ConfigError(f"names of tables {unknown} that are not there: there are {known}")
    found: dict[int, Stored] = {}
    for index, table in enumerate(tables):
        name = str(names.get(table.name, table.name))
        exact = [own for own in (f"{name}.weight", name) if own in stored]
        fitting = exact[:1] or [own for own in stored if own.endswith(f".{name}.weight")]
        if len(fitting) > 1 or (table.name in names and not fitting):
            raise ConfigError(
                f"table {table.name!r}: {name!r} is {len(fitting)} of the stored tensors "
                f"({', '.join(sorted(fitting or stored)[:5])} ...): name one of them"
            )
        if fitting:
            found[index] = stored[fitting[0]]
            _check_shape(table, fitting[0], found[index].shape)
    if not found:
        raise ConfigError(
            f"none of the tables {', '.join(table.name for table in tables[:5])} is among "
            f"{', '.join(sorted(stored)[:5])}: say by names which is which"
        )
    return found


def _check_shape(table: TableSpec, name: str, shape: Sequence[int]) -> None:
    if len(shape) != 2 or shape[1] != table.dim or shape[0] > table.rows:
        raise ConfigError(
            f"table {table.name!r} has {table.rows} rows x {table.dim} and cannot start from "
            f"{name!r}, {' x '.join(map(str, shape))}: the width must be the same, and "
            "the table must have as many rows or more"
        )


def describe_start(tables: Sequence[TableSpec], found: Mapping[int, Stored]) -> str:
    """In words, which tables start from stored weights and which, or which rows, do not."""
    grown = [
        f"{table.name} (the first {found[at].shape[0]:,} of {table.rows:,} rows)"
        for at, table in enumerate(tables)
        if at in found and found[at].shape[0] < table.rows
    ]
    drawn = [table.name for at, table in enumerate(tables) if at not in found]
    said = f"{len(found)} of {len(tables)} tables"
    said += f"; grown: {', '.join(grown)}" if grown else ""
    return said + (f"; not stored, as drawn: {', '.join(drawn)}" if drawn else "")
