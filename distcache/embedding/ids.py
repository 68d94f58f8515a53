"""Ids as they come, in `KeyedJaggedTensor`s: read into plain CPU tensors, and recognised again.

Only the plain tensors of a `KeyedJaggedTensor` are used, for some of its helpers call fbgemm
kernels that do not exist on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.data.batch import JaggedIds
from distcache.embedding.tables import Lookups
from distcache.errors import ConfigError, DataError

_DEPTH = 3
"""How deep a batch is searched for its `KeyedJaggedTensor`."""


class _Keys(list):
    """The keys of a `KeyedJaggedTensor` that was read ahead, with the token of its plan.

    `to` and `pin_memory` hand the list of keys on, so the copies carry the token too.
    """

    token: object = None

    def __reduce__(self) -> tuple:
        return list, (list(self),)


@dataclass(frozen=True)
class ReadIds:
    """One `KeyedJaggedTensor` (`source`) as it was read: `ids` of every lookup, on the CPU.

    `versions`: its tensors and how often each had been changed in place by then.
    """

    source: KeyedJaggedTensor
    ids: JaggedIds
    versions: tuple[tuple[Tensor, int], ...]
    token: object

    def mark(self) -> None:
        """Let `source`, and the copies that `to` makes of it, be recognised."""
        keys = _Keys(self.source.keys())
        keys.token = self.token
        self.source._keys = keys

    def is_of(self, features: KeyedJaggedTensor) -> bool:
        """Whether `features` is `source` or a copy of it, whatever has been done to it since."""
        if features is self.source:
            return True
        return getattr(features.keys(), "token", None) is self.token

    def is_unchanged(self, features: KeyedJaggedTensor, read: Callable[..., ReadIds]) -> bool:
        """Whether `features`, which `is_of` this, still has the ids and weights that were read.

        Copies on another device are compared by size alone.
        """
        if not self._is_untouched():
            return False
        if features is self.source:
            return True
        if features.values().device.type != "cpu":
            return len(features.values()) == len(self.source.values())
        return self.has_ids_of(features, read)

    def has_ids_of(self, features: KeyedJaggedTensor, read: Callable[..., ReadIds]) -> bool:
        """Whether `features`, wherever it comes from, has the ids and weights that were read."""
        return self._is_untouched() and same_ids(self.ids, read(features).ids)

    def _is_untouched(self) -> bool:
        return all(_version(tensor) == version for tensor, version in self.versions)


def same_ids(one: JaggedIds, other: JaggedIds) -> bool:
    """Whether two batches name the same ids with the same weights."""
    if len(one.values) != len(other.values) or (one.weights is None) != (other.weights is None):
        return False
    equal = torch.equal(one.offsets, other.offsets) and torch.equal(one.values, other.values)
    if equal and one.weights is not None and other.weights is not None:
        return torch.equal(one.weights, other.weights)
    return equal


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class IdReader:
    """Reads the ids that `lookups` need from `KeyedJaggedTensor`s, with weights if `weighted`."""

    def __init__(self, lookups: Lookups, table_names: tuple[str, ...], weighted: bool) -> None:
        """`table_names`: the table of each lookup, for messages."""
        self.lookups, self._table_names, self._weighted = lookups, table_names, weighted

    def read(self, features: KeyedJaggedTensor) -> ReadIds:
        """The ids of every lookup. Raises DataError that names what is missing."""
        keys, values = list(features.keys()), features.values()
        raw = _weights_of(features) if self._weighted else None
        lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
        given = lengths if lengths is not None else offsets
        tensors = [tensor for tensor in (values, given, raw) if tensor is not None]
        versions = tuple((tensor, _version(tensor)) for tensor in tensors)
        if lengths is None:
            lengths = torch.zeros(0, dtype=torch.int64) if offsets is None else offsets.diff()
        counts = lengths.detach().cpu().to(torch.int64).reshape(-1)
        _check_strides(features, keys, counts)
        places = self._places(keys)
        ids, weights = values.detach().cpu(), None if raw is None else raw.detach().cpu()
        if places == list(range(len(keys))):
            joined = JaggedIds(self.lookups.features, ids, _offsets(counts), weights)
        else:
            joined = self._select(places, len(keys), counts, ids, weights)
        return ReadIds(features, joined, versions, object())

    def _places(self, keys: list[str]) -> list[int]:
        """Where each lookup's feature is among `keys`."""
        at = {key: place for place, key in enumerate(keys)}
        for feature, table in zip(self.lookups.features, self._table_names, strict=True):
            if feature not in at:
                raise DataError(
                    f"feature {feature!r} of table {table!r} is not among the keys of the "
                    f"KeyedJaggedTensor: {keys}"
                )
        return [at[feature] for feature in self.lookups.features]

    def _select(
        self, places: list[int], keys: int, counts: Tensor, ids: Tensor, weights: Tensor | None
    ) -> JaggedIds:
        """The ids of the keys at `places`, in that order; a key may be named several times."""
        by_key = counts.view(keys, -1)
        stops = by_key.sum(1).cumsum(0).tolist()
        spans = [slice(stops[at - 1] if at else 0, stops[at]) for at in places]
        chosen = by_key[places].reshape(-1)
        return JaggedIds(
            self.lookups.features,
            torch.cat([ids[span] for span in spans]),
            _offsets(chosen),
            None if weights is None else torch.cat([weights[span] for span in spans]),
        )


def _weights_of(features: KeyedJaggedTensor) -> Tensor:
    weights = features.weights_or_none()
    if weights is None:
        raise DataError(
            "the collection was made with is_weighted=True, but the KeyedJaggedTensor has no "
            "weights"
        )
    if weights.requires_grad:
        raise DataError(
            "the weights of the KeyedJaggedTensor require a gradient, which cached tables do not "
            "give: detach them"
        )
    return weights


def _check_strides(features: KeyedJaggedTensor, keys: list[str], counts: Tensor) -> None:
    """Every key has the same number of samples."""
    varied = features.variable_stride_per_key() or features.inverse_indices_or_none() is not None
    if varied or (len(counts) % len(keys) if keys else len(counts)):
        raise DataError(
            f"a KeyedJaggedTensor with {len(keys)} keys and {len(counts)} lengths: every key must "
            "have the same number of samples (no variable stride, no inverse_indices)"
        )


def _offsets(lengths: Tensor) -> Tensor:
    """`[m]` lengths to `[m + 1]` offsets, int64."""
    out = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


def find_ids(batch: Any, wanted: tuple[str, ...]) -> KeyedJaggedTensor:
    """The `KeyedJaggedTensor` of a batch that has the features `wanted`.

    Looks at the batch itself, its attribute `sparse_features`, and in tuples, lists, mappings and
    dataclasses. Raises ConfigError when there is none or more than one.
    """
    attribute = getattr(batch, "sparse_features", None)
    if isinstance(attribute, KeyedJaggedTensor):
        return attribute
    found = list({id(one): one for one in _search(batch, _DEPTH)}.values())
    if len(found) > 1:
        found = [one for one in found if set(wanted) <= set(one.keys())] or found
    if len(found) == 1:
        return found[0]
    what = "no KeyedJaggedTensor" if not found else f"{len(found)} KeyedJaggedTensors that fit"
    raise ConfigError(
        f"a batch of type {type(batch).__name__} has {what}: tell lookahead where its ids are, "
        "lookahead(batches, ebc, ids=lambda batch: ...)"
    )


def _search(value: Any, depth: int) -> Iterator[KeyedJaggedTensor]:
    if isinstance(value, KeyedJaggedTensor):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    if depth:
        for part in parts:
            yield from _search(part, depth - 1)
