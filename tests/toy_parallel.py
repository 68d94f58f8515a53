"""The smallest model, data and parallel mode that the trainer's own tests can run."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcache.comm.world import World
from distcache.config.tree import (
    CacheConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainerConfig,
)
from distcache.data.batch import Batch, JaggedIds, slice_bounds
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel, Step, StepResult
from distcache.trainer.trainer import Run, TrainResult

TABLES = (TableSpec("t_cat_0", 31, 4, ("cat_0",)), TableSpec("t_cat_1", 7, 4, ("cat_1",)))
BATCH, SAMPLES, READ_AHEAD = 16, 90, 3


def toy_config(**changes: Any) -> Config:
    """A config of the toy run; `changes` by dotted key with `__` for the dot."""
    config = Config(
        model=ModelConfig(name="dlrm", embedding_dim=4, dense_arch=[4], over_arch=[1]),
        data=DataConfig(name="synthetic", global_batch_size=BATCH, table_rows=[31, 7]),
        cache=CacheConfig(),
        parallel=ParallelConfig(mode="data"),
        optim=OptimConfig(name="adagrad"),
        trainer=TrainerConfig(steps=14, dtype="float64", log_every=5),
        run=RunConfig(dir="", digest="true"),
    )
    for key, value in changes.items():
        group, name = key.split("__")
        setattr(getattr(config, group), name, value)
    return config


class ToySource:
    """90 samples, 16 to a batch, so the sixth batch of an epoch is ragged; 5 held-out batches."""

    features = ("cat_0", "cat_1")
    table_rows = (31, 7)
    dense_features = 3
    steps_per_epoch: int | None = 6
    eval_batches: int | None = 5
    identity: ClassVar[dict[str, str]] = {"data.path": "toy"}

    def __init__(self, bad: tuple[int, int] | None = None, labels: float | None = None) -> None:
        """`bad`: (step, rank) whose dense features are NaN; `labels`: the same for all."""
        self.bad, self.labels, self.drawn = bad, labels, []

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        epoch, index = divmod(step, 6)
        size = min(BATCH, SAMPLES - index * BATCH)
        self.drawn.append(("train", step))
        return self._batch(7 * step + 1, size, step, epoch, rank, world_size, "train")

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        self.drawn.append(("eval", index))
        return self._batch(7 * index + 2, BATCH, index, 0, rank, world_size, "eval")

    def _batch(self, seed, size, index, epoch, rank, world_size, kind) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        dense = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        ids = [torch.randint(rows, (size,), generator=generator) for rows in self.table_rows]
        labels = (dense[:, 0] + ids[1] / 7 > 0.5).double()
        if self.labels is not None:
            labels[:] = self.labels
        low, high = slice_bounds(size, rank, world_size)
        dense = dense[low:high]
        if self.bad == (index, rank) and kind == "train":
            dense = dense * torch.nan
        values = torch.cat([column[low:high] for column in ids])
        ids = JaggedIds(self.features, values, torch.arange(len(values) + 1))
        return Batch(dense, ids, labels[low:high], size, index, epoch, low, kind)


class ToyParallel(Parallel):
    """Every rank holds everything; whole gradients are all-reduced; batches are read ahead."""

    def __init__(
        self, world: World, stop_after: int | None = None, number: int = signal.SIGINT
    ) -> None:
        """`stop_after`: the last rank sends itself signal `number` when it has done this step."""
        torch.manual_seed(3)
        self.world, self.stop_after, self.number = world, stop_after, number
        self.bags = nn.ModuleList(nn.EmbeddingBag(t.rows, t.dim, mode="sum") for t in TABLES)
        self.dense = nn.Sequential(nn.Linear(3 + 8, 5), nn.Tanh(), nn.Linear(5, 1))
        self.bags.double(), self.dense.double()
        self.parameters = [*self.bags.parameters(), *self.dense.parameters()]
        self.optimizer = torch.optim.Adagrad(self.parameters, lr=0.1)
        self.steps = self.closed = self.abandoned = self.flushed = 0

    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        ahead: deque[Step] = deque()
        try:
            for batch in batches:
                ahead.append(Step(batch))
                if len(ahead) > READ_AHEAD:
                    yield ahead.popleft()
            yield from iter(lambda: ahead.popleft() if ahead else None, None)
        except GeneratorExit:
            self.abandoned += 1
            raise

    def logits(self, batch: Batch) -> Tensor:
        """The model's output `[b]`."""
        ids = batch.ids.values.view(2, -1)
        pooled = [bag(column[:, None]) for bag, column in zip(self.bags, ids, strict=True)]
        return self.dense(torch.cat([batch.dense, *pooled], dim=1)).squeeze(1)

    def train_step(self, step: Step, stop: bool = False) -> StepResult:
        batch, world = step.batch, self.world
        self.optimizer.zero_grad(set_to_none=False)
        labels, logits = batch.labels, self.logits(batch)
        total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = total / batch.global_size
        flags = torch.zeros(2 + world.size, dtype=torch.float64)
        flags[0], flags[1], flags[2 + world.rank] = loss.detach(), stop, not loss.isfinite()
        dist.all_reduce(flags, group=world.device_group)
        bad = tuple(flags[2:].nonzero().flatten().tolist())
        result = StepResult(float(flags[0]), bad, bool(flags[1]))
        if bad:
            return result
        loss.backward()
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=world.device_group)
        self.optimizer.step()
        self.steps += 1
        if step.batch.index == self.stop_after and world.rank == world.size - 1:
            os.kill(os.getpid(), self.number)
        return result

    def eval_step(self, step: Step) -> Tensor:
        with torch.no_grad():
            return self.logits(step.batch)

    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = dense_lr

    def flush(self) -> None:
        self.flushed += 1

    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        return self.bags[table].weight.detach()[start:stop] if self.world.is_first else None

    def dense_state(self) -> dict[str, Tensor]:
        return dict(self.dense.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"counters": {"steps": self.steps}}
        names = [f"tables.{table.name}.weight" for table in TABLES]
        names += [f"dense.{name}" for name in self.dense_state()]
        for name, parameter in zip(names, self.parameters, strict=True):
            state[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name}.{key}"] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["counters"]["steps"]

    def summary(self) -> dict[str, Any]:
        return {"stage_ms": {"sync": 1.0}, "collective_bytes": 8, "hit_rate": float("nan")}

    def close(self) -> None:
        self.closed += 1


def toy_run(
    world: World,
    folder: Path,
    mode: Parallel,
    source: ToySource | None = None,
    rates: Callable[[int], tuple[float, float]] = lambda step: (0.1, 0.1),
    **changes: Any,
) -> TrainResult:
    """A whole run of `mode` in `folder`; `changes` of `toy_config`."""
    run = Run(toy_config(**changes), world, folder, source or ToySource(), TABLES, mode)
    return run.go(rates)
