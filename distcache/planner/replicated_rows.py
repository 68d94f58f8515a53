"""Replicated rows of a group whose other rows are sharded. Pure."""

from __future__ import annotations

import numpy as np

from distcache.layout import RowLayout
from distcache.planner.victims import grouped


class ReplicatedRows:
    """Rows, int64 `[K]`, ascending, and where to look for one among them (20 K to 36 K bytes); as a
    planner's layout, whose index then takes memory for these rows alone.

    Each home numbers its own 0, 1, ... in ascending order; `sizes` int64 `[W]`: how many each has.
    """

    def __init__(self, layout: RowLayout, rows: np.ndarray) -> None:
        self.rows, self.world_size = np.array(rows, dtype=np.int64), layout.world_size
        self.offsets = np.zeros(1, np.int64)  # they are of no table as a whole
        last = int(rows[-1]) if len(rows) else 0
        self._shift = max(0, last.bit_length() - len(rows).bit_length() - 2)
        edges = np.arange((last >> self._shift) + 2) << self._shift
        self._starts = np.searchsorted(self.rows, edges).astype(np.int32)
        order, self._begins = grouped(layout.home(self.rows), layout.world_size)
        self.sizes, self._by_home = np.diff(self._begins), self.rows[order]
        self._local = np.full(len(rows) + 1, -1, np.int32)
        """And, behind them, -1, which is that of place -1."""
        self._local[order] = np.arange(len(rows)) - np.repeat(self._begins[:-1], self.sizes)

    @property
    def most_rows(self) -> int:
        """Rows of the home that has most; 1 where none has any."""
        return max(1, *self.sizes.tolist())

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The place of each of `rows` int64 `[n]` among these, -1 where it is none; int32."""
        place = np.searchsorted(self.rows, rows)
        return np.where(np.append(self.rows, -1)[place] == rows, place, -1).astype(np.int32)

    def local(self, rows: np.ndarray) -> np.ndarray:
        """The number of each of `rows` at its home; -1 for one that is none of these."""
        return self._local[self.find(rows)]

    def row(self, home: int, local: np.ndarray) -> np.ndarray:
        """The row of each number: the inverse of `local`, at one home."""
        return self._by_home[self._begins[home] :][local]

    def rated(self, home: int, layout: RowLayout, classes: np.ndarray) -> np.ndarray:
        """The classes of a home's rows, uint8, of those by `layout`'s local indices there."""
        return classes[layout.local(self.row(home, np.arange(self.sizes[home])))]

    @property
    def known(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The fields of `request_loops.Homes` that describe these rows."""
        return self.rows, self._local, self._starts, self._shift
