"""`data.batching`: the hot set of a run, and its data in hot and cold batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from distcache.comm.world import World
from distcache.config import Config
from distcache.data.batch import BatchSource
from distcache.data.hot_cold import HotColdSource
from distcache.data.split import SplitSource
from distcache.errors import ConfigError
from distcache.layout import TableSpec, group_tables
from distcache.popularity.hot import HotSet, curve_of, greedy, rows_that_fit
from distcache.popularity.plan import plan_slots
from distcache.popularity.statistics import Statistics
from distcache.run.build import dtype_of
from distcache.run.phases import Phase
from distcache.run.popularity import budget_of, read_checked, slot_state

logger = logging.getLogger(__name__)


def arrange(
    config: Config, world: World, source: BatchSource, tables: Sequence[TableSpec]
) -> BatchSource:
    """`source` as `data.batching` says; called by all ranks, which come to the same.

    The hot set depends on the keys of `cache`, not on the mode, so that all modes see the same
    samples. Raises ConfigError where there are no statistics, or where they or `data.hot_rows` do
    not fit.
    """
    kind = config.data.batching
    if kind == "as_is":
        return source
    statistics = read_checked(config, tables, source)
    if statistics is None:
        raise ConfigError(f"data.batching={kind} needs cache.statistics=<folder>")
    hot = HotSet(statistics, choose(config, world, statistics, tables))
    if kind == "split":
        if config.parallel.mode == "hybrid" and world.is_first:
            logger.info("data.batching=split: hybrid trains whole batches, the same up to rounding")
        return SplitSource(source, hot)  # type: ignore[return-value]
    return HotColdSource(source, hot, show=world.is_first, world=world)  # type: ignore[arg-type]


def choose(
    config: Config, world: World, statistics: Statistics, tables: Sequence[TableSpec]
) -> list[int]:
    """How many of the most frequent rows of each table are hot: `data.hot_rows`."""
    curves = [curve_of(statistics, index) for index in range(len(tables))]
    groups, wanted = group_tables(tables), config.data.hot_rows

    def slots_of(ranks: int) -> tuple[int, ...]:
        budget = budget_of(config, dtype_of(config).itemsize, ranks)
        widths = slot_state(config, tables, ranks)
        return plan_slots(tables, widths, budget, config.cache.split, statistics).slots

    if wanted == "auto":
        found = [0] * len(tables)  # the same at every number of ranks
        for members, count in zip(groups, slots_of(1), strict=True):
            own = [curves[index] for index in members]
            hot = rows_that_fit(own, count, config.data.global_batch_size)
            for index, rows in zip(members, hot, strict=True):
                found[index] = rows
        return found
    rows = sum(statistics.table_rows)
    found = greedy(curves, round(wanted * rows) if isinstance(wanted, float) else wanted)
    if config.parallel.mode == "data":
        _check_room(tables, groups, found, slots_of(world.size))
    return found


def _check_room(
    tables: Sequence[TableSpec],
    groups: Sequence[Sequence[int]],
    hot_rows: Sequence[int],
    slots: Sequence[int],
) -> None:
    """ConfigError where the hot rows of a group do not fit its slots."""
    for members, count in zip(groups, slots, strict=True):
        hot = sum(hot_rows[index] for index in members)
        if hot >= count and hot < sum(tables[index].rows for index in members):
            raise ConfigError(
                f"data.hot_rows: {hot} hot rows of the tables of width {tables[members[0]].dim} "
                f"leave no room for cold ones in {count} slots: give fewer, auto, or a larger "
                "cache.rows (or cache.ratio, cache.bytes)"
            )


def batching_summary(source: Any, phase: Phase | None) -> dict[str, Any]:
    """What `summary.json` says of hot and cold batches; nothing without them."""
    if not isinstance(source, HotColdSource):
        return {}
    return {
        "hot_samples": source.epoch(0).share,
        "phase_rate": phase and phase.rate,
    }
