"""Plans: everything that one step of one group moves and sums, decided before it runs.

A plan is a pure function of the id stream and of the decisions before it. Movers and the optimizer
only do what it says. *Canonical order* of a step's U distinct rows: by home rank, then by shelf
(`planner.home`), then by first occurrence over the ranks in rank order. It depends on the ids and
the tables alone, never on slots, hits, capacity or window, so sums and updates made in it have the
same bits for every cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from distcache.errors import PlanError

Change = Callable[[Tensor], Tensor]
"""One tensor for another, such as that of the device for that of the CPU."""

# -----------------------------------------------------------------------------
# Sharded rows that travel from their homes to the ranks that requested them (`planner.shard`).


@dataclass(frozen=True)
class Transfer:
    """Rows of a step on their way from their homes to the ranks that requested them.

    Tensors are int32, on the CPU. `slots` `[s]`: this device's slots of the rows to send, to rank
    0, then to rank 1, ...; `send_counts` `[W]`. `places` `[r]`: the place of each received row
    among the rows of `ShardPlan.counts`, by home; `receive_counts` `[W]`.
    """

    slots: Tensor
    send_counts: tuple[int, ...]
    places: Tensor
    receive_counts: tuple[int, ...]

    def mapped(self, change: Change) -> Transfer:
        """The same with every tensor changed."""
        return replace(self, slots=change(self.slots), places=change(self.places))


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """What one rank does in a step with its replicated rows, or with its sharded ones. Tensors lie
    on the CPU, all int32, but row numbers int64."""

    slots: Tensor
    """This device's slots of the step's rows that lie so, in canonical order: U replicated ones,
    the same on all ranks, or H sharded ones of this home."""
    source_rows: Tensor
    """This home's rows as rank 0 asked for them, then rank 1, ...: index in its part."""
    source_counts: tuple[int, ...]
    """`[W]`: how many of `source_rows` come from each rank."""
    fetch_slots: Tensor
    """Slots that the fetched rows fill, of all homes, `[M]`, or of this one."""
    fetch_rows: Tensor
    """Row numbers that this home reads from the store, in the order of its part of those."""
    evict_slots: Tensor
    """Slots of this home whose rows leave before the fetched rows come in."""
    evict_rows: Tensor
    """The rows that leave, in the order of `evict_slots`."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan(RegionPlan):
    """One rank's plan of the sharded rows of a step: cached by their homes alone.

    N: distinct sharded rows of this rank's ids, by home, then by first occurrence; H: those that
    some rank named of this rank's home.
    """

    distinct: int
    """Sharded rows of the global batch, over all homes."""
    misses: int
    """Of these, rows that are fetched."""
    counts: tuple[int, ...]
    """`[W]`: how many of this rank's N rows each home has."""
    early: Transfer | None
    """Rows that no step after `move_after` changes before this one: they travel with movement.
    None where none ever does."""
    late: Transfer
    """The others, which travel after `apply` of the step before."""

    @property
    def rows(self) -> int:
        """N."""
        return sum(self.counts)

    @property
    def transfers(self) -> list[Transfer]:
        """Those that there are."""
        return [self.late] if self.early is None else [self.early, self.late]

    def mapped(self, change: Change) -> ShardPlan:
        """See `Indices.mapped`."""
        return replace(
            self,
            slots=change(self.slots),
            source_rows=change(self.source_rows),
            fetch_slots=change(self.fetch_slots),
            early=self.early and self.early.mapped(change),
            late=self.late.mapped(change),
        )


def _shard_problems(shard: ShardPlan) -> dict[str, bool]:
    """The cheap laws of one plan of sharded rows, and whether each is broken."""
    parts = shard.transfers
    sent, named = sum(part.slots.shape[0] for part in parts), shard.source_rows.shape[0]
    return {
        "sharded: source_counts do not sum to the source rows": sum(shard.source_counts) != named,
        "sharded: not every row arrives once": sum(p.places.shape[0] for p in parts) != shard.rows,
        "sharded: not every row is sent once": sent != named,
        "sharded: counts of a transfer do not sum to its rows": any(map(_miscounted, parts)),
        "sharded: fetched slots and rows differ": shard.fetch_slots.shape != shard.fetch_rows.shape,
        "sharded: evicted slots and rows differ": shard.evict_slots.shape != shard.evict_rows.shape,
    }


def _miscounted(transfer: Transfer) -> bool:
    """Return True if counts of a transfer differ from the rows that they count."""
    return (
        sum(transfer.send_counts) != transfer.slots.shape[0]
        or sum(transfer.receive_counts) != transfer.places.shape[0]
    )


def _shard_laws(shard: ShardPlan, slots: int | None) -> dict[str, bool]:
    """Every other law that one plan of sharded rows can break; `slots`: C, None: it grows."""
    sent, named = _sent_and_named(shard)
    arriving = torch.cat([part.places for part in shard.transfers]).sort().values
    return {
        "two sharded rows share a slot": len(shard.slots.unique()) != len(shard.slots),
        "a sharded row's slot lies outside the cache": not _inside(shard.slots, slots),
        "a sharded row arrives twice or never": not _counts_up(arriving, shard.rows),
        "sharded rows are sent that nobody asked for": any(
            not bool(torch.isin(own, asked).all()) for own, asked in zip(sent, named, strict=True)
        ),
        "a sharded row goes to a rank twice or never": any(
            not torch.equal(own.sort().values, asked.unique())
            for own, asked in zip(sent, named, strict=True)
        ),
        "a sharded row is fetched into no slot of the step": not bool(
            torch.isin(shard.fetch_slots, shard.slots).all()
        ),
        "a sharded slot of the step is evicted without being filled": not _filled_again(shard),
    }


def _counts_up(values: Tensor, count: int) -> bool:
    """Whether they are 0, 1, ... `count` - 1."""
    return torch.equal(values, torch.arange(count, dtype=values.dtype))


def _inside(values: Tensor, limit: int | None) -> bool:
    """Whether all lie in [0, limit); None is no limit."""
    return limit is None or bool(((values >= 0) & (values < limit)).all())


def _filled_again(part: RegionPlan) -> bool:
    """Whether those of the evicted slots that the step itself uses are filled."""
    used = part.evict_slots[torch.isin(part.evict_slots, part.slots)]
    return bool(torch.isin(used, part.fetch_slots).all())


def _sent_and_named(shard: ShardPlan) -> tuple[list[Tensor], list[Tensor]]:
    """By rank: the slots that this home sends to it, and those of the rows that it named."""
    named = shard.slots[shard.source_rows].split(shard.source_counts)
    by_part = [part.slots.split(part.send_counts) for part in shard.transfers]
    return [torch.cat(parts) for parts in zip(*by_part, strict=True)], list(named)


class Indices(NamedTuple):
    """Index tensors of a plan, see there: on the CPU, or on the device."""

    slots: Tensor
    fetch_slots: Tensor
    touched_rows: Tensor | None
    source_rows: Tensor | None
    shard: ShardPlan | None

    def mapped(self, change: Change) -> Indices:
        """The same with every tensor changed."""
        *own, shard = self
        there = [None if tensor is None else change(tensor) for tensor in own]
        return Indices(*there, shard and shard.mapped(change))

    def tensors(self) -> list[Tensor]:
        """All of them."""
        found: list[Tensor] = []
        self.mapped(lambda tensor: found.append(tensor) or tensor)
        return found


@dataclass(frozen=True, kw_only=True)
class StepPlan(RegionPlan):
    """One rank's plan of one step for one group of tables, and of its replicated rows.

    U: distinct rows of the global batch (the replicated ones); R: those of this rank's ids; n: this
    rank's ids; W: ranks; M: rows to fetch over all homes. Of a group with sharded rows, the N rows
    of `shard` follow the U ones: ids and segments speak of U + N leaf rows.
    """

    step: int
    """Position in the stream (training and evaluation steps count alike)."""
    kind: str
    """`train` or `eval`; an eval step dirties nothing."""
    positions: Tensor
    """`[n]`: leaf row of each id of the local batch: its canonical index, or U + its place in the
    rows of `shard`."""
    order: Tensor
    """`[n]`: local ids, those of `touched[0]` first, then those of the next, each in order."""
    touched: Tensor
    """`[R + N]`: leaf rows of this rank's ids, as it asked for them: R canonical ones, by home,
    then all of `shard`."""
    segments: Tensor
    """`[R + N + 1]`: `order[segments[i]:segments[i + 1]]` are the occurrences of `touched[i]`."""
    touched_counts: tuple[int, ...]
    """`[W]`: how many of the R rows each home owns."""
    home_counts: tuple[int, ...]
    """`[W]`: distinct rows of each home; sums to U."""
    fetch: Tensor
    """`[M]`: canonical indices of the rows to fetch, by home."""
    fetch_counts: tuple[int, ...]
    """`[W]`: how many of `fetch` each home reads from its store."""
    move_after: int
    """Movement may start once `apply` of this step is done (-1: at once)."""
    arena: Tensor
    """int32: one piece of memory, in which `positions`, `order` and `fetch_slots` lie, and of
    several ranks `slots`, `touched` and `source_rows`."""
    lookup_hits: int
    """How many of the n local ids found their row cached when planned."""
    shard: ShardPlan | None = None
    """The sharded rows of the step; None for a group that has none."""

    @property
    def distinct(self) -> int:
        """U."""
        return self.slots.shape[0]

    @property
    def misses(self) -> int:
        """M."""
        return self.fetch.shape[0]

    @property
    def leaf_rows(self) -> int:
        """U + N: rows that this rank computes with."""
        return self.distinct + (0 if self.shard is None else self.shard.rows)

    @property
    def touched_rows(self) -> Tensor:
        """`[R]`: canonical indices of this rank's replicated rows."""
        return self.touched if self.shard is None else self.touched[: sum(self.touched_counts)]

    @property
    def all_distinct(self) -> int:
        """Distinct rows of the global batch, replicated and sharded."""
        return self.distinct + (0 if self.shard is None else self.shard.distinct)

    def home_slice(self, home: int) -> slice:
        """The canonical rows of one home."""
        start = sum(self.home_counts[:home])
        return slice(start, start + self.home_counts[home])

    @property
    def indices(self) -> Indices:
        """What movement and collectives read of it, on the device too."""
        if len(self.home_counts) == 1:  # a rank alone sends no gradients
            return Indices(self.slots, self.fetch_slots, None, None, self.shard)
        slots, touched = (self.slots, self.fetch_slots), self.touched_rows
        return Indices(*slots, touched, self.source_rows, self.shard)


def check_plan(plan: StepPlan) -> None:
    """The cheap laws of one plan: lengths agree, indices stay in range. Raises PlanError."""
    size, shard = plan.distinct, plan.shard
    problems = {
        "home_counts do not sum to the distinct rows": sum(plan.home_counts) != size,
        "fetch_counts do not sum to the fetched rows": sum(plan.fetch_counts) != plan.misses,
        "touched_counts do not sum to the touched rows": (
            sum(plan.touched_counts) + plan.leaf_rows - size != plan.touched.shape[0]
        ),
        "source_counts do not sum to the source rows": (
            sum(plan.source_counts) != plan.source_rows.shape[0]
        ),
        "evicted slots and rows differ in number": plan.evict_slots.shape != plan.evict_rows.shape,
        "movement would wait for the step itself": plan.move_after >= plan.step,
        "order and positions differ in length": plan.order.shape != plan.positions.shape,
    }
    if shard is not None:
        problems |= _shard_problems(shard)
    _refuse(plan, problems)


def check_plan_fully(plan: StepPlan, slots: int | None) -> None:
    """Every law that one plan alone can break; `slots`: C, or None where the cache grows.

    Raises PlanError naming the step and the law.
    """
    check_plan(plan)
    laws = {
        "two rows share a slot": len(plan.slots.unique()) != plan.distinct,
        "a slot lies outside the cache": not _inside(plan.slots, slots),
        "a position names no canonical row": not _inside(plan.positions, plan.leaf_rows),
        "a fetched row is named twice": len(plan.fetch.unique()) != plan.misses,
        "a fetched row fills another slot than its own": not torch.equal(
            plan.fetch_slots, plan.slots[plan.fetch]
        ),
        "segments do not cover the ids": int(plan.segments[-1]) != plan.positions.shape[0],
        "touched rows are not those of the ids": not torch.equal(
            plan.touched.sort().values, plan.positions.unique()
        ),
        "the ids are not in the order of the touched rows": not _ordered(plan),
        "a slot of the step itself is evicted without being filled": not _filled_again(plan),
    }
    if plan.shard is not None:
        laws |= _shard_laws(plan.shard, slots)
    _refuse(plan, laws)


def _ordered(plan: StepPlan) -> bool:
    """Whether `order` has the ids of each touched row, ascending, one after the other."""
    of = plan.touched.repeat_interleave(plan.segments.diff())
    if not torch.equal(plan.positions[plan.order], of):
        return False
    rises = plan.order.diff() > 0
    return bool((rises | (of.diff() != 0)).all())


def _refuse(plan: StepPlan, laws: dict[str, bool]) -> None:
    """Raise PlanError for the first law that is broken."""
    for law, broken in laws.items():
        if broken:
            raise PlanError(f"plan of step {plan.step}: {law}")
