"""Rows and homes: (table, id) <-> one row number in [0, V) per group, and the home rank of a row.

Letters are those of the README's glossary. Everything here is NumPy on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distcache.errors import ConfigError

_GOLDEN, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: `rows` x `dim`, read by one or more features."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise ConfigError(
                f"table {self.name!r} has {self.rows} rows x {self.dim}: both must be at least 1"
            )
        if not self.features:
            raise ConfigError(f"table {self.name!r} has no feature that reads it")
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(
                f"table {self.name!r}: pooling {self.pooling!r} is not 'sum' or 'mean'"
            )


def mix(block: np.ndarray) -> np.ndarray:
    """A fixed integer hash of block numbers (int64) to non-negative int64.

    Two rounds of shift and multiply: one multiplication alone leaves some strides in step with it
    (ids of stride 903 all had one home of four).
    """
    found = block.astype(np.uint64)
    found ^= found >> np.uint64(32)
    found *= _GOLDEN
    found ^= found >> np.uint64(32)
    found *= _SECOND
    found >>= np.uint64(33)
    return found.view(np.int64)


class RowLayout:
    """The row numbers of one group of tables of one width, and the home rank of every row.

    Tables lie one after the other: row = offset[table] + id. Every run of W rows visits every
    rank once: home(row) = (row + mix(row // W)) % W; a home's dense local index is row // W.
    """

    def __init__(self, tables: Sequence[TableSpec], world_size: int) -> None:
        dims = {table.dim for table in tables}
        if len(dims) != 1:
            raise ConfigError(f"a group holds tables of one width, got {sorted(dims)}")
        self.tables = tuple(tables)
        self.world_size = world_size
        self.dim = dims.pop()
        self.offsets = np.concatenate(([0], np.cumsum([t.rows for t in tables]))).astype(np.int64)
        self.rows = int(self.offsets[-1])

    @cached_property
    def local_rows(self) -> int:
        """Size of a home's dense local index: ceil(V / W)."""
        return -(-self.rows // self.world_size)

    @property
    def most_rows(self) -> int:
        """Local rows of the home that has most: of all of them."""
        return self.local_rows

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
        return local * self.world_size + (home - mix(local)) % self.world_size


def group_tables(tables: Sequence[TableSpec]) -> list[list[int]]:
    """Indices of tables by group (one width each), in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        groups.setdefault(table.dim, []).append(index)
    return list(groups.values())


def split_slots(slots: int, hot: int, local_rows: int, world_size: int) -> tuple[int, int]:
    """The slots C of a device split into those of its replicated and of its sharded rows.

    `hot`: replicated rows on the fullest home, of its `local_rows`. They get a slot each, on all
    devices, as long as half of the slots are left for the sharded ones, which need no more than a
    home has rows.
    """
    replicated = max(1, min(hot, slots // 2 // world_size)) * world_size if hot else 0
    return replicated, max(1, min(slots - replicated, local_rows))
