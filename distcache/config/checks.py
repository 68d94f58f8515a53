"""Every value of the config tree, checked before any rank starts: key, value and way out."""

from __future__ import annotations

import glob
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from distcache.config.tree import CacheConfig, Config, DataConfig, ModelConfig, OptimConfig
from distcache.errors import ConfigError
from distcache.versions import require_hybrid

# -----------------------------------------------------------------------------
# Which values a key may have: choices, least values, and the sentences that refuse the others.

CRITEO_TABLES = 26

CHOICES = {
    "model.name": ("dlrm", "dcn_v2"),
    "model.pooling": ("sum", "mean"),
    "data.name": ("synthetic", "criteo", "parquet", "interactions"),
    "data.batching": ("as_is", "hot_cold"),
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

GONE = {
    "data.batching=split": "a hot and a cold part of each step made it a seventh to a quarter "
    "slower; leave the key out, or give data.batching=hot_cold, whose hot batches move no rows",
}
"""Values that there were, and why they went."""

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
        gone = GONE.get(f"{key}={value}")
        if gone is not None:
            raise ConfigError(f"{key}={value} is no longer there: {gone}")
        raise ConfigError(f"{key}={value} is unknown: choose {' or '.join(allowed)}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ConfigError for a number below `least` or not finite; None passes."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value} is out of range: give a number of at least {least}")


def byte_count(key: str, text: str, kilo: int = 1024) -> int:
    """The bytes of `2g` or `512m`: k, m, g and t are powers of `kilo`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d+))?([kmgt]?)(?:i?b)?", text.lower())
    if found is None:
        raise ConfigError(f"{key}={text}: give a number of bytes, such as 4000000000, 512m or 2g")
    number = float(f"{found[1]}e{found[2] or 0}")
    return int(number * kilo ** ("kmgt".index(found[3]) + 1 if found[3] else 0))


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


# -----------------------------------------------------------------------------
# The keys of group `data` that read files of columns or interactions, checked as a whole.

KEYS = {
    "parquet": (
        *("label_column", "dense_columns", "id_columns", "weight_columns", "held_out_path"),
        *("held_out", "string_ids", "nulls", "dense_transform", "shuffle", "shuffle_rows"),
    ),
    "interactions": (
        *("format", "delimiter", "min_rating", "negatives", "negative_sampling"),
        *("held_out_by", "held_out"),
    ),
    "criteo": ("shuffle", "shuffle_block"),
}
"""Keys that mean something to one or two sources alone."""

SYNTHETIC_KEYS = ("bag_size", "weighted", "samples")


def check_own_keys(data: DataConfig) -> None:
    """Raise ConfigError for a key that the chosen source does not read."""
    readers: dict[str, list[str]] = {}
    for source, keys in KEYS.items():
        for key in keys:
            readers.setdefault(key, []).append(source)
    if data.name in KEYS:
        readers |= {key: ["synthetic"] for key in SYNTHETIC_KEYS}
    for field in fields(DataConfig):
        sources = readers.get(field.name, [data.name])
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        value = getattr(data, field.name)
        if data.name not in sources and value != default:
            raise ConfigError(
                f"data.{field.name}={value} is a key of data={' and data='.join(sources)} and "
                f"means nothing to data={data.name}: leave it out"
            )


def check_parquet(data: DataConfig) -> None:
    """Columns and tables of `data=parquet`."""
    _check_path(data, "path")
    if data.held_out_path is not None:
        _check_path(data, "held_out_path")
        if data.held_out is not None:
            raise ConfigError(
                f"data.held_out={data.held_out} and data.held_out_path={data.held_out_path} "
                "contradict each other: give one of them"
            )
    if not data.label_column:
        raise ConfigError("data.label_column is not set: name the column of labels")
    if not data.id_columns:
        raise ConfigError(
            "data.id_columns is empty: name the columns of ids, each with its table's rows in "
            "data.table_rows"
        )
    if len(data.id_columns) != len(data.table_rows):
        raise ConfigError(
            f"data.id_columns has {len(data.id_columns)} entries, data.table_rows "
            f"{len(data.table_rows)}: give each column its table's rows"
        )
    positive_list("data.table_rows", data.table_rows)
    weights = data.weight_columns or {}
    if not isinstance(weights, dict) or not set(weights) <= set(data.id_columns):
        raise ConfigError(
            f"data.weight_columns={data.weight_columns}: give {{id column: weight column}}, its "
            "keys from data.id_columns"
        )
    if data.on_bad_line != "error":
        raise ConfigError(
            f"data.on_bad_line={data.on_bad_line}: Parquet has no lines that could be left out; "
            "data.nulls and data.on_bad_id say what becomes of odd values"
        )


def check_interactions(data: DataConfig) -> None:
    """Files and tables of `data=interactions`."""
    _check_path(data, "path")
    if data.table_rows and (len(data.table_rows) != 2 or min(data.table_rows) < 1):
        raise ConfigError(
            f"data.table_rows={data.table_rows}: give the rows of users and items, or leave it "
            "empty for the largest ids of the data"
        )
    if not data.delimiter:
        raise ConfigError("data.delimiter is empty: give what separates the fields of the CSV")
    if data.held_out is not None and data.held_out_by == "last":
        raise ConfigError(
            f"data.held_out={data.held_out} means nothing to data.held_out_by=last, which holds "
            "out each user's last: leave it out, or give data.held_out_by=time"
        )


def check_held_out(data: DataConfig) -> None:
    """The share that is held out."""
    if data.held_out is not None and not 0 <= data.held_out < 1:
        raise ConfigError(f"data.held_out={data.held_out}: give a share from 0 to below 1")


def check_batching(config: Config) -> None:
    """Raise ConfigError where `data.batching` wants what is not there."""
    data, kind = config.data, config.data.batching
    hot, rate = data.hot_rows, data.phase_rate
    whole = isinstance(hot, int) and not isinstance(hot, bool) and hot >= 0
    if not (hot == "auto" or whole or (isinstance(hot, float) and 0 < hot < 1)):
        raise ConfigError(
            f"data.hot_rows={hot}: give auto, a whole number of rows, or a share of all rows "
            "above 0 and below 1"
        )
    if not 0 < rate <= 1:
        raise ConfigError(f"data.phase_rate={rate}: give a share above 0 and at most 1")
    for key, default in (("hot_rows", "auto"), ("phase_rate", 0.5)):
        if kind != "hot_cold" and getattr(data, key) != default:
            raise ConfigError(
                f"data.{key}={getattr(data, key)} is a key of data.batching=hot_cold and means "
                f"nothing to data.batching={kind}: leave it out"
            )
    if kind == "as_is":
        return
    if data.name == "own":
        raise ConfigError(
            f"data.batching={kind} means nothing to batches of your own loader: how samples are "
            "brought together is up to it; leave the key out"
        )
    if config.cache.statistics is None:
        raise ConfigError(
            f"data.batching={kind} needs to know which rows are hot: give "
            "cache.statistics=<folder that python -m distcache.analyze or distcache.preprocess "
            "made>"
        )
    if data.name == "synthetic" and data.samples is None:
        raise ConfigError(
            "data.batching=hot_cold sorts the samples of an epoch, and data.samples=null is a "
            "stream without an end: give data.samples=<samples of an epoch>"
        )


def _check_path(data: DataConfig, key: str) -> None:
    path = getattr(data, key)
    if path is None:
        raise ConfigError(
            f"data.{key} is not set, and data={data.name} reads files: give "
            f"data.{key}=<file or glob>"
        )
    if Path(path).is_dir():
        raise ConfigError(
            f"data.{key}={path} is a folder: for the files in it give a glob such as '{path}/*'"
        )
    check_is_file(key, path)


def check_is_file(key: str, path: str) -> None:
    """Raise ConfigError unless `path` is a regular file, or a glob that matches one."""
    if any(Path(name).is_file() for name in (path, *glob.glob(path))):
        return
    if Path(path).exists():
        raise ConfigError(
            f"data.{key}={path} is no regular file but a pipe, socket or device, and files are "
            "read more than once: give a file or glob"
        )
    raise ConfigError(f"data.{key}={path}: no such file (working directory {Path.cwd()})")


# -----------------------------------------------------------------------------
# The keys of group `cache`, checked as a whole.

_HOW = "give cache.statistics=<folder of python -m distcache.analyze or preprocess>"


def check_cache(cache: CacheConfig) -> None:
    """Raise ConfigError for keys that contradict each other or are out of range."""
    sizes = {"rows": cache.rows, "ratio": cache.ratio, "bytes": cache.bytes}
    given = [f"cache.{name}={value}" for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        name = given[-1].partition("=")[0]
        raise ConfigError(
            f"{' and '.join(given)} contradict each other: give one of them (null takes back what "
            f"an experiment brings: {name}=null)"
        )
    if cache.ratio is not None and not 0 < cache.ratio <= 1:
        raise ConfigError(
            f"cache.ratio={cache.ratio} is a share of the rows: give a number above 0 and at most "
            "1, or cache.rows=<slots per rank>"
        )
    _check_policy(cache)
    _check_popularity(cache)
    _check_placement(cache)


def _check_placement(cache: CacheConfig) -> None:
    rows, share = cache.replicated_rows, cache.replicated_share
    if rows is not None and share is not None:
        raise ConfigError(
            f"cache.replicated_rows={rows} and cache.replicated_share={share} contradict each "
            "other: give one of them"
        )
    given = {"replicated_rows": rows, "replicated_share": share}
    for name, value in given.items():
        if value is not None and cache.placement != "mixed":
            raise ConfigError(
                f"cache.{name}={value} says which rows cache.placement=mixed replicates, but "
                f"cache.placement={cache.placement}: leave it out, or use cache.placement=mixed"
            )
    if cache.reduction == "native" and (cache.placement != "replicated" or cache.state == "home"):
        key = "state" if cache.placement == "replicated" else "placement"
        raise ConfigError(
            f"cache.reduction=native lets the library sum rows that all ranks hold, but "
            f"cache.{key}={getattr(cache, key)} sums them at their homes: leave one of them out"
        )
    if cache.cluster is not None and cache.placement not in ("auto", "mixed"):
        raise ConfigError(
            f"cache.cluster={cache.cluster} is for a choice by prediction, but cache.placement="
            f"{cache.placement} leaves none: leave it out, or use cache.placement=auto"
        )
    if share is not None and not 0 < share < 1:
        raise ConfigError(
            f"cache.replicated_share={share} is a share of all rows: give a number above 0 and "
            "below 1, or use cache.placement=sharded (none) or replicated (all)"
        )
    if rows is not None:
        _check_replicated_rows(rows)


def _check_replicated_rows(rows: object) -> None:
    if not isinstance(rows, Mapping):
        raise ConfigError(
            f"cache.replicated_rows={rows}: give the rows of each table, "
            "cache.replicated_rows='{t_cat_0:1000,t_cat_1:500}'"
        )
    for name, count in rows.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(
                f"cache.replicated_rows: {name}={count}: give a whole number of rows, at least 0"
            )


def _check_popularity(cache: CacheConfig) -> None:
    """The keys that read `cache.statistics`."""
    warm, split, known = cache.warm_start, cache.split, cache.statistics is not None
    number = isinstance(warm, int | float) and not isinstance(warm, bool)
    if warm != "auto" and not (number and 0 <= warm <= 1):
        raise ConfigError(
            f"cache.warm_start={warm} is a share of the slots: give a number from 0 to 1, or auto"
        )
    if number and warm > 0 and not known:
        raise ConfigError(
            f"cache.warm_start={warm} fills slots with the most frequent rows, and which those are "
            f"is not known: {_HOW}, or leave cache.warm_start out"
        )
    if isinstance(split, Mapping):
        for name, rows in split.items():
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
                raise ConfigError(
                    f"cache.split: {name}={rows}: give a whole number of rows, at least 0"
                )
        return
    if split not in ("proportional", "by_curve"):
        raise ConfigError(
            f"cache.split={split} is unknown: choose proportional or by_curve, or give the rows "
            "of each table: cache.split='{t_cat_0:1000,t_cat_1:500}'"
        )
    if split == "by_curve" and not known:
        raise ConfigError(
            f"cache.split=by_curve needs to know how often rows are looked up: {_HOW}, or use "
            "cache.split=proportional"
        )


def _check_policy(cache: CacheConfig) -> None:
    ahead, life = cache.policy == "lookahead", cache.half_life
    if cache.tail != CacheConfig().tail and not ahead:
        raise ConfigError(
            f"cache.tail={cache.tail} orders what cache.policy=lookahead leaves open, and "
            f"cache.policy={cache.policy} leaves nothing open: leave one of them out"
        )
    name, ranking = ("tail", cache.tail) if ahead else ("policy", cache.policy)
    if ranking in ("frequency", "static") and cache.statistics is None:
        raise ConfigError(
            f"cache.{name}={ranking} ranks rows by how often they are looked up: give "
            "cache.statistics=<folder> made by python -m distcache.analyze or distcache.preprocess"
        )
    if life == "auto":
        return
    if isinstance(life, bool) or not isinstance(life, int | float) or not 1 <= life <= 10**9:
        raise ConfigError(
            f"cache.half_life={life} is out of range: give auto, or steps from 1 to 1000000000"
        )
    if ranking != "lfu":
        raise ConfigError(
            f"cache.half_life={life} is for counts, which cache.{name}={ranking} does not keep: "
            "leave it out, or use cache.tail=lfu or cache.policy=lfu"
        )


# -----------------------------------------------------------------------------
# Every value of the config tree, checked before any rank starts: key, value and way out.

CRITEO_DENSE = 13


def check(config: Config, world_size: int, local_size: int) -> list[str]:
    """Check every value for a job of `world_size` ranks, `local_size` of them on this machine.

    Returns warnings, one sentence each. Raises ConfigError for the first wrong value. Reads the
    file system, counts GPUs, and imports torchrec for `hybrid` only.
    """
    for key, allowed in CHOICES.items():
        one_of(key, lookup(config, key), allowed)
    for key, least in LEAST.items():
        at_least(key, lookup(config, key), least)
    for key in ("cache.lookahead", "cache.prefetch"):
        auto_or_count(key, lookup(config, key))
    auto_or_count("trainer.threads", config.trainer.threads, 1)
    _check_data(config.data)
    check_batching(config)
    _check_model(config.model, config.data)
    check_cache(config.cache)
    _check_optim(config.optim)
    _check_trainer(config)
    _check_precision(config)
    device = _check_device(config, local_size)
    if config.parallel.mode == "hybrid":
        _check_hybrid(config, device)
    return _warnings(config, world_size, device)


def check_own(config: Config, local_size: int) -> None:
    """The checks of `check` for callers who bring data, tables and model of their own."""
    rules = [*((key, one_of, allowed) for key, allowed in CHOICES.items())]
    rules += [(key, at_least, least) for key, least in LEAST.items()]
    for key, rule, wanted in rules:
        if key not in ("data.name", "model.name"):
            rule(key, lookup(config, key), wanted)
    check_batching(config)
    check_cache(config.cache)
    _check_optim(config.optim)
    _check_precision(config)
    _check_resume(config)
    device = _check_device(config, local_size)
    if config.parallel.mode == "hybrid":
        _check_hybrid(config, device)


def _check_data(data: DataConfig) -> None:
    if data.name not in ("criteo", "parquet", "interactions") or data.table_rows:
        positive_list("data.table_rows", data.table_rows)
    sizes = data.bag_size if isinstance(data.bag_size, list) else [data.bag_size]
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | float):
            raise ConfigError(
                f"data.bag_size={data.bag_size}: give an int (ids per bag), a float (their mean), "
                "or a list with one of these per table"
            )
        at_least("data.bag_size", size, 0)
    if isinstance(data.bag_size, list):
        same_length("data.bag_size", data.bag_size, data)
    check_own_keys(data)
    check_held_out(data)
    if data.name in _DATA_CHECKS:
        _DATA_CHECKS[data.name](data)
    elif data.path is not None:
        raise ConfigError(
            f"data.path={data.path} is set, but data=synthetic reads no file: use data=criteo"
        )


def _check_criteo(data: DataConfig) -> None:
    if data.path is None:
        raise ConfigError(
            "data.path is not set, and data=criteo reads files: give data.path=<folder that "
            "python -m distcache.preprocess made, text file or glob>, or data=synthetic for a "
            "click stream"
        )
    if Path(data.path).is_dir():
        if not (Path(data.path) / "manifest.json").is_file():
            raise ConfigError(
                f"data.path={data.path} is a folder without manifest.json: finish the run of "
                "python -m distcache.preprocess that makes it, or give a glob of text files"
            )
    else:
        check_is_file("path", data.path)
        folder = Path(data.path).parent
        if Path(data.path).suffix in (".npy", ".json") and (folder / "manifest.json").is_file():
            raise ConfigError(
                f"data.path={data.path} is a file of a preprocessed folder: give the folder, "
                f"data.path={folder}"
            )
    tables, dense = len(data.table_rows) or CRITEO_TABLES, data.dense_features
    if tables != CRITEO_TABLES:
        raise ConfigError(
            f"data.table_rows has {tables} entries, but a Criteo line has {CRITEO_TABLES} "
            "categorical fields: give one per field"
        )
    if dense != CRITEO_DENSE:
        raise ConfigError(
            f"data.dense_features={dense}, but a Criteo line has {CRITEO_DENSE}: leave it out"
        )
    own = {"bag_size": (data.bag_size, 1), "weighted": (data.weighted, False)}
    own["samples"] = (data.samples, None)
    for name, (value, default) in own.items():
        if value != default:
            raise ConfigError(
                f"data.{name}={value} is a key of data=synthetic and means nothing to data=criteo: "
                "leave it out"
            )


_DATA_CHECKS = {
    "criteo": _check_criteo,
    "parquet": check_parquet,
    "interactions": check_interactions,
}


def _check_model(model: ModelConfig, data: DataConfig) -> None:
    positive_list("model.dense_arch", model.dense_arch)
    positive_list("model.over_arch", model.over_arch)
    if model.over_arch[-1] != 1:
        raise ConfigError(f"model.over_arch={model.over_arch} must end in 1, the logit: append a 1")
    if model.name == "dlrm":
        if model.dense_arch[-1] != model.embedding_dim:
            raise ConfigError(
                f"model.dense_arch={model.dense_arch} must end in model.embedding_dim="
                f"{model.embedding_dim}, because dlrm takes dot products with the embeddings: "
                "change one of them"
            )
        if model.table_dims is not None:
            raise ConfigError(
                f"model.table_dims={model.table_dims}: dlrm needs one width for all tables, "
                "model.embedding_dim; use model=dcn_v2 for several"
            )
    else:
        at_least("model.cross_layers", model.cross_layers, 1)
        at_least("model.cross_rank", model.cross_rank, 1)
    if model.table_dims is not None:
        positive_list("model.table_dims", model.table_dims)
        same_length("model.table_dims", model.table_dims, data)
    if (data.weighted or data.weight_columns) and model.pooling != "sum":
        key = "data.weighted=true" if data.weighted else "data.weight_columns"
        raise ConfigError(
            f"{key} with model.pooling={model.pooling}: torch's embedding_bag takes "
            "per-sample weights with sum alone: use model.pooling=sum, or no weights"
        )


def _check_optim(optim: OptimConfig) -> None:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={optim.betas}: give two numbers in [0, 1)")
    zero = optim.eps == 0 and (optim.name == "adam" or optim.initial_accumulator == 0)
    if optim.name != "sgd" and zero:
        raise ConfigError(
            f"optim.eps=0 divides by zero in {optim.name} where a gradient is zero: give 1e-8"
        )
    if optim.decay_steps > 0 and optim.decay_start < optim.warmup_steps:
        raise ConfigError(
            f"optim.decay_start={optim.decay_start} lies inside the warm-up of optim.warmup_steps="
            f"{optim.warmup_steps}: start the decay at that step or later"
        )


def _check_trainer(config: Config) -> None:
    trainer, data = config.trainer, config.data
    if not config.run.dir.strip():
        raise ConfigError("run.dir is empty: name a folder, such as run.dir=runs/first")
    if trainer.steps is None and data.name == "synthetic" and data.samples is None:
        raise ConfigError(
            "trainer.steps=null means one epoch, but data.samples=null is a stream without an end: "
            "give trainer.steps=<steps> or data.samples=<samples of an epoch>"
        )
    if trainer.eval_every is not None and trainer.eval_steps == 0:
        raise ConfigError(
            f"trainer.eval_every={trainer.eval_every} with trainer.eval_steps=0 evaluates nothing: "
            "give trainer.eval_steps=<batches>, or leave eval_every out"
        )
    if not (math.isfinite(trainer.timeout_s) and trainer.timeout_s > 0):
        raise ConfigError(f"trainer.timeout_s={trainer.timeout_s}: give seconds above 0")
    one_of("trainer.log_level", trainer.log_level.upper(), tuple(logging.getLevelNamesMapping()))
    _check_resume(config)


def _check_resume(config: Config) -> None:
    trainer = config.trainer
    one_of("trainer.resume_data", trainer.resume_data, ("same", "any"))
    if trainer.resume is not None and not Path(trainer.resume).is_dir():
        raise ConfigError(
            f"trainer.resume={trainer.resume} is no folder: give a run folder or its model/"
        )


def _check_precision(config: Config) -> None:
    trainer = config.trainer
    if trainer.amp != "off" and trainer.dtype != "float32":
        raise ConfigError(
            f"trainer.amp={trainer.amp} with trainer.dtype={trainer.dtype}: bfloat16 products have "
            "8 bits, float64 around them is wasted: use trainer.amp=off or trainer.dtype=float32"
        )


def _check_device(config: Config, local_size: int) -> str:
    """The device type that this run will use, `cpu` or `cuda`."""
    import torch

    trainer = config.trainer
    gpus = 0 if trainer.device == "cpu" else torch.cuda.device_count()
    if trainer.device == "cuda" and gpus == 0:
        raise ConfigError("trainer.device=cuda, but torch sees no GPU: use trainer.device=cpu")
    if trainer.backend == "nccl" and gpus < local_size:
        raise ConfigError(
            f"trainer.backend=nccl needs a GPU per rank: {local_size} ranks on this machine, "
            f"{gpus} GPUs (trainer.device={trainer.device}): start fewer ranks, or use "
            "trainer.backend=gloo, whose ranks may share a GPU"
        )
    return "cuda" if gpus else "cpu"


def _check_hybrid(config: Config, device: str) -> None:
    model, optim = config.model, config.optim
    dims = [("model.embedding_dim", model.embedding_dim)]
    if model.table_dims is not None:
        dims = [("model.table_dims", dim) for dim in model.table_dims]
    for key, dim in dims:
        if dim % 4:
            raise ConfigError(
                f"{key}: width {dim} is not a multiple of 4, which fbgemm's kernels need: use "
                f"{-(-dim // 4) * 4}, or parallel=data"
            )
    if config.trainer.dtype == "float64":
        raise ConfigError(
            "trainer.dtype=float64: fbgemm's fused optimizers are float32 only: use "
            "trainer.dtype=float32, or parallel=data"
        )
    if optim.name == "adam" and device == "cpu":
        raise ConfigError(
            "optim=adam: fbgemm has no Adam on the CPU: use optim=sgd, adagrad or "
            "rowwise_adagrad, a GPU, or parallel=data"
        )
    require_hybrid()


def _warnings(config: Config, world_size: int, device: str) -> list[str]:
    found, data, cache = [], config.data, config.cache
    total = sum(data.table_rows)
    if config.parallel.mode == "data" and cache.rows is not None and 0 < total < cache.rows:
        found.append(f"cache.rows={cache.rows} is capped: the tables have {total} rows")
    if data.global_batch_size < world_size:
        found.append(
            f"data.global_batch_size={data.global_batch_size} leaves some of {world_size} ranks "
            "without a sample"
        )
    if config.trainer.tf32 and device == "cpu":
        found.append("trainer.tf32=true does nothing on the CPU, which has no TF32")
    if config.parallel.mode == "hybrid" and config.optim.name == "rowwise_adagrad":
        kind = config.parallel.sharding
        if kind in ("column_wise", "auto"):
            found.append(
                f"parallel.sharding={kind}: column-wise shards keep row states of their own, so "
                "rowwise_adagrad may differ from the other modes"
            )
    return found
