"""From the config to the sources that read columns and interactions."""

from __future__ import annotations

import torch

from distcache.config import Config
from distcache.data.batch import BatchSource
from distcache.errors import ConfigError

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
