"""The look-ahead planner at work: batches in, planned steps out, on a thread of its own.

Where several threads plan, one of them reads the next batch, and finds what it names, while this
one plans the step before.
All ranks run the same loop over the planning group. A step is decided exactly when the ids through
step + L are known or the stream has ended, never from what happens to have arrived; the homes tell
their decisions in the exchange that brings the rows of a later step. With several ranks and a
window a thread beside the planner exchanges the rows of one step, and decisions, while the planner
takes in those of the step before and decides the next; so these are told one exchange later.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from distcache.comm.link import Link
from distcache.comm.rendezvous import failure_of_others, record_failure
from distcache.comm.world import World
from distcache.data.batch import UNKNOWN, Batch
from distcache.engine.exchange import ExchangeReply, Part, PlanExchange, Status, Verdict
from distcache.engine.groups import (
    Region,
    RegionSlots,
    TableGroup,
    TableSettings,
    group_bags,
    too_large,
)
from distcache.engine.step import StepContext
from distcache.errors import ConfigError, PeerError, on_all_ranks
from distcache.planner.home import HomePlanner, Parts
from distcache.planner.rank import HomePart, RankPlanner, next_move_after
from distcache.planner.shard import ShardParts, nothing
from distcache.planner.threads import ALONE, Threads
from distcache.planner.victims import Policy
from distcache.step_plan import StepPlan, check_plan, check_plan_fully

log = logging.getLogger(__name__)

LANE, READING_LANE, TALKING_LANE = "planner", "reading", "talking"
"""Where planning runs, what a thread beside it reads ahead, and what another exchanges with the
other ranks, for spans."""

_POLL_S = 0.1
"""How often a waiting thread looks whether it should stop."""

MOST_THREADS = 8
"""Planner threads of `auto`. On a machine with 16 cores and an H100, 8 planned as fast as 16."""

_MOST = 2**31 - 1
"""Slots and the rows of a home are int32 in the index and on the wire."""

_LEAVING_S = 2.0
"""How long a rank that another one leaves behind waits for a reason, seconds."""


class Talk(NamedTuple):
    """An exchange that is over: this rank's part of what was asked for and of what is decided, and
    what it told."""

    asking: Part | None
    deciding: Part | None
    told: ExchangeReply


def home_regions(
    placed: Sequence[tuple[TableGroup, RegionSlots]],
    rank: int,
    prefetch: int,
    policy: Policy,
    popularity: Sequence[np.ndarray | None],
) -> list[Region]:
    """The regions of all groups, with the planners of this rank's homes.

    `popularity`: for each group, the class of each row of this rank's home (uint8), or None.
    """
    regions: list[Region] = []
    for place, ((group, slots), classes) in enumerate(zip(placed, popularity, strict=True)):
        layout, own = group.layout, slots.own_replicated(rank, group.layout.world_size)
        parts: list[tuple] = [(layout, own, classes)]
        if (hot := group.hot_rows) is not None:
            rated = None if classes is None else hot.rated(rank, layout, classes)
            parts = [(hot, own, rated)] if len(hot.rows) else []
            parts.append((layout, slots.own_sharded, classes))
        for numbers, at, rates in parts:
            how = (at.stop - at.start, prefetch, policy, rates, at.start)
            sharded = hot is not None and numbers is layout
            regions.append(Region(place, HomePlanner(numbers, rank, *how), sharded))
    return regions


def planner_threads(given: int | str, world: World) -> int:
    """Return the number of threads that plan on this rank: `given`, or a choice for `auto`.

    `auto`: with a GPU the rank's share of the cores, at most `MOST_THREADS`; without one, 1,
    because training needs the cores. Raises ConfigError for more threads than cores.
    """
    cores = len(os.sched_getaffinity(0))
    if given == "auto":
        share = cores // world.local_size if world.device.type == "cuda" else 1
        return min(max(1, share), MOST_THREADS)
    if int(given) > cores:
        raise ConfigError(
            f"trainer.planner_threads={given} is more than the {cores} core(s) that this process "
            f"may use: give at most {cores}, or auto"
        )
    return int(given)


class StreamPlanner:
    """Plans streams of batches for the groups of one model; one home per rank and region.

    `regions`: of all groups, in their order; `slots`: C per group, or None where the buffer grows
    (mode `host`); `prepare` checks a batch (raising DataError) before anything is sent.
    """

    def __init__(
        self,
        link: Link,
        groups: Sequence[TableGroup],
        regions: Sequence[Region],
        slots: Sequence[int | None],
        settings: TableSettings,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
        threads: Threads | None = None,
    ) -> None:
        """`threads`: None: as many as the settings say."""
        for group, count in zip(groups, slots, strict=True):
            if max(group.layout.local_rows, count or 0) > _MOST:
                raise ConfigError(
                    f"{group.layout.rows} rows of width {group.dim} in {count} slots: plans number "
                    f"slots, and the rows of one home, up to {_MOST}; use more ranks or fewer slots"
                )
        self.link, self.groups, self.regions = link, list(groups), list(regions)
        self.slots, self.settings, self._prepare = list(slots), settings, prepare
        self.ingested = 0
        """Steps whose ids are known to all homes; the last of them may be undecided."""
        self.alone = False  # whether planning failed where other ranks go on
        sharded = [place for place, region in enumerate(self.regions) if region.sharded]
        shelves = [1 << region.planner.parts.shelves for region in self.regions]
        self._exchange = PlanExchange(link, shelves, settings.fingerprint, sharded)
        self._move_after = [-1] * len(self.groups)
        self._early = settings.shares_early(link.world)
        self.threads = threads or Threads(settings.planner_threads)
        # On all ranks or none, whatever their threads: an exchange that has begun waits for no
        # place in another rank's queue then, which may take as long as a checkpoint.
        self._talking = Threads(min(link.world.size, 2), "distcache-talk")
        parts: list[list[Parts | None]] = [[None, None] for _ in groups]
        for region in regions:
            region.planner.threads = self.threads
            parts[region.group][region.sharded] = region.planner.parts
        pinned = link.world.device.type == "cuda"
        self._ranks = [
            RankPlanner(group.layout, group.hot_rows, of, self.threads, pinned)
            for group, of in zip(groups, parts, strict=True)
        ]
        """What this rank does for each group."""

    def planned(
        self, batches: Iterable[Batch], stop: Callable[[], bool], ahead: bool = True
    ) -> Iterator[StepContext]:
        """Plans of `batches` in order, until the first rank ends, stops or fails.

        `ahead=False` uses a window of L = 0 (planning inline). Raises what went wrong, on every
        rank after the same step.
        """
        window = self.settings.lookahead if ahead else 0
        # Without a window nothing is read beyond the step that is decided.
        reading, talking = (self.threads, self._talking) if window else (ALONE, ALONE)
        asked = self._asked(batches, stop, reading)
        early = window > 0 and self.link.world.size > 1
        waiting: deque[StepContext] = deque()
        ready, failure = None, None
        talk = self._begun(talking, next(asked), None)
        while talk is not None:
            over = talk()
            if over.told.asked.status is Status.STOP:
                return self._after_stop(over.told.asked, stop)
            self._require_decided(over)
            if over.told.asked.status is not Status.OK:
                failure = self._why_ended(over)
                asked.close()
                window, early = 0, False
            if early:  # several ranks exchange the next rows while each works on these
                talk, ready = self._begun(talking, next(asked), ready), None
            planned = self._planned(over)
            waiting += self._taken_in(over, len(waiting) >= window > 0)
            yield from planned
            if ready is None and len(waiting) > window:
                ready = self._deciding(waiting.popleft())
            if not early:
                asking = next(asked, None) if window > 0 or ready is None else None
                talk, ready = self._begun(talking, asking, ready), None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait until no batch is being read any more, and no exchange made."""
        self.threads.settle()
        self._talking.settle()

    def runs_here(self) -> bool:
        """Whether the caller is a thread beside the one that plans."""
        return self.threads.run_here() or self._talking.run_here()

    def close(self) -> None:
        """End its threads."""
        self.threads.close()
        self._talking.close()

    def restore(self, step: int, held: Callable[[int, slice], np.ndarray]) -> None:
        """Forget undecided and unmoved plans: go on after `step` from what the device holds.

        `held(group, slots)`: the rows in these slots of a group, int64, -1 for none.
        """
        self.ingested = step + 1
        self._move_after = [step] * len(self.groups)  # nothing moves before it has been applied
        for region in self.regions:
            region.planner.restore(held(region.group, region.planner.own_slots), step)

    # --- a step is asked for -----------------------------------------------------------------

    def _asked(
        self, batches: Iterable[Batch], stop: Callable[[], bool], threads: Threads
    ) -> Iterator[Part]:
        """This rank's part of each step, up to the first without rows; the next is made meanwhile,
        where there is a thread for it."""
        iterator = chain.from_iterable([batches])  # which the thread that reads makes, too
        ask = partial(threads.begin, self._ask, iterator, stop)
        part, asked = None, ask(self.ingested)
        while part is None or part.context is not None:
            part = asked()
            if stop():  # while it was read
                part = Part(part.step, Status.STOP)
            if part.context is not None:
                asked = ask(part.step + 1)
            yield part

    def _read(self, iterator: Iterator[Batch], step: int) -> Batch | Part:
        """The next batch, or why there is none."""
        try:
            return next(iterator)
        except StopIteration:
            return Part(step, Status.END)
        except Exception as error:
            return Part(step, Status.ERROR, error=error)

    def _ask(self, iterator: Iterator[Batch], stop: Callable[[], bool], step: int) -> Part:
        """This rank's part of `step`, the next: the rows of its batch, or why there is none."""
        began = time.perf_counter()
        read = Part(step, Status.STOP) if stop() else self._read(iterator, step)
        if isinstance(read, Part):
            return read
        try:
            batch = self._prepare(read)
            bags = [group_bags(group, batch.ids, self.settings.dtype) for group in self.groups]
            requests = [
                rank.request(bag.ids, bag.pieces)
                for rank, bag in zip(self._ranks, bags, strict=True)
            ]
        except Exception as error:
            return Part(step, Status.ERROR, error=error)
        context = StepContext(step, batch, bags, requests)
        for region in self.regions:
            request = requests[region.group]
            context.asked.append(request.sharded if region.sharded else request.replicated)
        context.note("ingest", READING_LANE if self.threads.run_here() else LANE, began)
        return Part(step, context=context)

    def _begun(
        self, threads: Threads, asking: Part | None, ready: Part | None
    ) -> Callable[[], Talk] | None:
        """The exchange of what is asked for and of decisions, if there are any: made meanwhile,
        where there is a thread for it, or else when it is wanted. A rank that stops says so of
        both."""
        if asking is None and ready is None:
            return None
        if ready is not None and asking is not None and asking.status is Status.STOP:
            ready = replace(ready, status=Status.STOP, decisions=())
        return threads.begin(self._exchanged, asking, ready)

    def _exchanged(self, asking: Part | None, deciding: Part | None) -> Talk:
        """Bring the rows of what is asked for, if all ranks have some, to their homes, and the
        decisions of this one to all, whose batch is read before; if it cannot be, there are none.
        """
        lane = TALKING_LANE if self._talking.run_here() else LANE
        asked, due = (part and part.context for part in (asking, deciding))
        if due is not None and deciding is not None and deciding.status is Status.OK:
            began = time.perf_counter()
            try:
                due.batch = due.batch.loaded()
            except Exception as error:
                deciding = replace(deciding, status=Status.ERROR, error=error, decisions=())
            due.note("load", lane, began)
        began = time.perf_counter()
        told = self._exchange.exchange(asking, deciding)
        counted = due if asking is None else asked
        if counted is not None and told.asked.status is Status.OK:
            counted.planning_bytes += told.sent
        if (about := due or asked) is not None:
            about.note("plan_exchange", lane, began)
        return Talk(asking, deciding, told)

    def _taken_in(self, over: Talk, decide: bool) -> list[StepContext]:
        """The step that was asked for, if all ranks have one: what all of them name of this home's
        rows is known then. `decide`: the oldest step before it is the next to be decided."""
        asking, _, told = over
        if asking is None or asking.context is None or told.asked.status is not Status.OK:
            return []
        context, alone = asking.context, self.link.world.size == 1
        began = time.perf_counter()
        for region, *named in zip(self.regions, told.named, told.counts, strict=True):
            region.planner.ingest(context.step, context.batch.kind, *named, decide, once=alone)
        if context.batch.global_size == UNKNOWN:
            context.batch = context.batch.among(told.samples, self.link.world.rank)
        context.note("ingest", LANE, began)
        self.ingested += 1
        return [context]

    def _why_ended(self, over: Talk) -> BaseException | None:
        """What to raise once the steps before the end are planned. Raises it where one rank stops,
        with which none is decided any more."""
        verdict, failure = over.told.asked, None
        if verdict.status is Status.ERROR:
            failure = on_all_ranks(over.asking.error or _peer_error(verdict))
            if over.deciding is not None and over.told.decided is None:
                raise failure
        elif over.asking.status is Status.OK:
            log.warning(
                "the data of %s ended after %d batches, this rank's did not: all ranks end there",
                ", ".join(f"rank {rank}" for rank in verdict.ranks),
                over.asking.step,
            )
        return failure

    def _after_stop(self, verdict: Verdict, stop: Callable[[], bool]) -> None:
        """Return once this rank stops as well; PeerError if it does not, as another one failed
        or left the stream alone."""
        world, deadline = self.link.world, time.monotonic() + _LEAVING_S
        while not stop() and time.monotonic() < deadline:
            failure = failure_of_others(world.store, world.rank)
            if failure is not None:
                raise PeerError(failure.message)
            time.sleep(_POLL_S)
        if not stop():
            raise PeerError(
                f"rank {verdict.ranks[0]} stopped reading its stream after {self.ingested} "
                f"batches, but rank {world.rank} goes on: stop all ranks after the same step"
            )

    # --- a step is decided -------------------------------------------------------------------

    def _deciding(self, context: StepContext) -> Part:
        """This home's part of the decisions on a step: none, and why, if it has too few slots, or
        fails."""
        began, error, status, decisions = time.perf_counter(), None, Status.OK, []
        planners = [region.planner for region in self.regions]
        rows = [planner.due_rows for planner in planners]
        if any([count > of.slots for count, of in zip(rows, planners, strict=True)]):
            status = Status.TOO_LARGE
        else:
            try:
                decisions = [planner.plan() for planner in planners]
            except Exception as caught:
                status, error = Status.ERROR, caught
        context.note("plan", LANE, began)
        return Part(context.step, status, context, error, rows, decisions)

    def _require_decided(self, over: Talk) -> None:
        """Raise on every rank if one of the homes could not decide a step."""
        _, deciding, told = over
        if deciding is None or told.decided is None:
            return
        if told.decided.status is Status.TOO_LARGE:
            kind = deciding.context.batch.kind
            error = too_large(deciding.step, kind, self.groups, told.rows, self.regions)
            raise on_all_ranks(error)
        if told.decided.status is not Status.OK:
            raise on_all_ranks(deciding.error or _peer_error(told.decided))

    def _planned(self, over: Talk) -> list[StepContext]:
        """The step that all homes have decided, if there is one, with its plans."""
        _, deciding, told = over
        if deciding is None or told.decided is None:
            return []
        context = deciding.context
        try:
            began = time.perf_counter()
            for group, slots in enumerate(self.slots):
                plan = self._plan(group, context, deciding, told)
                if self.settings.validate:
                    check_plan_fully(plan, slots)
                else:
                    check_plan(plan)
                context.plans.append(plan)
                context.move_after = max(context.move_after, plan.move_after)
            context.note("plan", LANE, began)
        except BaseException as error:  # after all have agreed to go on
            self.alone = True
            record_failure(self.link.world.store, self.link.world.rank, error)
            raise
        context.planning_bytes += told.decision_bytes
        context.requests, context.asked = [], []
        return [context]

    def _plan(
        self, group: int, context: StepContext, deciding: Part, told: ExchangeReply
    ) -> StepPlan:
        """The plan of one group from the decisions on its regions."""
        size, prefetch, sharded = self.link.world.size, self.settings.prefetch, None
        places = [place for place, region in enumerate(self.regions) if region.group == group]
        latest = [told.latest_use[place] for place in places]
        move_after = next_move_after(context.step, prefetch, latest, self._move_after[group])
        self._move_after[group] = move_after
        mine, parts = None, []
        for place in places:
            own, by_home = deciding.decisions[place], told.parts[place]
            if not self.regions[place].sharded:
                mine, parts = own, by_home
                continue
            sharded = ShardParts(
                own,
                tuple([part.reply for part in by_home]),
                int(told.rows[:, place].sum()),
                int(told.fetched[:, place].sum()),
                self._early,
            )
        if mine is None:  # all rows are sharded
            mine = nothing((context.step, context.batch.kind), size)
            parts = [HomePart(mine.told, mine.slots)] * size
        request = context.requests[group]
        return self._ranks[group].assemble(request, parts, mine, move_after, sharded)


def _peer_error(verdict: Verdict) -> PeerError:
    return PeerError(f"stopped because rank {verdict.ranks[0]} failed: {verdict.message}")
