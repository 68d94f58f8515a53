"""Counts of a table's ids over all parts: sorted runs on disk, merged range by range.

Memory grows with neither the samples nor the distinct ids: ranges of ids are chosen from a sample
of the runs so that each holds at most a given number of entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ENTRY_BYTES = 64
"""Memory of an entry while its range is merged."""


@dataclass(frozen=True)
class Run:
    """Distinct ids of one part and table, rising: entries [start, start + length) of its files."""

    folder: str
    dtype: str
    start: int
    length: int

    def values(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """The ids at places [low, high) of the run."""
        return self._read("values.bin", np.dtype(self.dtype), low, high)

    def counts(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """How often they occur, int64."""
        return self._read("counts.bin", np.dtype(np.uint32), low, high).astype(np.int64)

    def _read(self, name: str, dtype: np.dtype, low: int, high: int | None) -> np.ndarray:
        count = (self.length if high is None else high) - low
        offset = (self.start + low) * dtype.itemsize
        return np.fromfile(Path(self.folder, name), dtype, count, offset=offset)


def merge_runs(runs: Sequence[Run], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Distinct ids (rising over all yields) and their summed counts int64.

    A range has about `most` entries at the most (before equal ones are joined), or as many as
    there are runs where that is more.
    """
    runs = [run for run in runs if run.length]
    if not runs:
        return
    if sum(run.length for run in runs) <= most:
        yield _merge([run.values() for run in runs], [run.counts() for run in runs])
        return
    splitters = _splitters(runs, most)
    places = np.empty((len(runs), len(splitters) + 2), dtype=np.int64)
    for index, run in enumerate(runs):
        places[index, 0], places[index, -1] = 0, run.length
        places[index, 1:-1] = np.searchsorted(run.values(), splitters)
    for step in range(len(splitters) + 1):
        values, counts = [], []
        for run, low, high in zip(runs, places[:, step], places[:, step + 1], strict=True):
            if low < high:
                values.append(run.values(low, high))
                counts.append(run.counts(low, high))
        if values:
            yield _merge(values, counts)


def _splitters(runs: Sequence[Run], most: int) -> np.ndarray:
    """Ids that divide the runs into ranges of about `most` entries."""
    every = max(1, most // (2 * len(runs)))
    sample = np.sort(np.concatenate([run.values()[every - 1 :: every] for run in runs]))
    return np.unique(sample[:: max(1, most // (2 * every))])


def _merge(values: list[np.ndarray], counts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values of several rising runs, with the sums of their counts."""
    joined, summed = np.concatenate(values), np.concatenate(counts)
    order = np.argsort(joined, kind="stable")
    joined = joined[order]
    starts = np.flatnonzero(np.concatenate(([True], joined[1:] != joined[:-1])))
    return joined[starts], np.add.reduceat(summed[order], starts)
