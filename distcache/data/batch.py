"""One rank's slice of one global batch, as plain CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class JaggedIds:
    """Bags of ids of F features and b samples, feature-major (the order of a KeyedJaggedTensor).

    `values`: int64 `[n]`, original ids. `offsets`: int64 `[F * b + 1]`; bag (f, i) is
    `values[offsets[f * b + i] : offsets[f * b + i + 1]]`. `weights`: float `[n]` or None.
    All on the CPU.
    """

    features: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """b: samples of this slice (may be 0)."""
        return (len(self.offsets) - 1) // max(len(self.features), 1)


@dataclass(frozen=True)
class Batch:
    """A rank's slice of one global batch.

    `dense`: float `[b, F_dense]`; `ids`: bags of every feature; `labels`: float `[b]` in {0, 1};
    `global_size`: B, samples over all ranks of this step; `index`: training step or, for
    `kind="eval"`, evaluation batch; `first_sample`: position of this slice in the global batch.

    Look-ahead needs ids alone, so a source may leave dense features and labels where they are:
    then `load` gives both, and until `loaded` they are `unloaded` tensors, which have a shape but
    no values (torch refuses to read them).

    Where ranks bring batches of their own sizes, `global_size` is `UNKNOWN` until they have told
    each other; then `largest` is the number of samples of the largest slice (None: ceil(B / W)).

    `phase`: `hot` or `cold` where such batches come apart, else empty.
    """

    dense: Tensor
    ids: JaggedIds
    labels: Tensor
    global_size: int
    index: int
    epoch: int
    first_sample: int
    kind: str = "train"
    load: Callable[[], tuple[Tensor, Tensor]] | None = None
    largest: int | None = None
    phase: str = ""

    def loaded(self) -> Batch:
        """This batch with its dense features and labels; itself where it has them."""
        if self.load is None:
            return self
        dense, labels = self.load()
        return replace(self, dense=dense, labels=labels, load=None)

    def among(self, sizes: Sequence[int], rank: int) -> Batch:
        """This slice of the global batch whose slices have `sizes` samples, by rank."""
        return replace(
            self,
            global_size=max(sum(sizes), 1),  # a step without a sample is a loss of 0, not 0 / 0
            first_sample=sum(sizes[:rank]),
            largest=max(sizes),
        )


UNKNOWN = -1
"""`Batch.global_size` before the ranks have told each other their sizes."""


def unloaded(*shape: int) -> Tensor:
    """A tensor of `shape` on the meta device, in the place of values not loaded yet."""
    return torch.empty(shape, device="meta")


def slice_bounds(global_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous samples [start, stop) of a global batch that `rank` takes (may be empty)."""
    return rank * global_size // world_size, (rank + 1) * global_size // world_size


class BatchSource(Protocol):
    """Random access to batches: the order of samples is a function of (seed, epoch, step) alone.

    `identity`: what the batches depend on beside seed, batch size and tables, by config key, as
    text: files by a digest of their content, never by their path. Equal on all ranks, and in a run
    that resumes another one.
    """

    features: tuple[str, ...]
    table_rows: tuple[int, ...]
    dense_features: int

    @property
    def identity(self) -> Mapping[str, str]:
        """Config key -> what it came to, see above."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Training steps of one epoch (the last batch may be ragged); None: unlimited."""
        ...

    @property
    def eval_batches(self) -> int | None:
        """Held-out global batches; None: unlimited."""
        ...

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of training step `step`, counted from 0 across epochs."""
        ...

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of held-out global batch `index`."""
        ...
