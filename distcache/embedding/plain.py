"""Modules with the arguments of torch.nn's embeddings, over cached rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor

from distcache.embedding import graphs
from distcache.embedding.collection import CachedCollection
from distcache.embedding.tensors import PlainTable, TensorIds, TensorReader
from distcache.engine.gradients import all_to_device
from distcache.errors import ConfigError, DataError, PlanError
from distcache.optim import RowUpdate

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

    _takes: ClassVar[type] = TensorIds

    def _begin(
        self, table: PlainTable, refused: dict[str, Any], to_end: bool, ours: Sequence[Any]
    ) -> None:
        """What `__init__` does after nn.Module's. `ours`: device and what follows in `_make`."""
        for name, value in refused.items():
            if value:
                raise ConfigError(
                    f"{type(self).__name__}: {name}={value!r} is not supported: {_WAYS[name]}"
                )
        self._table = table
        self.num_embeddings, self.embedding_dim = table.shape
        self.padding_idx = table.padding_idx
        *ours, settings = ours
        dtype = table.dtype if table.data_type == "FP32" else torch.float32
        self._make([table], *ours, settings | {"dtype": dtype})
        pad = table.padding_idx
        self.reader = TensorReader(self.reader.lookups, self._pooled, pad, to_end)

    def _checked(self, tables: Sequence[Any]) -> list[Any]:
        return list(tables)

    def _key_of(self, table: str) -> str:
        return "weight"

    @property
    def _dtype(self) -> torch.dtype:
        return self._table.dtype

    @property
    def weight(self) -> Tensor:
        """The table `[num_embeddings, embedding_dim]` in host memory, to be read and written
        between two steps, by all ranks; see `embedding.weights.TableWeight`. No parameter of the
        module. Raises PlanError on several nodes."""
        return self._table_views()[self._table.name].weight

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
        self.max_norm, self.norm_type, self.sparse = max_norm, norm_type, sparse
        self.scale_grad_by_freq, self.mode = scale_grad_by_freq, mode
        self.include_last_offset = include_last_offset
        shape = num_embeddings, embedding_dim
        table = PlainTable.of(name, shape, mode, padding_idx, dtype, _weight)
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        refused["mode"] = None if mode in ("sum", "mean") else mode
        ours = (device, optimizer, process_group, timeout_s, settings)
        self._begin(table, refused, include_last_offset, ours)

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

    @torch.compiler.disable
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
        if graphs.is_traced(input):
            return graphs.as_node(self, input, offsets, per_sample_weights)
        given = TensorIds(input, offsets, per_sample_weights)
        if per_sample_weights is not None and self.mode != "sum":
            raise DataError(f"per_sample_weights with mode={self.mode!r}: they need mode='sum'")
        if self.device.type == "meta":
            bags = len(input) if offsets is None else len(offsets) - self.include_last_offset
            return torch.empty(bags, self.embedding_dim, device="meta", dtype=self._table.dtype)
        step, micro = self._open(given)
        weights = None
        if per_sample_weights is not None:
            weights = self.reader.weights(step.reads[micro], given, self.device)
            weights = weights.to(self._recipe.settings.dtype)
        pooled = step.pooled(micro, weights, reads_alone=bool(self._copied))
        self._refuse_gradients([pooled])
        return pooled.to(self._table.dtype)


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
        self.max_norm, self.norm_type, self.sparse = max_norm, norm_type, sparse
        self.scale_grad_by_freq, shape = scale_grad_by_freq, (num_embeddings, embedding_dim)
        table = PlainTable.of(name, shape, "", padding_idx, dtype, _weight)
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        ours = (device, optimizer, process_group, timeout_s, settings)
        self._begin(table, refused, False, ours)
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

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """The rows of ids of any shape, `[..., D]`; called by all ranks. Raises as
        `CachedEmbeddingBag` does."""
        if graphs.is_traced(input):
            return graphs.as_node(self, input)
        given, shape = TensorIds(input), (*input.shape, self.embedding_dim)
        if self.device.type == "meta":
            return torch.empty(shape, device="meta", dtype=self._table.dtype)
        step, micro = self._open(given)
        (rows,), taken = step.rows(micro, bool(self._copied)), step.reads[micro].taken
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
        return self.tables.whole.local(0)[0][self.padding_idx]
