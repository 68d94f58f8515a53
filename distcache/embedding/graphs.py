"""A collection in graphs that others make of a model: one node for torch.fx, one operator for
torch.export, and what TorchRec's IR serializer makes of it.

No graph has tables in it, nor memory that others share.
"""

from __future__ import annotations

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


def let_ir_take(kind: type[nn.Module]) -> None:
    """Let TorchRec's IR serializer, where it is installed (TorchRec's wheels leave it out), take
    collections of this class for its own: what it reads back is TorchRec's."""
    try:
        ir = importlib.import_module("torchrec.ir.serializer")
    except ImportError:
        return
    theirs, known = ir.EBCJsonSerializer, ir.JsonSerializer.module_to_serializer_cls
    name = ir.qualname(kind)
    if name in known:
        return

    class Serializer(theirs):  # type: ignore[misc, valid-type]
        _module_cls = EmbeddingBagCollectionInterface

        @classmethod
        def swap_meta_forward(cls, module: Any) -> None:
            """After `ir_metadata` was written under this class' name: write it under theirs."""
            said = {"typename": ir.qualname(theirs._module_cls)}
            said["metadata_dict"] = cls.serialize_to_dict(module)
            data = bytearray(json.dumps(said).encode())
            module.ir_metadata = torch.frombuffer(data, dtype=torch.uint8)
            super().swap_meta_forward(module)

    known[name] = Serializer
