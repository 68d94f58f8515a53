"""Counts of a table's ids over all parts: sorted runs on disk, merged range by range.

Memory grows with neither the samples nor the distinct ids: ranges of ids are chosen from a sample
of the runs so that each holds at most a given number of entries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ENTRY_BYTES = 64
"""Memory of an entry while its range is merged."""
FAN_IN = 256
"""Runs that are merged at once; more are merged in groups first."""


@dataclass(frozen=True)
class Run:
    """Distinct ids of one part and table, rising: entries [start, start + length) of its files."""

    folder: str
    dtype: str
    start: int
    length: int
    count_dtype: str = "<u4"

    def values(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """The ids at places [low, high) of the run."""
        return self._read("values.bin", np.dtype(self.dtype), low, high)

    def mapped(self) -> np.ndarray:
        """All ids, by memory map: what is not touched is not read."""
        path, dtype = Path(self.folder, "values.bin"), np.dtype(self.dtype)
        return np.memmap(path, dtype, "r", self.start * dtype.itemsize, (self.length,))

    def places(self, ids: np.ndarray) -> np.ndarray:
        """How many ids of the run are smaller than each of the rising `ids`."""
        own = ids[ids <= np.iinfo(self.dtype).max]
        places = np.full(len(ids), self.length, dtype=np.int64)
        places[: len(own)] = np.searchsorted(self.mapped(), own.astype(self.dtype))
        return places

    def counts(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """How often they occur, int64."""
        return self._read("counts.bin", np.dtype(self.count_dtype), low, high).astype(np.int64)

    def _read(self, name: str, dtype: np.dtype, low: int, high: int | None) -> np.ndarray:
        count = (self.length if high is None else high) - low
        offset = (self.start + low) * dtype.itemsize
        return np.fromfile(Path(self.folder, name), dtype, count, offset=offset)


def fewer_runs(runs: Sequence[Run], most: int, folder: Path) -> list[Run]:
    """At most `FAN_IN` runs that say the same; new ones are written into `folder`.

    What a range is cut by grows with the square of the runs that are merged at once.
    """
    level, made = list(runs), []
    while len(level) > FAN_IN:
        groups = [level[at : at + FAN_IN] for at in range(0, len(level), FAN_IN)]
        below, level = made, []
        made = [folder / f"{len(groups)}-{number}" for number in range(len(groups))]
        for target, group in zip(made, groups, strict=True):
            level.append(_write_merged(group, most, target))
        for old in below:
            shutil.rmtree(old)
    return level


def _write_merged(runs: Sequence[Run], most: int, folder: Path) -> Run:
    """One run of several, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dtype = max((np.dtype(run.dtype) for run in runs), key=lambda dtype: dtype.itemsize)
    length = 0
    with (folder / "values.bin").open("wb") as values, (folder / "counts.bin").open("wb") as counts:
        for found, times in merge_runs(runs, most):
            found.astype(dtype).tofile(values)
            times.tofile(counts)
            length += len(found)
    return Run(str(folder), dtype.str, 0, length, np.dtype(np.int64).str)


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
        places[index, 1:-1] = run.places(splitters)
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
    sample = np.sort(np.concatenate([run.mapped()[every - 1 :: every] for run in runs]))
    return np.unique(sample[:: max(1, most // (2 * every))])


def _merge(values: list[np.ndarray], counts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values of several rising runs, with the sums of their counts."""
    joined, summed = np.concatenate(values), np.concatenate(counts)
    order = np.argsort(joined, kind="stable")
    joined = joined[order]
    starts = np.flatnonzero(np.concatenate(([True], joined[1:] != joined[:-1])))
    return joined[starts], np.add.reduceat(summed[order], starts)
