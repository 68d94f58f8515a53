"""Ids that are not row numbers: TorchRec's managed collisions over a cached collection.

TorchRec's wrapper (`ManagedCollisionEmbeddingBagCollection`, `ManagedCollisionEmbeddingCollection`)
around a collection of ours stays as it is; hooks of its modules do the rest. The user's own modules
advance when a training batch comes through the model, over the ids of all ranks in rank order, so
that they are one function of the stream, whatever the ranks, and always those of the last step. A
look-ahead leads a copy of them through the batches to come, for plans need rows: their ids travel
with the planners' exchange. What comes out then is compared when the batch comes; where it differs
(a map was loaded meanwhile, or put in another mode), planning starts again from the user's own.
"""

from __future__ import annotations

import copy
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.comm.link import Link, host_link
from distcache.embedding.collection import CachedCollection
from distcache.embedding.ids import ReadIds, fill
from distcache.embedding.open_step import OpenStep
from distcache.errors import ConfigError, DataError, PeerError, PlanError

if TYPE_CHECKING:
    from distcache.embedding.stream import Epoch

# -----------------------------------------------------------------------------
# The ids of a batch on all ranks.


@dataclass
class Whole:
    """The ids of one batch on all ranks: of each feature rank 0's samples, then rank 1's, ...

    `strides`: samples by rank and feature; `clock`: rank 0's when it was read, seconds; `mapped`:
    lengths and values that came out of the modules, on the CPU; `before`: see `_Maps.state`, when
    they did; `tape`: what MPZCH's kernel did, see `_Recorded`; `applied`: whether the user's own
    modules have seen it.
    """

    features: KeyedJaggedTensor
    strides: list[list[int]]
    clock: float
    mapped: tuple[Tensor, ...] = ()
    before: tuple = ()
    tape: list[tuple[Tensor, ...]] | None = None
    applied: bool = False

    def own(
        self, features: KeyedJaggedTensor, like: KeyedJaggedTensor, rank: int
    ) -> KeyedJaggedTensor:
        """What came out for a rank's `features`, which are `like` in the order of the modules."""
        lengths, values = self.mapped
        if int(lengths.sum()) != len(values):
            raise ConfigError(
                "the collision modules left out ids without changing lengths: leave "
                "mutate_miss_lengths as it is, or give no disable_fallback"
            )
        strides = [of_rank[at] for at in range(len(like.keys())) for of_rank in self.strides]
        mine = _cut(lengths, values, strides)[rank :: len(self.strides)]
        device = features.values().device
        return KeyedJaggedTensor(
            list(like.keys()),
            torch.cat([part for _, part in mine]).to(device),
            like.weights_or_none(),
            torch.cat([part for part, _ in mine]).to(device),
            stride_per_key_per_rank=(
                like.stride_per_key_per_rank() if like.variable_stride_per_key() else None
            ),
            inverse_indices=features.inverse_indices_or_none(),
        )


def _cut(lengths: Tensor, values: Tensor, strides: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Lengths and values of runs of so many samples."""
    parts = lengths.split(list(strides))
    return list(zip(parts, values.split([int(part.sum()) for part in parts]), strict=True))


def _gather(
    link: Link, parts: Sequence[tuple[KeyedJaggedTensor, float]] | None, digest: int
) -> list[Whole] | None:
    """The micro-batches of all ranks, of which this one's are `parts`, each with its clock; None
    where a rank has none. By all ranks. Raises PeerError where their maps, of which `digest` is,
    are not the same."""
    if link.world.size == 1:
        return parts and [Whole(own, [own.stride_per_key()], clock) for own, clock in parts]
    mine = parts and [
        (own.lengths().cpu(), own.values().cpu(), own.stride_per_key(), clock)
        for own, clock in parts
    ]
    told = link.gather_objects((digest, mine), "ids of the collision modules")
    if differ := [rank for rank, (other, _) in enumerate(told) if other != told[0][0]]:
        raise PeerError(
            f"the collision modules of rank(s) {', '.join(map(str, differ))} map otherwise than "
            "rank 0's: make and load them alike on all ranks; what one does may depend on its ids "
            "alone"
        )
    if parts is None or not all(of_rank for _, of_rank in told):
        return None
    if len(counts := {len(of_rank) for _, of_rank in told}) > 1:
        raise DataError(
            f"the ranks have {' and '.join(map(str, sorted(counts)))} micro-batches for one step: "
            "with collision modules give all ranks as many"
        )
    found = []
    for (own, _), *by_rank in zip(parts, *(of_rank for _, of_rank in told), strict=True):
        strides = [of_rank[2] for of_rank in by_rank]
        cut = [_cut(*of_rank[:3]) for of_rank in by_rank]
        runs = [of_rank[at] for at in range(len(own.keys())) for of_rank in cut]
        totals = [sum(of_key) for of_key in zip(*strides, strict=True)]
        features = KeyedJaggedTensor(
            list(own.keys()),
            torch.cat([values for _, values in runs]),
            lengths=torch.cat([lengths for lengths, _ in runs]),
            stride_per_key_per_rank=[[n] for n in totals] if len({*totals}) > 1 else None,
        )
        found.append(Whole(features, strides, by_rank[0][3]))
    return found


@dataclass(frozen=True)
class MappedIds(ReadIds):
    """Row numbers that the modules made of a batch's ids, recognised by the batch itself, `raw`.

    `whole`: the ids of all ranks, where the modules were given them.
    """

    raw: ReadIds
    whole: Whole | None

    def is_of(self, features: KeyedJaggedTensor) -> bool:
        return self.raw.is_of(features)

    def is_unchanged(self, features: KeyedJaggedTensor, read: Callable[..., ReadIds]) -> bool:
        return self.raw.is_unchanged(features, read)

    def has_ids_of(self, features: KeyedJaggedTensor, read: Callable[..., ReadIds]) -> bool:
        return self.raw.has_ids_of(features, read)


# -----------------------------------------------------------------------------
# Modules that advance, and what they depend on beside ids: time, chance, and MPZCH's kernel, which
# fills slots in the order of a GPU's threads. Each is fixed with the batch, on rank 0.

_clock: ContextVar[float | None] = ContextVar("clock", default=None)


class _Time:
    """Stands where TorchRec's eviction has the module `time`: `time()` is that of the batch."""

    def time(self) -> float:
        found = _clock.get()
        return time.time() if found is None else found

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Recorded(TorchDispatchMode):
    """Draws of this thread by a seed, and MPZCH's kernel as the `tape` tells.

    An entry is of one call: what it returned, the slots that it may have written, and what they had
    then, of each tensor that it writes. `plays`: no kernel runs, and the slots are written as the
    entries say.
    """

    def __init__(self, seed: int, tape: list[tuple[Tensor, ...]], plays: bool) -> None:
        super().__init__()
        self._generator, self._seed = dict[torch.device, torch.Generator](), seed
        self._tape, self._next = tape, iter(tape) if plays else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.rand_like.default:
            like = args[0]
            func, args = torch.ops.aten.rand.default, (like.shape,)
            kwargs = {"dtype": like.dtype, "device": like.device} | kwargs
            kwargs.pop("memory_format", None)
        if func is torch.ops.aten.rand.default:
            where = torch.device(kwargs.get("device") or "cpu")
            if where not in self._generator:
                self._generator[where] = torch.Generator(where).manual_seed(self._seed)
            return torch.ops.aten.rand.generator(*args, generator=self._generator[where], **kwargs)
        if func.name() == "fbgemm::zero_collision_hash":
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            if not given.get("readonly"):
                return self._hash(given, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def _hash(self, given: dict[str, Any], kernel: Callable[[], tuple[Tensor, ...]]) -> Any:
        found = [given.get(name) for name in ("identities", "metadata", "runtime_meta")]
        written = [own for own in found if own is not None and own.numel()]
        if self._next is None:
            came, evicted = kernel()
            slots = torch.cat((came.reshape(-1), evicted.reshape(-1))).unique()
            slots = slots[slots >= 0]
            self._tape.append((came, evicted, slots, *(own[slots] for own in written)))
            return came, evicted
        entry = next(self._next, None)
        if entry is None:
            raise PeerError("the collision modules of rank 0 failed")
        came, evicted, slots, *values = (part.to(given["input"].device) for part in entry)
        for own, value in zip(written, values, strict=True):
            own[slots] = value
        return came, evicted


class _Maps:
    """Modules that advance: `count`, how many training batches they have seen, and `digest`, of all
    that came out of them then."""

    def __init__(self, mcc: ManagedCollisionCollection, count: int = 0, digest: int = 0) -> None:
        self.mcc, self.count, self.digest = mcc, count, digest
        self.modules: dict[str, Any] = dict(mcc._managed_collision_modules.items())
        self._hashes = any(hasattr(own, "_hash_zch_identities") for own in self.modules.values())

    @property
    def state(self) -> tuple[int, int, bool]:
        """What the next batch's row numbers depend on, if nobody writes to the modules; whether
        it is a training batch."""
        return self.count, self.digest, any(own.training for own in self.modules.values())

    @contextmanager
    def at(self, whole: Whole, link: Link) -> Iterator[None]:
        """Inside, the modules may map `whole`, by all ranks: as before if they stand where they
        stood then, otherwise as rank 0's do now."""
        if whole.before != self.state:
            whole.before, whole.tape = self.state, None
        new, what = whole.tape is None, "what the collision modules did"
        tells = new and self._hashes and link.world.size > 1
        if tells and link.world.rank:
            whole.tape = link.gather_objects(None, what)[0]
        plays, tape = whole.tape is not None, whole.tape or []
        token = _clock.set(whole.clock)
        try:
            with _Recorded(self.count, tape, plays):
                yield
        finally:
            _clock.reset(token)
            whole.tape = tape
            if tells and not link.world.rank:
                link.gather_objects([tuple(p.cpu() for p in entry) for entry in tape], what)

    def note(self, whole: Whole, output: KeyedJaggedTensor) -> None:
        """Count `whole`, of which `output` came out."""
        whole.mapped = output.lengths().cpu(), output.values().cpu()
        if self.state[2]:
            self.count += 1
            self.digest = zlib.crc32(whole.mapped[1].contiguous().numpy(), self.digest)


# -----------------------------------------------------------------------------
# The user's own modules, while batches come through the model.


@dataclass
class _Coming:
    """A batch between the modules and the collection: as it came (`raw`), in the order of the
    modules (`ordered`), where a look-ahead or an open step has it (`place`) and as what (`known`),
    the ids of all ranks (`whole`), and what came out (`features`). `foreseen`: whether it was
    mapped from where the modules stand now; `repeats`: a forward that backward runs again
    (activation checkpointing), which counts once; `is_new`: until the collection has it."""

    raw: KeyedJaggedTensor
    ordered: KeyedJaggedTensor
    place: tuple[Epoch | OpenStep, int] | None
    known: MappedIds | None
    whole: Whole | None
    foreseen: bool = True
    repeats: bool = False
    is_new: bool = True
    undo: ExitStack = field(default_factory=ExitStack)
    features: KeyedJaggedTensor | None = None


class Collisions:
    """TorchRec's modules `mcc`, which make row numbers of ids, around `collection`."""

    def __init__(self, collection: CachedCollection, mcc: ManagedCollisionCollection) -> None:
        """Raises ConfigError for a feature that two tables read, of which TorchRec's modules lose
        one table's row numbers."""
        self._names = list(mcc._feature_names)
        if twice := sorted({name for name in self._names if self._names.count(name) > 1}):
            raise ConfigError(
                f"feature {twice[0]!r} is read by two tables, each of which has row numbers of its "
                "own for its ids: give each table a feature of its own name"
            )
        self._collection = weakref.ref(collection)  # the modules' hooks hold this
        self.maps, self.reader = _Maps(mcc), collection.reader
        if evictions := sys.modules.get("torchrec.modules.hash_mc_evictions"):
            evictions.time = _Time()  # type: ignore[attr-defined]
        self._coming: _Coming | None = None
        self._written = self._versions()
        mcc._features_order.clear()  # they get their features in order from now on
        mcc.register_forward_pre_hook(self._enter, with_kwargs=True)
        mcc.register_forward_hook(self._leave, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Collisions:
        return self  # of the hooks of a copy, which know that it is one

    def _versions(self) -> list[int]:
        """Changes of what MPZCH has in the place of ids, which a tape would not notice."""
        found = [getattr(own, "_hash_zch_identities", None) for own in self.maps.modules.values()]
        return [own._version for own in found if own is not None]

    def ordered(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features of the modules, in their order."""
        keys = list(features.keys())
        if keys == self._names:
            return features
        if missing := [name for name in self._names if name not in keys]:
            raise DataError(
                f"feature {missing[0]!r} of the collision modules is not among the keys of the "
                f"KeyedJaggedTensor: {keys}"
            )
        return features.permute([keys.index(name) for name in self._names])

    def to_modules(self, whole: Whole) -> KeyedJaggedTensor:
        """`whole` where the modules are."""
        return whole.features.to(next(iter(self.maps.modules.values())).device)

    @torch.compiler.disable
    def _enter(self, mcc: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the modules: let them have the ids of all ranks, as they were read."""
        own, kwargs = self._collection(), dict(kwargs)
        features = args[0] if args else kwargs.pop("features")
        if own is None or own.device.type == "meta":
            return None
        if mcc is not self.maps.mcc:
            if _Maps(mcc).state[2]:
                raise ConfigError("a copy of collision modules only evaluates: call eval() on it")
            return None
        tables = own.tables
        with tables.reports:
            if not isinstance(features, KeyedJaggedTensor):
                raise ConfigError(
                    f"the collision modules of the {type(own).__name__} got a "
                    f"{type(features).__name__}: to trace the model, make "
                    "ManagedCollisionCollection a leaf"
                )
            coming = self._coming = self._begin(own, features)
        if coming.whole is None or tables.world.size == 1:
            return (coming.ordered, *args[1:]), kwargs
        return (self.to_modules(coming.whole), *args[1:]), kwargs

    def _begin(self, own: CachedCollection, raw: KeyedJaggedTensor) -> _Coming:
        maps, link, place = self.maps, host_link(own.tables.world), own.find(own.tables, raw)
        where, micro = place or (None, 0)
        ahead = where is not None and not isinstance(where, OpenStep)
        read = where and (where.next_read if ahead else where.reads[micro])
        known = read if isinstance(read, MappedIds) else None
        coming = _Coming(raw, self.ordered(raw), place, known, known and known.whole)
        if ahead and coming.whole is None:
            raise PlanError(
                "this look-ahead began before its collection had collision modules: make the "
                "module around both first, then the look-ahead"
            )
        if not ahead and coming.whole is not None and torch._C._current_graph_task_id() != -1:
            coming.repeats = True
            for module in maps.modules.values():
                coming.undo.callback(module.train, module.training)
                module.eval()
            return coming
        if not ahead:
            part = [(coming.ordered, time.time())] if maps.state[2] else []
            (coming.whole,) = (part and _gather(link, part, maps.digest)) or (None,)
        whole = coming.whole
        if whole is not None:
            if self._written != self._versions():
                whole.before = ()
            coming.foreseen = whole.before == maps.state
            coming.undo.enter_context(maps.at(whole, link))
        return coming

    @torch.compiler.disable
    def _leave(self, mcc: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After the modules: this rank's part of what came out."""
        coming, own = self._coming, self._collection()
        if isinstance(output, KeyedJaggedTensor):
            output._keys = list(output.keys())  # without the token of the batch
        if mcc is not self.maps.mcc or own is None or coming is None or coming.features is not None:
            return None
        coming.undo.close()
        if not isinstance(output, KeyedJaggedTensor):  # an error
            self._coming = None
            return None
        coming.features, whole, known = output, coming.whole, coming.known
        if whole is None:
            return None
        rank = own.tables.world.rank
        if not coming.repeats:
            was = known.whole.mapped if known is not None and known.whole is not None else ()
            self.maps.note(whole, output)
            whole.applied, self._written = True, self._versions()
            same = len(was) > 0 and all(map(torch.equal, was, whole.mapped))
            where = coming.place and coming.place[0]
            if isinstance(where, OpenStep):
                coming.place = coming.place if same else None  # other rows: a step of its own
            elif where is not None and known is not None and not (same and coming.foreseen):
                features = whole.own(known.raw.source, self.ordered(known.raw.source), rank)
                read = vars(self.reader.read(features))
                where.replan(MappedIds(**read, raw=known.raw, whole=whole))
            if own._recipe.settings.reset_evicted and self._begin_anew(own):
                coming.place = None if isinstance(where, OpenStep) else coming.place
        if coming.repeats or own.tables.world.size > 1:
            coming.features = whole.own(coming.raw, coming.ordered, rank)
        return coming.features

    def _begin_anew(self, own: CachedCollection) -> bool:
        """Let the rows of ids that were evicted just now start anew, before the batch reads them,
        but for frozen tables; whether there are any. By all ranks."""
        evicted, found = self.maps.mcc.evict(), dict[int, tuple[np.ndarray, Tensor]]()
        for at, config in enumerate(own._recipe.configs):
            ids = evicted.get(config.name)
            if ids is not None and ids.numel() and config.name not in own.frozen:
                ids = ids.cpu().unique()
                seed = f"{own.tables.settings.seed or 0}/{at}/{self.maps.count}"
                rows = torch.empty(len(ids), config.embedding_dim, device="cpu")
                found[at] = ids.numpy(), fill(rows, config.init_fn, seed)
        if found:
            own.tables.begin_anew(found)
        return bool(found)

    def place(
        self, own: CachedCollection, features: KeyedJaggedTensor
    ) -> tuple[Epoch | OpenStep, int] | None:
        """See `CachedCollection.find`, of the batch of which the modules made `features` just now.
        Raises PlanError in training for others, of which the modules of other ranks, or of a
        look-ahead, are not told; `own`: the collection that they came to."""
        coming = self._coming
        if coming is not None and coming.features is features:
            new, coming.is_new = coming.is_new, False
            return coming.place if new else own.find(own.tables, coming.raw)
        if own.training and (own.tables.world.size > 1 or own.tables.streams):
            raise PlanError(
                f"the ids that came to the {type(own).__name__} did not come from its collision "
                "modules: call the module around both, with the batch as it is"
            )
        return own.find(own.tables, features)

    def read(self, features: KeyedJaggedTensor) -> ReadIds:
        """The row numbers that the modules made, with the batch of which they did."""
        read, coming = self.reader.read(features), self._coming
        if coming is None or coming.features is not features:
            return read
        return MappedIds(**vars(read), raw=self.reader.read(coming.raw), whole=coming.whole)

    def ahead(self) -> Ahead:
        """A copy of the modules, to go ahead from where they stand. In the training thread."""
        return Ahead(self)

    # --- checkpoints ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What of the modules is in no `state_dict`: counts, and the history since the last
        eviction."""
        maps = self.maps
        history = {name: _history(own) for name, own in maps.modules.items()}
        return {"count": maps.count, "digest": maps.digest, "history": history}

    def take_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave."""
        self.maps.count, self.maps.digest = state["count"], state["digest"]
        for name, module in self.maps.modules.items():
            _take_history(module, state["history"].get(name, {}))


_NUMBERS = (
    "_current_iter",
    "_last_eviction_iter",
    "_current_history_buffer_offset",
    "_input_history_buffer_size",
    "_evicted",
)
"""What a MCHManagedCollisionModule counts by."""


def _history(module: nn.Module) -> dict[str, Any]:
    """What MCH keeps beside its `state_dict`; {} of other modules."""
    if not isinstance(module, MCHManagedCollisionModule):
        return {}
    found: dict[str, Any] = {name: getattr(module, name) for name in _NUMBERS}
    found["evicted"], kept = module._evicted_emb_indices, module._current_history_buffer_offset
    if module._input_history_buffer_size >= 0:
        found["ids"] = module._history_accumulator[:kept]
        found["metadata"] = {name: own[:kept] for name, own in module._history_metadata.items()}
    return found


def _take_history(module: nn.Module, found: dict[str, Any]) -> None:
    if not isinstance(module, MCHManagedCollisionModule) or not found:
        return
    for name in _NUMBERS:
        setattr(module, name, found[name])
    module._evicted_emb_indices = found["evicted"].to(module.device)

    def filled(kept: Tensor) -> Tensor:
        whole = torch.zeros(found["_input_history_buffer_size"], dtype=torch.int64)
        whole[: len(kept)] = kept
        return whole.to(module.device)

    if "ids" in found:
        module._history_accumulator = filled(found["ids"])
        for name, kept in found["metadata"].items():
            module.register_buffer(f"_history_{name}", filled(kept), persistent=False)
            module._history_metadata[name] = module.get_buffer(f"_history_{name}")


# -----------------------------------------------------------------------------
# A copy of the modules, ahead of the user's.


class Ahead:
    """A copy of the modules of `own` that goes ahead; used by the planner's thread."""

    def __init__(self, own: Collisions) -> None:
        """In the training thread."""
        mcc = copy.copy(own.maps.mcc)
        with torch.inference_mode(False):
            vars(mcc)["_modules"] = copy.deepcopy(mcc._modules)
        vars(mcc)["_features_order"] = []
        mcc.evict()  # what the user's have not told of yet, in the middle of a forward
        self._own, self._maps = own, _Maps(mcc, own.maps.count, own.maps.digest)
        for module in self._maps.modules.values():
            if getattr(module, "_scalar_logger", None) is not None:  # the user's module logs
                module._scalar_logger, module._tb_logging_frequency = None, 0

    def map(self, link: Link, reads: list[ReadIds] | None) -> bool:
        """Let the micro-batches of the next step, which were read just now, have row numbers, if
        all ranks have some; whether they do. By all ranks."""
        known, parts = list[MappedIds](), None
        try:
            if reads is not None:
                reads[:] = known = [self._timed(read) for read in reads]
                parts = [(self._own.ordered(of.raw.source), of.whole.clock) for of in known]
        finally:
            wholes = _gather(link, parts, self._maps.digest)
        if wholes is None or reads is None or parts is None:
            return False
        for at, (of, whole) in enumerate(zip(known, wholes, strict=True)):
            if not of.whole.applied:  # by the user's modules, from which this copy was made
                with torch.no_grad(), self._maps.at(whole, link):  # without the hooks of the user's
                    output = self._maps.mcc.forward(self._own.to_modules(whole))
                self._maps.mcc.evict()
                self._maps.note(whole, output)
                own = whole.own(of.raw.source, parts[at][0], link.world.rank)
                reads[at] = MappedIds(**vars(self._own.reader.read(own)), raw=of.raw, whole=whole)
        return True

    def _timed(self, read: ReadIds) -> MappedIds:
        """`read`, from now on with the time at which it was read first."""
        if isinstance(read, MappedIds):
            return read
        return MappedIds(**vars(read), raw=read, whole=Whole(read.source, [], time.time()))


# -----------------------------------------------------------------------------
# TorchRec's wrapper is recognised when it takes a collection of ours.


class AroundBags(ManagedCollisionEmbeddingBagCollection):
    """What TorchRec's wrapper is then, so that DistributedModelParallel, whose sharders go by the
    class, does not shard it."""


class AroundRows(ManagedCollisionEmbeddingCollection):
    """The same of sequences."""


_AROUND = {AroundBags.__base__: AroundBags, AroundRows.__base__: AroundRows}


def _adopt(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if not isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return
    mcc = getattr(module, "_managed_collision_collection", None)
    if not isinstance(child, CachedCollection) or mcc is None:
        return
    if child.reader.collisions is None or child.reader.collisions.maps.mcc is not mcc:
        child.reader.collisions = Collisions(child, mcc)
    module.__class__ = _AROUND.get(type(module), type(module))


nn.modules.module.register_module_module_registration_hook(_adopt)
