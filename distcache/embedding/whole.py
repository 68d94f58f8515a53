"""Whole tables of a collection in original ids: to read after a flush, or to load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from distcache.comm.agreement import together
from distcache.embedding.step import CollectionTables
from distcache.engine.whole import RowExchange, blocks, row_numbers, shares
from distcache.errors import PlanError
from distcache.layout import TableSpec
from distcache.store.memory import SharedMemory, require_memory
from distcache.store.rows import RowStore, initial_rows

Part = tuple[int, slice, Tensor]
"""Index of a table, columns, their new values `[rows, columns]`."""

_WAY_OUT = (
    "each node holds a copy of the whole tables while they are read this way: use nodes with more "
    "memory, or `distcache.fit`, whose checkpoints are written from each node's part"
)


class WholeTables:
    """The tables behind `tables`; every method is called by all ranks, but for what says
    otherwise."""

    def __init__(self, tables: CollectionTables) -> None:
        tables.require_open()
        self._tables, self._world = tables, tables.world

    def views(
        self, states: bool = False
    ) -> Iterator[tuple[TableSpec, tuple[Tensor | None, Tensor | None]]]:
        """Flush; then each table with its weights `[rows, D]` and state `[rows, S]`.

        Views of the store on one node. On several nodes no store has a whole table: copies as of
        now, one on each node, that its ranks share; and of weights and `states` only what was
        asked for, the other is None. Raises MemoryTooSmallError where a node does not hold them.
        """
        self.flush()
        for index, table in enumerate(self._tables.tables):
            store, place = self._place(index)
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
        store, place = self._place(table)
        if store.part.is_whole:
            change(store.table(place)[0])
            return
        spec = self._tables.tables[table]
        require_memory(
            spec.rows * spec.dim * store.dtype.itemsize,
            f"the initial rows of table {spec.name!r}",
            "initialise it as its config does by itself, or use nodes with more memory",
        )
        drawn = initial_rows(seed, table, spec.rows, spec.dim, 0, spec.rows).to(store.dtype)
        change(drawn)
        _write(store, place, slice(None), drawn, False)

    def flush(self) -> None:
        """Bring every changed row to the store of its home's node."""
        self._tables.quiet()
        self._tables.engine.flush(self._tables.steps)

    def load_weights(self, weights: Mapping[int, Tensor]) -> None:
        """Replace the weights of whole tables, by index; the cache starts empty again."""
        self._load([(index, slice(None), value) for index, value in weights.items()], False)

    def load_state(self, parts: Sequence[Part]) -> None:
        """Replace columns of the optimizer state of whole tables."""
        self._load(parts, True)

    def _load(self, parts: Sequence[Part], is_state: bool) -> None:
        tables = self._tables
        if tables.current is not None and tables.current.pending:
            raise PlanError("row gradients wait: call ebc.step() or zero_grad() before loading")
        tables.end_current()
        tables.halt()
        self.flush()

        def write() -> None:
            if self._world.local_rank:
                return
            for index, columns, value in parts:
                store, place = self._place(index)
                if not store.part.is_whole:
                    _write(store, place, columns, value, is_state)
                    continue
                target = store.table(place)[is_state]
                if target is not None and target.data_ptr() != value.data_ptr():
                    target[:, columns].copy_(value)

        with torch.no_grad():
            together(self._world, write)
        tables.engine.forget()

    def _place(self, table: int) -> tuple[RowStore, int]:
        """A table's store and its index there."""
        for rows in self._tables.rows:
            if table in rows.group.tables and rows.store is not None:
                return rows.store, rows.group.tables.index(table)
        raise PlanError(f"table {table} has no store")

    def _copy(self, store: RowStore, place: int, states: bool) -> Tensor | None:
        """A whole table's weights, or its state, in memory that this node's ranks share."""
        world, spec = self._world, store.layout.tables[place]
        width = store.state_width if states else spec.dim
        if not width:
            return None
        size = spec.rows * width * store.dtype.itemsize
        memory = SharedMemory.create(size, world, f"a copy of table {spec.name!r}", _WAY_OUT)
        copy = memory.tensor(0, (spec.rows, width), store.dtype)
        memory.close()  # from here on the tensor holds the mapping
        exchange = RowExchange(world, store)
        # The ranks of each node bring a part of the table each: every row to every node.
        ranges = [part for count in world.nodes.sizes for part in shares(spec.rows, count)]
        for ids in blocks(ranges, (spec.dim + store.state_width) * store.dtype.itemsize):
            own = ids[world.rank]
            found = exchange.bring(row_numbers(store, place, ids))[states]
            if found is not None:
                copy[own.start : own.stop] = found
        together(world, lambda: None)
        return copy


def _write(store: RowStore, table: int, columns: slice, values: Tensor, is_state: bool) -> None:
    """Columns of a whole table's `values` `[rows, columns]` to the rows that this node has."""
    target = store.state if is_state else store.weight
    rows = len(values)
    for (ids,) in blocks([range(rows)], store.layout.dim * store.dtype.itemsize):
        (numbers,) = row_numbers(store, table, [ids])
        own = store.part.holds(numbers)
        places = torch.from_numpy(store.part.places(numbers[own]))
        if target is not None:
            new = values[ids.start : ids.stop][torch.from_numpy(own)]
            target[places, columns] = new.to(target)
