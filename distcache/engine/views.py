"""What a loop of one's own sees of the rows: a step's, as its optimizer has them, and whole tables.

The trainer needs neither: it applies what it has summed, and its checkpoints take tables in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distcache.comm.agreement import together
from distcache.comm.link import PLANNING
from distcache.engine.movement import RowChoice
from distcache.engine.step import Flight
from distcache.engine.tables import CachedTables, RowSums
from distcache.engine.whole import RowExchange, blocks, row_numbers, shares
from distcache.errors import PlanError
from distcache.layout import TableSpec
from distcache.store.memory import require_memory, share_memory, tensor_in
from distcache.store.rows import RowStore, initial_rows

# -----------------------------------------------------------------------------
# The rows of one step, and their gradients, as an optimizer has them.

_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    torch.Tensor.norm,
    torch._foreach_norm,
}


class HomeGradient(Tensor):
    """The gradient of rows whose sums lie at this rank's home alone: a norm of it would count other
    rows on every rank, so torch's functions for that are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise PlanError for a norm; all else is as of any tensor."""
        if func in _NORMS:
            raise PlanError(
                "each rank has the gradients of other rows (placement='sharded' or 'mixed', or "
                "state='home'), so their norm on one rank is not the gradient's: clip with "
                "distcache.clip_grad_norm_(model.parameters(), ebc, max_norm)"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


@dataclass
class RowPart:
    """Rows of one group as the optimizer has them: `rows`, whose `.grad` is what is applied.

    `at_home`: whether the sums lie at this rank's home alone, not on every rank; `sharded`: which
    of the sums of `group` they are.
    """

    group: int
    rows: Tensor
    at_home: bool
    sharded: bool


class StepRows:
    """The rows of a step as their optimizer has them: `parts`, the replicated ones first.

    `guard`: where homes have sums of their own, one number whose gradient is 0, or infinite where
    some home's sums are not finite: all ranks' scalers see the same. `params`: what an optimizer
    has as parameters.
    """

    def __init__(self, tables: CachedTables, flight: Flight, leaves: Sequence[Tensor]) -> None:
        """`leaves` of the step, which are its rows where every rank has all sums."""
        self._tables, self._flight = tables, flight
        replicated: list[RowPart] = []
        sharded: list[RowPart] = []
        for place, (rows, plan, leaf) in enumerate(
            zip(tables.rows, flight.plans, leaves, strict=True)
        ):
            home, there = tables.home_state, flight.where[place].shard
            if rows.slots.replicated:
                mine = plan.home_slice(tables.world.rank) if home else slice(0, plan.distinct)
                whole = plan.shard is None and not home
                own = leaf if whole else leaf.detach()[mine].requires_grad_()
                replicated.append(RowPart(place, own, home, sharded=False))
            if plan.shard is not None and there is not None:
                own = rows.cache.gather(plan.shard.slots, there.slots).requires_grad_()
                sharded.append(RowPart(place, own, at_home=True, sharded=True))
        self.parts = [*replicated, *sharded]
        homes = any(part.at_home for part in self.parts)
        self.guard = leaves[0].new_zeros(1).requires_grad_() if homes else None
        self.params = [part.rows for part in self.parts]
        if self.guard is not None:
            self.params.append(self.guard)

    def take(self, sums: RowSums, finite: Tensor | None) -> None:
        """Let the sums be the gradients; `finite`: of `all_finite`."""
        for part in self.parts:
            found = (sums.sharded if part.sharded else sums.replicated)[part.group]
            if found is not None and part.at_home:
                found = found.as_subclass(HomeGradient)
            part.rows.grad = found
        if self.guard is not None and finite is not None:
            self.guard.grad = torch.where(finite, 0.0, math.inf).to(self.guard)

    def sums(self) -> RowSums:
        """The gradients to apply, as the optimizer's users have left them."""
        none: list[Tensor | None] = [None] * len(self._tables.rows)
        found = RowSums(none, list(none))
        for part in self.parts:
            if part.rows.grad is not None:
                of = found.sharded if part.sharded else found.replicated
                of[part.group] = part.rows.grad.as_subclass(Tensor)
        return found

    def all_finite(self, sums: RowSums) -> Tensor:
        """Whether all sums, also those that other homes have, are finite: bool `[1]`."""
        own = [torch.isfinite(found).all() for found in sums.tensors()]
        one = torch.ones((), dtype=torch.bool, device=self._tables.world.device)
        finite = torch.stack([one, *own]).all().reshape(1)
        if self.guard is None:
            return finite
        return self._of_all(finite.to(torch.int64), "finite sums").min().reshape(1).bool()

    def choices(self, group: int, sums: RowSums, counts: Sequence[int]) -> list[RowChoice]:
        """What of a group's rows is updated, and as which step of their tables: `counts` by table
        of the group, 0 for one that is left as it is. Gradients of such rows become zero, so that
        nothing that looks at gradients counts them."""
        if len(set(counts)) == 1:
            return [RowChoice(counts[0])]
        tables = self._tables.tables_of_sums(self._flight, group)
        kinds = [None if at is None else torch.tensor(counts)[at.long()] for at in tables]
        for kind, found in zip(kinds, (sums.replicated[group], sums.sharded[group]), strict=True):
            if kind is not None and found is not None:
                frozen = (kind == 0).nonzero().flatten()
                found.index_fill_(0, frozen.to(found.device), 0.0)
        return [
            RowChoice(
                count, *(None if k is None else (k == count).nonzero().flatten() for k in kinds)
            )
            for count in sorted(set(counts) - {0})
        ]

    @torch.no_grad()
    def norm(self, norm_type: float) -> Tensor:
        """The `norm_type`-norm of the gradients, each row once; float64 on the device.

        Every row's part in float64, scaled to whole numbers and added up as such: the same number
        whatever the order of the rows and whoever has them.
        """
        powers: dict[bool, list[Tensor]] = {False: [], True: []}
        for part in self.parts:
            if part.rows.grad is not None:
                rows, empty = part.rows.grad.as_subclass(Tensor).double().abs(), not len(part.rows)
                if math.isinf(norm_type):
                    own = rows.new_zeros(0) if empty else rows.amax(1)
                else:
                    own = rows.pow(norm_type).sum(1)
                powers[part.at_home].append(own)
        none = torch.zeros(0, dtype=torch.float64, device=self._tables.world.device)
        shared, own = (torch.cat([none, *powers[home]]) for home in (False, True))
        most = _most(torch.cat((shared, own)))
        if self.guard is not None:
            most = self._of_all(most.reshape(1), "the largest row gradient").max()
        if math.isinf(norm_type):
            return most
        count = max(1, sum(plan.all_distinct for plan in self._flight.plans))
        exponent = torch.frexp(most).exponent.clamp(min=-900)
        shift = 61 - math.ceil(math.log2(count)) - exponent
        whole = [
            torch.ldexp(values, shift).round().to(torch.int64).sum() for values in (shared, own)
        ]
        if self.guard is not None:
            whole[1] = self._of_all(whole[1].reshape(1), "sums of squares").sum()
        total = torch.ldexp((whole[0] + whole[1]).double(), -shift)
        return torch.where(torch.isfinite(most), total, most).pow(1 / norm_type)

    def _of_all(self, value: Tensor, what: str) -> Tensor:
        """One number of every rank."""
        what = f"{what} of step {self._flight.step}"
        return self._tables.link.start_all_gather(value, PLANNING, what)().flatten()


def _most(values: Tensor) -> Tensor:
    """The largest of non-negative float64 values `[n]`, 0 of none; infinite where one is NaN."""
    if not len(values):
        return values.new_zeros(())
    most = values.max()
    return torch.where(torch.isnan(most), torch.full_like(most, math.inf), most)


# -----------------------------------------------------------------------------
# Whole tables in original ids: to read after a flush, or to load.

Part = tuple[int, slice, Tensor]
"""Index of a table, columns, their new values `[rows, columns]`."""

_WAY_OUT = (
    "each node holds a copy of the whole tables while they are read this way: use nodes with more "
    "memory, or `distcache.fit`, whose checkpoints are written from each node's part"
)


class WholeTables:
    """Whole tables, where nothing is newer in the cache; every method is called by all ranks, but
    for what says otherwise."""

    def __init__(self, tables: CachedTables) -> None:
        self._tables, self._world = tables, tables.world

    def views(
        self, states: bool = False
    ) -> Iterator[tuple[TableSpec, tuple[Tensor | None, Tensor | None]]]:
        """Each table with its weights `[rows, D]` and state `[rows, S]`.

        Views of the store on one node. On several nodes no store has a whole table: copies as of
        now, one on each node, that its ranks share; and of weights and `states` only what was
        asked for, the other is None. Raises MemoryTooSmallError where a node does not hold them.
        """
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

    def replace(self, parts: Sequence[Part], is_state: bool) -> None:
        """Let columns of whole tables, of their weights or their state, be `parts`; the cache is
        empty then."""

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
        self._tables.forget()

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
        memory = share_memory(size, world, f"a copy of table {spec.name!r}", _WAY_OUT)
        copy = tensor_in(memory, 0, (spec.rows, width), store.dtype)
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
    for (ids,) in blocks([range(len(values))], store.layout.dim * store.dtype.itemsize):
        (numbers,) = row_numbers(store, table, [ids])
        own = store.part.holds(numbers)
        places = torch.from_numpy(store.part.places(numbers[own]))
        if target is not None:
            new = values[ids.start : ids.stop][torch.from_numpy(own)]
            target[places, columns] = new.to(target)
