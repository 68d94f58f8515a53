"""What crosses ranks in a step, in program order: fills, row gradients, dense gradients, control.

Every rank issues [fill], [late rows], [fills and early rows of the steps ahead], [row gradients to
their homes], [dense chunks by index], [loss and control], [sums to all], with zero lengths where it
has nothing; who is ready early waits for its turn. The three that follow backward are under way at
once, so that homes add up while the dense part is exchanged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcache.comm.agreement import agree_on
from distcache.comm.link import DENSE, PLANNING, ROWS, CollectiveCounters, Link, spread
from distcache.comm.world import current_world, require_group
from distcache.errors import ConfigError
from distcache.ops.copies import put
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
    """Gradients of dense parameters as views of one flat buffer, summed over the ranks in chunks.

    For loops without DDP: what `distcache.train` sums its dense gradients with, so that a loop over
    the same model and batches has its bits. The ranks begin with the same weights (the same seed),
    which the first `sum` checks::

        ebc = distcache.CachedEmbeddingBagCollection(
            tables, rows=100_000, optimizer=distcache.optim.Adagrad(lr=0.01),
            gradient_reduction="sum",
        )
        model = DLRM(ebc, ...)
        dense = distcache.DenseGradients(model, gradient_reduction="sum")
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        for batch in distcache.lookahead(batches, ebc):
            optimizer.zero_grad()
            logits = model(batch.dense_features, batch.sparse_features).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
            (loss / global_batch_size).backward()
            dense.sum()
            ebc.step()
            optimizer.step()

    `flat`: the buffer, one element for each of the `parameters` that train.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[nn.Parameter],
        process_group: dist.ProcessGroup | None = None,
        *,
        gradient_reduction: str = "mean",
        timeout_s: float = 300.0,
        link: Link | None = None,
    ) -> None:
        """`parameters`, or the module that has them: those that require a gradient and are not
        empty, all of one dtype and device. `process_group`: whose ranks sum (None: all), joined by
        all of them at the first `sum`; `timeout_s`: longest wait for another rank, seconds;
        `gradient_reduction`: `mean` or `sum`, as of the collection; `link`: what the engine sums
        by. Raises ConfigError.
        """
        if gradient_reduction not in ("mean", "sum"):
            raise ConfigError(f"gradient_reduction={gradient_reduction!r} is not 'mean' or 'sum'")
        own = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        self.parameters = [p for p in own if p.requires_grad and p.numel()]
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ConfigError(f"parameters are {shown}: make one DenseGradients for each kind")
        self._link, self._group, self._timeout_s = link, process_group, timeout_s
        self._is_mean = gradient_reduction == "mean"
        first = self.parameters[0] if self.parameters else torch.empty(0)
        total = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        parts = self.flat.split([p.numel() for p in self.parameters])
        self._views = [
            part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)
        ]
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def zero(self) -> None:
        """Forget the last step's gradients; `zero_grad` of an optimizer does it too."""
        self.flat.zero_()

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the parameters' gradients over the ranks, in place (then times 1/W for `mean`).

        Called by all ranks after the last backward pass of a step; parameters without a gradient
        count as zeros. Raises ConfigError at first where the ranks' weights differ.
        """
        if self._link is None:
            self._link = self._joined()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:  # zero_grad() lets go of it, backward makes another
                view.copy_(parameter.grad)
            parameter.grad = view
        self.start_sum()()
        size = self._link.world.size
        if self._is_mean and size > 1:
            self.flat.mul_(1.0 / size)

    def _joined(self) -> Link:
        """A link of groups of its own; the ranks compare what they are about to train."""
        require_group("DenseGradients.sum")
        world = current_world(self.flat.device, self._group, self._timeout_s)
        bits = [p.detach().cpu().reshape(-1).view(torch.uint8).numpy() for p in self.parameters]
        said = {
            "the shapes of dense parameters": [tuple(p.shape) for p in self.parameters],
            "the checksums of their weights": [zlib.crc32(own.tobytes()) for own in bits],
            "gradient_reduction is mean": self._is_mean,
        }
        agree_on(world, said)
        return Link(world, world.device_group, CollectiveCounters(), "the dense gradients' group")

    def start_sum(self) -> Callable[[], None]:
        """Sum over the ranks, in place; they are there when it has been called."""
        link = self._link
        if link is None:
            raise RuntimeError("sum() joins the ranks first")
        waits = [
            link.start_all_reduce(chunk, DENSE, "dense gradients")
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
