"""The cached tables behind a collection, and one optimizer step of them."""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distcache.comm.agreement import agree_on, agree_on_versions, together
from distcache.comm.failure import record_failure
from distcache.comm.link import PLANNING, CollectiveCounters, Link, host_link
from distcache.comm.world import World
from distcache.data.batch import Batch, check_ids
from distcache.embedding.ids import IdReader, Lookups, ReadIds, as_batch
from distcache.embedding.settings import CacheSettings, library_words
from distcache.engine.gradients import start_reduce_rows, to_all
from distcache.engine.groups import GroupBags, RegionSlots, TableGroup, join_pooled
from distcache.engine.lookup import DeviceBags, PooledLookup, RowLookup, bags_of_one, part_of
from distcache.engine.movement import GroupRows, Mover
from distcache.engine.planning import PlanningSettings, StreamPlanner
from distcache.engine.queue import StepStream
from distcache.engine.step import TRAINING_LANE, Flight
from distcache.engine.tables import home_regions, make_caches, make_stores, popular_groups
from distcache.engine.warm import WarmStart, warm_up
from distcache.engine.whole import RowExchange, blocks, row_numbers, shares
from distcache.errors import DataError, PeerError, PlanError
from distcache.layout import TableSpec
from distcache.optim import RowUpdate
from distcache.popularity.slots import Budget, Use, decide, statistics_of
from distcache.popularity.statistics import GroupPopularity, Statistics, read_statistics
from distcache.step_plan import StepPlan
from distcache.store.memory import SharedMemory, require_memory
from distcache.store.rows import RowStore, initial_rows
from distcache.streams import COMPUTE, Streams

if TYPE_CHECKING:
    from distcache.embedding.stream import Epoch


# -----------------------------------------------------------------------------
# What all ranks make a collection from alike, by name and value.


def collection_values(
    name: str,
    tables: Sequence[TableSpec],
    lookups: Lookups,
    update: RowUpdate,
    settings: CacheSettings,
) -> dict[str, Any]:
    """What to compare over the ranks of the collection `name`.

    Without the statistics, which may lie elsewhere on each rank: what they say is compared later.
    """
    values = {
        "the collection": name,
        "the order of tables": [table.name for table in tables],
        "the features": lookups.features,
        "optimizer": update,
    }
    values |= {f"table {table.name!r}": table for table in tables}
    own = [f.name for f in fields(settings) if f.repr]
    return values | {name: getattr(settings, name) for name in own}


# -----------------------------------------------------------------------------
# What the tables of a collection are made of: groups, slots, stores and planners.


@dataclass(frozen=True)
class RowParts:
    """The rows of every group, and what they take from statistics."""

    groups: list[TableGroup]
    rows: list[GroupRows]
    popular: list[GroupPopularity]
    warm: WarmStart


def make_row_parts(
    link: Link,
    tables: Sequence[TableSpec],
    keys: Sequence[str],
    update: RowUpdate,
    settings: CacheSettings,
    streams: Streams,
) -> RowParts:
    """Slots and stores of all groups; called by all ranks of `link`.

    `tables` name lookups by place; `keys`: their features, as statistics and a split name them.
    """
    world, dtype = link.world, settings.dtype
    budget = Budget(
        settings.rows,
        settings.ratio,
        settings.bytes,
        dtype.itemsize,
        world.size,
        settings.batch_size or 1,
        settings.prefetch + 2,
    )
    use = Use(
        settings.policy_settings,
        settings.warm_start,
        settings.split,
        settings.prefetch,
    )
    widths = [update.state_width(table.dim) for table in tables]
    named = [
        replace(table, features=tuple(keys[int(f)] for f in table.features)) for table in tables
    ]
    slots, popularity = decide(
        world, named, widths, budget, use, lambda: _statistics(settings, named)
    )
    features = [feature for table in tables for feature in table.features]
    groups, popular = popular_groups(world, tables, features, popularity)
    stores = make_stores(world, groups, update, dtype, settings.seed, settings.store_access)
    caches = make_caches(world, groups, [RegionSlots(count) for count in slots], update, dtype)
    rows = [
        GroupRows(group, cache, store, update, link, streams, settings.prefetch)
        for group, cache, store in zip(groups, caches, stores, strict=True)
    ]
    share = 0.0 if popularity is None else popularity.warm_start
    return RowParts(groups, rows, popular, WarmStart([own.hot for own in popular], share))


def _statistics(settings: CacheSettings, tables: Sequence[TableSpec]) -> Statistics | None:
    """The statistics of `tables`, in order; ConfigError for those of other tables."""
    given = settings.statistics
    if given is None:
        return None
    if isinstance(given, Statistics):
        return statistics_of(given, tables, "the given statistics")
    return statistics_of(read_statistics(given, "statistics"), tables, f"statistics={given}")


def make_stream_planner(
    link: Link,
    parts: RowParts,
    settings: CacheSettings,
    fingerprint: int,
    prepare: Callable[[Batch], Batch],
) -> StreamPlanner:
    """The planner of this rank's homes, over the planning group of `link`."""
    rank, policy = link.world.rank, settings.policy_settings
    pairs = zip(parts.popular, parts.groups, strict=True)
    classes = [own.classes_at(group.layout, rank) for own, group in pairs]
    return StreamPlanner(
        link,
        parts.groups,
        home_regions(parts.rows, rank, settings.prefetch, policy, classes),
        [rows.cache.slots for rows in parts.rows],
        PlanningSettings(
            lookahead=settings.lookahead,
            prefetch=settings.prefetch,
            dtype=settings.dtype,
            fingerprint=fingerprint,
            prepare=prepare,
        ),
    )


# -----------------------------------------------------------------------------
# One optimizer step of a collection: its row leaves, their gradients and when they are summed.

Reduce = Callable[["OpenStep", list["Tensor | None"]], list["Tensor | None"]]
"""(step, local row gradients by group) -> the gradients that the step applies; None: of a group
that is frozen."""


class OpenStep:
    """A planned step whose rows are on the device, with its micro-batches `reads`.

    Every forward looks up in the same leaves, one `[U, D]` for each group, so gradients gather
    there. The end of the backward pass in which the last micro-batch has taken part sums them
    over the ranks: from then on `leaf.grad` is what will be applied, the same on all ranks.
    """

    def __init__(
        self,
        planned: Flight,
        reads: list[ReadIds],
        groups: list[TableGroup],
        read_rows: Callable[[Flight], list[Tensor]],
        reduce: Reduce,
        frozen: frozenset[int],
    ) -> None:
        """`frozen`: the tables, by index, that this step leaves as they are."""
        self.planned, self.reads, self._groups = planned, reads, groups
        self.frozen = frozen
        self.trains = [not frozen.issuperset(group.tables) for group in groups]
        """Whether any table of each group is updated."""
        self._read_rows, self._reduce = read_rows, reduce
        self.leaves: list[Tensor] | None = None
        self._forwarded: set[int] = set()
        self._backed: set[int] = set()
        self.reduced = False
        self.classes: list[list[tuple[int, Tensor]] | None] = []
        """By group, once reduced: the rows by their tables' step count, see `CachedTables`."""
        self._task = -1
        self._backward_failed = False

    @property
    def number(self) -> int:
        """Position in the stream of planned steps."""
        return self.planned.step

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be applied or dropped."""
        return any(leaf.grad is not None for leaf in self.leaves or [])

    # --- forward ----------------------------------------------------------------------------

    def pooled(self, micro: int) -> Tensor:
        """The bags of micro-batch `micro`, `[b, sum of widths]`, recorded if gradients are."""
        leaves, bags = self._current_leaves(), self._bags(micro)
        pooled = [
            PooledLookup.apply(leaf, DeviceBags(*own, leaf.device))
            for leaf, own in zip(leaves, bags, strict=True)
        ]
        self._watch(micro, pooled)
        return join_pooled(self._groups, pooled)

    def rows(self, micro: int) -> list[Tensor]:
        """The row of every id of micro-batch `micro`, by lookup: `[n_f, D_f]` each."""
        ids = self.reads[micro].ids
        counts = ids.offsets.diff().view(len(ids.features), ids.batch_size).sum(1).tolist()
        out: dict[int, Tensor] = {}
        for group, leaf, (bags, plan) in zip(
            self._groups, self._current_leaves(), self._bags(micro), strict=True
        ):
            of = [counts[at] for at in group.features]
            found = RowLookup.apply(leaf, DeviceBags(bags_of_one(bags), plan, leaf.device, of))
            out |= zip(group.features, found, strict=True)
        self._watch(micro, out.values())
        return [out[at] for at in sorted(out)]

    def _current_leaves(self) -> list[Tensor]:
        """The leaves; read again from the cache once a step has changed its rows."""
        if self.leaves is None:
            with torch.inference_mode(False), torch.no_grad():
                pairs = zip(self._read_rows(self.planned), self.trains, strict=True)
                self.leaves = [leaf.requires_grad_(trains) for leaf, trains in pairs]
            step = weakref.ref(self)
            for leaf in self.leaves:
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(_AfterAccumulate(step))
        return self.leaves

    def _bags(self, micro: int) -> list[tuple[GroupBags, StepPlan]]:
        """What a lookup of one micro-batch reads, by group."""
        planned = self.planned
        pairs = list(zip(planned.bags, planned.plans, strict=True))
        if len(self.reads) > 1:
            sizes = [read.ids.batch_size for read in self.reads]
            start = sum(sizes[:micro])
            samples = slice(start, start + sizes[micro])
            pairs = [part_of(bags, plan, samples, sum(sizes)) for bags, plan in pairs]
        return pairs

    def _watch(self, micro: int, found: Iterable[Tensor]) -> None:
        """Learn when a backward pass goes through this lookup, if gradients are recorded."""
        if not torch.is_grad_enabled():
            return
        self._forwarded.add(micro)
        step = weakref.ref(self)

        def mark(gradient: Tensor) -> None:
            alive = step()
            if alive is not None:
                alive._backed.add(micro)

        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(mark)

    # --- backward ---------------------------------------------------------------------------

    def accumulated(self, leaf: Tensor) -> None:
        """A backward pass has added to the gradient of `leaf`: look at the end of the pass."""
        if self.leaves is None or not any(leaf is own for own in self.leaves):
            raise _too_late()
        if self.reduced:
            raise PlanError(
                f"step {self.number}: a backward pass came after its row gradients were summed "
                "over the ranks; sum the losses of one step and call backward once, or read with "
                "lookahead(batches, ebc, accumulate=k) for k micro-batches per step"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if len(self._backed) == len(self.reads):
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the row gradients over the ranks, once; all ranks do it for the same step."""
        if self.reduced or self.leaves is None or not any(self.trains):
            return
        local = [
            (torch.zeros_like(at) if at.grad is None else at.grad) if trains else None
            for at, trains in zip(self.leaves, self.trains, strict=True)
        ]
        for leaf, gradient in zip(self.leaves, self._reduce(self, local), strict=True):
            leaf.grad = gradient
        self.reduced = True

    # --- step -------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget the gradients so far (`zero_grad`)."""
        for leaf in self.leaves or []:
            leaf.grad = None
        self.reduced = False

    def ready(self, without_backward: bool = False) -> bool:
        """Whether there is something to apply, summed by then; all ranks ask.

        Raises PlanError where a step would lose part, and, unless `without_backward`, where no
        backward pass has come here.
        """
        if self.leaves is None or not self._forwarded or not any(self.trains):
            return False
        if (self._backed or self.reduced) and not self.pending:
            return False  # dropped by zero_grad
        total = len(self.reads)
        if len(self._forwarded) < total:
            raise PlanError(
                f"step {self.number} was read as {total} micro-batches (accumulate={total}), of "
                f"which {len(self._forwarded)} have gone through the model: call step() after "
                "the last"
            )
        if not (self._backed or self.reduced or without_backward):
            raise PlanError(
                f"step {self.number}: step() without a backward pass through the collection; call "
                "loss.backward() first, or no step(); where the loss of this rank alone does not "
                "depend on the embeddings, call ebc.reduce() after its backward"
            )
        self.reduce()
        return True

    def close(self) -> None:
        """The rows have changed or left: leaves are stale, late backward passes are errors."""
        self.leaves = None
        self._forwarded.clear()
        self._backed.clear()
        self.reduced = False


class _AfterAccumulate:
    """The hook of a leaf. It holds the step weakly: a step that is gone has no business there."""

    def __init__(self, step: weakref.ref[OpenStep]) -> None:
        self._step = step

    def __call__(self, leaf: Tensor) -> None:
        step: Any = self._step()
        if step is None:
            raise _too_late()
        step.accumulated(leaf)


def _too_late() -> PlanError:
    return PlanError(
        "a backward pass reached the rows of a step that has ended: call backward before step() "
        "and before the next batch's forward; for several batches per step read with "
        "lookahead(batches, ebc, accumulate=k)"
    )


# -----------------------------------------------------------------------------
# Behind a look-ahead: the batches that its planner has read, and the threads ahead.
#
# Both are known to the thread, so neither knows the look-ahead: dropping that ends the thread.

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 60.0
"""Longest wait for the planner's last exchange with the other ranks, seconds."""

LEAVING_S = 5.0
"""Longest wait for threads whose steps are of no use, seconds: at the interpreter's end, where they
may be waiting for other ranks, which look for this one's failure every second or after three; and
for a look-ahead that nobody holds, which ranks that leave theirs at the same step do in turn."""


class Ahead(Generic[T]):
    """The batches of one plan, kept until the step after it is open."""

    def __init__(self, position: int, batches: list[T], reads: list[ReadIds]) -> None:
        self.position, self.batches, self.reads = position, batches, reads


class Source(Generic[T]):
    """The user's batches as the planner reads them, from its thread; can go back to kept ones."""

    def __init__(
        self,
        batches: Iterable[T],
        reader: IdReader,
        find: Callable[[T], KeyedJaggedTensor],
        accumulate: int,
    ) -> None:
        self._batches, self._iterator = batches, None
        self._reader, self._find, self._accumulate = reader, find, accumulate
        self._next = 0
        self.kept: dict[int, Ahead[T]] = {}
        self.ended = False
        """Whether the last of the batches has been read."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ahead = self.kept.get(self._next)
        if ahead is None:
            if self._iterator is None:
                self._iterator = iter(self._batches)
            batches = list(itertools.islice(self._iterator, self._accumulate))
            if not batches:
                self.ended = True
                raise StopIteration
            reads = [self._reader.read(self._find(batch)) for batch in batches]
            ahead = self.kept[self._next] = Ahead(self._next, batches, reads)
        self._next += 1
        return as_batch(ahead.reads, ahead.position)

    def go_back(self, position: int) -> None:
        """Give the batches from plan `position` on once more; only while no thread reads."""
        self._next = position


class Runner:
    """The pipeline's threads, which may be halted and started again; knows no Lookahead."""

    def __init__(
        self,
        planner: StreamPlanner,
        depth: int,
        timeout_s: float,
        streams: Streams,
        mover: Mover | None,
    ) -> None:
        """`mover`: moves rows ahead of the loop; none: the loop moves them."""
        self._planner, self._depth, self.timeout_s = planner, depth, timeout_s
        self._streams, self._mover = streams, mover
        self._pipeline: StepStream | None = None
        self._closed = threading.Event()
        self._left: StepStream | None = None

    @property
    def running(self) -> bool:
        return self._pipeline is not None

    @property
    def halting(self) -> bool:
        """Whether threads that were told to end did not in time."""
        return self._pipeline is not None and self._pipeline.stopping

    def start(self, source: Source) -> None:
        self._pipeline = StepStream(self._planner, source, self._depth, self._streams, self._mover)
        _pipelines[self._pipeline] = self._planner.link.world

    def take(self) -> Flight | None:
        """The next planned step, or None at the end."""
        return None if self._pipeline is None else next(self._pipeline, None)

    def arrive(self, flight: Flight, done: int) -> None:
        """Wait for the rows of a step; what may follow step `done` moves on."""
        if self._pipeline is not None:
            self._pipeline.release(done, self._streams.mark(COMPUTE))
            self._pipeline.arrive(flight)

    def settle(self) -> None:
        """Wait for the moves that come before the ranks' next exchange."""
        if self._pipeline is not None and self._planner.link.world.size > 1:
            self._pipeline.settle()

    def quiet(self) -> None:
        """Let no row move until the next step arrives."""
        if self._pipeline is not None:
            self._pipeline.quiet()

    def stop(self, limit_s: float | None = None) -> bool:
        """End the threads, with a last word to the other ranks; False if they did not in time.

        After the same step on all ranks, with what was released moved before; threads that did
        not end then still run, for they hold the batches and the planner.
        """
        pipeline = self._pipeline
        if pipeline is None:
            return True
        limit_s = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        ended = pipeline.stop(limit_s)
        if ended:
            self._pipeline = None
        else:
            log.warning("the planner's thread did not end within %g s", limit_s)
        return ended

    def close(self, limit_s: float | None = None) -> None:
        """End the threads for good, in order if the other ranks allow it within `limit_s`.

        Ranks that leave a look-ahead after the same step hold the same rows, and may go on.
        """
        try:
            self.stop(limit_s)
        except Exception as error:
            log.warning("moving rows failed: %s", error)
        finally:
            pipeline, self._pipeline = self._pipeline, None
            if pipeline is not None:
                pipeline.tell()
            self._closed.set()

    def leave(self, leaving: list[Runner]) -> None:
        """Close as nobody holds the look-ahead; ranks that left it at the same step end here.

        One that left it with an error, which a finalizer cannot see, has nobody to end with: after
        a short wait the closing goes on on a thread, so that the error shows. `leaving` holds
        this runner until it is known to have ended.
        """
        self._left = pipeline = self._pipeline
        if pipeline is None or pipeline.ended:
            self.close()
            return
        leaving.append(self)
        closing = threading.Thread(target=self.close, name="distcache-closing", daemon=True)
        closing.start()
        if not pipeline.runs_here():  # the garbage collector runs in any thread
            closing.join(LEAVING_S)

    def ended(self, limit_s: float) -> bool:
        """Wait for the end that `leave` has begun; whether it has come, in order."""
        return self._closed.wait(limit_s) and (self._left is None or self._left.ended)


def end_left(leaving: list[Runner]) -> None:
    """Wait for the look-aheads that were left; PeerError for one that does not end."""
    while leaving:
        runner = leaving[-1]
        if not runner.ended(runner.timeout_s + LEAVING_S):
            raise not_halted(runner.timeout_s)
        leaving.remove(runner)


def not_halted(limit_s: float) -> PeerError:
    """The error for a planner that did not end in time."""
    return PeerError(
        f"the planner did not halt within {limit_s:g} s: another rank goes on without this one, or "
        "the batches that lookahead reads are slower than that"
    )


_pipelines: weakref.WeakKeyDictionary[StepStream, World] = weakref.WeakKeyDictionary()
"""Those that a look-ahead holds, or their own threads, and their ranks."""


def _at_exit() -> None:
    """End the threads that still run; after an error say so, for the others wait in vain.

    A thread that computes while the interpreter goes away may take the process with it.
    """
    error, open_ones = getattr(sys, "last_value", None), list(_pipelines.items())
    if error is not None:
        for _, world in open_ones:
            record_failure(world.store, world.rank, error)
    for pipeline, world in open_ones:
        limit = min(world.timeout_s, STOP_S) if error is None else LEAVING_S
        if not pipeline.stop(limit, orderly=False):
            log.warning("a look-ahead's threads did not end within %g s", limit)


atexit.register(_at_exit)


# -----------------------------------------------------------------------------
# The cached tables behind a collection: stores, caches, planner, and the one step that is open.


class CachedTables:
    """Tables of one collection as rows in slots over the node's store.

    Called by all ranks of `world` in the same order, but for what says otherwise. One step at a
    time is open: `current`, the last whose rows were moved.
    """

    def __init__(
        self,
        world: World,
        tables: Sequence[TableSpec],
        lookups: Lookups,
        update: RowUpdate,
        settings: CacheSettings,
        name: str,
    ) -> None:
        """`name`: what the tables are behind, for messages."""
        self.world, self.tables, self.update, self.name = world, list(tables), update, name
        self.settings, self._lookups = settings, [self.tables[table] for table in lookups.tables]
        own = collection_values(name, self.tables, lookups, update, settings)
        self.fingerprint = zlib.crc32(repr(own).encode())
        agree_on_versions(world)
        agree_on(world, own | {"device": world.device.type})
        self.counters = CollectiveCounters(world.nodes, world.rank)
        self.link = Link(world, world.device_group, self.counters, "the device group")
        self.streams_of_device = streams = Streams(world.device)
        with library_words():
            parts = make_row_parts(
                self.link, self.tables, lookups.features, update, settings, streams
            )
            link = Link(world, world.planning_group, self.counters, "the planning group")
            self.planner = make_stream_planner(
                link, parts, settings, self.fingerprint, self._checked
            )
        self.groups, self.rows, self._warm = parts.groups, parts.rows, parts.warm
        self._movement = Mover(self.rows, self.link, streams, settings.dtype)
        self.current: OpenStep | None = None
        self.counts = [0] * len(self.tables)
        """Optimizer steps applied to each table so far: one that is frozen does not count."""
        self._agreed: Callable[[], Tensor] | None = None
        self.closed = False
        self._moved = -1
        self._ahead = False
        self._streams: list[weakref.ref[Epoch]] = []
        self.leaving: list[Runner] = []
        """Behind look-aheads that nobody holds any more; may still be ending."""
        self.show_leaves: Callable[[list[Tensor]], None] = lambda leaves: None
        """Called with the leaves of the current step, or [] when it has none any more."""

    def _checked(self, batch: Batch) -> Batch:
        """`batch` with every id inside its table; DataError names the one that is not."""
        rows, names = zip(*((table.rows, table.name) for table in self._lookups), strict=True)
        try:
            ids = check_ids(batch.ids, rows, names, on_bad_id=self.settings.on_bad_id)
        except DataError as error:  # where its samples lie among those of all ranks is not known
            text = str(error).replace("of the global batch", "of this rank's batch")
            raise DataError(text) from error
        return replace(batch, ids=ids)

    @property
    def steps(self) -> int:
        """Optimizer steps applied so far, to the table that had most."""
        return max(self.counts)

    # --- plans ------------------------------------------------------------------------------

    @property
    def streams(self) -> list[Epoch]:
        """The look-aheads that are alive and have not ended, the latest first."""
        alive = [stream for ref in reversed(self._streams) if (stream := ref()) is not None]
        return [stream for stream in alive if not stream.ended]

    def start_stream(self, stream: Epoch) -> None:
        """`stream` is about to plan ahead: the others halt, planning goes on from the device."""
        self.require_open()
        self.halt()
        self._streams = [weakref.ref(other) for other in (*reversed(self.streams),)]
        if stream not in self.streams:
            self._streams.append(weakref.ref(stream))
        self._settle()
        self._ahead = True

    def plan_inline(self, read: ReadIds, kind: str) -> Flight:
        """Plan one batch now (L = 0), with running look-aheads halted before; to be opened next."""
        self.halt()
        self._settle()
        try:
            with library_words():
                batch = as_batch([read], 0, kind)
                return next(self.planner.planned([batch], lambda: False, ahead=False))
        except BaseException:
            self._ahead = True
            raise

    def halt(self) -> None:
        """Stop every look-ahead's planner; its plans that have not moved are made again later."""
        end_left(self.leaving)
        for stream in self.streams:
            stream.halt()

    def quiet(self) -> None:
        """Between two steps: let no row move until the next batch; called by all ranks."""
        end_left(self.leaving)
        for stream in self.streams:
            stream.quiet()

    def _settle(self) -> None:
        """Planning goes on from what the device holds, without plans that did not move; local."""
        if self._ahead:
            rows = self.rows
            self.planner.restore(self._moved, lambda group, slots: rows[group].held_rows(slots))
        self._ahead = False

    # --- steps ------------------------------------------------------------------------------

    @property
    def moves_ahead(self) -> Mover | None:
        """What a look-ahead's own thread runs; none where the loop does it."""
        return self._movement if self.settings.schedule == "overlapped" else None

    def open(
        self, flight: Flight, reads: list[ReadIds], frozen: frozenset[int] = frozenset()
    ) -> OpenStep:
        """Make a planned step the current one, with its rows on the device.

        `frozen`: tables, by index, that it will not change, the same on all ranks: PlanError later
        where they are not.
        """
        self.end_current()
        if not flight.moved:
            flight.after = self.streams_of_device.mark(COMPUTE)
            self._movement.move(flight, TRAINING_LANE)
            flight.moved = True
        # The compute stream goes on after the rows are there.
        self.streams_of_device.after(COMPUTE, (flight.after,))
        for rows, counts in zip(self.rows, flight.counts, strict=True):
            rows.counts.add(counts)
        self._moved = flight.step
        self.current = OpenStep(flight, reads, self.groups, self._leaves, self._reduced, frozen)
        self._say_frozen(flight.step, frozen)
        return self.current

    # --- frozen tables ----------------------------------------------------------------------

    def _say_frozen(self, step: int, frozen: frozenset[int]) -> None:
        """Tell the other ranks which tables a step leaves as they are; `_check_frozen` listens.

        Over the host group, beside the step's work: nobody waits for it.
        """
        self._check_frozen()
        if self.world.size > 1:
            own = torch.zeros(len(self.tables), dtype=torch.uint8)
            own[list(frozen)] = 1
            what = f"the frozen tables of step {step}"
            self._agreed = host_link(self.world).start_all_gather(own, PLANNING, what)

    def _check_frozen(self) -> None:
        """PlanError, on all ranks, where they do not freeze the same tables in the open step.

        Comes before the step's first exchange that depends on it.
        """
        said, self._agreed = self._agreed, None
        if said is None:
            return
        by_rank = said().bool()
        differ = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        if differ:
            ranks = by_rank[:, differ[0]].nonzero().flatten().tolist()
            raise PlanError(
                f"table {self.tables[differ[0]].name!r} is frozen on rank(s) "
                f"{', '.join(map(str, ranks))} and not on the others: freeze() and "
                "requires_grad_(False) are called by all ranks before the same step"
            )

    def _classes(self, group: int, step: OpenStep) -> list[tuple[int, Tensor]] | None:
        """The places of a step's rows by their tables' step count, int64 on the CPU; under -1 those
        of frozen tables. None where all rows of the group are alike.

        A home knows the rows in its slots by number; the others hear of them, where they differ.
        """
        rows = self.rows[group]
        counts = [-1 if table in step.frozen else self.counts[table] for table in rows.group.tables]
        if len(set(counts)) == 1:
            return None
        kinds = sorted(set(counts))
        of_table = np.array([kinds.index(count) for count in counts], dtype=np.uint8)
        plan, world, layout = step.planned.plans[group], self.world, rows.group.layout
        mine = plan.home_slice(world.rank)
        named = rows.cache.slot_row[plan.slots[mine].numpy()]
        tables = np.searchsorted(layout.offsets, named, side="right") - 1
        own = torch.from_numpy(of_table[tables]).unsqueeze(1)
        if world.size > 1:
            what = f"tables of rows {plan.step}"
            own = to_all(self.link, plan, own.to(world.device), what).cpu()
        found = own.flatten()
        return [(kind, (found == at).nonzero().flatten()) for at, kind in enumerate(kinds)]

    def opened(self) -> OpenStep:
        """The current step."""
        if self.current is None:
            raise PlanError("no step is open")
        return self.current

    def end_current(self) -> None:
        """The current step ends; PlanError if its gradients were neither applied nor dropped."""
        step = self.current
        if step is None:
            return
        if step.pending:
            raise PlanError(
                f"step {step.number} has row gradients that were neither applied nor dropped: "
                "call ebc.step() (or ebc.optimizer.zero_grad()) before the next batch; to add up "
                "the gradients of k batches read them with lookahead(batches, ebc, accumulate=k)"
            )
        step.close()
        self.show_leaves([])
        self.current = None

    def _leaves(self, planned: Flight) -> list[Tensor]:
        leaves = [rows.leaf(plan) for rows, plan in zip(self.rows, planned.plans, strict=True)]
        self.show_leaves(leaves)
        return leaves

    def _reduced(self, step: OpenStep, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Row gradients summed over the ranks, then multiplied once by 1 / W if it is a mean; zero
        for the rows of frozen tables, so that nothing that looks at gradients counts them."""
        native, size = self.settings.reduction == "native", self.world.size
        self._check_frozen()
        end_left(self.leaving)
        for stream in self.streams:
            stream.settle()
        sums: list[Tensor | None] = []
        step.classes = []
        for group, (plan, gradient) in enumerate(zip(step.planned.plans, gradients, strict=True)):
            classes = None
            if gradient is not None:
                gradient = start_reduce_rows(self.link, plan, gradient, native)()
                if size > 1 and self.settings.gradient_reduction == "mean":
                    gradient.mul_(1.0 / size)
                classes = self._classes(group, step)
                for count, places in classes or []:
                    if count < 0:
                        gradient.index_fill_(0, places.to(gradient.device), 0.0)
            sums.append(gradient)
            step.classes.append(classes)
        return sums

    def apply(self, lr: float) -> None:
        """One optimizer step on the rows of the current step, if it has gradients."""
        step = self.current
        if step is None or not step.ready() or step.leaves is None:
            return
        parts = (self.rows, step.planned.plans, step.leaves, step.classes)
        for rows, plan, leaf, classes in zip(*parts, strict=True):
            if leaf.grad is None:
                continue
            if classes is None:
                rows.apply(plan, leaf.grad, (lr, self.counts[rows.group.tables[0]] + 1))
            for count, places in classes or []:
                if count >= 0 and len(places):
                    rows.apply(plan, leaf.grad, (lr, count + 1), only=places)
        for table in range(len(self.counts)):
            self.counts[table] += table not in step.frozen
        for leaf in step.leaves:
            leaf.grad = None
        step.close()
        self.show_leaves([])

    def forget_cached(self) -> None:
        """The store has changed under the cache: all rows are read anew; local."""
        for rows in self.rows:
            rows.cache.forget()
        self._ahead = True

    def warm_up(self) -> None:
        """Fill an empty cache with the most frequent rows, as far as statistics tell them."""
        warm_up(self._warm, self.rows, self.planner, self.link, self.streams_of_device, self._moved)

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks why this one will not come."""
        record_failure(self.world.store, self.world.rank, error)

    # --- the end ----------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise PlanError once closed."""
        if self.closed:
            raise PlanError(f"the {self.name} is closed: make a new one")

    def close(self) -> None:
        """Stop planning and let go of the tables; safe to call twice, on one rank alone too.

        While an exception is handled, the other ranks, which may not come, are not waited for long.
        """
        limit_s = STOP_S if sys.exc_info()[0] is None else LEAVING_S
        for stream in self.streams:
            stream.close(limit_s)
        for runner in self.leaving:
            runner.ended(limit_s)
        self.leaving.clear()
        self.closed = True
        if self.current is not None:
            self.current.close()
            self.current = None
        for rows in self.rows:
            if rows.store is not None:
                rows.store.close()


# -----------------------------------------------------------------------------
# Whole tables of a collection in original ids: to read after a flush, or to load.

Part = tuple[int, slice, Tensor]
"""Index of a table, columns, their new values `[rows, columns]`."""

_WAY_OUT = (
    "each node holds a copy of the whole tables while they are read this way: use nodes with more "
    "memory, or `distcache.fit`, whose checkpoints are written from each node's part"
)


class WholeTables:
    """The tables behind `tables`; every method is called by all ranks, but for what says
    otherwise."""

    def __init__(self, tables: CachedTables) -> None:
        tables.require_open()
        self._tables, self._world = tables, tables.world

    def views(
        self, states: bool = False
    ) -> Iterator[tuple[TableSpec, tuple[Tensor | None, Tensor | None]]]:
        """Flush; then each table with its weights `[rows, D]` and state `[rows, S]`.

        Views of the store on one node. On several nodes no store has a whole table: copies as of
        now, one on each node, that its ranks share; and of weights and `states` only what was
        asked for, the other is None. Raises MemoryTooSmallError where a node does not hold them.
        """
        self.flush()
        for index, table in enumerate(self._tables.tables):
            store, place = self._place(index)
            if store.part.is_whole:
                yield table, store.table(place)
            else:
                copy = self._copy(store, place, states)
                yield table, (None, copy) if states else (copy, None)

    def change_initial(self, table: int, seed: int, change: Callable[[Tensor], None]) -> None:
        """Let `change` have its way with a table's initial weights, `[rows, D]`; local, for the
        first rank of each node, before anything was trained.

        On several nodes with a whole table drawn anew, of which the node keeps its rows.
        """
        store, place = self._place(table)
        if store.part.is_whole:
            change(store.table(place)[0])
            return
        spec = self._tables.tables[table]
        require_memory(
            spec.rows * spec.dim * store.dtype.itemsize,
            f"the initial rows of table {spec.name!r}",
            "initialise it as its config does by itself, or use nodes with more memory",
        )
        drawn = initial_rows(seed, table, spec.rows, spec.dim, 0, spec.rows).to(store.dtype)
        change(drawn)
        _write(store, place, slice(None), drawn, False)

    def flush(self) -> None:
        """Bring every changed row to the store of its home's node."""
        self._tables.quiet()
        for rows in self._tables.rows:
            rows.flush()
        together(self._world, lambda: None)

    def load_weights(self, weights: Mapping[int, Tensor]) -> None:
        """Replace the weights of whole tables, by index; the cache starts empty again."""
        self._load([(index, slice(None), value) for index, value in weights.items()], False)

    def load_state(self, parts: Sequence[Part]) -> None:
        """Replace columns of the optimizer state of whole tables."""
        self._load(parts, True)

    def _load(self, parts: Sequence[Part], is_state: bool) -> None:
        tables = self._tables
        if tables.current is not None and tables.current.pending:
            raise PlanError("row gradients wait: call ebc.step() or zero_grad() before loading")
        tables.end_current()
        tables.halt()
        self.flush()

        def write() -> None:
            if self._world.local_rank:
                return
            for index, columns, value in parts:
                store, place = self._place(index)
                if not store.part.is_whole:
                    _write(store, place, columns, value, is_state)
                    continue
                target = store.table(place)[is_state]
                if target is not None and target.data_ptr() != value.data_ptr():
                    target[:, columns].copy_(value)

        with torch.no_grad():
            together(self._world, write)
        tables.forget_cached()
        tables.warm_up()

    def _place(self, table: int) -> tuple[RowStore, int]:
        """A table's store and its index there."""
        for rows in self._tables.rows:
            if table in rows.group.tables and rows.store is not None:
                return rows.store, rows.group.tables.index(table)
        raise PlanError(f"table {table} has no store")

    def _copy(self, store: RowStore, place: int, states: bool) -> Tensor | None:
        """A whole table's weights, or its state, in memory that this node's ranks share."""
        world, spec = self._world, store.layout.tables[place]
        width = store.state_width if states else spec.dim
        if not width:
            return None
        size = spec.rows * width * store.dtype.itemsize
        memory = SharedMemory.create(size, world, f"a copy of table {spec.name!r}", _WAY_OUT)
        copy = memory.tensor(0, (spec.rows, width), store.dtype)
        memory.close()  # from here on the tensor holds the mapping
        exchange = RowExchange(world, store)
        # The ranks of each node bring a part of the table each: every row to every node.
        ranges = [part for count in world.nodes.sizes for part in shares(spec.rows, count)]
        for ids in blocks(ranges, (spec.dim + store.state_width) * store.dtype.itemsize):
            own = ids[world.rank]
            found = exchange.bring(row_numbers(store, place, ids))[states]
            if found is not None:
                copy[own.start : own.stop] = found
        together(world, lambda: None)
        return copy


def _write(store: RowStore, table: int, columns: slice, values: Tensor, is_state: bool) -> None:
    """Columns of a whole table's `values` `[rows, columns]` to the rows that this node has."""
    target = store.state if is_state else store.weight
    rows = len(values)
    for (ids,) in blocks([range(rows)], store.layout.dim * store.dtype.itemsize):
        (numbers,) = row_numbers(store, table, [ids])
        own = store.part.holds(numbers)
        places = torch.from_numpy(store.part.places(numbers[own]))
        if target is not None:
            new = values[ids.start : ids.stop][torch.from_numpy(own)]
            target[places, columns] = new.to(target)
