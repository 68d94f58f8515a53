"""What a stream of ids asks of every home: its distinct rows step by step, found once.

All that a cache does depends on these alone, so a trace is recorded once for each number of ranks
and then replayed by as many cases as one likes (`replay`, `belady`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.assemble import Request, make_request
from distcache.planner.calls import hashed_rows
from distcache.store.available import available_memory, describe_bytes

log = logging.getLogger(__name__)

_MOST = 2**31 - 1
"""Rows of one home are int32 in the planner's index."""

_SHARE = 0.5
"""A trace takes at most this share of the memory that can be had when recording starts."""


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

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.names, self.starts, self.numbers, self.counts)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class Trace:
    """A stream of one group of tables. Memory: 8 bytes per distinct row of every step and for
    every number of ranks recorded, and 12 per distinct row of all steps.

    `rows`: V; `ids`: lookups of the training steps; `training` bool `[steps]`: whether a step
    trains (False: it evaluates); `homes`: the homes of each number of ranks W; `complete`: False
    where recording ended early for want of memory.
    """

    rows: int
    ids: int
    training: np.ndarray
    homes: Mapping[int, tuple[HomeTrace, ...]]
    complete: bool = True

    @property
    def steps(self) -> int:
        """Steps recorded, evaluations among them."""
        return len(self.training)

    @property
    def nbytes(self) -> int:
        """Bytes of all homes."""
        return sum(home.nbytes for homes in self.homes.values() for home in homes)

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


@dataclass
class _Home:
    """A home while it is recorded. `number`: of each local row, from 1; 0: not named yet. Pages of
    it that no row needs are never touched."""

    number: np.ndarray
    names: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    found: int = 0

    def add(self, rows: np.ndarray, local: np.ndarray, counts: np.ndarray) -> None:
        numbers = self.number[local]
        new = np.flatnonzero(numbers == 0)
        numbers[new] = np.arange(self.found + 1, self.found + 1 + len(new), dtype=np.int32)
        self.number[local[new]] = numbers[new]
        self.found += len(new)
        self.names.append(rows[new])
        self.numbers.append(numbers - 1)
        self.counts.append(counts)

    def finish(self) -> HomeTrace:
        starts = np.zeros(len(self.numbers) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in self.numbers], out=starts[1:])
        names, numbers, counts = (
            np.concatenate([np.empty(0, dtype), *parts])
            for dtype, parts in (
                (np.int64, self.names),
                (np.int32, self.numbers),
                (np.int32, self.counts),
            )
        )
        return HomeTrace(names, starts, numbers, counts)


class Recorder:
    """Records steps of ids as a `Trace`; finding distinct rows is what the planner does.

    `rows`: V, or None where only the ids will tell; `worlds`: numbers of ranks. Raises ConfigError
    for a number of ranks below 1, or none.
    """

    def __init__(
        self, rows: int | None, worlds: Sequence[int] = (1,), most_bytes: int | None = None
    ) -> None:
        """`most_bytes` bounds what is recorded; None: half of the memory that can be had now."""
        if not worlds or min(worlds) < 1:
            raise ConfigError(f"world sizes {list(worlds)}: give at least one, all of at least 1")
        if rows is not None and rows > _MOST:
            raise ConfigError(f"{rows} rows: plans number the rows of a home up to {_MOST}")
        self.rows, self.full = rows, False
        self.most_bytes = int(available_memory() * _SHARE) if most_bytes is None else most_bytes
        self._layouts = {world: _layout(rows or _MOST, world) for world in sorted(set(worlds))}
        self._homes = {
            world: [
                _Home(np.zeros(layout.local_rows if rows else 1024, np.int32)) for _ in range(world)
            ]
            for world, layout in self._layouts.items()
        }
        self._training: list[bool] = []
        self._ids = self._bytes = self._largest = 0

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks that are recorded."""
        return tuple(self._layouts)

    def add(self, rows: Mapping[int, Sequence[np.ndarray]], training: bool = True) -> None:
        """Record a step: for each number of ranks, the rows that each rank names, int64 `[n]`.

        Once `full` is true, do not go on: what follows would not fit.
        """
        named = rows[self.worlds[0]]
        ids = sum(len(part) for part in named)
        self._largest = max([self._largest, *(int(part.max()) for part in named if len(part))])
        if self.rows is None and self._largest >= _MOST:
            raise DataError(f"id {self._largest}: a trace takes ids up to {_MOST - 1}: renumber")
        for world, layout in self._layouts.items():
            requests = [make_request(layout, part) for part in rows[world]]
            for home, recorded in enumerate(self._homes[world]):
                distinct, counts = _distinct(requests, home)
                local = layout.local(distinct)
                if self.rows is None and len(local):
                    recorded.number = _grown(recorded.number, int(local.max()) + 1)
                before = recorded.found
                recorded.add(distinct, local, counts)
                self._bytes += 8 * len(distinct) + 12 * (recorded.found - before)
        self._training.append(training)
        self._ids += ids if training else 0
        if self._bytes > self.most_bytes and not self.full:
            self.full = True
            log.warning(
                "the trace ends after %d steps: its distinct rows take %s, at most %s are "
                "used; give fewer steps or world sizes, or larger batches",
                len(self._training),
                describe_bytes(self._bytes),
                describe_bytes(self.most_bytes),
            )

    def finish(self) -> Trace:
        """What was recorded; the recorder is of no use afterwards. Raises DataError if nothing."""
        if not self._ids:
            raise DataError("the trace has no id in any training step: there is nothing to replay")
        homes = {}
        for world in self.worlds:
            parts = self._homes.pop(world)
            homes[world] = tuple(parts.pop(0).finish() for _ in range(world))
        rows = self._largest + 1 if self.rows is None else self.rows
        return Trace(rows, self._ids, np.array(self._training), homes, not self.full)


def _layout(rows: int, world: int) -> RowLayout:
    return RowLayout([TableSpec("trace", rows, 1, ("trace",))], world)


def _distinct(requests: Sequence[Request], home: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of a step at one home in canonical order, and how many ids name each."""
    named = [request.rows[home] for request in requests]
    rows, labels = hashed_rows(np.concatenate(named) if len(named) > 1 else named[0])
    if requests[0].labels is None:
        return rows, np.bincount(labels, minlength=len(rows)).astype(np.int32)
    weights = []
    for request in requests:
        low = sum(request.counts[:home])
        occurrences = np.empty(sum(request.counts), np.int64)
        if request.labels is not None and request.places is not None:
            occurrences[request.places] = np.bincount(request.labels, minlength=len(occurrences))
        weights.append(occurrences[low : low + request.counts[home]])
    counts = np.bincount(labels, np.concatenate(weights), len(rows))
    return rows, counts.astype(np.int32)


def _grown(number: np.ndarray, size: int) -> np.ndarray:
    """`number` with at least `size` entries, new ones 0."""
    if size <= len(number):
        return number
    grown = np.zeros(max(size, 2 * len(number)), np.int32)
    grown[: len(number)] = number
    return grown
