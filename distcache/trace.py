"""What a stream of ids asks of every home, step by step, found once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from distcache.data.batch import BatchCheck, BatchSource, JaggedIds, slice_bounds
from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout, TableSpec, group_tables
from distcache.planner.rank import RankPlanner
from distcache.store.memory import available_memory, describe_bytes

# -----------------------------------------------------------------------------
# All that a cache does depends on these alone, so a trace is recorded once for each number of
# ranks and then replayed by as many cases as one likes (`replay`, `belady`).

log = logging.getLogger(__name__)

_MOST = 2**31 - 1
"""Rows of one home are int32 in the planner's index."""

_SHARE = 0.25
"""Recorded rows take at most this share of the memory that can be had when recording starts; where
they are numbered, they take as much again and more."""

_ROW_BYTES = 12
"""A distinct row of a step and its count, while they are recorded."""


@dataclass(frozen=True)
class HomeTrace:
    """The rows of one home by *number*: 0, 1, ... in the order in which the trace names them first.

    `names` int64 `[D]`: the row of each number; `starts` int64 `[steps + 1]`: step s has the
    entries `starts[s]` to `starts[s + 1]` of `numbers`, int32: its distinct rows in canonical
    order, and of `counts`, int32: how many ids of the step, over all ranks, name each.
    """

    names: np.ndarray
    starts: np.ndarray
    numbers: np.ndarray
    counts: np.ndarray

    @property
    def steps(self) -> int:
        """Steps recorded."""
        return len(self.starts) - 1

    @property
    def distinct(self) -> np.ndarray:
        """Distinct rows of each step; int64 `[steps]`."""
        return np.diff(self.starts)


@dataclass(frozen=True)
class Trace:
    """A stream of one group of tables. Memory: 8 bytes per distinct row of every step and for
    every number of ranks recorded, and 12 per distinct row of all steps.

    `offsets`: the first row of each table, and V, int64; `ids`: lookups of the training steps;
    `training` bool `[steps]`: whether a step trains (False: it evaluates); `homes`: the homes of
    each number of ranks W.
    """

    offsets: np.ndarray
    ids: int
    training: np.ndarray
    homes: Mapping[int, tuple[HomeTrace, ...]]

    @property
    def rows(self) -> int:
        """V, of all tables."""
        return int(self.offsets[-1])

    @property
    def steps(self) -> int:
        """Steps recorded, evaluations among them."""
        return len(self.training)

    def of_world(self, world_size: int) -> tuple[HomeTrace, ...]:
        """The homes of `world_size` ranks. Raises ConfigError if it was not recorded."""
        if world_size not in self.homes:
            known = ", ".join(str(size) for size in self.homes)
            raise ConfigError(
                f"this trace was recorded for world sizes {known}, not {world_size}: record it for "
                "all that are to be replayed"
            )
        return self.homes[world_size]

    def row_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """`(rows int64 [D], ascending, counts int64 [D])`: how often training steps named each."""
        names, counts = [], []
        for home in next(iter(self.homes.values())):
            weights = np.where(np.repeat(self.training, home.distinct), home.counts, 0)
            names.append(home.names)
            counts.append(np.bincount(home.numbers, weights, len(home.names)).astype(np.int64))
        rows, total = np.concatenate(names), np.concatenate(counts)
        order = np.argsort(rows)
        return rows[order], total[order]


class Recorder:
    """Records steps of ids as a `Trace`; finding distinct rows is what the planner does.

    `offsets`: see `Trace`; `worlds`: numbers of ranks. Raises ConfigError for a number below 1, or
    none.
    """

    def __init__(
        self, offsets: np.ndarray, worlds: Sequence[int] = (1,), most_bytes: int | None = None
    ) -> None:
        """`most_bytes` bounds what is recorded; None: a share of the memory that can be had now."""
        if not worlds or min(worlds) < 1:
            raise ConfigError(f"world sizes {list(worlds)}: give at least one, all of at least 1")
        if (rows := int(offsets[-1])) > _MOST:
            raise ConfigError(f"{rows} rows: plans number the rows of a home up to {_MOST}")
        self.offsets, self.full = offsets, False
        self.most_bytes = int(available_memory() * _SHARE) if most_bytes is None else most_bytes
        table = TableSpec("trace", rows, 1, ("trace",))
        self._all = RowLayout([table], 1)
        self._layouts = {world: RowLayout([table], world) for world in sorted(set(worlds))}
        self._steps: dict[int, list[list[tuple[np.ndarray, np.ndarray]]]] = {
            world: [[] for _ in range(world)] for world in self._layouts
        }
        self._training: list[bool] = []
        self._ids = self._bytes = 0

    def add(self, named: Callable[[int, int], np.ndarray], training: bool = True) -> None:
        """Record a step; `named(rank, world)`: the rows that a rank of so many names, int64 `[n]`.

        Once `full` is true, do not go on: what follows would not fit.
        """
        ids = 0
        for world, layout in self._layouts.items():
            rows = np.concatenate([named(rank, world) for rank in range(world)])
            ids, asked = len(rows), RankPlanner(layout).request(rows)
            by_home, counts = asked.replicated.rows, np.diff(asked.segments)
            ends = np.cumsum([len(local) for local in by_home])
            own = zip(self._steps[world], by_home, np.split(counts, ends[:-1]), strict=True)
            for home, (steps, local, of_home) in enumerate(own):
                steps.append((layout.row(home, local.astype(np.int64)), of_home))
            self._bytes += _ROW_BYTES * len(counts)
        self._training.append(training)
        self._ids += ids if training else 0
        if self._bytes > self.most_bytes and not self.full:
            self.full = True
            log.warning(
                f"the trace ends after {len(self._training)} steps: its distinct rows take "
                f"{describe_bytes(self._bytes)}, at most {describe_bytes(self.most_bytes)} are "
                "used; give fewer steps or world sizes, or larger batches"
            )

    def finish(self) -> Trace:
        """What was recorded; the recorder is of no use afterwards. Raises DataError if nothing."""
        if not self._ids:
            raise DataError("the trace has no id in any training step: there is nothing to replay")
        homes, planner = {}, RankPlanner(self._all)
        for world in self._layouts:
            found, parts = [], self._steps.pop(world)
            while parts:
                rows, counts = zip(*parts.pop(0), strict=True)
                asked = planner.request(np.concatenate(rows))
                names = asked.replicated.rows[0].astype(np.int64)
                numbers = asked.places[asked.labels]
                starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
                found.append(HomeTrace(names, starts, numbers, np.concatenate(counts)))
            homes[world] = tuple(found)
        return Trace(self.offsets, self._ids, np.array(self._training), homes)


def record_source(
    source: BatchSource,
    tables: Sequence[TableSpec],
    worlds: Sequence[int] = (1,),
    order: Iterable[tuple[str, int]] | None = None,
    most_bytes: int | None = None,
    check: BatchCheck | None = None,
) -> list[Trace]:
    """The trace of each group of `tables` over the steps of `source`, read once.

    `order`: (`train` or `eval`, index) of the batches, as `run.schedule.Schedule.order` gives them;
    None: the training steps of one epoch. `most_bytes`: as `Recorder`'s, of each group; `check`: of
    batches, None: an id outside its table is an error. Batches are global ones, of which each rank
    takes a contiguous slice. Raises DataError for ids outside their tables, ConfigError where an
    unlimited source has no `order`.
    """
    if order is None:
        if source.steps_per_epoch is None:
            raise ConfigError("the data is unlimited: say how many steps to replay")
        order = (("train", step) for step in range(source.steps_per_epoch))
    reader = {feature: i for i, table in enumerate(tables) for feature in table.features}
    if missing := [feature for feature in source.features if feature not in reader]:
        raise ConfigError(f"no table reads the features {missing}")
    read_by = [reader[feature] for feature in source.features]
    check = check or BatchCheck(tables, source.features, "error")
    groups = []  # of each a recorder, and for each of its features its place and first row
    for members in group_tables(tables):
        layout = RowLayout([tables[i] for i in members], 1)
        firsts = dict(zip(members, layout.offsets.tolist(), strict=False))
        own = [(feature, firsts[i]) for feature, i in enumerate(read_by) if i in firsts]
        groups.append((Recorder(layout.offsets, worlds, most_bytes), own))
    for kind, index in order:
        draw = source.train_batch if kind == "train" else source.eval_batch
        ids = check(draw(index, 0, 1)).ids
        for recorder, own in groups:
            recorder.add(partial(_rows_of, ids, own), kind == "train")
        if any(recorder.full for recorder, _ in groups):
            break
    return [recorder.finish() for recorder, _ in groups]


def _rows_of(
    ids: JaggedIds, features: Sequence[tuple[int, int]], rank: int, world: int
) -> np.ndarray:
    """The rows that a rank's samples name, int64, feature-major; `features`: the place of each,
    and the first row of its table."""
    values, offsets, batch = ids.values.numpy(), ids.offsets.numpy(), ids.batch_size
    low, high = slice_bounds(batch, rank, world)
    pieces = [
        values[offsets[place * batch + low] : offsets[place * batch + high]] + first
        for place, first in features
    ]
    return np.concatenate([np.empty(0, np.int64), *pieces])
