"""From TorchRec's table configs to tables, feature names and initial weights."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from distcache.errors import ConfigError
from distcache.layout import TableSpec

_POOLING = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


@dataclass(frozen=True)
class Lookups:
    """What a collection looks up, one entry for each (table, feature), table by table.

    `features`: the key in a `KeyedJaggedTensor`; `names`: the key in the output (`feature`, or
    `feature@table` where several tables read it); `tables`: index of the table; `dims`: its width.
    """

    features: tuple[str, ...]
    names: tuple[str, ...]
    tables: tuple[int, ...]
    dims: tuple[int, ...]


def lookups_of(configs: Sequence[Any]) -> Lookups:
    """The lookups of `configs` in TorchRec's order."""
    pairs = [(index, name) for index, config in enumerate(configs) for name in config.feature_names]
    names = [name for by_table in get_embedding_names_by_table(list(configs)) for name in by_table]
    return Lookups(
        features=tuple(feature for _, feature in pairs),
        names=tuple(names),
        tables=tuple(table for table, _ in pairs),
        dims=tuple(configs[table].embedding_dim for table, _ in pairs),
    )


def checked_configs(configs: Sequence[Any], kind: type[BaseEmbeddingConfig]) -> list[Any]:
    """The configs, each with its features (a table without any reads the one of its own name).

    Raises ConfigError for one that is not of `kind`, and for what a row cache does not have.
    """
    if isinstance(configs, BaseEmbeddingConfig) or not isinstance(configs, Sequence):
        raise ConfigError(f"tables: give a list of {kind.__name__}, not {type(configs).__name__}")
    if not configs:
        raise ConfigError(f"tables=[]: give at least one {kind.__name__}")
    seen: set[str] = set()
    for config in configs:
        if not isinstance(config, kind):
            raise ConfigError(f"tables: {config!r} is no torchrec.{kind.__name__}")
        where = f"table {config.name!r}"
        if config.name in seen:
            raise ConfigError(f"two tables are named {config.name!r}")
        seen.add(config.name)
        if isinstance(config, EmbeddingBagConfig) and config.pooling not in _POOLING:
            raise ConfigError(f"{where}: pooling {config.pooling} is not SUM or MEAN")
        if config.data_type is not DataType.FP32:
            raise ConfigError(
                f"{where}: data_type {config.data_type} is not FP32; rows are float32, or float64 "
                "with dtype=torch.float64"
            )
        if config.use_virtual_table:
            raise ConfigError(f"{where}: use_virtual_table is not supported: give num_embeddings")
        if not config.feature_names:
            config.feature_names = [config.name]
    return list(configs)


def table_specs(configs: Sequence[BaseEmbeddingConfig]) -> list[TableSpec]:
    """The tables; each reads features of its own, named by their place among the lookups.

    Those that are not pooled have the pooling "sum", of which nothing is made.
    """
    specs, place = [], 0
    for config in configs:
        own = range(place, place + len(config.feature_names))
        place = own.stop
        specs.append(
            TableSpec(
                name=config.name,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                features=tuple(str(at) for at in own),
                pooling=_pooling(config),
            )
        )
    return specs


def _pooling(config: BaseEmbeddingConfig) -> str:
    return _POOLING[config.pooling] if isinstance(config, EmbeddingBagConfig) else "sum"


def is_default(config: BaseEmbeddingConfig) -> bool:
    """Whether `config` asks for the initial rows that every table has: uniform in
    +-sqrt(1 / rows)."""
    bound = math.sqrt(1.0 / config.num_embeddings)
    asked = (config.get_weight_init_min(), config.get_weight_init_max())
    return _fills_uniformly(config.init_fn) and asked == (-bound, bound)


def initialise_as_told(config: BaseEmbeddingConfig, table: int, weight: Tensor, seed: int) -> None:
    """Change initial rows `[rows, D]`, uniform in +-sqrt(1 / rows), to what `config` asks for.

    A range (`weight_init_min`, `weight_init_max`) maps them; an `init_fn` of the user's fills
    them anew, with torch's generator seeded by (seed, table) and put back afterwards.
    """
    if not _fills_uniformly(config.init_fn):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed}/{table}".encode()))
            config.init_fn(weight)
        return
    bound = math.sqrt(1.0 / config.num_embeddings)
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if (low, high) != (-bound, bound):
        weight.div_(2 * bound).add_(0.5).mul_(high - low).add_(low).clamp_(low, high)


def _fills_uniformly(init_fn: Any) -> bool:
    """Whether this is the uniform initialisation that a config makes for itself."""
    return (
        isinstance(init_fn, functools.partial)
        and init_fn.func is torch.nn.init.uniform_
        and not init_fn.args
        and set(init_fn.keywords) == {"a", "b"}
    )
