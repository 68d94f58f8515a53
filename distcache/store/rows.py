"""The rows of one group in shared host memory: one store per node, of the rows at home there."""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distcache import ops
from distcache.comm.link import run_on_all_ranks
from distcache.comm.rendezvous import first_line
from distcache.comm.world import World
from distcache.errors import (
    ConfigError,
    DistcacheError,
    MemoryTooSmallError,
    PlanError,
    human_bytes,
)
from distcache.layout import HALVES, RowKind, RowLayout
from distcache.ops.reference import as_numpy, check_rows, check_values, put_rows, take_rows
from distcache.store.memory import describe_bytes, share_memory, tensor_in
from distcache.streams import DeviceEvent

Rows = tuple[Tensor, Tensor | None]
"""Weights `[m, D]` and optimizer state `[m, S]`, or None where S = 0."""


class Gathered(NamedTuple):
    """Fetched rows of one step before they go to their slots.

    `read`: the rows, for work of the current stream, `[M_h, D]`, and their state `[M_h, S]` or
    None, on the host or the device; `release`: after all that reads them was issued on COPY_IN.
    """

    read: Callable[[], Rows]
    release: Callable[[], None]


def nothing() -> None:
    """What is left to do where all is done."""


# -----------------------------------------------------------------------------
# Initial weights as a function of (seed, table, block of rows): the same bits in every mode.

BLOCK_ELEMENTS = 1 << 18
"""About how many elements one block of rows holds (a block is a whole number of rows)."""


def block_rows(dim: int) -> int:
    """Rows of one block of a table of width `dim`."""
    return max(1, BLOCK_ELEMENTS // dim)


def initial_rows(seed: int, table: int, table_rows: int, dim: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a new table: uniform in +-sqrt(1 / table_rows), as TorchRec's default.

    `table` is the table's index in the model. Returns float32 `[stop - start, dim]` on the CPU,
    drawn in float32 whatever the training dtype, so that float64 runs start from the same values.
    """
    size, bound = block_rows(dim), math.sqrt(1.0 / table_rows)
    out = np.empty((stop - start, dim), dtype=np.float32)
    for block in range(start // size, -(-stop // size)):
        first = block * size
        length = min(size, table_rows - first)
        # SFC64 draws about 1 ns per float32; the block's own seed makes blocks independent.
        generator = np.random.Generator(np.random.SFC64([seed, table, block]))
        values = generator.random((length, dim), dtype=np.float32)
        values *= np.float32(2 * bound)
        values -= np.float32(bound)
        low, high = max(start, first), min(stop, first + length)
        out[low - start : high - start] = values[low - first : high - first]
    return torch.from_numpy(out)


def draw_tables(
    seed: int,
    table_indices: Sequence[int],
    layout: RowLayout,
    put: Callable[[int, np.ndarray], object],
    ranks: int = 1,
    mine: slice = slice(None),
) -> None:
    """Hand the `initial_rows` of all tables of `layout`, block by block, to `put`: the number of
    the first row, and float32 `[m, D]`.

    `table_indices`: of each table in the model; `ranks`: how many share the cores of this machine,
    on its share of which this one calls `put`, by several threads; `mine`: of the blocks.
    """
    size, blocks = block_rows(layout.dim), []
    for place, table in enumerate(layout.tables):
        starts = range(0, table.rows, size)
        blocks += [(place, start, min(start + size, table.rows)) for start in starts]

    def draw(block: tuple[int, int, int]) -> None:
        place, start, stop = block
        of = (seed, table_indices[place], layout.tables[place].rows, layout.dim)
        put(int(layout.offsets[place]) + start, initial_rows(*of, start, stop).numpy())

    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with ThreadPoolExecutor(threads, "distcache-initialise") as pool:
        list(pool.map(draw, blocks[mine]))  # and raise what one of them raised


def put_block(weight: Tensor, first: int, values: np.ndarray) -> None:
    """Rows of `draw_tables` into a table `[V, D]`, wherever it lies."""
    rows = weight[first : first + len(values)]
    if weight.device.type == "cpu":
        as_numpy(rows)[...] = rounded(values, weight.dtype)
    else:
        rows.copy_(torch.from_numpy(values))


_SERIAL = 1 << 14
"""Elements that torch converts on the calling thread alone: it would bring a pool of OpenMP threads
for each thread that draws."""


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """What `as_numpy` of a tensor of `dtype` takes for `values`, floats; halves rounded to nearest.
    Other dtypes NumPy converts itself."""
    if dtype not in HALVES:
        return values
    given = torch.from_numpy(np.ascontiguousarray(values))
    found = torch.empty(given.shape, dtype=dtype)
    parts = (of.view(-1).split(_SERIAL) for of in (found, given))
    for part, own in zip(*parts, strict=True):
        part.copy_(own)
    return as_numpy(found)


class NodePart:
    """The rows of `layout` at home on this node's `count` ranks, `first` and on, in a dense order.

    Every block of W row numbers has one row of each home, so the row of home h in block
    b lies at b * count + (h - first). The last block may be ragged: it has up to `count` places
    that no row takes. With all W ranks on one node a row lies at its own number.
    """

    def __init__(self, layout: RowLayout, world: World | None) -> None:
        """`world`: whose node; None: one node has all rows."""
        self.layout, self.first, self.count = layout, 0, layout.world_size
        if world is not None and world.nodes.count > 1:
            self.first, self.count = world.first_local, world.local_size
        self.is_whole = self.count == layout.world_size
        self.rows = layout.rows if self.is_whole else layout.local_rows * self.count
        """Places of the part, with the few of the last block that no row takes."""

    def bytes(self, state_width: int, dtype: torch.dtype) -> tuple[int, int]:
        """Of the weights, up to where the state begins (a page), and of the state."""
        kind, page = self.layout.kind(state_width, dtype), mmap.PAGESIZE
        weight, state = kind.bytes_of(self.rows, 0), kind.bytes_of(0, self.rows)
        return (-(-weight // page) * page if state else weight), state

    def holds(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row is at home on this node, bool `[n]`."""
        if self.is_whole:
            return np.ones(len(rows), dtype=np.bool_)
        homes = self.layout.home(rows)
        return (homes >= self.first) & (homes < self.first + self.count)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Where rows (int64 `[n]`) lie in the part, int64 `[n]`.

        Raises PlanError for a row outside [0, V), or at home on another node.
        """
        if self.is_whole or not len(rows):
            return rows  # what reads them checks the range
        check_rows(rows, self.layout.rows)
        index = self.layout.home(rows) - self.first
        foreign = (index < 0) | (index >= self.count)
        if foreign.any():
            at = int(np.flatnonzero(foreign)[0])
            raise PlanError(
                f"row {rows[at]} is at home on rank {index[at] + self.first}, and this node's "
                f"store holds those of ranks {self.first} to {self.first + self.count - 1}"
            )
        return self.layout.local(rows) * self.count + index


# -----------------------------------------------------------------------------
# Host rows that the device reads and writes where they lie: `store.access=zero_copy`.
#
# The memory of the node's rows is page-locked and mapped into the device's addresses
# (`cudaHostRegister`), so a kernel reads single rows over the host link, without a host thread and
# without a staging buffer (EMOGI, Min et al., VLDB 2020, for graphs; PyTorch-Direct, Min et al.,
# 2021, for features). On the CPU the same calls copy between tables in one memory.

log = logging.getLogger(__name__)

STAGED, ZERO_COPY = "staged", "zero_copy"
ACCESS = (STAGED, ZERO_COPY)
"""Ways of rows between host memory and the device."""

_PATIENCE_S, _PAUSE_S = 5.0, 0.001
"""How long closing waits for the device, and how often it looks."""

_kept: list[Tensor] = []
"""Memory that could not be let go of: it stays mapped, for the device may still use it."""


class DirectRows:
    """Tables in host memory, weight `[R, D]` and state `[R, S]` or None, as `device` sees them.

    Rows are read and written on the current stream, in its order, and nobody waits: what the device
    wrote is there for the host once `marks` are reached. A reader on another stream comes after an
    event of the writer. The memory is let go of by `close`, or with this object.
    """

    def __init__(
        self,
        weight: Tensor,
        state: Tensor | None,
        kind: RowKind,
        places: Callable[[np.ndarray], np.ndarray],
        device: torch.device,
    ) -> None:
        """`kind`: of the rows; `places`: where in the tables they lie, int64 `[m]` both.

        Raises MemoryTooSmallError where the host does not lock the memory, ConfigError where the
        kernel that reads it cannot be had.
        """
        self.device, self._kind, self._places = device, kind, places
        self._tables: list = [weight, state]
        self._registered: list[Tensor] = []
        self._events: dict[int, torch.cuda.Event] = {}  # after what each stream was last given
        held = self._tables, self._registered, self._events
        self.close = weakref.finalize(self, _let_go, *held)
        """Lets go of the memory once the device is through with it; may be called twice. Where the
        device is not, after a few seconds, the memory stays locked, with a warning."""
        self.close.atexit = False  # the driver is gone by then, and so is what it had locked
        if device.type == "cuda":
            ops.copy_kernel()  # whether there is one
            self._register()

    def try_out(self) -> None:
        """Read a row of each table and write it back: what cannot work is found, and the kernels
        are compiled, before training. Raises ConfigError."""
        try:
            for table in self._tables:
                if table is None or not len(table):
                    continue
                at, expected = self._index(np.zeros(1, np.int64)), table[:1].clone()
                row = self._read(table, at)
                if not torch.equal(row.cpu(), expected):
                    raise RuntimeError("it reads other values than there are")
                ops.copy_rows(row, None, table, at)
                if not torch.equal(self._read(table, at).cpu(), expected):
                    raise RuntimeError("it writes other values than it should")
        except Exception as error:  # the compiler's, the driver's
            raise ConfigError(
                f"{self.device} cannot read rows in host memory ({first_line(error)}): set "
                "store.access=staged"
            ) from error

    def read(self, rows: Tensor) -> Rows:
        """Copies of `rows` (int64 `[m]`, on the CPU) on the device: `[m, D]`, `[m, S]` or None.

        Raises PlanError for a row that does not lie here.
        """
        at = self._index(self._places(rows.numpy()))
        weight, state = self._tables
        found = self._read(weight, at), None if state is None else self._read(state, at)
        self._mark()
        return found

    def gather(self, rows: Tensor) -> Gathered:
        """Rows to be `read`, after the write-backs of their own and of earlier steps; nothing to do
        on the host."""
        return Gathered(partial(self.read, rows), nothing)

    def put(self, rows: Tensor, memory: Tensor) -> Callable[[], None]:
        """Write to distinct `rows`, on the current stream, what lies in `memory`, on the device
        (`RowKind.parts`); the host has nothing to do later.

        Raises PlanError for a row that does not lie here.
        """
        at = self._index(self._places(rows.numpy()))
        for table, values in zip(self._tables, self._kind.parts(memory), strict=True):
            if table is not None and values is not None and len(at):
                ops.copy_rows(values, None, table, at)
        self._mark()
        return nothing

    def marks(self) -> list[DeviceEvent]:
        """The last reads and writes, of each stream that they were on."""
        return list(self._events.values())

    def _read(self, table: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), table.shape[1], dtype=table.dtype, device=self.device)
        if len(at):
            ops.copy_rows(table, at, out, None)
        return out

    def _index(self, places: np.ndarray) -> Tensor:
        if not self._tables:
            raise DistcacheError("the row store is closed")
        check_rows(places, len(self._tables[0]))
        at = torch.from_numpy(places)
        if self.device.type != "cuda":
            return at
        return at.pin_memory().to(self.device, non_blocking=True)

    def _mark(self) -> None:
        """Note that work was issued on the current stream."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            name = stream.cuda_stream
            if name not in self._events:
                self._events[name] = torch.cuda.Event()
            self._events[name].record(stream)

    def _register(self) -> None:
        """Lock the tables' pages and map them for the device."""
        runtime = torch.cuda.cudart()
        for table in self._tables:
            if table is None or not table.numel():
                continue
            nbytes = table.nbytes
            with torch.cuda.device(self.device):
                # 3: portable and mapped (cudaHostRegisterPortable | cudaHostRegisterMapped)
                error = runtime.cudaHostRegister(table.data_ptr(), nbytes, 3)
            if int(error) == 0:
                self._registered.append(table)
                continue
            with suppress(Exception):  # the next launch reports the refusal once more
                torch.zeros(1, device=self.device)
            self.close()
            why = runtime.cudaGetErrorString(error)
            raise MemoryTooSmallError(
                f"the host did not lock {describe_bytes(nbytes)} of rows for {self.device} to read "
                f"in place ({why}): set store.access=staged, or use a machine that gives more "
                "locked memory"
            )


def _let_go(tables: list, registered: list[Tensor], events: dict[int, torch.cuda.Event]) -> None:
    """Unlock what is registered, before it may be unmapped; raises nothing, and empties all."""
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not all(event.query() for event in events.values()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the device still used them after {_PATIENCE_S:.0f} s")
            time.sleep(_PAUSE_S)
        while registered:
            error = torch.cuda.cudart().cudaHostUnregister(registered[-1].data_ptr())
            if int(error) != 0:
                raise RuntimeError(torch.cuda.cudart().cudaGetErrorString(error))
            registered.pop()
    except RuntimeError as error:
        log.warning("rows stay locked in host memory: %s", first_line(error))
        _kept.extend(registered)
    for held in (tables, registered, events):
        held.clear()


WAY_OUT = (
    "use fewer or narrower rows (data.table_rows, model.embedding_dim), an optimizer with less "
    "state per row (optim), more nodes, or a machine or control group with more memory"
)
"""What a user can change where a host does not hold its rows."""


class RowStore:
    """Weights `[R, D]` and optimizer state `[R, S]` of one group, shared by a node's ranks.

    On one node R = V, in row number order. On several nodes each holds the rows at home on its
    ranks, in the order of `part` (`part.rows` = R, about V / nodes). Callers speak of rows by the
    layout's numbers. `direct`: the rows as a device sees them, if the store is open to one.
    """

    def __init__(
        self, layout: RowLayout, state_width: int, dtype: torch.dtype, world: World
    ) -> None:
        """A store of zeros; called by all ranks, mapped by the local ranks of each node.

        `state_width`: S; `dtype`: float32 or float64, of the state, and of weights for which the
        layout has no other. Raises MemoryTooSmallError on all ranks if some node cannot hold its
        part.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"rows of {dtype}: trainer.dtype must be float32 or float64")
        self.layout, self.state_width, self.dtype = layout, state_width, dtype
        self._world = world
        self.part = NodePart(layout, world)
        rows = self.part.rows
        first, second = self.part.bytes(state_width, dtype)
        stored = self.kind.stored
        what = f"{rows} rows x ({layout.dim} + {state_width} of state), {stored}"
        memory = share_memory(first + second, world, what, WAY_OUT)
        self._weight: Tensor | None = tensor_in(memory, 0, (rows, layout.dim), stored)
        self.state: Tensor | None = None
        """All optimizer state of the node, `[R, S]`, shared by its ranks; None when S = 0."""
        if state_width:
            self.state = tensor_in(memory, first, (rows, state_width), dtype)
        self.nbytes = first + second
        self._threads = 1  # where training itself keeps the cores busy
        if world.device.type == "cuda":
            # Its share of the cores beside a GPU; more than eight copy no faster.
            self._threads = max(1, min(8, len(os.sched_getaffinity(0)) // world.local_size))
        self._pool = ThreadPoolExecutor(self._threads, "distcache-rows")
        self.direct: DirectRows | None = None

    @property
    def kind(self) -> RowKind:
        """What a row is."""
        return self.layout.kind(self.state_width, self.dtype)

    @property
    def weight(self) -> Tensor:
        """All weights of the node, `[R, D]`, shared with the other local ranks."""
        if self._weight is None:
            raise DistcacheError("the row store is closed")
        return self._weight

    def initialise(
        self, seed: int, table_indices: Sequence[int], initial_state: float | Tensor = 0.0
    ) -> None:
        """Give every row its initial weight and state (a number, or `[S]`); called by all ranks,
        and a barrier.

        The local ranks of a node share its blocks round-robin, each on its share of the cores;
        the values depend on (seed, table index in the model, block) alone. Logs GB/s.
        """
        world, began = self._world, time.perf_counter()
        state = None if self.state is None else self.state.numpy()
        new = np.asarray(initial_state)

        def put(first: int, values: np.ndarray) -> None:
            places = self.put(first, values)
            if state is not None:
                state[places] = new

        def fill_mine() -> None:
            mine = slice(world.local_rank, None, world.local_size)
            draw_tables(seed, table_indices, self.layout, put, world.local_size, mine)

        run_on_all_ranks(world, fill_mine)
        if not world.local_rank:
            seconds = max(time.perf_counter() - began, 1e-9)
            log.info(
                "initialised %s rows of %d tables, %s, in %.2f s: %.2f GB/s",
                f"{self.part.rows:,}",
                len(self.layout.tables),
                human_bytes(self.nbytes),
                seconds,
                self.nbytes / seconds / 1e9,
            )

    def add_state(self, width: int, initial: Tensor) -> None:
        """Give every row, which has none, the state `initial`, `[width]`; called by all ranks.

        Raises MemoryTooSmallError on all ranks if some node cannot hold it.
        """
        world, device = self._world, None if self.direct is None else self.direct.device
        if self.state is not None or not width:
            raise PlanError(f"rows with {self.state_width} floats of state cannot get {width}")
        size, what = (self.part.rows, width), f"{width} floats of state of {self.part.rows} rows"
        nbytes = size[0] * width * self.dtype.itemsize
        self.state = tensor_in(share_memory(nbytes, world, what, WAY_OUT), 0, size, self.dtype)
        self.state_width, self.nbytes = width, self.nbytes + nbytes
        own = self.state.numpy()[world.local_rank :: world.local_size]
        run_on_all_ranks(world, lambda: np.copyto(own, initial.numpy()) if initial.any() else None)
        if self.direct is not None and device is not None:
            self.direct.close()
            run_on_all_ranks(world, lambda: self.open_to(device))

    def put(self, first: int, values: np.ndarray) -> slice | np.ndarray:
        """Write the weights, floats `[m, D]`, of the rows from number `first` on, those at home on
        this node; their places in the store."""
        own: slice | np.ndarray = slice(None)
        places: slice | np.ndarray = slice(first, first + len(values))
        if not self.part.is_whole:
            rows = np.arange(first, first + len(values))
            own = self.part.holds(rows)
            places = self.part.places(rows[own])
        as_numpy(self.weight)[places] = rounded(values[own], self.weight.dtype)
        return places

    def gather(self, rows: Tensor, out: Rows | None = None) -> Rows:
        """Copies of `rows` (int64 `[m]`, on the CPU): weight `[m, D]`, state `[m, S]` or None.

        With `out` they are written there (contiguous tensors of exactly these shapes).
        Raises PlanError for a row outside [0, V) or at home on another node.
        """
        if out is None:
            out = self.kind.parts(torch.empty(len(rows) * self.kind.nbytes, dtype=torch.uint8))
        places = self.part.places(rows.numpy())
        for source, target in zip((self.weight, self.state), out, strict=True):
            if source is not None and target is not None:
                self._in_parts(partial(take_rows, as_numpy(source)), places, as_numpy(target))
        return out

    def _in_parts(
        self,
        copy: Callable[[np.ndarray, np.ndarray], object],
        places: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Call `copy(places, values)` for consecutive parts of both, on several threads if there
        are enough bytes. Raises what a call raised."""
        parts = min(self._threads, values.nbytes >> 19)  # of half a MiB
        if parts < 2:
            copy(places, values)
            return
        cuts = pairwise(len(places) * part // parts for part in range(parts + 1))
        jobs = self._pool.map(lambda at: copy(places[at], values[at]), starmap(slice, cuts))
        list(jobs)  # raises what one of them raised

    def scatter(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Write `rows` (int64 `[m]`, distinct, on the CPU): `weight` `[m, D]`, `state` `[m, S]`.

        Raises PlanError for a row outside [0, V) or at home on another node, or wrong shapes.
        """
        places = self.part.places(rows.numpy())
        for target, values in ((self.weight, weight), (self.state, state)):
            if target is not None and values is not None:
                check_values(target, places, values)
                check_rows(places, len(target))  # of all parts, before one of them is written
                self._in_parts(partial(put_rows, as_numpy(target)), places, as_numpy(values))

    def open_to(self, device: torch.device) -> DirectRows:
        """Let `device` use rows where they lie: `direct`."""
        self.direct = DirectRows(self.weight, self.state, self.kind, self.part.places, device)
        self.direct.try_out()
        return self.direct

    def table(self, index: int) -> Rows:
        """Views, in original ids, of table `index` of the layout: `[rows, D]`, `[rows, S]` or None.

        On one node only: PlanError on several, where no store has a whole table
        (`engine.full_tables` brings its rows together).
        """
        if not self.part.is_whole:
            raise PlanError(
                f"table {self.layout.tables[index].name!r} lies on {self._world.nodes.count} nodes"
            )
        start, stop = (int(self.layout.offsets[index + i]) for i in (0, 1))
        state = self.state
        return self.weight[start:stop], None if state is None else state[start:stop]

    def close(self) -> None:
        """Let go of the rows; safe to call twice. Views that someone still holds stay valid."""
        if self.direct is not None:
            self.direct.close()
        self.direct = None
        self._weight = self.state = None
        self._pool.shutdown()
