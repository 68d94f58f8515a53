"""`hybrid`: TorchRec's DistributedModelParallel, tables sharded over ranks, the rest under DDP.

The loss of a rank is its share of the global mean, sum / B, and gradients are summed over ranks:
DDP through a hook that does not divide, TorchRec with its division by W switched off. Rows are
updated inside backward, so ranks agree on the loss before it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distcache.comm.counters import PLANNING, CollectiveCounters, count_collectives, summing_hook
from distcache.comm.link import Link
from distcache.comm.world import World
from distcache.coordinator import agreement, words
from distcache.data.batch import Batch, JaggedIds
from distcache.data.check import BatchCheck
from distcache.data.prefetch import Prefetch
from distcache.errors import DataError
from distcache.optim.dense import dense_optimizer
from distcache.optim.dense_state import state_tensors
from distcache.parallel.base import Parallel, Step, StepResult
from distcache.parallel.hybrid_meter import StepClock, nbytes_by_part
from distcache.parallel.hybrid_spec import HybridSpec, check_memory, check_spec, load_torchrec
from distcache.parallel.statistics import inter_node_bytes
from distcache.pipeline.clock import Watcher
from distcache.pipeline.sizes import agreed_batches


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
                self._clock.batch(batch.kind, ahead.load_s, asked)
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
        with self._clock.step():
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
        said = self._link.all_gather(said, PLANNING, "loss and control")
        self._link.settle("loss and control")
        found = agreement(said)
        return StepResult(found.loss, found.bad_ranks, found.stop)

    @torch.no_grad()
    def eval_step(self, step: Step) -> Tensor:
        """Logits `[b]` of this rank's slice; changes no weight, counts no bytes."""
        self._dmp.eval()
        with self._clock.shown("forward", "eval"):
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
        nothing = (
            "ingest",
            "plan",
            "plan_exchange",
            "gather",
            "write_back",
            "fill",
            "sync",
            "apply",
        )
        stages = {"forward_backward": self._clock.median_ms()} | dict.fromkeys(nothing)
        return {
            **dict(zip(self.counters.values(), means, strict=True)),
            "inter_node_bytes": inter_node_bytes(self._world, self.counters),
            "embedding_device_bytes": int(held[0]),
            "peak_device_bytes": int(held[1]),
            "stage_ms": stages | self._clock.load_ms(),
            "stage_hidden_ms": self._clock.hidden_ms(),
            "table_rows": sum(table.rows for table in self._spec.tables),
            **dict.fromkeys(
                (
                    "cache_rows",
                    "hit_rate",
                    "hit_rate_lookups",
                    "rows_fetched",
                    "rows_written_back",
                    "host_to_device_bytes",
                    "device_to_host_bytes",
                )
            ),
        }

    def close(self) -> None:
        """Drop DDP and the shards, before the process group goes; safe to call twice."""
        if self._dmp is None:
            return
        self._dmp = self._dense = None
        self._weights, self._row_states = {}, {}
        self._torchrec.divide_gradients(self._divided)
        gc.collect()  # DDP lies in reference cycles, and aborts when it outlives its group
