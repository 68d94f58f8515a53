"""Tables as a whole, by all ranks in the main thread while nothing trains: made before the first
step, filled with the likeliest rows, read and loaded in original ids."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

from distcache.cache import DeviceCache
from distcache.comm.agreement import together
from distcache.comm.link import ROWS, CollectiveCounters, Link, host_link
from distcache.comm.rendezvous import record_failure
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.groups import (
    RegionSlots,
    TableGroup,
    TableSettings,
    region_slots,
    state_slots,
)
from distcache.engine.movement import GroupRows, MoveCounts
from distcache.engine.planning import Region, StreamPlanner, home_regions
from distcache.errors import DistcacheError
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.planner.home import PassThroughPlanner, ResidentPlanner
from distcache.popularity.statistics import GroupPopularity
from distcache.store.memory import describe_bytes, require_memory
from distcache.store.rows import (
    ZERO_COPY,
    Rows,
    RowStore,
    block_rows,
    create_stores,
    initial_rows,
)
from distcache.streams import COMPUTE, COPY_IN, Streams

log = logging.getLogger(__name__)

# -----------------------------------------------------------------------------
# What the tables are made of: stores, slots and planners.


def make_rows(
    groups: Sequence[TableGroup],
    update: RowUpdate,
    link: Link,
    settings: TableSettings,
    streams: Streams,
) -> list[GroupRows]:
    """Stores (one per node, initialised by its ranks) and device slots of every group."""
    world = link.world
    stores: Sequence[RowStore | None] = [None] * len(groups)
    slots = settings.slots
    if settings.mode == "resident":
        slots = [group.layout.rows for group in groups]
    else:
        stores = make_stores(world, groups, update, settings.dtype, settings.seed, settings.access)
    if settings.mode == "host":
        slots = [world.size] * len(groups)
    regions = [region_slots(group, count) for group, count in zip(groups, slots, strict=True)]
    caches: list[DeviceCache] = []
    make = partial(_make_caches, world, groups, regions, update, settings)
    together(world, lambda: caches.extend(make()))
    common = (update, link, streams, settings.prefetch)
    return [
        GroupRows(group, cache, store, *common, count)
        for group, cache, store, count in zip(groups, caches, stores, regions, strict=True)
    ]


def make_stores(
    world: World,
    groups: Sequence[TableGroup],
    update: RowUpdate,
    dtype: torch.dtype,
    seed: int,
    access: str,
) -> list[RowStore]:
    """The node's store of every group with its initial rows and state; called by all ranks.

    `access`: as `store.access`; with `zero_copy` the device reads and writes them in place.
    Raises MemoryTooSmallError on every rank where some host does not hold, or lock, its rows.
    """
    widths = [update.state_width(group.dim) for group in groups]
    stores = create_stores([group.layout for group in groups], widths, dtype, world)
    for group, store in zip(groups, stores, strict=True):
        store.initialise(seed, group.tables, update.initial_state(group.dim))
    if access == ZERO_COPY:

        def open_all() -> None:
            for store in stores:
                store.open_to(world.device)

        try:
            together(world, open_all)
        except BaseException:
            for store in stores:
                store.close()
            raise
    return stores


def _make_caches(
    world: World,
    groups: Sequence[TableGroup],
    slots: Sequence[RegionSlots],
    update: RowUpdate,
    settings: TableSettings,
) -> list[DeviceCache]:
    """A cache of `slots[g]` for every group; `resident` has every row in it."""
    stateful = [state_slots(count, world, settings.placed(world)) for count in slots]
    widths = [update.state_width(group.dim) for group in groups]
    if world.device.type == "cpu":  # pages come with their first touch: count all at once
        floats = 0
        for count, group, own, width in zip(slots, groups, stateful, widths, strict=True):
            with_state = count.all if own is None else own.rows(count.all)
            floats += count.all * group.dim + with_state * width
        require_memory(
            floats * settings.dtype.itemsize * world.local_size,
            f"the slots of {world.local_size} local ranks",
            "lower cache.rows (or cache.ratio, cache.bytes), use fewer ranks or more memory",
        )
    made = []
    for count, group, own, width in zip(slots, groups, stateful, widths, strict=True):
        size = (count.all, group.dim, width, settings.dtype, world.device)
        cache = DeviceCache(*size, state_slots=own, validate=settings.validate)
        if settings.mode == "resident":
            _initialise(group, cache, settings.seed, update.initial_state(group.dim))
        made.append(cache)
    return made


def _initialise(group: TableGroup, cache: DeviceCache, seed: int, state: float) -> None:
    """Every row in the slot of its own number, from the bits that a store would have."""
    size = block_rows(group.dim)
    for place, table in enumerate(group.tables):
        rows, offset = group.layout.tables[place].rows, int(group.layout.offsets[place])
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            block = initial_rows(seed, table, rows, group.dim, start, stop)
            cache.weight[offset + start : offset + stop] = block.to(cache.weight)
    if cache.state is not None:
        cache.state.fill_(state)
    cache.slot_row[:] = np.arange(group.layout.rows)


def make_planner(
    world: World,
    rows: Sequence[GroupRows],
    settings: TableSettings,
    prepare: Callable[[Batch], Batch],
    popular: Sequence[GroupPopularity],
) -> StreamPlanner:
    """The planner of this rank's homes; `prepare` checks a batch before it is planned."""
    layouts = [of.group.layout for of in rows]
    if settings.mode == "data":
        classes = [own.classes_at(of, world.rank) for own, of in zip(popular, layouts, strict=True)]
        placed = [(of.group, of.slots) for of in rows]
        regions = home_regions(placed, world.rank, settings.prefetch, settings.policy, classes)
    else:
        kind = ResidentPlanner if settings.mode == "resident" else PassThroughPlanner
        regions = [Region(at, kind(layout, world.rank)) for at, layout in enumerate(layouts)]
    # The planner's thread counts for itself, step by step.
    link = Link(world, world.planning_group, CollectiveCounters(), "the planning group")
    grows = settings.mode == "host"
    slots = [None if grows else of.cache.slots for of in rows]
    return StreamPlanner(link, [of.group for of in rows], regions, slots, settings, prepare)


# -----------------------------------------------------------------------------
# Warm start: the likeliest rows lie in the cache before the first step reads any.
#
# They come as a step's rows do, each from its home to all ranks, and are clean; the planner then
# goes on from what the slots hold. So a warm cache has the same numbers as a cold one, with fewer
# fetches.

_BLOCK = 1 << 14
"""Rows of one home that are brought at a time."""


def warm_up(
    hot: Sequence[np.ndarray | None],
    share: float,
    rows: Sequence[GroupRows],
    planner: StreamPlanner,
    streams: Streams,
    step: int,
) -> int:
    """Fill free caches, and have `planner` go on after `step`; called by all ranks.

    `hot`: for each group, rows int64 `[K]` by the layout's numbers, the likeliest first (-1: none),
    or None; `share`: of each home's slots that they may fill, 0 to 1. Nothing may be cached or on
    its way. Returns how many rows all homes brought, which count as no step's.
    """
    world, began = planner.link.world, time.perf_counter()
    if not (share > 0 and any(own is not None and len(own) for own in hot)):
        return 0
    group = rows[0].link.group
    link = Link(world, group, CollectiveCounters(), "the device group (warm start)")
    counts = MoveCounts()
    try:
        with torch.inference_mode(False), torch.no_grad():
            streams.after(COPY_IN, (streams.mark(COMPUTE),))
            with streams.on(COPY_IN):
                for of, own in zip(rows, hot, strict=True):
                    if own is not None:
                        _fill(of, own[own >= 0], share, link, counts)
                streams.wait(streams.mark(COPY_IN))
    except BaseException as error:  # the others wait for this rank's rows
        record_failure(world.store, world.rank, error)
        raise
    planner.restore(step, lambda place, slots: rows[place].held_rows(slots))
    brought = together(world, lambda: (counts.rows_fetched, counts.host_to_device_bytes))
    fetched, moved = (sum(values) for values in zip(*brought, strict=True))
    if world.is_first:
        log.info(
            "warm start: %d rows in %d slots, %s from host memory, %.2f s",
            fetched,
            sum(of.cache.slots for of in rows),
            describe_bytes(moved),
            time.perf_counter() - began,
        )
    return fetched


def _fill(rows: GroupRows, hot: np.ndarray, share: float, link: Link, counts: MoveCounts) -> None:
    """Bring the first of `hot` that each home has room for, block by block."""
    group, rank, slots, tail = rows.group, link.world.rank, rows.slots, hot[:0]
    if group.hot is not None:
        is_tail = ~np.isin(hot, group.hot)
        hot, tail = hot[~is_tail], hot[is_tail]
    for taken, parts in warm_blocks(group, hot, slots.replicated, share):
        own = torch.from_numpy(parts[rank])
        replicated = (torch.from_numpy(taken), [len(part) for part in parts], own)
        gathered = rows.gather_rows(own, counts)
        rows.fill_slots(gathered, replicated, None, link, "warm start")
    room = slots.own_sharded
    tail = tail[group.layout.home(tail) == rank][: int(share * (room.stop - room.start))]
    for start in range(0, len(tail), _BLOCK):
        own = torch.from_numpy(tail[start : start + _BLOCK])
        at = torch.from_numpy(room.stop - 1 - np.arange(start, start + len(own)))
        rows.fill_slots(rows.gather_rows(own, counts), None, (at, own), link, "warm start")


def warm_blocks(
    group: TableGroup, hot: np.ndarray, slots: int, share: float
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Block after block of replicated rows `hot` (int64, by the layout's numbers, the likeliest
    first): their slots, by home, and each home's rows.

    Each home takes its first `share` * slots / W rows, the likeliest in its last slots: those of
    equal rank leave from the first.
    """
    world, homes = group.layout.world_size, group.layout.home(hot)
    own, most = slots // world, int(share * (slots // world))
    by_home = [hot[homes == home][:most] for home in range(world)]
    for start in range(0, max(len(rows) for rows in by_home), _BLOCK):
        parts = [rows[start : start + _BLOCK] for rows in by_home]
        taken = [
            (home + 1) * own - 1 - np.arange(start, start + len(part))
            for home, part in enumerate(parts)
        ]
        yield np.concatenate(taken), parts


# -----------------------------------------------------------------------------
# Rows of whole tables on several nodes, where each node's store holds those at home on its ranks.
#
# Every rank knows which rows every rank wants, so no ids travel: the ranks that home them send
# them
# over the host group. Rows at home on a rank's own node it reads from its store itself. All of it
# is
# called by all ranks, in the main thread, while nothing trains.

BLOCK_BYTES = 16 << 20
"""About how many bytes of a table one exchange brings to a rank."""

NONE = np.empty(0, dtype=np.int64)


class RowExchange:
    """Rows of `store` to the ranks that want them, and back."""

    def __init__(self, world: World, store: RowStore) -> None:
        self._world, self._store = world, store
        self._link: Link = host_link(world)

    def bring(self, wanted: Sequence[np.ndarray]) -> Rows:
        """Weights `[m, D]` and state `[m, S]` (None where S = 0) of this rank's wanted rows.

        `wanted[r]`: the rows of rank r, int64 `[m_r]` by the layout's numbers; the same on all
        ranks.
        """
        store, route = self._store, _Route(self._world, self._store, wanted)
        own = wanted[self._world.rank]
        sent, what = _joined(store.gather(route.sent)), "rows of tables"
        arrived = self._link.start_all_to_all(sent, route.sends, route.receives, ROWS, what)()
        near = _joined(store.gather(torch.from_numpy(own[route.near])))
        found = near.new_empty((len(own), near.shape[1]))
        found[torch.from_numpy(route.near)] = near
        found[torch.from_numpy(route.far)] = arrived
        return _parted(found, store)

    def put(self, wanted: Sequence[np.ndarray], values: Rows) -> None:
        """Write this rank's values of its wanted rows to the stores of their homes.

        The reverse of `bring`; no row may be in two ranks' lists. The rows are there once all
        ranks have returned.
        """
        store, route = self._store, _Route(self._world, self._store, wanted)
        joined, own = _joined(values), wanted[self._world.rank]
        sent, what = joined[torch.from_numpy(route.far)], "rows of tables"
        arrived = self._link.start_all_to_all(sent, route.receives, route.sends, ROWS, what)()
        _scatter(store, route.sent, arrived)
        _scatter(store, torch.from_numpy(own[route.near]), joined[torch.from_numpy(route.near)])


class _Route:
    """Who sends which rows to whom.

    `sent`: the rows that this rank, their home, sends to ranks of other nodes, by receiver;
    `sends`, `receives`: rows to and from each rank; `near`, `far`: positions of this rank's wanted
    rows that its node has, and of the others in the order in which they arrive.
    """

    def __init__(self, world: World, store: RowStore, wanted: Sequence[np.ndarray]) -> None:
        mine = range(world.first_local, world.first_local + world.local_size)
        parts = [
            NONE if rank in mine else rows[store.layout.home(rows) == world.rank]
            for rank, rows in enumerate(wanted)
        ]
        self.sent = torch.from_numpy(np.concatenate(parts))
        self.sends = [len(part) for part in parts]
        homes = store.layout.home(wanted[world.rank])
        inside = (homes >= mine.start) & (homes < mine.stop)
        self.near = np.flatnonzero(inside)
        far = np.flatnonzero(~inside)
        self.far = far[np.argsort(homes[far], kind="stable")]
        self.receives = np.bincount(homes[far], minlength=world.size).tolist()


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


def row_numbers(store: RowStore, table: int, ids: Sequence[range]) -> list[np.ndarray]:
    """The layout's numbers of ids of table `table` of the layout, int64, range by range."""
    offset = int(store.layout.offsets[table])
    return [np.arange(offset + part.start, offset + part.stop) for part in ids]


def _joined(rows: Rows) -> Tensor:
    weight, state = rows
    return weight if state is None else torch.cat([weight, state], dim=1)


def _parted(joined: Tensor, store: RowStore) -> Rows:
    width = store.layout.dim
    return joined[:, :width], joined[:, width:] if store.state_width else None


def _scatter(store: RowStore, rows: Tensor, joined: Tensor) -> None:
    weight, state = _parted(joined, store)
    store.scatter(rows, weight.contiguous(), None if state is None else state.contiguous())


# -----------------------------------------------------------------------------
# Tables by name: views where this node has all of their rows, else shards over the nodes.
#
# On several nodes each rank has an equal range of every table's ids, in temporary files on disk, so
# that host memory does not hold the tables twice. `torch.distributed.checkpoint` writes and reads
# them as shards of whole tables: what it leaves is the checkpoint of one node.


def table_views(groups: Sequence[GroupRows], table: int) -> tuple[Tensor, Tensor | None]:
    """Views of a table's weights and state in original ids; where this node has all of its rows."""
    rows, place = _find(groups, table)
    if rows.store is not None:
        return rows.store.table(place)
    start, stop = (int(at) for at in rows.group.layout.offsets[place : place + 2])
    state = rows.cache.state
    return rows.cache.weight[start:stop], None if state is None else state[start:stop]


def read_block(world: World, groups: Sequence[GroupRows], table: int, ids: range) -> Tensor | None:
    """Rows `ids` of a table, `[n, D]` on the CPU, on rank 0; None or the same on others."""
    if not _is_split(world, groups):
        return table_views(groups, table)[0][ids.start : ids.stop].cpu()
    store, place = _store(groups, table)
    wanted = row_numbers(store, place, [ids, *[range(0)] * (world.size - 1)])
    found = RowExchange(world, store).bring(wanted)[0]
    return found if world.is_first else None


def whole_tables(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    scratch: Path | None,
    filled: bool,
) -> dict[str, Any]:
    """`tables.<name>.weight` `[rows, D]` and `tables.<name>.<state>` of all tables, for
    `torch.distributed.checkpoint`.

    Views of the store on one node, where only the first of the ranks that share it names them;
    ranks with copies of their own (`resident`) all do, and one of them is written. On several
    nodes shards in files under `scratch` (the system's folder for them, where it is None or not
    there), with the rows' values where `filled`, else with zeros, to be loaded into. Raises
    DistcacheError where a disk does not hold this rank's part.
    """
    state: dict[str, Any] = {}
    if not _is_split(world, groups):
        if groups[0].store is None or not world.local_rank:
            for index, table in enumerate(tables):
                weight, extra = table_views(groups, index)
                state[f"tables.{table.name}.weight"] = weight
                for name, columns in update.state_columns(table.dim).items():
                    if extra is not None:
                        state[f"tables.{table.name}.{name}"] = extra[:, columns]
        return state
    together(world, lambda: state.update(_allocate(world, tables, groups, update, scratch)))
    for index, table in enumerate(tables):
        store, place = _store(groups, index)
        own = {name: (state[name], columns) for name, columns in _columns(table, update).items()}
        if filled:
            _read(world, table, store, place, own)
        for name, (part, _) in own.items():
            state[name] = _as_sharded(world, table, store, part)
    return state


@torch.no_grad()
def load_tables(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    state: Mapping[str, Any],
) -> None:
    """Bring what `whole_tables` gave and a load filled to the stores; views have it already."""
    if not _is_split(world, groups):
        return
    for index, table in enumerate(tables):
        store, place = _store(groups, index)
        columns = _columns(table, update)
        parts = [state[name].local_shards() for name in columns]
        rounds = blocks(shares(table.rows, world.size), _row_bytes(table, store))
        for number, ids in enumerate(rounds):
            if len(ids[world.rank]):
                joined = torch.cat([shards[number].tensor for shards in parts], dim=1)
            else:
                joined = store.weight.new_empty((0, store.layout.dim + store.state_width))
            RowExchange(world, store).put(row_numbers(store, place, ids), _parted(joined, store))
    together(world, lambda: None)


def _is_split(world: World, groups: Sequence[GroupRows]) -> bool:
    """Whether each node's store has only a part of the rows."""
    return world.nodes.count > 1 and groups[0].store is not None


def _find(groups: Sequence[GroupRows], table: int) -> tuple[GroupRows, int]:
    """The rows of a table's group, and its index there."""
    rows = next(rows for rows in groups if table in rows.group.tables)
    return rows, rows.group.tables.index(table)


def _store(groups: Sequence[GroupRows], table: int) -> tuple[RowStore, int]:
    """A table's store and its index there."""
    rows, place = _find(groups, table)
    if rows.store is None:
        raise DistcacheError(f"table {table} has no store")
    return rows.store, place


def _columns(table: TableSpec, update: RowUpdate) -> dict[str, slice]:
    """The names of a table's values, and where they are in rows followed by their state."""
    found = {f"tables.{table.name}.weight": slice(0, table.dim)}
    for name, columns in update.state_columns(table.dim).items():
        place = slice(table.dim + columns.start, table.dim + columns.stop)
        found[f"tables.{table.name}.{name}"] = place
    return found


def _allocate(
    world: World,
    tables: Sequence[TableSpec],
    groups: Sequence[GroupRows],
    update: RowUpdate,
    folder: Path | None,
) -> dict[str, Tensor]:
    """Zeros for this rank's ids of every table, `[n, width]` by name."""
    found = {}
    for index, table in enumerate(tables):
        dtype, ids = _store(groups, index)[0].dtype, shares(table.rows, world.size)[world.rank]
        for name, columns in _columns(table, update).items():
            shape = (len(ids), columns.stop - columns.start)
            found[name] = disk_zeros(shape, dtype, folder)
    return found


def _read(
    world: World,
    table: TableSpec,
    store: RowStore,
    place: int,
    own: Mapping[str, tuple[Tensor, slice]],
) -> None:
    """Fill this rank's part of a table, columns of rows by name, from all homes."""
    exchange, at = RowExchange(world, store), 0
    for ids in blocks(shares(table.rows, world.size), _row_bytes(table, store)):
        joined = _joined(exchange.bring(row_numbers(store, place, ids)))
        for part, columns in own.values():
            part[at : at + len(joined)] = joined[:, columns]
        at += len(joined)


def _as_sharded(world: World, table: TableSpec, store: RowStore, part: Tensor) -> ShardedTensor:
    """This rank's rows `part` as blocks of the whole table's."""
    ids = shares(table.rows, world.size)[world.rank]
    shards = []
    for (block,) in blocks([ids], _row_bytes(table, store)):
        rows = part[block.start - ids.start : block.stop - ids.start]
        shards.append(Shard.from_tensor_and_offsets(rows, [block.start, 0], world.rank))
    size = (table.rows, part.shape[1])
    return init_from_local_shards(shards, *size, process_group=world.host_group)


def _row_bytes(table: TableSpec, store: RowStore) -> int:
    return (table.dim + store.state_width) * store.dtype.itemsize


def disk_zeros(shape: tuple[int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Zeros in an unnamed temporary file under `folder`, gone with the tensor (or the process).

    Raises DistcacheError where the disk has no room for it.
    """
    kind = np.dtype(str(dtype).removeprefix("torch."))
    size = shape[0] * shape[1] * kind.itemsize
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
            return torch.from_numpy(np.memmap(file, kind, "w+", shape=shape))
    except OSError as error:
        raise DistcacheError(
            f"{where} does not hold this rank's part of a table for a checkpoint, "
            f"{describe_bytes(size)}: {error.strerror}; make room there (run.dir), or use more "
            "nodes"
        ) from error
