"""The cached tables behind a collection: stores, caches, planner, and the one step that is open."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from distcache.comm.agree import agree_on
from distcache.comm.counters import CollectiveCounters
from distcache.comm.failure import record_failure
from distcache.comm.link import Link
from distcache.comm.versions import agree_on_versions
from distcache.comm.world import World
from distcache.coordinator import start_reduce_rows
from distcache.data.batch import Batch
from distcache.data.check import check_ids
from distcache.embedding import ahead
from distcache.embedding.ids import ReadIds
from distcache.embedding.micro import as_batch
from distcache.embedding.open_step import OpenStep
from distcache.embedding.parts import make_row_parts, make_stream_planner
from distcache.embedding.same import collection_values
from distcache.embedding.settings import CacheSettings, library_words
from distcache.embedding.tables import Lookups
from distcache.errors import DataError, PlanError
from distcache.layout import TableSpec
from distcache.optim.rows import RowUpdate
from distcache.pipeline.movement import Movement
from distcache.pipeline.planned import PlannedStep
from distcache.pipeline.schedule import InFlight, Stage, run_stages
from distcache.pipeline.warm import warm_up
from distcache.streams import COMPUTE, Streams

if TYPE_CHECKING:
    from distcache.embedding.stream import Lookahead


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
        self._movement = Movement(self.rows, self.link, streams, with_batch=False).stages
        self.current: OpenStep | None = None
        self.steps = 0
        """Optimizer steps applied so far."""
        self.closed = False
        self._moved = -1
        self._ahead = False
        self._streams: list[weakref.ref[Lookahead]] = []
        self.leaving: list[ahead.Runner] = []
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

    # --- plans ------------------------------------------------------------------------------

    @property
    def streams(self) -> list[Lookahead]:
        """The look-aheads that are alive and have not ended, the latest first."""
        alive = [stream for ref in reversed(self._streams) if (stream := ref()) is not None]
        return [stream for stream in alive if not stream.ended]

    def start_stream(self, stream: Lookahead) -> None:
        """`stream` is about to plan ahead: the others halt, planning goes on from the device."""
        self.require_open()
        self.halt()
        self._streams = [weakref.ref(other) for other in (*reversed(self.streams),)]
        if stream not in self.streams:
            self._streams.append(weakref.ref(stream))
        self._settle()
        self._ahead = True

    def plan_inline(self, read: ReadIds, kind: str) -> InFlight:
        """Plan one batch now (L = 0), with running look-aheads halted before; to be opened next."""
        self.halt()
        self._settle()
        try:
            with library_words():
                batch = as_batch([read], 0, kind)
                planned = next(self.planner.planned([batch], lambda: False, ahead=False))
                return InFlight(planned)
        except BaseException:
            self._ahead = True
            raise

    def halt(self) -> None:
        """Stop every look-ahead's planner; its plans that have not moved are made again later."""
        ahead.end_left(self.leaving)
        for stream in self.streams:
            stream.halt()

    def quiet(self) -> None:
        """Between two steps: let no row move until the next batch; called by all ranks."""
        ahead.end_left(self.leaving)
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
    def moves_ahead(self) -> tuple[Stage, ...]:
        """The stages that a look-ahead's own thread runs; none where the loop does it."""
        return self._movement if self.settings.schedule == "overlapped" else ()

    def open(self, flight: InFlight, reads: list[ReadIds]) -> OpenStep:
        """Make a planned step the current one, with its rows on the device."""
        self.end_current()
        if not flight.moved:
            flight.after = self.streams_of_device.mark(COMPUTE)
            run_stages(self._movement, flight, "training", self.streams_of_device)
            flight.moved = True
        # The compute stream goes on after the rows are there.
        self.streams_of_device.after(COMPUTE, (flight.after,))
        for rows, counts in zip(self.rows, flight.counts, strict=True):
            rows.counts.add(counts)
        self._moved = flight.step
        self.current = OpenStep(flight.planned, reads, self.groups, self._leaves, self._reduced)
        return self.current

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

    def _leaves(self, planned: PlannedStep) -> list[Tensor]:
        leaves = [rows.leaf(plan) for rows, plan in zip(self.rows, planned.plans, strict=True)]
        self.show_leaves(leaves)
        return leaves

    def _reduced(self, planned: PlannedStep, gradients: list[Tensor]) -> list[Tensor]:
        """Row gradients summed over the ranks, then multiplied once by 1 / W if it is a mean."""
        native, size = self.settings.reduction == "native", self.world.size
        ahead.end_left(self.leaving)
        for stream in self.streams:
            stream.settle()
        sums = [
            start_reduce_rows(self.link, plan, gradient, native)()
            for plan, gradient in zip(planned.plans, gradients, strict=True)
        ]
        if size > 1 and self.settings.gradient_reduction == "mean":
            for gradient in sums:
                gradient.mul_(1.0 / size)
        return sums

    def apply(self, lr: float) -> None:
        """One optimizer step on the rows of the current step, if it has gradients."""
        step = self.current
        if step is None or not step.ready() or step.leaves is None:
            return
        self.steps += 1
        for rows, plan, leaf in zip(self.rows, step.planned.plans, step.leaves, strict=True):
            if leaf.grad is not None:
                rows.apply(plan, leaf.grad, (lr, self.steps))
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
        limit_s = ahead.STOP_S if sys.exc_info()[0] is None else ahead.LEAVING_S
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
