"""From what a user asks of a cache to its slots, and how its rows lie over the ranks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distcache.comm.link import on_first
from distcache.comm.world import World
from distcache.cost.cluster import Cluster, Link, check_world, read_cluster
from distcache.cost.demand import Demand, counted_sources, demand_at
from distcache.cost.predict import Choice, Settings, best_mixed, choose_placement
from distcache.engine.groups import MIXED, REPLICATED, SHARDED, Placement
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.planner.victims import Policy
from distcache.popularity.curve import top_rows
from distcache.popularity.slots import Budget, Use, decide, first_rows, given_rows, plan_slots
from distcache.popularity.statistics import Popularity, Statistics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """What is known before training: the `tables`, their C slots by group, and the use of rows, by
    `statistics` of the tables, in order, or of the first batches alone."""

    tables: Sequence[TableSpec]
    slots: Sequence[int]
    statistics: Statistics


@dataclass(frozen=True)
class CacheRequest:
    """What a user asks of a cache; with tables and ranks its slots and its placement follow.

    `keys`: has the keys of group `cache` as attributes (`CacheConfig`, or what a collection was
    told); `batch`: samples of a step over all ranks; `itemsize`: bytes of an element; `window`: L;
    `prefetch`: P, as slots are planned for; `objective`: what a chosen placement makes smallest;
    `dense_parameters`: of the dense part.
    """

    keys: Any
    update: RowUpdate
    batch: int
    itemsize: int
    window: Any
    prefetch: int
    objective: str
    dense_parameters: int = 0

    @property
    def policy(self) -> Policy:
        """Which rows leave first."""
        return Policy.of(self.keys)

    @property
    def state(self) -> str:
        """Where the optimizer state of replicated rows lies, also where `keys` say `auto`."""
        if self.keys.state != "auto":
            return self.keys.state
        # The library's sums are on all ranks: then so is the state.
        return REPLICATED if self.keys.reduction == "native" else self.update.state_place

    def state_widths(self, tables: Sequence[TableSpec], world_size: int) -> list[int]:
        """Floats of state that a slot of each table takes on one of so many ranks: S, or a share of
        it where rows are on every rank and their homes keep the state."""
        shares = self.state == "home" and self.keys.placement == REPLICATED
        homes = world_size if shares else 1
        return [-(-self.update.state_width(table.dim) // homes) for table in tables]

    def budget(self, world_size: int, expected: tuple[float, ...] = ()) -> Budget:
        """What the slots of a rank may take; `expected`: rows of each group that P + 2 steps name,
        empty where that is not known."""
        sizes = (self.keys.rows, self.keys.ratio, self.keys.bytes)
        steps = self.prefetch + 2
        return Budget(*sizes, self.itemsize, world_size, self.batch, steps, expected)

    def slots(
        self,
        tables: Sequence[TableSpec],
        world_size: int,
        statistics: Statistics | None,
        expected: tuple[float, ...] = (),
    ) -> tuple[int, ...]:
        """C of each group on one of so many ranks. Raises ConfigError as `plan_slots` does."""
        widths = self.state_widths(tables, world_size)
        budget = self.budget(world_size, expected)
        return plan_slots(tables, widths, budget, self.keys.split, statistics).slots

    def decide_slots(
        self,
        world: World,
        tables: Sequence[TableSpec],
        read: Callable[[], Statistics | None],
        expected: tuple[float, ...] = (),
    ) -> tuple[tuple[int, ...], Popularity | None]:
        """C of each group, and the popularity of rows where `read` gives statistics of the tables.

        Called by all ranks; raises ConfigError on all of them.
        """
        use = Use(self.policy, self.keys.warm_start, self.keys.split, self.prefetch)
        widths = self.state_widths(tables, world.size)
        return decide(world, tables, widths, self.budget(world.size, expected), use, read)

    def placement(
        self,
        world: World,
        tables: Sequence[TableSpec],
        known: Callable[[], Known],
        measure: Callable[[], Cluster] | None = None,
    ) -> Placement:
        """How the rows lie over the ranks: called by all of them, decided by rank 0.

        `known`: called by rank 0 alone; `measure`: by all, where seconds decide and no cluster is
        described (None: then bytes decide). Raises ConfigError on all ranks for rows or tables that
        there are not.
        """
        keys, found = self.keys, None
        # On one rank too, before any batch is read.
        given_rows(keys.replicated_rows or {}, tables, "cache.replicated_rows")
        if world.size == 1:
            return Placement()
        if keys.placement in (REPLICATED, SHARDED):
            return Placement(keys.placement, self.state)
        if keys.replicated_rows is None and keys.replicated_share is None:
            found = self._cluster(world, measure)
        return on_first(world, lambda: self._decided(known(), found))

    def _decided(self, known: Known, cluster: Cluster | None) -> Placement:
        """By prediction where there is a `cluster`, else as many rows as are given."""
        keys, kind = self.keys, MIXED
        if cluster is not None:
            choice = self.choose(known, cluster)
            kind, rows = choice.placement, choice.replicated_rows
            chosen = "" if keys.placement == kind else f" is {kind}"
            log.info("cache.placement=%s%s: %s", keys.placement, chosen, choice.why)
            counts = [rows.get(table.name, 0) for table in known.tables]
        elif keys.replicated_rows is not None:
            counts = given_rows(keys.replicated_rows, known.tables, "cache.replicated_rows")
        else:
            # How many rows of each table are among the most frequent share of all rows.
            wanted = max(1, round(keys.replicated_share * sum(of.rows for of in known.tables)))
            histograms = zip(*(of.histogram() for of in known.statistics.tables), strict=True)
            counts = [int(count) for count in top_rows(*histograms, wanted)]
        return placed(self.state, kind, counts, known)

    def _cluster(self, world: World, measure: Callable[[], Cluster] | None) -> Cluster:
        """That of `cache.cluster`, or measured; ConfigError where it describes other ranks."""
        path = self.keys.cluster
        if path is None and self.objective == "time" and measure is not None:
            return measure()
        if path is None:  # bytes do not depend on it
            link = Link(1e10, 1e-5, "any")
            return Cluster(world.size, link, link)

        def described() -> Cluster:
            found = read_cluster(path)
            try:
                check_world(found, world.nodes.sizes)
            except ConfigError as error:
                raise ConfigError(f"cache.cluster={path}: {error}") from error
            return found

        return on_first(world, described)

    def choose(self, known: Known, cluster: Cluster) -> Choice:
        """The placement that the objective makes best; of `mixed`, the best rows to replicate."""
        settings = Settings(
            tuple(known.slots),
            self.state,
            self.window,
            self.prefetch,
            itemsize=self.itemsize,
            dense_parameters=self.dense_parameters,
        )
        demand, best = self._demand(known, cluster), None
        if self.keys.placement == MIXED:
            best = best_mixed(demand, cluster, settings, self.objective)
        if best is None:
            return choose_placement(demand, cluster, settings, self.objective)
        if best.refused is not None:
            log.warning(
                "cache.placement=mixed: even with the best rows to replicate, %s; a step that does "
                "not fit is refused. cache.placement=sharded has all slots for its rows",
                best.refused,
            )
        why = f"the best rows to replicate, by {self.objective}"
        return Choice(MIXED, best.replicated_rows, (best,), why)

    def _demand(self, known: Known, cluster: Cluster) -> Demand:
        """What a step needs of each rank, from the statistics."""
        tables, ranks = known.tables, cluster.ranks
        sources = counted_sources(known.statistics, [table.dim for table in tables])
        pairs = zip(sources, tables, strict=True)
        named = [replace(own, name=of.name, stored=of.dtype) for own, of in pairs]
        widths = [self.update.state_width(table.dim) for table in tables]
        return demand_at(named, widths, self.batch / ranks, ranks, cluster.local_ranks)

    def of_all_homes(
        self,
        world: World,
        tables: Sequence[TableSpec],
        slots: Sequence[int],
        popularity: Popularity | None,
    ) -> Popularity | None:
        """`popularity` where rows lie at their homes alone: W ranks hold W times as many rows as
        one has slots. Rows that were given by table stay as they are.

        `slots`: C of each group. Called by all ranks.
        """
        if popularity is None or not isinstance(self.keys.split, str) or world.size == 1:
            return popularity
        budget = self.budget(world.size)
        of = (tables, [count * world.size for count in slots], popularity.statistics, budget)
        hot, pinned = on_first(world, lambda: first_rows(*of)), popularity.pinned_rows
        if pinned is not None:
            pinned = on_first(world, lambda: first_rows(*of, budget.steps - 1))
        return replace(popularity, hot_rows=hot, pinned_rows=pinned)


def placed(state: str, kind: str, counts: Sequence[int], known: Known) -> Placement:
    """The placement with its hot rows: the most frequent `counts` of each table, then any."""
    if kind != MIXED:
        return Placement(kind, state)
    hot = []
    for table, count in zip(known.statistics.tables, counts, strict=True):
        ids = table.hottest(count).astype(np.int64)
        if len(ids) < count:  # fewer were looked up: then others, from 0 on
            others = np.setdiff1d(np.arange(min(table.rows, count + len(ids))), ids)
            ids = np.concatenate((ids, others[: count - len(ids)]))
        hot.append(np.sort(ids))
    digest = hashlib.sha256(b"".join(ids.tobytes() for ids in hot)).hexdigest()[:16]
    total = sum(table.rows for table in known.tables)
    log.info("replicated rows: %d of %d", sum(map(len, hot)), total)
    return Placement(MIXED, state, tuple(hot), digest)
