"""What the ranks of a node share of the statistics: read by one of them, mapped by the others."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.comm.agree import agree_on, together
from distcache.comm.world import World
from distcache.errors import ConfigError
from distcache.layout import RowLayout
from distcache.popularity.classes import row_classes
from distcache.popularity.order import RowOrder, fill_order, order_dtype
from distcache.popularity.statistics import Statistics
from distcache.store.memory import SharedMemory, describe_bytes

log = logging.getLogger(__name__)

_BLOCK = 1 << 20

_WAY_OUT = (
    "use cache.order=ids, cache.warm_start=0 or a policy without statistics (cache.policy, "
    "cache.tail), or more memory"
)


@dataclass(frozen=True)
class Popularity:
    """What a cache takes from `statistics`, whose tables are those of the model, in order.

    `hot_rows`: for each table, how many of its most frequent rows lie in the cache first; `order`:
    whether rows are renumbered; `warm_start`: share of the slots filled before step 0; `classes`:
    whether planners rank rows by class; `pinned_rows`: for each table, how many of its most
    frequent rows are `PINNED` (None: no row is).
    """

    statistics: Statistics
    hot_rows: tuple[int, ...]
    order: bool = False
    warm_start: float = 0.0
    classes: bool = False
    pinned_rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GroupPopularity:
    """The popularity of one group's rows, in memory that the ranks of a node share.

    `order`: the planner's numbering (None: the layout's); `classes` uint8 `[V]`: the class of each
    row by the layout's numbering, or None; `hot` int64 `[K]`: the rows to lie in the cache first,
    the likeliest first, by the layout's numbering, and -1 where there are fewer.
    """

    order: RowOrder | None = None
    classes: np.ndarray | None = None
    hot: np.ndarray | None = None

    def classes_at(self, layout: RowLayout, home: int) -> np.ndarray | None:
        """The class of each of a home's rows by its local index, uint8 `[ceil(V / W)]`."""
        if self.classes is None or (layout.world_size == 1 and self.order is None):
            return self.classes
        found = np.zeros(layout.local_rows, dtype=np.uint8)
        for start in range(0, layout.local_rows, _BLOCK):
            stop = min(start + _BLOCK, layout.local_rows)
            rows = layout.row(home, np.arange(start, stop))
            there = rows < layout.rows  # the last index may be of no row
            if self.order is not None:
                rows[there] = self.order.original(rows[there])
            found[start:stop][there] = self.classes[rows[there]]
        return found


def share_popularity(
    world: World,
    layouts: Sequence[RowLayout],
    members: Sequence[Sequence[int]],
    popularity: Popularity,
) -> list[GroupPopularity]:
    """What each group needs of `popularity`; called by all ranks.

    `members`: the tables of each group. Local rank 0 of each node reads the counts. Raises
    ConfigError where the ranks' statistics differ, MemoryTooSmallError on every rank where some
    node's memory does not hold the arrays.
    """
    _agree(world, popularity)
    shared, total = [], 0
    for layout, tables in zip(layouts, members, strict=True):
        group, fill, size = _make(world, layout, tables, popularity)
        together(world, fill)
        _check_nodes(world, group)
        shared.append(group)
        total += size
    if world.is_first and total:
        log.info("popularity of rows: %s of host memory on each node", describe_bytes(total))
    return shared


def _agree(world: World, popularity: Popularity) -> None:
    statistics = popularity.statistics
    agree_on(
        world,
        {
            "cache.statistics (its fingerprint)": statistics.fingerprint,
            "cache.statistics (its lookups)": [table.lookups for table in statistics.tables],
            "the hot rows of each table": popularity.hot_rows,
            "the pinned rows of each table": popularity.pinned_rows,
            "cache.order": popularity.order,
            "cache.warm_start": popularity.warm_start,
        },
    )


def _check_nodes(world: World, group: GroupPopularity) -> None:
    """ConfigError where nodes have other orders, classes or hot rows: homes would not agree."""
    if world.local_size == world.size:
        return
    order = () if group.order is None else (group.order.row_of,)
    arrays = [a for a in (*order, group.classes, group.hot) if a is not None]
    digests = together(world, lambda: None if world.local_rank else [zlib.crc32(a) for a in arrays])
    known = [(rank, digest) for rank, digest in enumerate(digests) if digest is not None]
    for rank, digest in known[1:]:
        if digest != known[0][1]:
            raise ConfigError(
                f"cache.statistics has other counts on the node of rank {rank} than on that of "
                f"rank {known[0][0]}, though the tables are the same: give all nodes a copy of one "
                "folder"
            )


def _make(
    world: World, layout: RowLayout, tables: Sequence[int], popularity: Popularity
) -> tuple[GroupPopularity, Callable[[], None], int]:
    """The arrays of a group, zero yet; what fills them, on every rank; their bytes."""
    rows, dtype = layout.rows, np.dtype(order_dtype(layout.rows))
    hot = sum(popularity.hot_rows[table] for table in tables) if popularity.warm_start else 0
    ordered = rows if popularity.order else 0
    sizes = [(hot, np.dtype(np.int64)), (ordered, dtype), (ordered, dtype)]
    classed = popularity.classes or popularity.pinned_rows is not None
    sizes.append((rows if classed else 0, np.dtype(np.uint8)))
    size = sum(count * kind.itemsize for count, kind in sizes)
    if size == 0:
        return GroupPopularity(), _nothing, 0
    memory = SharedMemory.create(size, world, "the popularity of the rows", _WAY_OUT)
    parts, offset = [], 0
    for count, kind in sizes:
        own = torch.from_numpy(np.empty(0, kind)).dtype
        parts.append(memory.tensor(offset, (count,), own).numpy() if count else None)
        offset += count * kind.itemsize
    memory.close()  # from here on the arrays hold the mapping
    hottest, position, row_of, classes = parts
    order = None if position is None or row_of is None else RowOrder(position, row_of)
    group = GroupPopularity(order, classes, hottest)

    def fill() -> None:
        if world.local_rank:
            return
        statistics = popularity.statistics
        if order is not None:
            fill_order(order, layout, [statistics.tables[table] for table in tables])
        if classes is not None:
            pinned = popularity.pinned_rows
            own = None if pinned is None else [pinned[table] for table in tables]
            classes[:] = row_classes(statistics, tables, own)
        if hottest is not None:
            found = hot_rows(statistics, tables, popularity.hot_rows, layout)
            hottest[: len(found)], hottest[len(found) :] = found, -1

    return group, fill, size


def _nothing() -> None:
    pass


def hot_rows(
    statistics: Statistics, tables: Sequence[int], counts: Sequence[int], layout: RowLayout
) -> np.ndarray:
    """The `counts[t]` most frequent rows of each table t of a group, the most frequent first.

    int64, by the numbers of `layout`; fewer where fewer rows of a table were looked up.
    """
    rows, use = [], []
    for place, index in enumerate(tables):
        table = statistics.tables[index]
        ids = table.hottest(counts[index])
        rows.append(ids + int(layout.offsets[place]))
        use.append(table.dense()[ids])
    order = np.argsort(-np.concatenate(use), kind="stable")
    return np.concatenate(rows)[order]
