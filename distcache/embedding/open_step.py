"""One optimizer step of a collection: its row leaves, their gradients and when they are summed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from distcache.embedding.ids import ReadIds
from distcache.embedding.micro import part_of
from distcache.errors import PlanError
from distcache.pipeline.groups import GroupBags, TableGroup, join_pooled
from distcache.pipeline.lookup import DeviceBags, PooledLookup, RowLookup, bags_of_one
from distcache.pipeline.planned import PlannedStep
from distcache.step_plan import StepPlan

Reduce = Callable[[PlannedStep, list[Tensor]], list[Tensor]]
"""(planned, local row gradients by group) -> the gradients that the step applies."""


class OpenStep:
    """A planned step whose rows are on the device, with its micro-batches `reads`.

    Every forward looks up in the same leaves, one `[U, D]` for each group, so gradients gather
    there. The end of the backward pass in which the last micro-batch has taken part sums them
    over the ranks: from then on `leaf.grad` is what will be applied, the same on all ranks.
    """

    def __init__(
        self,
        planned: PlannedStep,
        reads: list[ReadIds],
        groups: list[TableGroup],
        read_rows: Callable[[PlannedStep], list[Tensor]],
        reduce: Reduce,
    ) -> None:
        self.planned, self.reads, self._groups = planned, reads, groups
        self._read_rows, self._reduce = read_rows, reduce
        self.leaves: list[Tensor] | None = None
        self._forwarded: set[int] = set()
        self._backed: set[int] = set()
        self.reduced = False
        self._task = -1
        self._backward_failed = False

    @property
    def number(self) -> int:
        """Position in the stream of planned steps."""
        return self.planned.step

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be applied or dropped."""
        return any(leaf.grad is not None for leaf in self.leaves or [])

    # --- forward ----------------------------------------------------------------------------

    def pooled(self, micro: int) -> Tensor:
        """The bags of micro-batch `micro`, `[b, sum of widths]`, recorded if gradients are."""
        leaves, bags = self._current_leaves(), self._bags(micro)
        pooled = [
            PooledLookup.apply(leaf, DeviceBags(*own, leaf.device))
            for leaf, own in zip(leaves, bags, strict=True)
        ]
        self._watch(micro, pooled)
        return join_pooled(self._groups, pooled)

    def rows(self, micro: int) -> list[Tensor]:
        """The row of every id of micro-batch `micro`, by lookup: `[n_f, D_f]` each."""
        ids = self.reads[micro].ids
        counts = ids.offsets.diff().view(len(ids.features), ids.batch_size).sum(1).tolist()
        out: dict[int, Tensor] = {}
        for group, leaf, (bags, plan) in zip(
            self._groups, self._current_leaves(), self._bags(micro), strict=True
        ):
            own = DeviceBags(bags_of_one(bags), plan, leaf.device)
            found = RowLookup.apply(leaf, own, [counts[at] for at in group.features])
            out |= zip(group.features, found, strict=True)
        self._watch(micro, out.values())
        return [out[at] for at in sorted(out)]

    def _current_leaves(self) -> list[Tensor]:
        """The leaves; read again from the cache once a step has changed its rows."""
        if self.leaves is None:
            with torch.inference_mode(False), torch.no_grad():
                self.leaves = [leaf.requires_grad_() for leaf in self._read_rows(self.planned)]
            step = weakref.ref(self)
            for leaf in self.leaves:
                leaf.register_post_accumulate_grad_hook(_AfterAccumulate(step))
        return self.leaves

    def _bags(self, micro: int) -> list[tuple[GroupBags, StepPlan]]:
        """What a lookup of one micro-batch reads, by group."""
        planned = self.planned
        pairs = list(zip(planned.bags, planned.plans, strict=True))
        if len(self.reads) > 1:
            sizes = [read.ids.batch_size for read in self.reads]
            start = sum(sizes[:micro])
            samples = slice(start, start + sizes[micro])
            pairs = [part_of(bags, plan, samples, sum(sizes)) for bags, plan in pairs]
        return pairs

    def _watch(self, micro: int, found: Iterable[Tensor]) -> None:
        """Learn when a backward pass goes through this lookup, if gradients are recorded."""
        if not torch.is_grad_enabled():
            return
        self._forwarded.add(micro)
        step = weakref.ref(self)

        def mark(gradient: Tensor) -> None:
            alive = step()
            if alive is not None:
                alive._backed.add(micro)

        for tensor in found:
            tensor.register_hook(mark)

    # --- backward ---------------------------------------------------------------------------

    def accumulated(self, leaf: Tensor) -> None:
        """A backward pass has added to the gradient of `leaf`: look at the end of the pass."""
        if self.leaves is None or not any(leaf is own for own in self.leaves):
            raise _too_late()
        if self.reduced:
            raise PlanError(
                f"step {self.number}: a backward pass came after its row gradients were summed "
                "over the ranks; sum the losses of one step and call backward once, or read with "
                "lookahead(batches, ebc, accumulate=k) for k micro-batches per step"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if len(self._backed) == len(self.reads):
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the row gradients over the ranks, once; all ranks do it for the same step."""
        if self.reduced or self.leaves is None:
            return
        local = [torch.zeros_like(at) if at.grad is None else at.grad for at in self.leaves]
        for leaf, gradient in zip(self.leaves, self._reduce(self.planned, local), strict=True):
            leaf.grad = gradient
        self.reduced = True

    # --- step -------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget the gradients so far (`zero_grad`)."""
        for leaf in self.leaves or []:
            leaf.grad = None
        self.reduced = False

    def ready(self, without_backward: bool = False) -> bool:
        """Whether there is something to apply, summed by then; all ranks ask.

        Raises PlanError where a step would lose part, and, unless `without_backward`, where no
        backward pass has come here.
        """
        if self.leaves is None or not self._forwarded:
            return False
        if (self._backed or self.reduced) and not self.pending:
            return False  # dropped by zero_grad
        total = len(self.reads)
        if len(self._forwarded) < total:
            raise PlanError(
                f"step {self.number} was read as {total} micro-batches (accumulate={total}), of "
                f"which {len(self._forwarded)} have gone through the model: call step() after "
                "the last"
            )
        if not (self._backed or self.reduced or without_backward):
            raise PlanError(
                f"step {self.number}: step() without a backward pass through the collection; call "
                "loss.backward() first, or no step(); where the loss of this rank alone does not "
                "depend on the embeddings, call ebc.reduce() after its backward"
            )
        self.reduce()
        return True

    def close(self) -> None:
        """The rows have changed or left: leaves are stale, late backward passes are errors."""
        self.leaves = None
        self._forwarded.clear()
        self._backed.clear()
        self.reduced = False


class _AfterAccumulate:
    """The hook of a leaf. It holds the step weakly: a step that is gone has no business there."""

    def __init__(self, step: weakref.ref[OpenStep]) -> None:
        self._step = step

    def __call__(self, leaf: Tensor) -> None:
        step: Any = self._step()
        if step is None:
            raise _too_late()
        step.accumulated(leaf)


def _too_late() -> PlanError:
    return PlanError(
        "a backward pass reached the rows of a step that has ended: call backward before step() "
        "and before the next batch's forward; for several batches per step read with "
        "lookahead(batches, ebc, accumulate=k)"
    )
