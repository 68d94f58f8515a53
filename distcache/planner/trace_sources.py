"""Traces of batch sources, as training reads them, and of files of ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcache.data.batch import BatchSource, slice_bounds
from distcache.data.check import check_ids
from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout, TableSpec, group_tables
from distcache.planner.trace import Recorder, Trace

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
