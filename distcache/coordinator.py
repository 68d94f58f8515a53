"""What crosses ranks in a step, in program order: fills, row gradients, dense gradients, control.

Every rank issues [fill], [row gradients to their homes], [sums to all], [dense chunks by index],
[loss and control], with zero lengths where it has nothing; who is ready early waits for its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distcache.comm.counters import DENSE, PLANNING, ROWS
from distcache.comm.link import Link
from distcache.step_plan import StepPlan

CHUNK_ELEMENTS = 1 << 20
"""Elements of one all-reduce of the flat dense gradient."""


def share_rows(link: Link, plan: StepPlan, rows: Tensor) -> Tensor:
    """Cooperative fill: each home's fetched rows `[M_h, D + S]` -> all fetched rows `[M, D + S]`.

    Host memory was read once, by the home; the copies travel over the device group.
    """
    size = link.world.size
    if size == 1:
        return rows
    return link.all_to_all(
        rows.repeat(size, 1), [len(rows)] * size, plan.fetch_counts, ROWS, f"fill {plan.step}"
    )


def reduce_rows(link: Link, plan: StepPlan, gradient: Tensor, native: bool = False) -> Tensor:
    """Sum the local row gradients `[U, D]` (canonical order) over all ranks.

    Each rank sends the rows that it touched to their homes, which add them in rank order, one
    pass per source, and send the sums `[U_h, D]` to all: the bytes of a ring all-reduce at most,
    and a result that depends on nothing but the contributions. `native` leaves the sum to the
    library's all-reduce, whose bits depend on a row's place in the buffer.
    """
    world = link.world
    if world.size == 1:
        return gradient
    if native:
        link.all_reduce(gradient, ROWS, f"row gradients {plan.step}")
        return gradient
    touched = plan.touched.to(gradient.device)
    received = link.all_to_all(
        gradient.index_select(0, touched),
        plan.touched_counts,
        plan.source_counts,
        ROWS,
        f"row gradients {plan.step}",
    )
    own = plan.home_counts[world.rank]
    sums = gradient.new_zeros((own, gradient.shape[1]))
    sources = plan.source_rows.to(gradient.device)
    parts = zip(sources.split(plan.source_counts), received.split(plan.source_counts), strict=True)
    for rows, part in parts:
        # Rows are distinct within a source: a pass of plain additions, no atomics.
        sums.index_copy_(0, rows, sums.index_select(0, rows).add_(part))
    return link.all_to_all(
        sums.repeat(world.size, 1),
        [own] * world.size,
        plan.home_counts,
        ROWS,
        f"row sums {plan.step}",
    )


class DenseGradients:
    """The gradients of the dense part as views of one flat buffer, summed in chunks by index."""

    def __init__(self, parameters: Iterable[nn.Parameter], link: Link) -> None:
        self._link = link
        self.parameters = [p for p in parameters if p.requires_grad]
        total = sum(p.numel() for p in self.parameters)
        first = self.parameters[0] if self.parameters else torch.empty(0)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        start = 0
        for parameter in self.parameters:
            view = self.flat[start : start + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            start += parameter.numel()

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.flat.zero_()

    def sum(self) -> None:
        """Sum over the ranks, in place."""
        for chunk in self.flat.split(CHUNK_ELEMENTS):
            self._link.all_reduce(chunk, DENSE, "dense gradients")


@dataclass(frozen=True)
class Agreement:
    """What all ranks know at the end of a step: the global loss and the flags that came with it."""

    loss: float
    bad_ranks: tuple[int, ...]
    stop: bool


def agree(link: Link, loss: Tensor, stop: bool) -> Agreement:
    """Sum the local losses (shares of the global mean) and the ranks' flags, in float64."""
    world = link.world
    control = torch.zeros(2 + world.size, dtype=torch.float64)
    control[0] = loss.detach().double().cpu()
    control[1] = float(stop)
    control[2 + world.rank] = float(not torch.isfinite(control[0]))
    on_device = control.to(world.device)
    link.all_reduce(on_device, PLANNING, "loss and control")
    link.settle("the step's end")
    values = on_device.tolist()
    bad = tuple(rank for rank, flag in enumerate(values[2:]) if flag)
    return Agreement(loss=values[0], bad_ranks=bad, stop=values[1] > 0)
