"""How often every row of every table was looked up, as `analyze` and `preprocess` leave it.

A folder of `analyze` holds `statistics.json` and one array of counts per table; a folder that
`preprocess` made holds counts of its training samples, and serves as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distcache.data.raw.manifest import NAME as MANIFEST
from distcache.data.raw.manifest import read_manifest
from distcache.errors import ConfigError, DataError

NAME = "statistics.json"
FORMAT = 1

_FEW = 1 << 16
"""Counts below it are counted by an array."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class TableCounts:
    """Lookups of one table, which has `rows` rows, read by `feature`.

    `ids` int64 `[k]`, distinct and ascending, or None where `counts` has an entry for every row;
    `counts`: unsigned or int64 `[k]` (or `[rows]`), each at most `error` too small (0: exact);
    `lookups`: all lookups of the table; `distinct`: rows that were looked up at all.
    """

    feature: str
    rows: int
    lookups: int
    distinct: int
    counts: np.ndarray
    ids: np.ndarray | None = None
    error: int = 0

    def dense(self) -> np.ndarray:
        """Counts of every row, int64 `[rows]`; 0 for rows that are not in `ids`."""
        if self.ids is None:
            return np.asarray(self.counts, dtype=np.int64)
        dense = np.zeros(self.rows, dtype=np.int64)
        dense[self.ids] = self.counts
        return dense

    @cached_property
    def order(self) -> np.ndarray:
        """Ids that were looked up, the most frequent first, then by id; int64 `[distinct]`."""
        counts = np.asarray(self.counts, dtype=np.int64)
        found = np.flatnonzero(counts)
        found = found[np.argsort(-counts[found], kind="stable")]
        return found if self.ids is None else np.asarray(self.ids, dtype=np.int64)[found]

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """The counts that occur, without 0, descending, and how many rows have each; int64 `[k]`.

        One pass without a sort of all rows, in memory that does not grow with them.
        """
        few, many = np.zeros(_FEW, dtype=np.int64), [np.empty(0, dtype=np.int64)]
        for start in range(0, len(self.counts), _BLOCK):
            counts = np.asarray(self.counts[start : start + _BLOCK], dtype=np.int64)
            is_few = counts < _FEW
            few += np.bincount(counts[is_few], minlength=_FEW)
            many.append(counts[~is_few])
        values, rows = np.unique(np.concatenate(many), return_counts=True)
        some = 1 + np.flatnonzero(few[1:])
        return np.concatenate((some, values))[::-1], np.concatenate((few[some], rows))[::-1]

    def hottest(self, rows: int) -> np.ndarray:
        """At most `rows` ids, the most frequent first; int64."""
        return self.order[:rows]

    def lookups_of_hottest(self, rows: int) -> int:
        """Lookups of the `rows` most frequent ids."""
        counts = np.asarray(self.counts)
        if rows <= 0:
            return 0
        if rows < len(counts):
            counts = np.partition(counts, len(counts) - rows)[len(counts) - rows :]
        return int(counts.sum(dtype=np.int64))


@dataclass(frozen=True)
class Statistics:
    """Counts of all tables of a data source.

    `vocabulary`: how its values became ids, as text (see `vocabulary_of`); `samples`: how many
    samples were counted; `share`: of all that there are (1.0: all, or as many as were asked for).
    """

    tables: tuple[TableCounts, ...]
    vocabulary: str
    samples: int
    share: float = 1.0

    @property
    def features(self) -> tuple[str, ...]:
        """The feature that reads each table."""
        return tuple(table.feature for table in self.tables)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(table.rows for table in self.tables)

    @property
    def fingerprint(self) -> str:
        """What must agree with the data that the statistics are used for."""
        return fingerprint_of(self.features, self.table_rows, self.vocabulary)


def fingerprint_of(features: Sequence[str], table_rows: Sequence[int], vocabulary: str) -> str:
    """SHA-256, 16 hexadecimal digits, of tables and vocabulary."""
    text = json.dumps([list(features), [int(rows) for rows in table_rows], vocabulary])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def vocabulary_of(source: Any) -> str:
    """How a batch source's values became ids: its `vocabulary`, or `ids` where they came as ids."""
    return getattr(source, "vocabulary", "ids")


def check_fits(statistics: Statistics, source: Any, path: str | Path) -> None:
    """Raise ConfigError, with both fingerprints, unless `statistics`, read from `path`, speak of
    the tables and the vocabulary of the batch source `source`."""
    wanted = fingerprint_of(source.features, source.table_rows, vocabulary_of(source))
    if wanted == statistics.fingerprint:
        return
    what = "of another vocabulary"
    if statistics.features != tuple(source.features):
        what = f"of the features {', '.join(statistics.features)}"
    elif statistics.table_rows != tuple(source.table_rows):
        what = f"of tables with {list(statistics.table_rows)} rows"
    raise ConfigError(
        f"cache.statistics={path} are statistics {what} (fingerprint {statistics.fingerprint}), "
        f"the data has fingerprint {wanted}: count this data with python -m distcache.analyze"
    )


def write_statistics(folder: Path, statistics: Statistics) -> None:
    """Write them to `folder`, `statistics.json` last: with it, all is there."""
    (folder / "counts").mkdir(parents=True, exist_ok=True)
    described = []
    for index, table in enumerate(statistics.tables):
        np.save(folder / f"counts/{index}.npy", table.counts)
        if table.ids is not None:
            np.save(folder / f"counts/{index}_ids.npy", table.ids)
        about = {k: v for k, v in vars(table).items() if k in _PLAIN}
        described.append(about | {"sparse": table.ids is not None})
    values = {
        "format": FORMAT,
        "fingerprint": statistics.fingerprint,
        "vocabulary": statistics.vocabulary,
        "samples": statistics.samples,
        "share": statistics.share,
        "tables": described,
    }
    partial = folder / f"{NAME}.partial"
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / NAME)


_PLAIN = ("feature", "rows", "lookups", "distinct", "error")


def read_statistics(path: str | Path, key: str = "cache.statistics") -> Statistics:
    """The statistics of a folder that `analyze` or `preprocess` made; counts by memory map.

    `key`: what the user gave `path` as, for errors. Raises ConfigError where there are none,
    DataError where they are damaged.
    """
    folder = Path(path)
    if (folder / NAME).is_file():
        return _read_own(folder, key)
    if (folder / MANIFEST).is_file():
        return _read_preprocessed(folder)
    raise ConfigError(
        f"{key}={path} holds neither {NAME} nor {MANIFEST}: give a folder that python -m "
        "distcache.analyze or distcache.preprocess made"
    )


def _read_own(folder: Path, key: str) -> Statistics:
    try:
        values: Any = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ConfigError(
                f"{key}={folder} has statistics of format {values['format']}, this version reads "
                f"{FORMAT}: count again with python -m distcache.analyze"
            )
        tables = tuple(_read_table(folder, i, about) for i, about in enumerate(values["tables"]))
        return Statistics(tables, values["vocabulary"], values["samples"], values["share"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{key}={folder}: the statistics are damaged ({error}): count again with python -m "
            "distcache.analyze"
        ) from error


def _read_table(folder: Path, index: int, about: dict[str, Any]) -> TableCounts:
    counts = np.load(folder / f"counts/{index}.npy", mmap_mode="r")
    ids = None
    if about["sparse"]:
        ids = np.load(folder / f"counts/{index}_ids.npy", mmap_mode="r")
    if len(counts) != (about["rows"] if ids is None else len(ids)):
        raise ValueError(f"counts/{index}.npy has {len(counts)} entries")
    kind = counts.dtype.kind
    if kind not in "iu" or (kind == "i" and counts.min(initial=0) < 0):
        raise ValueError(f"counts/{index}.npy has other entries than counts")
    if ids is not None and len(ids) and not 0 <= ids[0] <= ids[-1] < about["rows"]:
        raise ValueError(f"counts/{index}_ids.npy has ids outside a table of {about['rows']} rows")
    return TableCounts(counts=counts, ids=ids, **{name: about[name] for name in _PLAIN})


def _read_preprocessed(folder: Path) -> Statistics:
    from distcache.data.criteo_arrays import CriteoArrays
    from distcache.data.criteo_batches import BatchSettings

    source = CriteoArrays(folder, BatchSettings())
    tables = []
    for index, rows in enumerate(read_manifest(folder).table_rows):
        counts = source.counts(index)
        lookups, distinct = int(counts.sum()), int(np.count_nonzero(counts))
        tables.append(TableCounts(source.features[index], rows, lookups, distinct, counts))
    return Statistics(tuple(tables), vocabulary_of(source), source.train_samples)
