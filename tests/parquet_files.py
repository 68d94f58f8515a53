"""Parquet files for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distcache.data.batch import Batch, BatchSlice
from distcache.data.parquet import ParquetSource, ParquetSpec

ROWS = (50, 1000, 7)
"""Rows of the tables of columns `a` (int), `b` (list of strings) and `c` (int)."""


def columns(count: int, seed: int = 0) -> dict[str, Any]:
    """Columns of `count` samples; dense column `x` counts the samples."""
    rng = np.random.default_rng(seed)
    words = [f"w{n}" for n in range(200)]
    return {
        "y": rng.integers(0, 2, count),
        "x": np.arange(count, dtype=np.float64),
        "z": rng.standard_normal(count).astype(np.float32),
        "a": rng.integers(0, ROWS[0], count),
        "b": [list(rng.choice(words, rng.integers(0, 4))) for _ in range(count)],
        "c": rng.integers(0, ROWS[2], count).astype(np.uint8),
    }


def write(path: Path, data: dict[str, Any] | pa.Table, group: int = 10) -> Path:
    """A Parquet file with row groups of `group` rows."""
    table = data if isinstance(data, pa.Table) else pa.table(data)
    pq.write_table(table, path, row_group_size=group)
    return path


class LoadedParquet(ParquetSource):
    """The same with batches that come loaded."""

    def read(self, part: BatchSlice) -> Batch:
        return super().read(part).loaded()


def source(path: Any, batch: int = 16, make: type = LoadedParquet, **changes: Any) -> ParquetSource:
    """The source of files that `columns` made."""
    settings = {
        "label_column": "y",
        "dense_columns": ("x", "z"),
        "id_columns": ("a", "b", "c"),
        "table_rows": ROWS,
        "global_batch_size": batch,
    }
    return make(ParquetSpec(path, **(settings | changes)))


def seen(stream: ParquetSource, steps: Iterable[int]) -> list[int]:
    """Numbers of the samples (dense column x) in the order of training."""
    return [int(x) for s in steps for x in stream.train_batch(s, 0, 1).dense[:, 0].tolist()]
