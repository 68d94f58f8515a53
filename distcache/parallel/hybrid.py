"""`hybrid`: tables sharded over the ranks by TorchRec, the dense part data-parallel."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import comm_ops
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
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
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import optimizers, rowwise_adagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.comm.link import (
    PLANNING,
    CollectiveCounters,
    Link,
    count_collectives,
    run_on_all_ranks,
    summing_hook,
)
from distcache.comm.world import World
from distcache.data.batch import Batch, BatchCheck, JaggedIds, Prefetch
from distcache.engine.gradients import agreement, to_device, words
from distcache.engine.step import TRAINING_LANE, WAIT, MoveCounts, Span, StageClock
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec
from distcache.optim import Adagrad, RowUpdate, dense_optimizer
from distcache.parallel.base import (
    Parallel,
    Step,
    StepResult,
    agreed_batches,
    held_bytes,
    over_ranks,
    predict,
)
from distcache.store.memory import require_memory
from distcache.store.rows import initial_rows
from distcache.store.table_files import Stored

# -----------------------------------------------------------------------------
# What `hybrid` is built from, and what it refuses beside `config.checks`.


@dataclass(frozen=True)
class HybridSpec:
    """Tables and optimizer of a hybrid model, in plain arguments.

    `features`: the order of the bags and of the pooled vectors; each is read by one table.
    `weighted`: batches carry a weight per id. `local_batch_size`: samples per rank and step that
    TorchRec's planner (`sharding="auto"`) reckons with. `agree_on_sizes`: ranks bring batches of
    their own sizes, and tell each other before each step. `amp`: `off`, or `bf16` for the
    dense part.
    """

    tables: tuple[TableSpec, ...]
    features: tuple[str, ...]
    optimizer: RowUpdate
    seed: int
    sharding: str = "auto"
    weighted: bool = False
    local_batch_size: int = 512
    on_bad_id: str = "error"
    agree_on_sizes: bool = False
    amp: str = "off"


def check_spec(spec: HybridSpec, world: World) -> None:
    """Raise ConfigError, with the way out, for what TorchRec's sharded tables cannot do here."""
    if world.device.type != "cpu" and world.backend == "gloo" and world.size > 1:
        raise ConfigError(
            "parallel=hybrid on CUDA exchanges rows with NCCL, and this job runs on gloo: start "
            "one rank per GPU with trainer.backend=nccl, or set trainer.device=cpu"
        )
    for table in spec.tables:
        if table.dim % 4:
            raise ConfigError(
                f"table {table.name!r} has width {table.dim}: parallel=hybrid needs a multiple "
                f"of 4, so set model.embedding_dim={-(-table.dim // 4) * 4} or use another mode"
            )
        if spec.weighted and table.pooling == "mean":
            raise ConfigError(
                f"table {table.name!r} has pooling 'mean' and weighted ids: weights need 'sum'"
            )
        if table.dtype:
            raise ConfigError(
                "FBGEMM rounds updated rows of float16 and bfloat16 by chance: parallel=hybrid has "
                "tables in float32 alone, so leave data_type out, or use another mode"
            )


def check_memory(spec: HybridSpec, world: World) -> None:
    """Raise MemoryTooSmallError where the shards of a node's ranks on the CPU do not fit it.

    Called by all ranks, before anything is allocated; every rank learns of it.
    """
    if world.device.type != "cpu":
        return
    width = spec.optimizer.state_width
    floats = sum(table.rows * (table.dim + width(table.dim)) for table in spec.tables)
    share = floats * torch.float32.itemsize * world.local_size // world.size

    def check() -> None:
        if world.local_rank == 0:
            require_memory(
                share,
                f"the shards of {world.local_size} local ranks",
                "use smaller tables, more nodes, or parallel=data on a machine with more memory",
            )

    run_on_all_ranks(world, check)


def _quieten() -> None:
    """Keep warnings of TorchRec and torch from users that these could do nothing about."""
    for name in ("torchrec.distributed.planner", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # What TorchRec calls and torch is about to rename.
    renamed = "(all_gather_into|reduce_scatter)_tensor", "ShardedTensor", "broadcast_buffers"
    for name in renamed:
        warnings.filterwarnings("ignore", f".*{name}", FutureWarning)


# -----------------------------------------------------------------------------
# Which rank holds which rows and columns of `hybrid`'s tables: TorchRec's planner, or by hand.


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

    `auto` is decided on rank 0, which tells the others its error if it has one (TorchRec's own
    `collective_plan` leaves them waiting).
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

    def decide() -> ShardingPlan | None:
        try:
            return _planned(world, spec, ebc) if world.is_first else None
        except Exception as error:  # of whatever class TorchRec has
            raise ConfigError(
                f"TorchRec's planner finds no sharding over {world.size} ranks: use more ranks, "
                "parallel=data, or parallel.sharding=row_wise. It says: "
                f"{type(error).__name__}: {error}"
            ) from error

    (plan,) = [found for found in run_on_all_ranks(world, decide) if found is not None]
    return plan


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
        # The share that is left to the dense part and activations.
        storage_reservation=FixedPercentageStorageReservation(0.15),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    return planner.plan(nn.ModuleDict({"ebc": ebc}), [sharder])


_OPTIMIZERS = {
    "sgd": optimizers.SGD,
    "adagrad": optimizers.Adagrad,
    "rowwise_adagrad": rowwise_adagrad.RowWiseAdagrad,
    "adam": optimizers.Adam,
}


class HybridModel(nn.Module):
    """Sharded tables in front of the dense part; pooled vectors in the order of `features`.

    The tables pool by sum, and means are made here: TorchRec, where one table of means is sharded
    by rows, divides those that are not by the sizes of their bags as well (1.8.0).
    """

    def __init__(self, ebc: EmbeddingBagCollection, dense: nn.Module, spec: HybridSpec) -> None:
        super().__init__()
        self.ebc, self.dense, self.features, self.amp = ebc, dense, spec.features, spec.amp
        reader = {feature: table for table in spec.tables for feature in table.features}
        readers = [reader[feature] for feature in spec.features]
        self._dims = [table.dim for table in readers]
        self._means = [place for place, table in enumerate(readers) if table.pooling == "mean"]

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits `[b]` of `dense` `[b, F]` and bags of ids."""
        pooled = self.ebc(ids)
        if tuple(pooled.keys()) == self.features:
            vectors = pooled.values()
        else:
            by_feature = pooled.to_dict()
            vectors = torch.cat([by_feature[key] for key in self.features], dim=1)
        if self._means:
            parts = list(vectors.split(self._dims, dim=1))
            for place in self._means:
                sizes = ids[self.features[place]].lengths().clamp(min=1)
                parts[place] = parts[place] / sizes.unsqueeze(1)
            vectors = torch.cat(parts, dim=1)
        return predict(self.dense, dense, vectors, self.amp)


def build(world: World, spec: HybridSpec, dense: nn.Module) -> DistributedModelParallel:
    """A `HybridModel` under DistributedModelParallel: tables sharded, dense part under DDP.

    Every local shard gets its rows of `initial_rows`, and its optimizer state the initial
    accumulator. `dense` is moved to the device. Learning rates start at 0. Collective.
    """
    tables = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in spec.tables
    ]
    ebc = EmbeddingBagCollection(tables, spec.weighted, torch.device("meta"))
    # FBGEMM's own names, which TorchRec hands on to the kernels as they are.
    own: Any = spec.optimizer
    options = {"lr": 0.0} if own.name == "sgd" else {"lr": 0.0, "eps": own.eps}
    if own.name == "adam":
        options["beta1"], options["beta2"] = own.betas
    _apply_optimizer_in_backward(_OPTIMIZERS[own.name], ebc.parameters(), options)
    model = HybridModel(ebc, dense.to(world.device), spec)
    plan = shared_plan(world, spec, ebc)
    # DDP refuses a module in which nothing trains.
    frozen = [f"dense.{name}" for name, p in dense.named_parameters() if not p.requires_grad]
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world.device_group),
        device=world.device,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder()],
        data_parallel_wrapper=DefaultDataParallelWrapper(params_to_ignore=frozen),
        init_parameters=False,  # True would reset the dense weights when they change device
    )
    _write_initial(spec, dmp)
    return dmp


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


def saved_states(
    states: dict[str, ShardedTensor], optimizer: str, rows: int
) -> dict[str, ShardedTensor]:
    """A table's states, of `row_states`, as checkpoints of all modes have them: Adagrad's one is
    `sum`, `[rows, D]` or `[rows, 1]`, in the same memory.

    Column shards with a state of their own for each row have a name that no other mode has, and
    Adam's states, whose meaning is another one here, keep FBGEMM's names.
    """
    if optimizer == "adam":
        return states
    found = {}
    for value in states.values():
        size = value.metadata().size
        if size[0] != rows:
            found["sum_by_column_shard"] = value
        else:
            found["sum"] = value if len(size) == 2 else _as_column(value)
    return found


def _as_column(value: ShardedTensor) -> ShardedTensor:
    """`[rows]` as `[rows, 1]`, in the same memory."""

    def wide(at: ShardMetadata) -> ShardMetadata:
        return ShardMetadata([*at.shard_offsets, 0], [*at.shard_sizes, 1], at.placement)

    whole = value.metadata()
    shards = [Shard(own.tensor.unsqueeze(1), wide(own.metadata)) for own in value.local_shards()]
    size, every = torch.Size([*whole.size, 1]), [wide(at) for at in whole.shards_metadata]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, replace(whole, shards_metadata=every, size=size), process_group=value._process_group
    )


def overlap(shard: ShardMetadata, rows: range) -> tuple[range, slice]:
    """Which of `rows` of a table a shard holds, maybe none, and which columns of them."""
    (row, column), (count, columns) = shard.shard_offsets, shard.shard_sizes
    held = range(max(rows.start, row), min(rows.stop, row + count))
    return held, slice(column, column + columns)


def write_rows(tensor: ShardedTensor, source: Stored) -> None:
    """Give a sharded table the rows of `source`; each rank reads those of its shards."""
    for shard, block in product(tensor.local_shards(), source.ranges()):
        held, columns = overlap(shard.metadata, block)
        if held:
            first, values = shard.metadata.shard_offsets[0], source.block(held.start, held.stop)
            own = shard.tensor.detach()[held.start - first : held.stop - first]
            own.copy_(values[:, columns])


def _write_initial(spec: HybridSpec, dmp: DistributedModelParallel) -> None:
    by_table, states = weights(dmp, spec), row_states(dmp, spec)
    for index, table in enumerate(spec.tables):
        rows = partial(initial_rows, spec.seed, index, table.rows, table.dim)
        write_rows(by_table[table.name], Stored((table.rows, table.dim), torch.float32, rows))
        if isinstance(spec.optimizer, Adagrad):
            for state in states[table.name].values():
                for shard in state.local_shards():
                    shard.tensor.detach().fill_(spec.optimizer.initial_accumulator)


def gather_rows(tensor: ShardedTensor, rows: range, world: World) -> Tensor | None:
    """`rows` of a sharded table to rank 0, `[len(rows), D]` on the CPU. Collective.

    Other ranks send the parts that they own, shard by shard, and get None.
    """
    local = {tuple(own.metadata.shard_offsets): own.tensor for own in tensor.local_shards()}
    block = torch.empty(len(rows), tensor.metadata().size[1]) if world.is_first else None
    for shard in tensor.metadata().shards_metadata:
        (held, columns), owner = overlap(shard, rows), shard.placement.rank()
        if not held or (block is None and owner != world.rank):
            continue
        part = torch.empty(len(held), columns.stop - columns.start)
        if owner == world.rank:
            first, *_ = shard.shard_offsets
            own = local[tuple(shard.shard_offsets)].detach()
            part.copy_(own[held.start - first : held.stop - first])
        if block is None:
            dist.send(part, 0, group=world.host_group)
            continue
        if owner != world.rank:
            dist.recv(part, owner, group=world.host_group)
        block[held.start - rows.start : held.stop - rows.start, columns] = part
    return block


def jagged(ids: JaggedIds, size: int, device: torch.device) -> KeyedJaggedTensor:
    """The bags as TorchRec takes them, with bags of no ids behind, up to `size` samples."""
    lengths = ids.offsets.diff().to(torch.int32).view(len(ids.features), -1)
    padded = torch.zeros(len(ids.features), size, dtype=torch.int32)
    padded[:, : lengths.size(1)] = lengths
    weights = None if ids.weights is None else ids.weights.float()
    bags = KeyedJaggedTensor(
        keys=list(ids.features), values=ids.values, lengths=padded.view(-1), weights=weights
    )
    if device.type == "cuda":  # from other memory a copy waits for all work before it
        bags = bags.pin_memory()
    return bags.to(device, non_blocking=True)


# -----------------------------------------------------------------------------
# `hybrid`: TorchRec's DistributedModelParallel, tables sharded over ranks, the rest under DDP.
#
# The loss of a rank is its share of the global mean, sum / B, and gradients are summed over ranks:
# DDP through a hook that does not divide, TorchRec with its division by W switched off. Rows are
# updated inside backward, so ranks agree on the loss before it.


class HybridParallel(Parallel):
    """TorchRec's hybrid layout. Every method is called by all ranks in order.

    Row-wise tables need local batches of one size over gloo, and none that is empty; so each
    slice is padded to ceil(B / W) samples, at most one more, with samples that have no ids, whose
    logits are cut off before the loss: they add exactly zero.

    FBGEMM's Adam adds eps after bias correction, `torch.optim.SparseAdam` before it: with `adam`
    (CUDA only) this mode agrees with the others as far as eps is small.
    """

    def __init__(self, world: World, spec: HybridSpec, model: nn.Module) -> None:
        """Shard the tables and wrap `model` (`model(dense, pooled) -> logits`). Collective.

        Raises ConfigError for what TorchRec cannot do here, or when it does not load, and
        MemoryTooSmallError before anything is allocated.
        """
        check_spec(spec, world)
        check_memory(spec, world)
        _quieten()
        self._world, self._spec, self.model = world, spec, model
        self._steps, self._rehearsed = 0, False
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self._link = Link(world, world.device_group, self.counters, "the device group")
        self.clock, self._seen = StageClock(), 0
        self._dmp = build(world, spec, model)
        self._divided = comm_ops.get_gradient_division()
        comm_ops.set_gradient_division(False)  # by W, of row gradients, process-wide
        self._weights = weights(self._dmp, spec)
        self._row_states = row_states(self._dmp, spec)
        self.dense_optimizer = dense_optimizer(model.parameters(), spec.optimizer)
        ddp = self._dmp._dmp_wrapped_module
        if isinstance(ddp, DistributedDataParallel):  # not without a dense part that trains
            ddp.register_comm_hook(world.device_group, summing_hook(self.counters))

    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """The batches as they come, drawn just ahead of the step: TorchRec plans nothing."""
        check = BatchCheck(self._spec.tables, self._spec.features, self._spec.on_bad_id)
        with Prefetch(map(self._weighted, map(check, batches))) as ahead:
            sized = agreed_batches(ahead, self._world) if self._spec.agree_on_sizes else ahead
            asked = time.perf_counter()
            for batch in sized:
                got, number = time.perf_counter(), self._seen
                load = Span("load", "loader", number, got - ahead.load_s, got)
                yield Step(batch, (load, Span(WAIT, TRAINING_LANE, number, asked, got)))
                asked = time.perf_counter()

    def _weighted(self, batch: Batch) -> Batch:
        """`batch` with weights, or without, as the kernels were made; DataError if it differs."""
        ids, want = batch.ids, self._spec.weighted
        if want and not len(ids.values):  # of a rank that has no more batches
            return replace(batch, ids=replace(ids, weights=torch.empty(0)))
        if (ids.weights is not None) != want:
            found, first = ("no weights", "some") if want else ("weights", "none")
            raise DataError(
                f"the ids of {batch.kind} batch {batch.index} have {found}, and those of the first "
                f"batch have {first}: give all batches weights, or none"
            )
        return batch

    @contextmanager
    def _timed(self, name: str, step: Step) -> Iterator[None]:
        """Time what runs inside, if it ends well: by the host's clock on a device too, for each
        step waits for all losses, so that what one leaves to do there is in the next one's time."""
        began = time.perf_counter()
        yield
        own = Span(name, TRAINING_LANE, self._seen, began, time.perf_counter())
        load_and_wait = step.context or ()  # none of a batch that came by no stream
        self.clock.add(self._seen, step.batch.kind, [*load_and_wait[:1], own], load_and_wait[1:])
        self._seen += 1

    def train_step(self, step: Step, asks: int = 0) -> StepResult:
        """Forward, agreement on the loss, backward with the rows' update, dense update."""
        batch = step.batch
        if batch.is_empty:
            return self._agree(torch.zeros((), device=self._world.device), 1, asks)
        self._dmp.train()
        if not self._rehearsed:
            self._rehearse(batch.dense.size(1))
        if self._spec.optimizer.name == "adam":
            self._count_rows_steps()
        with self._timed("forward_backward", step):
            with count_collectives(self.counters):
                logits = self._logits(batch)
            labels = to_device(batch.labels, self._world.device).to(logits)
            loss_sum = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            result = self._agree(loss_sum.detach(), batch.global_size, asks)
            if result.bad_ranks:
                return result
            self.dense_optimizer.zero_grad()
            with count_collectives(self.counters):
                (loss_sum / batch.global_size).backward()
            self.dense_optimizer.step()
        self._steps += 1
        return result

    def _count_rows_steps(self) -> None:
        """Tell the kernels the steps applied so far, for Adam's bias correction: FBGEMM counts
        every forward, evaluation and refused steps too."""
        for module in self._dmp.modules():
            if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
                module.iter.fill_(self._steps)
                if hasattr(module, "iter_cpu"):
                    module.iter_cpu.fill_(self._steps)

    def _rehearse(self, dense_features: int) -> None:
        """Let DDP order its gradient buckets before the first step counts.

        It reorders them after two backwards, and from three ranks on a sum's last bits depend on
        its place in the buffer: without this, a resumed run would differ in its first two steps.
        No ids and a zero gradient: no row and no parameter changes. Buffers are put back. There are
        two samples, because torch refuses to normalise a batch of one.
        """
        names, device = self._spec.features, self._world.device
        weights = torch.empty(0) if self._spec.weighted else None
        offsets = torch.zeros(2 * len(names) + 1, dtype=torch.int64)
        ids = JaggedIds(names, torch.empty(0, dtype=torch.int64), offsets, weights)
        modules = list(self.model.modules())  # a model may assign new tensors to its buffers
        buffers = [{k: v.clone() for k, v in m.named_buffers(recurse=False)} for m in modules]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # of dropout
            for _ in range(2):
                dense = torch.zeros(2, dense_features, device=device)
                logits = self._dmp(dense, jagged(ids, 2, device))
                (logits * 0).sum().backward()
        for module, values in zip(modules, buffers, strict=True):
            module._buffers.update(values)
        self.counters.reset()
        self._rehearsed = True

    def _logits(self, batch: Batch) -> Tensor:
        """Logits `[b]` of this rank's slice, run at the size that all ranks share."""
        ids, count = batch.ids, batch.dense.size(0)
        size = max(1, batch.largest or -(-batch.global_size // self._world.size))
        dense = batch.dense.new_zeros(size, batch.dense.size(1))
        dense[:count] = batch.dense
        device = self._world.device
        return self._dmp(to_device(dense, device), jagged(ids, size, device))[:count]

    def _agree(self, loss_sum: Tensor, global_size: int, asks: int) -> StepResult:
        """What the ranks' losses and what they ask for come to."""
        said = words(loss_sum.double() / global_size, asks)
        said = self._link.start_all_gather(said, PLANNING, "loss and control")()
        self._link.settle("loss and control", self._link.now())
        return agreement(said)

    @torch.no_grad()
    def eval_step(self, step: Step) -> Tensor:
        """Logits `[b]` of this rank's slice; changes no weight, counts no bytes."""
        self._dmp.eval()
        with self._timed("forward", step):
            return self._logits(step.batch)

    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """Learning rates of the coming steps, the very next one included."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense_lr
        for group in self._dmp.fused_optimizer.param_groups:
            group["lr"] = embedding_lr
        self._dmp.fused_optimizer.step()  # updates no row: it hands the rate to the kernels

    def errors_are_common(self) -> bool:
        """See `Parallel.errors_are_common`: only where ranks exchange a word before each step."""
        return self._spec.agree_on_sizes

    def flush(self) -> None:
        """Nothing: the shards are the tables."""

    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """Rows [start, stop) of a table, `[stop - start, D]` on the CPU of rank 0."""
        name = self._spec.tables[table].name
        return gather_rows(self._weights[name], range(start, stop), self._world)

    def fill_table(self, table: int, source: Stored) -> None:
        """See `Parallel.fill_table`; each rank reads the rows of its shards."""
        tensor = self._weights[self._spec.tables[table].name]

        run_on_all_ranks(self._world, lambda: write_rows(tensor, source))

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        """See `Parallel.state_dict`: tables and row states as ShardedTensor of this rank's shards.

        All are the trained memory itself: filling them in place loads them.
        """
        state: dict[str, Any] = {"applied_steps": torch.tensor(self._steps)}
        for table in self._spec.tables:
            own = self._row_states[table.name], self._spec.optimizer.name, table.rows
            values = {"weight": self._weights[table.name]} | saved_states(*own)
            state |= {f"tables.{table.name}.{key}": value for key, value in values.items()}
        return state | self.dense_values()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, once its tensors are filled: they are the trained memory,
        but for those that torch's modules and optimizers load themselves."""
        self.load_dense(state)
        self._steps = int(state["applied_steps"])

    def summary(self) -> dict[str, Any]:
        """This mode's values of `summary.json`. Collective.

        Bytes sent are means over ranks, memory is that of the fullest rank. On the CPU
        `peak_device_bytes` is shards, their optimizer state, dense parameters, gradients and
        state; pooled vectors in flight are activations and excluded. `forward_backward` holds
        the whole step: TorchRec sums gradients and updates rows inside backward.
        """
        sharded = [*self._weights.values()]
        sharded += [state for states in self._row_states.values() for state in states.values()]
        held = sum(one.tensor.nbytes for tensor in sharded for one in tensor.local_shards())
        dense = held_bytes(self.model.parameters(), self.dense_optimizer)
        most = {"embedding": held, "peak": held + dense}
        if self._world.device.type == "cuda":
            most["peak"] = torch.cuda.max_memory_allocated(self._world.device)
        most = over_ranks(self._world, most, max)
        sent = over_ranks(self._world, self.counters.values())
        nothing = ["ingest", "plan", "plan_exchange", "gather", "write_back", "fill", "scatter"]
        nothing += ["forward_backward", "sync", "apply"]
        return {
            **{name: round(value / self._world.size) for name, value in sent.items()},
            "embedding_device_bytes": most["embedding"],
            "peak_device_bytes": most["peak"],
            "stage_ms": dict.fromkeys(nothing) | {"load": 0.0, WAIT: 0.0} | self.clock.mean_ms(),
            "stage_hidden_ms": {"load": 0.0} | self.clock.hidden_ms(),
            "table_rows": sum(table.rows for table in self._spec.tables),
            **dict.fromkeys(("cache_rows", "hit_rate", "hit_rate_lookups", *vars(MoveCounts()))),
        }

    def close(self) -> None:
        """Drop DDP and the shards, before the process group goes; safe to call twice."""
        if self._dmp is None:
            return
        self._dmp = self.dense_optimizer = None
        self._weights, self._row_states = {}, {}
        comm_ops.set_gradient_division(self._divided)
        gc.collect()  # DDP lies in reference cycles, and aborts when it outlives its group
