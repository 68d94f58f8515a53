"""The rows of one step, and their gradients, as an optimizer of a loop of one's own has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distcache.comm.link import PLANNING
from distcache.engine.movement import RowChoice
from distcache.engine.step import StepContext
from distcache.engine.tables import CachedTables, Owners, RowSums, all_of
from distcache.errors import PlanError
from distcache.optim import RowUpdate

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


Kind = tuple[RowUpdate, int]
"""How rows are updated, and as which step of their table."""


def choices_of(owners: Owners | None, kinds: Sequence[Kind | None]) -> list[RowChoice]:
    """What of a group's rows is updated. `kinds`: by table of the group, None for one that is left
    as it is; `owners`: None where all are alike."""
    if owners is None:
        return [] if kinds[0] is None else [RowChoice(*kinds[0])]
    found = []
    for kind in [kind for kind in dict.fromkeys(kinds) if kind is not None]:
        mine = torch.tensor([one == kind for one in kinds])
        own = [None if at is None else mine[at.long()].nonzero().flatten() for at in owners]
        found.append(RowChoice(*kind, *own))
    return found


class StepRows:
    """The rows of a step as their optimizer has them: `parts`, the replicated ones first.

    `guard`: where homes have sums of their own, one number whose gradient is 0, or infinite where
    some home's sums are not finite: all ranks' scalers see the same. `params`: what an optimizer
    has as parameters.
    """

    def __init__(
        self, tables: CachedTables, context: StepContext, leaves: Sequence[Tensor]
    ) -> None:
        """`leaves` of the step, which are its rows where every rank has all sums."""
        self._tables, self._context = tables, context
        replicated: list[RowPart] = []
        sharded: list[RowPart] = []
        for place, (rows, plan, leaf) in enumerate(
            zip(tables.rows, context.plans, leaves, strict=True)
        ):
            home, there = tables.home_state, context.where[place].shard
            if rows.slots.replicated:
                mine = plan.home_slice(tables.world.rank) if home else slice(0, plan.distinct)
                whole = plan.shard is None and not home
                own = leaf if whole else leaf.detach()[mine].requires_grad_()
                replicated.append(RowPart(place, own, home, sharded=False))
            if plan.shard is not None and there is not None:
                own = rows.cache.gather(plan.shard.slots, there.slots)
                own = own.to(rows.cache.kind.dtype).requires_grad_()
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
            found = sums[part.group][part.sharded]
            if found is not None and part.at_home:
                found = found.as_subclass(HomeGradient)
            part.rows.grad = found
        if self.guard is not None and finite is not None:
            self.guard.grad = torch.where(finite, 0.0, math.inf).to(self.guard)

    def sums(self) -> RowSums:
        """The gradients to apply, as the optimizer's users have left them."""
        found: RowSums = [[None, None] for _ in self._tables.rows]
        for part in self.parts:
            if part.rows.grad is not None:
                found[part.group][part.sharded] = part.rows.grad.as_subclass(Tensor)
        return found

    def all_finite(self, sums: RowSums) -> Tensor:
        """Whether all sums, also those that other homes have, are finite: bool `[1]`."""
        own = [torch.isfinite(found).all() for found in all_of(sums)]
        one = torch.ones((), dtype=torch.bool, device=self._tables.world.device)
        finite = torch.stack([one, *own]).all().reshape(1)
        if self.guard is None:
            return finite
        return self._of_all(finite.to(torch.int64), "finite sums").min().reshape(1).bool()

    def owners(self, group: int, sums: RowSums, frozen: Sequence[bool]) -> Owners:
        """The table of every row of a group's sums, of which those that are `frozen`, by place in
        the group, become zero, so that nothing that looks at gradients counts them."""
        found = self._tables.tables_of_sums(self._context, group)
        for at, own in zip(found, sums[group], strict=True):
            if at is not None and own is not None and any(frozen):
                rows = torch.tensor(frozen)[at.long()].nonzero().flatten()
                own.index_fill_(0, rows.to(own.device), 0.0)
        return found

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
        if not any(powers.values()):  # no sums: then moves may be under way, on the same group
            return none.sum()
        shared, own = (torch.cat([none, *powers[home]]) for home in (False, True))
        # 0 where there are no rows, and infinite where one is NaN
        most = torch.cat((shared, own, none.new_zeros(1))).max().nan_to_num(math.inf, math.inf)
        if self.guard is not None:
            most = self._of_all(most.reshape(1), "the largest row gradient").max()
        if math.isinf(norm_type):
            return most
        count = max(1, sum(plan.all_distinct for plan in self._context.plans))
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
        what = f"{what} of step {self._context.step}"
        return self._tables.link.start_all_gather(value, PLANNING, what)().flatten()
