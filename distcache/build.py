"""From the config to the parts of a run: data, tables, dense model, optimizer and parallel mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from distcache.comm.world import World
from distcache.config import Config
from distcache.data.batch import BatchSource
from distcache.data.criteo import CriteoSource, CriteoSpec
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.models.build import build_model, initialise
from distcache.optim.schedule import LearningRate
from distcache.parallel.base import OptimizerSpec, Parallel


def dtype_of(config: Config) -> torch.dtype:
    """`trainer.dtype` as torch's."""
    known = {"float32": torch.float32, "float64": torch.float64}
    if config.trainer.dtype not in known:
        raise ConfigError(f"trainer.dtype={config.trainer.dtype!r} is not 'float32' or 'float64'")
    return known[config.trainer.dtype]


def build_source(config: Config) -> BatchSource:
    """The data of group `data`."""
    data = config.data
    if data.name == "synthetic":
        return SyntheticSource(
            SyntheticSpec(
                table_rows=data.table_rows,
                bag_size=data.bag_size,
                zipf=data.zipf,
                weighted=data.weighted,
                samples=data.samples,
                dense_features=data.dense_features,
                global_batch_size=data.global_batch_size,
                seed=config.trainer.seed,
                dtype=dtype_of(config),
            )
        )
    if data.name != "criteo":
        raise ConfigError(f"data={data.name!r} is not 'synthetic' or 'criteo'")
    if data.path is None:
        raise ConfigError("data=criteo reads files: give data.path=<a file or a glob of files>")
    return CriteoSource(
        CriteoSpec(
            paths=data.path,
            table_rows=data.table_rows,
            global_batch_size=data.global_batch_size,
            seed=config.trainer.seed,
            on_bad_line=data.on_bad_line,
            dtype=dtype_of(config),
        )
    )


def build_tables(config: Config, source: BatchSource) -> list[TableSpec]:
    """One table for each categorical feature: `t_<feature>`, in feature order."""
    model, rows = config.model, source.table_rows
    dims = model.table_dims or [model.embedding_dim] * len(rows)
    if len(dims) != len(rows):
        raise ConfigError(
            f"model.table_dims has {len(dims)} widths for {len(rows)} tables (data.table_rows)"
        )
    return [
        TableSpec(f"t_{feature}", count, dim, (feature,), model.pooling)
        for feature, count, dim in zip(source.features, rows, dims, strict=True)
    ]


def build_dense(config: Config, tables: Sequence[TableSpec], dense_features: int) -> nn.Module:
    """The dense model of group `model` with its initial weights, on the CPU.

    `model(dense [b, dense_features], pooled [b, sum of widths]) -> logits [b]`.
    """
    model = build_model(
        config.model.name,
        dense_features,
        [table.dim for table in tables for _ in table.features],
        config.model.dense_arch,
        config.model.over_arch,
        config.model.cross_layers,
        config.model.cross_rank,
    )
    return initialise(model, config.trainer.seed, dtype_of(config))


def optimizer_spec(config: Config) -> OptimizerSpec:
    """The settings of group `optim` that every mode takes."""
    optim = config.optim
    first, second = optim.betas
    return OptimizerSpec(optim.name, optim.eps, (first, second), optim.initial_accumulator)


def build_rates(config: Config) -> Callable[[int], tuple[float, float]]:
    """The dense and the embedding learning rate as a function of the training step."""
    optim = config.optim
    dense, embedding = (
        LearningRate(base, optim.warmup_steps, optim.decay_start, optim.decay_steps)
        for base in (optim.dense_lr, optim.embedding_lr)
    )
    return lambda step: (dense(step), embedding(step))


def build_parallel(
    config: Config,
    world: World,
    tables: Sequence[TableSpec],
    model: nn.Module,
    source: BatchSource,
) -> Parallel:
    """The model and its tables in `parallel.mode`."""
    raise ConfigError(f"parallel={config.parallel.mode!r} is not there yet")
