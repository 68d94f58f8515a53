"""A small source of each kind, its samples as something that can be compared, its statistics,
Parquet files, and small runs with hot and cold batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from scenarios import count_ids
from source_runs import NET

from distcache.data.batch import Batch, BatchSlice, SlicedSource
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.interactions import InteractionsSource, InteractionsSpec
from distcache.data.parquet import ParquetSource, ParquetSpec
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.popularity.statistics import Statistics, vocabulary_of, write_statistics

PARQUET_ROWS = (50, 1000, 7)
"""Rows of the tables of columns `a` (int), `b` (list of strings) and `c` (int)."""


def columns(count: int, seed: int = 0) -> dict[str, Any]:
    """Columns of `count` samples; dense column `x` counts the samples."""
    rng = np.random.default_rng(seed)
    words = [f"w{n}" for n in range(200)]
    return {
        "y": rng.integers(0, 2, count),
        "x": np.arange(count, dtype=np.float64),
        "z": rng.standard_normal(count).astype(np.float32),
        "a": rng.integers(0, PARQUET_ROWS[0], count),
        "b": [list(rng.choice(words, rng.integers(0, 4))) for _ in range(count)],
        "c": rng.integers(0, PARQUET_ROWS[2], count).astype(np.uint8),
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


def parquet_source(
    path: Any, batch: int = 16, make: type = LoadedParquet, **changes: Any
) -> ParquetSource:
    """The source of files that `columns` made."""
    settings = {
        "label_column": "y",
        "dense_columns": ("x", "z"),
        "id_columns": ("a", "b", "c"),
        "table_rows": PARQUET_ROWS,
        "global_batch_size": batch,
    }
    return make(ParquetSpec(path, **(settings | changes)))


def seen(stream: ParquetSource, steps: Iterable[int]) -> list[int]:
    """Numbers of the samples (dense column x) in the order of training."""
    return [int(x) for s in steps for x in stream.train_batch(s, 0, 1).dense[:, 0].tolist()]


def count(source: SlicedSource, epoch: int = 0) -> Statistics:
    """Exact counts of the training samples of a small source, as they are in `epoch`."""
    ids = source.ids_of(np.arange(source.samples_per_epoch), epoch)
    rows = dict(zip(source.features, source.table_rows, strict=True))
    return count_ids(rows, [ids], vocabulary_of(source))


def counted(source: SlicedSource, folder: Path) -> Path:
    """A folder with the statistics of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_statistics(folder, count(source))
    return folder


SYNTHETIC: dict[str, Any] = {
    "table_rows": [300, 40, 500, 3],
    "bag_size": [1, 2, 0.7, 1],
    "samples": 700,
    "dense_features": 3,
    "global_batch_size": 16,
}
"""`SyntheticSpec` of the small runs, whose third table has empty and ragged bags."""

RUN = (
    "data.table_rows=[300,40,500,3]",
    "data.bag_size=[1,2,0.7,1]",
    "data.samples=700",
    "data.dense_features=3",
    "data.global_batch_size=16",
    "data.batching=hot_cold",
    *NET,
    "cache.rows=300",
    "optim=adagrad",
    "run.digest=true",
    "trainer.eval_steps=2",
)
"""Overrides of the same runs."""


NAMES = (
    *("synthetic", "text", "arrays", "arrays, bags", "arrays, file order", "interactions"),
    *("parquet", "parquet, window", "parquet, file order"),
)


def make_source(name: str, folder: Path, **changes: Any) -> SlicedSource:
    """A small source of each kind, in batches of 16; its files are made once."""
    changes = {"global_batch_size": 16} | changes
    if name == "synthetic":
        spec = SYNTHETIC | {"weighted": True, "eval_samples": 50} | changes
        return SyntheticSource(SyntheticSpec(**spec))
    if name == "interactions":
        rng, path = np.random.default_rng(0), folder / "users.txt"
        users = [[user, *np.unique(rng.zipf(1.4, 12) % 60)] for user in range(40)]
        if not path.exists():
            path.write_text("\n".join(" ".join(map(str, line)) for line in users) + "\n")
        return InteractionsSource(InteractionsSpec(path, **changes))
    if name.startswith("parquet"):
        window = 40 if "window" in name else 0 if "file order" in name else 1 << 20
        data = columns(300) | {"w": [[0.5] * len(bag) for bag in columns(300)["b"]]}
        path = folder / "a.parquet"
        if not path.exists():
            write(path, data, 17)
        weights = {"b": "w"} if "window" in name else {}
        changes = {"shuffle_rows": window, "weight_columns": weights} | changes
        return parquet_source(path, make=ParquetSource, **changes)
    text = folder / "a.txt"
    if not text.exists():
        write_lines(text, make_lines(420))
    if name == "text":
        return CriteoSource(CriteoSpec(text, ROWS, **changes))
    words = {"mode": "vocabulary", "min_count": 2, "multi_hot": (1, 3) * 13}
    preprocessed(text, folder / name, **(words if "bags" in name else {}))
    changes = {"shuffle": "file order" not in name, "shuffle_block": 1} | changes
    return CriteoArrays(CriteoSpec(folder / name, **changes))


def samples_of(batch: Batch) -> list[tuple]:
    """Each sample of a loaded batch, as something that can be compared."""
    found, size = [], batch.ids.batch_size
    values, offsets = batch.ids.values.tolist(), batch.ids.offsets.tolist()
    weights = None if batch.ids.weights is None else batch.ids.weights.tolist()
    for at in range(size):
        places = [(offsets[f], offsets[f + 1]) for f in range(at, len(offsets) - 1, size)]
        bags = tuple(tuple(values[low:high]) for low, high in places)
        heavy = weights and tuple(tuple(weights[low:high]) for low, high in places)
        found.append((tuple(batch.dense[at].tolist()), batch.labels[at].item(), bags, heavy))
    return found
