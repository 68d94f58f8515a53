"""TorchRec's side of `hybrid`: tables, their sharding, the wrapped model."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import comm_ops
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import optimizers, rowwise_adagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.comm.world import World
from distcache.data.batch import JaggedIds
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.parallel.base import predict
from distcache.parallel.hybrid import HybridSpec
from distcache.store.rows import block_rows, initial_rows

# -----------------------------------------------------------------------------
# Which rank holds which rows and columns of `hybrid`'s tables: TorchRec's planner, or by hand.

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


# -----------------------------------------------------------------------------
# TorchRec's side of `hybrid`: tables, the wrapped model, and its shards.
#
# With `hybrid_sharding` the only module that imports torchrec and fbgemm;
# `hybrid_spec.load_torchrec` imports it.

_OPTIMIZERS = {
    "sgd": optimizers.SGD,
    "adagrad": optimizers.Adagrad,
    "rowwise_adagrad": rowwise_adagrad.RowWiseAdagrad,
    "adam": optimizers.Adam,
}


class HybridModel(nn.Module):
    """Sharded tables in front of the dense part; pooled vectors in the order of `features`."""

    def __init__(
        self, ebc: EmbeddingBagCollection, dense: nn.Module, features: tuple[str, ...], amp: str
    ) -> None:
        super().__init__()
        self.ebc = ebc
        self.dense = dense
        self.features = features
        self.amp = amp

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits `[b]` of `dense` `[b, F]` and bags of ids."""
        pooled = self.ebc(ids)
        if tuple(pooled.keys()) == self.features:
            vectors = pooled.values()
        else:
            by_feature = pooled.to_dict()
            vectors = torch.cat([by_feature[key] for key in self.features], dim=1)
        return predict(self.dense, dense, vectors, self.amp)


def build(world: World, spec: HybridSpec, dense: nn.Module) -> DistributedModelParallel:
    """The model under DistributedModelParallel: tables sharded, the dense part under DDP.

    Every local shard gets its rows of `initial_rows`, and its optimizer state the initial
    accumulator. `dense` is moved to the device. Learning rates start at 0. Collective.
    """
    ebc = EmbeddingBagCollection(
        tables=[_config(table) for table in spec.tables],
        is_weighted=spec.weighted,
        device=torch.device("meta"),
    )
    kind, options = _OPTIMIZERS[spec.optimizer.name], _fused_options(spec)
    _apply_optimizer_in_backward(kind, ebc.parameters(), options)
    model = HybridModel(ebc, dense.to(world.device), spec.features, spec.amp)
    plan = shared_plan(world, spec, ebc)
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world.device_group),
        device=world.device,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder()],
        init_parameters=False,  # True would reset the dense weights when they change device
    )
    _write_initial(spec, dmp)
    return dmp


def _config(table: TableSpec) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.rows,
        embedding_dim=table.dim,
        feature_names=list(table.features),
        pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
    )


def _fused_options(spec: HybridSpec) -> dict[str, Any]:
    """What FBGEMM's kernel takes: its own names, since TorchRec hands them on as they are."""
    options: dict[str, Any] = {"lr": 0.0}
    if spec.optimizer.name != "sgd":
        options["eps"] = spec.optimizer.eps
    if spec.optimizer.name == "adam":
        options["beta1"], options["beta2"] = spec.optimizer.betas
    return options


def weights(dmp: DistributedModelParallel, spec: HybridSpec) -> dict[str, ShardedTensor]:
    """The table weights by table name; their local shards are the trained memory itself."""
    state = dmp.module.ebc.state_dict()
    return {table.name: state[f"embedding_bags.{table.name}.weight"] for table in spec.tables}


def row_states(
    dmp: DistributedModelParallel, spec: HybridSpec
) -> dict[str, dict[str, ShardedTensor]]:
    """The rows' optimizer state by table and name (`momentum1`, ...), as far as it lies here."""
    found: dict[str, dict[str, ShardedTensor]] = {table.name: {} for table in spec.tables}
    for key, states in dmp.fused_optimizer.state_dict()["state"].items():
        name = key.removeprefix("ebc.embedding_bags.").removesuffix(".weight")
        for state, value in states.items():
            if 0 not in value.metadata().size:  # SGD has an empty one
                found[name][state.removeprefix(f"{name}.")] = value
    return found


@torch.no_grad()
def _write_initial(spec: HybridSpec, dmp: DistributedModelParallel) -> None:
    by_table, states = weights(dmp, spec), row_states(dmp, spec)
    for index, table in enumerate(spec.tables):
        size = block_rows(table.dim)
        for shard in by_table[table.name].local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.tensor.shape
            low = row
            while low < row + rows:
                high = min((low // size + 1) * size, row + rows)
                values = initial_rows(spec.seed, index, table.rows, table.dim, low, high)
                shard.tensor[low - row : high - row].copy_(values[:, column : column + columns])
                low = high
        if spec.optimizer.name in ("adagrad", "rowwise_adagrad"):
            for state in states[table.name].values():
                for shard in state.local_shards():
                    shard.tensor.fill_(spec.optimizer.initial_accumulator)


def gather_rows(tensor: ShardedTensor, start: int, stop: int, world: World) -> Tensor | None:
    """Rows [start, stop) of a sharded table to rank 0, `[stop - start, D]` on the CPU. Collective.

    Other ranks send the parts that they own, shard by shard, and get None.
    """
    local = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in tensor.local_shards()}
    block = torch.empty(stop - start, tensor.metadata().size[1]) if world.is_first else None
    for shard in tensor.metadata().shards_metadata:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        low, high = max(start, row), min(stop, row + rows)
        if low >= high:
            continue
        owner, part = shard.placement.rank(), torch.empty(high - low, columns)
        if owner == world.rank:
            part = local[row, column].detach()[low - row : high - row].cpu().contiguous()
        if block is None:
            if owner == world.rank:
                dist.send(part, dst=0, group=world.host_group)
            continue
        if owner != world.rank:
            dist.recv(part, src=owner, group=world.host_group)
        block[low - start : high - start, column : column + columns] = part
    return block


def jagged(ids: JaggedIds, size: int, device: torch.device) -> KeyedJaggedTensor:
    """The bags as TorchRec takes them, with bags of no ids behind, up to `size` samples."""
    lengths = ids.offsets.diff().to(torch.int32).view(len(ids.features), -1)
    padded = torch.zeros(len(ids.features), size, dtype=torch.int32)
    padded[:, : lengths.size(1)] = lengths
    return KeyedJaggedTensor(
        keys=list(ids.features), values=ids.values, lengths=padded.view(-1), weights=ids.weights
    ).to(device)


def set_row_lr(dmp: DistributedModelParallel, lr: float) -> None:
    """The rows' learning rate from the next forward on (the kernels read it in forward)."""
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = lr
    dmp.fused_optimizer.step()  # updates no row: it hands the rate to the kernels


def set_row_step(dmp: DistributedModelParallel, step: int) -> None:
    """The steps applied so far, for Adam's bias correction.

    FBGEMM counts every forward, evaluation and refused steps too.
    """
    for module in dmp.modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            module.iter.fill_(step)
            if hasattr(module, "iter_cpu"):
                module.iter_cpu.fill_(step)


def divide_gradients(divide: bool) -> bool:
    """Whether TorchRec divides row gradients by W (process-wide); returns what it was."""
    before = comm_ops.get_gradient_division()
    comm_ops.set_gradient_division(divide)
    return before
