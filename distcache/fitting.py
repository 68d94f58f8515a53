"""`distcache.fit`: train a model of your own on data of your own, in any of the parallel modes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcache.comm.agreement import agree_on, agree_on_versions, on_first, together
from distcache.comm.world import World, close_world, current_world, leave_world, open_world
from distcache.config.checks import check_own
from distcache.config.keys import flat_settings
from distcache.config.tree import Config
from distcache.data.own import OwnBatches
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.train import needs_shared_folder, open_run_folder
from distcache.trainer import build
from distcache.trainer.checkpoint import check_run_folder
from distcache.trainer.own import (
    OwnRun,
    OwnSource,
    count_evaluation,
    own_config,
    own_identity,
    share_weights,
    table_specs,
)
from distcache.trainer.plan_cache import most_ahead, opens_window
from distcache.trainer.trainer import TrainResult, resumed_state

_OWN = ("cache.statistics", "trainer.resume", "trainer.log_level")
"""Settings that each rank may have its own of: where it finds a folder, what it says."""


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
    `{"cache.rows": 10_000, "optim.dense_lr": 0.01}`, but not what the arguments say (mode and
    optimizer, model, tables, data); with `data.global_batch_size` where a prediction decides
    (`cache.placement` `auto` or `mixed`, `cache.split=by_curve`, `cache.policy=static`).

    Leaves a run folder (`run.dir`, by default runs/own) and returns its summary. Without `world`
    its ranks are those of torch.distributed where that is initialised (in groups of their own, on
    the current device; they are gone when this returns), else those of the job that torchrun's
    environment describes, or this one. Raises ConfigError, also where ranks differ in settings or
    package versions, and DataError, with the way out.
    """
    specs = table_specs(tables)
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"settings={settings!r} is no mapping of keys to values")
    given = flat_settings(settings or {})
    config = own_config(parallel, optimizer, given, len(specs))
    local_size = world.local_size if world else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    check_own(config, local_size)
    if config.trainer.eval_every is not None and eval_loader is None:
        raise ConfigError("trainer.eval_every is set, but there is no eval_loader to evaluate on")
    features = [feature for spec in specs for feature in spec.features]
    ahead = most_ahead(config.cache)
    train = OwnBatches(loader, features, epochs, keep=ahead)
    own_world, leave = (world, None) if world is not None else _join(config)
    try:
        agree_on_versions(own_world, parallel == "hybrid")
        agree_on(own_world, _compared(config, specs))
        count = count_evaluation(own_world, eval_loader, config.trainer.eval_steps or None)
        run_dir = Path(config.run.dir)
        on_first(own_world, lambda: open_run_folder(run_dir, config, own_world, given))
        check_run_folder(own_world, run_dir, needs_shared_folder(config))
        share_weights(model, own_world)
        source: Any = OwnSource(tuple(features), tuple(spec.rows for spec in specs))
        identity = own_identity(config, own_world, source, specs)
        start = resumed_state(config, own_world, identity)
        if opens_window(config):
            ids = max(together(own_world, train.first_ids))
            source = replace(source, ids_per_step=ids)
        mode = build.build_parallel(config, own_world, specs, model, source)
        run = OwnRun(
            config, own_world, run_dir, source, specs, mode, start,
            train=train, evaluate=eval_loader, eval_count=count,
        )  # fmt: skip
        result = run.go(build.build_rates(config))
        if leave is not None:
            leave(own_world, True)
            leave = None
        return result
    finally:
        train.close()
        if leave is not None:
            leave(own_world, False)


def _compared(config: Config, tables: Sequence[TableSpec]) -> dict[str, Any]:
    """What all ranks give alike: tables and settings by key, but those of a rank's own place."""
    found: dict[str, Any] = {f"table {table.name!r}": table for table in tables}
    found["the order of tables"] = [table.name for table in tables]
    for section in fields(config):
        own = getattr(config, section.name)
        if section.name != "run":
            found |= {f"{section.name}.{f.name}": getattr(own, f.name) for f in fields(own)}
    return {key: value for key, value in found.items() if key not in _OWN}


def _join(config: Config) -> tuple[World, Callable[[World, bool], None]]:
    """The world of a process that has one or of torchrun's environment, and how to leave it."""
    trainer = config.trainer
    if not (dist.is_available() and dist.is_initialized()):
        return open_world(trainer.device, trainer.backend, trainer.timeout_s), close_world
    device = torch.device("cpu")
    if trainer.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return current_world(device, timeout_s=trainer.timeout_s), leave_world
