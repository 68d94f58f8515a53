"""Rows renumbered for planning, so that the most frequent of each table come first.

Only the planner sees these numbers: stores, caches, checkpoints, digests and errors speak of rows
as the layout numbers them. Another numbering gives rows other homes, and every row the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.layout import RowLayout
from distcache.popularity.statistics import TableCounts

_MOST_INT32 = 2**31


@dataclass(frozen=True)
class RowOrder:
    """A permutation of the rows of one group that keeps each table's rows together.

    `position` `[V]`: the planner's number of every row; `row_of` `[V]`: its inverse. int32 where
    V < 2^31, else int64; read-only once made, and shared by the ranks of a node.
    """

    position: np.ndarray
    row_of: np.ndarray

    def planned(self, rows: np.ndarray) -> np.ndarray:
        """The planner's numbers of `rows` (int64 `[n]`), int64."""
        return np.take(self.position, rows).astype(np.int64, copy=False)

    def original(self, planned: np.ndarray) -> np.ndarray:
        """The rows that the planner numbers `planned` (int64 `[n]`), int64."""
        return np.take(self.row_of, planned).astype(np.int64, copy=False)


def order_dtype(rows: int) -> type[np.signedinteger]:
    """The dtype of the permutations of `rows` rows."""
    return np.int32 if rows < _MOST_INT32 else np.int64


def fill_order(order: RowOrder, layout: RowLayout, counts: Sequence[TableCounts]) -> None:
    """Write the popularity order into the arrays of `order`.

    In each table the most frequent ids come first, then by id; after them, in the order of ids,
    those that were never looked up. `counts`: of the layout's tables, in order.
    """
    for place, table in enumerate(counts):
        start, stop = (int(at) for at in layout.offsets[place : place + 2])
        hot = table.order
        others = np.ones(stop - start, dtype=np.bool_)
        others[hot] = False
        order.row_of[start : start + len(hot)] = hot
        order.row_of[start + len(hot) : stop] = np.flatnonzero(others)
        order.row_of[start:stop] += start
        order.position[order.row_of[start:stop]] = np.arange(
            start, stop, dtype=order.position.dtype
        )
