"""StepPlan: everything that one step of one group moves and sums, decided before it runs.

A plan is a pure function of the id stream and of the decisions before it. Movers, the coordinator
and the optimizer only do what it says.

*Canonical order* of a step's U distinct rows: by home rank, then by first occurrence over the
ranks in rank order. It depends on the ids alone, never on slots, hits, capacity or window, so
sums and updates made in it have the same bits for every cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distcache.errors import PlanError
from distcache.shard_plan import ShardPlan, shard_laws, shard_problems


@dataclass(frozen=True)
class StepPlan:
    """One rank's plan of one step for one group of tables. All tensors: int64, CPU.

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
    """`[n]`: local ids, stably sorted by leaf row (occurrence order within a row)."""
    touched: Tensor
    """`[R + N]`: leaf rows of this rank's ids, ascending: R canonical ones, then all of `shard`."""
    segments: Tensor
    """`[R + N + 1]`: `order[segments[i]:segments[i + 1]]` are the occurrences of `touched[i]`."""
    touched_counts: tuple[int, ...]
    """`[W]`: how many of the R rows each home owns."""
    slots: Tensor
    """`[U]`: the device slot of each canonical row, the same on all ranks."""
    home_counts: tuple[int, ...]
    """`[W]`: distinct rows of each home; sums to U."""
    source_rows: Tensor
    """This home's rows named by rank 0, then rank 1, ...: index in its part, ascending per rank."""
    source_counts: tuple[int, ...]
    """`[W]`: how many of `source_rows` come from each rank."""
    fetch: Tensor
    """`[M]`: canonical indices of the rows to fetch, by home."""
    fetch_counts: tuple[int, ...]
    """`[W]`: how many of `fetch` each home reads from its store."""
    fetch_rows: Tensor
    """Row numbers that this home reads from the store, in the order of its part of `fetch`."""
    evict_slots: Tensor
    """Slots of this home whose rows leave before the fetched rows come in."""
    evict_rows: Tensor
    """The rows that leave, in the order of `evict_slots`."""
    move_after: int
    """Movement may start once `apply` of this step is done (-1: at once)."""
    lookup_hits: int
    """How many of the n local ids found their row cached when planned."""
    shard: ShardPlan | None = None
    """The sharded rows of the step; None for a group that has none."""

    @property
    def distinct(self) -> int:
        """U."""
        return len(self.slots)

    @property
    def misses(self) -> int:
        """M."""
        return len(self.fetch)

    @property
    def leaf_rows(self) -> int:
        """U + N: rows that this rank computes with."""
        return self.distinct + (0 if self.shard is None else self.shard.rows)

    @property
    def touched_rows(self) -> Tensor:
        """`[R]`: canonical indices of this rank's replicated rows, ascending."""
        return self.touched if self.shard is None else self.touched[: sum(self.touched_counts)]

    @property
    def all_distinct(self) -> int:
        """Distinct rows of the global batch, replicated and sharded."""
        return self.distinct + (0 if self.shard is None else self.shard.distinct)

    @property
    def all_misses(self) -> int:
        """Rows to fetch over all homes, replicated and sharded."""
        return self.misses + (0 if self.shard is None else self.shard.misses)

    @property
    def fetch_slots(self) -> Tensor:
        """`[M]`: slots that the fetched rows fill."""
        return self.slots[self.fetch]

    def home_slice(self, home: int) -> slice:
        """The canonical rows of one home."""
        start = sum(self.home_counts[:home])
        return slice(start, start + self.home_counts[home])


def check_plan(plan: StepPlan) -> None:
    """The cheap laws of one plan: lengths agree, indices stay in range. Raises PlanError."""
    size, shard = plan.distinct, plan.shard
    problems = {
        "home_counts do not sum to the distinct rows": sum(plan.home_counts) != size,
        "fetch_counts do not sum to the fetched rows": sum(plan.fetch_counts) != plan.misses,
        "touched_counts do not sum to the touched rows": (
            sum(plan.touched_counts) + plan.leaf_rows - size != len(plan.touched)
        ),
        "source_counts do not sum to the source rows": (
            sum(plan.source_counts) != len(plan.source_rows)
        ),
        "evicted slots and rows differ in number": len(plan.evict_slots) != len(plan.evict_rows),
        "movement would wait for the step itself": plan.move_after >= plan.step,
        "order and positions differ in length": len(plan.order) != len(plan.positions),
        "segments do not cover the ids": int(plan.segments[-1]) != len(plan.positions),
    }
    if shard is not None:
        problems |= shard_problems(shard)
    for problem, broken in problems.items():
        if broken:
            raise PlanError(f"plan of step {plan.step}: {problem}")


def check_plan_fully(plan: StepPlan, slots: int | None) -> None:
    """Every law that one plan alone can break; `slots`: C, or None where the cache grows.

    Raises PlanError naming the step and the law.
    """
    check_plan(plan)
    laws = {
        "two rows share a slot": len(plan.slots.unique()) != plan.distinct,
        "a slot lies outside the cache": slots is not None
        and plan.distinct > 0
        and not 0 <= int(plan.slots.min()) <= int(plan.slots.max()) < slots,
        "a position names no canonical row": len(plan.positions) > 0
        and not 0 <= int(plan.positions.min()) <= int(plan.positions.max()) < plan.leaf_rows,
        "a fetched row is named twice": len(plan.fetch.unique()) != plan.misses,
        "touched rows are not those of the ids": not torch.equal(
            plan.touched, plan.positions.unique()
        ),
        "the ids are not in stable order": not torch.equal(
            plan.order, plan.positions.argsort(stable=True)
        ),
        "a slot of the step itself is evicted without being filled": bool(
            _inside(plan.evict_slots, plan.slots).any()
            and not _inside(
                plan.evict_slots[_inside(plan.evict_slots, plan.slots)], plan.fetch_slots
            ).all()
        ),
    }
    if plan.shard is not None:
        laws |= shard_laws(plan.shard, slots)
    for law, broken in laws.items():
        if broken:
            raise PlanError(f"plan of step {plan.step}: {law}")


def _inside(values: Tensor, of: Tensor) -> Tensor:
    return torch.isin(values, of)
