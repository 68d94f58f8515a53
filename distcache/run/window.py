"""The first batches of a run, read before it starts: which rows are hot, and what a step needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from distcache.config import CacheConfig
from distcache.data.batch import BatchSource
from distcache.data.check import BatchCheck
from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec, group_tables
from distcache.planner.trace_sources import rows_by_rank, source_groups
from distcache.run.ahead import AUTO, LOOKAHEAD, PREFETCH


@dataclass(frozen=True)
class Window:
    """Ids of a few global batches. `hottest`: for each table its ids that were seen, the most
    frequent first, int64, and `uses`: how often each occurs; `rows`: for each group and step the
    rows that each rank names, int64."""

    hottest: tuple[np.ndarray, ...]
    uses: tuple[np.ndarray, ...]
    rows: tuple[list[list[np.ndarray]], ...]


def window_steps(cache: CacheConfig) -> int:
    """L + P + 1: the steps that are known when the first one is planned."""
    window = LOOKAHEAD if cache.lookahead == AUTO else cache.lookahead
    return 1 + window + (PREFETCH if cache.prefetch == AUTO else cache.prefetch)


def read_window(
    source: BatchSource,
    tables: Sequence[TableSpec],
    steps: int,
    world_size: int,
    on_bad_id: str = "error",
) -> Window:
    """Read the first `steps` global training batches of `source`; on one rank alone.

    `on_bad_id`: what becomes of ids outside their tables, as in training. Raises ConfigError for a
    source that cannot be read before training; DataError for ids that training would refuse.
    """
    if not hasattr(source, "train_batch"):
        raise ConfigError(
            "which rows are hot must be known before training, and these batches are read once: "
            "give cache.statistics=<folder of python -m distcache.analyze>, or use "
            "cache.placement=sharded or replicated"
        )
    if source.steps_per_epoch is not None:
        steps = min(steps, source.steps_per_epoch)
    groups, check = source_groups(source, tables), BatchCheck(tables, source.features, on_bad_id)
    rows: list[list[list[np.ndarray]]] = [[] for _ in groups]
    for step in range(steps):
        ids = check(source.train_batch(step, 0, 1)).ids
        values, offsets = ids.values.numpy(), ids.offsets.numpy()
        for place, group in enumerate(groups):
            parts = rows_by_rank(group, values, offsets, ids.batch_size, world_size)
            rows[place].append(parts)
    hottest: dict[int, np.ndarray] = {}
    uses: dict[int, np.ndarray] = {}
    for members, of_group in zip(group_tables(tables), rows, strict=True):
        layout = RowLayout([tables[table] for table in members], world_size)
        found, counts = _by_use(of_group, layout)
        hottest |= dict(zip(members, found, strict=True))
        uses |= dict(zip(members, counts, strict=True))
    places = range(len(tables))
    ids, times = (tuple(of[place] for place in places) for of in (hottest, uses))
    return Window(ids, times, tuple(rows))


def _by_use(
    rows: list[list[np.ndarray]], layout: RowLayout
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each table of a group the ids that occur, the most frequent first, and how often."""
    flat = np.concatenate([part for parts in rows for part in parts])
    seen, counts = np.unique(flat, return_counts=True)
    hottest, uses = [], []
    for place, (low, high) in enumerate(pairwise(np.searchsorted(seen, layout.offsets))):
        order = np.argsort(-counts[low:high], kind="stable")
        hottest.append(seen[low:high][order] - layout.offsets[place])
        uses.append(counts[low:high][order])
    return hottest, uses
