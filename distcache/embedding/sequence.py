"""`CachedEmbeddingCollection`: TorchRec's EmbeddingCollection over cached rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distcache.data.batch import JaggedIds
from distcache.embedding.base import CachedCollection
from distcache.errors import ConfigError
from distcache.optim.rows import RowUpdate
from distcache.pipeline.lookup import to_device


class CachedEmbeddingCollection(CachedCollection, EmbeddingCollectionInterface):
    """Whole tables in host memory, a cache of rows on the device; the row of every id comes out.

    Takes the place of `torchrec.EmbeddingCollection` (sequence embeddings, nothing is pooled):
    `KeyedJaggedTensor` in, a dictionary of `JaggedTensor`s out, with the same keys and the same
    `state_dict`; weights of ids are not read, as in TorchRec. All else is as in
    `CachedEmbeddingBagCollection`: `distcache.lookahead(batches, ec)` reads batches ahead,
    `step()` (or `optimizer.step()`) updates the tables, and all ranks do these together. Unlike
    TorchRec's, its tables may differ in width.
    """

    _tables_key, _config = "embeddings", EmbeddingConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: RowUpdate,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """`tables`, `device`, `need_indices` as in TorchRec; the device does not change later.

        `need_indices`: the ids come along, as the weights of the `JaggedTensor`s. The other
        arguments, and what is raised, are those of `CachedEmbeddingBagCollection`.
        """
        super().__init__()
        self._need_indices = need_indices
        self._make(tables, device, optimizer, process_group, timeout_s, settings)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether ids come along with their rows."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The width of all tables; raises ConfigError where they differ."""
        widths = sorted({config.embedding_dim for config in self._configs})
        if len(widths) > 1:
            raise ConfigError(f"embedding_dim(): the tables have several widths, {widths}")
        return widths[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, by table: `feature`, or `feature@table` for a shared feature."""
        lookups = self.reader.lookups
        pairs = list(zip(lookups.tables, lookups.names, strict=True))
        return [[name for own, name in pairs if own == at] for at in range(len(self._configs))]

    @torch.compiler.disable
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The rows of every feature's ids, `values` `[n, D]` with the ids' lengths; by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        step, micro = self._open(features)
        ids, rows = step.reads[micro].ids, step.rows(micro)
        given = features.lengths_or_none()
        lengths, offsets = _by_lookup(ids, torch.int64 if given is None else given.dtype)
        lengths, offsets = (to_device(part, self._device) for part in (lengths, offsets))
        indices = self._indices(ids, [len(part) for part in rows])
        out = {}
        for at, name in enumerate(self.reader.lookups.names):
            out[name] = JaggedTensor(
                values=rows[at], weights=indices[at], lengths=lengths[at], offsets=offsets[at]
            )
        return out

    def _indices(self, ids: JaggedIds, counts: list[int]) -> Sequence[Tensor | None]:
        """The ids of every lookup, on the device, if they are wanted."""
        if not self._need_indices:
            return [None] * len(counts)
        return to_device(ids.values, self._device).split(counts)


def _by_lookup(ids: JaggedIds, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lengths `[F, b]` and offsets `[F, b + 1]` of every lookup's sequences."""
    size = ids.batch_size
    lengths = ids.offsets.diff().view(len(ids.features), size)
    offsets = torch.zeros(len(ids.features), size + 1, dtype=torch.int64)
    torch.cumsum(lengths, 1, out=offsets[:, 1:])
    return lengths.to(dtype), offsets.to(dtype)
