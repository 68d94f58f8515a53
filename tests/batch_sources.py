"""A small source of each kind, and its samples as something that can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from hot_cold_cases import SYNTHETIC
from parquet_files import columns, source, write

from distcache.data.batch import Batch, SlicedSource
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.interactions import InteractionsSource, InteractionsSpec
from distcache.data.parquet import ParquetSource
from distcache.data.synthetic import SyntheticSource, SyntheticSpec

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
        changes |= {"shuffle_rows": window, "weight_columns": weights}
        return source(path, make=ParquetSource, **changes)
    text = folder / "a.txt"
    if not text.exists():
        write_lines(text, make_lines(420))
    if name == "text":
        return CriteoSource(CriteoSpec(text, ROWS, **changes))
    words = {"mode": "vocabulary", "min_count": 2, "multi_hot": (1, 3) * 13}
    preprocessed(text, folder / name, **(words if "bags" in name else {}))
    changes |= {"shuffle": "file order" not in name, "shuffle_block": 1}
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
