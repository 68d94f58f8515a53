"""The look-ahead planner at work: batches in, planned steps out, on a thread of its own.

All ranks run the same loop over the planning group; each iteration ingests one step and, once its
window is known, decides the oldest one. A step is decided exactly when the ids through step + L
are known or the stream has ended, never from what happens to have arrived.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from distcache.comm.failure import failure_of_others, record_failure
from distcache.comm.link import Link
from distcache.data.batch import Batch
from distcache.errors import ConfigError, PeerError
from distcache.pipeline.clock import Span, spanned
from distcache.pipeline.exchange import Decided, PlanExchange, Status, Verdict
from distcache.pipeline.groups import GroupBags, TableGroup, group_bags
from distcache.pipeline.room import too_large
from distcache.pipeline.sizes import agree_on_size
from distcache.pipeline.split import HotSamples, StepPart, split_step
from distcache.planner.assemble import Request, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision, Planner
from distcache.step_plan import StepPlan, check_plan, check_plan_fully

log = logging.getLogger(__name__)

LANE = "planner"
"""Where planning runs, for spans."""

_POLL_S = 0.1
"""How often a waiting thread looks whether it should stop."""

_MOST = 2**31 - 1
"""Slots and the rows of a home are int32 in the index and on the wire."""

_LEAVING_S = 2.0
"""How long a rank that another one leaves behind waits for a reason, seconds."""


@dataclass(frozen=True)
class PlannedStep:
    """A batch, its bags and plans by group, its hot and its cold part if steps are split, and when
    its planning ran."""

    step: int
    batch: Batch
    bags: list[GroupBags]
    plans: list[StepPlan]
    spans: list[Span]
    planning_bytes: int = 0
    parts: tuple[StepPart, ...] = ()


@dataclass
class _Waiting:
    """An ingested step whose window is not complete yet."""

    step: int
    batch: Batch
    bags: list[GroupBags]
    requests: list[Request]
    spans: list[Span] = field(default_factory=list)
    planning_bytes: int = 0


@dataclass(frozen=True)
class PlanningSettings:
    """L, P, the dtype of weights, whether to check every law, and a number that must agree on all
    ranks; `prepare` checks a batch (raising DataError) before anything is sent; `hot` splits
    training steps, see `pipeline.split`."""

    lookahead: int
    prefetch: int
    dtype: torch.dtype
    validate: bool = False
    fingerprint: int = 0
    prepare: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    hot: HotSamples | None = None


class StreamPlanner:
    """Plans streams of batches for the groups of one model; one home per rank and group.

    `slots`: C per group, or None where the buffer grows (mode `host`).
    """

    def __init__(
        self,
        link: Link,
        groups: Sequence[TableGroup],
        planners: Sequence[Planner],
        slots: Sequence[int | None],
        settings: PlanningSettings,
    ) -> None:
        for group, count in zip(groups, slots, strict=True):
            if max(group.layout.local_rows, count or 0) > _MOST:
                raise ConfigError(
                    f"{group.layout.rows} rows of width {group.dim} in {count} slots: plans number "
                    f"slots, and the rows of one home, up to {_MOST}; use more ranks or fewer slots"
                )
        self.link, self.groups, self.planners = link, list(groups), list(planners)
        self.slots, self.settings = list(slots), settings
        self.ingested = 0
        """Steps whose ids are known to all homes; the last of them may be undecided."""
        self.alone = False  # whether planning failed where other ranks go on
        self._exchange = PlanExchange(link, len(self.groups), settings.fingerprint)
        self._move_after = [-1] * len(self.groups)

    def planned(
        self, batches: Iterable[Batch], stop: Callable[[], bool], ahead: bool = True
    ) -> Iterator[PlannedStep]:
        """Plans of `batches` in order, until the first rank ends, stops or fails.

        `ahead=False` uses a window of L = 0 (planning inline). Raises what went wrong, on every
        rank after the same step.
        """
        window = self.settings.lookahead if ahead else 0
        waiting: deque[_Waiting] = deque()
        iterator = iter(batches)
        failure: BaseException | None = None
        while True:
            verdict, error = self._ingest(iterator, waiting, stop())
            if verdict.status is Status.STOP:
                self._after_stop(verdict, stop)
                return
            if verdict.status is not Status.OK:
                failure = error
                break
            if len(waiting) > window:
                yield self._decide(waiting.popleft())
        while waiting:
            yield self._decide(waiting.popleft())
        if failure is not None:
            raise failure

    def restore(self, step: int, slot_rows: Sequence[np.ndarray]) -> None:
        """Forget undecided and unmoved plans: go on after `step` from what the device holds.

        `slot_rows`: for each group, the rows in its planner's `own_slots`, int64, -1 for none.
        """
        self.ingested = step + 1
        self._move_after = [step] * len(self.groups)
        for group, planner, rows in zip(self.groups, self.planners, slot_rows, strict=True):
            held = rows >= 0
            planned = np.full(len(rows), -1, dtype=np.int64)
            planned[held] = group.planned(rows[held])
            planner.restore(planned, step)

    def _ingest(
        self, iterator: Iterator[Batch], waiting: deque[_Waiting], stop: bool
    ) -> tuple[Verdict, BaseException | None]:
        """Bring the next batch's rows to their homes, or learn why there is none."""
        started, sent = time.perf_counter(), self.link.counters.planning_bytes
        status, error, entry = self._next(iterator) if not stop else (Status.STOP, None, None)
        step = self.ingested
        batch = ("", 0) if entry is None else (entry.batch.kind, entry.batch.index)
        requests = [] if entry is None else entry.requests
        verdict, rows = self._exchange.requests(status, step, batch, requests, error)
        if verdict.status is Status.OK and entry is not None:
            for planner, by_rank in zip(self.planners, rows, strict=True):
                planner.ingest(step, entry.batch.kind, by_rank)
            entry.batch = agree_on_size(self.link, entry.batch)
            entry.spans.append(Span("ingest", LANE, step, started, time.perf_counter()))
            entry.planning_bytes = self.link.counters.planning_bytes - sent
            waiting.append(entry)
            self.ingested += 1
        elif verdict.status is Status.ERROR and error is None:
            error = _peer_error(verdict)
        elif verdict.status is Status.END and status is Status.OK:
            log.warning(
                "the data of %s ended after %d batches, this rank's did not: all ranks end there",
                ", ".join(f"rank {rank}" for rank in verdict.ranks),
                step,
            )
        return verdict, error

    def _next(
        self, iterator: Iterator[Batch]
    ) -> tuple[Status, BaseException | None, _Waiting | None]:
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
                make_request(group.layout, bag.rows)
                for group, bag in zip(self.groups, bags, strict=True)
            ]
        except Exception as error:
            return Status.ERROR, error, None
        return Status.OK, None, _Waiting(self.ingested, batch, bags, requests)

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

    def _decide(self, entry: _Waiting) -> PlannedStep:
        """Decide one step with all other homes; raises on every rank if one of them cannot."""
        sent = self.link.counters.planning_bytes
        with spanned(entry.spans, "load", LANE, entry.step):
            load_error = self._load(entry)
        started = time.perf_counter()
        rows = [planner.due_rows for planner in self.planners]
        own, status, error = self._decide_home(rows, load_error)
        decided = self._exchange.decisions(status, entry.step, rows, own, entry.requests, error)
        if decided.verdict.status is Status.TOO_LARGE:
            own_slots = [planner.slots for planner in self.planners]
            raise too_large(entry.step, self.groups, decided.rows, own_slots)
        if decided.verdict.status is not Status.OK:
            raise error or _peer_error(decided.verdict)
        try:
            plans, parts = self._assembled(entry, decided, own)
        except BaseException as error:  # after all have agreed to go on
            self.alone = True
            record_failure(self.link.world.store, self.link.world.rank, error)
            raise
        entry.spans.append(Span("plan", LANE, entry.step, started, time.perf_counter()))
        sent = entry.planning_bytes + self.link.counters.planning_bytes - sent
        return PlannedStep(entry.step, entry.batch, entry.bags, plans, entry.spans, sent, parts)

    def _assembled(
        self, entry: _Waiting, decided: Decided, own: Sequence[HomeDecision]
    ) -> tuple[list[StepPlan], tuple[StepPart, ...]]:
        """The plans of a step on which all homes decided, and its parts."""
        plans = []
        for group, request in enumerate(entry.requests):
            latest, before = [decided.latest_use[group]], self._move_after[group]
            move_after = next_move_after(entry.step, self.settings.prefetch, latest, before)
            self._move_after[group] = move_after
            plan = assemble(request, decided.parts[group], own[group], move_after)
            if self.settings.validate:
                check_plan_fully(plan, self.slots[group])
            else:
                check_plan(plan)
            plans.append(plan)
        if self.settings.hot is None or entry.batch.kind != "train":
            return plans, ()
        return plans, split_step(entry.batch, entry.bags, plans, self.settings.hot)

    def _load(self, entry: _Waiting) -> Exception | None:
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
        if any(count > p.slots for count, p in zip(rows, self.planners, strict=True)):
            return [], Status.TOO_LARGE, None
        if error is not None:
            return [], Status.ERROR, error
        try:
            pairs = zip(self.groups, self.planners, strict=True)
            return [_named(group, planner.plan()) for group, planner in pairs], Status.OK, None
        except Exception as failure:
            return [], Status.ERROR, failure


def _named(group: TableGroup, decision: HomeDecision) -> HomeDecision:
    """`decision` with the rows that move by the layout's numbers, which stores and caches use."""
    if group.order is None:
        return decision
    return replace(
        decision,
        fetch_rows=group.original(decision.fetch_rows),
        evict_rows=group.original(decision.evict_rows),
    )


def _peer_error(verdict: Verdict) -> PeerError:
    return PeerError(f"stopped because rank {verdict.ranks[0]} failed: {verdict.message}")
