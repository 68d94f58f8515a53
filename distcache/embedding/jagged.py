"""Collections with TorchRec's arguments, `KeyedJaggedTensor`s in, over cached rows; in programs of
torch.export, and under TorchRec's tools. No program has tables, nor memory that others share."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcache.embedding.collection import CachedCollection, as_node, is_traced
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
from distcache.errors import ConfigError, PlanError
from distcache.optim import RowUpdate

# -----------------------------------------------------------------------------
# The one operator that torch.export sees of a collection.

_SCHEMA = "(Tensor?[] ids, SymInt? samples, SymInt[] dims) -> Tensor[]"


@torch.library.custom_op("distcache::lookup", mutates_args=(), schema=_SCHEMA)
def _lookup(ids: Any, samples: Any, dims: Any) -> Any:
    raise PlanError(
        "an exported program has no tables, so this collection looks nothing up: put one that has "
        "in its place, program = torch.export.unflatten(exported); program.ebc = "
        "EmbeddingBagCollection(...) with the weights of a state_dict()"
    )


@_lookup.register_fake
def _(ids: Any, samples: Any, dims: Any) -> list[Tensor]:
    device = next(tensor.device for tensor in ids if tensor is not None)
    some = torch.library.get_ctx().new_dynamic_size
    sizes = [some() if samples is None else samples for _ in dims]
    return [torch.empty(n, dim, device=device) for n, dim in zip(sizes, dims, strict=True)]


def as_exported(
    features: KeyedJaggedTensor, dims: Sequence[int], pooled: bool = True
) -> list[Tensor]:
    """What torch.export sees of a lookup in tables of these widths: `[b, D]` for each feature, or
    the rows of its ids, `[n_f, D]`."""
    given = [features.values(), features.weights_or_none()]
    given += [features.lengths_or_none(), features.offsets_or_none()]
    return torch.ops.distcache.lookup(given, features.stride() if pooled else None, list(dims))


def sequences_as_exported(
    lookups: Lookups, features: KeyedJaggedTensor, need_indices: bool
) -> dict[str, JaggedTensor]:
    """What torch.export sees of a lookup of sequences. ConfigError where their ids are wanted."""
    if need_indices:
        raise ConfigError("need_indices=True cannot be exported: take the ids from the batch")
    rows = as_exported(features, lookups.dims, pooled=False)
    lengths = features.lengths().view(len(features.keys()), -1)
    places = [features.keys().index(key) for key in lookups.features]
    return {
        name: JaggedTensor(rows[at], lengths=lengths[place])
        for at, (name, place) in enumerate(zip(lookups.names, places, strict=True))
    }


def sequences_on_meta(
    lookups: Lookups, features: KeyedJaggedTensor, need_indices: bool
) -> dict[str, JaggedTensor]:
    """What a collection of sequences without rows gives out."""
    found = features.to_dict()
    rows: dict[str, JaggedTensor] = {}
    for name, key, dim in zip(lookups.names, lookups.features, lookups.dims, strict=True):
        ids = found[key]
        values = torch.empty(len(ids.values()), dim, device="meta")
        rows[name] = JaggedTensor(values, ids.values() if need_indices else None, ids.lengths())
    return rows


# -----------------------------------------------------------------------------
# What TorchRec does by the exact class of a collection.


def tell_torchrec(kind: type[nn.Module], made: bool = True) -> None:
    """Let TorchRec's tools that go by the class of a collection know this one, of bags or rows;
    its quantizers, whose import takes a second, once one is `made`."""
    tools = {_IR: _tell_ir} | ({_QUANTIZERS: _tell_quantizers} if made else {})
    for path, tell in tools.items():
        with contextlib.suppress(ImportError, OSError, AttributeError, KeyError):  # as in `theirs`
            tell(kind, importlib.import_module(path))


_QUANTIZERS, _IR = "torchrec.inference.modules", "torchrec.ir.serializer"
"""Where they are; TorchRec's wheels leave the second out."""


class _Quantization:
    """Stands where TorchRec's quantizers have torch's `quantization`: what they ask of collections
    of TorchRec's they ask of those that take their place too."""

    def __init__(self, torchs: Any) -> None:
        self._torchs, self.kinds = torchs, dict[type[nn.Module], type[nn.Module]]()

    def quantize_dynamic(self, *args: Any, **how: Any) -> nn.Module:
        """torch's, of whose arguments two are by class; by all ranks."""
        for given in (*args, *how.values()):
            for own, theirs in self.kinds.items() if isinstance(given, dict) else ():
                if theirs in given:
                    given.setdefault(own, given[theirs])
        return self._torchs.quantize_dynamic(*args, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchs, name)


def _tell_quantizers(kind: type[nn.Module], inference: Any) -> None:
    bags = issubclass(kind, EmbeddingBagCollectionInterface)
    theirs = inference.EmbeddingBagCollection if bags else inference.EmbeddingCollection
    if not isinstance(inference.quant, _Quantization):
        inference.quant = _Quantization(inference.quant)
    inference.quant.kinds[kind], by_name = theirs, inference.DEFAULT_QUANT_MAPPING
    by_name[torch.typename(kind)] = by_name[torch.typename(theirs)]


_KEY = "cached_as"
"""Of the metadata of a collection in a program: the class that it had, which TorchRec ignores."""


def _tell_ir(kind: type[nn.Module], ir: Any) -> None:
    """A program has a collection of this class under the name of TorchRec's: what comes back is one
    of this class, without an optimizer, or TorchRec's where nobody has called this."""
    theirs, known = ir.EBCJsonSerializer, ir.JsonSerializer.module_to_serializer_cls
    name, stock = ir.qualname(kind), ir.qualname(theirs._module_cls)
    if name in known or not issubclass(kind, EmbeddingBagCollectionInterface):
        return
    before, around = known[stock], known[ir.qualname(ir.FPEBCJsonSerializer._module_cls)]

    class Serializer(before):  # type: ignore[misc, valid-type]
        _module_cls = EmbeddingBagCollectionInterface

        @classmethod
        def swap_meta_forward(cls, module: Any) -> None:
            """After `ir_metadata` was written under this class' name: write it under theirs."""
            if ir.qualname(module) == name:
                told = cls.serialize_to_dict(module) | {_KEY: name}
                data = json.dumps({"typename": stock, "metadata_dict": told}).encode()
                module.ir_metadata = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            super().swap_meta_forward(module)

        @classmethod
        def deserialize_from_dict(
            cls, metadata_dict: Any, device: Any = None, unflatten_ep: Any = None
        ) -> Any:
            if metadata_dict.get(_KEY) != name:
                return super().deserialize_from_dict(metadata_dict, device, unflatten_ep)
            where = ir.get_deserialized_device(metadata_dict.get("device"), device)
            told = metadata_dict | {_KEY: "", "device": None}
            like = super().deserialize_from_dict(told, torch.device("meta"), unflatten_ep)
            return kind(like.embedding_bag_configs(), like.is_weighted(), where)

    class Around(around):  # type: ignore[misc, valid-type]
        @classmethod
        def deserialize_from_dict(
            cls, metadata_dict: Any, device: Any = None, unflatten_ep: Any = None
        ) -> Any:
            own = unflatten_ep._embedding_bag_collection
            if isinstance(own, kind):  # theirs wants its own class
                args = own.embedding_bag_configs(), own.is_weighted(), torch.device("meta")
                unflatten_ep._embedding_bag_collection = theirs._module_cls(*args)
            made = super().deserialize_from_dict(metadata_dict, device, unflatten_ep)
            made._embedding_bag_collection = own
            return made

    known[name] = known[stock] = Serializer
    known[ir.qualname(around._module_cls)] = Around


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

    _tables_key, _config = "embedding_bags", EmbeddingBagConfig

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
        self._embedding_bag_configs: list[EmbeddingBagConfig] = self._recipe.configs
        tell_torchrec(type(self))

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

    # As TorchRec's own has them, for what looks inside.
    _embedding_names = embedding_names

    @property
    def _lengths_per_embedding(self) -> list[int]:
        return list(self.reader.lookups.dims)

    @torch.compiler.disable
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings `[b, sum of widths]`; called by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        if is_traced(features):
            return as_node(self, features)
        if torch.compiler.is_exporting():
            pooled = torch.cat(as_exported(features, self._lengths_per_embedding), dim=1)
        elif self.device.type == "meta":
            size = features.stride(), sum(self._lengths_per_embedding)
            pooled = torch.empty(size, device="meta")
        else:
            pooled = self._pool(features, self._is_weighted)
        return KeyedTensor(self.embedding_names, self._lengths_per_embedding, pooled)


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

    _tables_key, _config, _pooled = "embeddings", EmbeddingConfig, False

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
        self._embedding_configs: list[EmbeddingConfig] = self._recipe.configs
        tell_torchrec(type(self))

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
        widths = sorted({config.embedding_dim for config in self._recipe.configs})
        if len(widths) > 1:
            raise ConfigError(f"embedding_dim(): the tables have several widths, {widths}")
        return widths[0] if widths else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, by table: `feature`, or `feature@table` for a shared feature."""
        pairs = list(zip(self.reader.lookups.names, self.reader.lookups.tables, strict=True))
        places = range(len(self._recipe.configs))
        return [[name for name, table in pairs if table == at] for at in places]

    @torch.compiler.disable
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The rows of every feature's ids, `values` `[n, D]` with the ids' lengths; by all ranks.

        Raises PlanError for a batch that is not the one that `lookahead` gave out next, DataError
        for ids or keys that do not fit, StepTooLargeError when the cache does not hold the step.
        """
        if is_traced(features):
            return as_node(self, features)
        if torch.compiler.is_exporting():
            return sequences_as_exported(self.reader.lookups, features, self._need_indices)
        if self.device.type == "meta":
            return sequences_on_meta(self.reader.lookups, features, self._need_indices)
        with self._member.forward(self._trains and not self._only_reads):
            step, micro = self._open(features)
            rows = step.rows(micro, reads_alone=self._only_reads)
        ids, device = step.reads[micro].ids, self._recipe.device
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


tell_torchrec(CachedEmbeddingBagCollection, made=False)  # for programs that are loaded
