"""`lookahead(batches, ebc)`: any iterable of batches, planned ahead of the training loop.

A thread reads batches and plans them; the loop gets each batch when its plan is made, and the
collection finds the plan when the batch comes through the model. An epoch can halt, when another
batch is planned in between (evaluation): what has not moved is then planned again. Each `iter()`
of a look-ahead starts an epoch; which batches were read, given out and recognised is the epoch's.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import nn

from distcache.comm.rendezvous import ErrorReports
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.embedding.collection import CachedCollection
from distcache.embedding.ids import IdReader, ReadIds, as_batch, bytes_of
from distcache.embedding.lazy_tables import LazyTables
from distcache.embedding.open_step import OpenStep
from distcache.embedding.settings import library_words
from distcache.embedding.step import LEAVING_S, CollectionTables
from distcache.engine.pipeline import STOP_S, StepStream
from distcache.engine.step import StepContext
from distcache.engine.tables import CachedTables
from distcache.errors import ConfigError, PeerError, PlanError
from distcache.stopping import stop_explains

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

T = TypeVar("T")

log = logging.getLogger(__name__)


def lookahead(
    batches: Iterable[T],
    ebc: CachedCollection | nn.Module | Sequence[CachedCollection],
    accumulate: int = 1,
    ids: Callable[[T], Any] | Mapping[CachedCollection, Callable[[T], Any]] | None = None,
) -> Lookahead[T]:
    """Iterate over `batches`, planned ahead for `ebc`; called by all ranks.

    `ebc`: a collection, several, or a module with some, which then are read ahead together.

    Reads L + P + 1 optimizer steps ahead (`lookahead` and `prefetch` of the collection; P with
    L = 0), two more with several ranks, and with a GPU, beside which several threads plan, one
    more, and yields every batch as it is. Each must go through the model in this order; a batch
    that is skipped or changed raises PlanError. `accumulate=k`: k batches make one optimizer step.
    `ids(batch)` gives a batch's `KeyedJaggedTensor`, or, for a module with torch.nn's arguments,
    what it is called with, `input` or `(input, offsets)`; without it, the batch is looked through;
    `ids={module: function}` where several read it. Iterators of different length end where the
    first rank's ends. Each `iter()` starts an epoch, on all ranks together. Raises ConfigError for
    a wrong argument, and what goes wrong with a batch (DataError, StepTooLargeError) at its turn.
    """
    if isinstance(batches, Lookahead | LookaheadIterator):
        raise ConfigError(
            "a look-ahead cannot read another look-ahead, whose batches are planned for the loop: "
            "give all collections to one, lookahead(batches, [ebc, other])"
        )
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r} must be a whole number of at least 1")
    found = _collections(ebc)
    for collection in found:
        if collection.reader.is_remapped:
            raise ConfigError(
                f"lookahead reads ids before TorchRec's managed collisions map them to rows of "
                f"{collection._config.title}: leave lookahead out"
            )
    finders = _finders(ids, found)

    own = [(own._lazy_tables, own.reader, finders[own] or own.reader.find) for own in found]
    return Lookahead(batches, own, accumulate)


def _collections(ebc: Any) -> list[CachedCollection]:
    """The collections that a look-ahead was given, or those of a module."""
    found = list(ebc.modules()) if isinstance(ebc, nn.Module) else ebc
    if isinstance(ebc, nn.Module):
        found = [module for module in found if isinstance(module, CachedCollection)]
        found = [own for own in found if own.reader.lookups.specs] or found  # not tables=[]
    several = isinstance(found, list | tuple) and len(found) == len({id(own) for own in found}) > 0
    if not several or not all(isinstance(own, CachedCollection) for own in found):
        raise ConfigError(
            "lookahead(batches, ebc) takes a CachedEmbeddingBagCollection, "
            "CachedEmbeddingCollection, CachedEmbeddingBag or CachedEmbedding, a list of such, or "
            f"a module that has some, got {type(ebc).__name__}"
        )
    firsts = {own._lazy_tables: own for own in found if not own._copied}  # copies read the same
    return list({own._lazy_tables: firsts.get(own._lazy_tables, own) for own in found}.values())


def _finders(ids: Any, found: Sequence[CachedCollection]) -> dict[CachedCollection, Any]:
    """What finds the ids of each collection in a batch; None where the batch is looked through.
    Raises ConfigError for what is given for another module."""
    if not isinstance(ids, Mapping):
        return dict.fromkeys(found, ids)
    by_member = {getattr(own, "_lazy_tables", own): one for own, one in ids.items()}
    for own in ids:
        known = isinstance(own, CachedCollection) and own.reader.lookups.specs
        if not known or own._lazy_tables not in {one._lazy_tables for one in found}:
            raise ConfigError(
                f"ids={{...}} has a {type(own).__name__} which is none of the collections that are "
                "read ahead: give functions by CachedEmbeddingBagCollection, CachedEmbedding ... "
                "that lookahead was given, or that are in its module"
            )
    return {own: by_member.get(own._lazy_tables) for own in found}


# -----------------------------------------------------------------------------
# The batches that a planner has read, and its threads. They know no epoch: dropping that ends them.


class PlanBatches(NamedTuple):
    """The batches of one plan, kept until the step after it is open."""

    batches: list[Any]
    reads: list[ReadIds]


class BatchReader(Generic[T]):
    """The user's batches as the planner reads them, from its thread, and the pipeline's threads,
    which may be halted and started again, from batches that were kept.

    `kept`: the batches read by plan; `exhausted`: whether the last of them has been read. An error
    in the place of a batch stays there, however often the threads are started again.
    """

    def __init__(
        self,
        batches: Iterable[T],
        reader: IdReader,
        find: Callable[[T], KeyedJaggedTensor],
        accumulate: int,
    ) -> None:
        self._batches, self._iterator = batches, None
        self.reader, self._find, self._accumulate = reader, find, accumulate
        self._next = 0
        self._error: Exception | None = None
        self.kept: dict[int, PlanBatches] = {}
        self.exhausted = False
        self.timeout_s = STOP_S
        self.stream: StepStream | None = None
        self._closed = threading.Event()
        self._left: StepStream | None = None

    # --- batches, in the planner's thread ---------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ahead = self.kept.get(self._next)
        if ahead is None:
            if self._error is not None:
                raise self._error
            try:
                if self._iterator is None:
                    self._iterator = iter(self._batches)
                batches = list(itertools.islice(self._iterator, self._accumulate))
                reads = [self.reader.read(self._find(batch)) for batch in batches]
            except Exception as error:
                if not stop_explains(error):
                    self._error = error
                    raise
                batches = []
            if not batches:
                self.exhausted = True
                raise StopIteration
            ahead = self.kept[self._next] = PlanBatches(batches, reads)
        self._next += 1
        return as_batch(ahead.reads, self._next - 1)

    def first_sizes(self) -> tuple[int, int]:
        """Ids that the first plan looks up, and bytes of its batches, before a thread reads; zeros
        where there are none, or an error comes in their place: at their turn, on all ranks."""
        try:
            ids = len(next(self).ids.values)
        except Exception:  # or none, which comes again
            return 0, 0
        self._next = 0
        return ids, sum(bytes_of(batch) for batch in self.kept[0].batches)

    # --- threads ----------------------------------------------------------------------------

    def start(self, engine: CachedTables) -> None:
        """Let the engine's threads read and plan."""
        self.timeout_s = min(self.timeout_s, engine.world.timeout_s)
        self.stream = engine.ahead(self)
        _running[self.stream] = engine.world

    def halt(self, position: int = 0, limit_s: float | None = None) -> None:
        """End the threads, with a last word to the other ranks, to go on later, if at all, from
        plan `position`.

        After the same step on all ranks, with what was released moved before. Raises PeerError for
        threads that did not end in time: they still run, for they hold the batches and the planner.
        """
        limit = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        if self.stream is not None and not self.stream.stop(limit):
            raise self.not_halted()
        self.stream, self._next = None, position

    def close(self, limit_s: float | None = None) -> None:
        """End the threads for good, in order if the other ranks allow it within `limit_s`.

        Ranks that leave a look-ahead after the same step hold the same rows, and may go on.
        """
        try:
            self.halt(limit_s=limit_s)
        except Exception as error:
            log.warning("a look-ahead did not end in order: %s", error)
        finally:
            self._error = None  # whose traceback holds this reader, and the loop
            stream, self.stream = self.stream, None
            if stream is not None:
                stream.request_stop()
            self._closed.set()

    def leave(self, leaving: list[BatchReader]) -> None:
        """Close as nobody holds the look-ahead; ranks that left it at the same step end here.

        One that left it with an error, which a finalizer cannot see, has nobody to end with: after
        a short wait the closing goes on on a thread, so that the error shows. `leaving` holds
        this reader until it is known to have ended.
        """
        stream = self.stream
        if stream is None or stream.is_finished:
            self.close()
            return
        self._left = stream
        leaving.append(self)
        closing = threading.Thread(target=self.close, name="distcache-closing", daemon=True)
        closing.start()
        if not stream.is_worker_thread():  # the garbage collector runs in any thread
            closing.join(LEAVING_S)

    def has_ended(self, limit_s: float) -> bool:
        """Wait for the end that `leave` has begun; whether it has come, in order."""
        if self._closed.wait(limit_s) and (self._left is None or self._left.is_finished):
            self._left = None  # which holds this reader, its batches
        return self._left is None

    def not_halted(self) -> PeerError:
        """The error for threads that did not end in time."""
        return PeerError(
            f"the planner did not halt within {self.timeout_s:g} s: another rank goes on without "
            "this one, or the batches that lookahead reads are slower than that"
        )


_running: weakref.WeakKeyDictionary[StepStream, World] = weakref.WeakKeyDictionary()
"""Those that an epoch holds, or their own threads, and their ranks."""


def _at_exit() -> None:
    """End the threads that still run; after an error say so, for the others wait in vain.

    A thread that computes while the interpreter goes away may take the process with it.
    """
    error, open_ones = getattr(sys, "last_value", None), list(_running.items())
    if error is not None:
        ErrorReports.add(error)
    for stream, world in open_ones:
        limit = min(world.timeout_s, STOP_S) if error is None else LEAVING_S
        if not stream.stop(limit, orderly=False):
            log.warning("a look-ahead's threads did not end within %g s", limit)


atexit.register(_at_exit)


# -----------------------------------------------------------------------------
# What the loop has: a look-ahead, and the epoch that it is in.


class Lookahead(Generic[T]):
    """Batches whose rows are planned ahead, epoch after epoch; made by `lookahead`.

    `iter()` starts an epoch and ends the one under way: the old iterator raises then. `next()` of
    the look-ahead itself goes on in the current epoch. Over an iterator, which is read once, there
    is one epoch, and `iter()` goes on in it.

    Each of several collections has an epoch of its own over the same batches. With NCCL on several
    ranks the first one alone is read ahead, for nothing would fix the order in which ranks issue
    the exchanges of several; the others plan each batch when it comes.
    """

    def __init__(
        self,
        batches: Iterable[T],
        collections: list[tuple[LazyTables, IdReader, Callable[[T], Any]]],
        accumulate: int,
    ) -> None:
        """`collections`: for each its tables, the reader of its ids, and what finds them in a
        batch; nothing here holds the collections themselves."""
        self._batches, self._collections, self._accumulate = batches, collections, accumulate
        self._epochs: list[LookaheadIterator[T]] = []
        self._current: Iterator[T] | None = None
        self._had_batches = self._warned = False

    def __iter__(self) -> Iterator[T]:
        """Start an epoch, by all ranks. Raises PeerError where that under way does not end."""
        before, several = self._epochs, len(self._collections) > 1
        if self._current is not None:
            if isinstance(self._batches, Iterator) and not before[0].exhausted:
                # A generator that an error has ended would say that no batch is left.
                self._current = _in_step(before) if several else before[0]
                return self._current
            self._had_batches |= before[0].count > 0
            left = [epoch.replace() for epoch in before]
            if any(left) and before[0].count and not self._warned:
                log.warning(
                    "an epoch of this look-ahead was ended after %d batches, before its last: the "
                    "next one begins with the first batch again",
                    before[0].count,
                )
                self._warned = True
        elif several:
            world = self._collections[0][0].tables.world
            if world.backend == "nccl" and world.size > 1:
                self._collections, several = self._collections[:1], False
        count = len(self._collections)
        parts = _shared(self._batches, count) if several else [self._batches]
        self._epochs = [
            LookaheadIterator(
                BatchReader(part, *how, self._accumulate), lazy_tables, self._had_batches
            )
            for part, (lazy_tables, *how) in zip(parts, self._collections, strict=True)
        ]
        self._current = _in_step(self._epochs) if several else self._epochs[0]
        return self._current

    def __next__(self) -> T:
        """The next batch of the current epoch."""
        return next(self._current if self._current is not None else iter(self))

    def __len__(self) -> int:
        """Batches of an epoch, where they know how many they are."""
        return len(self._batches)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop reading ahead; the collections go on from what their caches hold."""
        for epoch in self._epochs:
            epoch.close()


def _shared(batches: Iterable[T], readers: int) -> list[Iterator[T]]:
    """`batches` for threads that read each at its own pace. Each batch is taken once; an error in
    the place of one is raised in all threads, at its turn."""
    lock = threading.Lock()

    def told() -> Iterator[tuple[Any, Exception | None]]:
        try:
            for batch in batches:
                yield batch, None
        except Exception as error:
            yield None, error

    def read(own: Iterator[tuple[Any, Exception | None]]) -> Iterator[T]:
        while True:
            with lock:
                found = next(own, None)
            if found is None:
                return
            batch, error = found
            if error is not None:
                raise error
            yield batch

    return [read(own) for own in itertools.tee(told(), readers)]


def _in_step(epochs: list[LookaheadIterator[T]]) -> Iterator[T]:
    """The batches of all epochs. It does not hold who has it: to drop that ends them."""
    while True:
        batches = [batch for epoch in epochs for batch in itertools.islice(epoch, 1)]
        if len(batches) < len(epochs):
            return
        yield batches[0]


class LookaheadIterator(Generic[T]):
    """An iterator over the batches of one epoch of a look-ahead."""

    def __init__(self, source: BatchReader[T], lazy_tables: LazyTables, follows: bool) -> None:
        """`follows`: an epoch that had batches, so that one without any is an error."""
        self._lazy_tables, self._source = lazy_tables, source
        self._follows, self._replaced = follows, False
        weakref.finalize(self, source.leave, lazy_tables.tables.leaving).atexit = False
        self._plans: dict[int, StepContext] = {}
        self._opened = -1
        self._step: weakref.ref[OpenStep] | None = None
        self._yielded = (0, 0)
        self._pending: deque[tuple[int, int]] = deque()
        self.exhausted = False
        """Whether the loop was told that no batch is left."""
        self.count = 0
        """Batches given out."""

    def __iter__(self) -> LookaheadIterator[T]:
        return self

    def __next__(self) -> T:
        """The next batch. Raises PlanError once another epoch has begun, and for an epoch without
        a batch after one that had some."""
        if self._replaced:
            raise PlanError(
                "this iterator's epoch was ended by a later iter() of its look-ahead: take the "
                "batches from the iterator that was made last"
            )
        position, micro = self._yielded
        if self.exhausted or (position > self._opened and not self._plan(position)):
            if self._follows and not (self.count or self.exhausted):  # as if it were done
                raise PlanError(
                    "an epoch of this look-ahead has no batch, but the one before had some: its "
                    "batches are used up (a generator, or an iterator, is read once): give "
                    "lookahead a list, a DataLoader, or what makes a new iterator at each iter(), "
                    "or make a new look-ahead for each epoch"
                )
            self.exhausted = True
            raise StopIteration
        self.count += 1
        ahead = self._source.kept[position]
        self._yielded = (position, micro + 1)
        if micro + 1 == len(ahead.reads):
            self._yielded = (position + 1, 0)
        self._pending.append((position, micro))
        return ahead.batches[micro]

    def replace(self) -> bool:
        """End the epoch for another one, on all ranks; whether batches of it were left.

        Plans whose rows have not moved are made again. Raises PeerError where the planner does not
        end in time: then the epoch goes on.
        """
        # A loop that counts need not have asked whether a batch is left.
        gave_all = self._source.exhausted and self._yielded[0] not in self._source.kept
        left = not self._replaced and (self.outstanding or not (self.exhausted or gave_all))
        self._source.halt()
        self.close()
        self._replaced = True
        return left

    # --- the collection's side --------------------------------------------------------------

    @property
    def outstanding(self) -> bool:
        """Whether a batch was given out that has not come through the model."""
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.exhausted and not self._pending

    def match(self, features: KeyedJaggedTensor, by_content: bool) -> bool:
        """Whether `features` is the next batch that should come, or of its plan.

        `by_content`: also a batch that was built anew with the same ids. Raises PlanError for a
        batch out of turn, or one that was changed since it was read.
        """
        if not self._pending:
            return False
        expected = self._pending[0]
        for place in list(self._pending):  # another thread may be taking batches
            read = self._source.kept[place[0]].reads[place[1]]
            if not read.is_of(features):
                continue
            if place[0] not in (expected[0], self._opened):
                raise PlanError(
                    f"batch {place[0]} of the look-ahead came to the collection, but batch "
                    f"{expected[0]} was skipped: every batch that lookahead yields must go "
                    "through the model once, in order (filter the batches before lookahead reads "
                    "them)"
                )
            if not read.is_unchanged(features, self._source.reader.read):
                raise self.mismatch_error(place[0])
            self._pending.remove(place)
            self._pending.appendleft(place)
            return True
        read = self._source.kept[expected[0]].reads[expected[1]]
        return by_content and read.has_ids_of(features, self._source.reader.read)

    def open_next(self, tables: CollectionTables, frozen: frozenset[int]) -> tuple[OpenStep, int]:
        """The step of the batch just claimed, opened unless it is open, and its micro-batch.

        `frozen`: the tables, by index, that the step leaves as they are.
        """
        (position, micro), kept = self._pending[0], self._source.kept
        if position != self._opened:
            if not self._plan(position):
                raise PlanError("the planner ended before a batch that it had planned")
            context = self._plans[position]  # kept until open: an interrupted wait may be repeated
            self._step = weakref.ref(tables.open(context, kept[position].reads, frozen))
            del self._plans[position]
            kept.pop(self._opened, None)
            self._opened = position
        step = self._step and self._step()
        if step is None or not (step is tables.current or step.recorded):
            raise PlanError(
                f"another batch came between the micro-batches of step {position} of the look-ahead"
            )
        self._pending.popleft()
        return step, micro

    def mismatch_error(self, position: int | None = None) -> PlanError:
        """The error for a batch that is none of those given out, or not as that of `position`."""
        position = self._pending[0][0] if position is None else position
        return PlanError(
            f"the ids that came to the collection are not those of batch {position}, which "
            "lookahead gave out next: its plan is for the ids as they were read. Change batches "
            "before lookahead reads them (a loader must not reuse its buffers), give each to the "
            "model as it is (.to(device) may be called on it), or use no lookahead"
        )

    # --- planning ---------------------------------------------------------------------------

    def _plan(self, position: int) -> bool:
        """Wait until plan `position` is made; False if the batches end before."""
        if position in self._plans and not self._is_stopping():
            return True
        with self._lazy_tables.report_errors():
            return self._wait_for_plan(position)

    def _is_stopping(self) -> bool:
        """Return True if the threads were asked to end and did not in time."""
        stream = self._source.stream
        return stream is not None and stream.stop_requested

    def _wait_for_plan(self, position: int) -> bool:
        source = self._source
        if self._is_stopping():
            self.halt()
        if source.stream is None:
            tables = self._lazy_tables.tables
            tables.start_stream(self, source)
            source.start(tables.engine)
        try:
            with library_words(self._lazy_tables.config):
                while position not in self._plans:
                    context = None if source.stream is None else next(source.stream, None)
                    if context is None:
                        return False
                    self._plans[context.batch.index] = context
        except BaseException:
            self.close()
            raise
        return True

    def halt(self) -> None:
        """Stop planning; plans that have not moved are made again when they are asked for."""
        if self._source.stream is not None or self._plans:
            self._source.halt(self._opened + 1)
            self._plans.clear()

    def close(self, limit_s: float | None = None) -> None:
        """Stop reading ahead; the collection goes on from what its cache holds.

        `limit_s`: longest wait for the other ranks, which do the same; a minute at most.
        """
        self.exhausted = True
        self._source.close(limit_s)
        self._plans.clear()
        self._pending.clear()
