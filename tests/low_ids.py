"""Which samples are hot where the first rows of every table are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scenarios import Scenario

from distcache.data.batch import JaggedIds

HOT_SHARE = 4
"""The first of so many parts of every table is hot."""


@dataclass(frozen=True)
class LowIds:
    """Hot samples have ids in the first part of every table alone; `none` or `all` of them."""

    rows: tuple[int, ...]
    only: str = ""

    def __call__(self, ids: JaggedIds) -> np.ndarray:
        if self.only:
            return np.full(ids.batch_size, self.only == "all")
        lengths = np.diff(ids.offsets.numpy())
        limits = np.repeat(np.repeat(self.rows, ids.batch_size), lengths)
        cold = np.zeros(len(lengths), dtype=bool)
        bags = np.repeat(np.arange(len(lengths)), lengths)
        cold[bags[ids.values.numpy() >= limits]] = True
        return ~cold.reshape(len(self.rows), ids.batch_size).any(0)


def low_ids(case: Scenario, only: str = "") -> LowIds:
    """For the features of a scenario."""
    readers = {f: table for table in case.tables for f in table.features}
    return LowIds(tuple(-(-readers[f].rows // HOT_SHARE) for f in case.features), only)
