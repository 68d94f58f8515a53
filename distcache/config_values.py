"""Which values a key may have: choices, least values, and the sentences that refuse the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distcache.config import Config, DataConfig
from distcache.errors import ConfigError

CRITEO_TABLES = 26

CHOICES = {
    "model.name": ("dlrm", "dcn_v2"),
    "model.pooling": ("sum", "mean"),
    "data.name": ("synthetic", "criteo", "parquet", "interactions"),
    "data.batching": ("as_is", "hot_cold", "split"),
    "data.on_bad_id": ("error", "hash"),
    "data.on_bad_line": ("error", "skip"),
    "data.string_ids": ("hash", "hex"),
    "data.nulls": ("error", "zero", "empty"),
    "data.dense_transform": ("none", "log1p"),
    "data.format": ("auto", "lines", "csv"),
    "data.negative_sampling": ("uniform", "popularity"),
    "data.held_out_by": ("last", "time"),
    "cache.policy": ("lookahead", "lfu", "lru", "frequency", "static"),
    "cache.tail": ("lru", "lfu", "frequency"),
    "cache.order": ("ids", "popularity"),
    "cache.placement": ("replicated", "sharded", "mixed", "auto"),
    "cache.objective": ("time", "bytes"),
    "cache.state": ("auto", "home", "replicated"),
    "cache.reduction": ("ordered", "native"),
    "store.name": ("memory",),
    "store.access": ("staged", "zero_copy"),
    "parallel.mode": ("data", "hybrid", "resident", "host"),
    "parallel.sharding": ("auto", "table_wise", "row_wise", "column_wise"),
    "optim.name": ("sgd", "adagrad", "rowwise_adagrad", "adam"),
    "trainer.backend": ("auto", "gloo", "nccl"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.dtype": ("float32", "float64"),
    "trainer.amp": ("off", "bf16"),
    "trainer.schedule": ("overlapped", "serial"),
    "run.digest": ("auto", "true", "false"),
}
"""Keys with a fixed set of values."""

LEAST = {
    "model.embedding_dim": 1,
    "data.global_batch_size": 1,
    "data.dense_features": 1,
    "data.zipf": 0,
    "data.samples": 1,
    "data.shuffle_block": 1,
    "data.shuffle_rows": 1,
    "data.negatives": 1,
    "cache.rows": 1,
    "cache.bytes": 1,
    "optim.dense_lr": 0,
    "optim.embedding_lr": 0,
    "optim.eps": 0,
    "optim.initial_accumulator": 0,
    "optim.warmup_steps": 0,
    "optim.decay_start": 0,
    "optim.decay_steps": 0,
    "trainer.steps": 1,
    "trainer.seed": 0,
    "trainer.shake_ms": 0,
    "trainer.eval_every": 1,
    "trainer.eval_steps": 0,
    "trainer.log_every": 1,
    "run.sweep_ranks": 1,
}
"""Keys with a least value; null is allowed where the config tree allows it."""


def as_words(config: Config) -> Config:
    """`config` with the words that YAML and Python take for booleans, in place."""
    config.run.digest = config.run.digest.lower()  # a bool arrives as "True"
    if config.trainer.amp == "False":  # what YAML makes of an unquoted off
        config.trainer.amp = "off"
    return config


def lookup(config: Config, key: str) -> Any:
    """The value at a dotted key of the tree."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def one_of(key: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{key}={value} is unknown: choose {' or '.join(allowed)}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ConfigError for a number below `least` or not finite; None passes."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value} is out of range: give a number of at least {least}")


def auto_or_count(key: str, value: Any, least: int = 0) -> None:
    """Raise ConfigError unless `value` is `auto` or a whole number from `least` on."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (whole and value >= least):
        return
    raise ConfigError(
        f"{key}={value} is out of range: give auto, or a whole number of at least {least}"
    )


def positive_list(key: str, values: Sequence[int]) -> None:
    """Raise ConfigError unless `values` is a list of whole numbers from 1 on."""
    if not values or any(value < 1 for value in values):
        raise ConfigError(f"{key}={values}: give a list of whole numbers, each at least 1")


def same_length(key: str, values: Sequence[Any], data: DataConfig) -> None:
    """Raise ConfigError unless there is one value per table, where the tables are known."""
    tables = len(data.table_rows) or (CRITEO_TABLES if data.name == "criteo" else 0)
    if tables and len(values) != tables:
        raise ConfigError(
            f"{key} has {len(values)} entries, data.table_rows has {tables}: give one per table"
        )
