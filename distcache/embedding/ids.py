"""Tables and ids as they are given: read into plain tensors, and recognised again."""

from __future__ import annotations

import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from distcache.data.batch import Batch, JaggedIds
from distcache.data.jagged import read_lengths
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec, lookup_names, whole_number

# TorchRec's names; where it is not installed, or does not load, ones of which nothing is an
# instance, for modules with the arguments of torch.nn's do without it.
try:
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig as BaseEmbeddingConfig
    from torchrec.modules.embedding_configs import EmbeddingBagConfig as EmbeddingBagConfig
    from torchrec.modules.embedding_configs import EmbeddingConfig as EmbeddingConfig
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface as EmbeddingBagCollectionInterface,
    )
    from torchrec.modules.embedding_modules import (
        EmbeddingCollectionInterface as EmbeddingCollectionInterface,
    )
    from torchrec.optim import RowWiseAdagrad as RowWiseAdagrad
    from torchrec.optim import optimizers as optimizers
    from torchrec.optim.keyed import KeyedOptimizer as KeyedOptimizer
    from torchrec.sparse.jagged_tensor import JaggedTensor as JaggedTensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
    from torchrec.sparse.jagged_tensor import KeyedTensor as KeyedTensor
except (ImportError, OSError, AttributeError):  # told to whoever asks for a collection
    if not TYPE_CHECKING:

        def _nothing(name: str) -> type:
            return type(name, (), {})

        BaseEmbeddingConfig = EmbeddingBagConfig = EmbeddingConfig = _nothing("Config")
        EmbeddingBagCollectionInterface = EmbeddingCollectionInterface = torch.nn.Module
        RowWiseAdagrad, KeyedOptimizer = _nothing("RowWiseAdagrad"), torch.optim.Optimizer
        optimizers = SimpleNamespace(**{n: _nothing(n) for n in ("SGD", "Adagrad", "Adam")})
        JaggedTensor = KeyedJaggedTensor = KeyedTensor = _nothing("KeyedJaggedTensor")

S = TypeVar("S")

# -----------------------------------------------------------------------------
# From table configs, TorchRec's or a module's, to tables, feature names and initial weights.


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


def lookups_of(configs: Sequence[Any]) -> Lookups:
    """The lookups of `configs` in TorchRec's order."""
    pairs = [(index, name) for index, config in enumerate(configs) for name in config.feature_names]
    named = tuple(map(TableSpec.of_config, configs))
    places = iter(range(len(pairs)))
    return Lookups(
        features=tuple(feature for _, feature in pairs),
        names=tuple(lookup_names(named)),
        tables=tuple(table for table, _ in pairs),
        dims=tuple(configs[table].embedding_dim for table, _ in pairs),
        specs=tuple(
            replace(spec, features=tuple(str(next(places)) for _ in spec.features))
            for spec in named
        ),
        named=named,
    )


def checked_configs(configs: Sequence[Any], kind: type) -> list[Any]:
    """The configs, each with its features (a table without any reads the one of its own name).

    Raises ConfigError for one that is not of `kind`, and for what a row cache does not have.
    """
    if isinstance(configs, BaseEmbeddingConfig) or not isinstance(configs, Sequence):
        raise ConfigError(f"tables: give a list of {kind.__name__}, not {type(configs).__name__}")
    seen: set[str] = set()
    for config in configs:
        if not isinstance(config, kind):
            raise ConfigError(f"tables: {config!r} is no torchrec.{kind.__name__}")
        if config.name in seen:
            raise ConfigError(f"two tables are named {config.name!r}")
        seen.add(config.name)
        if getattr(config, "use_virtual_table", False):
            raise ConfigError(
                f"table {config.name!r}: use_virtual_table is not supported: give num_embeddings"
            )
        for field in ("num_embeddings", "embedding_dim"):
            setattr(config, field, whole_number(getattr(config, field), field, config.name))
        if not config.feature_names:
            config.feature_names = [config.name]
    return list(configs)


def initial_change(
    config: BaseEmbeddingConfig, table: int, seed: int
) -> Callable[[Tensor], Any] | None:
    """What changes initial rows `[rows, D]`, uniform in +-sqrt(1 / rows), to those that `config`
    asks for; None where it asks for these.

    A range (`weight_init_min`, `weight_init_max`) maps them; an `init_fn` of the user's fills
    them anew, with torch's generator seeded by (seed, table) and put back afterwards.
    """
    given, bound = config.init_fn, math.sqrt(1.0 / config.num_embeddings)

    def map_range(weight: Tensor) -> None:
        weight.div_(2 * bound).add_(0.5).mul_(high - low).add_(low).clamp_(low, high)

    by_itself = isinstance(given, functools.partial) and given.func is nn.init.uniform_
    if not (by_itself and not given.args and set(given.keywords) == {"a", "b"}):
        return functools.partial(fill, init_fn=given, seed=f"{seed}/{table}")
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    return None if (low, high) == (-bound, bound) else map_range


def fill(weight: Tensor, init_fn: Callable[[Tensor], Any], seed: str) -> Tensor:
    """Initial rows `weight` `[rows, D]`, filled as a config's `init_fn` draws them by this seed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(seed.encode()))
        init_fn(weight)
    return weight


@dataclass
class PlainTable:
    """The table of a module; `given`: its first weights, where they are not drawn, in `dtype`, as
    torch.nn does. `padding_idx`: the row that is zero then. ConfigError for arguments of a module
    that contradict each other."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: str
    padding_idx: int | None
    dtype: Any
    given: Tensor | None

    def __post_init__(self) -> None:
        for field in ("num_embeddings", "embedding_dim", "padding_idx"):
            value = getattr(self, field)
            if value is not None:
                setattr(self, field, whole_number(value, field, self.name))
        rows, pad, given = self.num_embeddings, self.padding_idx, self.given
        if pad is not None and not -rows <= pad < rows:
            raise ConfigError(f"padding_idx={pad} is not within num_embeddings={rows}")
        if given is not None and list(given.shape) != [rows, self.embedding_dim]:
            shape = [rows, self.embedding_dim]
            raise ConfigError(f"_weight of shape {list(given.shape)}, not {shape}")
        self.padding_idx = None if pad is None else pad % rows
        known = torch.get_default_dtype() if given is None else given.dtype
        self.dtype = known if self.dtype is None else self.dtype
        # As TorchRec names the stored rows; those of half precision are updated in float32.
        self.data_type = {torch.float16: "FP16", torch.bfloat16: "BF16"}.get(self.dtype, "FP32")
        self.feature_names = [self.name]

    def init_fn(self, weight: Tensor) -> None:
        """Fill the first weights."""
        if self.given is not None:
            weight.copy_(self.given)
            return
        nn.init.normal_(weight)
        if self.padding_idx is not None:
            weight[self.padding_idx].zero_()


# -----------------------------------------------------------------------------
# Ids as they come, in `KeyedJaggedTensor`s: read into plain CPU tensors, and recognised again.
#
# Only the plain tensors of a `KeyedJaggedTensor` are used, for some of its helpers call fbgemm
# kernels that do not exist on every device.

_DEPTH = 3
"""How deep a batch is searched for its `KeyedJaggedTensor`."""


class _Keys(list):
    """The keys of a `KeyedJaggedTensor` that was read, with a token by which it is recognised.

    `to` and `pin_memory` hand the list of keys on, so the copies carry the token too.
    """

    token: object = None

    def __reduce__(self) -> tuple:
        return list, (list(self),)


_marking = threading.Lock()


def _token_of(features: KeyedJaggedTensor) -> object:
    """The token of `features`, the same for every collection that reads it, on its own thread."""
    with _marking:
        keys = features.keys()
        if not isinstance(keys, _Keys):
            features._keys = keys = _Keys(keys)
            keys.token = object()
    return keys.token


@dataclass(frozen=True)
class ReadIds:
    """One `KeyedJaggedTensor` (`source`) as it was read: `ids` of every lookup, on the CPU.

    `taken`: where each of these ids was among its values, int64 `[n]`; None where they are these;
    `samples`: of each lookup, beyond which its bags are empty. `versions`: its tensors and how
    often each had been changed in place by then. Weights are read when the batch is looked up.
    """

    source: KeyedJaggedTensor
    ids: JaggedIds
    taken: Tensor | None
    samples: tuple[int, ...]
    versions: tuple[tuple[Tensor, int], ...]
    token: object

    def is_of(self, features: KeyedJaggedTensor) -> bool:
        """Whether `features` is `source` or a copy of it, whatever has been done to it since."""
        if features is self.source:
            return True
        return getattr(features.keys(), "token", None) is self.token

    def is_unchanged(self, features: KeyedJaggedTensor, read: Callable[..., ReadIds]) -> bool:
        """Whether `features`, which `is_of` this, still has the ids that were read.

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
        """Whether `features`, wherever it comes from, has the ids that were read."""
        if not self._is_untouched():
            return False
        one, other = self.ids, read(features).ids
        pairs = [(one.offsets, other.offsets), (one.values, other.values)]
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def _is_untouched(self) -> bool:
        return all(version_of(tensor) == version for tensor, version in self.versions)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place."""
    return 0 if tensor.is_inference() else tensor._version


class IdReader:
    """Reads the ids that `lookups` need from `KeyedJaggedTensor`s; `pooled`: whether bags come out,
    rather than the row of every id."""

    is_remapped = False
    """True if TorchRec's managed collisions map the ids before they come here."""

    def __init__(self, lookups: Lookups, pooled: bool) -> None:
        self.lookups, self._pooled = lookups, pooled

    def find(self, batch: Any) -> KeyedJaggedTensor:
        """The `KeyedJaggedTensor` of a batch that has the features of the lookups.

        Looks at the batch itself, its attribute `sparse_features`, and in tuples, lists, mappings
        and dataclasses. Raises ConfigError when there is none or more than one.
        """
        attribute = getattr(batch, "sparse_features", None)
        if isinstance(attribute, KeyedJaggedTensor):
            return attribute
        found = list({id(one): one for one in search(batch, KeyedJaggedTensor)}.values())
        if len(found) > 1:
            wanted = set(self.lookups.features)
            found = [one for one in found if wanted <= set(one.keys())] or found
        if len(found) == 1:
            return found[0]
        what = "no KeyedJaggedTensor" if not found else f"{len(found)} KeyedJaggedTensors that fit"
        raise ConfigError(
            f"a batch of type {type(batch).__name__} has {what}: tell lookahead where its ids are, "
            "lookahead(batches, ebc, ids=lambda batch: ...)"
        )

    def read(self, features: KeyedJaggedTensor) -> ReadIds:
        """The ids of every lookup. Raises DataError that names what is missing.

        Keys may differ in samples: bags that stand for several samples (`inverse_indices`, as
        TorchRec's deduplicated input has them) are read once for each, and without pooling the
        shorter ones end in empty bags.
        """
        keys, values = list(features.keys()), features.values()
        lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
        given = lengths if lengths is not None else offsets
        tensors = [tensor for tensor in (values, given) if tensor is not None]
        versions = tuple((tensor, version_of(tensor)) for tensor in tensors)
        counts, strides = read_lengths(features)
        places = self._places(keys)
        ids, inverse = values.detach().cpu(), features.inverse_indices_or_none()
        inverse = inverse if self._pooled else None
        own, taken = [strides[place] for place in places], None
        if inverse is not None:
            chosen = _chosen(inverse, self.lookups.features, own)
            bags = chosen + _offsets(torch.tensor(strides))[places].unsqueeze(1)
            counts, taken = _bags(counts, bags)
            own = [chosen.shape[1]] * len(places)
        elif len({*strides}) > 1 and self._pooled:
            raise DataError(
                f"the keys {keys} have {strides} samples: give a KeyedJaggedTensor with "
                "inverse_indices, by which each sample finds its bag"
            )
        elif places != list(range(len(keys))) or len({*strides}) > 1:
            counts, taken = _keys(counts, strides, places)
        ids = ids if taken is None else ids[taken]
        joined = JaggedIds(self.lookups.features, ids, _offsets(counts), None)
        return ReadIds(features, joined, taken, tuple(own), versions, _token_of(features))

    def weights(self, read: ReadIds, features: KeyedJaggedTensor, device: torch.device) -> Tensor:
        """The weights of the ids in `features`, `[n]` on `device`, differentiable in those that
        `features` has, which may have the ids of `read` in other places. DataError where it has
        none, or others than one for each id."""
        own, weights = features.values(), features.weights_or_none()
        if weights is None:
            raise DataError(
                "the collection was made with is_weighted=True, but the KeyedJaggedTensor has no "
                "weights"
            )
        if weights.shape != own.shape:
            raise DataError(
                f"weights of shape {list(weights.shape)} for {len(own)} ids: give one for each id"
            )
        taken = (read if read.is_of(features) else self.read(features)).taken
        weights = weights.to(device)
        return weights if taken is None else weights.index_select(0, taken.int().to(device))

    def _places(self, keys: list[str]) -> list[int]:
        """Where each lookup's feature is among `keys`."""
        at = {key: place for place, key in enumerate(keys)}
        for feature, table in zip(self.lookups.features, self.lookups.tables, strict=True):
            if feature not in at:
                name = self.lookups.specs[table].name
                raise DataError(
                    f"feature {feature!r} of table {name!r} is not among the keys of the "
                    f"KeyedJaggedTensor: {keys}"
                )
        return [at[feature] for feature in self.lookups.features]


def _chosen(
    inverse: tuple[list[str], Tensor], features: Sequence[str], samples: Sequence[int]
) -> Tensor:
    """Of every lookup the sample that has the bag of each sample, int64 `[L, B]`, of `samples`."""
    rows = {name: row for row, name in enumerate(inverse[0])}
    if missing := [feature for feature in features if feature not in rows]:
        raise DataError(f"inverse_indices have no {missing}, only {list(inverse[0])}")
    chosen = inverse[1].detach().cpu().long()[[rows[feature] for feature in features]]
    for feature, own, most in zip(features, chosen, samples, strict=True):
        if len(own) and not 0 <= own.min() <= own.max() < most:
            raise DataError(
                f"inverse_indices of feature {feature!r} go from {own.min()} to {own.max()}, but "
                f"it has {most} samples: give 0 to {most - 1}"
            )
    return chosen


def _bags(counts: Tensor, bags: Tensor) -> tuple[Tensor, Tensor]:
    """The lengths of `bags` `[L, B]`, by number, among those of `counts`, and where their ids are:
    `[L * B]` and `[n]`."""
    starts, bags = _offsets(counts)[:-1][bags].reshape(-1), bags.reshape(-1)
    lengths = counts[bags]
    ends = _offsets(lengths)
    return lengths, torch.arange(int(ends[-1])) + (starts - ends[:-1]).repeat_interleave(lengths)


def _keys(counts: Tensor, strides: list[int], places: list[int]) -> tuple[Tensor, Tensor]:
    """The lengths of the keys at `places`, each with as many samples as the one that has most, and
    where their ids are; a key may be named several times."""
    by_key, most = counts.split(strides), max((strides[place] for place in places), default=0)
    ends = [0, *_offsets(torch.stack([own.sum() for own in by_key]))[1:].tolist()]
    lengths = torch.zeros(len(places), most, dtype=torch.int64)
    for row, place in enumerate(places):
        lengths[row, : strides[place]] = by_key[place]
    none = [torch.zeros(0, dtype=torch.int64)]
    spans = [torch.arange(ends[place], ends[place + 1]) for place in places]
    return lengths.reshape(-1), torch.cat(none + spans)


def _offsets(lengths: Tensor) -> Tensor:
    """`[m]` lengths to `[m + 1]` offsets, int64."""
    return nn.functional.pad(lengths.cumsum(0), (1, 0))


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


def search(value: Any, kind: type[S], depth: int = _DEPTH) -> Iterator[S]:
    """What there is of a kind in a batch: itself, and in mappings, tuples, lists, dataclasses."""
    if isinstance(value, kind):
        yield value
    elif depth:
        for part in _parts(value):
            yield from search(part, kind, depth - 1)


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
    return JaggedIds(features, values, _offsets(torch.cat(lengths, dim=1).reshape(-1)), None)


def as_batch(reads: Sequence[ReadIds], index: int, kind: str = "train") -> Batch:
    """The ids of one plan's micro-batches as the planner takes them; `index` comes back with it."""
    ids: JaggedIds = join_ids([read.ids for read in reads])
    none = torch.empty(0)
    parts = tuple(read.ids.batch_size for read in reads)
    return Batch(none, ids, none, ids.batch_size, index, 0, 0, kind, parts=parts)
