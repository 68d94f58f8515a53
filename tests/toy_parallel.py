"""The smallest model, data and run that the trainer's own tests can have."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from scenarios import SmallNet

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
from distcache.models import initialise
from distcache.optim import row_update
from distcache.parallel.base import Parallel, Step, StepResult
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.trainer.trainer import Run, TrainResult

TABLES = (TableSpec("t_cat_0", 31, 4, ("cat_0",)), TableSpec("t_cat_1", 7, 4, ("cat_1",)))
BATCH, SAMPLES = 16, 90


def toy_config(**changes: Any) -> Config:
    """A config of the toy run; `changes` by dotted key with `__` for the dot."""
    config = Config(
        model=ModelConfig(name="dlrm", embedding_dim=4, dense_arch=[4], over_arch=[1]),
        data=DataConfig(name="synthetic", global_batch_size=BATCH, table_rows=[31, 7]),
        cache=CacheConfig(),
        parallel=ParallelConfig(mode="data"),
        optim=OptimConfig(name="adagrad"),
        trainer=TrainerConfig(steps=14, dtype="float64", log_every=5, resume="never"),
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


class ToyParallel(CachedParallel):
    """A cached mode, `data` in a cache that its steps just fit on two ranks."""

    def __init__(
        self,
        world: World,
        delay: int = 0,
        stop_after: int | None = None,
        number: int = signal.SIGINT,
        mode: str = "data",
    ) -> None:
        """`delay`: steps after which a loss is read, as on a GPU; `stop_after`: the last rank sends
        itself signal `number` when it has done this step."""
        slots = 28 if world.size < 3 else 36
        settings = CachedSettings(mode, (slots,), 3, 2, dtype=torch.float64, result_delay=delay)
        model = initialise(SmallNet(3, 8), 0, torch.float64)
        super().__init__(world, TABLES, ToySource.features, model, row_update("adam"), settings)
        self.stop_after, self.number, self.closed = stop_after, number, 0

    def train_step(self, step: Step, asks: int = 0) -> StepResult:
        result = super().train_step(step, asks)
        if step.batch.index == self.stop_after and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), self.number)
        return result

    def close(self) -> None:
        self.closed += 1
        super().close()


def toy_run(
    world: World,
    folder: Path,
    mode: Parallel,
    source: ToySource | None = None,
    rates: Callable[[int], tuple[float, float]] = lambda step: (0.05, 0.05),
    **changes: Any,
) -> TrainResult:
    """A whole run of `mode` in `folder`; `changes` of `toy_config`."""
    config = toy_config(**{"optim__name": "adam"} | changes)
    return Run(config, world, folder, source or ToySource(), TABLES, mode).go(rates)
