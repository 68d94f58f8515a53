"""What crosses ranks in a step, in program order: fills, row gradients, dense gradients, control.

Every rank issues [fill], [late rows], [fills and early rows of the steps ahead], [row gradients to
their homes], [dense chunks by index], [loss and control], [sums to all], with zero lengths where it
has nothing; who is ready early waits for its turn. The three that follow backward are under way at
once, so that homes add up while the dense part is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distcache.comm.link import DENSE, PLANNING, ROWS, Link, spread
from distcache.ops.reference import put
from distcache.step_plan import ShardPlan, StepPlan
from distcache.streams import COMMUNICATION, Mark, Streams

CHUNK_ELEMENTS = 1 << 20
"""Elements of one all-reduce of the flat dense gradient."""


def share_rows(link: Link, plan: StepPlan, rows: Tensor) -> Tensor:
    """Cooperative fill: each home's fetched rows `[M_h, D + S]` -> all fetched rows `[M, D + S]`.

    Host memory was read once, by the home; the copies travel over the device group.
    """
    return spread(link, rows, plan.fetch_counts, ROWS, f"fill {plan.step}")


def start_reduce_rows(
    link: Link,
    plan: StepPlan,
    gradient: Tensor,
    native: bool = False,
    where: tuple[Tensor, Tensor] | None = None,
) -> Callable[[], Tensor]:
    """Sum the local row gradients `[U, D]` (canonical order) over all ranks; call it for the sums.

    Each rank sends the rows that it touched to their homes, which add them in rank order, one
    pass per source, and send the sums `[U_h, D]` to all: the bytes of a ring all-reduce at most,
    and a result that depends on nothing but the contributions. `native` leaves the sum to the
    library's all-reduce, whose bits depend on a row's place in the buffer. `where`: the plan's
    `touched` and `source_rows` on the device already.
    """
    if native:
        wait = link.start_all_reduce(gradient, ROWS, f"row gradients {plan.step}")

        def finish() -> Tensor:
            wait()
            return gradient

        return finish
    at_home = start_to_homes(link, plan, gradient, where)
    return lambda: to_all(link, plan, at_home(), f"row sums {plan.step}")


def start_to_homes(
    link: Link, plan: StepPlan, gradient: Tensor, where: tuple[Tensor, Tensor] | None = None
) -> Callable[[], Tensor]:
    """The sums over all ranks of the gradients `[U, D]` of this home's rows, `[U_h, D]`, when it
    is called.

    `where` as in `start_reduce_rows`.
    """
    if link.world.size == 1:
        return lambda: gradient
    touched, sources = where or (
        plan.touched_rows.to(gradient.device),
        plan.source_rows.to(gradient.device),
    )
    receive = link.start_all_to_all(
        gradient.index_select(0, touched),
        plan.touched_counts,
        plan.source_counts,
        ROWS,
        f"row gradients {plan.step}",
    )
    own = plan.home_counts[link.world.rank]
    return lambda: _sum_by_rank(receive(), sources, plan.source_counts, own)


def to_all(link: Link, plan: StepPlan, own: Tensor, what: str) -> Tensor:
    """What each home has for its rows, `[U_h, D]`, to all ranks: `[U, D]` in canonical order."""
    return spread(link, own, plan.home_counts, ROWS, what)


def start_to_sharded_homes(
    link: Link, step: int, shard: ShardPlan, gradient: Tensor, sources: Tensor
) -> Callable[[], Tensor]:
    """The local gradients of a rank's sharded rows `[N, D]` to their homes, and, when it is called,
    the sums of those of this home's rows, `[H, D]`, in rank order; `sources`: its `source_rows` on
    the device."""
    what = f"sharded row gradients {step}"
    receive = link.start_all_to_all(gradient, shard.counts, shard.source_counts, ROWS, what)
    return lambda: _sum_by_rank(receive(), sources, shard.source_counts, len(shard.slots))


def _sum_by_rank(received: Tensor, sources: Tensor, counts: Sequence[int], rows: int) -> Tensor:
    """Add what came from rank 0, then rank 1, ... to `rows` rows, `[rows, D]`."""
    sums = received.new_zeros((rows, received.shape[1]))
    (first, part), *others = zip(
        sources.split(list(counts)), received.split(list(counts)), strict=True
    )
    put(sums, first, part)
    for at, part in others:
        # Rows are distinct within a source: a pass of plain additions, no atomics.
        put(sums, at, sums.index_select(0, at).add_(part))
    return sums


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

    def start_sum(self) -> Callable[[], None]:
        """Sum over the ranks, in place; they are there when it has been called."""
        waits = [
            self._link.start_all_reduce(chunk, DENSE, "dense gradients")
            for chunk in self.flat.split(CHUNK_ELEMENTS)
        ]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish


@dataclass(frozen=True)
class Agreement:
    """What all ranks know at the end of a step: the global loss and the flags that came with it."""

    loss: float
    bad_ranks: tuple[int, ...]
    stop: bool


def words(loss: Tensor, stop: bool) -> Tensor:
    """What a rank says at the end of a step, float64 `[2]` on the loss' device: its share of the
    global mean loss, and 1 where it wants to stop."""
    said = loss.new_full((2,), float(stop), dtype=torch.float64)
    said[0] = loss.detach()
    return said


def agreement(said: Tensor) -> Agreement:
    """What follows from the `words` of all ranks, float64 `[W, 2]`: the same on each.

    Losses are added up in rank order. Where they come to no finite number, `bad_ranks` are those
    whose own is none, or all ranks.
    """
    losses, stops = zip(*said.tolist(), strict=True)
    total = 0.0
    for loss in losses:
        total += loss
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad and not math.isfinite(total):
        bad = list(range(len(losses)))
    return Agreement(loss=total, bad_ranks=tuple(bad), stop=any(stops))


@dataclass(frozen=True)
class Control:
    """A step's words on their way to the host: `said` float64 `[W, 2]` there once `mark` is
    reached, and on the device `enabled`, bool `[1]`: whether all losses so far were finite."""

    said: Tensor
    enabled: Tensor
    mark: Mark
    link: Link

    def read(self) -> Agreement:
        """What was said; waits for it. Raises PeerError naming who is missing."""
        self.link.settle("the step's end", self.mark)
        return agreement(self.said)


class ControlRing:
    """Brings the ranks' losses (shares of the global mean, in float64) and flags to all of them,
    step by step; each adds them up in rank order.

    Nobody waits for a device here: the words are copied to the host beside what follows, into one
    of `delay + 1` buffers that take turns, and read up to `delay` steps later. Whether anything
    may still be applied is known on the device at once; it stays false after a loss that is not
    finite.
    """

    def __init__(self, link: Link, streams: Streams, delay: int) -> None:
        world = link.world
        self._link, self._streams = link, streams
        pinned = streams.asynchronous
        shape = (delay + 1, world.size, 2)
        self._ring = torch.zeros(shape, dtype=torch.float64, pin_memory=pinned)
        self._enabled = torch.ones(1, dtype=torch.bool, device=world.device)
        self._turn = 0

    def start(self, loss: Tensor, stop: bool) -> Callable[[], Control]:
        """Tell all ranks `loss` (one element, on the device) and this rank's `stop`; call it for
        what all said."""
        wait = self._link.start_all_gather(words(loss, stop), PLANNING, "loss and control")
        return lambda: self._control(wait())

    def _control(self, said: Tensor) -> Control:
        """The words `said`, on their way to the host."""
        self._enabled = self._enabled & torch.isfinite(said[:, 0].sum())
        on_host = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        on_host.copy_(said, non_blocking=True)
        mark = self._streams.mark(COMMUNICATION)
        return Control(on_host, self._enabled, mark, self._link)
