"""A rank's slice of a global batch as CPU tensors: where it comes from, checks of its ids."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distcache.compiled import compiled, in4, in8, types
from distcache.data.samplers import BatchSpans, SampleOrdering, SampleSpan, Subset
from distcache.errors import DataError
from distcache.layout import TableSpec

_ID_DTYPES = (torch.int64, torch.int32)


@compiled(types.boolean(in4), types.boolean(in8))
def counts_up(values: np.ndarray) -> bool:
    """Whether they are 0, 1, 2 and so on."""
    wrong = 0
    for i in range(len(values)):
        wrong |= values[i] ^ i  # without a way out, so that it takes several at once
    return wrong == 0


_ONES: dict[int, Tensor] = {}
"""What `one_each` gave last, `_MOST` of them, by count."""
_MOST = 16


def one_each(count: int) -> Tensor:
    """0, 1, ... `count`, int64: the offsets of so many bags of one id each.

    All batches of that shape may have these, to which nobody writes: then nobody looks at them.
    """
    if (found := _ONES.get(count)) is None:
        found = _ONES[count] = torch.from_numpy(np.arange(count + 1))
        for oldest in list(_ONES)[:-_MOST]:  # more than one thread may come here
            _ONES.pop(oldest, None)
    return found


def is_one_each(offsets: Tensor, ids: int, look: bool = True) -> bool:
    """Whether these are the offsets of bags of one each of so many ids; `look`: also where they are
    not `one_each`, but equal."""
    if offsets.dtype not in _ID_DTYPES or offsets.shape != (ids + 1,):
        return False
    if offsets is _ONES.get(ids):
        return True
    return look and counts_up(np.ascontiguousarray(offsets.numpy()))


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

    @classmethod
    def of_lengths(
        cls, features: tuple[str, ...], values: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> JaggedIds:
        """By how many ids each bag has, `lengths` int64 `[F * b]`, in place of `offsets`."""
        if len(values) == len(lengths) and (lengths.numpy() == 1).all():
            return cls(features, values, one_each(len(values)), weights)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        return cls(features, values, offsets, weights)

    @property
    def batch_size(self) -> int:
        """b: samples of this slice (may be 0)."""
        return (self.offsets.shape[0] - 1) // max(len(self.features), 1)


@dataclass(frozen=True)
class Batch:
    """A rank's slice of one global batch.

    `dense`: float `[b, F_dense]`; `ids`: bags of every feature; `labels`: float `[b]` in {0, 1};
    `global_size`: B, samples over all ranks of this step, which may be 0; `index`: training step
    or, for `kind="eval"`, evaluation batch; `first_sample`: position of this slice in the global
    batch.

    Look-ahead needs ids alone, so a source may leave dense features and labels where they are:
    then `load` gives both, and until `loaded` they are `unloaded` tensors, which have a shape but
    no values (torch refuses to read them).

    Where ranks bring batches of their own sizes, `global_size` is `UNKNOWN` until they have told
    each other; then `largest` is the number of samples of the largest slice (None: ceil(B / W)).

    `phase`: `hot` or `cold` where such batches come apart, else empty. `parts`: samples of each of
    the micro-batches that it consists of, in order; empty: of one.
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
    parts: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if no rank has a sample: such a step changes nothing and has no loss."""
        return self.global_size == 0

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
            global_size=sum(sizes),
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


class SlicedSource(ABC):
    """A `BatchSource` of training and held-out samples, each in batches of `batch_size`.

    `train_samples` and `eval_samples` None: unlimited. `order`: of the training samples in each
    epoch; `first_held_out`: number of the first held-out sample. `ids_vary`: whether the ids of a
    training sample differ between epochs.
    """

    ids_vary = False
    order: SampleOrdering
    first_held_out: int

    features: tuple[str, ...]
    table_rows: tuple[int, ...]
    dense_features: int
    identity: Mapping[str, str]

    def __init__(
        self, train_samples: int | None, eval_samples: int | None, batch_size: int
    ) -> None:
        self.batch_size, self.samples_per_epoch = batch_size, train_samples
        self._spans = {
            "train": BatchSpans(train_samples, batch_size),
            "eval": BatchSpans(eval_samples, batch_size),
        }

    @property
    def steps_per_epoch(self) -> int | None:
        """See `BatchSource.steps_per_epoch`."""
        return self._spans["train"].per_epoch

    @property
    def eval_batches(self) -> int | None:
        """See `BatchSource.eval_batches`."""
        return self._spans["eval"].per_epoch

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.train_batch`."""
        return self._batch_at("train", step, rank, world_size)

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.eval_batch`."""
        if self.eval_batches is not None and index >= self.eval_batches:
            raise DataError(f"held-out batch {index} of {self.eval_batches} does not exist")
        return self._batch_at("eval", index, rank, world_size)

    def _batch_at(self, kind: str, index: int, rank: int, world_size: int) -> Batch:
        span = self._spans[kind].locate(index)
        low, high = slice_bounds(span.size, rank, world_size)
        return self.read(BatchSlice(kind, index, span, low, high))

    def read(self, part: BatchSlice) -> Batch:
        """The samples of a slice: training ones in the epoch's order, held-out ones as they lie."""
        if part.kind == "train":
            return self.take(self.order.slice(part.span, part.low, part.high), part)
        first = self.first_held_out + part.span.start
        return self.take(np.arange(first + part.low, first + part.high), part)

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """Samples `samples` int64 `[b]` as `part`: training ones in [0, samples_per_epoch). Their
        dense features and labels are read when the batch is loaded."""
        ids, count = self.ids_of(samples, part.span.epoch), len(samples)
        dense, labels = unloaded(count, self.dense_features), unloaded(count)
        return part.batch(dense, ids, labels, partial(self.dense_and_labels, samples))

    def dense_and_labels(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Dense features `[b, F_dense]` and labels `[b]` of samples whose batch lacks them."""
        raise NotImplementedError

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


def check_ids(
    ids: JaggedIds,
    table_rows: Sequence[int],
    table_names: Sequence[str],
    first_sample: int = 0,
    on_bad_id: str = "error",
) -> JaggedIds:
    """The ids, every one inside its table: `ids` itself where nothing had to change.

    `table_rows`, `table_names`: of the table that each feature reads, one entry per feature;
    `first_sample`: position of the slice in the global batch, for messages. An id that is negative
    or beyond its table is an error (`on_bad_id="error"`), or taken modulo the table's rows
    (`"hash"`). Raises DataError, also for malformed offsets or weights and for float ids.
    """
    offsets = checked_offsets(ids)
    values = np.ascontiguousarray(ids.values.numpy(), np.int64)
    rows = np.array(table_rows, dtype=np.int64)
    if len(rows) != len(ids.features):
        raise DataError(f"ids have {len(ids.features)} features for {len(rows)} tables")
    edges = np.zeros(len(rows) + 1, np.int64)  # of no sample
    if ids.batch_size:
        edges = np.ascontiguousarray(offsets[:: ids.batch_size])
    if not _is_any_beyond(values, edges, rows):
        narrow = ids.values.dtype != torch.int64
        return replace(ids, values=torch.from_numpy(values)) if narrow else ids
    limits = np.repeat(rows, np.diff(edges))
    bad = (values < 0) | (values >= limits)
    if on_bad_id == "hash":
        return replace(ids, values=torch.from_numpy(np.where(bad, values % limits, values)))
    place = int(np.argmax(bad))
    bag = int(np.searchsorted(offsets, place, side="right")) - 1
    feature, sample = divmod(bag, ids.batch_size)
    raise DataError(
        f"feature {ids.features[feature]!r}, sample {first_sample + sample} of the global batch: "
        f"id {int(values[place])} is not in table {table_names[feature]!r}, which has "
        f"{int(rows[feature])} rows (ids 0 to {int(rows[feature]) - 1}); {int(bad.sum())} such ids "
        "in this slice. Correct the data or the table's rows, or take such ids modulo the "
        "table's rows with data.on_bad_id=hash"
    )


@compiled(types.boolean(in8, in8, in8))
def _is_any_beyond(values: np.ndarray, edges: np.ndarray, rows: np.ndarray) -> bool:
    """Whether an id is outside its table, of so many rows; the ids of feature f are
    `edges[f : f + 2]`."""
    for feature in range(len(rows)):
        largest = np.uint64(0)  # unsigned, so that negative ids are beyond every table too
        for i in range(edges[feature], edges[feature + 1]):
            largest = max(largest, np.uint64(values[i]))
        if largest >= np.uint64(rows[feature]) and edges[feature] < edges[feature + 1]:
            return True
    return False


def checked_offsets(ids: JaggedIds) -> np.ndarray:
    """Return the offsets as int64 `[F * b + 1]`.

    Raises DataError where they, the values or the weights are malformed.
    """
    if ids.values.dtype not in _ID_DTYPES or ids.values.dim() != 1:
        is_float = ids.values.dtype.is_floating_point
        remedy = " (replace missing ids by a row of their own, then .long())" if is_float else ""
        raise DataError(
            f"ids are {ids.values.dtype} of shape {list(ids.values.shape)}; give int64 of shape "
            f"[n]{remedy}"
        )
    if ids.offsets.dtype not in _ID_DTYPES or ids.offsets.dim() != 1 or not ids.offsets.shape[0]:
        raise DataError(
            f"offsets are {ids.offsets.dtype} of shape {list(ids.offsets.shape)}; give int64 of "
            "shape [features * samples + 1]"
        )
    offsets, features = ids.offsets.numpy().astype(np.int64, copy=False), len(ids.features)
    if (len(offsets) - 1) % max(features, 1) or (features == 0 and len(offsets) > 1):
        raise DataError(
            f"{len(offsets)} offsets do not fit {features} features: give features * samples + 1"
        )
    if offsets[0] != 0 or offsets[-1] != ids.values.shape[0]:
        raise DataError(
            f"offsets go from {offsets[0]} to {offsets[-1]}; they must go from 0 to the number of "
            f"ids, {len(ids.values)}"
        )
    known = is_one_each(ids.offsets, len(ids.values), look=False)
    if not known and (falling := offsets[1:] < offsets[:-1]).any():
        falls = np.flatnonzero(falling)
        feature, sample = divmod(int(falls[0]), ids.batch_size)
        raise DataError(
            f"offsets fall from {offsets[falls[0]]} to {offsets[falls[0] + 1]} at feature "
            f"{ids.features[feature]!r}, sample {sample} of the slice; they must never decrease"
        )
    weights = ids.weights
    if weights is not None and (
        not weights.dtype.is_floating_point or tuple(weights.shape) != (len(ids.values),)
    ):
        raise DataError(
            f"weights are {weights.dtype} of shape {list(weights.shape)} for {len(ids.values)} "
            f"ids; give one float per id, shape [{len(ids.values)}]"
        )
    return offsets


class BatchCheck:
    """Every id inside its table, every feature in its place; DataError names what is not."""

    def __init__(
        self, tables: Sequence[TableSpec], features: Sequence[str], on_bad_id: str
    ) -> None:
        reader = {feature: table for table in tables for feature in table.features}
        self.tables = tables
        self._features, self._on_bad_id = tuple(features), on_bad_id
        self._rows = [reader[feature].rows for feature in features]
        self._names = [reader[feature].name for feature in features]

    def __call__(self, batch: Batch) -> Batch:
        """`batch`, with ids brought into their tables where `on_bad_id` says so."""
        try:
            if batch.ids.features != self._features:
                raise DataError(
                    f"it has the features {list(batch.ids.features)}; this model reads "
                    f"{list(self._features)}, in this order"
                )
            first, how = batch.first_sample, self._on_bad_id
            ids = check_ids(batch.ids, self._rows, self._names, first, how)
        except DataError as error:
            text = str(error)
            if batch.global_size == UNKNOWN:  # where the slice lies is not known either
                text = text.replace("of the global batch", "of this rank's slice")
            raise DataError(f"{batch.kind} batch {batch.index}: {text}") from error
        return batch if ids is batch.ids else replace(batch, ids=ids)


class Prefetch(AbstractContextManager["Prefetch"]):
    """Iterates over `batches`, loaded, at most `depth` ahead; what goes wrong is raised in order.

    After each batch `load_s` is what drawing and loading it took (seconds, beside the steps). A
    context manager: leaving it waits for the batch that is being drawn, and drops those ahead.
    """

    def __init__(self, batches: Iterable[Batch], depth: int = 2) -> None:
        self._batches, self._depth = iter(batches), depth
        self._thread = ThreadPoolExecutor(1, "distcache-load")
        self.load_s = 0.0

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Batch]:
        # One more than `depth` is being drawn while the caller uses the batch before them.
        ahead = deque(self._thread.submit(self._draw) for _ in range(self._depth + 1))
        while (item := ahead.popleft().result()) is not None:
            batch, self.load_s = item
            ahead.append(self._thread.submit(self._draw))
            yield batch

    def _draw(self) -> tuple[Batch, float] | None:
        """The next batch, loaded, and the seconds that took; None after the last one."""
        began = time.perf_counter()
        batch = next(self._batches, None)
        return batch and (batch.loaded(), time.perf_counter() - began)
