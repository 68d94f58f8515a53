"""Tables as a whole, by all ranks in the main thread while nothing trains: read and loaded in
original ids."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import metadata, planner

from distcache.comm.link import ROWS, host_link, run_on_all_ranks
from distcache.comm.world import World
from distcache.engine.movement import GroupRows, joined_rows, marked_ids, parted_rows
from distcache.errors import DistcacheError, PlanError
from distcache.layout import TableSpec
from distcache.ops.reference import as_numpy
from distcache.optim import RowUpdate
from distcache.store.memory import describe_bytes, require_memory, share_memory, tensor_in
from distcache.store.old_rows import OldRows, read_old
from distcache.store.rows import Rows, RowStore, initial_rows, put_block
from distcache.store.table_files import Stored

# -----------------------------------------------------------------------------
# Rows of whole tables on several nodes, where each node's store holds those at home on its ranks.
#
# Every rank knows which rows every rank wants, so no ids travel: the ranks that home them send
# them over the host group. Rows at home on a rank's own node it reads from its store itself.

BLOCK_BYTES = 16 << 20
"""About how many bytes of a table one exchange brings to a rank."""


class RowExchange:
    """Rows of table `place` of `store`'s layout to the ranks that want them, and back.

    `ids[r]`: the ids of rank r, the same on all ranks. This rank sends `_sent`, of its home, to
    ranks of other nodes, by receiver, `_sends` to each; of the rows that it wants those at `_near`
    are its node's (`_near_rows`), and those at `_far` arrive in this order, `_receives` from each.
    """

    def __init__(self, world: World, store: RowStore, place: int, ids: Sequence[range]) -> None:
        self._store, self._link = store, host_link(world)
        mine = range(world.first_local, world.first_local + world.local_size)
        wanted = [row_numbers(store, place, part) for part in ids]
        parts = [
            rows[:0] if rank in mine else rows[store.layout.home(rows) == world.rank]
            for rank, rows in enumerate(wanted)
        ]
        self._sent = torch.from_numpy(np.concatenate(parts))
        own = wanted[world.rank]
        homes = store.layout.home(own)
        inside = (homes >= mine.start) & (homes < mine.stop)
        far = np.flatnonzero(~inside)
        self._near, self._near_rows = np.flatnonzero(inside), torch.from_numpy(own[inside])
        self._far = far[np.argsort(homes[far], kind="stable")]
        self._sends = [len(part) for part in parts]
        self._receives = np.bincount(homes[far], minlength=world.size).tolist()

    def bring(self) -> Rows:
        """Weights `[m, D]` and state `[m, S]` (None where S = 0) of this rank's ids."""
        sent = joined_rows(*self._store.gather(self._sent))
        arrived = self._travelled(sent, self._sends, self._receives)
        near = joined_rows(*self._store.gather(self._near_rows))
        found = near.new_empty((len(self._near) + len(self._far), near.shape[1]))
        found[self._near], found[self._far] = near, arrived
        return parted_rows(found, self._store.kind)

    def put(self, values: Rows) -> None:
        """Write this rank's values of its ids to the stores of their homes.

        The reverse of `bring`; no id may be in two ranks' ranges. The rows are there once all
        ranks have returned.
        """
        joined = joined_rows(*values)
        arrived = self._travelled(joined[self._far], self._receives, self._sends)
        for rows, own in ((self._sent, arrived), (self._near_rows, joined[self._near])):
            weight, state = parted_rows(own, self._store.kind)
            state = None if state is None else state.contiguous()
            self._store.scatter(rows, weight.contiguous(), state)

    def _travelled(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """What comes to this rank, which sends these."""
        return self._link.start_all_to_all(rows, sends, receives, ROWS, "rows of tables")()


def shares(rows: int, parts: int) -> list[range]:
    """`rows` ids in `parts` contiguous ranges of about equal length."""
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def blocks(ranges: Sequence[range], row_bytes: int) -> Iterator[list[range]]:
    """Block after block of all `ranges`; those of a range that has ended are empty."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    longest = max((len(part) for part in ranges), default=0)
    for start in range(0, longest, step):
        yield [part[start : start + step] for part in ranges]


def row_numbers(store: RowStore, place: int, ids: range) -> np.ndarray:
    """The layout's numbers of ids of its table `place`, int64."""
    offset = int(store.layout.offsets[place])
    return np.arange(offset + ids.start, offset + ids.stop)


# -----------------------------------------------------------------------------
# Whole tables in original ids: views where this node has all of their rows, else shards over the
# nodes, or copies.

Part = tuple[int, slice, Tensor]
"""Index of a table, columns, their new values `[rows, columns]`."""

CHANGED = "changed."
"""What begins the names of rows of a value that changed, and of their ids, `changed.tables.<name>.`
and `weight`, a state or `ids`."""


@dataclass(frozen=True)
class ChangedRows:
    """This rank's part of the changed rows of a table's value, or of their ids: of the rows at home
    here, read when they are written.

    `of`: the value (None: the ids themselves); `ids`: of this rank's rows, int64 `[m]`, ascending;
    `first`: how many rows those of the ranks before are; `size`, `dtype`: of all ranks' rows;
    `read`: ids, any of these, to their rows.
    """

    of: str | None
    ids: np.ndarray
    first: int
    size: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[np.ndarray], Tensor]

    def __create_write_items__(self, name: str, own: Any) -> list[planner.WriteItem]:
        """What `torch.distributed.checkpoint` asks of an object that is written as a tensor."""
        count, rest = len(self.ids), [0] * (len(self.size) - 1)
        if not count:
            return []
        offsets = torch.Size([self.first, *rest])
        chunk = metadata.ChunkStorageMetadata(offsets, torch.Size([count, *self.size[1:]]))
        about = metadata.TensorProperties(dtype=self.dtype)
        data = planner.TensorWriteData(chunk, about, torch.Size(self.size))
        index = metadata.MetadataIndex(name, offsets)
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)]


_WAY_OUT = (
    "each node holds a copy of the whole tables while they are read this way: use nodes with more "
    "memory, or `distcache.fit`, whose checkpoints are written from each node's part"
)


class FullTables:
    """Whole tables, where nothing is newer in the cache; every method is called by all ranks, but
    for what says otherwise."""

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        groups: Sequence[GroupRows],
        update: RowUpdate,
    ) -> None:
        self._world, self._tables, self._update = world, tables, update
        self._groups = list(groups)
        self._is_split = world.nodes.count > 1 and groups[0].store is not None

    def _find(self, table: int) -> tuple[GroupRows, int]:
        """The rows of a table's group, and its index there."""
        rows = next(rows for rows in self._groups if table in rows.group.tables)
        return rows, rows.group.tables.index(table)

    def _store(self, table: int) -> tuple[RowStore, int]:
        """A table's store and its index there; PlanError where rows are on the devices alone."""
        rows, place = self._find(table)
        if rows.store is None:
            raise PlanError(f"table {table} has no store")
        return rows.store, place

    def local(self, table: int) -> tuple[Tensor, Tensor | None]:
        """Views of a table's weights and state; local, where this node has all of its rows."""
        rows, place = self._find(table)
        if rows.store is not None:
            return rows.store.table(place)
        start, stop = (int(at) for at in rows.group.layout.offsets[place : place + 2])
        state = rows.cache.state
        return rows.cache.weight[start:stop], None if state is None else state[start:stop]

    def block(self, table: int, ids: range) -> Tensor | None:
        """Rows `ids` of a table, `[n, D]` on the CPU, on rank 0; None or the same on others."""
        if not self._is_split:
            return self.local(table)[0][ids.start : ids.stop].cpu()
        wanted = [ids, *[range(0)] * (self._world.size - 1)]
        found = RowExchange(self._world, *self._store(table), wanted).bring()[0]
        return found if self._world.is_first else None

    # --- checkpoints: on several nodes each rank has an equal range of every table's ids, in
    # temporary files on disk, so that host memory does not hold the tables twice ---------------

    def state(
        self, scratch: Path | None = None, filled: bool = True, since: int | None = None
    ) -> dict[str, Any]:
        """`tables.<name>.weight` `[rows, D]` and `tables.<name>.<state>` of all tables, for
        `torch.distributed.checkpoint`.

        Views of the store on one node, of which each row is written by one of the ranks, and read,
        where not `filled`, by the first, which alone names them then; ranks with copies of their
        own (`resident`) all name and read them. On several
        nodes shards in files under `scratch` (the system's folder for them, where it is None or not
        there), with the rows' values where `filled`, else with zeros, to be loaded into. Raises
        DistcacheError where a disk does not hold this rank's part.

        `since`: a mark; a table of whose rows fewer bytes changed since has these alone, as
        `ChangedRows`, and one of which none did has nothing.
        """
        state, whole = dict[str, Any](), list(range(len(self._tables)))
        if since is not None:
            state, whole = self._changed(since)
        if self._is_split:
            run_on_all_ranks(self._world, lambda: state.update(self._allocate(whole, scratch)))
            for index in whole:
                if filled:
                    self._read(index, state)
                for name in self._columns(index):
                    state[name] = self._as_sharded(index, state[name])
        elif self._groups[0].store is None or filled or not self._world.local_rank:
            for index in whole:
                values = self.local(index)
                for name, (is_state, columns) in self._columns(index).items():
                    if (found := values[is_state]) is not None:
                        state[name] = found[:, columns] if is_state else found
        return state

    def _changed(self, mark: int) -> tuple[dict[str, Any], list[int]]:
        """The tables of which fewer bytes changed than they have: `ChangedRows` of their values by
        name; and the indices of the others."""
        own, world = dict[int, np.ndarray](), self._world
        for rows in self._groups:
            ids = marked_ids(rows.group.layout, world.rank, rows.marks[mark])
            own |= dict(zip(rows.group.tables, ids, strict=True))
        counts = run_on_all_ranks(world, lambda: {index: len(ids) for index, ids in own.items()})
        state, whole = dict[str, Any](), list[int]()
        for index, table in enumerate(self._tables):
            kind, ids = self._store(index)[0].kind, own[index]
            first = sum(of_rank[index] for of_rank in counts[: world.rank])
            total, row_bytes = sum(of_rank[index] for of_rank in counts), kind.nbytes
            if total * (row_bytes + ids.itemsize) >= table.rows * row_bytes:
                whole.append(index)
            elif total:
                of_ids = (ids, first, (total,), torch.int64, torch.from_numpy)
                state[f"{CHANGED}tables.{table.name}.ids"] = ChangedRows(None, *of_ids)
                for name, (is_state, at) in self._columns(index).items():
                    size, dtype = (total, at.stop - at.start), kind.dtypes[is_state]
                    of_rows = (ids, first, size, dtype, partial(self.rows, name))
                    state[CHANGED + name] = ChangedRows(name, *of_rows)
        return state, whole

    def rows(self, name: str, ids: np.ndarray) -> Tensor:
        """A copy of rows `ids`, int64 `[m]`, of a value of `state`, `[m, columns]`; local, by any
        thread. Raises PlanError for rows at home on another node."""
        group, first, state, columns = self.source(name)
        store = self._groups[group].store
        table = None if store is None else store.state if state else store.weight
        if store is None or table is None:
            raise PlanError(f"{name} lies in no store")
        found = as_numpy(table)[:, columns][store.part.places(first + ids)]
        return torch.from_numpy(found).view(table.dtype)

    def source(self, name: str) -> tuple[int, int, bool, slice]:
        """Of a value of `state`: its group, the number there of its first row (on one node its
        place in the store), whether it is state, and which columns of that, or of the weights."""
        for table in range(len(self._tables)):
            if own := self._columns(table).get(name):
                rows, place = self._find(table)
                return self._groups.index(rows), int(rows.group.layout.offsets[place]), *own
        raise PlanError(f"{name} is no value of a table")

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Bring what `state` gave and a load filled to the stores; views have it already."""
        for index in range(len(self._tables) if self._is_split else 0):
            store, place = self._store(index)
            parts = [state[name].local_shards() for name in self._columns(index)]
            for number, ids in enumerate(blocks(self._shares(index), store.kind.nbytes)):
                rows = store.kind.parts(torch.empty(0, dtype=torch.uint8))
                if len(ids[self._world.rank]):
                    weight, *of_state = (shards[number].tensor for shards in parts)
                    rows = weight, torch.cat(of_state, dim=1) if of_state else None
                RowExchange(self._world, store, place, ids).put(rows)
        run_on_all_ranks(self._world, lambda: None)

    def _shares(self, table: int) -> list[range]:
        return shares(self._tables[table].rows, self._world.size)

    def _columns(self, table: int) -> dict[str, tuple[bool, slice]]:
        """The names of a table's values, and of each whether it is state, and its columns of that,
        or of the weights."""
        spec = self._tables[table]
        found = {f"tables.{spec.name}.weight": (False, slice(0, spec.dim))}
        for name, columns in self._update.state_columns(spec.dim).items():
            found[f"tables.{spec.name}.{name}"] = True, columns
        return found

    def _allocate(self, tables: Sequence[int], folder: Path | None) -> dict[str, Tensor]:
        """Zeros for this rank's ids of these tables, `[n, width]` by name."""
        found = {}
        for index in tables:
            count, kind = len(self._shares(index)[self._world.rank]), self._store(index)[0].kind
            for name, (is_state, at) in self._columns(index).items():
                size = count, at.stop - at.start
                found[name] = disk_zeros(size, kind.dtypes[is_state], folder)
        return found

    def _read(self, table: int, own: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of a table, its values by name, from all homes."""
        (store, place), at = self._store(table), 0
        for ids in blocks(self._shares(table), store.kind.nbytes):
            rows = RowExchange(self._world, store, place, ids).bring()
            for name, (is_state, columns) in self._columns(table).items():
                if (values := rows[is_state]) is not None:
                    own[name][at : at + len(values)] = values[:, columns]
            at += len(rows[0])

    def _as_sharded(self, table: int, part: Tensor) -> ShardedTensor:
        """This rank's rows `part` as blocks of the whole table's."""
        world, ids, shards = self._world, self._shares(table)[self._world.rank], []
        for (block,) in blocks([ids], self._store(table)[0].kind.nbytes):
            rows = part[block.start - ids.start : block.stop - ids.start]
            shards.append(Shard.from_tensor_and_offsets(rows, [block.start, 0], world.rank))
        size = (self._tables[table].rows, part.shape[1])
        return init_from_local_shards(shards, *size, process_group=world.host_group)

    # --- a loop of one's own -------------------------------------------------------------------

    def views(
        self, states: bool = False
    ) -> Iterator[tuple[TableSpec, tuple[Tensor | None, Tensor | None]]]:
        """Each table with its weights `[rows, D]` and state `[rows, S]`.

        Views of the store on one node. On several nodes no store has a whole table: copies as of
        now, one on each node, that its ranks share; and of weights and `states` only what was
        asked for, the other is None. Raises MemoryTooSmallError where a node does not hold them.
        """
        for index, table in enumerate(self._tables):
            store, place = self._store(index)
            if store.part.is_whole:
                yield table, store.table(place)
            else:
                copy = self._copy(store, place, states)
                yield table, (None, copy) if states else (copy, None)

    def change_initial(self, table: int, seed: int, change: Callable[[Tensor], None]) -> None:
        """Let `change` have its way with a table's initial weights, `[rows, D]`; local, for the
        first rank of each node, before anything was trained.

        On several nodes with a whole table drawn anew, of which the node keeps its rows.
        """
        store, place = self._store(table)
        if store.part.is_whole:
            change(store.table(place)[0])
            return
        spec = self._tables[table]
        require_memory(
            spec.rows * store.kind.bytes_of(1, 0),
            f"the initial rows of table {spec.name!r}",
            "initialise it as its config does by itself, or use nodes with more memory",
        )
        drawn = initial_rows(seed, table, spec.rows, spec.dim, 0, spec.rows)
        drawn = drawn.to(store.kind.stored)
        change(drawn)
        _write_table(store, place, slice(None), drawn, False)

    def spread(self, table: int, values: Tensor) -> None:
        """Let a table have rank 0's `values`, `[rows, D]`, as weights; nothing may be cached."""
        (store, place), world = self._store(table), self._world
        if store.part.is_whole:
            run_on_all_ranks(world, lambda: world.is_first and store.table(place)[0].copy_(values))
            return
        wanted = [range(len(values)), *[range(0)] * (world.size - 1)]
        for ids in blocks(wanted, store.kind.nbytes):
            own, exchange = ids[world.rank], RowExchange(world, store, place, ids)
            state = exchange.bring()[1]
            exchange.put((values[own.start : own.stop].to(store.kind.stored), state))
        run_on_all_ranks(world, lambda: None)

    def fill(self, table: int, source: Stored) -> None:
        """Let the first rows of a table have the weights of `source`, `[rows, D]`; nothing may be
        cached then. The ranks of a node share the reading."""
        (rows, place), world = self._find(table), self._world
        first, ranges = int(rows.group.layout.offsets[place]), source.ranges()
        put = partial(put_block, rows.cache.weight)  # `resident`: a copy on every rank
        if rows.store is not None:
            put, ranges = rows.store.put, ranges[world.local_rank :: world.local_size]

        def write() -> None:
            for ids in ranges:
                block = source.block(ids.start, ids.stop).to(rows.cache.kind.dtype)
                put(first + ids.start, block.numpy())

        self.note_range(table, range(source.shape[0]))
        with torch.no_grad():
            run_on_all_ranks(world, write)

    def note_range(self, table: int, ids: range) -> None:
        """Tell the marks of rows that are written by hand."""
        rows, _ = self._find(table)
        for (part,) in blocks([ids], 64) if rows.marks else ():
            self.note(table, np.arange(part.start, part.stop))

    def note(self, table: int, ids: np.ndarray, mark: int | None = None) -> None:
        """Let all marks, or this one, have it that the `ids` of a table, int64 `[m]`, changed;
        local."""
        rows, place = self._find(table)
        layout = rows.group.layout
        numbers = layout.offsets[place] + ids
        rows.note(torch.from_numpy(numbers[layout.home(numbers) == self._world.rank]), mark)

    def replace(self, parts: Sequence[Part], is_state: bool) -> None:
        """Let columns of whole tables, of their weights or their state, be `parts`; nothing may be
        cached then."""

        def write() -> None:
            if self._world.local_rank:
                return
            for index, columns, value in parts:
                store, place = self._store(index)
                if not store.part.is_whole:
                    _write_table(store, place, columns, value, is_state)
                    continue
                target = store.table(place)[is_state]
                if target is not None and target.data_ptr() != value.data_ptr():
                    target[:, columns].copy_(value)

        for index, _, value in parts:
            self.note_range(index, range(len(value)))
        with torch.no_grad():
            run_on_all_ranks(self._world, write)

    def _copy(self, store: RowStore, place: int, states: bool) -> Tensor | None:
        """A whole table's weights, or its state, in memory that this node's ranks share."""
        world, spec = self._world, store.layout.tables[place]
        width, dtype = store.state_width if states else spec.dim, store.kind.dtypes[states]
        if not width:
            return None
        size = spec.rows * width * dtype.itemsize
        memory = share_memory(size, world, f"a copy of table {spec.name!r}", _WAY_OUT)
        copy = tensor_in(memory, 0, (spec.rows, width), dtype)
        # The ranks of each node bring a part of the table each: every row to every node.
        ranges = [part for count in world.nodes.sizes for part in shares(spec.rows, count)]
        for ids in blocks(ranges, store.kind.nbytes):
            own, found = ids[world.rank], RowExchange(world, store, place, ids).bring()[states]
            if found is not None:
                copy[own.start : own.stop] = found
        run_on_all_ranks(world, lambda: None)
        return copy


def _write_table(
    store: RowStore, place: int, columns: slice, values: Tensor, is_state: bool
) -> None:
    """Columns of a whole table's `values` `[rows, columns]` to the rows that this node has."""
    for (ids,) in blocks([range(len(values))], store.kind.bytes_of(1, 0)):
        own = values[ids.start : ids.stop]
        _write(store, row_numbers(store, place, ids), columns, own, is_state)


def _write(
    store: RowStore, numbers: np.ndarray, columns: slice, values: Tensor, is_state: bool
) -> None:
    """The same for rows by the layout's `numbers`, int64 `[m]`."""
    target, own = store.state if is_state else store.weight, store.part.holds(numbers)
    if target is not None:
        places = torch.from_numpy(store.part.places(numbers[own]))
        target[places, columns] = values[torch.from_numpy(own)].to(target)


def disk_zeros(shape: tuple[int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Zeros in an unnamed temporary file under `folder`, gone with the tensor (or the process).

    Raises DistcacheError where the disk has no room for it.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    where = folder if folder is not None and folder.is_dir() else Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            try:  # a full disk would otherwise show as a bus error, at the first touch
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
            memory = np.memmap(file, np.uint8, "w+", shape=size)
            return torch.from_numpy(memory).view(dtype).view(shape)
    except OSError as error:
        raise DistcacheError(
            f"{where} does not hold this rank's part of a table for a checkpoint, "
            f"{describe_bytes(size)}: {error.strerror}; make room there, or use more "
            "nodes"
        ) from error


# -----------------------------------------------------------------------------
# Tables as they were when a snapshot began, read while training goes on.


class Snapshot:
    """The tables of one node as they are when this is made: after a flush, while nothing moves, by
    all ranks.

    `folder`: for old rows, there already, without any, and seen by all ranks of the node; `block`
    may be called by any thread until all ranks have called `close`. `hurry`: set where training
    waits for whoever reads.
    """

    def __init__(self, folder: Path, groups: Sequence[GroupRows], whole: FullTables) -> None:
        self._folder, self._whole, self._groups = folder, whole, list(groups)
        self.hurry = threading.Event()
        for at, rows in enumerate(self._groups):
            if rows.store is not None:
                rows.old = OldRows(folder, at, rows.link.world.rank, rows.store)

    def block(self, name: str, ids: np.ndarray, now: Tensor) -> Tensor:
        """Rows `ids`, int64 `[m]`, ascending, of the value `name` of `FullTables.state`, as they
        were; `now`: as they are, `[m, columns]`, a view of the store, or read just before."""
        group, first, state, columns = self._whole.source(name)
        store = self._groups[group].store
        if store is None:
            raise DistcacheError(f"{name} lies on the device: it has no snapshot")
        # NumPy: torch would start a pool of threads for this one, beside that of training.
        block = as_numpy(now).copy()
        places = first + ids
        ends = int(places[0]), int(places[-1]) + 1
        for changed, values in read_old(self._folder, group, store, *ends, state):
            at = np.searchsorted(places, changed)
            own = places[at] == changed
            block[at[own]] = values[own, columns]
        return torch.from_numpy(block).view(now.dtype)

    @property
    def error(self) -> OSError | None:
        """Why some row of this rank could not be kept: what `block` gives is worth nothing then."""
        kept = [rows.old.error for rows in self._groups if rows.old is not None]
        return next((error for error in kept if error is not None), None)

    def close(self) -> None:
        """Let go of the old rows; safe to call twice."""
        for rows in self._groups:
            if rows.old is not None:
                rows.old.close()
            rows.old = None
