"""One byte per row that says how popular it is: what policies rank rows by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcache.planner.policy import PINNED
from distcache.popularity.statistics import Statistics

_PER_OCTAVE = 8
"""Classes for each doubling of a count: rows whose counts are within 9 % share one."""


def row_classes(
    statistics: Statistics, tables: Sequence[int], hot_rows: Sequence[int] | None = None
) -> np.ndarray:
    """The popularity class of each row of some `tables`, one after the other; uint8 `[V]`.

    0 for a row that was never looked up, then 1 + 8 log2(count), at most 254. `hot_rows`: for each
    of the tables, how many of its most frequent rows are `PINNED`.
    """
    parts = []
    for place, index in enumerate(tables):
        table = statistics.tables[index]
        counts = table.dense()
        seen = counts > 0
        classes = np.zeros(table.rows, dtype=np.uint8)
        levels = 1 + np.rint(_PER_OCTAVE * np.log2(counts[seen], dtype=np.float64))
        classes[seen] = np.minimum(levels, PINNED - 1)
        if hot_rows is not None:
            classes[table.hottest(hot_rows[place])] = PINNED
        parts.append(classes)
    return np.concatenate(parts)
