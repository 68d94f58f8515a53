"""The two regions of a cache: rows that every rank has, and rows that their homes alone have.

A row is replicated when it is among the `hot` rows of its group, and sharded otherwise. Each home
plans its rows of either region by themselves, in slots of their own. DESIGN, section 6; splitting
replicated hot rows from a sharded tail is SCARS' idea (arXiv 2411.01611).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distcache.layout import RowLayout
from distcache.planner.bodies import bodies
from distcache.planner.home import HomeDecision
from distcache.planner.relays import Routes

FETCHED = np.int32(1 << 30)
"""Flag of a reply: the row is fetched. The lower bits are one more than the step that named the row
before, 0 for none."""


class HotRows:
    """Rows, int64 `[K]`, ascending, and where to look for one among them (16 K to 32 K bytes)."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = np.ascontiguousarray(rows, dtype=np.int64)
        last = int(rows[-1]) if len(rows) else 0
        self._shift = max(0, last.bit_length() - len(rows).bit_length() - 2)
        edges = np.arange((last >> self._shift) + 2) << self._shift
        self._starts = np.searchsorted(self.rows, edges).astype(np.int32)

    def find(self, rows: np.ndarray) -> np.ndarray:
        """The place of each of `rows` int64 `[n]` among these, -1 where it is none; int32."""
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        found = np.empty(len(rows), np.int32)
        bodies().find_sorted(rows, self.rows, self._starts, self._shift, found)
        return found


def in_tail(rows: np.ndarray, hot: np.ndarray | HotRows) -> np.ndarray:
    """Whether each of `rows` int64 `[n]` is none of `hot` int64 `[K]`, ascending; bool."""
    if isinstance(hot, HotRows):
        return hot.find(rows) < 0
    if len(hot) == 0:
        return np.ones(len(rows), bool)
    place = np.minimum(np.searchsorted(hot, rows), len(hot) - 1)
    return hot[place] != rows


class HotLayout:
    """The hot rows of one home, numbered 0, 1, ... in ascending order, as a planner's layout.

    Its index then takes memory for these rows alone.
    """

    def __init__(self, layout: RowLayout, home: int, hot: np.ndarray) -> None:
        """`hot`: those of all homes, int64 `[K]`, ascending."""
        self.world_size, self.rows = layout.world_size, layout.rows
        self._rows = hot[layout.home(hot) == home]
        self._known = HotRows(self._rows)

    @property
    def local_rows(self) -> int:
        """Hot rows of this home; 1 where it has none."""
        return max(1, len(self._rows))

    def local(self, rows: np.ndarray) -> np.ndarray:
        """The number of each of `rows`, which are hot and of this home; -1 for any other."""
        return self._known.find(rows)

    def row(self, home: int, local: np.ndarray) -> np.ndarray:
        """The row of each number: the inverse of `local`."""
        return self._rows[local]

    def rated(self, layout: RowLayout, classes: np.ndarray) -> np.ndarray:
        """The classes of these rows, uint8 `[local_rows]`, of those by `layout`'s local indices."""
        found = np.zeros(self.local_rows, np.uint8)
        found[: len(self._rows)] = classes[layout.local(self._rows)]
        return found


@dataclass(frozen=True)
class ShardParts:
    """What one rank knows of the sharded rows of a step.

    `own`: its home's decision; `replies`: for each home, int32 for every row that this rank asked
    it for, see `replies_to_all`; `distinct`, `misses`: rows of all homes; `early`: whether rows may
    travel before the step; `routes`: where rows cross to a node once, and `masks`, what each home
    told of that (`relays.masks_for_all`).
    """

    own: HomeDecision
    replies: tuple[np.ndarray, ...]
    distinct: int
    misses: int
    early: bool
    routes: Routes | None = None
    masks: tuple[np.ndarray | None, ...] = ()

    @cached_property
    def joined(self) -> np.ndarray:
        """The replies of all homes, int32 `[N]`."""
        return np.concatenate(self.replies)

    @property
    def fetched(self) -> np.ndarray:
        """Which of this rank's sharded rows are fetched: indices, ascending."""
        return np.flatnonzero(self.joined & FETCHED)

    @property
    def named(self) -> np.ndarray:
        """One more than the step that named each of this rank's sharded rows before, int32 `[N]`;
        0 for none."""
        return self.joined & ~FETCHED


def replies_to_all(decision: HomeDecision) -> list[np.ndarray]:
    """What a home tells each rank about every sharded row that it asked for, int32; see
    `FETCHED`."""
    about = _about(decision)
    return [about[reply] for reply in decision.replies]


def reply_to(decision: HomeDecision, rank: int) -> np.ndarray:
    """What a home tells `rank` alone, as in `replies_to_all`."""
    return _about(decision)[decision.replies[rank]]


def _about(decision: HomeDecision) -> np.ndarray:
    """What a home tells of each of its rows, int32 `[U_h]`."""
    about = decision.previous + np.int32(1)
    about[decision.fetch] |= FETCHED
    return about


def nothing(label: tuple[int, str], world: int) -> HomeDecision:
    """The decision about replicated rows where a group has none; `label`: step and kind."""
    none = np.empty(0, np.int32)
    return HomeDecision(*label, *(none,) * 5, -1, (none,) * world, none)
