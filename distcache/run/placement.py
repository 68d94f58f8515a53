"""From the config to how cached rows lie over the ranks: `cache.placement` and its `auto`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.config import CacheConfig, Config
from distcache.cost.links import Cluster
from distcache.data.batch import BatchSource
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.pipeline.placement import MIXED, REPLICATED, SHARDED, Placement
from distcache.popularity.statistics import Statistics
from distcache.run.choice import Known, choose, measured_cluster
from distcache.run.window import read_window, window_steps

log = logging.getLogger(__name__)

AUTO = "auto"


def resolve_placement(
    config: Config,
    world: World,
    known: tuple[Sequence[TableSpec], Sequence[int], Statistics | None],
    source: BatchSource,
    model: nn.Module,
) -> Placement:
    """The placement of the keys of `cache`; called by all ranks, decided by rank 0.

    `known`: the tables, C of each group, and statistics of the tables, in order, or None: then the
    first batches tell which rows are hot. Raises ConfigError on all ranks for rows or tables that
    there are not.
    """
    cache = config.cache
    if config.parallel.mode != "data":
        return Placement()
    replicated_counts(cache.replicated_rows or {}, known[0])  # before any batch is read
    if world.size == 1:
        return Placement()
    if cache.placement in (REPLICATED, SHARDED):
        return Placement(cache.placement, cache.state)
    tables, slots, statistics = known
    cluster = None
    if _is_open(cache):
        features = getattr(source, "dense_features", None)  # which `distcache.fit` is not told
        cluster = measured_cluster(config, world, tables, model, features)

    def on_first() -> Placement | None:
        if not world.is_first:
            return None
        window = None
        if statistics is None:
            bad = config.data.on_bad_id
            window = read_window(source, tables, window_steps(cache), world.size, bad)
        facts = Known(tables, slots, statistics, window)
        kind, counts = _kind_and_counts(config, world, facts, cluster, model)
        return _placed(cache, kind, counts, facts)

    decided = together(world, on_first)[0]
    if decided is None:
        raise RuntimeError("rank 0 decides the placement")
    return decided


def _is_open(cache: CacheConfig) -> bool:
    """Whether a prediction decides something."""
    given = cache.replicated_rows is not None or cache.replicated_share is not None
    return cache.placement == AUTO or not given


def _kind_and_counts(
    config: Config, world: World, known: Known, cluster: Cluster | None, model: nn.Module
) -> tuple[str, list[int]]:
    """The placement, and how many rows of each table it replicates."""
    cache, tables = config.cache, known.tables
    if cluster is not None:
        choice = choose(config, world, known, cluster, model)
        chosen = "" if cache.placement == choice.placement else f" is {choice.placement}"
        log.info("cache.placement=%s%s: %s", cache.placement, chosen, choice.why)
        return choice.placement, [choice.replicated_rows.get(table.name, 0) for table in tables]
    if cache.replicated_rows is not None:
        return MIXED, replicated_counts(cache.replicated_rows, tables)
    return MIXED, _by_share(cache.replicated_share or 0.0, known)


def replicated_counts(rows: Mapping[str, Any], tables: Sequence[TableSpec]) -> list[int]:
    """K of each table, from `cache.replicated_rows`; 0 for those that it does not name.

    Raises ConfigError for a table that there is not, or more rows than a table has.
    """
    sizes = {table.name: table.rows for table in tables}
    for name, count in rows.items():
        if name not in sizes:
            shown = ", ".join(list(sizes)[:20]) + (", ..." if len(sizes) > 20 else "")
            raise ConfigError(
                f"cache.replicated_rows: {name}={count} names no table: choose from {shown}"
            )
        if count > sizes[name]:
            raise ConfigError(
                f"cache.replicated_rows: {name}={count}, but the table has {sizes[name]} rows: "
                f"give at most {sizes[name]}"
            )
    return [int(rows.get(table.name, 0)) for table in tables]


def _by_share(share: float, known: Known) -> list[int]:
    """How many rows of each table are among the most frequent `share` of all rows."""
    wanted = max(1, round(share * sum(table.rows for table in known.tables)))
    order = _hottest(known)
    uses = [_uses(known, place, ids) for place, ids in enumerate(order)]
    table = np.repeat(np.arange(len(order)), [len(ids) for ids in order])
    first = np.argsort(-np.concatenate(uses), kind="stable")[:wanted]
    return np.bincount(table[first], minlength=len(order)).tolist()


def _uses(known: Known, place: int, ids: np.ndarray) -> np.ndarray:
    """How often each of `ids` of a table was looked up."""
    if known.statistics is not None:
        return known.statistics.tables[place].dense()[ids]
    return known.window.uses[place] if known.window is not None else np.zeros(0, np.int64)


def _hottest(known: Known) -> list[np.ndarray]:
    """The ids of each table that were looked up, the most frequent first."""
    if known.statistics is not None:
        return [table.order for table in known.statistics.tables]
    return [] if known.window is None else list(known.window.hottest)


def _placed(cache: CacheConfig, kind: str, counts: Sequence[int], known: Known) -> Placement:
    """The placement with its hot rows: the most frequent `counts` of each table, then any."""
    if kind != MIXED:
        return Placement(kind, cache.state)
    hot = tuple(
        np.sort(_filled(ids, count, table.rows))
        for ids, count, table in zip(_hottest(known), counts, known.tables, strict=True)
    )
    digest = hashlib.sha256(b"".join(ids.tobytes() for ids in hot)).hexdigest()[:16]
    total = sum(table.rows for table in known.tables)
    log.info("replicated rows: %d of %d", sum(map(len, hot)), total)
    return Placement(MIXED, cache.state, hot, digest)


def _filled(ids: np.ndarray, count: int, rows: int) -> np.ndarray:
    """The first `count` of `ids`; where there are fewer, then others from 0 on, below `rows`."""
    chosen = ids[:count].astype(np.int64)
    if len(chosen) == count:
        return chosen
    others = np.setdiff1d(np.arange(min(rows, count + len(ids))), ids, assume_unique=False)
    return np.concatenate((chosen, others[: count - len(chosen)]))
