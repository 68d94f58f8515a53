"""Which rows of a group a node's store holds, and where: those at home on the node's ranks."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from distcache.comm.world import World
from distcache.errors import PlanError
from distcache.layout import RowLayout


class Numbering(Protocol):
    """How the planner numbers the rows of a layout; homes are those of its numbers."""

    def planned(self, rows: np.ndarray) -> np.ndarray:
        """The planner's numbers of `rows`, int64 `[n]`."""
        ...

    def original(self, planned: np.ndarray) -> np.ndarray:
        """The rows, by the layout's numbers, that the planner numbers `planned`, int64 `[n]`."""
        ...


class NodePart:
    """The rows of `layout` at home on the `count` ranks from `first` on, in a dense order.

    Every block of W (planned) row numbers has one row of each home, so the row of home h in block
    b lies at b * count + (h - first). The last block may be ragged: it has up to `count` places
    that no row takes. With all W ranks on one node a row lies at its own number.
    """

    def __init__(
        self, layout: RowLayout, first: int, count: int, numbering: Numbering | None = None
    ) -> None:
        """`numbering`: where it differs from the layout's."""
        self.layout, self.first, self.count = layout, first, count
        self._numbering = numbering
        self.is_whole = count == layout.world_size
        self.rows = layout.rows if self.is_whole else layout.local_rows * count
        """Places of the part, with the few of the last block that no row takes."""

    @classmethod
    def of(cls, layout: RowLayout, world: World | None, numbering: Numbering | None) -> NodePart:
        """The part of this rank's node; None as `world` is all rows."""
        if world is None or world.nodes.count == 1:
            return cls(layout, 0, layout.world_size)
        return cls(layout, world.first_local, world.local_size, numbering)

    def homes(self, rows: np.ndarray) -> np.ndarray:
        """Home rank of each row by the layout's numbers, int64 `[n]`."""
        return self.layout.home(self._planned(rows))

    def holds(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row is at home on this node, bool `[n]`."""
        if self.is_whole:
            return np.ones(len(rows), dtype=np.bool_)
        homes = self.homes(rows)
        return (homes >= self.first) & (homes < self.first + self.count)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Where rows (int64 `[n]`, the layout's numbers) lie in the part, int64 `[n]`.

        Raises PlanError for a row outside [0, V), or at home on another node.
        """
        if self.is_whole or not len(rows):
            return rows  # what reads them checks the range
        if rows.min() < 0 or rows.max() >= self.layout.rows:
            bad = rows[(rows < 0) | (rows >= self.layout.rows)][0]
            raise PlanError(f"row {bad} is outside [0, {self.layout.rows})")
        planned = self._planned(rows)
        index = self.layout.home(planned) - self.first
        foreign = (index < 0) | (index >= self.count)
        if foreign.any():
            at = int(np.flatnonzero(foreign)[0])
            raise PlanError(
                f"row {rows[at]} is at home on rank {index[at] + self.first}, and this node's "
                f"store holds those of ranks {self.first} to {self.first + self.count - 1}"
            )
        return self.layout.local(planned) * self.count + index

    def _planned(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._numbering is None else self._numbering.planned(rows)
