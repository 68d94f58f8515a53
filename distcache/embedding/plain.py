"""Modules with the arguments of torch.nn's embeddings, over cached rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.data.batch import JaggedIds
from distcache.embedding.collection import EAGER_ONLY, CachedCollection, as_node, is_traced
from distcache.embedding.ids import IdReader, Lookups, PlainTable, ReadIds, search, version_of
from distcache.engine.gradients import all_to_device
from distcache.errors import ConfigError, DataError, PlanError
from distcache.optim import RowUpdate

_WHOLE = (torch.int64, torch.int32)

# -----------------------------------------------------------------------------
# Ids as torch.nn takes them: plain tensors, read and recognised again.


@dataclass(frozen=True, eq=False)
class TensorIds:
    """What a module is called with: ids, where bags of them begin, and weights of them."""

    input: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, given: Any) -> TensorIds:
        """From what a function of the user's gives of a batch: `input`, or the arguments."""
        parts = given if isinstance(given, tuple | list) else (given,)
        return given if isinstance(given, TensorIds) else cls(*parts[:3])

    def __post_init__(self) -> None:
        for own in (self.input, self.offsets):
            if own is not None and not (isinstance(own, Tensor) and own.dtype in _WHOLE):
                raise DataError(
                    f"ids or offsets of {getattr(own, 'dtype', type(own).__name__)}: give tensors "
                    "of int64 or int32, as the module is called with, and lookahead(..., "
                    "ids=lambda batch: ...) too: input, or (input, offsets)"
                )
        if self.weights is not None and self.weights.shape != self.input.shape:
            raise DataError(
                f"per_sample_weights of shape {list(self.weights.shape)} for input of shape "
                f"{list(self.input.shape)}: give one for each id"
            )

    def values(self) -> Tensor:
        """The ids `[n]`."""
        return self.input.reshape(-1)

    def weights_or_none(self) -> Tensor | None:
        """Their weights `[n]`."""
        return None if self.weights is None else self.weights.reshape(-1)


class ReadTensors(ReadIds):
    """`TensorIds` as they were read. Tensors are recognised, and slices of the same memory."""

    def is_of(self, features: Any) -> bool:
        """Whether these are the same tensors."""
        source: Any = self.source
        return _is_same(features.input, source.input) and _is_same(features.offsets, source.offsets)

    def is_unchanged(self, features: Any, read: Callable[..., ReadIds]) -> bool:
        """Whether they still have the ids that were read; of those on a device, whether torch's
        functions have left them alone, for which nobody waits."""
        if features.input.device.type != "cpu":
            return self._is_untouched()
        return self.has_ids_of(features, read)

    def has_ids_of(self, features: Any, read: Callable[..., ReadIds]) -> bool:
        """Whether other tensors have the ids that were read, in the same places."""
        one, other = self.taken, read(features).taken
        both = one is not None and other is not None
        alike = torch.equal(one, other) if both else one is other
        return alike and super().has_ids_of(features, read)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are one in memory, which the second keeps."""
    if one is None or other is None or one is other:
        return one is other
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (one, other)]
    return places[0] == places[1] and one.data_ptr() != 0  # as of tensors that lie elsewhere


class TensorReader(IdReader):
    """Reads the ids of a module. Those of `padding_idx` are left out; `pooled`: whether bags come
    out; `to_end`: whether the last of the offsets is the end of the last bag."""

    def __init__(
        self, lookups: Lookups, pooled: bool, padding_idx: int | None, to_end: bool
    ) -> None:
        super().__init__(lookups, pooled)
        self._padding_idx, self._to_end = padding_idx, to_end

    def find(self, batch: Any) -> Any:
        """The one tensor of whole numbers in a batch. Raises ConfigError where that is not one."""
        found = {id(one): one for one in search(batch, Tensor) if one.dtype in _WHOLE}
        if len(found) == 1:
            return next(iter(found.values()))
        raise ConfigError(
            f"a batch of type {type(batch).__name__} has {len(found)} tensors of whole numbers: "
            "tell lookahead which are the ids of a module, lookahead(batches, module, "
            "ids=lambda batch: batch[0]), or ids={module: lambda batch: ..., other: ...}"
        )

    def read(self, given: Any) -> ReadTensors:
        """The ids and their bags, on the CPU. Raises DataError for others than torch.nn takes."""
        found = TensorIds.of(given)
        tensors = [own for own in (found.input, found.offsets) if own is not None]
        versions = tuple((own, version_of(own)) for own in tensors)
        ids = found.values().detach().to("cpu", torch.int64, copy=True)  # buffers may be reused
        ends = self._ends(found, len(ids))
        taken, pad = None, self._padding_idx
        if pad is not None and bool((ids == pad).any()):
            kept, before = ids != pad, torch.zeros(len(ids) + 1, dtype=torch.int64)
            taken = kept.nonzero().flatten()
            torch.cumsum(kept, 0, out=before[1:])
            ids, ends = ids[taken], before[ends]
        if not self._pooled:
            ends = torch.arange(len(ids) + 1)
        joined = JaggedIds(self.lookups.features, ids, ends, None)
        return ReadTensors(found, joined, taken, (joined.batch_size,), versions, None)

    def _ends(self, found: TensorIds, count: int) -> Tensor:
        """`[b + 1]`: where bags begin, and the end of the last one."""
        input, offsets = found.input, found.offsets
        if not self._pooled:
            return torch.tensor([0, count])
        if input.dim() == 2 and offsets is None:
            return torch.arange(len(input) + 1) * input.shape[1]
        if input.dim() != 1 or offsets is None or offsets.dim() != 1:
            shape = None if offsets is None else list(offsets.shape)
            raise DataError(
                f"input of shape {list(input.shape)} with offsets of shape {shape}: give ids [n] "
                "with offsets [b], or ids [b, n] without"
            )
        ends = offsets.detach().to("cpu", torch.int64, copy=True)
        if not self._to_end:
            ends = torch.cat([ends, torch.tensor([count])])
        fits = len(ends) and not int(ends[0]) and int(ends[-1]) == count
        if not fits or bool((ends.diff() < 0).any()):
            raise DataError(
                f"offsets {offsets.tolist()[:8]} of bags of {count} ids: they begin with 0, never "
                "decrease, and end within the ids, or with their number if include_last_offset"
            )
        return ends


# -----------------------------------------------------------------------------
# The modules.

_WAYS = {
    "max_norm": "rows would change when they are read: leave it out, and write to `weight` between "
    "two steps what torch.renorm gives",
    "scale_grad_by_freq": "leave it out: a row gets the sum of its gradients; give mode='mean' or "
    "per_sample_weights to divide them",
    "mode": "give 'sum' or 'mean', or take the maximum of what CachedEmbedding gives, "
    "module(ids).amax(dim=1)",
}
"""What torch.nn has and these do not, and what to do instead."""


class CachedModule(CachedCollection):
    """A module of torch.nn, its one table in host memory, a cache of rows on the device.

    All but its arguments and what goes in and out is as in `CachedEmbeddingBagCollection`, whose
    keywords it takes; `state_dict` has `weight`. Ids are read on the CPU: leave them there.
    """

    _config_type, _takes = PlainTable, TensorIds

    def _begin(self, table: PlainTable, given: dict[str, Any], ours: Sequence[Any]) -> None:
        """What `__init__` does after nn.Module's. `given`: what else torch.nn's has as attributes;
        `ours`: device and what follows in `_make`."""
        vars(self).update(given)
        for name, way in _WAYS.items():
            value = given.get(name)
            if value and not (name == "mode" and value in ("sum", "mean")):
                raise ConfigError(
                    f"{type(self).__name__}: {name}={value!r} is not supported: {way}"
                )
        self._table, self.padding_idx = table, table.padding_idx
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        *ours, settings = ours
        dtype = table.dtype if table.data_type == "FP32" else torch.float32
        self._make([table], *ours, settings | {"dtype": dtype})
        self._dtype = table.dtype
        to_end = given.get("include_last_offset", False)
        self.reader = TensorReader(self.reader.lookups, self._pooled, self.padding_idx, to_end)

    def _key_of(self, table: str) -> str:
        return "weight"

    @property
    def weight(self) -> Tensor:
        """The table `[num_embeddings, embedding_dim]` in host memory, to be read and written
        between two steps, by all ranks; see `embedding.weights.TableWeight`. No parameter of the
        module. Raises PlanError on several nodes."""
        return self._table_views()[self._table.name].weight

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `weight = tensor` loads the table, see `load_table`."""
        if name == "weight" and "_table" in vars(self):
            self.load_table(self._table.name, value)
        else:
            super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draw the weights anew, as torch.nn does; not on 'meta'. Called by all ranks."""
        self._table.given = None
        super().reset_parameters()

    def extra_repr(self) -> str:
        """As torch.nn's."""
        pad = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        mode = f", mode={self._table.pooling!r}" if self._pooled else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{mode}{pad}"


class CachedEmbeddingBag(CachedModule):
    """Takes the place of `torch.nn.EmbeddingBag` with `sparse=True`; see `CachedModule`.

    `distcache.lookahead(batches, bag, ids=lambda batch: (batch.ids, batch.offsets))` reads ahead;
    `step()` (or `optimizer.step()`) updates the table; all ranks do these together.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "embedding",
        optimizer: RowUpdate | type | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """As torch.nn's, with `mode` "sum" or "mean"; rows are updated lazily whatever `sparse`.

        `name`: the table's, in messages, statistics and files. The other arguments, and what is
        raised, are those of `CachedEmbeddingBagCollection`; ConfigError for `max_norm`,
        `scale_grad_by_freq` and other modes.
        """
        super().__init__()
        shape = num_embeddings, embedding_dim
        table = PlainTable(name, *shape, mode, padding_idx, dtype, _weight)
        given = {"max_norm": max_norm, "norm_type": norm_type, "sparse": sparse}
        given |= {"scale_grad_by_freq": scale_grad_by_freq, "mode": mode}
        given["include_last_offset"] = include_last_offset
        self._begin(table, given, (device, optimizer, process_group, timeout_s, settings))

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **ours: Any,
    ) -> Self:
        """A module with these weights `[rows, D]`, as torch.nn's; `ours`: arguments by keyword."""
        args = max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings
        made = cls(*embeddings.shape, *args, include_last_offset, padding_idx, **ours)
        return made.requires_grad_(not freeze)

    @torch.compiler.disable(reason=EAGER_ONLY)
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pooled rows `[b, D]` of ids `[b, n]`, or of ids `[n]` in bags that begin at `offsets`
        `[b]`; called by all ranks.

        Raises DataError for what torch.nn does not take, and for ids that are in no row; PlanError
        for a batch that is not the one that `lookahead` gave out next, StepTooLargeError when the
        cache does not hold the step.
        """
        if is_traced(input):
            return as_node(self, input, offsets, per_sample_weights)
        self._refuse_export()
        given = TensorIds(input, offsets, per_sample_weights)
        if per_sample_weights is not None and self.mode != "sum":
            raise DataError(f"per_sample_weights with mode={self.mode!r}: they need mode='sum'")
        if self.device.type == "meta":
            bags = len(input) if offsets is None else len(offsets) - self.include_last_offset
            return torch.empty(bags, self.embedding_dim, device="meta", dtype=self._table.dtype)
        return self._pool(given, per_sample_weights is not None).to(self._table.dtype)


class CachedEmbedding(CachedModule):
    """Takes the place of `torch.nn.Embedding` with `sparse=True`; see `CachedModule`.

    `distcache.lookahead(batches, embedding, ids=lambda batch: batch.ids)` reads ahead; `step()` (or
    `optimizer.step()`) updates the table; all ranks do these together.
    """

    _pooled = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str = "embedding",
        optimizer: RowUpdate | type | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """As torch.nn's; rows are updated lazily whatever `sparse`, that of `padding_idx` never.
        The other arguments are those of `CachedEmbeddingBag`."""
        super().__init__()
        shape = num_embeddings, embedding_dim
        table = PlainTable(name, *shape, "", padding_idx, dtype, _weight)
        given = {"max_norm": max_norm, "norm_type": norm_type, "sparse": sparse}
        given["scale_grad_by_freq"] = scale_grad_by_freq
        self._begin(table, given, (device, optimizer, process_group, timeout_s, settings))
        self.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **ours: Any,
    ) -> Self:
        """A module with these weights `[rows, D]`, as torch.nn's; `ours`: arguments by keyword."""
        args = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze
        return cls(*embeddings.shape, *args, **ours)

    @torch.compiler.disable(reason=EAGER_ONLY)
    def forward(self, input: Tensor) -> Tensor:
        """The rows of ids of any shape, `[..., D]`; called by all ranks. Raises as
        `CachedEmbeddingBag` does."""
        if is_traced(input):
            return as_node(self, input)
        self._refuse_export()
        given, shape = TensorIds(input), (*input.shape, self.embedding_dim)
        if self.device.type == "meta":
            return torch.empty(shape, device="meta", dtype=self._table.dtype)
        with self._lazy_tables.forward(self._trains and not self._only_reads):
            step, micro = self._open(given)
            (rows,) = step.rows(micro, self._only_reads)
        taken = step.reads[micro].taken
        self._refuse_gradients([rows])
        if taken is not None:  # the others are padding
            pad, at = all_to_device([self._padding_row(), taken], rows.device)
            rows = pad.to(rows.dtype).expand(input.numel(), -1).index_copy(0, at, rows)
        return rows.view(shape).to(self._table.dtype)

    def _padding_row(self) -> Tensor:
        """The row of `padding_idx`, which no step changes, so that the one in the store counts."""
        if self.tables.world.nodes.count > 1:
            raise PlanError(
                f"padding_idx={self.padding_idx} on several nodes, each of which has part of the "
                "rows: leave it out, and set the output to zero where ids are padding"
            )
        return self.tables.full_tables.local(0)[0][self.padding_idx]
