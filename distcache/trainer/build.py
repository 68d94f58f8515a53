"""From the config to the parts of a run: data, tables, dense model, optimizer and parallel mode."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from distcache.comm.agreement import agree_on
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import BatchSource
from distcache.data.criteo import BatchSettings, CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.groups import SHARDED, Placement, warn_if_too_small
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.models import build_model, initialise
from distcache.optim import LearningRate
from distcache.parallel.base import OptimizerSpec, Parallel
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.planner.policy import Policy
from distcache.trainer.plan_cache import (
    of_all_homes,
    plan_cache,
    resolve_ahead,
    resolve_placement,
    resolve_prefetch,
    with_state,
)

# -----------------------------------------------------------------------------
# How many threads torch computes with on each rank.

_VARIABLE = "OMP_NUM_THREADS"


def compute_threads(config: Config, world: World) -> int:
    """Threads of one torch operation on this rank, `trainer.threads` or, for `auto`, its choice.

    `auto`: $OMP_NUM_THREADS where it is set, unless to 1 for several local ranks, as torchrun does
    by itself; else the rank's share of the cores that the job may use. The planner and the movement
    of rows take one thread each beside these, and are at work for a small part of a step.
    Raises ConfigError for more threads than cores, which only wait for one another.
    """
    given, cores = config.trainer.threads, len(os.sched_getaffinity(0))
    if given != "auto":
        if int(given) > cores:
            raise ConfigError(
                f"trainer.threads={given} is more than the {cores} core(s) that this process may "
                f"use: give at most {cores}, or auto"
            )
        return int(given)
    outside = os.environ.get(_VARIABLE, "").split(",")[0]
    if outside.isdigit() and (int(outside) > 1 or world.local_size == 1):
        return int(outside)
    return max(1, cores // world.local_size)


# -----------------------------------------------------------------------------
# From the config to the sources that read columns and interactions.

A_SEVENTH = 1 / 7


def parquet_source(config: Config, dtype: torch.dtype) -> BatchSource:
    """The source of `data=parquet`. Raises ConfigError where pyarrow is missing."""
    try:
        from distcache.data.parquet import ColumnRules, ParquetSource, ParquetSpec
    except ImportError as error:
        raise ConfigError(f"data=parquet needs pyarrow ({error}): pip install pyarrow") from error
    data = config.data
    rules = ColumnRules(
        nulls=data.nulls,
        string_ids=data.string_ids,
        on_bad_id=data.on_bad_id,
        log1p=data.dense_transform == "log1p",
    )
    return ParquetSource(
        ParquetSpec(
            paths=data.path or "",
            label_column=data.label_column or "",
            id_columns=data.id_columns,
            table_rows=data.table_rows,
            dense_columns=data.dense_columns,
            weight_columns=data.weight_columns or {},
            held_out=A_SEVENTH if data.held_out is None else data.held_out,
            held_out_paths=data.held_out_path,
            global_batch_size=data.global_batch_size,
            seed=config.trainer.seed,
            shuffle_rows=data.shuffle_rows if data.shuffle else 0,
            rules=rules,
            dtype=dtype,
        )
    )


def interactions_source(config: Config, dtype: torch.dtype) -> BatchSource:
    """The source of `data=interactions`."""
    from distcache.data.interactions import InteractionsSource, InteractionsSpec

    data = config.data
    return InteractionsSource(
        InteractionsSpec(
            paths=data.path or "",
            format=data.format,
            delimiter=data.delimiter,
            min_rating=data.min_rating,
            negatives=data.negatives,
            sampling=data.negative_sampling,
            held_out_by=data.held_out_by,
            held_out=A_SEVENTH if data.held_out is None else data.held_out,
            table_rows=data.table_rows,
            on_bad_id=data.on_bad_id,
            on_bad_line=data.on_bad_line,
            global_batch_size=data.global_batch_size,
            seed=config.trainer.seed,
            dtype=dtype,
        )
    )


def has_weights(config: Config) -> bool:
    """Whether the ids of the data have weights."""
    return config.data.weighted or bool(config.data.weight_columns)


# -----------------------------------------------------------------------------
# From the config to the parts of a run: data, tables, dense model, optimizer and parallel mode.

SOURCES = {"parquet": parquet_source, "interactions": interactions_source}
"""Sources by `data.name`, made from the config and the dtype of dense features and labels."""


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
    if data.name in SOURCES:
        return SOURCES[data.name](config, dtype_of(config))
    if data.name != "criteo":
        known = " or ".join(map(repr, ("synthetic", "criteo", *SOURCES)))
        raise ConfigError(f"data={data.name!r} is not {known}")
    if data.path is None:
        raise ConfigError("data=criteo reads files: give data.path=<a file or a glob of files>")
    settings = BatchSettings(
        data.global_batch_size,
        config.trainer.seed,
        dtype_of(config),
        data.shuffle,
        data.shuffle_block,
    )
    if Path(data.path).is_dir():
        return CriteoArrays(data.path, settings, data.table_rows or None)
    rows = data.table_rows or KAGGLE_ROWS
    return CriteoSource(CriteoSpec.of(data.path, rows, data.on_bad_line, settings))


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
    """The model and its tables in `parallel.mode`; called by all ranks.

    Raises ConfigError, also where the ranks' data differ, or MemoryTooSmallError before anything is
    allocated.
    """
    features = tuple(source.features)
    # Ranks that read other files would train on a mixture of both, and agree on every step.
    agree_on(world, dict(source.identity))
    if config.parallel.mode == "hybrid":
        from distcache.parallel.hybrid import (
            HybridParallel,  # loads TorchRec and FBGEMM
            HybridSpec,
        )

        spec = HybridSpec(
            tables=tuple(tables),
            features=features,
            optimizer=optimizer_spec(config),
            seed=config.trainer.seed,
            sharding=config.parallel.sharding,
            weighted=has_weights(config),
            dtype=dtype_of(config),
            local_batch_size=-(-config.data.global_batch_size // world.size),
            on_bad_id=config.data.on_bad_id,
            agree_on_sizes=config.data.name == "own",
            amp=config.trainer.amp,
        )
        return HybridParallel(world, spec, model)
    config = resolve_ahead(with_state(config), world, source, tables)
    seen = zlib.crc32(repr(sorted(source.identity.items())).encode())
    slots, popularity = (), None
    if config.parallel.mode == "data":
        slots, popularity = plan_cache(config, world, tables, source, dtype_of(config).itemsize)
    counted = None if popularity is None else popularity.statistics
    placement = resolve_placement(config, world, (tables, slots, counted), source, model)
    if placement.kind == SHARDED:
        popularity = of_all_homes(config, world, tables, source, slots, popularity)
    settings = cached_settings(config, world, tables, source, slots, placement)
    settings, spec = replace(settings, fingerprint=seen), optimizer_spec(config)
    mode = CachedParallel(world, tables, features, model, spec, settings, popularity)
    if config.parallel.mode == "data" and world.is_first:
        warn_if_too_small(source, mode.groups, settings.slots, config.data.global_batch_size)
    return mode


def cached_settings(
    config: Config,
    world: World,
    tables: Sequence[TableSpec],
    source: BatchSource,
    slots: Sequence[int],
    placement: Placement,
) -> CachedSettings:
    """How the modes `data`, `resident` and `host` run; `slots` of each group in mode `data`.

    Called by all ranks.
    """
    homes = world.size if placement.kind == SHARDED else 1
    held = [count * homes for count in slots]  # rows that the devices hold together
    cache = config.cache
    return CachedSettings(
        mode=config.parallel.mode,
        slots=tuple(slots),
        lookahead=cache.lookahead,
        prefetch=resolve_prefetch(config, source, tables, held),
        policy=Policy.of(cache.policy, cache.tail, cache.half_life),
        reduction=cache.reduction,
        seed=config.trainer.seed,
        dtype=dtype_of(config),
        on_bad_id=config.data.on_bad_id,
        validate=config.trainer.validate_plans,
        schedule=config.trainer.schedule,
        shake_ms=config.trainer.shake_ms,
        amp=config.trainer.amp,
        placement=placement,
        access=config.store.access,
    )
