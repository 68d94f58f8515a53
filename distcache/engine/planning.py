"""The look-ahead planner at work: batches in, planned steps out, on a thread of its own."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distcache.comm.failure import failure_of_others, record_failure
from distcache.comm.link import Link
from distcache.data.batch import UNKNOWN, Batch
from distcache.engine.exchange import Asking, Decided, Deciding, PlanExchange, Status, Told, Verdict
from distcache.engine.groups import TableGroup, group_bags
from distcache.engine.room import Region, requests_of, sharded_part, too_large
from distcache.engine.step import Flight, Span, spanned
from distcache.errors import ConfigError, PeerError
from distcache.planner.assemble import HomePart, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision
from distcache.planner.shard import HotRows, nothing
from distcache.step_plan import StepPlan, check_plan, check_plan_fully


@dataclass(frozen=True)
class PlanningSettings:
    """L, P, the dtype of weights, whether to check every law, and a number that must agree on all
    ranks; `prepare` checks a batch (raising DataError) before anything is sent; `early`: sharded
    rows may travel before their step."""

    lookahead: int
    prefetch: int
    dtype: torch.dtype
    validate: bool = False
    fingerprint: int = 0
    prepare: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    early: bool = False


# -----------------------------------------------------------------------------
# From what the homes decided about a step to one rank's plans of it, group by group.


class RankPlans:
    """One rank's plans, step after step. `regions`: of all groups; `slots`: C per group, or None
    where the buffer grows; `size`: W."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        regions: Sequence[Region],
        slots: Sequence[int | None],
        settings: PlanningSettings,
        size: int,
    ) -> None:
        self._regions, self._slots = list(regions), list(slots)
        self._settings, self._size = settings, size
        self._move_after = [-1] * len(groups)

    def restore(self, step: int) -> None:
        """Go on after `step`: nothing moves before it has been applied."""
        self._move_after = [step] * len(self._move_after)

    def of(self, entry: Flight, decided: Decided, own: Sequence[HomeDecision]) -> list[StepPlan]:
        """The checked plans of a step on which all homes decided, by group. `own`: the decisions of
        this rank's home, by region."""
        plans = []
        for group, slots in enumerate(self._slots):
            plan = self._plan(group, entry, decided, own)
            if self._settings.validate:
                check_plan_fully(plan, slots)
            else:
                check_plan(plan)
            plans.append(plan)
        return plans

    def _plan(
        self, group: int, entry: Flight, decided: Decided, own: Sequence[HomeDecision]
    ) -> StepPlan:
        """The plan of one group from the decisions on its regions."""
        places = [place for place, region in enumerate(self._regions) if region.group == group]
        latest, before = [decided.latest_use[p] for p in places], self._move_after[group]
        move_after = next_move_after(entry.step, self._settings.prefetch, latest, before)
        self._move_after[group] = move_after
        mine, sharded = nothing((entry.step, entry.batch.kind), self._size), None
        parts = [HomePart(mine.slots, mine.fetch, mine.slots)] * self._size
        for place in places:
            if self._regions[place].sharded:
                sharded = sharded_part(place, decided, own[place], self._settings.early)
            else:
                parts, mine = decided.parts[place], own[place]
        return assemble(entry.requests[group], parts, mine, move_after, sharded)


# -----------------------------------------------------------------------------
# The look-ahead planner at work: batches in, planned steps out, on a thread of its own.
#
# All ranks run the same loop over the planning group. A step is decided exactly when the ids
# through
# step + L are known or the stream has ended, never from what happens to have arrived; the homes
# tell
# their decisions in the exchange that brings the rows of the step after those.

log = logging.getLogger(__name__)

LANE = "planner"
"""Where planning runs, for spans."""

_POLL_S = 0.1
"""How often a waiting thread looks whether it should stop."""

_MOST = 2**31 - 1
"""Slots and the rows of a home are int32 in the index and on the wire."""

_LEAVING_S = 2.0
"""How long a rank that another one leaves behind waits for a reason, seconds."""


class StreamPlanner:
    """Plans streams of batches for the groups of one model; one home per rank and region.

    `regions`: of all groups, in their order; `slots`: C per group, or None where the buffer grows
    (mode `host`).
    """

    def __init__(
        self,
        link: Link,
        groups: Sequence[TableGroup],
        regions: Sequence[Region],
        slots: Sequence[int | None],
        settings: PlanningSettings,
    ) -> None:
        for group, count in zip(groups, slots, strict=True):
            if max(group.layout.local_rows, count or 0) > _MOST:
                raise ConfigError(
                    f"{group.layout.rows} rows of width {group.dim} in {count} slots: plans number "
                    f"slots, and the rows of one home, up to {_MOST}; use more ranks or fewer slots"
                )
        self.link, self.groups, self.regions = link, list(groups), list(regions)
        self.slots, self.settings = list(slots), settings
        self.ingested = 0
        """Steps whose ids are known to all homes; the last of them may be undecided."""
        self.alone = False  # whether planning failed where other ranks go on
        sharded = [place for place, region in enumerate(self.regions) if region.sharded]
        self._exchange = PlanExchange(link, len(self.regions), settings.fingerprint, sharded)
        self._plans = RankPlans(groups, regions, slots, settings, link.world.size)
        self._hot = [None if group.hot is None else HotRows(group.hot) for group in self.groups]

    def planned(
        self, batches: Iterable[Batch], stop: Callable[[], bool], ahead: bool = True
    ) -> Iterator[Flight]:
        """Plans of `batches` in order, until the first rank ends, stops or fails.

        `ahead=False` uses a window of L = 0 (planning inline). Raises what went wrong, on every
        rank after the same step.
        """
        window = self.settings.lookahead if ahead else 0
        waiting: deque[Flight] = deque()
        iterator = iter(batches)
        failure: BaseException | None = None
        while True:
            # Without a window nothing is read beyond the step that is decided.
            due = waiting.popleft() if len(waiting) > window > 0 else None
            asking, entry = self._ask(iterator, stop())
            verdict, planned = self._exchanged(asking, entry, due)
            if verdict.status is Status.STOP:
                self._after_stop(verdict, stop)
                return
            if planned is not None:
                yield planned
            if entry is None or verdict.status is not Status.OK:
                failure = self._why_ended(asking, verdict)
                if due is not None and planned is None:  # one rank failed, and one stops
                    waiting.clear()
                break
            waiting.append(entry)
            if window == 0:
                yield self._decide(waiting.popleft())
        while waiting:
            yield self._decide(waiting.popleft())
        if failure is not None:
            raise failure

    def restore(self, step: int, held: Callable[[int, slice], np.ndarray]) -> None:
        """Forget undecided and unmoved plans: go on after `step` from what the device holds.

        `held(group, slots)`: the rows in these slots of a group, int64, -1 for none.
        """
        self.ingested = step + 1
        self._plans.restore(step)
        for region in self.regions:
            region.planner.restore(held(region.group, region.planner.own_slots), step)

    def _ask(self, iterator: Iterator[Batch], stop: bool) -> tuple[Asking, Flight | None]:
        """This rank's part of the next step: the rows of its batch, or why there is none."""
        started = time.perf_counter()
        status, error, entry = (Status.STOP, None, None) if stop else self._next(iterator)
        if entry is None:
            return Asking(self.ingested, status, error=error), None
        batch, requests = entry.batch, requests_of(self.regions, entry.requests)
        entry.spans.append(Span("ingest", LANE, entry.step, started, time.perf_counter()))
        about = (batch.kind, batch.index, batch.ids.batch_size)
        return Asking(entry.step, status, *about, requests), entry

    def _exchanged(
        self, asking: Asking, entry: Flight | None, due: Flight | None
    ) -> tuple[Verdict, Flight | None]:
        """Bring the rows of `entry`, if all ranks have some, to their homes, and decide `due`: what
        all ranks say of the first, and the plan of the second unless one of them stops."""
        deciding = None
        if due is not None and asking.status is Status.STOP:
            deciding = Deciding(due.step, Status.STOP)
        elif due is not None:
            deciding = self._deciding(due)
        told = self._talk(asking, deciding, due or entry)
        verdict = told.asked
        if verdict is None:
            raise RuntimeError("an exchange told nothing of what it asked")
        if verdict.status is Status.OK and entry is not None:
            entry.planning_bytes = told.sent
            self._ingest(entry, told)
        planned = None
        if due is not None and deciding is not None and told.decided is not None:
            planned = self._planned(due, deciding, told.decided)
        return verdict, planned

    def _talk(self, asking: Asking | None, deciding: Deciding | None, about: Flight | None) -> Told:
        """One exchange, whose time is told with step `about`."""
        spans, step = ([], -1) if about is None else (about.spans, about.step)
        with spanned(spans, "plan_exchange", LANE, step):
            return self._exchange.exchange(asking, deciding)

    def _ingest(self, entry: Flight, told: Told) -> None:
        """Take in what all ranks name of this home's rows."""
        with spanned(entry.spans, "ingest", LANE, entry.step):
            for region, by_rank in zip(self.regions, told.named, strict=True):
                region.planner.ingest(entry.step, entry.batch.kind, by_rank)
            if entry.batch.global_size == UNKNOWN:
                entry.batch = entry.batch.among(told.samples, self.link.world.rank)
        self.ingested += 1

    def _why_ended(self, asking: Asking, verdict: Verdict) -> BaseException | None:
        """What to raise once the steps before the end are planned."""
        if verdict.status is Status.ERROR:
            return asking.error or _peer_error(verdict)
        if asking.status is Status.OK:
            log.warning(
                "the data of %s ended after %d batches, this rank's did not: all ranks end there",
                ", ".join(f"rank {rank}" for rank in verdict.ranks),
                asking.step,
            )
        return None

    def _next(
        self, iterator: Iterator[Batch]
    ) -> tuple[Status, BaseException | None, Flight | None]:
        """The next local batch as rows, or END, or what went wrong with it."""
        try:
            batch = next(iterator)
        except StopIteration:
            return Status.END, None, None
        except Exception as error:
            return Status.ERROR, error, None
        try:
            batch = self.settings.prepare(batch)
            bags = [group_bags(group, batch.ids, self.settings.dtype) for group in self.groups]
            requests = [
                make_request(group.layout, bag.rows, hot)
                for group, bag, hot in zip(self.groups, bags, self._hot, strict=True)
            ]
        except Exception as error:
            return Status.ERROR, error, None
        return Status.OK, None, Flight(self.ingested, batch, bags, requests)

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

    def _decide(self, entry: Flight) -> Flight:
        """Decide one step with all other homes, and nothing else."""
        deciding = self._deciding(entry)
        told = self._talk(None, deciding, entry)
        entry.planning_bytes += told.sent
        if told.decided is None:
            raise RuntimeError(f"an exchange told nothing of step {entry.step}")
        return self._planned(entry, deciding, told.decided)

    def _deciding(self, entry: Flight) -> Deciding:
        """This home's part of the decisions on a step."""
        with spanned(entry.spans, "load", LANE, entry.step):
            load_error = self._load(entry)
        with spanned(entry.spans, "plan", LANE, entry.step):
            rows = [region.planner.due_rows for region in self.regions]
            own, status, error = self._decide_home(rows, load_error)
        requests = requests_of(self.regions, entry.requests)
        return Deciding(entry.step, status, rows, own, requests, error)

    def _planned(self, entry: Flight, deciding: Deciding, decided: Decided) -> Flight:
        """The plan of a step; raises on every rank if one of the homes could not decide it."""
        if decided.verdict.status is Status.TOO_LARGE:
            kind = entry.batch.kind
            raise too_large(entry.step, kind, self.groups, decided.rows, self.regions)
        if decided.verdict.status is not Status.OK:
            raise deciding.error or _peer_error(decided.verdict)
        try:
            with spanned(entry.spans, "plan", LANE, entry.step):
                entry.plans = self._plans.of(entry, decided, deciding.decisions)
                entry.move_after = max(plan.move_after for plan in entry.plans)
        except BaseException as error:  # after all have agreed to go on
            self.alone = True
            record_failure(self.link.world.store, self.link.world.rank, error)
            raise
        entry.planning_bytes += decided.sent
        entry.requests = []
        return entry

    def _load(self, entry: Flight) -> Exception | None:
        """Read the batch's dense features and labels; what went wrong with that."""
        try:
            entry.batch = entry.batch.loaded()
        except Exception as error:
            return error
        return None

    def _decide_home(
        self, rows: Sequence[int], error: Exception | None
    ) -> tuple[list[HomeDecision], Status, BaseException | None]:
        """This home's decisions; none, and why, if it has too few slots for `rows` or fails, or
        where its batch could not be loaded (`error`)."""
        if any(count > of.planner.slots for count, of in zip(rows, self.regions, strict=True)):
            return [], Status.TOO_LARGE, None
        if error is not None:
            return [], Status.ERROR, error
        try:
            decided = [region.planner.plan() for region in self.regions]
            return decided, Status.OK, None
        except Exception as failure:
            return [], Status.ERROR, failure


def _peer_error(verdict: Verdict) -> PeerError:
    return PeerError(f"stopped because rank {verdict.ranks[0]} failed: {verdict.message}")
