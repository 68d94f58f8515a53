"""The look-ahead planner at work: batches in, planned steps out, on a thread of its own.

All ranks run the same loop over the planning group; each iteration ingests one step and, once its
window is known, decides the oldest one. A step is decided exactly when the ids through step + L
are known or the stream has ended, never from what happens to have arrived.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from distcache.comm.failure import first_failure, record_failure
from distcache.comm.link import Link
from distcache.data.batch import Batch
from distcache.errors import PeerError, PlanError, StepTooLargeError
from distcache.pipeline.exchange import PlanExchange, Refusal, Status, Verdict
from distcache.pipeline.groups import GroupBags, TableGroup, group_bags
from distcache.pipeline.sizes import agree_on_size
from distcache.planner.assemble import Request, assemble, make_request, next_move_after
from distcache.planner.home import HomeDecision, Planner
from distcache.step_plan import StepPlan, check_plan, check_plan_fully

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""How often a waiting thread looks whether it should stop."""


@dataclass(frozen=True)
class PlannedStep:
    """A batch, its bags and plans by group, and how long planning took (seconds)."""

    step: int
    batch: Batch
    bags: list[GroupBags]
    plans: list[StepPlan]
    seconds: dict[str, float]


@dataclass
class _Waiting:
    """An ingested step whose window is not complete yet."""

    step: int
    batch: Batch
    bags: list[GroupBags]
    requests: list[Request]
    seconds: float


@dataclass(frozen=True)
class PlanningSettings:
    """L, P, the dtype of weights, whether to check every law, and a number that must agree on all
    ranks; `prepare` checks a batch (raising DataError) before anything is sent."""

    lookahead: int
    prefetch: int
    dtype: torch.dtype
    validate: bool = False
    fingerprint: int = 0
    prepare: Callable[[Batch], Batch] = field(default=lambda batch: batch)


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
        self.link, self.groups, self.planners = link, list(groups), list(planners)
        self.slots, self.settings = list(slots), settings
        self._exchange = PlanExchange(link, len(self.groups), settings.fingerprint)
        self._ingested = 0
        self._move_after = [-1] * len(self.groups)

    def planned(
        self, batches: Iterable[Batch], stop: Callable[[], bool], ahead: bool = True
    ) -> Iterator[PlannedStep]:
        """Plans of `batches` in order, until the first rank ends, stops or fails.

        `ahead=False` uses a window of L = 0 (planning inline). Raises what went wrong, on every
        rank at the same step.
        """
        window = self.settings.lookahead if ahead else 0
        waiting: deque[_Waiting] = deque()
        iterator = iter(batches)
        failure: BaseException | None = None
        while True:
            verdict, error = self._ingest(iterator, waiting, stop())
            if verdict.status is Status.STOP:
                self._ingested -= len(waiting)
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

    def restore(self, step: int, held: Sequence) -> None:
        """Forget undecided and unmoved plans: go on after `step` from the rows that the device
        holds (`held`: int64 array of each group's own slots, -1 free)."""
        self._ingested = step + 1
        self._move_after = [step] * len(self.groups)
        for planner, rows in zip(self.planners, held, strict=True):
            planner.restore(rows, step)

    def _ingest(
        self, iterator: Iterator[Batch], waiting: deque[_Waiting], stop: bool
    ) -> tuple[Verdict, BaseException | None]:
        """Bring the next batch's rows to their homes, or learn why there is none."""
        started = time.perf_counter()
        status, error, entry = self._next(iterator) if not stop else (Status.STOP, None, None)
        step = self._ingested
        requests = entry.requests if entry is not None else None
        verdict, rows = self._exchange.requests(status, step, requests)
        if verdict.status is Status.OK and entry is not None:
            for planner, by_rank in zip(self.planners, rows, strict=True):
                planner.ingest(step, entry.batch.kind, by_rank)
            entry.batch = agree_on_size(self.link, entry.batch)
            entry.seconds = time.perf_counter() - started
            waiting.append(entry)
            self._ingested += 1
        elif verdict.status is Status.ERROR and error is None:
            error = self._peer_error(verdict)
        elif verdict.status is Status.END and status is Status.OK:
            log.warning(
                "the data of rank %s ended at step %d; this rank had more, which is left unread",
                verdict.ranks,
                step,
            )
        return verdict, error

    def _next(
        self, iterator: Iterator[Batch]
    ) -> tuple[Status, BaseException | None, _Waiting | None]:
        """The next local batch as rows, or END, or what went wrong with it."""
        try:
            batch = self.settings.prepare(next(iterator))
            bags = [group_bags(group, batch.ids, self.settings.dtype) for group in self.groups]
            requests = [
                make_request(group.layout, bag.rows)
                for group, bag in zip(self.groups, bags, strict=True)
            ]
        except StopIteration:
            return Status.END, None, None
        except Exception as error:
            record_failure(self.link.world.store, self.link.world.rank, error)
            return Status.ERROR, error, None
        return Status.OK, None, _Waiting(self._ingested, batch, bags, requests, 0.0)

    def _decide(self, entry: _Waiting) -> PlannedStep:
        """Decide one step with all other homes; raises on every rank if one of them cannot."""
        started = time.perf_counter()
        own, status, refusal, error = self._decide_home(entry)
        verdict, homes, latest, refused = self._exchange.decisions(
            status, entry.step, own, entry.requests, refusal
        )
        if refused is not None:
            raise self._too_large(entry.step, refused)
        if verdict.status is not Status.OK or own is None:
            raise error or self._peer_error(verdict)
        plans = []
        for group, request in enumerate(entry.requests):
            before = self._move_after[group]
            move_after = next_move_after(
                entry.step, self.settings.prefetch, [latest[group]], before
            )
            self._move_after[group] = move_after
            plan = assemble(request, homes[group], own[group], move_after)
            if self.settings.validate:
                check_plan_fully(plan, self.slots[group])
            else:
                check_plan(plan)
            plans.append(plan)
        seconds = {"ingest": entry.seconds, "plan": time.perf_counter() - started}
        return PlannedStep(entry.step, entry.batch, entry.bags, plans, seconds)

    def _decide_home(
        self, entry: _Waiting
    ) -> tuple[list[HomeDecision] | None, Status, Refusal | None, BaseException | None]:
        """This home's decisions, or how it fails."""
        rank = self.link.world.rank
        decisions: list[HomeDecision] = []
        try:
            for planner in self.planners:
                decisions.append(planner.plan())
        except StepTooLargeError as error:
            group = len(decisions)
            refusal = Refusal(rank, group, error.rows, error.slots)
            return None, Status.TOO_LARGE, refusal, error
        except Exception as error:
            record_failure(self.link.world.store, rank, error)
            return None, Status.ERROR, None, error
        return decisions, Status.OK, None, None

    def _too_large(self, step: int, refused: Refusal) -> StepTooLargeError:
        world = self.link.world.size
        own = self.groups[refused.group].layout.rows
        total = sum(group.layout.rows for group in self.groups)
        enough = -(-refused.rows * world * total // own)
        return StepTooLargeError(
            f"step {step} needs {refused.rows} distinct rows of home rank {refused.home}, which "
            f"has {refused.slots} slots of {refused.slots * world} on each device: set "
            f"cache.rows={enough} or more (the smallest that holds this step), or lower "
            "data.global_batch_size",
            rows=refused.rows,
            slots=refused.slots,
        )

    def _peer_error(self, verdict: Verdict) -> PeerError:
        failure = first_failure(self.link.world.store)
        rank, message = failure if failure is not None else (verdict.ranks[0], "see its output")
        return PeerError(f"stopped because rank {rank} failed: {message}")


class PlanningThread:
    """Runs a StreamPlanner's loop ahead of training, at most `depth` planned steps ahead."""

    def __init__(self, planner: StreamPlanner, batches: Iterable[Batch], depth: int) -> None:
        self._planner, self._batches = planner, batches
        self._queue: queue.Queue[PlannedStep | BaseException | None] = queue.Queue(max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distcache-planner", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[PlannedStep]:
        while True:
            item = self._take()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _take(self) -> PlannedStep | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    return PlanError("the planner's thread has ended without a word")

    def stop(self, timeout_s: float) -> bool:
        """Ask for one final exchange and wait for the thread; whether it ended in time.

        Called by all ranks after the same step; plans not yet taken are dropped.
        """
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for step in self._planner.planned(self._batches, self._stop.is_set):
                self._put(step)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: PlannedStep | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
