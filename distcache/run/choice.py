"""Which placement is predicted to be the best for this run, on these ranks."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.config import Config
from distcache.cost.choose import Choice, best_mixed, choose_placement
from distcache.cost.demand import Demand
from distcache.cost.description import read_cluster
from distcache.cost.links import Cluster, Link, check_world
from distcache.cost.popularity import counted_sources
from distcache.cost.predict import Settings
from distcache.cost.steps import demand_at
from distcache.cost.window import GroupWindow, demand_of_window
from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec, group_tables
from distcache.optim.rows import row_update
from distcache.popularity.statistics import Statistics
from distcache.run.ahead import AUTO, LOOKAHEAD, PREFETCH
from distcache.run.measure import DensePart, measure
from distcache.run.window import Window

log = logging.getLogger(__name__)

_UNMEASURED = Link(1e10, 1e-5, "any")
"""Bytes do not depend on it."""


@dataclass(frozen=True)
class Known:
    """What is known before training: the `tables`, their C slots by group, and the use of rows, by
    `statistics` of the tables, in order, or else by the first batches."""

    tables: Sequence[TableSpec]
    slots: Sequence[int]
    statistics: Statistics | None
    window: Window | None


def measured_cluster(
    config: Config,
    world: World,
    tables: Sequence[TableSpec],
    model: nn.Module,
    features: int | None,
) -> Cluster:
    """The links and the speed of these ranks, timed where `cache.objective` is `time`; all call it.

    `features`: dense ones, None where that is not known. The model and the state of random numbers
    are left as they are. With `cache.cluster` nothing is timed; raises ConfigError where that
    describes other ranks, and where the model would be timed and `features` is None.
    """
    if config.cache.cluster is not None:
        return _described(config.cache.cluster, world)
    if config.cache.objective != "time":
        return Cluster(world.size, _UNMEASURED, _UNMEASURED)
    if features is None:
        raise ConfigError(
            f"cache.placement={config.cache.placement} with cache.objective=time runs the dense "
            "model to time it, and how many dense features it takes is not known of batches that "
            "are read once: give cache.cluster=<cluster.json of distcache.plan>, "
            "cache.objective=bytes, or a placement with its replicated rows"
        )
    update = row_update(config.optim.name, 0.0)
    widest = max(table.dim for table in tables)
    width = sum(table.dim * len(table.features) for table in tables)
    batch = max(1, config.data.global_batch_size // world.size)
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        own = copy.deepcopy(model).to(world.device, torch.float32)
        return measure(world, widest, update, DensePart(own, features, width, batch)).cluster(world)


def _described(path: str, world: World) -> Cluster:
    """The cluster of a file as rank 0 reads it; raises ConfigError on all ranks."""

    def read() -> Cluster | None:
        if not world.is_first:
            return None
        found = read_cluster(path)
        try:
            check_world(found, world.nodes.sizes)
        except ConfigError as error:
            raise ConfigError(f"cache.cluster={path}: {error}") from error
        return found

    found = together(world, read)[0]
    if found is None:
        raise RuntimeError("rank 0 reads the cluster")
    return found


def demand_of(config: Config, world: World, known: Known, local_ranks: int) -> Demand:
    """What a step needs, from the statistics, or from the window; `local_ranks` on each node."""
    tables, update = known.tables, row_update(config.optim.name, 0.0)
    batch = config.data.global_batch_size / world.size
    if known.statistics is not None:
        sources = counted_sources(known.statistics, [table.dim for table in tables])
        named = [replace(own, name=of.name) for own, of in zip(sources, tables, strict=True)]
        widths = [update.state_width(table.dim) for table in tables]
        return demand_at(named, widths, batch, world.size, local_ranks)
    if known.window is None:
        raise RuntimeError("neither statistics nor a window")
    windows = []
    for members, rows in zip(group_tables(tables), known.window.rows, strict=True):
        layout = RowLayout([tables[table] for table in members], world.size)
        windows.append(GroupWindow(layout, rows, update.state_width(layout.dim)))
    return demand_of_window(windows, batch, local_ranks)


def choose(
    config: Config, world: World, known: Known, cluster: Cluster, model: nn.Module
) -> Choice:
    """The placement that `cache.objective` makes best; of `cache.placement=mixed`, the best K."""
    cache = config.cache
    settings = Settings(
        tuple(known.slots),
        cache.state,
        LOOKAHEAD if cache.lookahead == AUTO else cache.lookahead,
        PREFETCH if cache.prefetch == AUTO else cache.prefetch,
        itemsize=8 if config.trainer.dtype == "float64" else 4,
        dense_parameters=sum(math.prod(p.shape) for p in model.parameters()),
    )
    demand = demand_of(config, world, known, cluster.local_ranks)
    if cache.placement != "mixed":
        return choose_placement(demand, cluster, settings, cache.objective)
    best = best_mixed(demand, cluster, settings, cache.objective)
    if best is None:
        return choose_placement(demand, cluster, settings, cache.objective)
    if best.refused is not None:
        log.warning(
            "cache.placement=mixed: even with the best rows to replicate, %s; a step that does not "
            "fit is refused. cache.placement=sharded has all slots for its rows",
            best.refused,
        )
    why = f"the best rows to replicate, by {cache.objective}"
    return Choice("mixed", best.replicated_rows, cache.state, (best,), why)
