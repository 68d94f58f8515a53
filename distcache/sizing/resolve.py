"""Window, prefetch, slots and placement of a run, from its configuration and its data."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from distcache.comm.link import run_on_all_ranks
from distcache.comm.world import World
from distcache.config.tree import CacheConfig, Config
from distcache.data.batch import BatchCheck, BatchSource
from distcache.engine.groups import Placement
from distcache.errors import ConfigError, MemoryTooSmallError
from distcache.layout import TableSpec, group_tables
from distcache.optim import row_update
from distcache.planner.victims import AUTO, WINDOWS, auto_lookahead
from distcache.popularity.hot_cold import HotSet
from distcache.popularity.slots import statistics_of
from distcache.popularity.statistics import (
    Popularity,
    Statistics,
    TableCounts,
    read_statistics,
    vocabulary_of,
)
from distcache.sizing.cluster import Cluster
from distcache.sizing.measure import measure
from distcache.sizing.placement import decide_placement
from distcache.sizing.slots import CacheRequest
from distcache.store.memory import available_memory, describe_bytes

# -----------------------------------------------------------------------------
# How far to look and to move ahead: `cache.lookahead` and `cache.prefetch`, and their `auto`.

log = logging.getLogger(__name__)

PREFETCH = 1
"""P that `auto` takes where memory and slots allow it; moving earlier changed little in
`docs/results/step.md`."""

_BETWEEN, _TOLD_LATER = 9, 2
"""Steps beside those of L and P: two are over and two, beside a GPU, were not looked at yet, one
trains, two have plans and have not moved, one waits for its place in their queue, and one beyond
the window has been read; with several ranks so many more."""

_ID_BYTES = 64
"""Bytes for one id of a planned step: its id, row, bag, position, place in the occurrence order,
and at most those of its distinct row, 8 bytes each."""

_SHARE = 0.5
"""Share of the memory that is left, for batches and plans on their way."""


def most_ahead(cache: CacheConfig) -> int:
    """Return the most batches that are read before their step is run."""
    lookahead = WINDOWS[-1] if cache.lookahead == AUTO else cache.lookahead
    return lookahead + 2 * prefetch_of(cache) + 16


def opens_window(config: Config) -> bool:
    """Return True if `auto` needs the ids of a step: else no window decides which rows leave."""
    chosen = config.cache.lookahead == AUTO and config.parallel.mode == "data"
    return chosen and config.cache.policy == "lookahead"


def ids_per_step(source: Any, tables: Sequence[TableSpec], batch: int, world_size: int) -> float:
    """Estimate the ids that a rank looks up in one step of `batch` samples over all ranks.

    `source` tells them itself (`ids_per_step`, of a user's loader), or the mean size of its bags;
    bags of unknown size count as one id each.
    """
    if getattr(source, "ids_per_step", None):
        return source.ids_per_step
    known = hasattr(source, "lookups_per_sample")
    ids = sum(
        source.lookups_per_sample(index) if known else len(table.features)
        for index, table in enumerate(tables)
    )
    return math.ceil(batch / world_size) * ids


def resolve_ahead(config: Config, world: World, source: Any, tables: Sequence[TableSpec]) -> Config:
    """Return `config` with a number for `cache.lookahead`; called by all ranks, which get the same.

    `auto` is the largest window whose ids stay small, see `auto_lookahead`, or what memory holds;
    then `cache.prefetch=auto` is 0 where memory holds no step more. Raises MemoryTooSmallError,
    with the number that fits, where a given one does not.
    """
    cache, batch = config.cache, config.data.global_batch_size
    ids = ids_per_step(source, tables, batch, world.size)
    sample_bytes = 4 * (getattr(source, "dense_features", 1) + 1)
    each = max(1, round(ids * _ID_BYTES + math.ceil(batch / world.size) * sample_bytes))
    seen = run_on_all_ranks(world, lambda: (_room(each, world), ids))
    room, ids = min(found for found, _ in seen), max(found for _, found in seen)
    room -= _TOLD_LATER * (world.size > 1)
    lookahead, prefetch = cache.lookahead, cache.prefetch
    if prefetch == AUTO and room < PREFETCH:
        prefetch = 0
    ahead = PREFETCH if prefetch == AUTO else prefetch
    if lookahead == AUTO:
        wanted = auto_lookahead(ids, ahead) if opens_window(config) else WINDOWS[0]
        left = max(0, room - ahead)
        lookahead = max((w for w in WINDOWS if w <= min(wanted, left)), default=left)
        if world.is_first and opens_window(config):
            said = "cache.lookahead=auto is %d: a rank looks up about %s ids a step"
            log.info(said, lookahead, f"{ids:,.0f}")
    if lookahead + ahead > max(room, 0):
        given = {"cache.lookahead": cache.lookahead, "cache.prefetch": cache.prefetch}
        named = ", ".join(f"{key}={value}" for key, value in given.items() if value != AUTO)
        raise MemoryTooSmallError(
            f"{named}: {lookahead + ahead} steps ahead, of about {describe_bytes(each)} each, do "
            f"not fit in half of the memory that is left; {max(room, 0)} do: lower "
            "cache.lookahead or cache.prefetch to that many together (auto does), or "
            "data.global_batch_size"
        )
    return replace(config, cache=replace(cache, lookahead=lookahead, prefetch=prefetch))


def _room(each: int, world: World) -> int:
    """Return the steps of L and P together that fit in this rank's share of memory."""
    rooms = [int(_SHARE * available_memory() / world.local_size / each)]
    if world.device.type == "cuda":
        # Ranks may share a GPU, but under NCCL each has one.
        gpus = world.local_size if world.backend == "nccl" else torch.cuda.device_count()
        free = torch.cuda.mem_get_info(world.device)[0] / math.ceil(world.local_size / max(1, gpus))
        rooms.append(int(_SHARE * free / each))
    return min(rooms) - _BETWEEN


def resolve_prefetch(
    config: Config, source: Any, tables: Sequence[TableSpec], slots: Sequence[int]
) -> int:
    """P; `auto` is at most the largest whose P + 1 steps find all their distinct rows in slots at
    once, as expected before training: more would move nothing earlier.

    `slots`: C of each group over all homes (empty where none is limited).
    """
    if config.cache.prefetch != AUTO:
        return config.cache.prefetch
    if not slots or not (named := expected_rows(config, source, tables, 1)):
        return PREFETCH
    most = min(count / max(rows, 1.0) for rows, count in zip(named, slots, strict=True))
    return max(0, min(PREFETCH, int(most) - 1))


# -----------------------------------------------------------------------------
# From the config to the slots of each group, and what the cache takes from statistics.


def request_of(
    config: Config, tables: Sequence[TableSpec], source: Any = None, dense_parameters: int = 0
) -> CacheRequest:
    """Return the request of the cache keys of `config`; `source`: of batches, may know its rows."""
    cache = config.cache
    return CacheRequest(
        tables,
        cache,
        row_update(config.optim.name, 0.0),
        config.data.global_batch_size,
        itemsize=8 if config.trainer.dtype == "float64" else 4,
        window=cache.lookahead,
        prefetch=prefetch_of(cache),
        objective=cache.objective,
        dense_parameters=dense_parameters,
        expected=expected_rows(config, source, tables, prefetch_of(cache) + 2),
    )


def resolve_slots(
    config: Config, world: World, tables: Sequence[TableSpec], source: BatchSource
) -> tuple[tuple[int, ...], Popularity | None]:
    """Return the slots C of each group, and the popularity of rows if `cache.statistics` are given.

    Called by all ranks; raises ConfigError on all of them.
    """
    request = request_of(config, tables, source)
    slots, popularity = request.decide_slots(world, lambda: read_checked(config, tables, source))
    hot: HotSet | None = getattr(source, "hot", None)
    if hot is not None and popularity is not None:  # the rows of hot batches stay for good
        warm = 1.0 if config.cache.warm_start == AUTO else popularity.warm_start
        rows = hot.hot_rows
        popularity = replace(popularity, hot_rows=rows, pinned_rows=rows, warm_start=warm)
    return slots, popularity


def prefetch_of(cache: CacheConfig) -> int:
    """P, as slots are planned for."""
    return PREFETCH if cache.prefetch == AUTO else cache.prefetch


def expected_rows(
    config: Config, source: Any, tables: Sequence[TableSpec], steps: int
) -> tuple[float, ...]:
    """Distinct rows of each group that so many steps are expected to name; empty where `source`
    does not know."""
    if not all(hasattr(source, name) for name in ("lookups_per_sample", "expected_distinct")):
        return ()
    samples = config.data.global_batch_size * steps
    lookups = [round(samples * source.lookups_per_sample(at)) for at in range(len(tables))]
    named = [source.expected_distinct(table, count) for table, count in enumerate(lookups)]
    return tuple(sum(named[table] for table in members) for members in group_tables(tables))


def read_checked(
    config: Config, tables: Sequence[TableSpec], source: BatchSource
) -> Statistics | None:
    """The statistics under `cache.statistics`, of `tables` in order; None where none are given.

    Raises ConfigError, with both fingerprints, for those of other data.
    """
    path = config.cache.statistics
    if path is None:
        return None
    vocabulary = vocabulary_of(source)
    return statistics_of(read_statistics(path), tables, f"cache.statistics={path}", vocabulary)


def read_window(
    source: BatchSource, tables: Sequence[TableSpec], steps: int, on_bad_id: str = "error"
) -> Statistics:
    """The lookups of `tables` in the first `steps` global training batches of `source`.

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
    check = BatchCheck(tables, source.features, on_bad_id)
    samples, read, found = 0, list[list[np.ndarray]](), list[TableCounts]()
    for step in range(steps):
        ids = check(source.train_batch(step, 0, 1)).ids
        samples += ids.batch_size
        read.append(np.split(ids.values.numpy(), ids.offsets.numpy()[:: ids.batch_size][1:-1]))
    ids_of = dict(zip(source.features, zip(*read, strict=True), strict=True))
    for table in tables:
        every = np.concatenate([part for feature in table.features for part in ids_of[feature]])
        seen, times = np.unique(every, return_counts=True)
        found.append(TableCounts(table.name, table.rows, len(every), len(seen), times, seen))
    return Statistics(tuple(found), "", samples)


def resolve_placement(
    config: Config,
    world: World,
    known: tuple[Sequence[TableSpec], Sequence[int], Statistics | None],
    source: BatchSource,
    model: nn.Module,
) -> Placement:
    """Return the placement that the keys of `cache` give; called by all ranks, decided by rank 0.

    `known`: the tables, C of each group, and statistics of the tables, in order, or None: then the
    first batches tell which rows are hot. Raises ConfigError on all ranks for rows or tables that
    do not exist.
    """
    if config.parallel.mode != "data":
        return Placement()
    tables, slots, statistics = known

    def count_rows() -> Statistics:
        # The steps that are known when the first one is planned.
        steps = 1 + config.cache.lookahead + prefetch_of(config.cache)
        return statistics or read_window(source, tables, steps, config.data.on_bad_id)

    def measure_ranks() -> Cluster:
        """Measure the links and the speed of these ranks; all of them call this. The model is timed
        on a copy, and the state of random numbers stays as it is."""
        features = getattr(source, "dense_features", None)  # which `distcache.fit` is not told
        if features is None:
            raise ConfigError(
                f"cache.placement={config.cache.placement} with cache.objective=time runs the "
                "dense model to time it, and how many dense features it takes is not known of "
                "batches that are read once: give cache.cluster=<cluster.json of distcache.plan>, "
                "cache.objective=bytes, or a placement with its replicated rows"
            )
        update = row_update(config.optim.name, 0.0)
        widest = max(table.dim for table in tables)
        width = sum(table.dim * len(table.features) for table in tables)
        batch = max(1, config.data.global_batch_size // world.size)
        with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
            own = copy.deepcopy(model).to(world.device, torch.float32)
            return measure(world, widest, update, own, (batch, features, width))

    parameters = sum(math.prod(p.shape) for p in model.parameters())
    request = request_of(config, tables, dense_parameters=parameters)
    return decide_placement(request, world, slots, count_rows, measure_ranks)
