"""Tables in files, in original ids, written and read block by block: safetensors, and Parquet.

safetensors is 8 bytes with the length of a header, the header (JSON: dtype, shape and place of each
tensor), and the tensors' bytes. Nothing in such a file is executed.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.layout import TableSpec, file_stem
from distcache.ops.reference import as_numpy
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

    @classmethod
    def of(cls, values: Tensor) -> Stored:
        """A tensor that is in memory."""
        return cls(tuple(values.shape), values.dtype, lambda start, stop: values[start:stop])

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

FORMATS = ("safetensors", "parquet")
"""What tables are written as."""

_DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
"""safetensors' names of the dtypes that weights have."""


def write_tables(
    folder: Path,
    form: str,
    tables: Mapping[str, Stored],
    rows: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write tables to `folder`, each to a file of its own, in a format of `FORMATS`.

    `rows`: of Parquet, the ids of each table that are written, int64, ascending and distinct; None:
    all. Raises ConfigError for another format, and for names of tables that are no file names,
    before anything is written; DistcacheError where a file cannot be written.
    """
    if form not in FORMATS or (rows is not None and form != "parquet"):
        raise ConfigError(
            f"format={form}: give one of {', '.join(FORMATS)}; parquet for chosen rows"
        )
    stems = _file_stems(tables)
    for name, table in tables.items():
        path = folder / f"{stems[name]}.{form}"
        again = ", in place of an older one" if path.exists() else ""
        count = table.shape[0] if rows is None else len(rows[name])
        with _new_file(path) as file:
            if form == "parquet":
                _write_parquet(file, table, None if rows is None else rows[name])
            else:
                _write_safetensors(file, f"{name}.weight", table)
        size = describe_bytes(path.stat().st_size)
        log.info("%s: %s rows, %s%s", path, f"{count:,}", size, again)


def _file_stems(names: Iterable[str]) -> dict[str, str]:
    """The file name of each table, without its suffix.

    Names that differ only in case have their capitals percent-encoded: on a file system that
    ignores case (macOS, Windows, many shares) one file would take the place of another.
    """
    stems = {name: file_stem(name) for name in names}
    counts = Counter(stem.lower() for stem in stems.values())
    return {
        name: _encoded_capitals(stem) if counts[stem.lower()] > 1 else stem
        for name, stem in stems.items()
    }


def _encoded_capitals(stem: str) -> str:
    """A percent-encoded name without capitals but in its codes, whose case means nothing."""
    parts = re.split(r"(%[0-9A-F]{2})", stem)
    return "".join(
        part if part.startswith("%") else re.sub("[A-Z]", lambda own: f"%{ord(own[0]):X}", part)
        for part in parts
    )


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path`, in place of an older one, when it is on the disk."""
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise DistcacheError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _write_safetensors(file: BinaryIO, name: str, table: Stored) -> None:
    kind = next(name for name, own in _DTYPES.items() if own == table.dtype)
    place = {"dtype": kind, "shape": table.shape, "data_offsets": (0, table.nbytes)}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: place}).encode()
    header += b" " * (-len(header) % 8)  # tensors lie at multiples of 8 bytes
    file.write(struct.pack("<Q", len(header)) + header)
    for rows in table.ranges():
        file.write(as_numpy(table.block(rows.start, rows.stop).contiguous()).data)


def _write_parquet(file: BinaryIO, table: Stored, ids: np.ndarray | None) -> None:
    """Columns `id`, int64, and `vector`, a list of D float32, with a row group for each block."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"Parquet needs pyarrow ({error}): install distcache[data]") from error
    width = table.shape[1]
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), width))])
    how: dict[str, Any] = {"use_dictionary": False, "write_page_checksum": True}
    with parquet.ParquetWriter(file, schema, compression="zstd", **how) as writer:
        for rows in table.ranges():
            own = np.arange(rows.start, rows.stop)
            if ids is not None:
                own = ids[slice(*np.searchsorted(ids, (rows.start, rows.stop)))]
            if len(own):
                block = table.block(rows.start, rows.stop)[torch.from_numpy(own - rows.start)]
                flat = pa.array(block.float().reshape(-1).numpy())
                vectors = pa.FixedSizeListArray.from_arrays(flat, width)
                writer.write_table(pa.table([pa.array(own), vectors], schema))


def read_ids(path: Path, rows: int) -> np.ndarray:
    """The ids that a text file names, one a line, int64, ascending and distinct. Raises DataError
    for what is no id of a table of `rows` rows."""
    try:
        ids = np.unique(np.array([int(line) for line in path.read_bytes().split()], np.int64))
        if len(ids) and not 0 <= ids[0] <= ids[-1] < rows:
            raise ValueError(f"it names {ids[0]} to {ids[-1]}")
    except (OSError, ArithmeticError, ValueError) as error:
        raise DataError(
            f"rows={path} cannot be used ({error}): give a text file with one id, 0 to "
            f"{rows - 1}, a line"
        ) from error
    return ids


# -----------------------------------------------------------------------------
# Reading, and which of the tensors that are there a table starts from.


def read_safetensors(folder: Path) -> dict[str, Stored]:
    """The tensors of weights in all `*.safetensors` files of a folder, by name, to be read later.

    Raises ConfigError where there are none, DataError for a damaged file.
    """
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found |= _tensors(path)
        except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is no whole safetensors file ({error}): write it anew"
            ) from error
    if not found:
        raise ConfigError(f"{folder} has no *.safetensors with weights: give a folder that has")
    return found


def open_regular(path: Path, flags: int = 0) -> io.BufferedReader:
    """A regular file for reading; `flags`: more of `os.open`. Raises OSError.

    A FIFO is refused, whose opening or reading would wait for a writer.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def _tensors(path: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        room = os.fstat(file.fileno()).st_size - 8 - length
        if room < 0:
            raise ValueError(f"a header of {length} bytes goes beyond its end")
        header = json.loads(file.read(length))
    for name, place in header.items():
        if name == "__metadata__" or place["dtype"] not in _DTYPES or not place["shape"]:
            continue
        dtype, shape, (begin, end) = _DTYPES[place["dtype"]], place["shape"], place["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (begin, *shape))
        if not whole or begin + prod(shape) * dtype.itemsize != end or end > room:
            raise ValueError(f"{name} is not where its header says")
        block = partial(_read_block, path, 8 + length + begin, shape, dtype)
        found[name] = Stored(tuple(shape), dtype, block)
    return found


def _read_block(
    path: Path, begin: int, shape: Sequence[int], dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    """Rows [start, stop) of a tensor that begins at byte `begin` of a file."""
    row = prod(shape[1:]) * dtype.itemsize
    data = bytearray((stop - start) * row)
    with open_regular(path) as file:
        file.seek(begin + start * row)
        if file.readinto(data) != len(data):
            raise DataError(f"{path} became shorter while it was read: leave it in place")
    return torch.frombuffer(data, dtype=dtype).view(stop - start, *shape[1:])


def find_weights(
    stored: Mapping[str, Stored], tables: Sequence[TableSpec], names: Mapping[str, Any]
) -> tuple[dict[int, Stored], str]:
    """The weights of tables among `stored`, by index of the table; and in words, which tables
    start from them, and which, or which of their rows, do not.

    Table `t` is tensor `t` or `t.weight`, or the one whose name ends with `.t.weight`, as in the
    `state_dict` of a model; `names[t]` is a name in place of t. Raises ConfigError for a tensor of
    another width or with more rows than the table, for names that are not of one tensor alone, and
    where no table is found.
    """
    found: dict[int, Stored] = {}
    grown, drawn = [], []
    unknown = set(names) - {table.name for table in tables}
    for index, table in enumerate(tables):
        name = str(names.get(table.name, table.name))
        exact = (name, f"{name}.weight", f"tables.{name}.weight")  # the last one of a checkpoint
        fitting = [own for own in exact if own in stored]
        fitting = fitting or [own for own in stored if own.endswith(f".{name}.weight")]
        if len(fitting) > 1 or (table.name in names and not fitting):
            unknown.add(name)
        elif not fitting:
            drawn.append(table.name)
        else:
            rows, *widths = stored[fitting[0]].shape
            if widths != [table.dim] or rows > table.rows:
                raise ConfigError(
                    f"table {table.name!r} has {table.rows} rows x {table.dim} and cannot start "
                    f"from {fitting[0]!r}, {' x '.join(map(str, (rows, *widths)))}: the width must "
                    "be the same, and the table must have as many rows or more"
                )
            if rows < table.rows:
                grown.append(f"{table.name} (the first {rows:,} of {table.rows:,} rows)")
            found[index] = stored[fitting[0]]
    if unknown or not found:
        raise ConfigError(
            f"{', '.join(sorted(unknown or set(drawn)))}: not one table and one stored tensor; "
            f"tables are {', '.join(table.name for table in tables[:9])}, and stored is "
            f"{', '.join(sorted(stored)[:9])}"
        )
    said = f"{len(found)} of {len(tables)} tables"
    said += f"; grown: {', '.join(grown)}" if grown else ""
    return found, said + (f"; not stored: {', '.join(drawn)}" if drawn else "")
