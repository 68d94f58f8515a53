"""The keys of group `data` that read files of columns or interactions, checked as a whole."""

from __future__ import annotations

import glob
from dataclasses import MISSING, fields
from pathlib import Path

from distcache.config import Config, DataConfig
from distcache.config_values import positive_list
from distcache.errors import ConfigError

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
    kinds = {"hot_rows": ("hot_cold", "split"), "phase_rate": ("hot_cold",)}
    for key, default in (("hot_rows", "auto"), ("phase_rate", 0.5)):
        if kind not in kinds[key] and getattr(data, key) != default:
            raise ConfigError(
                f"data.{key}={getattr(data, key)} is a key of data.batching="
                f"{' or '.join(kinds[key])} and means nothing to data.batching={kind}: leave it out"
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
    if kind == "hot_cold" and data.name == "synthetic" and data.samples is None:
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
