"""Tables of two widths and the statistics of their first batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ebc_cases import batches, configs
from torchrec import KeyedJaggedTensor

from distcache.popularity.statistics import Statistics, TableCounts


def two_widths():
    """Tables of two widths; `t1` is read by `f1` and `g`."""
    tables = configs()
    tables[2] = replace(tables[2], embedding_dim=4, num_embeddings=400)
    return tables


def counted(steps: int = 6) -> Statistics:
    """Lookups of the first batches, by feature, in another order than the tables'."""
    rows = {f: t.num_embeddings for t in two_widths() for f in t.feature_names}
    drawn = batches(steps, tables=two_widths())
    return statistics(dict(sorted(rows.items(), reverse=True)), [b.sparse_features for b in drawn])


def statistics(rows: dict[str, int], drawn: list[KeyedJaggedTensor]) -> Statistics:
    """Lookups of batches by feature, of so many `rows` each."""
    counts = {feature: np.zeros(n, np.int64) for feature, n in rows.items()}
    for batch in drawn:
        for feature, ids in batch.to_dict().items():
            counts[feature] += np.bincount(ids.values().numpy(), minlength=rows[feature])
    tables = [TableCounts.of(feature, own) for feature, own in counts.items()]
    return Statistics(tuple(tables), "ids", len(drawn) * 24)
