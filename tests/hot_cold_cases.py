"""Statistics of a source, and small runs with hot and cold batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scenarios import count_ids
from source_runs import NET

from distcache.data.batch import SlicedSource
from distcache.popularity.statistics import (
    Statistics,
    vocabulary_of,
    write_statistics,
)


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
