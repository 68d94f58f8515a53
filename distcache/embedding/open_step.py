"""The step of a collection that is open: its leaves, autograd's hooks on them, and what may still
be done with it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from distcache.embedding.ids import ReadIds
from distcache.engine.step import FORWARD, FORWARD_BACKWARD, TRAINING_LANE, Flight, Span, Stage
from distcache.engine.tables import Owners, StepRows
from distcache.errors import PlanError

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from distcache.embedding.step import CollectionTables


class OpenStep:
    """A planned step whose rows are on the device, with its micro-batches `reads`.

    Every forward looks up in the same leaves, one `[U + N, D]` for each group, so gradients gather
    there. The end of the backward pass in which the last micro-batch has taken part sums them over
    the ranks: from then on the `.grad` of `view.params` is what will be applied. `finite`: bool
    `[1]` on the device, the same on all ranks, whether all sums were; `owners`: by group, the
    table of each of its rows, where they are not all updated alike.
    """

    def __init__(
        self,
        tables: CollectionTables,
        flight: Flight,
        reads: list[ReadIds],
        leaves: Sequence[Tensor],
        frozen: frozenset[int],
    ) -> None:
        """`frozen`: the tables, by index, that this step leaves as they are."""
        self._tables, self.flight, self.reads, self.frozen = tables, flight, reads, frozen
        self.trains = [not frozen.issuperset(group.tables) for group in tables.engine.groups]
        """Whether any table of each group is updated."""
        self.leaves: list[Tensor] | None = None
        """None once the rows have changed, or the step has ended."""
        self._began = self._looked_up = 0.0
        self._forwarded: set[int] = set()
        self._backed: set[int] = set()
        self.reduced = False
        self.finite: Tensor | None = None
        self.owners: list[Owners | None] = []
        self._task = -1
        self._take(leaves)

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be applied or dropped."""
        waiting = (*(self.leaves or []), *(part.rows for part in self.view.parts))
        return any(tensor.grad is not None for tensor in waiting)

    # --- forward ----------------------------------------------------------------------------

    def pooled(self, micro: int, weights: Tensor | None = None) -> Tensor:
        """The bags of micro-batch `micro`, `[b, sum of widths]`, recorded if gradients are;
        `weights` `[n]`: of its ids, which may have come since it was read."""
        read, parts = self.reads[micro], None
        if weights is not None:
            lengths = read.ids.offsets.diff().view(len(read.samples), read.ids.batch_size)
            parts = weights.split(lengths.sum(1).tolist())
        pooled = self._tables.engine.pooled(self.flight, self._current_leaves(), micro, parts)
        self._watch(micro, [pooled])
        return pooled

    def rows(self, micro: int) -> list[Tensor]:
        """The row of every id of micro-batch `micro`, by lookup: `[n_f, D_f]` each."""
        found = self._tables.engine.lookup(self.flight, self._current_leaves(), micro)
        self._watch(micro, found)
        return found

    def _current_leaves(self) -> list[Tensor]:
        """The leaves; read again once a step has changed its rows, by all ranks."""
        if self.leaves is None:
            with torch.inference_mode(False), torch.no_grad():
                leaves = self._tables.engine.leaves(self.flight)
            self._take(leaves)
        return self.leaves or []

    def _take(self, leaves: Sequence[Tensor]) -> None:
        self._began = self._looked_up = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():
            pairs = zip(leaves, self.trains, strict=True)
            self.leaves = [leaf.requires_grad_(trains) for leaf, trains in pairs]
            self.view = StepRows(self._tables.engine, self.flight, self.leaves)
        own = weakref.ref(self)  # a step that is gone has no business in a leaf's hook

        def after_accumulate(leaf: Tensor) -> None:
            step = own()
            if step is None:
                raise _too_late()
            step.accumulated(leaf)

        for leaf in self.leaves:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(after_accumulate)
        self._tables.show_leaves(self.view.params)

    def _watch(self, micro: int, found: Iterable[Tensor]) -> None:
        """Learn when a backward pass goes through this lookup, if gradients are recorded."""
        self._looked_up = time.perf_counter()
        if not torch.is_grad_enabled():
            return
        self._forwarded.add(micro)
        backed = self._backed  # not the step, which a graph that somebody keeps would hold
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: backed.add(micro))

    # --- backward ---------------------------------------------------------------------------

    def accumulated(self, leaf: Tensor) -> None:
        """A backward pass has added to the gradient of `leaf`: look at the end of the pass."""
        if self.leaves is None or not any(leaf is own for own in self.leaves):
            raise _too_late()
        if self.reduced:
            raise PlanError(
                f"step {self.flight.step}: a backward pass came after its row gradients were "
                "summed over the ranks; sum the losses of one step and call backward once, or read "
                "with lookahead(batches, ebc, accumulate=k) for k micro-batches per step"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            # Behind what others have queued by the end of the pass: DDP may issue its own there.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end_of_backward))

    def _end_of_backward(self) -> None:
        if len(self._backed) == len(self.reads):
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the row gradients over the ranks, once; all ranks do it for the same step."""
        if self.reduced or self.leaves is None or not any(self.trains):
            return
        self._span(FORWARD_BACKWARD, time.perf_counter())
        local = [
            (torch.zeros_like(at) if at.grad is None else at.grad) if trains else None
            for at, trains in zip(self.leaves, self.trains, strict=True)
        ]
        self._tables.sum_up(self, local)
        self.reduced = True
        self._tables.summed()

    # --- step -------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget the gradients so far (`zero_grad`)."""
        for tensor in (*(self.leaves or []), *self.view.params):
            tensor.grad = None
        if self.reduced:  # all of them are gone: what comes now begins the step anew
            self._forwarded.clear()
            self._backed.clear()
        self.reduced = False

    def ready(self, without_backward: bool = False) -> bool:
        """Whether there is something to apply, summed by then; all ranks ask.

        Raises PlanError where a step would lose part, and, unless `without_backward`, where no
        backward pass has come here.
        """
        seen = self._forwarded | self._backed
        if self.leaves is None or not seen or not any(self.trains):
            return False
        if (self._backed or self.reduced) and not self.pending:
            return False  # dropped by zero_grad
        total, number = len(self.reads), self.flight.step
        if len(seen) < total:
            raise PlanError(
                f"step {number} was read as {total} micro-batches (accumulate={total}), of which "
                f"{len(seen)} have gone through the model: call step() after the last"
            )
        if not (self._backed or self.reduced or without_backward):
            raise PlanError(
                f"step {number}: step() without a backward pass through the collection; call "
                "loss.backward() first, or no step(); where the loss of this rank alone does not "
                "depend on the embeddings, call ebc.reduce() after its backward"
            )
        self.reduce()
        return True

    def close(self) -> None:
        """The rows have changed or left: leaves are stale, late backward passes are errors."""
        self.drop()
        self.leaves = None
        self._forwarded.clear()
        self._backed.clear()
        self._tables.show_leaves([])

    def _span(self, stage: Stage, end: float) -> None:
        span = Span(stage.name, TRAINING_LANE, self.flight.step, self._began, end)
        self.flight.spans.append(span)

    def leave(self) -> None:
        """The step ends without having been applied: to the stages' times it was an evaluation."""
        if self.flight.spans:  # else all is told
            self._span(FORWARD, self._looked_up)
            self.flight.batch = replace(self.flight.batch, kind="eval")


def _too_late() -> PlanError:
    return PlanError(
        "a backward pass reached the rows of a step that has ended: call backward before step() "
        "and before the next batch's forward; for several batches per step read with "
        "lookahead(batches, ebc, accumulate=k)"
    )
