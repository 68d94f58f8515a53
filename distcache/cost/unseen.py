"""Rows that a sample of lookups has not seen yet, which a cache will miss all the same."""

from __future__ import annotations

import math

import numpy as np

from distcache.cost.demand import Reuse, TableDemand

_PARTS = 24
"""Buckets of the rows that the sample has seen once, or never."""


def with_unseen(table: TableDemand, once: np.ndarray) -> Reuse | None:
    """A table's rows as a cache will meet them. `once` bool `[k]`: buckets of rows seen once.

    A row seen once stands for many that were not seen. Where popularity falls by a power law, the
    share of such rows among those seen is its exponent (Karlin 1967), and so their touches are
    shared out over all other rows of the table. None where no row was seen once alone.
    """
    single, kept = np.flatnonzero(once), np.flatnonzero(~once)
    rows, seen = float(table.count[single].sum()), float(table.count.sum())
    touched = float(table.count[single] @ table.world[single])
    if not rows or not touched:
        return None
    others = max(table.rows - (seen - rows), rows)
    parts, chance = _tail(rows / seen, others, touched, float(table.world[single].max()))
    count = np.outer(table.count[single] / rows, parts).reshape(-1)
    return Reuse(
        np.concatenate((table.count[kept], count)),
        np.concatenate((table.world[kept], np.tile(chance, len(single)))),
        np.concatenate((table.start[kept], np.repeat(table.start[single], len(parts)))),
        np.concatenate((table.end[kept], np.repeat(table.end[single], len(parts)))),
    )


def _tail(
    exponent: float, rows: float, touched: float, most: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and Q, float64 `[_PARTS]` each, of `rows` rows of which a step names `touched`.

    Their density falls as Q^(-1 - exponent) up to Q = `most`; the lowest Q follows.
    """
    exponent = min(max(exponent, 0.02), 0.98)
    high = math.log(most)
    low, top = high - 60.0, high
    for _ in range(60):  # the lower it lies, the fewer touches a row has
        middle = (low + high) / 2
        edges = np.exp(np.linspace(middle, top, _PARTS + 1))
        count = -np.diff(edges**-exponent) / exponent
        mass = np.diff(edges ** (1 - exponent)) / (1 - exponent)
        if mass.sum() / count.sum() > touched / rows:
            high = middle
        else:
            low = middle
    chance = mass / count * (touched / rows) * count.sum() / mass.sum()
    return count * (rows / count.sum()), chance
