"""Rows and homes: (table, id) <-> one row number in [0, V) per group, and the home rank of a row.

W is the number of ranks, V the number of rows of a group. Everything here is NumPy on the CPU.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from distcache.compiled import compiled, i8, in8, out8, types
from distcache.errors import ConfigError

MOST_ROWS = 1 << 53
"""Rows of all tables together. Expected rows are float64 numbers, which are exact up to here."""

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes of 2 bytes: rows are stored and moved in them, not updated."""

WIDE_BYTES = 16
"""Most bytes that a GPU thread reads or writes at once, at multiples of as many."""

_GOLDEN, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _LAST = np.uint64(32), np.uint64(33)


def stored_dtype(data_type: Any) -> torch.dtype | None:
    """The `TableSpec.dtype` for a `data_type` of TorchRec's, or its name: bfloat16 of BF16, None
    of FP32, and of all others, INT8 and INT4 among them, float16, as in its unsharded classes
    (these take BF16 for float16 too, its sharded ones do not)."""
    dtypes = {"FP32": None, "BF16": torch.bfloat16}
    return dtypes.get(getattr(data_type, "name", data_type or "FP32"), torch.float16)


def whole_number(value: Any, field: str, table: str) -> int:
    """Return an integer of any type as an int. Raises ConfigError for other values."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise ConfigError(
            f"table {table!r}: {field}={value!r} of type {type(value).__name__} must be a whole "
            "number: give an int"
        ) from error


_LONGEST_FILE_STEM = 225
"""Bytes of a table's file name at most: file systems have 255, of which suffixes take some."""


def file_stem(name: str) -> str:
    """The name of a table's file, without its suffix; `urllib.parse.unquote` gives `name` back.

    Letters beyond ASCII, separators and control characters are percent-encoded, and so is a dot at
    the beginning, which would hide the file. Raises ConfigError for a name that names no file.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"table {name!r}: a table's name is a text of at least one letter")
    try:
        stem = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise ConfigError(f"table {name!r}: the name cannot be written in UTF-8") from error
    if stem.startswith("."):
        stem = f"%2E{stem[1:]}"
    if len(stem) > _LONGEST_FILE_STEM:
        raise ConfigError(
            f"table {name[:40]!r}...: the name of {len(name)} characters takes {len(stem)} bytes "
            f"in a file's name, and {_LONGEST_FILE_STEM} is the most (beyond ASCII a character "
            "takes 6 to 12): give a shorter one"
        )
    return stem


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: `rows` x `dim`, read by one or more features.

    `name`: one that `file_stem` can make a file name of.
    `dtype`: of its weights where they are stored, cached and moved, one of `HALVES`; None: that in
    which they are updated, and which their optimizer state always has.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("rows", "dim"):  # NumPy's integers overflow, and have no place in a file
            object.__setattr__(self, field, whole_number(getattr(self, field), field, self.name))
        file_stem(self.name)
        if self.rows < 1 or self.dim < 1:
            raise ConfigError(
                f"table {self.name!r} has {self.rows} rows x {self.dim}: both must be at least 1"
            )
        if self.rows > MOST_ROWS:
            raise ConfigError(
                f"table {self.name!r} has {self.rows:,} rows, more than the {MOST_ROWS:,} that all "
                "tables may have together: give fewer"
            )
        if isinstance(self.features, str):
            raise ConfigError(
                f"table {self.name!r}: features={self.features!r} is a text: give names, "
                f"({self.features!r},)"
            )
        if not self.features:
            raise ConfigError(f"table {self.name!r} has no feature that reads it")
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(
                f"table {self.name!r}: pooling {self.pooling!r} is not 'sum' or 'mean'"
            )
        if self.dtype not in (None, *HALVES):
            raise ConfigError(
                f"table {self.name!r}: dtype={self.dtype}: give torch.float16, torch.bfloat16 or "
                "None, the dtype in which rows are updated"
            )

    @classmethod
    def of_config(cls, config: Any) -> TableSpec:
        """The table of a config with TorchRec's attributes; one that is not pooled has "sum"."""
        pooling = getattr(config, "pooling", None) or "sum"
        return cls(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            tuple(config.feature_names),
            str(getattr(pooling, "name", pooling)).lower(),
            stored_dtype(getattr(config, "data_type", None)),
        )

    def feature_of(self, lookup: str) -> str:
        """Return the feature that a lookup named `feature@table` reads (see `lookup_names`)."""
        return lookup.removesuffix(f"@{self.name}")

    def width(self, itemsize: int) -> int:
        """How many elements of `itemsize` bytes take as much as the weights of a row."""
        own = itemsize if self.dtype is None else self.dtype.itemsize
        return -(-self.dim * own // itemsize)


def lookup_names(tables: Sequence[TableSpec]) -> list[str]:
    """Return a name for each lookup, a (table, feature), table by table, as TorchRec names them:
    `feature`, or `feature@table` where several tables read the feature.
    """
    readers = Counter(feature for table in tables for feature in table.features)
    return [
        f"{feature}@{table.name}" if readers[feature] > 1 else feature
        for table in tables
        for feature in table.features
    ]


def mix(block: np.ndarray) -> np.ndarray:
    """A fixed integer hash of block numbers (int64) to non-negative int64.

    Two rounds of shift and multiply: one multiplication alone leaves some strides in step with it
    (ids of stride 903 all had one home of four).
    """
    found = block.astype(np.uint64)
    found ^= found >> _HALF
    found *= _GOLDEN
    found ^= found >> _HALF
    found *= _SECOND
    found >>= _LAST
    return found.view(np.int64)


@compiled(types.void(i8, i8, in8, out8))
def rows_at(home: int, world: int, local: np.ndarray, rows: np.ndarray) -> None:
    """See `RowLayout.row`; both int64 `[m]`."""
    for i in range(len(local)):
        key = np.uint64(local[i])
        key = (key ^ (key >> _HALF)) * _GOLDEN
        key = (key ^ (key >> _HALF)) * _SECOND
        rows[i] = local[i] * world + (home - np.int64(key >> _LAST)) % world


class RowLayout:
    """The row numbers of one group of tables of one width and dtype, and the home rank of every
    row.

    Tables lie one after the other: row = offset[table] + id. Every run of W rows visits every
    rank once: home(row) = (row + mix(row // W)) % W; a home's dense local index is row // W.
    `local_rows`: size of that index, ceil(V / W); `most_rows`: of the home that has most, the same.
    """

    def __init__(self, tables: Sequence[TableSpec], world_size: int) -> None:
        dims = {table.dim for table in tables}
        if len(dims) != 1:
            raise ConfigError(f"a group holds tables of one width, got {sorted(dims)}")
        self.dtype = tables[0].dtype
        self.tables = tuple(tables)
        self.world_size = world_size
        self.dim = dims.pop()
        self.offsets = np.concatenate(([0], np.cumsum([t.rows for t in tables]))).astype(np.int64)
        self.rows = int(self.offsets[-1])
        self.local_rows = self.most_rows = -(-self.rows // world_size)

    def kind(self, state_width: int, dtype: torch.dtype) -> RowKind:
        """What a row is whose optimizer state is `state_width` numbers of `dtype`."""
        return RowKind(self.dim, state_width, dtype, self.dtype or dtype)

    def home(self, rows: np.ndarray) -> np.ndarray:
        """Home rank of each row (int64)."""
        if self.world_size == 1:
            return np.zeros(len(rows), dtype=np.int64)
        return (rows + mix(rows // self.world_size)) % self.world_size

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Dense local index of each row at its home."""
        return rows // self.world_size if self.world_size > 1 else rows

    def row(self, home: int, local: np.ndarray) -> np.ndarray:
        """The row of each local index of one home: the inverse of (`home`, `local`).

        A local index of the last, ragged block may name a row >= V, which no id ever uses.
        """
        if self.world_size == 1:
            return local
        rows = np.empty(len(local), np.int64)
        rows_at(home, self.world_size, np.ascontiguousarray(local, dtype=np.int64), rows)
        return rows


@dataclass(frozen=True)
class RowKind:
    """A row in memory: D = `dim` weights of dtype `stored`, and S = `state_width` numbers of
    optimizer state of `dtype`, in which rows are updated."""

    dim: int
    state_width: int
    dtype: torch.dtype
    stored: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of weights and of state."""
        return self.stored, self.dtype

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row and its state."""
        return self.bytes_of(1, 1)

    def bytes_of(self, rows: int, states: int) -> int:
        """Bytes of the weights of `rows` rows and the state of `states` of them."""
        weights = rows * self.dim * self.stored.itemsize
        return weights + states * self.state_width * self.dtype.itemsize

    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows `[m, D]`, and their state `[m, S]` where S > 0, that lie in `memory`, uint8
        `[m * nbytes]`.

        The part whose rows begin at multiples of more bytes comes first. So the alignment of both
        depends on the widths, and not on m, and kernels need one variant.
        """
        rows = len(memory) // max(self.nbytes, 1)
        weight_bytes = self.bytes_of(rows, 0)
        if not self.state_width:
            return memory[:weight_bytes].view(self.stored).view(rows, self.dim), None
        weight_alignment = math.gcd(WIDE_BYTES, self.bytes_of(1, 0))
        if weight_alignment > math.gcd(WIDE_BYTES, self.bytes_of(0, 1)):
            weight, state = memory.tensor_split([weight_bytes])
        else:
            state, weight = memory.tensor_split([self.bytes_of(0, rows)])
        weight = weight.view(self.stored).view(rows, self.dim)
        return weight, state.view(self.dtype).view(rows, self.state_width)


def group_tables(tables: Sequence[TableSpec]) -> list[list[int]]:
    """Indices of tables by group (one width and dtype each), in order of first appearance."""
    groups: dict[tuple[int, torch.dtype | None], list[int]] = {}
    for index, table in enumerate(tables):
        groups.setdefault((table.dim, table.dtype), []).append(index)
    return list(groups.values())


def split_slots(slots: int, hot: int, local_rows: int, world_size: int) -> tuple[int, int]:
    """The slots C of a device split into those of its replicated and of its sharded rows.

    `hot`: replicated rows on the fullest home, of its `local_rows`. They get a slot each, on all
    devices, as long as half of the slots are left for the sharded ones, which need no more than a
    home has rows.
    """
    replicated = max(1, min(hot, slots // 2 // world_size)) * world_size if hot else 0
    return replicated, max(1, min(slots - replicated, local_rows))
