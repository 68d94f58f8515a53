"""How far to look and to move ahead: `cache.lookahead` and `cache.prefetch`, and their `auto`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.config import CacheConfig, Config
from distcache.errors import MemoryTooSmallError
from distcache.layout import TableSpec, group_tables
from distcache.store.available import available_memory, describe_bytes

AUTO = "auto"
LOOKAHEAD, PREFETCH = 8, 1
"""What `auto` takes where memory and slots allow it; deeper windows and moves changed little in
`docs/results/planner.md` and `docs/results/step.md`."""

_BETWEEN = 5
"""Steps beside those of L and P: one trains, two have plans and have not moved, one waits for its
place in their queue, and one beyond the window has been read."""

_ID_BYTES = 64
"""Of one id of a planned step: its id, row, bag, position, place in the occurrence order, and what
its distinct row costs at most, 8 bytes each."""

_SHARE = 0.5
"""Of the memory that is left, for batches and plans on their way."""


def most_ahead(cache: CacheConfig) -> int:
    """No more batches than this are read before their step is run."""
    lookahead = LOOKAHEAD if cache.lookahead == AUTO else cache.lookahead
    prefetch = PREFETCH if cache.prefetch == AUTO else cache.prefetch
    return lookahead + 2 * prefetch + 16


def step_bytes(source: Any, tables: Sequence[TableSpec], batch: int, world: World) -> int:
    """About how many bytes one step of this rank takes while it is planned ahead.

    Bags whose sizes the source does not tell count as one id each.
    """
    known = hasattr(source, "lookups_per_sample")
    ids = sum(
        source.lookups_per_sample(index) if known else len(table.features)
        for index, table in enumerate(tables)
    )
    local = math.ceil(batch / world.size)
    return round(local * (ids * _ID_BYTES + 4 * (getattr(source, "dense_features", 1) + 1)))


def resolve_ahead(
    config: Config, world: World, source: Any, tables: Sequence[TableSpec], slots: Sequence[int]
) -> Config:
    """`config` with numbers for `cache.lookahead` and `cache.prefetch`; called by all ranks.

    `slots`: C of each group (empty where none is limited). `auto` is lowered to what memory and
    slots hold; raises MemoryTooSmallError, with the number that fits, where a given one does not.
    """
    cache = config.cache
    each = max(1, step_bytes(source, tables, config.data.global_batch_size, world))
    room = min(together(world, lambda: _room(each, world)))
    prefetch = cache.prefetch
    if prefetch == AUTO:
        fits = prefetch_that_slots_hold(source, tables, config, slots)
        prefetch = max(0, min(PREFETCH, fits, room))
    lookahead = cache.lookahead
    if lookahead == AUTO:
        lookahead = max(0, min(LOOKAHEAD, room - prefetch))
    _check(cache, lookahead, prefetch, room, each)
    return replace(config, cache=replace(cache, lookahead=lookahead, prefetch=prefetch))


def _room(each: int, world: World) -> int:
    """How many steps fit on their way, in L and P together, in this rank's share of memory."""
    rooms = [int(_SHARE * available_memory() / world.local_size / each)]
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0] / _ranks_of_a_gpu(world)
        rooms.append(int(_SHARE * free / each))
    return min(rooms) - _BETWEEN


def _ranks_of_a_gpu(world: World) -> int:
    """How many local ranks share this rank's GPU; NCCL has one for each."""
    if world.backend == "nccl":
        return 1
    return math.ceil(world.local_size / max(1, torch.cuda.device_count()))


def _check(cache: CacheConfig, lookahead: int, prefetch: int, room: int, each: int) -> None:
    """MemoryTooSmallError, naming the key that was given and what fits."""
    if lookahead + prefetch <= max(room, 0):
        return
    given = {"cache.lookahead": cache.lookahead, "cache.prefetch": cache.prefetch}
    named = {key: value for key, value in given.items() if value != AUTO}
    shown = ", ".join(f"{key}={value}" for key, value in named.items())
    raise MemoryTooSmallError(
        f"{shown}: {lookahead + prefetch} steps ahead, of about {describe_bytes(each)} each, do "
        f"not fit in half of the memory that is left; {max(room, 0)} do: lower cache.lookahead or "
        "cache.prefetch to that many together (auto does), or data.global_batch_size"
    )


def prefetch_that_slots_hold(
    source: Any, tables: Sequence[TableSpec], config: Config, slots: Sequence[int]
) -> int:
    """The largest P whose P + 1 steps find all their distinct rows in slots at once, as expected
    before training; more would move nothing earlier."""
    if not slots or not hasattr(source, "expected_distinct"):
        return PREFETCH
    batch, most = config.data.global_batch_size, math.inf
    for members, count in zip(group_tables(tables), slots, strict=True):
        rows = sum(
            source.expected_distinct(table, round(batch * source.lookups_per_sample(table)))
            for table in members
        )
        most = min(most, count / max(rows, 1.0))
    return max(0, int(min(most, 64)) - 1)
