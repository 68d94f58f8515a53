"""`hybrid`: tables sharded over the ranks by TorchRec, the dense part data-parallel."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distcache.comm.agreement import together
from distcache.comm.link import PLANNING, CollectiveCounters, Link, count_collectives, summing_hook
from distcache.comm.world import World
from distcache.data.batch import Batch, BatchCheck, JaggedIds, Prefetch
from distcache.engine.gradients import agreement, words
from distcache.engine.movement import MoveCounts
from distcache.engine.step import WAIT, Span, StageClock, Watcher
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec
from distcache.optim import dense_optimizer, row_update, state_tensors
from distcache.parallel.base import (
    Durations,
    OptimizerSpec,
    Parallel,
    Step,
    StepResult,
    inter_node_bytes,
)
from distcache.store.memory import require_memory

# -----------------------------------------------------------------------------
# What `hybrid` is built from, what it refuses, and the only door to TorchRec and FBGEMM.

log = logging.getLogger(__name__)

SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")

_LIBRARIES = ("torchrec", "fbgemm_gpu")


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
    optimizer: OptimizerSpec
    seed: int
    sharding: str = "auto"
    weighted: bool = False
    dtype: torch.dtype = torch.float32
    local_batch_size: int = 512
    on_bad_id: str = "error"
    agree_on_sizes: bool = False
    amp: str = "off"


def check_spec(spec: HybridSpec, world: World) -> None:
    """Raise ConfigError, with the way out, for what TorchRec's sharded tables cannot do here."""
    readers = Counter(feature for table in spec.tables for feature in table.features)
    shared = sorted(feature for feature, count in readers.items() if count > 1)
    narrow = next((table for table in spec.tables if table.dim % 4), None)
    means = next((table for table in spec.tables if table.pooling == "mean"), None)
    on_cpu, problem = world.device.type == "cpu", ""
    if spec.sharding not in SHARDINGS:
        problem = f"parallel.sharding={spec.sharding!r} is not one of {SHARDINGS}"
    elif spec.dtype != torch.float32:
        problem = (
            f"parallel=hybrid trains in float32, not {spec.dtype}: set trainer.dtype=float32, or "
            "use parallel=data, resident or host for checks in float64"
        )
    elif spec.optimizer.name == "adam" and on_cpu:
        problem = (
            "optim=adam has no kernel on the CPU in parallel=hybrid: use optim=sgd, adagrad or "
            "rowwise_adagrad, a CUDA device, or another parallel mode"
        )
    elif not on_cpu and world.backend == "gloo" and world.size > 1:
        problem = (
            "parallel=hybrid on CUDA exchanges rows with NCCL, and this job runs on gloo: start "
            "one rank per GPU with trainer.backend=nccl, or set trainer.device=cpu"
        )
    elif narrow is not None:
        problem = (
            f"table {narrow.name!r} has width {narrow.dim}: parallel=hybrid needs a multiple "
            f"of 4, so set model.embedding_dim={-(-narrow.dim // 4) * 4} or use another mode"
        )
    elif spec.weighted and means is not None:
        problem = f"table {means.name!r} has pooling 'mean' and weighted ids: weights need 'sum'"
    elif shared:
        problem = f"features {shared} are read by several tables: give each table its own"
    elif sorted(readers) != sorted(spec.features):
        problem = (
            f"the tables read features {sorted(readers)}, the batches have {sorted(spec.features)}"
        )
    if problem:
        raise ConfigError(problem)


def check_memory(spec: HybridSpec, world: World) -> None:
    """Raise MemoryTooSmallError where the shards of a node's ranks on the CPU do not fit it.

    Called by all ranks, before anything is allocated; every rank learns of it.
    """
    if world.device.type != "cpu":
        return
    update = row_update(spec.optimizer.name, 0.0)
    floats = sum(table.rows * (table.dim + update.state_width(table.dim)) for table in spec.tables)
    share = floats * spec.dtype.itemsize * world.local_size // world.size

    def check() -> None:
        if world.local_rank == 0:
            require_memory(
                share,
                f"the shards of {world.local_size} local ranks",
                "use smaller tables, more nodes, or parallel=data on a machine with more memory",
            )

    together(world, check)


def _quieten() -> None:
    """Keep what TorchRec and FBGEMM report below WARNING from users, unless distcache logs at
    DEBUG: both log to the root logger, dozens of INFO lines per table."""
    if logging.getLogger("distcache").isEnabledFor(logging.DEBUG):
        return
    logging.getLogger().addFilter(_is_no_noise)
    levels = {
        "torchrec": logging.WARNING,
        "torchrec.distributed.planner": logging.ERROR,  # warns of its own constructors
        "torch.fx._symbolic_trace": logging.ERROR,
    }
    for name, level in levels.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)
    # What TorchRec calls and torch is about to rename; nothing that a user could change.
    renamed = "(all_gather_into|reduce_scatter)_tensor", "ShardedTensor", "broadcast_buffers"
    for name in renamed:
        warnings.filterwarnings("ignore", f".*{name}", FutureWarning)


def _is_no_noise(record: logging.LogRecord) -> bool:
    """Whether the root logger handles `record`."""
    theirs = any(f"/{name}/" in record.pathname for name in _LIBRARIES)
    return record.levelno >= logging.WARNING or not theirs


def load_torchrec() -> ModuleType:
    """Import `distcache.parallel.hybrid_torchrec`, and with it TorchRec and FBGEMM.

    Raises ConfigError when one is missing or was built for another torch.
    """
    _quieten()
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    fit = "fbgemm 1.6 fits torch 2.11, 1.7 fits 2.12, 1.8 fits 2.13"
    if missing:
        raise ConfigError(
            f"parallel=hybrid needs {' and '.join(missing)}, not installed here: install torchrec "
            f"and the fbgemm-gpu or fbgemm-gpu-cpu made for torch {torch.__version__} ({fit}), "
            "or use another parallel mode"
        )
    try:
        return importlib.import_module("distcache.parallel.hybrid_torchrec")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"torchrec or fbgemm does not load under torch {torch.__version__} ({fit}); install "
            f"the one made for it, or use another parallel mode. First error: {error}"
        ) from error


# -----------------------------------------------------------------------------
# What a hybrid step costs: its time, and the device bytes of what stays between steps.

LANE = "training"
"""Where all of it runs, for spans."""


class StepClock:
    """Times steps: on the CPU by the clock, on CUDA by events read one step later.

    `watchers` see each step's span, host time, and its wait for a batch; `stages` are the loading
    of batches beside the steps, and that wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._times_ms = Durations()
        self._pending: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._load, self._wait, self._seen = list[Span](), list[Span](), 0
        self.stages = StageClock()
        self.watchers: list[Watcher] = []

    def batch(self, load_s: float, asked: float) -> None:
        """Note a batch that took `load_s` seconds to load beside the steps and that the loop,
        which `asked` for it at that time, has now."""
        got, number = time.perf_counter(), self._seen
        self._wait = [Span(WAIT, LANE, number, asked, got)]
        self._load = [Span("load", "loader", number, got - load_s, got)]

    @contextmanager
    def step(self, name: str, kind: str) -> Iterator[None]:
        """Time the step of the last batch, which runs inside, if it ends well."""
        events = None
        if self._cuda and kind == "train":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        if events is not None:
            events[1].record()
            self._harvest()
            self._pending = events
        elif kind == "train":
            self._times_ms.add((now - began) * 1e3)
        for watcher in self.watchers:
            watcher(self._seen, kind, [*self._wait, Span(name, LANE, self._seen, began, now)])
        self.stages.add(self._seen, kind, self._load, self._wait)
        self._seen, self._load, self._wait = self._seen + 1, [], []

    def _harvest(self) -> None:
        if self._pending is not None:
            # Long done: the loss of the step after it has been read since.
            self._pending[1].synchronize()
            self._times_ms.add(self._pending[0].elapsed_time(self._pending[1]))
            self._pending = None

    def median_ms(self) -> float | None:
        """Median milliseconds of a step without the first ten, or of all where there are no more;
        None before any."""
        self._harvest()
        found = self._times_ms.percentiles((50,))
        if found is not None:
            return found[0]
        return statistics.median(self._times_ms.skipped) if self._times_ms.skipped else None


def nbytes_by_part(
    weights: Mapping[str, Any], row_states: Mapping[str, Mapping[str, Any]], dense_optimizer: Any
) -> tuple[int, int]:
    """Bytes of this rank's shards with their state, and of the dense part.

    The dense part is parameters, as many gradients, and optimizer state.
    """
    sharded = [*weights.values(), *(s for states in row_states.values() for s in states.values())]
    embedding = sum(shard.tensor.nbytes for tensor in sharded for shard in tensor.local_shards())
    dense = 0
    for group in dense_optimizer.param_groups:
        for parameter in group["params"]:
            state = dense_optimizer.state[parameter].values()
            dense += 2 * parameter.nbytes
            dense += sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    return embedding, dense


# -----------------------------------------------------------------------------
# Global batches whose slices the ranks bring themselves: sizes are agreed step by step.


def agreed_batches(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """The batches with their places among the slices of all ranks, until the first rank's end.

    From the main thread: one small exchange per batch. An error of one rank ends all.
    """
    iterator, number = iter(batches), 0
    drawn: list[Batch] = []

    def draw() -> int | None:
        """Take the next batch; its samples, None at the end."""
        drawn[:] = islice(iterator, 1)
        return drawn[0].ids.batch_size if drawn else None

    while True:
        sizes = together(world, draw)
        ended = [rank for rank, size in enumerate(sizes) if size is None]
        if ended:
            if drawn:
                log.warning(
                    "the data of rank %s ended at batch %d; this rank had more, left unread",
                    ended,
                    number,
                )
            return
        yield drawn[0].among([size for size in sizes if size is not None], world.rank)
        number += 1


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
        self._torchrec = load_torchrec()
        self._world, self._spec, self._model = world, spec, model
        self._steps, self._rehearsed = 0, False
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self._link = Link(world, world.device_group, self.counters, "the device group")
        self._clock = StepClock(world.device)
        self._dmp = self._torchrec.build(world, spec, model)
        self._divided = self._torchrec.divide_gradients(False)
        self._weights = self._torchrec.weights(self._dmp, spec)
        self._row_states = self._torchrec.row_states(self._dmp, spec)
        rows = spec.optimizer
        self._dense = dense_optimizer(
            model.parameters(), rows.name, 0.0, rows.eps, rows.betas, rows.initial_accumulator
        )
        self._dmp._dmp_wrapped_module.register_comm_hook(
            world.device_group, summing_hook(self.counters)
        )

    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """The batches as they come, drawn just ahead of the step: TorchRec plans nothing."""
        check = BatchCheck(self._spec.tables, self._spec.features, self._spec.on_bad_id)
        with Prefetch(map(check, batches)) as ahead:
            sized = agreed_batches(ahead, self._world) if self._spec.agree_on_sizes else ahead
            asked = time.perf_counter()
            for batch in sized:
                self._clock.batch(ahead.load_s, asked)
                yield Step(batch)
                asked = time.perf_counter()

    def train_step(self, step: Step, stop: bool = False) -> StepResult:
        """Forward, agreement on the loss, backward with the rows' update, dense update."""
        batch = step.batch
        self._dmp.train()
        if not self._rehearsed:
            self._rehearse(batch.dense.size(1))
        if self._spec.optimizer.name == "adam":
            self._torchrec.set_row_step(self._dmp, self._steps)
        with self._clock.step("step", "train"):
            with count_collectives(self.counters):
                logits = self._logits(batch)
            labels = batch.labels.to(logits)
            loss_sum = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            result = self._agree(loss_sum.detach(), batch.global_size, stop)
            if result.bad_ranks:
                return result
            self._dense.zero_grad()
            with count_collectives(self.counters):
                (loss_sum / batch.global_size).backward()
            self._dense.step()
        self._steps += 1
        return result

    def _rehearse(self, dense_features: int) -> None:
        """Let DDP order its gradient buckets before the first step counts.

        It reorders them after two backwards, and from three ranks on a sum's last bits depend on
        its place in the buffer: without this, a resumed run would differ in its first two steps.
        No ids and a zero gradient: no row and no parameter changes.
        """
        names, device = self._spec.features, self._world.device
        weights = torch.empty(0) if self._spec.weighted else None
        offsets = torch.zeros(len(names) + 1, dtype=torch.int64)
        ids = JaggedIds(names, torch.empty(0, dtype=torch.int64), offsets, weights)
        for _ in range(2):
            dense = torch.zeros(1, dense_features, device=device)
            logits = self._dmp(dense, self._torchrec.jagged(ids, 1, device))
            (logits * 0).sum().backward()
        self.counters.reset()
        self._rehearsed = True

    def _logits(self, batch: Batch) -> Tensor:
        """Logits `[b]` of this rank's slice, run at the size that all ranks share."""
        ids, count = batch.ids, batch.dense.size(0)
        if (ids.weights is not None) != self._spec.weighted:
            raise DataError(
                f"batch {batch.index} has {'no ' if ids.weights is None else ''}weights, but the "
                f"model was built with weighted={self._spec.weighted}"
            )
        size = batch.largest or -(-batch.global_size // self._world.size)
        dense = batch.dense.new_zeros(size, batch.dense.size(1))
        dense[:count] = batch.dense
        device = self._world.device
        return self._dmp(dense.to(device), self._torchrec.jagged(ids, size, device))[:count]

    def _agree(self, loss_sum: Tensor, global_size: int, stop: bool) -> StepResult:
        """What the ranks' losses, stop requests and flags come to."""
        said = words(loss_sum.double() / global_size, stop)
        said = self._link.start_all_gather(said, PLANNING, "loss and control")()
        self._link.settle("loss and control")
        return agreement(said)

    @torch.no_grad()
    def eval_step(self, step: Step) -> Tensor:
        """Logits `[b]` of this rank's slice; changes no weight, counts no bytes."""
        self._dmp.eval()
        with self._clock.step("forward", "eval"):
            return self._logits(step.batch)

    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """Learning rates of the coming steps, the very next one included."""
        for group in self._dense.param_groups:
            group["lr"] = dense_lr
        self._torchrec.set_row_lr(self._dmp, embedding_lr)

    def errors_are_common(self) -> bool:
        """See `Parallel.errors_are_common`: only where ranks exchange a word before each step."""
        return self._spec.agree_on_sizes

    def watch(self, watcher: Watcher) -> None:
        """See `Parallel.watch`: `step` (or `forward`, in evaluation) and the `wait` before it."""
        self._clock.watchers.append(watcher)

    def flush(self) -> None:
        """Nothing: the shards are the tables."""

    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """Rows [start, stop) of a table, `[stop - start, D]` on the CPU of rank 0."""
        name = self._spec.tables[table].name
        return self._torchrec.gather_rows(self._weights[name], start, stop, self._world)

    def dense_state(self) -> dict[str, Tensor]:
        """The dense parameters by the given model's own names, in its order."""
        return {name: value.detach() for name, value in self._model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Shards of tables and row states as ShardedTensor, dense tensors, and the steps applied.

        All are the trained memory itself: filling them in place loads them.
        """
        state: dict[str, Any] = {"counters.steps": self._steps}
        for name, weight in self._weights.items():
            state[f"tables.{name}.weight"] = weight
            for key, value in self._row_states[name].items():
                state[f"tables.{name}.{key}"] = value
        for name, parameter in self._model.named_parameters():
            state[f"dense.{name}"] = parameter.detach()
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for name, value in state_tensors(self._dense, names).items():
            state[f"dense_optim.{name}"] = value
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what `state_dict` of this layout gave (same world size and sharding) back."""
        for key, mine in self.state_dict().items():
            if not isinstance(mine, Tensor):
                continue
            if hasattr(mine, "local_shards"):
                pairs = zip(mine.local_shards(), state[key].local_shards(), strict=True)
                for here, there in pairs:
                    here.tensor.copy_(there.tensor)
            else:
                mine.copy_(state[key])
        self._steps = int(state["counters.steps"])

    def summary(self) -> dict[str, Any]:
        """This mode's values of `summary.json`. Collective.

        Bytes sent are means over ranks, memory is that of the fullest rank. On the CPU
        `peak_device_bytes` is shards, their optimizer state, dense parameters, gradients and
        state; pooled vectors in flight are activations and excluded. `forward_backward` holds
        the whole step: TorchRec sums gradients and updates rows inside backward.
        """
        sent = torch.tensor(list(self.counters.values().values()), dtype=torch.float64)
        dist.all_reduce(sent, group=self._world.host_group)
        embedding, dense = nbytes_by_part(self._weights, self._row_states, self._dense)
        peak = embedding + dense
        if self._world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._world.device)
        held = torch.tensor([embedding, peak])
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=self._world.host_group)
        means = (round(value / self._world.size) for value in sent.tolist())
        nothing = ["ingest", "plan", "plan_exchange", "gather", "write_back", "fill"]
        stages = {"load": 0.0, "wait": 0.0} | self._clock.stages.mean_ms()
        unknown = ("cache_rows", "hit_rate", "hit_rate_lookups", *vars(MoveCounts()))
        return {
            **dict(zip(self.counters.values(), means, strict=True)),
            "inter_node_bytes": inter_node_bytes(self._world, self.counters),
            "embedding_device_bytes": int(held[0]),
            "peak_device_bytes": int(held[1]),
            "stage_ms": dict.fromkeys([*nothing, "sync", "apply"])
            | {"forward_backward": self._clock.median_ms()}
            | stages,
            "stage_hidden_ms": {"load": 0.0} | self._clock.stages.hidden_ms(),
            "table_rows": sum(table.rows for table in self._spec.tables),
            **dict.fromkeys(unknown),
        }

    def close(self) -> None:
        """Drop DDP and the shards, before the process group goes; safe to call twice."""
        if self._dmp is None:
            return
        self._dmp = self._dense = None
        self._weights, self._row_states = {}, {}
        self._torchrec.divide_gradients(self._divided)
        gc.collect()  # DDP lies in reference cycles, and aborts when it outlives its group
