"""Every value of the config tree, checked before any rank starts: key, value and way out."""

from __future__ import annotations

import glob
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from distcache.config import rules_of
from distcache.config.tree import CacheConfig, Config, DataConfig, ModelConfig, OptimConfig
from distcache.errors import ConfigError
from distcache.planner.victims import Policy
from distcache.versions import require_hybrid

# -----------------------------------------------------------------------------
# Rules of one value, of which most stand beside its field in the tree.

CRITEO_TABLES, CRITEO_DENSE = 26, 13

GONE = {
    "data.batching=split": "a hot and a cold part of each step made it a seventh to a quarter "
    "slower; leave the key out, or give data.batching=hot_cold, whose hot batches move no rows",
}
"""Values that there were, and why they went."""


def refuse(wrong: object, text: str) -> None:
    """Raise ConfigError with `text` where something is `wrong`."""
    if wrong:
        raise ConfigError(text)


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


def check_values(config: Config, but: Collection[str] = ()) -> None:
    """Raise ConfigError for the first value outside the rule of its field, `but` for these keys."""
    for key, rule in rules_of(Config).items():
        value = lookup(config, key)
        if key in but:
            continue
        if "choice" in rule:
            one_of(key, value, rule["choice"])
        if "least" in rule:
            at_least(key, value, rule["least"])
        if "counted" in rule:
            auto_or_count(key, value, rule["counted"])


def one_of(key: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        gone = GONE.get(f"{key}={value}")
        refuse(gone, f"{key}={value} is no longer there: {gone}")
        raise ConfigError(f"{key}={value} is unknown: choose {' or '.join(allowed)}")


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ConfigError for a number below `least` or not finite; None passes."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value} is out of range: give a number of at least {least}")


def auto_or_count(key: str, value: Any, least: int = 0) -> None:
    """Raise ConfigError unless `value` is `auto` or a whole number from `least` on."""
    if value != "auto" and not _is_count(value, least):
        raise ConfigError(
            f"{key}={value} is out of range: give auto, or a whole number of at least {least}"
        )


def byte_count(key: str, text: str, kilo: int = 1024) -> int:
    """The bytes of `2g` or `512m`: k, m, g and t are powers of `kilo`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d+))?([kmgt]?)(?:i?b)?", text.lower())
    if found is None:
        raise ConfigError(f"{key}={text}: give a number of bytes, such as 4000000000, 512m or 2g")
    number = float(f"{found[1]}e{found[2] or 0}")
    return int(number * kilo ** ("kmgt".index(found[3]) + 1 if found[3] else 0))


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_rows(key: str, rows: Mapping[str, Any]) -> None:
    """{table: rows}; whether there are such tables is not known here."""
    for name, count in rows.items():
        refuse(
            not _is_count(count),
            f"{key}: {name}={count}: give a whole number of rows, at least 0",
        )


def _positive_list(key: str, values: Sequence[int]) -> None:
    refuse(
        not values or any(value < 1 for value in values),
        f"{key}={values}: give a list of whole numbers, each at least 1",
    )


def _same_length(key: str, values: Sequence[Any], data: DataConfig) -> None:
    """One value per table, where the tables are known."""
    tables = len(data.table_rows) or (CRITEO_TABLES if data.name == "criteo" else 0)
    refuse(
        tables and len(values) != tables,
        f"{key} has {len(values)} entries, data.table_rows has {tables}: give one per table",
    )


# -----------------------------------------------------------------------------
# Group `data`, checked as a whole.


def _check_data(data: DataConfig) -> None:
    if data.name not in ("criteo", "parquet", "interactions") or data.table_rows:
        _positive_list("data.table_rows", data.table_rows)
    for size in data.bag_size if isinstance(data.bag_size, list) else [data.bag_size]:
        refuse(
            not _is_number(size),
            f"data.bag_size={data.bag_size}: give an int (ids per bag), a float (their mean), "
            "or a list with one of these per table",
        )
        at_least("data.bag_size", size, 0)
    if isinstance(data.bag_size, list):
        _same_length("data.bag_size", data.bag_size, data)
    _check_sources(data)
    refuse(
        data.held_out is not None and not 0 <= data.held_out < 1,
        f"data.held_out={data.held_out}: give a share from 0 to below 1",
    )
    if data.name == "synthetic":
        refuse(
            data.path is not None,
            f"data.path={data.path} is set, but data=synthetic reads no file: use data=criteo",
        )
    else:
        _OF_SOURCES[data.name](data)


def _check_sources(data: DataConfig) -> None:
    """No key that only other sources read."""
    for field in fields(DataConfig):
        sources = field.metadata.get("sources", (data.name,))
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        value = getattr(data, field.name)
        refuse(
            data.name not in sources and value != default,
            f"data.{field.name}={value} is a key of data={' and data='.join(sources)} and "
            f"means nothing to data={data.name}: leave it out",
        )


def _check_criteo(data: DataConfig) -> None:
    if data.path is None:
        raise ConfigError(
            "data.path is not set, and data=criteo reads files: give data.path=<folder that "
            "python -m distcache.preprocess made, text file or glob>, or data=synthetic for a "
            "click stream"
        )
    path = Path(data.path)
    if path.is_dir():
        refuse(
            not (path / "manifest.json").is_file(),
            f"data.path={path} is a folder without manifest.json: finish the run of "
            "python -m distcache.preprocess that makes it, or give a glob of text files",
        )
    else:
        _check_is_file("path", data.path)
        refuse(
            path.suffix in (".npy", ".json") and (path.parent / "manifest.json").is_file(),
            f"data.path={path} is a file of a preprocessed folder: give the folder, "
            f"data.path={path.parent}",
        )
    refuse(
        len(data.table_rows) not in (0, CRITEO_TABLES),
        f"data.table_rows has {len(data.table_rows)} entries, but a Criteo line has "
        f"{CRITEO_TABLES} categorical fields: give one per field",
    )
    refuse(
        data.dense_features != CRITEO_DENSE,
        f"data.dense_features={data.dense_features}, but a Criteo line has {CRITEO_DENSE}: "
        "leave it out",
    )


def _check_parquet(data: DataConfig) -> None:
    _check_path(data, "path")
    if data.held_out_path is not None:
        _check_path(data, "held_out_path")
        refuse(
            data.held_out is not None,
            f"data.held_out={data.held_out} and data.held_out_path={data.held_out_path} "
            "contradict each other: give one of them",
        )
    refuse(not data.label_column, "data.label_column is not set: name the column of labels")
    refuse(
        not data.id_columns,
        "data.id_columns is empty: name the columns of ids, each with its table's rows in "
        "data.table_rows",
    )
    refuse(
        len(data.id_columns) != len(data.table_rows),
        f"data.id_columns has {len(data.id_columns)} entries, data.table_rows "
        f"{len(data.table_rows)}: give each column its table's rows",
    )
    weights = data.weight_columns or {}
    refuse(
        not isinstance(weights, dict) or not set(weights) <= set(data.id_columns),
        f"data.weight_columns={data.weight_columns}: give {{id column: weight column}}, its "
        "keys from data.id_columns",
    )
    refuse(
        data.on_bad_line != "error",
        f"data.on_bad_line={data.on_bad_line}: Parquet has no lines that could be left out; "
        "data.nulls and data.on_bad_id say what becomes of odd values",
    )


def _check_interactions(data: DataConfig) -> None:
    _check_path(data, "path")
    refuse(
        len(data.table_rows) not in (0, 2),
        f"data.table_rows={data.table_rows}: give the rows of users and items, or leave it "
        "empty for the largest ids of the data",
    )
    refuse(not data.delimiter, "data.delimiter is empty: give what separates the fields of the CSV")
    refuse(
        data.held_out is not None and data.held_out_by == "last",
        f"data.held_out={data.held_out} means nothing to data.held_out_by=last, which holds "
        "out each user's last: leave it out, or give data.held_out_by=time",
    )


_OF_SOURCES = {
    "criteo": _check_criteo,
    "parquet": _check_parquet,
    "interactions": _check_interactions,
}


def _check_path(data: DataConfig, key: str) -> None:
    path = getattr(data, key)
    refuse(
        path is None,
        f"data.{key} is not set, and data={data.name} reads files: give data.{key}=<file or glob>",
    )
    refuse(
        Path(path).is_dir(),
        f"data.{key}={path} is a folder: for the files in it give a glob such as '{path}/*'",
    )
    _check_is_file(key, path)


def _check_is_file(key: str, path: str) -> None:
    """A regular file, or a glob that matches one: files are read more than once."""
    if any(Path(name).is_file() for name in (path, *glob.glob(path))):
        return
    refuse(
        Path(path).exists(),
        f"data.{key}={path} is no regular file but a pipe, socket or device, and files are "
        "read more than once: give a file or glob",
    )
    raise ConfigError(f"data.{key}={path}: no such file (working directory {Path.cwd()})")


def _check_batching(config: Config) -> None:
    """`data.batching` has what it needs."""
    data, kind, hot = config.data, config.data.batching, config.data.hot_rows
    refuse(
        not (hot == "auto" or _is_count(hot) or (isinstance(hot, float) and 0 < hot < 1)),
        f"data.hot_rows={hot}: give auto, a whole number of rows, or a share of all rows "
        "above 0 and below 1",
    )
    refuse(
        not 0 < data.phase_rate <= 1,
        f"data.phase_rate={data.phase_rate}: give a share above 0 and at most 1",
    )
    if kind == "as_is":
        for key in ("hot_rows", "phase_rate"):
            refuse(
                getattr(data, key) != getattr(DataConfig, key),
                f"data.{key}={getattr(data, key)} is a key of data.batching=hot_cold and means "
                f"nothing to data.batching={kind}: leave it out",
            )
        return
    refuse(
        data.name == "own",
        f"data.batching={kind} means nothing to batches of your own loader: how samples are "
        "brought together is up to it; leave the key out",
    )
    refuse(
        config.cache.statistics is None,
        f"data.batching={kind} needs to know which rows are hot: give "
        "cache.statistics=<folder that python -m distcache.analyze or distcache.preprocess "
        "made>",
    )
    refuse(
        data.name == "synthetic" and data.samples is None,
        "data.batching=hot_cold sorts the samples of an epoch, and data.samples=null is a "
        "stream without an end: give data.samples=<samples of an epoch>",
    )


# -----------------------------------------------------------------------------
# Group `cache`, checked as a whole.

_HOW = "give cache.statistics=<folder of python -m distcache.analyze or preprocess>"


def check_cache(cache: CacheConfig) -> None:
    sizes = {"rows": cache.rows, "ratio": cache.ratio, "bytes": cache.bytes}
    given = [f"cache.{name}={value}" for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        name = given[-1].partition("=")[0]
        raise ConfigError(
            f"{' and '.join(given)} contradict each other: give one of them (null takes back what "
            f"an experiment brings: {name}=null)"
        )
    refuse(
        cache.ratio is not None and not 0 < cache.ratio <= 1,
        f"cache.ratio={cache.ratio} is a share of the rows: give a number above 0 and at most "
        "1, or cache.rows=<slots per rank>",
    )
    _check_policy(cache)
    _check_popularity(cache)
    _check_placement(cache)


def _check_policy(cache: CacheConfig) -> None:
    policy = Policy.of(cache.policy, cache.tail, cache.half_life)  # with its own rules
    refuse(
        cache.tail != CacheConfig().tail and not policy.uses_window,
        f"cache.tail={cache.tail} orders what cache.policy=lookahead leaves open, and "
        f"cache.policy={cache.policy} leaves nothing open: leave one of them out",
    )
    chosen = f"cache.{'tail' if policy.uses_window else 'policy'}={policy.ranking}"
    refuse(
        policy.needs_popularity and cache.statistics is None,
        f"{chosen} ranks rows by how often they are looked up: give "
        "cache.statistics=<folder> made by python -m distcache.analyze or distcache.preprocess",
    )
    refuse(
        policy.half_life is not None and policy.ranking != "lfu",
        f"cache.half_life={cache.half_life} is for counts, which {chosen} does not keep: "
        "leave it out, or use cache.tail=lfu or cache.policy=lfu",
    )


def _check_popularity(cache: CacheConfig) -> None:
    """The keys that read `cache.statistics`."""
    warm, split, known = cache.warm_start, cache.split, cache.statistics is not None
    refuse(
        warm != "auto" and not (_is_number(warm) and 0 <= warm <= 1),
        f"cache.warm_start={warm} is a share of the slots: give a number from 0 to 1, or auto",
    )
    refuse(
        warm not in ("auto", 0) and not known,
        f"cache.warm_start={warm} fills slots with the most frequent rows, and which those are "
        f"is not known: {_HOW}, or leave cache.warm_start out",
    )
    if isinstance(split, Mapping):
        _check_rows("cache.split", split)
        return
    refuse(
        split not in ("proportional", "by_curve"),
        f"cache.split={split} is unknown: choose proportional or by_curve, or give the rows "
        "of each table: cache.split='{t_cat_0:1000,t_cat_1:500}'",
    )
    refuse(
        split == "by_curve" and not known,
        f"cache.split=by_curve needs to know how often rows are looked up: {_HOW}, or use "
        "cache.split=proportional",
    )


def _check_placement(cache: CacheConfig) -> None:
    rows, share = cache.replicated_rows, cache.replicated_share
    refuse(
        rows is not None and share is not None,
        f"cache.replicated_rows={rows} and cache.replicated_share={share} contradict each "
        "other: give one of them",
    )
    for name in ("replicated_rows", "replicated_share"):
        refuse(
            getattr(cache, name) is not None and cache.placement != "mixed",
            f"cache.{name}={getattr(cache, name)} says which rows cache.placement=mixed "
            f"replicates, but cache.placement={cache.placement}: leave it out, or use "
            "cache.placement=mixed",
        )
    key = "state" if cache.placement == "replicated" else "placement"
    refuse(
        cache.reduction == "native" and (key == "placement" or cache.state == "home"),
        "cache.reduction=native lets the library sum rows that all ranks hold, but "
        f"cache.{key}={getattr(cache, key)} sums them at their homes: leave one of them out",
    )
    refuse(
        cache.cluster is not None and cache.placement not in ("auto", "mixed"),
        f"cache.cluster={cache.cluster} is for a choice by prediction, but cache.placement="
        f"{cache.placement} leaves none: leave it out, or use cache.placement=auto",
    )
    refuse(
        share is not None and not 0 < share < 1,
        f"cache.replicated_share={share} is a share of all rows: give a number above 0 and "
        "below 1, or use cache.placement=sharded (none) or replicated (all)",
    )
    if rows is not None:
        refuse(
            not isinstance(rows, Mapping),
            f"cache.replicated_rows={rows}: give the rows of each table, "
            "cache.replicated_rows='{t_cat_0:1000,t_cat_1:500}'",
        )
        _check_rows("cache.replicated_rows", rows)


# -----------------------------------------------------------------------------
# The whole tree.


def check(config: Config, world_size: int, local_size: int) -> list[str]:
    """Check every value for a job of `world_size` ranks, `local_size` of them on this machine.

    Returns warnings, one sentence each. Raises ConfigError for the first wrong value. Reads the
    file system, counts GPUs, and imports torchrec for `hybrid` only.
    """
    check_values(config)
    _check_data(config.data)
    _check_model(config.model, config.data)
    _check_trainer(config)
    return _warnings(config, world_size, _check_parts(config, local_size))


def check_own(config: Config, local_size: int) -> None:
    """The checks of `check` for callers who bring data, tables and model of their own."""
    check_values(config, but=("data.name", "model.name"))
    _check_parts(config, local_size)


def _check_parts(config: Config, local_size: int) -> str:
    """What does not depend on whose the data and the model are; the device type, see below."""
    _check_batching(config)
    check_cache(config.cache)
    _check_optim(config.optim)
    trainer = config.trainer
    refuse(
        trainer.resume is not None and not Path(trainer.resume).is_dir(),
        f"trainer.resume={trainer.resume} is no folder: give a run folder or its model/",
    )
    refuse(
        trainer.amp != "off" and trainer.dtype != "float32",
        f"trainer.amp={trainer.amp} with trainer.dtype={trainer.dtype}: bfloat16 products have "
        "8 bits, float64 around them is wasted: use trainer.amp=off or trainer.dtype=float32",
    )
    device = _check_device(config, local_size)
    if config.parallel.mode == "hybrid":
        _check_hybrid(config, device)
    return device


def _check_model(model: ModelConfig, data: DataConfig) -> None:
    _positive_list("model.dense_arch", model.dense_arch)
    _positive_list("model.over_arch", model.over_arch)
    refuse(
        model.over_arch[-1] != 1,
        f"model.over_arch={model.over_arch} must end in 1, the logit: append a 1",
    )
    if model.name == "dlrm":
        refuse(
            model.dense_arch[-1] != model.embedding_dim,
            f"model.dense_arch={model.dense_arch} must end in model.embedding_dim="
            f"{model.embedding_dim}, because dlrm takes dot products with the embeddings: "
            "change one of them",
        )
        refuse(
            model.table_dims is not None,
            f"model.table_dims={model.table_dims}: dlrm needs one width for all tables, "
            "model.embedding_dim; use model=dcn_v2 for several",
        )
    if model.table_dims is not None:
        _positive_list("model.table_dims", model.table_dims)
        _same_length("model.table_dims", model.table_dims, data)
    key = "data.weighted=true" if data.weighted else "data.weight_columns"
    refuse(
        (data.weighted or data.weight_columns) and model.pooling != "sum",
        f"{key} with model.pooling={model.pooling}: torch's embedding_bag takes "
        "per-sample weights with sum alone: use model.pooling=sum, or no weights",
    )


def _check_optim(optim: OptimConfig) -> None:
    refuse(
        len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas),
        f"optim.betas={optim.betas}: give two numbers in [0, 1)",
    )
    zero = optim.eps == 0 and (optim.name == "adam" or optim.initial_accumulator == 0)
    refuse(
        optim.name != "sgd" and zero,
        f"optim.eps=0 divides by zero in {optim.name} where a gradient is zero: give 1e-8",
    )
    refuse(
        optim.decay_steps > 0 and optim.decay_start < optim.warmup_steps,
        f"optim.decay_start={optim.decay_start} lies inside the warm-up of optim.warmup_steps="
        f"{optim.warmup_steps}: start the decay at that step or later",
    )


def _check_trainer(config: Config) -> None:
    trainer, data = config.trainer, config.data
    refuse(
        not config.run.dir.strip(), "run.dir is empty: name a folder, such as run.dir=runs/first"
    )
    refuse(
        trainer.steps is None and data.name == "synthetic" and data.samples is None,
        "trainer.steps=null means one epoch, but data.samples=null is a stream without an end: "
        "give trainer.steps=<steps> or data.samples=<samples of an epoch>",
    )
    refuse(
        trainer.eval_every is not None and trainer.eval_steps == 0,
        f"trainer.eval_every={trainer.eval_every} with trainer.eval_steps=0 evaluates nothing: "
        "give trainer.eval_steps=<batches>, or leave eval_every out",
    )
    refuse(
        not (math.isfinite(trainer.timeout_s) and trainer.timeout_s > 0),
        f"trainer.timeout_s={trainer.timeout_s}: give seconds above 0",
    )
    one_of("trainer.log_level", trainer.log_level.upper(), tuple(logging.getLevelNamesMapping()))


def _check_device(config: Config, local_size: int) -> str:
    """The device type that this run will use, `cpu` or `cuda`."""
    import torch

    trainer = config.trainer
    gpus = 0 if trainer.device == "cpu" else torch.cuda.device_count()
    refuse(
        trainer.device == "cuda" and gpus == 0,
        "trainer.device=cuda, but torch sees no GPU: use trainer.device=cpu",
    )
    refuse(
        trainer.backend == "nccl" and gpus < local_size,
        f"trainer.backend=nccl needs a GPU per rank: {local_size} ranks on this machine, "
        f"{gpus} GPUs (trainer.device={trainer.device}): start fewer ranks, or use "
        "trainer.backend=gloo, whose ranks may share a GPU",
    )
    return "cuda" if gpus else "cpu"


def _check_hybrid(config: Config, device: str) -> None:
    model = config.model
    dims = [("model.embedding_dim", model.embedding_dim)]
    if model.table_dims is not None:
        dims = [("model.table_dims", dim) for dim in model.table_dims]
    for key, dim in dims:
        refuse(
            dim % 4,
            f"{key}: width {dim} is not a multiple of 4, which fbgemm's kernels need: use "
            f"{-(-dim // 4) * 4}, or parallel=data",
        )
    refuse(
        config.trainer.dtype == "float64",
        "trainer.dtype=float64: fbgemm's fused optimizers are float32 only: use "
        "trainer.dtype=float32, or parallel=data",
    )
    refuse(
        config.optim.name == "adam" and device == "cpu",
        "optim=adam: fbgemm has no Adam on the CPU: use optim=sgd, adagrad or "
        "rowwise_adagrad, a GPU, or parallel=data",
    )
    require_hybrid()


def _warnings(config: Config, world_size: int, device: str) -> list[str]:
    data, cache, mode = config.data, config.cache, config.parallel.mode
    total, kind = sum(data.table_rows), config.parallel.sharding
    by_column = config.optim.name == "rowwise_adagrad" and kind in ("column_wise", "auto")
    found = {
        f"cache.rows={cache.rows} is capped: the tables have {total} rows": (
            mode == "data" and cache.rows is not None and 0 < total < cache.rows
        ),
        f"data.global_batch_size={data.global_batch_size} leaves some of {world_size} ranks "
        "without a sample": data.global_batch_size < world_size,
        "trainer.tf32=true does nothing on the CPU, which has no TF32": (
            config.trainer.tf32 and device == "cpu"
        ),
        f"parallel.sharding={kind}: column-wise shards keep row states of their own, so "
        "rowwise_adagrad may differ from the other modes": mode == "hybrid" and by_column,
    }
    return [warning for warning, is_so in found.items() if is_so]
