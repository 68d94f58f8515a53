"""Global batches as spans of an epoch, of which every rank takes a contiguous slice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from distcache.data.batch import Batch, JaggedIds, slice_bounds
from distcache.data.samplers import BatchSpans, SampleSpan
from distcache.data.subset import Subset
from distcache.errors import DataError


@dataclass(frozen=True)
class BatchSlice:
    """A rank's samples [low, high) of a global batch, which takes the positions of `span`.

    `kind`: `train` or `eval`; `index`: training step or number of the held-out batch; `phase`:
    `hot` or `cold` where such batches come apart.
    """

    kind: str
    index: int
    span: SampleSpan
    low: int
    high: int
    phase: str = ""

    @property
    def start(self) -> int:
        """The first position of the epoch (or of the held-out samples) that is this rank's."""
        return self.span.start + self.low

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.span.start + self.high

    def batch(
        self,
        dense: Tensor,
        ids: JaggedIds,
        labels: Tensor,
        load: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Batch:
        """The slice's samples as a batch."""
        return Batch(
            dense=dense,
            ids=ids,
            labels=labels,
            global_size=self.span.size,
            index=self.index,
            epoch=self.span.epoch,
            first_sample=self.low,
            kind=self.kind,
            load=load,
            phase=self.phase,
        )


class SampleOrdering(Protocol):
    """An order of numbers [0, n), a function of (seed, epoch, position)."""

    def positions(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The numbers int64 `[stop - start]` at positions [start, stop), those of one whole
        batch, in `epoch`."""
        ...


class SlicedSource(ABC):
    """A `BatchSource` of training and held-out samples, each in batches of `batch_size`.

    `train_samples` and `eval_samples` None: unlimited. `ids_vary`: whether the ids of a training
    sample differ between epochs.
    """

    ids_vary = False

    features: tuple[str, ...]
    table_rows: tuple[int, ...]
    dense_features: int
    identity: Mapping[str, str]

    def __init__(
        self, train_samples: int | None, eval_samples: int | None, batch_size: int
    ) -> None:
        self.batch_size, self.samples_per_epoch = batch_size, train_samples
        self._train_spans = BatchSpans(train_samples, batch_size)
        self._eval_spans = BatchSpans(eval_samples, batch_size)

    @property
    def steps_per_epoch(self) -> int | None:
        """Training steps of one epoch; None: unlimited."""
        return self._train_spans.per_epoch

    @property
    def eval_batches(self) -> int | None:
        """Held-out global batches; None: unlimited."""
        return self._eval_spans.per_epoch

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of training step `step`, counted from 0 across epochs."""
        span = self._train_spans.locate(step)
        return self.read(
            BatchSlice("train", step, span, *slice_bounds(span.size, rank, world_size))
        )

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of held-out global batch `index`."""
        if self.eval_batches is not None and index >= self.eval_batches:
            raise DataError(f"held-out batch {index} of {self.eval_batches} does not exist")
        span = self._eval_spans.locate(index)
        return self.read(
            BatchSlice("eval", index, span, *slice_bounds(span.size, rank, world_size))
        )

    @abstractmethod
    def read(self, part: BatchSlice) -> Batch:
        """The samples of a slice."""

    @abstractmethod
    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """Training samples `samples` int64 `[b]`, each in [0, samples_per_epoch), as `part`."""

    @abstractmethod
    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """The ids alone of training samples `samples` int64 `[b]`, as they are in `epoch`."""

    @abstractmethod
    def order_of(self, chosen: Subset, which: int) -> SampleOrdering:
        """The order of some training samples in each epoch, by their places among `chosen`.

        `which`: a number of this subset, for an order of its own.
        """

    def will_need(self, start: int, stop: int) -> None:
        """Training samples [start, stop) (may be none) are read soon: a hint, nothing here."""
        return None
