"""Placement of cached rows over the ranks, from a request, statistics and the cost model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from distcache.comm.link import run_on_rank0
from distcache.comm.world import World
from distcache.engine.groups import MIXED, REPLICATED, SHARDED, Placement
from distcache.errors import ConfigError
from distcache.popularity.curve import Curve, most_frequent
from distcache.popularity.slots import given_rows
from distcache.popularity.statistics import Statistics
from distcache.sizing.cluster import Cluster, Link, check_world, read_cluster
from distcache.sizing.cost import Prediction, Settings, best_mixed, choose_placement
from distcache.sizing.demand import counted_sources, demand_at
from distcache.sizing.slots import CacheRequest

log = logging.getLogger(__name__)


def decide_placement(
    request: CacheRequest,
    world: World,
    slots: Sequence[int],
    count_rows: Callable[[], Statistics],
    measure: Callable[[], Cluster] | None = None,
) -> Placement:
    """Return the placement of the rows over the ranks. Called by all ranks, decided by rank 0.

    `slots`: C of each group. `count_rows`, called by rank 0, returns the statistics of the tables,
    in order, or of the first batches alone. `measure`, called by all ranks, returns the cluster
    where time decides and no cluster is described; with None bytes decide. Raises ConfigError on
    all ranks for rows or tables that do not exist.
    """
    keys = request.keys
    # On one rank too, before any batch is read.
    given_rows(keys.replicated_rows or {}, request.tables, "cache.replicated_rows")
    if world.size == 1:
        return Placement()
    if keys.placement in (REPLICATED, SHARDED):
        return Placement(keys.placement, request.state)
    cluster = None
    if keys.replicated_rows is None and keys.replicated_share is None:
        cluster = _cluster(request, world, measure)
    return run_on_rank0(world, lambda: _decide(request, slots, count_rows(), cluster))


def _decide(
    request: CacheRequest, slots: Sequence[int], statistics: Statistics, cluster: Cluster | None
) -> Placement:
    """Return the predicted placement if there is a `cluster`, else `mixed` with the rows that the
    keys give."""
    keys = request.keys
    tables = request.tables
    if cluster is not None:
        best, reason = choose(request, slots, statistics, cluster)
        chosen = "" if keys.placement == best.placement else f" is {best.placement}"
        log.info("cache.placement=%s%s: %s", keys.placement, chosen, reason)
        counts = [best.replicated_rows.get(table.name, 0) for table in tables]
        return with_hot_rows(request.state, best.placement, counts, statistics)
    if keys.replicated_rows is not None:
        counts = given_rows(keys.replicated_rows, tables, "cache.replicated_rows")
    else:
        rows = max(1, round(keys.replicated_share * sum(table.rows for table in tables)))
        counts = most_frequent(list(map(Curve.of, statistics.tables)), rows)
    return with_hot_rows(request.state, MIXED, counts, statistics)


def _cluster(request: CacheRequest, world: World, measure: Callable[[], Cluster] | None) -> Cluster:
    """Return the cluster of `cache.cluster`, or a measured one. Raises ConfigError if the file
    describes other ranks."""
    path = request.keys.cluster
    if path is None and request.objective == "time" and measure is not None:
        return measure()
    if path is None:  # bytes do not depend on the links
        link = Link(1e10, 1e-5, "any")
        return Cluster(world.size, link, link)

    def read() -> Cluster:
        cluster = read_cluster(path)
        try:
            check_world(cluster, world.nodes.sizes)
        except ConfigError as error:
            raise ConfigError(f"cache.cluster={path}: {error}") from error
        return cluster

    return run_on_rank0(world, read)


def choose(
    request: CacheRequest, slots: Sequence[int], statistics: Statistics, cluster: Cluster
) -> tuple[Prediction, str]:
    """Return the placement with the lowest cost by the objective, and the reason in words. If the
    keys ask for `mixed`, only the rows to replicate are chosen."""
    settings = Settings(
        tuple(slots),
        request.state,
        request.window,
        request.prefetch,
        itemsize=request.itemsize,
        dense_parameters=request.dense_parameters,
    )
    ranks = cluster.ranks
    sources = counted_sources(statistics, request.tables)
    widths = [request.update.state_width(table.dim) for table in request.tables]
    demand = demand_at(sources, widths, request.batch / ranks, ranks)
    best = None
    if request.keys.placement == MIXED:
        best = best_mixed(demand, cluster, settings, request.objective)
    if best is None:
        return choose_placement(demand, cluster, settings, request.objective)
    if best.refused is not None:
        log.warning(
            "cache.placement=mixed: even with the best rows to replicate, %s; a step that does "
            "not fit is refused. cache.placement=sharded has all slots for its rows",
            best.refused,
        )
    return best, f"the best rows to replicate, by {request.objective}"


def with_hot_rows(
    state: str, kind: str, counts: Sequence[int], statistics: Statistics
) -> Placement:
    """Return a placement whose hot rows are the `counts[t]` most frequent ones of each table t. If
    fewer rows of a table were looked up, its first other rows follow."""
    if kind != MIXED:
        return Placement(kind, state)
    hot = []
    for table, count in zip(statistics.tables, counts, strict=True):
        ids = table.order[:count].astype(np.int64)
        if len(ids) < count:
            others = np.setdiff1d(np.arange(min(table.rows, count + len(ids))), ids)
            ids = np.concatenate((ids, others[: count - len(ids)]))
        hot.append(np.sort(ids))
    digest = hashlib.sha256(b"".join(ids.tobytes() for ids in hot)).hexdigest()[:16]
    total = sum(table.rows for table in statistics.tables)
    log.info("replicated rows: %d of %d", sum(map(len, hot)), total)
    return Placement(MIXED, state, tuple(hot), digest)
