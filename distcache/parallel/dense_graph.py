"""The dense part of a step as a CUDA graph: some fifty kernels, launched as one.

At small batches a GPU ends a step before a host has launched its kernels one by one. Most of them
are the dense part's, the same in each step of one shape: they are recorded once and replayed, as
`torch.cuda.make_graphed_callables` does. Lookups, exchanges and updates, whose sizes differ from
step to step, are issued as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from distcache.engine.step import StepContext

DensePass = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor | None]]
"""The dense part of a step, forward and backward: from dense features `[b, d]`, pooled bags
`[b, sum of widths]`, labels `[b]` and the samples of the global batch to this rank's share of the
loss, one element, and the gradient of the bags: None where the model does not use them, or where
backward went on through them."""


class DenseGraph:
    """A pass of the dense part, recorded, for steps of one shape.

    It reads `pooled`, where the bags are to lie, and what it gives and changes lies where it lay
    then. Kernels and shapes are those of the pass, so its bits are. What the pass does in Python it
    did once.
    """

    def __init__(self, run: DensePass, context: StepContext, width: int) -> None:
        """Record `run`, which has run once, for steps like this one, of so many columns of bags.

        Raises what it raises, and RuntimeError where it does what no graph holds, such as waiting
        for the device.
        """
        self.shape = shape_of(context)
        self._dense, self._labels = map(torch.empty_like, (context.dense, context.labels))
        self.pooled = context.dense.new_empty(len(context.dense), width)
        self._graph = torch.cuda.CUDAGraph()
        # Movement, a thread of its own, may allocate meanwhile, and wait for events.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            inputs = self._dense, self.pooled, self._labels
            self._found = run(*inputs, context.batch.global_size)

    def __call__(self, context: StepContext) -> tuple[Tensor, Tensor | None]:
        """What the pass gives for this step, whose bags lie in `pooled`; overwritten by the next
        call."""
        torch._foreach_copy_([self._dense, self._labels], [context.dense, context.labels])
        self._graph.replay()
        return self._found


def shape_of(context: StepContext) -> Hashable:
    """What steps of one graph have in common."""
    return context.dense.shape, context.batch.global_size
