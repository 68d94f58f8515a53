"""The step of a collection that is open: its leaves, autograd's hooks on them, and what may still
be done with it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from distcache.embedding.ids import ReadIds
from distcache.engine.gradients import DeviceBags
from distcache.engine.step import FORWARD, FORWARD_BACKWARD, TRAINING_LANE, Span, Stage, StepContext
from distcache.engine.step_rows import StepRows
from distcache.engine.tables import Owners
from distcache.errors import PlanError

if TYPE_CHECKING:
    from distcache.embedding.step import CollectionTables


class OpenStep:
    """A planned step whose rows are on the device, with its micro-batches `reads`.

    Every forward looks up in the same leaves, one `[U + N, D]` for each group, so gradients gather
    there. The end of the backward pass in which the last micro-batch has taken part sums them over
    the ranks: from then on the `.grad` of `view.params` is what will be applied. `finite`: bool
    `[1]` on the device, the same on all ranks, whether all sums were; `owners`: by group, the
    table of each of its rows, where they are not all updated alike. `ahead`: whether it was read
    ahead; `joined`: whether it has the gradients of several, see `EarlierSteps`.
    """

    joined = False

    def __init__(
        self,
        tables: CollectionTables,
        context: StepContext,
        reads: list[ReadIds],
        leaves: Sequence[Tensor],
        frozen: frozenset[int],
    ) -> None:
        """`frozen`: the tables, by index, that this step leaves as they are. Where autograd records
        nothing."""
        self._tables, self.context, self.reads, self.frozen = tables, context, reads, frozen
        self.trains = [not frozen.issuperset(group.tables) for group in tables.engine.groups]
        """Whether any table of each group is updated."""
        self.leaves: list[Tensor] | None = None
        """None once the rows have changed, or the step has ended."""
        self.ahead = context.stream is not None
        self._began = self._looked_up = 0.0
        self._forwarded: set[int] = set()
        self.backed: set[int] = set()
        self._kept: list[OpenStep] | None = []
        """What the graphs of lookups hold; None once it is this step."""
        self.reduced = False
        self.finite: Tensor | None = None
        self.nonfinite_cause = ""
        self.owners: list[Owners | None] = []
        self._task = -1
        self._take(leaves)

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be applied or dropped."""
        return any(tensor.grad is not None for tensor in (*(self.leaves or ()), *self._rows))

    @property
    def recorded(self) -> bool:
        """Whether a forward pass was recorded, so that a backward pass may come."""
        return bool(self._forwarded) and self.leaves is not None

    # --- forward ----------------------------------------------------------------------------

    def pooled(
        self, micro: int, weights: Tensor | None = None, reads_alone: bool = False
    ) -> Tensor:
        """The bags of micro-batch `micro`, `[b, sum of widths]`, recorded if gradients are;
        `weights` `[n]`: of its ids, which may have come since it was read. `reads_alone`: rows get
        no gradient of it."""
        read, parts = self.reads[micro], None
        if weights is not None:
            lengths = read.ids.offsets.diff().view(len(read.samples), read.ids.batch_size)
            parts = weights.split(lengths.sum(1).tolist())
        leaves = self._current_leaves(reads_alone)
        pooled = self._tables.engine.pooled(self.context, leaves, micro, parts)
        self._watch(micro, [] if reads_alone else [pooled])
        return pooled

    def rows(self, micro: int, reads_alone: bool = False) -> list[Tensor]:
        """The row of every id of micro-batch `micro`, by lookup: `[n_f, D_f]` each."""
        found = self._tables.engine.lookup(self.context, self._current_leaves(reads_alone), micro)
        self._watch(micro, [] if reads_alone else found)
        return found

    def _current_leaves(self, reads_alone: bool) -> list[Tensor]:
        """The leaves; read again once a step has changed its rows, by all ranks."""
        if self.leaves is None:
            with torch.inference_mode(False), torch.no_grad():
                self._take(self._tables.engine.leaves(self.context))
        leaves = self.leaves or []
        return [leaf.detach() for leaf in leaves] if reads_alone else leaves

    def _take(self, leaves: Sequence[Tensor]) -> None:
        """Let these be the leaves; where autograd records nothing."""
        self._began = self._looked_up = time.perf_counter()
        pairs = zip(leaves, self.trains, strict=True)
        self.leaves = [leaf.requires_grad_(trains) for leaf, trains in pairs]
        self.view = StepRows(self._tables.engine, self.context, self.leaves)
        self._params = self.view.params
        self._rows = self._params[: len(self.view.parts)]
        own = weakref.ref(self)  # a step that is gone has no business in a leaf's hook
        reports = self._tables.reports

        def after_accumulate(leaf: Tensor) -> None:
            with reports:
                step = own()
                if step is None:
                    raise _too_late()
                step.accumulated(leaf)

        for leaf in self.leaves:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(after_accumulate)
        self._tables.config.show(self.view.params)

    def _watch(self, micro: int, found: Sequence[Tensor]) -> None:
        """Learn when a backward pass goes through this lookup, if gradients are recorded."""
        self._looked_up = time.perf_counter()
        if not (found and torch.is_grad_enabled()):
            return
        self._forwarded.add(micro)
        backed = self.backed  # not the step, which a graph that somebody keeps would hold
        kept = self if self._kept is None else self._kept
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, kept=kept: backed.add(micro))

    # --- backward ---------------------------------------------------------------------------

    def accumulated(self, leaf: Tensor) -> None:
        """A backward pass has added to the gradient of `leaf`: look at the end of the pass."""
        if id(leaf) not in map(id, self.leaves or ()):
            raise _too_late()
        if self._tables.current is not None and self._tables.current.reduced:
            raise PlanError(
                f"step {self.context.step}: a backward pass came after its row gradients were "
                "summed over the ranks; sum the losses of one step and call backward once, or read "
                "with lookahead(batches, ebc, accumulate=k) for k micro-batches per step"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            # Behind what others have queued by the end of the pass: DDP may issue its own there.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._tables.earlier.end_of_backward))

    def outlive(self) -> None:
        """Another step opens, but a backward pass may still come: whoever holds the graph of a
        lookup holds the step, which holds no tables and no plan."""
        if self._kept is not None:
            self._kept.append(self)
        self._kept, self._tables = None, weakref.proxy(self._tables)
        self._rows, self._params = [], []
        del self.view
        self.context = replace(self.context, plans=[], where=[], stream=None)

    def take_over(
        self, others: Sequence[tuple[list[list[DeviceBags]], list[Tensor | None]]]
    ) -> None:
        """Begin with the gradients of other steps, whose micro-batches are those of this one, in
        order: the lookups of each step's, and the gradients of its leaves `[U' + N', D]`."""
        self.joined, own = True, iter(self.context.lookups)
        self._forwarded.update(range(len(self.reads)))
        self.backed.update(self._forwarded if others else ())
        for lookups, gradients in others:
            pairs = [list(zip(next(own), there, strict=True)) for there in lookups]
            for group, (leaf, gradient) in enumerate(
                zip(self.leaves or [], gradients, strict=True)
            ):
                if gradient is None:
                    continue
                found = torch.zeros_like(leaf)
                for here, there in (pair[group] for pair in pairs):  # the same ids, in one order
                    rows = gradient.index_select(0, there.positions)
                    found.index_put_((here.positions.long(),), rows)
                leaf.grad = found if leaf.grad is None else leaf.grad + found

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
        for tensor in (*(self.leaves or []), *self._params):
            tensor.grad = None
        if self.reduced:  # all of them are gone: what comes now begins the step anew
            self._forwarded.clear()
            self.backed.clear()
        self.reduced = False

    def ready(self, without_backward: bool = False) -> bool:
        """Whether there is something to apply, summed by then; all ranks ask.

        Raises PlanError where a step would lose part, and, unless `without_backward`, where no
        backward pass has come here.
        """
        seen = self._forwarded | self.backed
        if self.leaves is None or not seen or not any(self.trains):
            return False
        if (self.backed or self.reduced) and not self.pending:
            return False  # dropped by zero_grad
        total, number = len(self.reads), self.context.step
        if len(seen) < total:
            raise PlanError(
                f"step {number} was read as {total} micro-batches (accumulate={total}), of which "
                f"{len(seen)} have gone through the model: call step() after the last"
            )
        if not (self.backed or self.reduced or without_backward):
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
        self.backed.clear()
        if self._kept is not None:
            self._tables.config.show()

    def _span(self, stage: Stage, end: float) -> None:
        span = Span(stage.name, TRAINING_LANE, self.context.step, self._began, end)
        self.context.spans.append(span)

    def leave(self) -> None:
        """The step ends without having been applied: to the stages' times it was an evaluation."""
        if self.context.spans:  # else all is told
            self._span(FORWARD, self._looked_up)
            self.context.batch = replace(self.context.batch, kind="eval")


class EarlierSteps:
    """The steps since the last that was applied whose forwards were recorded, before others came.

    A backward pass may still come to them, as long as somebody holds the graph of a lookup; then
    its step, and that which is open, if it came there too, become one of the rows of all.
    """

    def __init__(self, tables: CollectionTables) -> None:
        self._tables: CollectionTables = weakref.proxy(tables)  # which has this
        self._steps: list[weakref.ref[OpenStep]] = []

    def alive(self) -> list[OpenStep]:
        """Those to which backward may come, in order."""
        return [step for ref in self._steps if (step := ref()) is not None]

    def with_open(self) -> list[OpenStep]:
        """These, and the one that is open."""
        current = self._tables.current
        return self.alive() if current is None else [*self.alive(), current]

    def lookups(self) -> list[tuple[OpenStep, int]]:
        """What may be looked up once more, step and micro-batch: of the open one; inside a backward
        pass, which may compute what was not kept, of all."""
        inside = torch._C._current_graph_task_id() != -1
        steps = [step for step in self.with_open() if inside or step is self._tables.current]
        return [(step, micro) for step in steps for micro in range(len(step.reads))]

    @property
    def pending(self) -> bool:
        """Whether gradients of any, or of the open one, wait to be applied or dropped."""
        return any(step.pending for step in self.with_open())

    def add(self, step: OpenStep) -> None:
        """The open step ends, for another one."""
        step.outlive()
        self._steps = [*map(weakref.ref, self.alive()), weakref.ref(step)]

    def forget(self) -> None:
        """No backward pass may come any more."""
        for step in self.alive():
            step.close()
        self._steps.clear()

    def end_of_backward(self) -> None:
        """A backward pass that came to rows has ended: sum up what it left, once one has come to
        the last lookups that were recorded."""
        with self._tables.reports:
            recorded = [step for step in self.with_open() if step.recorded]
            if recorded and len(recorded[-1].backed) == len(recorded[-1].reads):
                step = self.joined()
                if step is not None:
                    step.reduce()

    def joined(self) -> OpenStep | None:
        """The open step; where backward has come to steps before it, one of the rows of all to
        which it came, planned now, with the gradients that each has. By all ranks.

        Raises PlanError where several were read ahead, StepTooLargeError where the cache does not
        hold all rows.
        """
        tables, last = self._tables, self._tables.current
        if last is not None and last.reduced:
            return last
        if not (self._steps and tables.of_any_rank(any(step.pending for step in self.alive()))):
            return last
        steps = self.with_open()
        parts = [step for step in steps if step.pending]
        if sum(step.ahead for step in parts) > 1:
            raise PlanError(
                "one backward pass came to several batches that were read ahead, each as a step of "
                f"its own: read them with lookahead(batches, ebc, accumulate={len(parts)})"
            )
        taken = [[(step, micro) for micro in sorted(step.backed)] for step in parts]
        reads = [step.reads[micro] for own in taken for step, micro in own]
        lookups = [[step.context.lookups[micro] for step, micro in own] for own in taken]
        gradients = [[leaf.grad for leaf in step.leaves or []] for step in parts]
        reads, frozen = reads or steps[-1].reads, steps[-1].frozen
        for step in steps:
            step.close()
        self._steps.clear()
        step = tables.open(tables.plan_inline(reads, "train"), reads, frozen)
        with torch.no_grad():
            step.take_over(list(zip(lookups, gradients, strict=True)))
        return step


def _too_late() -> PlanError:
    return PlanError(
        "a backward pass reached the rows of a step that has ended: call backward before step(); "
        "for several batches per step read with lookahead(batches, ebc, accumulate=k)"
    )
