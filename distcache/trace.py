"""What a stream of ids asks of every home, step by step, found once; and the streams themselves."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from distcache.data.batch import BatchSource, check_ids, slice_bounds
from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout, TableSpec, group_tables
from distcache.planner.assemble import RowRequest, hashed_rows, make_request
from distcache.store.memory import available_memory, describe_bytes

# -----------------------------------------------------------------------------
# What a stream of ids asks of every home: its distinct rows step by step, found once.
#
# All that a cache does depends on these alone, so a trace is recorded once for each number of
# ranks and then replayed by as many cases as one likes (`replay`, `belady`).

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


def _distinct(requests: Sequence[RowRequest], home: int) -> tuple[np.ndarray, np.ndarray]:
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


# -----------------------------------------------------------------------------
# Traces of batch sources, as training reads them, and of files of ids.

Progress = Callable[[int], None]
"""Told the number of ids of every step that was read."""

_BLOCK = 1 << 22
"""Bytes of text, or ids of an array, read at a time."""


@dataclass(frozen=True)
class SourceGroup:
    """Tables of one width. `features`: places in the batches' order; `offsets`: first row of the
    table that each of them reads."""

    rows: int
    features: tuple[int, ...]
    offsets: np.ndarray


def record_source(
    source: BatchSource,
    tables: Sequence[TableSpec],
    worlds: Sequence[int] = (1,),
    order: Iterable[tuple[str, int]] | None = None,
    progress: Progress | None = None,
    most_bytes: int | None = None,
) -> list[Trace]:
    """The trace of each group of `tables` over the steps of `source`, read once.

    `order`: (`train` or `eval`, index) of the batches, as `run.schedule.Schedule.order` gives them;
    None: the training steps of one epoch. `most_bytes`: as `Recorder`'s, of each group. Batches
    are global ones, of which each rank takes a contiguous slice. Raises DataError for ids outside
    their tables, ConfigError where an unlimited source has no `order`.
    """
    if order is None:
        if source.steps_per_epoch is None:
            raise ConfigError("the data is unlimited: say how many steps to replay")
        order = (("train", step) for step in range(source.steps_per_epoch))
    groups = source_groups(source, tables)
    recorders = [Recorder(group.rows, worlds, most_bytes) for group in groups]
    reader = {feature: table for table in tables for feature in table.features}
    specs = [reader[feature] for feature in source.features]
    table_rows, names = [spec.rows for spec in specs], [spec.name for spec in specs]
    for kind, index in order:
        draw = source.train_batch if kind == "train" else source.eval_batch
        ids = check_ids(draw(index, 0, 1).ids, table_rows, names)
        values, offsets = ids.values.numpy(), ids.offsets.numpy()
        for group, recorder in zip(groups, recorders, strict=True):
            parts = {
                world: rows_by_rank(group, values, offsets, ids.batch_size, world)
                for world in recorder.worlds
            }
            recorder.add(parts, kind == "train")
        if progress is not None:
            progress(len(values))
        if any(recorder.full for recorder in recorders):
            break
    return [recorder.finish() for recorder in recorders]


def source_groups(source: BatchSource, tables: Sequence[TableSpec]) -> list[SourceGroup]:
    reader = {feature: i for i, table in enumerate(tables) for feature in table.features}
    missing = [feature for feature in source.features if feature not in reader]
    if missing:
        raise ConfigError(f"no table reads the features {missing}")
    groups = []
    for members in group_tables(tables):
        layout = RowLayout([tables[i] for i in members], 1)
        own = [i for i, feature in enumerate(source.features) if reader[feature] in members]
        at = [members.index(reader[source.features[i]]) for i in own]
        groups.append(SourceGroup(layout.rows, tuple(own), layout.offsets[at]))
    return groups


def rows_by_rank(
    group: SourceGroup, values: np.ndarray, offsets: np.ndarray, batch: int, world: int
) -> list[np.ndarray]:
    """The rows of a group that each rank names: its samples, feature-major; int64."""
    parts = []
    for rank in range(world):
        low, high = slice_bounds(batch, rank, world)
        pieces = [
            values[offsets[f * batch + low] : offsets[f * batch + high]] + first
            for f, first in zip(group.features, group.offsets, strict=True)
        ]
        parts.append(np.concatenate([np.empty(0, np.int64), *pieces]))
    return parts


def record_ids(
    steps: Iterable[np.ndarray],
    rows: int | None = None,
    worlds: Sequence[int] = (1,),
    progress: Progress | None = None,
    most_bytes: int | None = None,
) -> Trace:
    """The trace of steps of ids, int64 `[n]`, of one table of `rows` rows (None: as many as the
    ids need). Each of W ranks takes a contiguous part of a step. Raises DataError for an id outside
    the table."""
    recorder = Recorder(rows, worlds, most_bytes)
    for step, given in enumerate(steps):
        ids = np.ascontiguousarray(given, dtype=np.int64)
        outside = (ids < 0) | (ids >= rows) if rows is not None else ids < 0
        if outside.any():
            bad = int(ids[outside.argmax()])
            of = "ids are not negative" if rows is None else f"the table has {rows} rows"
            raise DataError(f"step {step} of the trace has the id {bad}: {of}")
        parts = {world: _parts(ids, world) for world in recorder.worlds}
        recorder.add(parts)
        if progress is not None:
            progress(len(ids))
        if recorder.full:
            break
    return recorder.finish()


def _parts(ids: np.ndarray, world: int) -> list[np.ndarray]:
    return [ids[slice(*slice_bounds(len(ids), rank, world))] for rank in range(world)]


def read_steps(path: str | Path, ids_per_step: int | None = None) -> Iterator[np.ndarray]:
    """The steps of a file of ids, int64 `[n]` each, read as they are asked for.

    A `.npy` file of integers, `[steps, n]`, or `[ids]` with `ids_per_step`; any other file is text,
    ids separated by blanks, a step to a line. With `ids_per_step` lines and rows mean nothing: that
    many ids make a step (the last one may have fewer). Raises DataError for an empty file and for
    what is no id, naming place and value.
    """
    if ids_per_step is not None and ids_per_step < 1:
        raise ConfigError(f"{ids_per_step} ids per step: give at least 1")
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{file}: there is no such file of ids")
    blocks = _array_blocks(file, ids_per_step) if file.suffix == ".npy" else _text_blocks(file)
    if ids_per_step is not None:
        blocks = _cut(blocks, ids_per_step)
    empty = True
    for ids in blocks:
        empty = empty and not len(ids)
        yield ids
    if empty:
        raise DataError(f"{file} has no ids: there is nothing to replay")


def _cut(blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same ids in steps of `size`."""
    kept: list[np.ndarray] = []
    count = 0
    for block in blocks:
        kept.append(block)
        count += len(block)
        if count < size:
            continue
        joined = np.concatenate(kept)
        whole = count // size * size
        yield from joined[:whole].reshape(-1, size)
        kept, count = [joined[whole:]], count - whole
    if count:
        yield np.concatenate(kept)


def _array_blocks(file: Path, ids_per_step: int | None) -> Iterator[np.ndarray]:
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DataError(f"{file} is not an array of ids ({error})") from error
    if ids.dtype.kind not in "iu":
        first = f", its first value is {ids.reshape(-1)[0]}" if ids.size else ""
        raise DataError(f"{file} holds {ids.dtype}{first}: ids are integers (int64)")
    if ids.ndim != 2 and (ids.ndim != 1 or ids_per_step is None):
        raise DataError(
            f"{file} has shape {list(ids.shape)}: give [steps, ids], or [ids] and how many ids "
            "make a step"
        )
    rows = ids if ids_per_step is None else ids.reshape(-1)
    size = 1 if ids_per_step is None else _BLOCK
    for start in range(0, len(rows), size):
        block = np.asarray(rows[start : start + size]).reshape(-1)
        if block.dtype == np.uint64 and len(block) and block.max() > np.iinfo(np.int64).max:
            raise DataError(f"{file} holds {block.max()}: ids are int64")
        block = block.astype(np.int64)
        if len(block) and block.min() < 0:
            place = start * (1 if ids.ndim == 1 or ids_per_step else ids.shape[1])
            place += int((block < 0).argmax())
            raise DataError(f"{file}: id {place} is {block.min()}: ids are not negative")
        yield block


_IDS = re.compile(rb"[0-9\s]*")


def _text_blocks(file: Path) -> Iterator[np.ndarray]:
    """The ids of each line; an empty line is a step without ids."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            tokens = line.split()
            bad = None if _IDS.fullmatch(line) else _first_bad(tokens)
            if bad is None:
                try:
                    yield np.fromiter(map(int, tokens), np.int64, len(tokens))
                    continue
                except OverflowError:
                    bad = max(tokens, key=int)
            shown = bad.decode(errors="replace")
            raise DataError(f"{file}, line {number}: {shown!r} is not an id (an integer >= 0)")


def _first_bad(tokens: Sequence[bytes]) -> bytes | None:
    return next((token for token in tokens if not token.isdigit()), None)
