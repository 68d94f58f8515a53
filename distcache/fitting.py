"""`distcache.fit`: train a model of your own on data of your own, in any of the parallel modes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from distcache.comm.first import on_first
from distcache.comm.world import World, close_world, open_world
from distcache.config import Config
from distcache.config_check import check_own
from distcache.data.own import OwnBatches
from distcache.errors import ConfigError
from distcache.run import build
from distcache.run.ahead import most_ahead
from distcache.run.own import (
    OwnRun,
    OwnSource,
    count_evaluation,
    own_config,
    share_weights,
    table_specs,
)
from distcache.train import open_run_folder
from distcache.trainer import TrainResult


def fit(
    loader: Iterable[Any],
    tables: Sequence[Any],
    model: nn.Module,
    *,
    parallel: str = "data",
    optimizer: str = "adagrad",
    eval_loader: Iterable[Any] | None = None,
    epochs: int = 1,
    settings: Mapping[str, Any] | None = None,
    world: World | None = None,
) -> TrainResult:
    """Train `model` over `tables` on this rank's `loader`; every rank of the job calls this.

    `loader`: any iterable of (dense `[b, F]`, ids, labels `[b]`), ids a KeyedJaggedTensor or
    (values, offsets) or (values, offsets, weights); a step's global batch is what all ranks bring
    to it, and the first rank whose loader ends, ends the run. With `state_dict` and
    `load_state_dict` it resumes where it was, else by reading again what was trained.
    `tables`: `TableSpec`s or TorchRec's `EmbeddingBagConfig`s. `model(dense [b, F], pooled
    [b, sum of widths]) -> logits [b]`; all ranks start from rank 0's weights. `parallel`: `data`,
    `resident`, `host` or `hybrid`; `optimizer`: `sgd`, `adagrad`, `rowwise_adagrad` or `adam`.
    `eval_loader`: held-out items, all of them (or `trainer.eval_steps` each time), at the end and
    every `trainer.eval_every` steps. `settings`: keys of the command line, such as
    `{"cache.rows": 10_000, "optim.dense_lr": 0.01}`.

    Leaves a run folder (`run.dir`, by default runs/own) and returns its summary. Without `world`,
    joins the job that torchrun's environment describes, or is one rank. Raises ConfigError and
    DataError, with the way out.
    """
    specs = table_specs(tables)
    config = own_config(parallel, optimizer, dict(settings or {}), len(specs))
    local_size = world.local_size if world else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    check_own(config, local_size)
    if config.trainer.eval_every is not None and eval_loader is None:
        raise ConfigError("trainer.eval_every is set, but there is no eval_loader to evaluate on")
    features = [feature for spec in specs for feature in spec.features]
    ahead = most_ahead(config.cache)
    train = OwnBatches(loader, features, epochs, keep=ahead)
    own_world = world or _open_world(config)
    try:
        count = count_evaluation(own_world, eval_loader, config.trainer.eval_steps or None)
        run_dir = Path(config.run.dir)
        on_first(own_world, lambda: open_run_folder(run_dir, config, own_world))
        share_weights(model, own_world)
        source: Any = OwnSource(tuple(features), tuple(spec.rows for spec in specs))
        mode = build.build_parallel(config, own_world, specs, model, source)
        run = OwnRun(
            config, own_world, run_dir, source, specs, mode,
            train=train, evaluate=eval_loader, eval_count=count,
        )  # fmt: skip
        result = run.go(build.build_rates(config))
        if world is None:
            close_world(own_world)
        return result
    finally:
        train.close()
        if world is None:
            close_world(own_world, orderly=False)


def _open_world(config: Config) -> World:
    """The world of torchrun's environment. Raises ConfigError in a process that has one already."""
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already: leave that to distcache.fit, or pass the "
            "ranks as world=distcache.comm.world.open_world(...)"
        )
    trainer = config.trainer
    return open_world(trainer.device, trainer.backend, trainer.timeout_s)
