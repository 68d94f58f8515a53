"""Tables and ids as TorchRec gives them: read into plain tensors, and recognised again."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.data.batch import Batch, JaggedIds
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec

# -----------------------------------------------------------------------------
# From TorchRec's table configs to tables, feature names and initial weights.

_POOLING = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


@dataclass(frozen=True)
class Lookups:
    """What a collection looks up, one entry for each (table, feature), table by table.

    `features`: the key in a `KeyedJaggedTensor`; `names`: the key in the output (`feature`, or
    `feature@table` where several tables read it); `tables`: index of the table; `dims`: its width.
    `specs`: the tables, each with features of its own, named by their place among the lookups, and
    `named`: with the keys in their place. Tables that are not pooled have the pooling "sum", of
    which nothing is made.
    """

    features: tuple[str, ...]
    names: tuple[str, ...]
    tables: tuple[int, ...]
    dims: tuple[int, ...]
    specs: tuple[TableSpec, ...]
    named: tuple[TableSpec, ...]

    @property
    def table_names(self) -> tuple[str, ...]:
        """The name of each lookup's table."""
        return tuple(self.specs[table].name for table in self.tables)


def lookups_of(configs: Sequence[Any]) -> Lookups:
    """The lookups of `configs` in TorchRec's order."""
    pairs = [(index, name) for index, config in enumerate(configs) for name in config.feature_names]
    names = [name for by_table in get_embedding_names_by_table(list(configs)) for name in by_table]
    named = tuple(
        TableSpec(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            tuple(config.feature_names),
            _POOLING[config.pooling] if isinstance(config, EmbeddingBagConfig) else "sum",
        )
        for config in configs
    )
    places = iter(range(len(pairs)))
    return Lookups(
        features=tuple(feature for _, feature in pairs),
        names=tuple(names),
        tables=tuple(table for table, _ in pairs),
        dims=tuple(configs[table].embedding_dim for table, _ in pairs),
        specs=tuple(
            replace(spec, features=tuple(str(next(places)) for _ in spec.features))
            for spec in named
        ),
        named=named,
    )


def checked_configs(configs: Sequence[Any], kind: type[BaseEmbeddingConfig]) -> list[Any]:
    """The configs, each with its features (a table without any reads the one of its own name).

    Raises ConfigError for one that is not of `kind`, and for what a row cache does not have.
    """
    if isinstance(configs, BaseEmbeddingConfig) or not isinstance(configs, Sequence):
        raise ConfigError(f"tables: give a list of {kind.__name__}, not {type(configs).__name__}")
    seen: set[str] = set()
    for config in configs:
        if not isinstance(config, kind):
            raise ConfigError(f"tables: {config!r} is no torchrec.{kind.__name__}")
        where = f"table {config.name!r}"
        if config.name in seen:
            raise ConfigError(f"two tables are named {config.name!r}")
        seen.add(config.name)
        if isinstance(config, EmbeddingBagConfig) and config.pooling not in _POOLING:
            raise ConfigError(f"{where}: pooling {config.pooling} is not SUM or MEAN")
        if config.data_type is not DataType.FP32:
            raise ConfigError(
                f"{where}: data_type {config.data_type} is not FP32; rows are float32, or float64 "
                "with dtype=torch.float64"
            )
        if config.use_virtual_table:
            raise ConfigError(f"{where}: use_virtual_table is not supported: give num_embeddings")
        if not config.feature_names:
            config.feature_names = [config.name]
    return list(configs)


def initial_change(
    config: BaseEmbeddingConfig, table: int, seed: int
) -> Callable[[Tensor], None] | None:
    """What changes initial rows `[rows, D]`, uniform in +-sqrt(1 / rows), to those that `config`
    asks for; None where it asks for these.

    A range (`weight_init_min`, `weight_init_max`) maps them; an `init_fn` of the user's fills
    them anew, with torch's generator seeded by (seed, table) and put back afterwards.
    """
    given, bound = config.init_fn, math.sqrt(1.0 / config.num_embeddings)
    low, high = config.get_weight_init_min(), config.get_weight_init_max()

    def fill(weight: Tensor) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed}/{table}".encode()))
            given(weight)

    def map_range(weight: Tensor) -> None:
        weight.div_(2 * bound).add_(0.5).mul_(high - low).add_(low).clamp_(low, high)

    by_itself = isinstance(given, functools.partial) and given.func is torch.nn.init.uniform_
    if not (by_itself and not given.args and set(given.keywords) == {"a", "b"}):
        return fill
    return None if (low, high) == (-bound, bound) else map_range


# -----------------------------------------------------------------------------
# Ids as they come, in `KeyedJaggedTensor`s: read into plain CPU tensors, and recognised again.
#
# Only the plain tensors of a `KeyedJaggedTensor` are used, for some of its helpers call fbgemm
# kernels that do not exist on every device.

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
        if not self._is_untouched():
            return False
        one, other = self.ids, read(features).ids
        if (one.weights is None) != (other.weights is None):
            return False
        pairs = [(one.offsets, other.offsets), (one.values, other.values)]
        if one.weights is not None and other.weights is not None:
            pairs.append((one.weights, other.weights))
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def _is_untouched(self) -> bool:
        return all(_version(tensor) == version for tensor, version in self.versions)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class IdReader:
    """Reads the ids that `lookups` need from `KeyedJaggedTensor`s, with weights if `weighted`."""

    def __init__(self, lookups: Lookups, weighted: bool) -> None:
        self.lookups, self._weighted = lookups, weighted

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
        for feature, table in zip(self.lookups.features, self.lookups.table_names, strict=True):
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
        sizes = by_key.sum(1).tolist()

        def chosen(values: Tensor) -> Tensor:
            of_keys = values.split(sizes)
            return torch.cat([of_keys[at] for at in places])

        offsets = _offsets(by_key[places].reshape(-1))
        own = None if weights is None else chosen(weights)
        return JaggedIds(self.lookups.features, chosen(ids), offsets, own)


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


def bytes_of(batch: Any, depth: int = _DEPTH) -> int:
    """About how many bytes the tensors and arrays of a batch take, wherever they lie."""
    if isinstance(batch, KeyedJaggedTensor):
        parts = (batch.values(), batch.weights_or_none(), batch.lengths_or_none())
        return sum(part.nbytes for part in parts if part is not None)
    size = getattr(batch, "nbytes", None)
    if isinstance(size, int):
        return size
    parts = list(_parts(batch))
    if not parts and hasattr(batch, "__dict__"):
        parts = list(vars(batch).values())
    return sum(bytes_of(part, depth - 1) for part in parts) if depth else 0


def _search(value: Any, depth: int) -> Iterator[KeyedJaggedTensor]:
    if isinstance(value, KeyedJaggedTensor):
        yield value
    elif depth:
        for part in _parts(value):
            yield from _search(part, depth - 1)


def _parts(value: Any) -> Sequence[Any]:
    """What a mapping, tuple, list or dataclass holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


# -----------------------------------------------------------------------------
# Several micro-batches under one plan: their ids joined for planning, and parted again.


def join_ids(parts: Sequence[JaggedIds]) -> JaggedIds:
    """The bags of all parts, feature-major: each feature's samples of part 0, then part 1, ..."""
    if len(parts) == 1:
        return parts[0]
    features = parts[0].features
    lengths = [part.offsets.diff().view(len(features), -1) for part in parts]
    counts = [own.sum(1).tolist() for own in lengths]

    def joined(of_parts: Sequence[Tensor]) -> Tensor:
        split = [own.split(count) for own, count in zip(of_parts, counts, strict=True)]
        return torch.cat([own[at] for at in range(len(features)) for own in split])

    values = joined([part.values for part in parts])
    weights = [part.weights for part in parts if part.weights is not None]
    offsets = _offsets(torch.cat(lengths, dim=1).reshape(-1))
    return JaggedIds(features, values, offsets, joined(weights) if weights else None)


def as_batch(reads: Sequence[ReadIds], index: int, kind: str = "train") -> Batch:
    """The ids of one plan's micro-batches as the planner takes them; `index` comes back with it."""
    ids: JaggedIds = join_ids([read.ids for read in reads])
    none = torch.empty(0)
    parts = tuple(read.ids.batch_size for read in reads)
    return Batch(none, ids, none, ids.batch_size, index, 0, 0, kind, parts=parts)
