"""Conversion of a model with cached tables to stock modules of TorchRec and torch.nn."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcache.comm.link import run_on_all_ranks
from distcache.comm.world import World
from distcache.embedding.collection import CachedCollection
from distcache.embedding.jagged import CachedEmbeddingBagCollection, CachedEmbeddingCollection
from distcache.embedding.plain import CachedEmbedding, CachedEmbeddingBag, CachedModule
from distcache.embedding.settings import concrete_device
from distcache.embedding.step import CollectionTables
from distcache.errors import ConfigError, MemoryTooSmallError
from distcache.layout import HALVES
from distcache.store.memory import describe_bytes, require_memory

log = logging.getLogger(__name__)

_META = torch.device("meta")
"""Device of stock modules before they get their tables, so that nothing is allocated or drawn."""

_REMEDY = (
    "each rank gets whole tables of its own: convert the model in a single process, where "
    "distcache.load reads a checkpoint of any number of ranks, or use a host with more memory"
)


def to_torchrec(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return a copy of `model` in which stock modules with whole tables replace cached modules.

    `CachedEmbeddingBagCollection` and `CachedEmbeddingCollection` become TorchRec's
    `EmbeddingBagCollection` and `EmbeddingCollection`. `CachedEmbeddingBag` and `CachedEmbedding`
    become `nn.EmbeddingBag` and `nn.Embedding`. The copy can be exported (`torch.export`),
    serialized, quantized and pickled. Its `state_dict` has the keys and values of the model's. A
    module that occurs several times is converted once, and deep copies of one collection share
    their tables. Tables that are frozen require no gradient. Hooks of cached modules are not
    copied. `model` does not change and may go on training.

    Predictions have the same bits on the CPU, except where stock modules round otherwise: pooled
    tables in half precision, unless `dtype` is torch.float32, and `nn.EmbeddingBag` with both
    `padding_idx` and `per_sample_weights`. On a GPU the bits have not been compared yet.

    Args:
        model: Any module, also a cached module itself, but without DistributedDataParallel.
        device: Device of the copy. By default the tables lie on the device where their embeddings
            are computed, and all other parameters stay on theirs.
        dtype: Tables of collections keep their dtype by default; torch.float32 converts tables in
            half precision, which takes twice the memory and gives the model's own predictions.

    Called by all ranks, like `state_dict()`; each rank gets whole tables. Raises
    MemoryTooSmallError on all ranks before anything is allocated if a host or device cannot hold
    them, ConfigError for a model that cannot be copied and for tables that the stock modules do
    not support, and PeerError on rank 0 if no other rank calls it.
    """
    if dtype not in (None, torch.float32):
        raise ConfigError(f"to_torchrec: dtype={dtype!r}: give torch.float32, or None")
    target = None if device is None else concrete_device(device)
    if target == _META:
        raise ConfigError("to_torchrec: device='meta' holds no tables: give 'cpu' or 'cuda'")
    _require_copyable(model)
    cached_modules = [module for module in model.modules() if isinstance(module, CachedCollection)]
    stock_modules = [_make_stock(module, dtype) for module in cached_modules]
    sources: dict[int, TableSource] = {}
    for module in cached_modules:
        # Deep copies of a collection read the same tables.
        if module._config.lookups.specs and id(module._lazy_tables) not in sources:
            sources[id(module._lazy_tables)] = TableSource.of(module, target, dtype)
    with torch.inference_mode(False), torch.no_grad():
        converted = _copy_model(model, cached_modules, stock_modules, list(sources.values()))
        for module, stock in zip(cached_modules, stock_modules, strict=True):
            source = sources.get(id(module._lazy_tables))
            _attach(stock, target or module.device, source.weights if source else [])
            stock.train(module.training)
        return converted if target is None else converted.to(target)


# -----------------------------------------------------------------------------
# Whole tables: memory, allocation and values.


@dataclass
class TableSource:
    """The tables of one collection and their whole copies `weights`, empty until `allocate`."""

    tables: CollectionTables
    device: torch.device
    dtypes: list[torch.dtype]
    """Dtype of each table's copy."""
    frozen: frozenset[str]
    """Names of the tables that require no gradient."""
    weights: list[nn.Parameter] = field(default_factory=list)

    @classmethod
    def of(
        cls, module: CachedCollection, target: torch.device | None, dtype: torch.dtype | None
    ) -> TableSource:
        """Return the source of a module's tables, which are made now if this is their first use."""
        stored = [
            spec.dtype or module._config.settings.dtype for spec in module._config.lookups.specs
        ]
        # A module of torch.nn computes in the dtype of its table, so the table keeps it.
        is_converted = dtype is not None and not isinstance(module, CachedModule)
        dtypes = [dtype] * len(stored) if dtype is not None and is_converted else stored
        tables = module.tables
        tables.barrier("distcache.to_torchrec()")
        return cls(tables, target or module.device, dtypes, frozenset(module.frozen))

    @property
    def nbytes(self) -> int:
        """Bytes of the copies on one rank."""
        pairs = zip(self.tables.tables, self.dtypes, strict=True)
        return sum(spec.rows * spec.dim * dtype.itemsize for spec, dtype in pairs)

    def allocate(self) -> None:
        """Make the parameters without values. Raises MemoryTooSmallError."""
        for spec, dtype in zip(self.tables.tables, self.dtypes, strict=True):
            try:
                weight = torch.empty(spec.rows, spec.dim, dtype=dtype, device=self.device)
            except RuntimeError as error:  # torch.OutOfMemoryError, or the CPU allocator's refusal
                raise MemoryTooSmallError(
                    f"to_torchrec: {self.device} did not give memory for table {spec.name!r} of "
                    f"{describe_bytes(self.nbytes)} of tables: {str(error).splitlines()[0]}; "
                    f"{_remedy_of(self.device)}"
                ) from error
            self.weights.append(nn.Parameter(weight, requires_grad=spec.name not in self.frozen))

    def fill(self) -> None:
        """Copy the tables as the last step left them. Called by all ranks."""
        self.tables.flush()
        views = self.tables.full_tables.views()
        for weight, (_, (values, _)) in zip(self.weights, views, strict=True):
            weight.copy_(values)


def _require_memory(sources: Sequence[TableSource]) -> None:
    """Raise MemoryTooSmallError on all ranks if a host or a device cannot hold all copies."""
    nbytes: dict[torch.device, int] = {}
    node_copy = 0
    for source in sources:
        nbytes[source.device] = nbytes.get(source.device, 0) + source.nbytes
        if source.tables.world.nodes.count > 1:
            # The ranks of a node first gather one table at a time in memory that they share.
            itemsize = max(dtype.itemsize for dtype in source.dtypes)
            largest = max(spec.rows * spec.dim for spec in source.tables.tables)
            node_copy = max(node_copy, largest * itemsize)

    def check(world: World) -> None:
        for device, count in nbytes.items():
            purpose = f"whole tables of {describe_bytes(count)} in distcache.to_torchrec(model)"
            if device.type != "cpu":
                _require_device_memory(device, count, purpose)
            elif world.local_rank == 0:
                purpose += f", on each of {world.local_size} ranks" if world.local_size > 1 else ""
                require_memory(count * world.local_size + node_copy, purpose, _remedy_of(device))

    for world in {id(source.tables.world): source.tables.world for source in sources}.values():
        run_on_all_ranks(world, lambda world=world: check(world))


def _require_device_memory(device: torch.device, needed: int, purpose: str) -> None:
    """Raise MemoryTooSmallError if a CUDA device does not have `needed` bytes left."""
    # Blocks that the caching allocator holds and does not use are given to new tensors.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = torch.cuda.mem_get_info(device)[0] + unused
    if needed > available:
        raise MemoryTooSmallError(
            f"{device} is too small for {purpose}: needed {describe_bytes(needed)}, available "
            f"{describe_bytes(available)}; {_remedy_of(device)}"
        )


def _remedy_of(device: torch.device) -> str:
    """Return the end of an error message about memory of a device."""
    return _REMEDY if device.type == "cpu" else f"give device='cpu'; {_REMEDY}"


# -----------------------------------------------------------------------------
# The copy of the model.


def _require_copyable(model: nn.Module) -> None:
    """Raise ConfigError for something else than a module, and for one with a DDP wrapper."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"to_torchrec: give an nn.Module, not a {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            path = f"model.{name}" if name else "model"
            raise ConfigError(
                f"to_torchrec: {path} is a DistributedDataParallel, which would take whole tables "
                f"for parameters to broadcast and reduce: convert {path}.module"
            )


def _copy_model(
    model: nn.Module,
    cached_modules: Sequence[nn.Module],
    stock_modules: Sequence[nn.Module],
    sources: Sequence[TableSource],
) -> nn.Module:
    """Return a deep copy with stock modules in place of cached ones, and fill the sources' copies.

    Called by all ranks. Raises ConfigError if the rest of the model cannot be copied.
    """
    # deepcopy takes what its memo has under an object's id for the copy of that object, wherever
    # the model refers to it.
    pairs = zip(cached_modules, stock_modules, strict=True)
    memo = {id(module): stock for module, stock in pairs}
    copies: list[nn.Module] = []

    def build() -> None:
        try:
            copies.append(copy.deepcopy(model, memo))
        except Exception as error:  # of any module in the model
            raise ConfigError(
                f"to_torchrec: copy.deepcopy cannot copy the rest of the model "
                f"({type(error).__name__}: {error}): convert the part of it that predicts, "
                "distcache.to_torchrec(model.part), or remove the attribute that cannot be copied"
            ) from error
        for source in sources:
            source.allocate()

    if not sources:
        build()
        return copies[0]
    _require_memory(sources)
    run_on_all_ranks(sources[0].tables.world, build)
    for source in sources:
        source.fill()
    return copies[0]


# -----------------------------------------------------------------------------
# Stock modules, made on 'meta'.


def _make_stock(module: CachedCollection, dtype: torch.dtype | None) -> nn.Module:
    """Return the stock module, on 'meta', that takes the place of a cached module."""
    if isinstance(module, CachedEmbeddingBag):
        return nn.EmbeddingBag(
            module.num_embeddings,
            module.embedding_dim,
            norm_type=module.norm_type,
            mode=module.mode,
            sparse=module.sparse,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
            device=_META,
        )
    if isinstance(module, CachedEmbedding):
        return nn.Embedding(
            module.num_embeddings,
            module.embedding_dim,
            padding_idx=module.padding_idx,
            norm_type=module.norm_type,
            sparse=module.sparse,
            device=_META,
        )
    return _make_stock_collection(module, dtype)


def _make_stock_collection(module: CachedCollection, dtype: torch.dtype | None) -> nn.Module:
    """Return TorchRec's collection for a cached one; ConfigError for tables that it cannot have."""
    # TorchRec is optional: a model of CachedEmbedding alone is converted without it.
    from torchrec.modules.embedding_configs import DataType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    _check_collection(module, dtype)
    configs = [copy.copy(config) for config in module._config.configs]
    init_fns = [config.init_fn for config in configs]
    for config in configs:
        config.feature_names = list(config.feature_names)
        config.init_fn = None  # a function of the user may need tensors with values
        if dtype is not None:
            config.data_type = DataType.FP32
    try:
        if isinstance(module, CachedEmbeddingCollection):
            stock = EmbeddingCollection(
                configs,
                _META,
                module.need_indices(),
                module.use_gather_select(),
                module.use_gather_select_per_sharding(),
            )
        else:
            stock = EmbeddingBagCollection(configs, module.is_weighted(), _META)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"to_torchrec: TorchRec does not accept the tables of this {type(module).__name__}: "
            f"{error.args[0]}. Its names are keys of nn.ModuleDict, and the tables of an "
            "EmbeddingCollection have one width: use other names, or a collection for each width"
        ) from error
    for config, init_fn in zip(configs, init_fns, strict=True):
        config.init_fn = init_fn
    return stock


def _check_collection(module: CachedCollection, dtype: torch.dtype | None) -> None:
    """Raise ConfigError for settings under which TorchRec's collection would not predict alike."""
    name = type(module).__name__
    settings = module._config.settings
    if dtype is None and settings.dtype != torch.float32:
        raise ConfigError(
            f"to_torchrec: this {name} has dtype={settings.dtype}, and TorchRec's collections give "
            "float32: give dtype=torch.float32 to round the tables"
        )
    is_weighted = isinstance(module, CachedEmbeddingBagCollection) and module.is_weighted()
    halves = [spec.name for spec in module._config.lookups.specs if spec.dtype in HALVES]
    if dtype is None and is_weighted and halves:
        raise ConfigError(
            f"to_torchrec: the tables {', '.join(halves)} are in half precision, and TorchRec's "
            "collection multiplies rows of float32 alone by weights: give dtype=torch.float32"
        )
    if settings.on_bad_id == "hash":
        log.warning(
            "to_torchrec: this %s takes ids modulo the rows of a table (on_bad_id='hash'), and "
            "TorchRec's collection does not: take them modulo num_embeddings before",
            name,
        )


def _attach(stock: nn.Module, device: torch.device, weights: Iterable[nn.Parameter]) -> None:
    """Give a stock module its tables, which lie on `device`, in place of those on 'meta'."""
    if isinstance(stock, nn.EmbeddingBag | nn.Embedding):
        (stock.weight,) = weights
        return
    tables = stock.embedding_bags if hasattr(stock, "embedding_bags") else stock.embeddings
    for table, weight in zip(tables.values(), weights, strict=True):
        table.weight = weight
    stock._device = device
