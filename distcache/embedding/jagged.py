"""Collections with TorchRec's arguments and interfaces over cached rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcache.embedding.collection import EAGER_ONLY, CachedCollection, as_node, is_traced
from distcache.embedding.ids import (
    EmbeddingBagCollectionInterface,
    EmbeddingBagConfig,
    EmbeddingCollectionInterface,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    Lookups,
)
from distcache.engine.gradients import to_device
from distcache.errors import ConfigError
from distcache.optim import RowUpdate


def sequences_on_meta(
    lookups: Lookups, features: KeyedJaggedTensor, need_indices: bool
) -> dict[str, JaggedTensor]:
    """Return the output of a collection of sequences that lies on 'meta', without values."""
    ids_by_key = features.to_dict()
    rows: dict[str, JaggedTensor] = {}
    for name, key, dim in zip(lookups.names, lookups.features, lookups.dims, strict=True):
        ids = ids_by_key[key]
        values = torch.empty(len(ids.values()), dim, device="meta")
        rows[name] = JaggedTensor(values, ids.values() if need_indices else None, ids.lengths())
    return rows


# -----------------------------------------------------------------------------
# `CachedEmbeddingBagCollection`: TorchRec's EmbeddingBagCollection over cached rows.


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

    _tables_key, _config_type = "embedding_bags", EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: RowUpdate | Mapping[str, RowUpdate] | type | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """`tables`, `is_weighted`, `device` as in TorchRec; without a device, or on 'meta', it may
        be moved (`.to(device)`, `to_empty(device=...)`) until its first use.

        `optimizer`: one of `distcache.optim`, with its settings, or one for each table by name,
        which differ in `lr` and `weight_decay` alone, whose steps are `step()`; or a class that
        TorchRec's fused collections take (`torch.optim.SGD`, `Adagrad`, `Adam`,
        `torchrec.optim.RowWiseAdagrad`), also by their name `optimizer_type`, with
        `optimizer_kwargs`: then rows are updated inside backward, as where
        `apply_optimizer_in_backward` is called on the `weight`s of all tables. Without one the
        collection evaluates, and a backward pass through it raises.

        `process_group`: whose ranks train together (all, where torch.distributed is initialised;
        else this process alone); groups of its own are made from it. `timeout_s`:
        longest wait for another rank, seconds.

        Settings by keyword: at most one of `rows` (slots per rank over all tables), `ratio` (of
        each width's rows) and `bytes` (default: 1.5 % of them, at least 32 MiB); `lookahead="auto"`
        (8 to 64, by the first batch) and `prefetch=1`, optimizer steps that ids are known, and rows
        may move, ahead;
        `policy="lookahead"|"lfu"|"lru"|"frequency"|"static"`, with
        `tail="lfu"|"lru"|"frequency"` and `half_life="auto"|steps`; `resident="auto"|"none"`: the
        smallest tables stay once their rows have come;
        `statistics`, a folder of distcache.analyze or distcache.preprocess or a `Statistics`, with
        `warm_start` and `split` as the keys of group `cache` (`batch_size`: samples of an
        optimizer step over all ranks, for `split="by_curve"` and `policy="static"`);
        `schedule="overlapped"|"serial"`: rows move beside the steps, or between them;
        `store_access="staged"|"zero_copy"`: through buffers, or read and written in host memory;
        `reduction="ordered"|"native"`, whose bits do not or may depend on the cache;
        `gradient_reduction="mean"|"sum"`; `dtype=torch.float32|torch.float64`;
        `init="auto"|"torch"|"seed"`, initial rows by torch's generator as in TorchRec, or a
        function of `seed` (`"auto"`: torch's for up to 256 MiB of tables where no seed is given);
        `on_bad_id="error"|"hash"` (modulo the table's rows).

        Raises ConfigError, on every rank, and MemoryTooSmallError where host or device memory
        does not hold the tables or the cache.
        """
        super().__init__()
        self._is_weighted = is_weighted
        self._make(tables, device, optimizer, process_group, timeout_s, settings)
        self._embedding_bag_configs: list[EmbeddingBagConfig] = self._config.configs

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs."""
        return self._embedding_bag_configs

    embedding_configs = embedding_bag_configs
    """The same, for wrappers that know no collection of bags but TorchRec's own."""

    @property
    def embedding_bags(self) -> nn.ModuleDict:
        """The tables by name, each with its `weight`, to be read and written at any time between
        two steps, see `embedding.weights.TableWeight`; by all ranks. They are no modules of the
        collection, so that its parameters do not have them. Raises PlanError on several nodes."""
        return self._table_views()

    def is_weighted(self) -> bool:
        """Whether ids come with weights."""
        return self._is_weighted

    @property
    def embedding_names(self) -> list[str]:
        """The keys of the `KeyedTensor`: `feature`, or `feature@table` for a shared feature."""
        return list(self.reader.lookups.names)

    # TorchRec's wrappers read the attribute of its own collection.
    _embedding_names = embedding_names

    @torch.compiler.disable(reason=EAGER_ONLY)
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings `[b, sum of widths]`; called by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        if is_traced(features):
            return as_node(self, features)
        self._refuse_export()
        dims = list(self.reader.lookups.dims)
        if self.device.type == "meta":
            pooled = torch.empty(features.stride(), sum(dims), device="meta")
        else:
            pooled = self._pool(features, self._is_weighted)
        return KeyedTensor(self.embedding_names, dims, pooled)


# -----------------------------------------------------------------------------
# `CachedEmbeddingCollection`: TorchRec's EmbeddingCollection over cached rows.


class CachedEmbeddingCollection(CachedCollection, EmbeddingCollectionInterface):
    """Whole tables in host memory, a cache of rows on the device; the row of every id comes out.

    Takes the place of `torchrec.EmbeddingCollection` (sequence embeddings, nothing is pooled):
    `KeyedJaggedTensor` in, a dictionary of `JaggedTensor`s out, with the same keys and the same
    `state_dict`; weights of ids are not read, as in TorchRec. All else is as in
    `CachedEmbeddingBagCollection`: `distcache.lookahead(batches, ec)` reads batches ahead,
    `step()` (or `optimizer.step()`) updates the tables, and all ranks do these together. Unlike
    TorchRec's, its tables may differ in width.
    """

    _tables_key, _config_type, _pooled = "embeddings", EmbeddingConfig, False

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
        *,
        optimizer: RowUpdate | Mapping[str, RowUpdate] | type | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """`tables`, `device`, `need_indices` as in TorchRec.

        `need_indices`: the ids come along, as the weights of the `JaggedTensor`s.
        `use_gather_select` and the like say how TorchRec computes when it shards; they are kept for
        those who ask. The other arguments, and what is raised, are those of
        `CachedEmbeddingBagCollection`.
        """
        super().__init__()
        self._need_indices = need_indices
        self._gather_select = use_gather_select, use_gather_select_per_sharding
        self._make(tables, device, optimizer, process_group, timeout_s, settings)
        self._embedding_configs: list[EmbeddingConfig] = self._config.configs

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs."""
        return self._embedding_configs

    @property
    def embeddings(self) -> nn.ModuleDict:
        """The tables by name, each with its `weight`; see `CachedEmbeddingBagCollection`."""
        return self._table_views()

    def need_indices(self) -> bool:
        """Whether ids come along with their rows."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """What it was made with."""
        return self._gather_select[0]

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """What it was made with."""
        return self._gather_select[1]

    def embedding_dim(self) -> int:
        """The width of all tables, -1 without any; raises ConfigError where they differ."""
        widths = sorted({config.embedding_dim for config in self._config.configs})
        if len(widths) > 1:
            raise ConfigError(f"embedding_dim(): the tables have several widths, {widths}")
        return widths[0] if widths else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, by table: `feature`, or `feature@table` for a shared feature."""
        pairs = list(zip(self.reader.lookups.names, self.reader.lookups.tables, strict=True))
        places = range(len(self._config.configs))
        return [[name for name, table in pairs if table == at] for at in places]

    @torch.compiler.disable(reason=EAGER_ONLY)
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The rows of every feature's ids, `values` `[n, D]` with the ids' lengths; by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        if is_traced(features):
            return as_node(self, features)
        self._refuse_export()
        if self.device.type == "meta":
            return sequences_on_meta(self.reader.lookups, features, self._need_indices)
        with self._lazy_tables.forward(self._trains and not self._only_reads):
            step, micro = self._open(features)
            rows = step.rows(micro, reads_alone=self._only_reads)
        ids, device = step.reads[micro].ids, self._config.device
        self._refuse_gradients(rows)
        given, names = features.lengths_or_none(), self.reader.lookups.names
        dtype = torch.int64 if given is None else given.dtype
        by_lookup = ids.offsets.diff().view(len(names), ids.batch_size)
        ends = nn.functional.pad(by_lookup.cumsum(1), (1, 0))
        lengths, offsets = (to_device(part.to(dtype), device) for part in (by_lookup, ends))
        samples = step.reads[micro].samples
        indices: Sequence[Tensor | None] = [None] * len(rows)
        if self._need_indices:
            indices = to_device(ids.values, device).split([len(part) for part in rows])
        return {
            name: JaggedTensor(
                rows[at], indices[at], lengths[at, : samples[at]], offsets[at, : samples[at] + 1]
            )
            for at, name in enumerate(names)
        }
