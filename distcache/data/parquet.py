"""Parquet files as batches: label, dense features and bags of ids by the names of their columns."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from distcache.data.batch import Batch, BatchSlice, JaggedIds, SlicedSource, unloaded
from distcache.data.files import find_files
from distcache.data.parquet_files import (
    IDS,
    NUMBERS,
    BagColumn,
    ColumnRules,
    ParquetFiles,
    WantedColumn,
)
from distcache.data.samplers import SampleOrder, SampleOrdering, Subset, key_of
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BlockCache(Generic[T]):
    """Keeps blocks of at most `samples` samples in all, and always the last one.

    May be used by several threads; a block is decoded once at a time.
    """

    def __init__(self, samples: int) -> None:
        self._limit, self._held = samples, 0
        self._blocks: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.decoded = 0

    def get(self, key: Hashable, samples: int, decode: Callable[[], T]) -> T:
        """The block `key` of `samples` samples, decoded where it is not here (`decoded` counts)."""
        with self._lock:
            known = self._blocks.get(key)
            if known is not None:
                self._blocks.move_to_end(key)
                return known[0]
            while self._blocks and self._held + samples > self._limit:
                self._held -= self._blocks.popitem(last=False)[1][1]
            block = decode()
            self._blocks[key] = (block, samples)
            self._held += samples
            self.decoded += 1
            return block


@dataclass(frozen=True)
class _Epoch:
    """Blocks in the epoch's order, `starts` `[blocks + 1]`: position at which each begins, and
    `windows`: places in that order at which a window begins, with the end."""

    blocks: np.ndarray
    starts: np.ndarray
    windows: np.ndarray


class RowGroupOrder:
    """Positions of an epoch to (block, sample inside it).

    `sizes`: samples of each block; `window`: samples shuffled together, at least; 0 keeps the
    order of the blocks. If all samples fit into one window, an epoch's order is that of
    `SampleOrder(samples, key_of(seed, 0))`: the same as for sources that shuffle all samples.
    Otherwise the samples of a batch are put in the order of their blocks, so that the slices of
    several ranks share the blocks among them.
    """

    def __init__(self, sizes: Sequence[int], seed: int, window: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.edges = np.concatenate(([0], np.cumsum(self.sizes)))
        self.samples = int(self.edges[-1])
        self.one_window = self.samples <= window
        self._seed, self._window = seed, window
        self._all = SampleOrder(self.samples, key_of(seed, 0), shuffle=window > 0)
        self._epochs: dict[int, _Epoch] = {}

    @property
    def widest(self) -> int:
        """Samples of the largest window that any epoch may have."""
        return min(self.samples, self._window + int(self.sizes.max(initial=0)))

    def places(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Block and sample inside it, int64 `[stop - start]` each, at positions of `epoch`.

        The positions must be those of one whole batch: ranks take slices of the result.
        """
        if self.one_window or self._window == 0:
            return self.locate(self._all.positions(epoch, start, stop))
        parts = list(self._window_places(epoch, start, stop))
        at = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        order = self._epoch(epoch)
        places = np.searchsorted(order.starts, at, side="right") - 1
        sorted_ = np.argsort(places, kind="stable")
        at, places = at[sorted_], places[sorted_]
        return order.blocks[places], at - order.starts[places]

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples of `places`, counted over all blocks in their own order; int64."""
        blocks, inside = self.places(epoch, start, stop)
        return self.edges[blocks] + inside

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and sample inside it of samples that are counted over all blocks; int64 each."""
        blocks = np.searchsorted(self.edges, samples, side="right") - 1
        return blocks, samples - self.edges[blocks]

    def _window_places(self, epoch: int, start: int, stop: int):
        """Shuffled positions in the epoch's order of blocks, window by window."""
        order = self._epoch(epoch)
        edges = order.starts[order.windows]
        first = int(np.searchsorted(edges, start, side="right")) - 1
        for window in range(first, len(edges) - 1):
            low, high = int(edges[window]), int(edges[window + 1])
            if low >= stop:
                return
            shuffle = SampleOrder(high - low, key_of(self._seed, 1, window))
            inside = shuffle.positions(epoch, max(start, low) - low, min(stop, high) - low)
            yield inside + low

    def _epoch(self, epoch: int) -> _Epoch:
        """The order of blocks in an epoch; the last two are remembered."""
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        blocks = SampleOrder(len(self.sizes), key_of(self._seed, 2)).positions(
            epoch, 0, len(self.sizes)
        )
        starts = np.concatenate(([0], np.cumsum(self.sizes[blocks])))
        windows = [0]
        while windows[-1] < len(blocks):
            enough = np.searchsorted(starts, starts[windows[-1]] + self._window, side="left")
            windows.append(min(int(enough), len(blocks)))
        made = _Epoch(blocks, starts, np.array(windows))
        for old in [e for e in self._epochs if e < epoch - 1]:
            self._epochs.pop(old, None)
        self._epochs[epoch] = made
        return made


@dataclass(frozen=True)
class ParquetSpec:
    """Which files to read, and how. Raises ConfigError that names the key.

    `paths`, `held_out_paths`: a file, a glob, or a sequence of either, in order of time;
    `id_columns`: one feature and one table each, of `table_rows` rows; `weight_columns`: id column
    -> column with a weight for each of its ids; `held_out`: share of the samples, the last ones,
    that is evaluated on (with `held_out_paths`: those files instead); `shuffle_rows`: samples that
    are shuffled together (0: file order); `rules`: what values mean; `dtype`: torch.float32 or
    torch.float64, of dense features and labels (the features have float32's precision in both).
    """

    paths: str | Path | Sequence[str | Path]
    label_column: str
    id_columns: Sequence[str]
    table_rows: Sequence[int]
    dense_columns: Sequence[str] = ()
    weight_columns: Mapping[str, str] = field(default_factory=dict)
    held_out: float = 1 / 7
    held_out_paths: str | Path | Sequence[str | Path] | None = None
    global_batch_size: int = 2048
    seed: int = 0
    shuffle_rows: int = 1 << 20
    rules: ColumnRules = field(default_factory=ColumnRules)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        ids = list(self.id_columns)
        twice = sorted(name for name in set(ids) if ids.count(name) > 1)
        if twice:
            raise ConfigError(f"data.id_columns names {twice[0]!r} twice: leave one out")

    def wanted(self) -> list[WantedColumn]:
        """The columns to read, and what they may be."""
        found = [WantedColumn(self.label_column, "data.label_column", NUMBERS)]
        found += [WantedColumn(name, "data.dense_columns", NUMBERS) for name in self.dense_columns]
        found += [WantedColumn(name, "data.id_columns", IDS, True) for name in self.id_columns]
        found += [
            WantedColumn(name, "data.weight_columns", ("float", "integer"), True)
            for name in self.weight_columns.values()
        ]
        return found


class ParquetSource(SlicedSource):
    """The `BatchSource` of a `ParquetSpec`; features have the names of their columns.

    Samples are shuffled within windows of row groups (see `RowGroupOrder`), the held-out ones keep
    file order. A rank reads only the row groups that hold its slices, ids and dense features apart,
    and keeps decoded row groups of about `shuffle_rows` samples (at least two row groups).
    Without dense columns there is one dense feature, the constant 1. Raises DataError for missing
    or malformed files. `deferred`: dense features and labels are read when a batch is loaded.
    """

    deferred = True

    def __init__(self, spec: ParquetSpec) -> None:
        self.spec = spec
        self.features = tuple(spec.id_columns)
        self.table_rows = tuple(int(rows) for rows in spec.table_rows)
        self.dense_features = max(1, len(spec.dense_columns))
        files = find_files("data.path", spec.paths, "a Parquet file")
        own = len(files)
        if spec.held_out_paths is not None:
            files += find_files("data.held_out_path", spec.held_out_paths, "a Parquet file")
        self.files = ParquetFiles(files, spec.wanted())
        groups = self.files.row_groups
        rows = np.array([group.rows for group in groups], dtype=np.int64)
        trains = sum(group.file < own for group in groups)
        if spec.held_out_paths is None:
            total = int(rows.sum())
            share = Fraction(spec.held_out).limit_denominator(10_000)
            train = total - -(-total * share.numerator // share.denominator)
        else:
            train = int(rows[:trains].sum())
        if train == 0:
            raise DataError(
                f"data.path: {files[0].path} leaves nothing to train on: {int(rows.sum())} rows, "
                "of which all are held out; lower data.held_out or give more rows"
            )
        self._split(rows, train)
        self.vocabulary = f"parquet columns, strings by {spec.rules.string_ids}"
        self.identity = self._identity(train)
        largest = int(rows.max())
        limit = self.order.widest + largest
        self._ids, self._rest = BlockCache[list[BagColumn]](limit), BlockCache[tuple](limit)
        logger.info(
            "%d Parquet files with %d row groups: %d samples train, %d are held out; a rank keeps "
            "at most %d decoded samples",
            len(files),
            len(groups),
            train,
            int(rows.sum()) - train,
            limit,
        )

    def _identity(self, train: int) -> dict[str, str]:
        """See `BatchSource.identity`: the samples, what is made of them, and their order."""
        spec = self.spec
        found = {"data.path": f"{self.files.digest()} with {train} training samples"}
        for key in ("label_column", "dense_columns", "id_columns", "shuffle_rows"):
            value = getattr(spec, key)
            found[f"data.{key}"] = str(value if isinstance(value, str | int) else list(value))
        found["data.weight_columns"] = str(sorted(spec.weight_columns.items()))
        rules = {"data.dense_transform": "log1p" if spec.rules.log1p else "none"}
        rules |= {f"data.{key}": getattr(spec.rules, key) for key in ("nulls", "string_ids")}
        return found | rules | {"data.on_bad_id": spec.rules.on_bad_id}

    def _split(self, rows: np.ndarray, train: int) -> None:
        """Orders of the first `train` samples and of those after them."""
        ends = np.cumsum(rows)
        cut = int(np.searchsorted(ends, train, side="left"))  # the row group that is divided
        inside = train - int(ends[cut] - rows[cut])
        sizes = [*rows[:cut].tolist(), inside]
        self.order = RowGroupOrder(sizes, self.spec.seed, self.spec.shuffle_rows)
        rest = cut if inside < rows[cut] else cut + 1
        self._eval_group, self._eval_skip = rest, inside if rest == cut else 0
        held_out = rows[rest:].copy()
        if len(held_out):
            held_out[0] -= self._eval_skip
        self._eval_order = RowGroupOrder(held_out.tolist(), self.spec.seed, 0)
        super().__init__(self.order.samples, self._eval_order.samples, self.spec.global_batch_size)

    def in_file_order(self) -> ParquetSource:
        """The same samples, not shuffled."""
        return ParquetSource(replace(self.spec, shuffle_rows=0))

    @property
    def weighted(self) -> bool:
        """Whether ids have weights."""
        return bool(self.spec.weight_columns)

    def read(self, part: BatchSlice) -> Batch:
        """See `SlicedSource.read`; the order inside a global batch is the same for all slices."""
        span = part.span
        if part.kind == "train":
            groups, samples = self.order.places(span.epoch, span.start, span.stop)
        else:
            groups, samples = self._eval_order.places(0, span.start, span.stop)
            samples += np.where(groups == 0, self._eval_skip, 0)
            groups = groups + self._eval_group
        return self._batch(groups[part.low : part.high], samples[part.low : part.high], part)

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """See `SlicedSource.take`."""
        return self._batch(*self.order.locate(samples), part)

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`."""
        return self.ids(*self.order.locate(samples))

    def order_of(self, chosen: Subset, which: int) -> SampleOrdering:
        """See `SlicedSource.order_of`: windows hold as many row groups as those of all samples."""
        share = chosen.count / max(self.order.samples, 1)
        window = max(1, int(self.spec.shuffle_rows * share)) if self.spec.shuffle_rows else 0
        sizes = np.diff(chosen.before(self.order.edges))
        return RowGroupOrder(sizes.tolist(), key_of(self.spec.seed, 0, which), window)

    def _batch(self, groups: np.ndarray, samples: np.ndarray, part: BatchSlice) -> Batch:
        """Rows `samples` of row groups `groups`."""
        count = len(samples)
        batch = part.batch(
            unloaded(count, self.dense_features),
            self.ids(groups, samples),
            unloaded(count),
            lambda: self.dense_and_labels(groups, samples),
        )
        return batch if self.deferred else batch.loaded()

    def ids(self, groups: np.ndarray, samples: np.ndarray) -> JaggedIds:
        """The bags of some samples, given as row groups and rows in them; reads ids alone."""
        used, where = _by_group(groups)
        held = [self._ids_of(group) for group in used]
        parts = []
        for feature in range(len(self.features)):
            wanted = [(block[feature], samples[at]) for block, at in zip(held, where, strict=True)]
            parts.append(_gather(wanted, where))
        offsets = np.concatenate(([0], np.cumsum(np.concatenate([part[1] for part in parts]))))
        weights = None
        if self.weighted:  # ids of a feature without weights have the weight 1
            filled = [np.ones(len(ids)) if own is None else own for ids, _, own in parts]
            weights = torch.from_numpy(np.concatenate(filled)).to(self.spec.dtype)
        values = torch.from_numpy(np.concatenate([ids for ids, _, _ in parts]))
        return JaggedIds(self.features, values, torch.from_numpy(offsets), weights)

    def dense_and_labels(
        self, groups: np.ndarray, samples: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense features `[b, F_dense]` and labels `[b]` of some samples; reads these alone."""
        dense = torch.ones(len(samples), self.dense_features, dtype=self.spec.dtype)
        labels = torch.empty(len(samples), dtype=self.spec.dtype)
        used, where = _by_group(groups)
        for group, at in zip(used, where, strict=True):
            own_dense, own_labels = self._dense_of(group)
            if self.spec.dense_columns:
                dense.numpy()[at] = own_dense[samples[at]]
            labels.numpy()[at] = own_labels[samples[at]]
        return dense, labels

    def _ids_of(self, index: int) -> list[BagColumn]:
        """The decoded id columns of a row group."""
        group, spec = self.files.row_groups[index], self.spec

        def decode() -> list[BagColumn]:
            weights = spec.weight_columns
            names = dict.fromkeys((*spec.id_columns, *weights.values()))
            columns = self.files.read(group, list(names), spec.rules)
            return [
                columns[name].bags(rows, columns[weights[name]] if name in weights else None)
                for name, rows in zip(spec.id_columns, self.table_rows, strict=True)
            ]

        return self._ids.get(index, group.rows, decode)

    def _dense_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The decoded dense features `[rows, F_dense]` and labels `[rows]` of a row group."""
        group, spec = self.files.row_groups[index], self.spec

        def decode() -> tuple[np.ndarray, np.ndarray]:
            names = dict.fromkeys((spec.label_column, *spec.dense_columns))
            columns = self.files.read(group, list(names), spec.rules)
            dense = np.empty((group.rows, len(spec.dense_columns)), dtype=np.float32)
            for at, name in enumerate(spec.dense_columns):
                dense[:, at] = columns[name].dense()
            return dense, columns[spec.label_column].labels()

        return self._rest.get(index, group.rows, decode)


def _gather(
    groups: Sequence[tuple[BagColumn, np.ndarray]], places: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """`BagColumn.take` of samples that lie in several columns.

    `groups`: columns, each with the samples to take of it; `places`: where those stand in the
    batch, int64, together all of it.
    """
    parts = [column.take(wanted) for column, wanted in groups]
    if len(parts) == 1:
        return parts[0]  # one column has all samples, in the order of the batch
    none = np.zeros(0, dtype=np.int64)
    ids, lengths = (np.concatenate([none, *(part[at] for part in parts)]) for at in (0, 1))
    weights = [part[2] for part in parts if part[2] is not None]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    joined = BagColumn(ids, offsets, np.concatenate(weights) if weights else None)
    return joined.take(np.argsort(np.concatenate([none, *places])))


def _by_group(groups: np.ndarray) -> tuple[list[int], list[np.ndarray]]:
    """The distinct row groups, ascending, and where in the batch each one's samples stand."""
    if not len(groups):
        return [], []
    used, inverse = np.unique(groups, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    cuts = np.cumsum(np.bincount(inverse))[:-1]
    return used.tolist(), np.split(order, cuts)
