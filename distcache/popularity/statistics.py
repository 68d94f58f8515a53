"""How often every row of every table was looked up: files, and what the ranks of a node share."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distcache.comm.link import require_equal, run_on_all_ranks
from distcache.comm.world import World
from distcache.data.criteo_folder import NAME as MANIFEST
from distcache.data.files import write_json
from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout
from distcache.planner.victims import PINNED, GroupPopularity
from distcache.store.memory import describe_bytes, share_memory, tensor_in

# -----------------------------------------------------------------------------
# How often every row of every table was looked up, as `analyze` and `preprocess` leave it.
#
# A folder of `analyze` holds `statistics.json` and one array of counts per table; a folder that
# `preprocess` made holds counts of its training samples, and serves as well.

NAME = "statistics.json"
FORMAT = 1

_FEW = 1 << 16
"""Counts below it are counted by an array."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class TableCounts:
    """Lookups of one table, which has `rows` rows, read by `feature`.

    `ids` int64 `[k]`, distinct and ascending, or None where `counts` has an entry for every row;
    `counts`: unsigned or int64 `[k]` (or `[rows]`);
    `lookups`: all lookups of the table; `distinct`: rows that were looked up at all.
    """

    feature: str
    rows: int
    lookups: int
    distinct: int
    counts: np.ndarray
    ids: np.ndarray | None = None

    @classmethod
    def of(cls, feature: str, counts: np.ndarray) -> TableCounts:
        """Of a table whose every row has its count, unsigned or int64 `[rows]`."""
        total, distinct = int(counts.sum(dtype=np.int64)), int(np.count_nonzero(counts))
        return cls(feature, len(counts), total, distinct, counts)

    @property
    def table(self) -> str:
        """The name that the table has in training, where one feature reads it."""
        return f"t_{self.feature}"

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


@dataclass(frozen=True)
class Statistics:
    """Counts of all tables of a data source.

    `vocabulary`: how its values became ids, as text (see `vocabulary_of`); `samples`: how many
    samples were counted.
    """

    tables: tuple[TableCounts, ...]
    vocabulary: str
    samples: int

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

    @property
    def described(self) -> str:
        """Of what they are, for errors."""
        pairs = zip(self.features, self.table_rows, strict=True)
        tables = ", ".join(f"{feature} ({rows} rows)" for feature, rows in pairs)
        return f"of tables with {tables} and {self.vocabulary} (fingerprint {self.fingerprint})"


def fingerprint_of(features: Sequence[str], table_rows: Sequence[int], vocabulary: str) -> str:
    """SHA-256, 16 hexadecimal digits, of tables and vocabulary."""
    text = json.dumps([list(features), [int(rows) for rows in table_rows], vocabulary])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def vocabulary_of(source: Any) -> str:
    """How a batch source's values became ids: its `vocabulary`, or `ids` where they came as ids."""
    return getattr(source, "vocabulary", "ids")


def write_statistics(folder: Path, statistics: Statistics) -> None:
    """Write them to `folder`, `statistics.json` last: with it, all is there."""
    (folder / "counts").mkdir(parents=True, exist_ok=True)
    described = []
    for index, table in enumerate(statistics.tables):
        counts = table.counts if table.ids is None else table.dense()
        np.save(folder / f"counts/{index}.npy", counts)
        described.append({name: getattr(table, name) for name in _PLAIN})
    values = {
        "format": FORMAT,
        "fingerprint": statistics.fingerprint,
        "vocabulary": statistics.vocabulary,
        "samples": statistics.samples,
        "tables": described,
    }
    write_json(folder / NAME, values)


_PLAIN = ("feature", "rows", "lookups", "distinct")


def read_statistics(path: str | Path, key: str = "cache.statistics") -> Statistics:
    """The statistics of a folder that `analyze` or `preprocess` made; counts by memory map.

    `key`: what the user gave `path` as, for errors. Raises ConfigError where there are none,
    DataError where they are damaged.
    """
    folder = Path(path)
    if (folder / NAME).is_file():
        return _read_own(folder, key)
    if (folder / MANIFEST).is_file():
        from distcache.data.criteo import CriteoArrays, CriteoSpec

        source = CriteoArrays(CriteoSpec(folder))
        counted = enumerate(source.features)
        tables = tuple(TableCounts.of(feature, source.counts(index)) for index, feature in counted)
        return Statistics(tables, vocabulary_of(source), source.train_samples)
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
        tables = []
        for index, about in enumerate(values["tables"]):
            name = f"counts/{index}.npy"
            counts = np.load(folder / name, mmap_mode="r")
            if len(counts) != about["rows"]:
                raise ValueError(f"{name} has {len(counts)} entries")
            kind = counts.dtype.kind  # of unsigned ones nothing is read yet
            if kind not in "iu" or (kind == "i" and counts.min(initial=0) < 0):
                raise ValueError(f"{name} has other entries than counts")
            tables.append(TableCounts(counts=counts, **{key: about[key] for key in _PLAIN}))
        return Statistics(tuple(tables), values["vocabulary"], values["samples"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{key}={folder}: the statistics are damaged ({error}): count again with python -m "
            "distcache.analyze"
        ) from error


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
            classes[table.order[: hot_rows[place]]] = PINNED
        parts.append(classes)
    return np.concatenate(parts)


# -----------------------------------------------------------------------------
# What the ranks of a node share of the statistics: read by one of them, mapped by the others.

log = logging.getLogger(__name__)


_WAY_OUT = (
    "use cache.warm_start=0 or a policy without statistics (cache.policy, "
    "cache.tail), or more memory"
)


@dataclass(frozen=True)
class Popularity:
    """What a cache takes from `statistics`, whose tables are those of the model, in order.

    `hot_rows`: for each table, how many of its most frequent rows lie in the cache first;
    `warm_start`: share of the slots filled before step 0; `classes`: whether planners rank rows by
    class; `pinned_rows`: for each table, how many of its most frequent rows are `PINNED` (None: no
    row is).
    """

    statistics: Statistics
    hot_rows: tuple[int, ...]
    warm_start: float = 0.0
    classes: bool = False
    pinned_rows: tuple[int, ...] | None = None

    def share(
        self, world: World, layouts: Sequence[RowLayout], members: Sequence[Sequence[int]]
    ) -> list[GroupPopularity]:
        """See `share_popularity`."""
        return share_popularity(world, layouts, members, self)


def share_popularity(
    world: World,
    layouts: Sequence[RowLayout],
    members: Sequence[Sequence[int]],
    popularity: Popularity,
) -> list[GroupPopularity]:
    """What each group needs of `popularity`; called by all ranks.

    `members`: the tables of each group. Local rank 0 of each node reads the counts. Raises
    ConfigError where the ranks' statistics differ, MemoryTooSmallError on every rank where some
    node's memory does not hold the arrays.
    """
    statistics = popularity.statistics
    require_equal(
        world,
        {
            "cache.statistics (its fingerprint)": statistics.fingerprint,
            "cache.statistics (its lookups)": [table.lookups for table in statistics.tables],
            "the hot rows of each table": popularity.hot_rows,
            "the pinned rows of each table": popularity.pinned_rows,
            "cache.warm_start": popularity.warm_start,
        },
    )
    pairs = zip(layouts, members, strict=True)
    shared = [_share_group(world, layout, tables, popularity) for layout, tables in pairs]
    arrays = [a for group in shared for a in (group.classes, group.hot) if a is not None]
    if world.local_size < world.size:  # homes would not agree
        digests = [zlib.crc32(array) for array in arrays]
        require_equal(world, {"cache.statistics (digests of its counts on each node)": digests})
    if world.is_first and arrays:
        total = describe_bytes(sum(array.nbytes for array in arrays))
        log.info("popularity of rows: %s of host memory on each node", total)
    return shared


def _share_group(
    world: World, layout: RowLayout, tables: Sequence[int], popularity: Popularity
) -> GroupPopularity:
    """The arrays of a group, filled."""
    hot = sum(popularity.hot_rows[table] for table in tables) if popularity.warm_start else 0
    pinned = popularity.pinned_rows
    classed = layout.rows if popularity.classes or pinned is not None else 0
    size = 8 * hot + classed
    if size == 0:
        return GroupPopularity()
    memory = share_memory(size, world, "the popularity of the rows", _WAY_OUT)
    hottest = tensor_in(memory, 0, (hot,), torch.int64).numpy() if hot else None
    classes = tensor_in(memory, 8 * hot, (classed,), torch.uint8).numpy() if classed else None

    def fill() -> None:
        if world.local_rank:
            return
        statistics = popularity.statistics
        if classes is not None:
            own = None if pinned is None else [pinned[table] for table in tables]
            classes[:] = row_classes(statistics, tables, own)
        if hottest is not None:
            found = hot_rows(statistics, tables, popularity.hot_rows, layout)
            hottest[: len(found)], hottest[len(found) :] = found, -1

    run_on_all_ranks(world, fill)
    return GroupPopularity(classes, hottest)


def hot_rows(
    statistics: Statistics, tables: Sequence[int], counts: Sequence[int], layout: RowLayout
) -> np.ndarray:
    """The `counts[t]` most frequent rows of each table t of a group, the most frequent first.

    int64, by the numbers of `layout`; fewer where fewer rows of a table were looked up.
    """
    rows, use = [], []
    for place, index in enumerate(tables):
        table = statistics.tables[index]
        ids = table.order[: counts[index]]
        rows.append(ids + int(layout.offsets[place]))
        use.append(table.dense()[ids])
    order = np.argsort(-np.concatenate(use), kind="stable")
    return np.concatenate(rows)[order]
