"""Which rank holds which rows and columns of `hybrid`'s tables: TorchRec's planner, or by hand."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distcache.comm.world import World
from distcache.errors import ConfigError
from distcache.parallel.hybrid_spec import HybridSpec

RESERVED = 0.15
"""Share of device memory that TorchRec's planner leaves to the dense part and activations."""


def column_shards(dim: int, world_size: int) -> int:
    """Into how many column shards, at most one per rank, a width splits (each a multiple of 4)."""
    return max(k for k in range(1, world_size + 1) if dim % (4 * k) == 0)


def splits_rows(rows: int, world_size: int) -> bool:
    """Whether shards of ceil(rows / W) rows, as TorchRec cuts them, leave no rank without one."""
    return -(-rows // world_size) * (world_size - 1) < rows


def _by_hand(world: World, spec: HybridSpec) -> dict[str, Any]:
    """The chosen sharding of every table: a TorchRec generator by table name.

    A table too small to give every rank a row (FBGEMM has no shard of none) or too narrow to
    split its columns goes whole to one rank. Whole tables: largest first, each to the rank that
    holds least so far.
    """
    plans: dict[str, Any] = {}
    load = [0] * world.size
    for index, table in enumerate(sorted(spec.tables, key=lambda table: -table.rows * table.dim)):
        count = column_shards(table.dim, world.size)
        if spec.sharding == "row_wise" and splits_rows(table.rows, world.size):
            plans[table.name] = row_wise()
        elif spec.sharding == "column_wise" and count > 1:
            ranks = [(index + shard) % world.size for shard in range(count)]
            plans[table.name] = column_wise(ranks=ranks)
        else:
            rank = load.index(min(load))
            load[rank] += table.rows * table.dim
            plans[table.name] = table_wise(rank=rank)
    return {table.name: plans[table.name] for table in spec.tables}


def shared_plan(world: World, spec: HybridSpec, ebc: EmbeddingBagCollection) -> ShardingPlan:
    """The sharding plan of a model's `ebc`, the same on all ranks. Collective.

    `auto` is decided on rank 0 and broadcast together with its error if it has one (TorchRec's
    own `collective_plan` leaves the other ranks waiting when rank 0 raises).
    """
    if spec.sharding != "auto":
        module_plan = construct_module_sharding_plan(
            ebc,
            _by_hand(world, spec),
            EmbeddingBagCollectionSharder(),
            local_size=world.local_size,
            world_size=world.size,
            device_type=world.device.type,
        )
        return ShardingPlan({"ebc": module_plan})
    answer: list[Any] = [None, None]
    if world.is_first:
        try:
            answer[0] = _planned(world, spec, ebc)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            answer[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(answer, src=0, group=world.host_group)
    if answer[1] is not None:
        raise ConfigError(
            f"TorchRec's planner finds no sharding over {world.size} ranks: use more ranks, "
            f"parallel=data, or parallel.sharding=row_wise. It says: {answer[1]}"
        )
    return answer[0]


def _planned(world: World, spec: HybridSpec, ebc: EmbeddingBagCollection) -> ShardingPlan:
    # Data-parallel tables would silently lose their fused optimizer.
    sharder = EmbeddingBagCollectionSharder()
    allowed = [
        kind
        for kind in sharder.sharding_types(world.device.type)
        if kind != ShardingType.DATA_PARALLEL.value
    ]
    constraint = ParameterConstraints(
        sharding_types=allowed, compute_kernels=["fused"], is_weighted=spec.weighted
    )
    capacity: dict[str, int] = {
        "ddr_cap": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.local_size
    }
    if world.device.type == "cuda":
        capacity["hbm_cap"] = torch.cuda.get_device_properties(world.device).total_memory
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world.size,
            local_world_size=world.local_size,
            compute_device=world.device.type,
            **capacity,
        ),
        batch_size=spec.local_batch_size,
        constraints={table.name: constraint for table in spec.tables},
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    return planner.plan(nn.ModuleDict({"ebc": ebc}), [sharder])
