"""The rows of one group in shared host memory: one store per node, of the rows at home there."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.errors import ConfigError, DistcacheError, PlanError
from distcache.layout import RowLayout
from distcache.ops.copies import RowTaker, put_rows
from distcache.store.base import Rows
from distcache.store.direct import DirectRows
from distcache.store.initial import block_rows, initial_rows
from distcache.store.memory import SharedMemory, describe_bytes, require_memory
from distcache.store.part import NodePart, Numbering

log = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_MOST_THREADS = 8
"""More gather no faster."""

_WAY_OUT = (
    "use fewer or narrower rows (data.table_rows, model.embedding_dim), an optimizer with less "
    "state per row (optim), more nodes, or a machine or control group with more memory"
)


def store_bytes(
    layouts: Sequence[RowLayout],
    state_widths: Sequence[int],
    dtype: torch.dtype,
    world: World | None = None,
) -> int:
    """Bytes of host memory that the stores of all groups take on the node of this rank.

    `world`: whose nodes share the rows; None: one node has them all.
    """
    parts = [NodePart.of(layout, world, None) for layout in layouts]
    pairs = zip(parts, state_widths, strict=True)
    return sum(sum(_part_bytes(part, width, dtype)) for part, width in pairs)


def create_stores(
    layouts: Sequence[RowLayout],
    state_widths: Sequence[int],
    dtype: torch.dtype,
    world: World,
    numberings: Sequence[Numbering | None] | None = None,
) -> list[RowStore]:
    """The stores of all groups, checked as a whole before the first is made; called by all ranks.

    `numberings`: the planner's, where they differ from the layouts'. Raises MemoryTooSmallError on
    every rank when some node's memory does not hold its part.
    """
    needed = store_bytes(layouts, state_widths, dtype, world)
    numberings = numberings or [None] * len(layouts)

    def check() -> None:
        if not world.local_rank:
            require_memory(needed, "the tables and their optimizer state", _WAY_OUT)

    together(world, check)
    stores: list[RowStore] = []
    try:
        for layout, width, order in zip(layouts, state_widths, numberings, strict=True):
            stores.append(RowStore.create(layout, width, dtype, world, order))
    except DistcacheError:
        for store in stores:
            store.close()
        raise
    return stores


class RowStore:
    """Weights `[R, D]` and optimizer state `[R, S]` of one group, shared by a node's ranks.

    On one node R = V, in row number order. On several nodes each holds the rows at home on its
    ranks, in the order of `part` (`part.rows` = R, about V / nodes). Callers speak of rows by the
    layout's numbers. `direct`: the rows as a device sees them, if the store is open to one.
    """

    def __init__(
        self,
        layout: RowLayout,
        state_width: int,
        dtype: torch.dtype,
        world: World,
        numbering: Numbering | None = None,
    ) -> None:
        """Make and map the memory; called by all ranks. See `create`."""
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"rows of {dtype}: trainer.dtype must be float32 or float64")
        self.layout, self.state_width, self.dtype = layout, state_width, dtype
        self._world = world
        self.part = NodePart.of(layout, world, numbering)
        rows = self.part.rows
        first, second = _part_bytes(self.part, state_width, dtype)
        what = f"{rows} rows x ({layout.dim} + {state_width} of state), {dtype}"
        memory = SharedMemory.create(first + second, world, what, _WAY_OUT)
        self._weight: Tensor | None = memory.tensor(0, (rows, layout.dim), dtype)
        self._state: Tensor | None = None
        if state_width:
            self._state = memory.tensor(first, (rows, state_width), dtype)
        memory.close()  # from here on the tensors hold the mapping
        self.nbytes = first + second
        self._taker = RowTaker(_gather_threads(world))
        self.direct: DirectRows | None = None

    @classmethod
    def create(
        cls,
        layout: RowLayout,
        state_width: int,
        dtype: torch.dtype,
        world: World,
        numbering: Numbering | None = None,
    ) -> RowStore:
        """A store of zeros; called by all ranks, mapped by the local ranks of each node.

        `state_width`: S; `dtype`: float32 or float64; `numbering`: the planner's, which says whose
        home a row is. Raises MemoryTooSmallError on all ranks if some node cannot hold its part.
        """
        return cls(layout, state_width, dtype, world, numbering)

    @property
    def weight(self) -> Tensor:
        """All weights of the node, `[R, D]`, shared with the other local ranks."""
        if self._weight is None:
            raise DistcacheError("the row store is closed")
        return self._weight

    @property
    def state(self) -> Tensor | None:
        """All optimizer state of the node, `[R, S]`, shared by its ranks; None when S = 0."""
        if self._weight is None:
            raise DistcacheError("the row store is closed")
        return self._state

    def initialise(
        self, seed: int, table_indices: Sequence[int], initial_state: float = 0.0
    ) -> None:
        """Give every row its initial weight and state; called by all ranks, and a barrier.

        The local ranks of a node share its blocks round-robin, each on its share of the cores;
        the values depend on (seed, table index in the model, block) alone. Logs GB/s.
        """
        if len(table_indices) != len(self.layout.tables):
            raise ConfigError(
                f"{len(table_indices)} table indices for {len(self.layout.tables)} tables"
            )
        world, began = self._world, time.perf_counter()
        # NumPy, not torch, in these threads: each would bring a pool of OpenMP threads of its own.
        weight = self.weight.numpy()
        state = None if self.state is None else self.state.numpy()

        def fill(block: tuple[int, int, int]) -> None:
            position, start, stop = block
            spec, offset = self.layout.tables[position], int(self.layout.offsets[position])
            values = initial_rows(seed, table_indices[position], spec.rows, spec.dim, start, stop)
            own, places = slice(None), slice(offset + start, offset + stop)
            if not self.part.is_whole:
                rows = np.arange(offset + start, offset + stop)
                own = self.part.holds(rows)
                places = self.part.places(rows[own])
            weight[places] = values.numpy()[own]
            if state is not None:
                state[places] = initial_state

        def fill_mine() -> None:
            mine = islice(_blocks(self.layout), world.local_rank, None, world.local_size)
            threads = max(1, len(os.sched_getaffinity(0)) // world.local_size)
            with ThreadPoolExecutor(threads, "distcache-initialise") as pool:
                for _ in pool.map(fill, mine):
                    pass

        together(world, fill_mine)
        if not world.local_rank:
            seconds = max(time.perf_counter() - began, 1e-9)
            log.info(
                "initialised %d rows of %d tables, %s, by %d local ranks in %.2f s: %.2f GB/s",
                self.part.rows,
                len(self.layout.tables),
                describe_bytes(self.nbytes),
                world.local_size,
                seconds,
                self.nbytes / seconds / 1e9,
            )

    def gather(self, rows: Tensor, out: Rows | None = None) -> Rows:
        """Copies of `rows` (int64 `[m]`, on the CPU): weight `[m, D]`, state `[m, S]` or None.

        With `out` they are written there (contiguous tensors of exactly these shapes).
        Raises PlanError for a row outside [0, V) or at home on another node, or wrong shapes.
        """
        _check_index(rows)
        if out is None:
            out = torch.empty(len(rows), self.layout.dim, dtype=self.dtype), None
            if self.state is not None:
                out = out[0], torch.empty(len(rows), self.state_width, dtype=self.dtype)
        self._check_values(rows, *out)
        places = self.part.places(rows.numpy())
        for source, target in zip((self.weight, self.state), out, strict=True):
            if source is not None and target is not None:
                self._taker.take(source.numpy(), places, target.numpy())
        return out

    def scatter(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Write `rows` (int64 `[m]`, distinct, on the CPU): `weight` `[m, D]`, `state` `[m, S]`.

        Raises PlanError for a row outside [0, V) or at home on another node, or wrong shapes.
        """
        _check_index(rows)
        self._check_values(rows, weight, state)
        places = self.part.places(rows.numpy())
        for target, values in ((self.weight, weight), (self.state, state)):
            if target is not None and values is not None:
                put_rows(target.numpy(), places, values.numpy())

    def open_to(self, device: torch.device) -> DirectRows:
        """Let `device` use rows where they lie: `direct`."""
        self.direct = DirectRows(self.weight, self.state, self.part.places, device)
        self.direct.try_out()
        return self.direct

    def table(self, index: int) -> Rows:
        """Views, in original ids, of table `index` of the layout: `[rows, D]`, `[rows, S]` or None.

        On one node only: PlanError on several, where no store has a whole table
        (`pipeline.whole` brings its rows together).
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
        self._weight = self._state = None
        self._taker.close()

    def _check_values(self, rows: Tensor, weight: Tensor | None, state: Tensor | None) -> None:
        """PlanError unless weight and state are on the CPU and as wide and long as they must be."""
        for name, tensor, width in (
            ("weight", weight, self.layout.dim),
            ("state", state, self.state_width),
        ):
            got = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)
            want = ((len(rows), width), self.dtype, rows.device) if width else None
            if got != want:
                raise PlanError(f"{name} of {len(rows)} rows must be {want}, got {got}")


def _check_index(rows: Tensor) -> None:
    """PlanError unless row numbers are int64 `[m]` on the CPU."""
    if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device.type != "cpu":
        raise PlanError(
            f"row numbers must be int64 [m] on the CPU, got {rows.dtype} {list(rows.shape)} "
            f"on {rows.device}"
        )


def _gather_threads(world: World) -> int:
    """Threads that gather rows for this rank: its share of the cores beside a GPU; one where
    training itself keeps the cores busy."""
    if world.device.type != "cuda":
        return 1
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // world.local_size))


def _part_bytes(part: NodePart, state_width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the weights, up to where the state begins (a page), and bytes of the state."""
    weight = part.rows * part.layout.dim * dtype.itemsize
    state = part.rows * state_width * dtype.itemsize
    return (-(-weight // _PAGE) * _PAGE if state else weight), state


def _blocks(layout: RowLayout) -> Iterator[tuple[int, int, int]]:
    """(table of the layout, first id, end id) of every block of rows, in row order."""
    size = block_rows(layout.dim)
    for position, table in enumerate(layout.tables):
        for start in range(0, table.rows, size):
            yield position, start, min(start + size, table.rows)
