"""A collection in graphs that others make of a model: one node for torch.fx, one operator for
torch.export; and what TorchRec's IR and its quantizers make of it.

No graph has tables in it, nor memory that others share.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from distcache.embedding.ids import Lookups
from distcache.embedding.theirs import (
    EmbeddingBagCollectionInterface,
    JaggedTensor,
    KeyedJaggedTensor,
)
from distcache.errors import ConfigError, PlanError

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
    sizes = [_some() if samples is None else samples for _ in dims]
    return [torch.empty(n, dim, device=device) for n, dim in zip(sizes, dims, strict=True)]


def _some() -> Any:
    return torch.library.get_ctx().new_dynamic_size()


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


def is_traced(features: Any) -> bool:
    """Whether torch.fx is tracing the model."""
    return isinstance(features, torch.fx.Proxy)


def as_node(collection: nn.Module, features: Any, *others: Any) -> Any:
    """The call of a collection in a graph that torch.fx traces: one node, whatever is inside."""
    name = features.tracer.path_of_module(collection)
    return features.tracer.create_proxy("call_module", name, (features, *others), {})


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
