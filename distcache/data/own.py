"""Your own data: any iterable of (dense, ids, labels) as a rank's slices, and where it stands."""

from __future__ import annotations

import gc
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from distcache.data.batch import (
    UNKNOWN,
    Batch,
    JaggedIds,
    checked_offsets,
    is_one_each,
    one_each,
)
from distcache.data.jagged import read_lengths
from distcache.errors import ConfigError, DataError
from distcache.stopping import stop_explains, stop_requested


class Draws:
    """The generators that a `DataLoader` and its samplers draw from; none for another iterable.

    Where they have none they would draw from torch's, ahead of the steps and at any moment of them,
    so that dropout on the CPU drew other numbers in every run. Each is lent one until `give_back`,
    whose seed is drawn from torch's. So is a loader whose workers persist, for they draw a seed
    once, in a pass of a run that goes on as in one of a run that began: its samplers draw alike.
    """

    def __init__(self, loader: Any) -> None:
        batches, kinds = getattr(loader, "batch_sampler", None), DataLoader | Sampler
        parts: list[Any] = [loader, batches]
        parts += [getattr(part, "sampler", None) for part in parts]
        parts = [p for p in parts if isinstance(p, kinds) and hasattr(p, "generator")]
        parts = list({id(part): part for part in parts}.values())
        persist = getattr(loader, "persistent_workers", False)
        self._before = [
            (part, part.generator)
            for part in parts
            if part.generator is None or (persist and part is loader)
        ]
        without = any(given is None for _, given in self._before)
        seed = int(torch.empty((), dtype=torch.int64).random_()) if without else 0
        for at, (part, given) in enumerate(self._before):
            part.generator = torch.Generator()
            part.generator.manual_seed(seed + at if given is None else given.initial_seed())
        self._first = [(part.generator, part.generator.get_state()) for part, _ in self._before]
        self._all = list({id(part.generator): part.generator for part in parts}.values())

    def begin_again(self) -> None:
        """Let the generators that were lent draw what they drew first."""
        for generator, state in self._first:
            generator.set_state(state)

    def states(self) -> list[Tensor]:
        """Of each generator, as it is now."""
        return [generator.get_state() for generator in self._all]

    def set_states(self, states: Sequence[Tensor]) -> None:
        """Put the generators where they were; those of another loader as far as there are such."""
        for generator, state in zip(self._all, states, strict=False):
            generator.set_state(state)

    def give_back(self) -> None:
        """Leave the loader as it was."""
        for part, given in self._before:
            part.generator = given


STATELESS = (
    "give a loader without state_dict, such as torch.utils.data.DataLoader, whose position is kept "
    "here and which is read again up to it"
)
"""The remedy for a loader whose own state does not bring it back."""


class OwnBatches:
    """The batches of one rank's iterable, over `epochs` passes, with a position for each of them.

    An item is (dense `[b, F]`, ids, labels `[b]`), or an object with `dense_features`,
    `sparse_features` and `labels`; ids are a KeyedJaggedTensor, `JaggedIds`, or (values, offsets)
    or (values, offsets, weights), feature-major in the order of the distinct features that
    `lookups` read. b may differ between ranks and items. The position of the last `keep` items is
    remembered: the iterable's `state_dict()` after each, where it has one, and the one before, from
    which one item is read again to be compared; else the number of items, which are then read and
    dropped to come back to it. The states of a `DataLoader`'s generators belong to it. Items are
    copied: an iterable may fill the same buffers again.

    `lookups`: the feature that each lookup reads, by the name of the lookup, in order, which is
    that of the features of a batch; `dense_features`: F of the last item, None before the first;
    `name`: class of the iterable, for errors; `last`: the last of the items that were read again;
    `draws_random`: whether torch's CPU generator moved while all of them were.
    """

    def __init__(
        self, loader: Iterable[Any], lookups: Mapping[str, str], epochs: int = 1, keep: int = 64
    ) -> None:
        if epochs < 1:
            raise ConfigError(f"epochs={epochs}: it must be at least 1")
        self._loader = loader
        self.lookups = lookups
        self._epochs = epochs
        self.name = type(loader).__name__
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._start: dict[str, Any] = {"epoch": 0, "items": 0, "loader": None}  # `open` goes there
        self._first_step = 0  # which has the position `_start`
        self._positions: OrderedDict[int, dict[str, Any]] = OrderedDict()  # after so many steps
        self._previous: dict[str, Any] | None = None  # the position before the next item
        self._draws: Draws | None = None  # while it is open
        self._drawn: list[Tensor] = []  # states of the generators as this pass began
        self._keep = keep
        self._items: Iterator[Any] | None = None
        self._looked_at: list[Any] = []  # the first item, or its error, until it is drawn
        self.dense_features: int | None = None
        self._again = 0  # items that `open` reads and drops to come to the position
        self.last: Batch | None = None
        self.draws_random = False

    def __len__(self) -> int:
        """Items of all passes, where the iterable knows; TypeError where it does not."""
        return len(self._loader) * self._epochs  # type: ignore[arg-type]

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on after the item that `position`, of `read_position`, was taken after; before `open`.

        A loader without `state_dict` is read again also where the one of the position had it.
        Raises ConfigError for a loader with it where that had none.
        """
        self._start = dict(position)
        if not self.stateful:
            begun, self._again = position, position["items"]
        elif position["loader"] is None and position["items"]:
            raise ConfigError(
                "the checkpoint is of a loader without state_dict, this one is with: resume with "
                "the loader it was made with"
            )
        else:
            begun, self._again = self._earlier or position, 1 if self._earlier else 0
        state = begun["loader"] if self.stateful else None
        drawn = begun["draws"]
        if state is not None or begun["epoch"] or drawn:
            self._drop_items()  # what was looked at is of another place
        if drawn:
            self._draws = self._draws or Draws(self._loader)
            self._draws.set_states(drawn)
        if state is not None:
            try:
                self._loader.load_state_dict(state)  # type: ignore[attr-defined]
            except Exception as error:
                raise self._not_resumed(error) from error

    @property
    def _earlier(self) -> Mapping[str, Any] | None:
        """The position one item before that where `open` goes, of an iterable with a state."""
        return self._start.get("earlier") if self.stateful else None

    def _not_resumed(self, error: Exception) -> ConfigError:
        """The error for an iterable that cannot go on from its own state."""
        return ConfigError(
            f"{self.name} cannot go on from its state_dict ({type(error).__name__}: {error}): "
            f"{STATELESS}"
        )

    def open(self) -> None:
        """Begin the first pass, with its workers where it has some, and come to the position; from
        the main thread.

        Raises ConfigError for a position that no checkpoint could be resumed from, and for an
        iterable that cannot go on from its state.
        """
        try:
            if self._items is None:
                self._begin_items((self._earlier or self._start)["epoch"])
                if self.stateful:
                    read_position(_packed(self._loader.state_dict()))  # type: ignore[attr-defined]
            self._start.setdefault("draws", self._drawn)
            self._read_again()
        except DataError as error:
            if self.stateful and self._start["items"]:
                raise self._not_resumed(error) from error
            raise

    def _read_again(self) -> None:
        """Read the items up to the position, and keep the last of them in `last`."""
        before = torch.get_rng_state()
        self._set_generators(self._earlier or self._start)
        for number in range(self._again):
            item = self._draw(number)
            if item is _END:
                break
            if number == self._again - 1:
                self.last = as_batch(item, self.lookups, number, self._start["epoch"])
        if self._again:
            self._set_generators(self._start)
            self._previous = self._position(self._start["epoch"], self._start["items"])
        if not self.stateful:
            self.draws_random |= not torch.equal(before, torch.get_rng_state())
        self._again = 0

    def _set_generators(self, position: Mapping[str, Any]) -> None:
        """Put the generators where they were at a position of an iterable with a state, which need
        not bring them back itself: later passes draw from them."""
        if self.stateful and self._draws is not None and "draws_now" in position:
            self._draws.set_states(position["draws_now"])

    def first_look(self) -> tuple[int, bool]:
        """Ids of the first item, which is still the first that `batches` gives, and whether they
        have weights; from the main thread. 0 where there is none, or it is no batch, which
        `batches` will tell."""
        self.open()
        try:
            item = self._draw(0)
            self._looked_at = [item]
            if item is _END:
                return 0, False
            ids = as_batch(item, self.lookups, 0, 0).ids
            return len(ids.values), ids.weights is not None
        except DataError as error:
            self._looked_at = self._looked_at or [error]
            return 0, False

    def position(self, step: int, more: Mapping[str, Any]) -> bytes:
        """Where the iterable stood after the batch of training step `step - 1`, and `more` of it.

        Raises DataError for a step that is further back than is remembered.
        """
        if step == self._first_step:
            return _packed(self._start | more)
        if step not in self._positions:
            first, last = min(self._positions), max(self._positions)
            raise DataError(
                f"the loader's position after {step} steps is not known, only those after {first} "
                f"to {last}: batches were drawn too far ahead"
            )
        return _packed(_unpickled(self._positions[step]) | more)

    def batches(self, first_step: int) -> Iterator[Batch]:
        """Training batches from step `first_step` on, after `open`; their global size is not known
        yet."""
        step = self._first_step = first_step
        for epoch in range(self._start["epoch"], self._epochs):
            done = self._start["items"]
            if epoch > self._start["epoch"]:
                done = 0
                self._begin_items(epoch)
                if self._items is self._loader:
                    raise ConfigError(
                        f"epochs={self._epochs}, but the loader is an iterator, which can be read "
                        "once: pass an object that makes a new iterator each time, such as a "
                        "DataLoader"
                    )
            while (item := self._draw(step)) is not _END:
                done += 1
                self._remember(step + 1, epoch, done)
                batch = as_batch(item, self.lookups, step, epoch)
                _check_width(batch, self.dense_features)
                self.dense_features = batch.dense.shape[1]
                yield batch
                step += 1
            if stop_requested():  # the pass may have been cut off: no batch of the next one follows
                return

    def close(self) -> None:
        """Let go of the iterator and its workers, also where `batches` has not ended."""
        self._drop_items()
        draws, self._draws = self._draws, None
        if draws is not None:
            draws.give_back()

    def _begin_items(self, epoch: int) -> None:
        """Begin a pass; the workers of the last one go first."""
        self._items = None
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:  # a distributed sampler wants to know
            set_epoch(epoch)
        if getattr(self._loader, "num_workers", 0):
            # A forked worker would collect the garbage of this process, among it process groups
            # whose threads it does not have, and crash.
            gc.collect()
        self._draws = self._draws or Draws(self._loader)
        self._drawn = self._draws.states()
        self._items = _begin(self._loader, "train", epoch)
        # A pass that a stop has cut off may have left an iterable that cannot tell its state.
        self._previous = None if stop_requested() else self._position(epoch, 0)

    def _drop_items(self) -> None:
        """Let go of the iterator, what was looked at and the workers."""
        items, self._items = self._items, None
        self._looked_at.clear()
        # Dropped alone, a DataLoader's workers live as long as the traceback of an error of theirs.
        shut_down = getattr(items, "_shutdown_workers", None)
        if shut_down is not None and not getattr(self._loader, "persistent_workers", False):
            shut_down()

    def _remember(self, step: int, epoch: int, done: int) -> None:
        """The iterable's position after `step` steps."""
        position = self._position(epoch, done)
        # Of the same pass: an iterable need not come over the end of one twice.
        self._positions[step] = position | {"earlier": self._previous if self.stateful else None}
        self._previous = position
        if len(self._positions) > self._keep:
            self._positions.popitem(last=False)

    def _position(self, epoch: int, items: int) -> dict[str, Any]:
        """The position after `items` of a pass: the iterable's state, pickled as it is now, and
        states of the generators as the pass began and, of an iterable with a state, now."""
        position: dict[str, Any] = {"epoch": epoch, "items": items, "draws": self._drawn}
        state = self._loader.state_dict() if self.stateful else None  # type: ignore[attr-defined]
        position["loader"] = pickle.dumps(state)
        if self.stateful and self._draws is not None:
            position["draws_now"] = self._draws.states()
        return position

    def _draw(self, number: int) -> Any:
        """The next item of the pass, or `_END`, also after `close`."""
        if not self._looked_at:
            return _END if self._items is None else _draw(self._items, "train", number)
        item = self._looked_at.pop()
        if isinstance(item, DataError):
            raise item
        return item


def _unpickled(position: Mapping[str, Any]) -> dict[str, Any]:
    """A position that `OwnBatches` remembered, with the state as the iterable gave it."""
    found = dict(position) | {"loader": pickle.loads(position["loader"])}  # of this process
    if found.get("earlier") is not None:
        found["earlier"] = _unpickled(found["earlier"])
    return found


def _packed(position: Any) -> bytes:
    """A position as a checkpoint has it."""
    file = io.BytesIO()
    torch.save(position, file)
    return file.getvalue()


def read_position(position: bytes) -> Any:
    """Return the position that `OwnBatches.position` packed. Raises ConfigError."""
    try:
        return load_plain(position)
    except DataError as error:
        raise ConfigError(
            "the loader's state_dict() is no position that a checkpoint can have, which holds "
            f"numbers, texts, tensors, and lists and dictionaries of these alone: {error}"
        ) from error


def load_plain(data: bytes) -> Any:
    """What torch.save made of tensors and of values that Python has built in; no code of it is run.

    Raises DataError that names anything else.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever bytes make of it
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise DataError(f"it asks for {found[1]}" if found else "it cannot be read") from error


_ODD = np.uint64(0xD1342543DE82EF95)


def digest_of(batch: Batch) -> tuple[int, int]:
    """The number of samples of a slice, and the sum of their digests: those of a global batch are
    the sums, the second modulo 2 ** 64, over whatever ranks cut it in whatever order.

    Of all values, but not of the order of ids in a bag, which changes its sum by rounding alone.
    """
    b, ids = len(batch.labels), batch.ids
    each = _mixed(_words(ids.values))
    if ids.weights is not None:
        each = _mixed(each + _words(ids.weights))
    sums = np.concatenate((np.zeros(1, np.uint64), each.cumsum()))
    bags = np.diff(sums[ids.offsets.numpy()]).reshape(len(ids.features), b)
    columns = np.concatenate((bags, _words(batch.dense).T, _words(batch.labels)[None]))
    columns += np.arange(len(columns), dtype=np.uint64)[:, None] * _ODD
    return b, int(_mixed(_mixed(columns).sum(0)).sum())


def _words(values: Tensor) -> np.ndarray:
    """Numbers as uint64 that are equal where these are, whatever their dtype."""
    wide = values.to(torch.float64 if values.dtype.is_floating_point else torch.int64)
    return wide.contiguous().numpy().view(np.uint64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Each word, uint64, spread over all bits of another."""
    words = (words + _ODD) * _ODD
    return (words ^ (words >> np.uint64(32))) * _ODD


def eval_batches(
    loader: Iterable[Any],
    lookups: Mapping[str, str],
    count: int,
    dense_features: int,
    trained: int | None = None,
) -> Iterator[Batch]:
    """`count` evaluation batches of one pass; empty ones where the iterable has fewer.

    `dense_features`: of empty batches where there are no others; `trained`: of the training
    batches, None where not known. Raises DataError that names the item.
    """
    items = _begin(loader, "eval", 0)
    number = 0
    while number < count and (item := _draw(items, "eval", number)) is not _END:
        batch = as_batch(item, lookups, number, 0, "eval")
        _check_width(batch, dense_features if number else trained)
        dense_features = batch.dense.shape[1]
        yield batch
        number += 1
    if stop_requested():  # an evaluation that was cut off has no result
        return
    for index in range(number, count):
        offsets = torch.zeros(1, dtype=torch.int64)
        ids = JaggedIds(tuple(lookups), torch.zeros(0, dtype=torch.int64), offsets)
        nothing = torch.zeros(0)
        yield Batch(nothing.view(0, dense_features), ids, nothing, UNKNOWN, index, 0, 0, "eval")


_END = object()
"""What `_draw` returns after the last item."""


def _begin(loader: Iterable[Any], kind: str, epoch: int) -> Iterator[Any]:
    """An iterator over a pass; an error of the iterable becomes a DataError that names the pass.

    After a stop was requested the pass has no item instead.
    """
    try:
        return iter(loader)
    except Exception as error:
        if stop_explains(error):
            return iter(())
        raise DataError(
            f"{kind} pass {epoch} of your loader: {type(error).__name__}: {error}"
        ) from error


def _draw(items: Iterator[Any], kind: str, number: int) -> Any:
    """The next item; an error of the iterable becomes a DataError that names the item.

    After a stop was requested the items end instead: a signal may have ended the workers.
    """
    try:
        return next(items)
    except StopIteration:
        return _END
    except Exception as error:
        if stop_explains(error):
            return _END
        raise DataError(
            f"{kind} batch {number} of your loader: {type(error).__name__}: {error}"
        ) from error


def as_batch(
    item: Any, lookups: Mapping[str, str], index: int, epoch: int, kind: str = "train"
) -> Batch:
    """One item of an iterable, copied, as a slice of unknown place.

    `lookups`: the feature that each lookup reads, by the name of the lookup, in order.
    Raises DataError that names the item.
    """
    where = f"{kind} batch {index} of your loader"
    if hasattr(item, "sparse_features") and hasattr(item, "dense_features"):
        item = (item.dense_features, item.sparse_features, item.labels)
    if not isinstance(item, tuple | list) or len(item) != 3:
        raise DataError(f"{where} is a {_name(item)}; give (dense, ids, labels)")
    dense, labels = _numbers(item[0], f"{where}: dense"), _numbers(item[2], f"{where}: labels")
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    features = tuple(dict.fromkeys(lookups.values()))
    ids = as_ids(item[1], features, where)
    b = len(labels) if labels.dim() == 1 else -1
    if dense.dim() != 2 or dense.shape[0] != b or ids.batch_size != b:
        raise DataError(
            f"{where}: dense is {list(dense.shape)}, labels {list(labels.shape)}, ids have "
            f"{ids.batch_size} samples ({len(ids.offsets)} offsets for {len(features)} features); "
            "give dense [b, F], labels [b], ids of b samples"
        )
    least, most = labels.aminmax() if b else (0, 1)
    if not (least >= 0 and most <= 1):  # of others, and of NaN, log loss has no least value
        bad = ~((labels >= 0) & (labels <= 1))
        sample = int(bad.to(torch.uint8).argmax())
        raise DataError(
            f"{where}: sample {sample} has the label {labels[sample].item():g}; {int(bad.sum())} "
            "of its labels are not in [0, 1]: give 0 or 1, or a probability"
        )
    weights = None if ids.weights is None else ids.weights.clone()
    count, offsets = ids.values.numel(), ids.offsets
    offsets = one_each(count) if is_one_each(offsets, count) else offsets.clone()
    ids = JaggedIds(ids.features, ids.values.clone(), offsets, weights)
    if ids.features != tuple(lookups):
        ids = _looked_up(ids, lookups, where)
    return Batch(dense.clone(), ids, labels.clone(), UNKNOWN, index, epoch, 0, kind)


def _check_width(batch: Batch, width: int | None) -> None:
    """`batch` has as many dense features as those before it, `width` (None: not known)."""
    found = batch.dense.shape[1]
    if width is not None and found != width:
        raise DataError(
            f"{batch.kind} batch {batch.index} of your loader: dense has {found} features, those "
            f"before it {width}; give all batches the same"
        )


def as_ids(ids: Any, features: tuple[str, ...], where: str) -> JaggedIds:
    """A KeyedJaggedTensor, `JaggedIds`, or (values, offsets[, weights]) as ids of `features`, in
    any order."""
    if isinstance(ids, JaggedIds):
        found = ids
    elif hasattr(ids, "keys") and hasattr(ids, "lengths"):
        weights = ids.weights_or_none()
        weights = None if weights is None else weights.detach().cpu()
        values = ids.values().detach().cpu()
        try:
            lengths, samples = read_lengths(ids)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if len({*samples}) > 1:
            raise DataError(
                f"{where}: the keys {list(ids.keys())} have {samples} samples: give each key those "
                "of the batch"
            )
        found = JaggedIds.of_lengths(tuple(ids.keys()), values, lengths, weights)
    elif isinstance(ids, tuple | list) and len(ids) in (2, 3):
        tensors = [torch.as_tensor(part).detach().cpu() for part in ids]
        found = JaggedIds(features, *tensors)
    else:
        raise DataError(
            f"{where}: ids are a {_name(ids)}; give a KeyedJaggedTensor or (values, offsets)"
        )
    if sorted(found.features) != sorted(features):
        raise DataError(
            f"{where} has the features {list(found.features)}; the tables read {list(features)}"
        )
    return found


def _looked_up(ids: JaggedIds, lookups: Mapping[str, str], where: str) -> JaggedIds:
    """Return the bags of each lookup: those of the feature that it reads."""
    try:
        checked_offsets(ids)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    b = ids.batch_size
    order = [ids.features.index(feature) for feature in lookups.values()]
    spans = [slice(int(ids.offsets[f * b]), int(ids.offsets[(f + 1) * b])) for f in order]
    lengths = ids.offsets.diff().view(len(ids.features), b)[order].reshape(-1)
    weights = None if ids.weights is None else torch.cat([ids.weights[span] for span in spans])
    values = torch.cat([ids.values[span] for span in spans])
    return JaggedIds.of_lengths(tuple(lookups), values, lengths, weights)


def _numbers(values: Any, what: str) -> Tensor:
    """Return `values` as a float tensor on the CPU; DataError for what are no real numbers."""
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} is a {_name(values)}, no tensor ({error})") from error
    if tensor.is_complex():
        raise DataError(f"{what} is of {tensor.dtype}: give real numbers, such as its .real")
    return tensor if tensor.dtype.is_floating_point else tensor.float()


def _name(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"
