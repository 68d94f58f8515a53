"""Tables of two widths and the statistics of their first batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ebc_cases import batches, configs

from distcache.popularity.statistics import Statistics, TableCounts


def two_widths():
    """Tables of two widths; `t1` is read by `f1` and `g`."""
    tables = configs()
    tables[2] = replace(tables[2], embedding_dim=4, num_embeddings=400)
    return tables


def counted(steps: int = 6) -> Statistics:
    """Lookups of the first batches, by feature, in another order than the tables'."""
    rows = {f: t.num_embeddings for t in two_widths() for f in t.feature_names}
    counts = {feature: np.zeros(n, np.int64) for feature, n in rows.items()}
    for batch in batches(steps, tables=two_widths()):
        for feature, ids in batch.sparse_features.to_dict().items():
            counts[feature] += np.bincount(ids.values().numpy(), minlength=rows[feature])
    tables = [TableCounts.of(f, c) for f, c in sorted(counts.items(), reverse=True)]
    return Statistics(tuple(tables), "ids", steps * 24)
