"""Statistics of the batches that a test reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from distcache.data.batch import BatchSource, JaggedIds
from distcache.popularity.statistics import Statistics, TableCounts, vocabulary_of


def count_ids(
    rows: Mapping[str, int], batches: Iterable[JaggedIds], vocabulary: str = "ids"
) -> Statistics:
    """How often each row of the features' tables is looked up; `rows`: by feature."""
    counts, samples = {feature: np.zeros(count, np.int64) for feature, count in rows.items()}, 0
    for ids in batches:
        samples += ids.batch_size
        spans = np.split(ids.values.numpy(), ids.offsets.numpy()[:: ids.batch_size][1:-1])
        for feature, values in zip(ids.features, spans, strict=True):
            counts[feature] += np.bincount(values, minlength=rows[feature])
    tables = tuple(TableCounts.of(feature, own) for feature, own in counts.items())
    return Statistics(tables, vocabulary, samples)


def count_steps(source: BatchSource, steps: Iterable[int]) -> Statistics:
    """Of some training steps of a source."""
    rows = dict(zip(source.features, source.table_rows, strict=True))
    batches = (source.train_batch(step, 0, 1).ids for step in steps)
    return count_ids(rows, batches, vocabulary_of(source))
