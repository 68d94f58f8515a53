"""What the planner's bench plans: the rows of one group of tables in each placement, as training.

Slots are those of training: C on each device, whatever the placement; with `mixed` the hot rows
are the most frequent of the first steps, as many as a share of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.config.tree import CacheConfig, Config
from distcache.data.batch import BatchSource
from distcache.engine.groups import (
    MIXED,
    REPLICATED,
    SHARDED,
    Placement,
    RegionSlots,
    TableGroup,
    make_groups,
    region_slots,
)
from distcache.engine.room import Region
from distcache.engine.tables import home_regions
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.planner.policy import DEFAULT
from distcache.planner.shard import HotRows
from distcache.popularity.slots import cache_slots
from distcache.trainer import build
from distcache.trainer.plan_cache import read_window, window_steps

PLACEMENTS = (REPLICATED, SHARDED, MIXED)


@dataclass(frozen=True)
class PlacedGroup:
    """A group of tables with its replicated rows, and its slots on each device."""

    group: TableGroup
    slots: RegionSlots

    def hot_rows(self) -> HotRows | None:
        """The replicated rows, where others are sharded."""
        return None if self.group.hot is None else HotRows(self.group.hot)

    def regions(self, rank: int, prefetch: int) -> list[Region]:
        """What `rank` plans as a home, with new planners."""
        return home_regions([self], rank, prefetch, DEFAULT, [None])


class Placer:
    """Makes the one group of a configuration in any placement and number of ranks.

    `share`: of all rows, those that `mixed` replicates. Raises ConfigError for one outside (0, 1).
    """

    def __init__(self, config: Config, share: float) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"share={share}: the replicated share of the rows lies in (0, 1)")
        self.cache: CacheConfig = config.cache
        self.source: BatchSource = build.build_source(config)
        self.tables = build.build_tables(config, self.source)
        self._share = share
        self._hot: tuple[np.ndarray, ...] | None = None

    def group(self, world_size: int) -> TableGroup:
        """The group, all rows replicated."""
        features = self.source.features
        return make_groups(self.tables, features, world_size)[0]

    def place(self, kind: str, world_size: int) -> PlacedGroup:
        """The group in the placement `kind`."""
        group, cache = self.group(world_size), self.cache
        placement = Placement(kind, hot=self._hottest() if kind == MIXED else ())
        group = placement.groups([group])[0]
        size = [(group.layout.rows, group.dim, 0)]
        slots = cache_slots(cache.rows, cache.ratio, cache.bytes, size, 4, world_size)[0]
        return PlacedGroup(group, region_slots(group, slots))

    def _hottest(self) -> tuple[np.ndarray, ...]:
        """Ids of each table, int64, ascending: together the most frequent `share` of all rows."""
        if self._hot is None:
            self._hot = hot_ids(self.source, self.tables, window_steps(self.cache), self._share)
        return self._hot


def check_placements(kinds: Sequence[str]) -> None:
    """Raise ConfigError for a placement that there is not."""
    for kind in kinds:
        if kind not in PLACEMENTS:
            raise ConfigError(f"placements={kind}: choose from {', '.join(PLACEMENTS)}")


def hot_ids(
    source: BatchSource, tables: Sequence[TableSpec], steps: int, share: float
) -> tuple[np.ndarray, ...]:
    """For each table its ids, int64, ascending, that are among the most frequent `share` of all
    rows in the first `steps`; fewer where fewer occur."""
    window = read_window(source, tables, steps, 1)
    table = np.repeat(np.arange(len(tables)), [len(ids) for ids in window.hottest])
    wanted = max(1, round(share * sum(table.rows for table in tables)))
    chosen = np.argsort(-np.concatenate(window.uses), kind="stable")[:wanted]
    counts = np.bincount(table[chosen], minlength=len(tables))
    return tuple(np.sort(ids[:k]) for ids, k in zip(window.hottest, counts, strict=True))
