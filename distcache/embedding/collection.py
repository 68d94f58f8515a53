"""`CachedEmbeddingBagCollection`: TorchRec's EmbeddingBagCollection over cached rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distcache.embedding.base import CachedCollection
from distcache.optim.rows import RowUpdate


class CachedEmbeddingBagCollection(CachedCollection, EmbeddingBagCollectionInterface):
    """Whole tables in host memory, a cache of rows on the device; trains as if all were there.

    Takes the place of `torchrec.EmbeddingBagCollection`: `KeyedJaggedTensor` in, `KeyedTensor`
    out, the same key order and names, the same `state_dict`. Its tables are neither parameters
    nor buffers: DDP neither sees nor broadcasts them; `step()` (or `optimizer.step()`) updates
    them, never backward. Read batches through `distcache.lookahead(batches, ebc)`; a batch that
    comes otherwise is planned when it comes: slower, with the same result.

    Every rank of the process group makes it, calls it, steps it, and asks for its `state_dict`, in
    the same order. With W ranks each sees the sum of all ranks' row gradients, times 1/W for
    `gradient_reduction="mean"` (what DDP does for the dense part).
    """

    _tables_key, _config = "embedding_bags", EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: RowUpdate,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """`tables`, `is_weighted`, `device` as in TorchRec; the device does not change later.

        `optimizer`: `distcache.optim.SGD`, `Adagrad`, `RowWiseAdagrad` or `Adam`, with its
        settings. `process_group`: whose ranks train together (all, where torch.distributed is
        initialised; else this process alone); groups of its own are made from it. `timeout_s`:
        longest wait for another rank, seconds.

        Settings by keyword: at most one of `rows` (slots per rank over all tables), `ratio` (of
        each width's rows) and `bytes` (default: ratio 0.015); `lookahead=8` and `prefetch=1`,
        optimizer steps that ids are known, and rows may move, ahead; `policy="lookahead"|"lfu"|
        "lru"|"frequency"|"static"`, with `tail="lfu"|"lru"|"frequency"`, `admission=False|True` and
        `half_life="auto"|steps`;
        `statistics`, a folder of distcache.analyze or distcache.preprocess or a `Statistics`, with
        `order`, `warm_start` and `split` as the keys of group `cache` (`batch_size`: samples of an
        optimizer step over all ranks, for `split="by_curve"` and `policy="static"`);
        `schedule="overlapped"|"serial"`: rows move beside the steps, or between them;
        `store_access="staged"|"zero_copy"`: through buffers, or read and written in host memory;
        `reduction="ordered"|"native"`, whose bits do not or may depend on the cache;
        `gradient_reduction="mean"|"sum"`; `dtype=torch.float32|torch.float64`; `seed=0` of the
        initial rows; `on_bad_id="error"|"hash"` (modulo the table's rows).

        Raises ConfigError, on every rank, and MemoryTooSmallError where host or device memory
        does not hold the tables or the cache.
        """
        super().__init__()
        self._is_weighted = is_weighted
        self._make(tables, device, optimizer, process_group, timeout_s, settings)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids come with weights."""
        return self._is_weighted

    @property
    def embedding_names(self) -> list[str]:
        """The keys of the `KeyedTensor`: `feature`, or `feature@table` for a shared feature."""
        return list(self.reader.lookups.names)

    @torch.compiler.disable
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings `[b, sum of widths]`; called by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        step, micro = self._open(features)
        return KeyedTensor(
            keys=self.embedding_names,
            length_per_key=list(self.reader.lookups.dims),
            values=step.pooled(micro),
        )
