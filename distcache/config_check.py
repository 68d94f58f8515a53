"""Every value of the config tree, checked before any rank starts: key, value and way out."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from distcache.config import Config, DataConfig, ModelConfig, OptimConfig
from distcache.config_cache import check_cache
from distcache.config_data import (
    check_batching,
    check_held_out,
    check_interactions,
    check_is_file,
    check_own_keys,
    check_parquet,
)
from distcache.config_values import (
    CHOICES,
    CRITEO_TABLES,
    LEAST,
    at_least,
    auto_or_count,
    lookup,
    one_of,
    positive_list,
    same_length,
)
from distcache.errors import ConfigError
from distcache.versions import require_hybrid

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
