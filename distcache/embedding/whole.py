"""Whole tables of a collection in original ids: to read after a flush, or to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.agree import together
from distcache.embedding.core import CachedTables
from distcache.errors import PlanError
from distcache.layout import TableSpec
from distcache.pipeline.groups import TableGroup
from distcache.store.rows import RowStore

Part = tuple[int, slice, Tensor]
"""Index of a table, columns, their new values `[rows, columns]`."""

_BLOCK_ROWS = 1 << 16
"""Rows that nodes exchange at a time."""


class WholeTables:
    """The tables behind `tables`; every method is called by all ranks."""

    def __init__(self, tables: CachedTables) -> None:
        tables.require_open()
        self._tables, self._world = tables, tables.world

    def views(self) -> Iterator[tuple[TableSpec, tuple[Tensor, Tensor | None]]]:
        """Flush; then each table with views of its weights `[rows, D]` and state `[rows, S]`."""
        self.flush()
        for index, table in enumerate(self._tables.tables):
            store, place = self._place(index)
            yield table, store.table(place)

    def weight(self, table: int) -> Tensor:
        """A view of one table in the store as it is, without a flush; local."""
        store, place = self._place(table)
        return store.table(place)[0]

    def flush(self) -> None:
        """Bring every changed row to the store of its home's node, then to all nodes'."""
        self._tables.quiet()
        for rows in self._tables.rows:
            rows.flush()
        together(self._world, lambda: None)
        if self._world.local_size < self._world.size:
            for rows in self._tables.rows:
                if rows.store is not None:
                    self._share(rows.group, rows.store)
            together(self._world, lambda: None)

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
                target = store.table(place)[is_state]
                if target is not None and target.data_ptr() != value.data_ptr():
                    target[:, columns].copy_(value)

        with torch.no_grad():
            together(self._world, write)
        tables.forget_cached()
        tables.warm_up()

    def _place(self, table: int) -> tuple[RowStore, int]:
        """A table's store and its index there."""
        for rows in self._tables.rows:
            if table in rows.group.tables and rows.store is not None:
                return rows.store, rows.group.tables.index(table)
        raise PlanError(f"table {table} has no store")

    def _share(self, group: TableGroup, store: RowStore) -> None:
        """Bring each row from its home's node to all: a sum where the other nodes give zeros."""
        world, layout = self._world, group.layout
        first = world.rank - world.local_rank
        for start in range(0, layout.rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, layout.rows)
            homes = layout.home(group.planned(np.arange(start, stop)))
            foreign = (homes < first) | (homes >= first + world.local_size) | bool(world.local_rank)
            for values in (store.weight, store.state):
                if values is None:
                    continue
                block = values[start:stop].clone()
                block[torch.from_numpy(np.asarray(foreign))] = 0
                dist.all_reduce(block, group=world.host_group)
                if not world.local_rank:
                    values[start:stop] = block
