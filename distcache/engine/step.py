"""One step on its way: its stages, the record that travels, and how stages follow one another.

While step t trains, later ones are on their way. P: steps that movement may be ahead, L: steps
whose ids are known beyond the one that is decided. The threads stand in the order in which a step
passes them; the streams are those of `distcache.streams`, and `host` needs none.

| stage | of step | thread | stream | reads | writes |
|---|---|---|---|---|---|
| `ingest` | t+P+L+1 or later | planner | host | ids | requests to homes, their windows |
| `load` | t+P+1 | planner, talking | host | the batch's file | dense features, labels |
| `plan`, `plan_exchange` | t+P+1 | planner, talking | host, ranks | windows | `StepPlan` by group |
| `gather` | t+P+1 | movement | host | store[fetch_rows] | staging buffers |
| `write_back` | t+P | movement | copy_out | cache[evict_slots] | a staging buffer |
| `fill` | t+P | movement | copy_in | staging, indices, batch | cache[fetch_slots], device |
| `share_early` | t+P | movement | copy_in | the homes' rows | rows that no step changes now |
| `scatter` | t+P | movement | host | that buffer | store[evict_rows] |
| `share_late` | t | training | communication | the homes' rows | the other sharded rows |
| `forward_backward` | t | training | compute | leaves, dense part | row and dense gradients |
| `sync` | t | training | communication, of one rank compute | gradients | sums over the ranks |
| `apply` | t | training | compute | sums | cache rows with state, dense part |
| `return_rows` | t | training | communication | the homes' new rows | cache rows of all ranks |

In the midst of a stream a home decides on a step in the same pass in which it takes in another, so
`ingest` has that time. Where several threads plan, one of them does `ingest` up to the requests, of
the step after that at which the planner is. With several ranks and a window a thread of its own
does `load` and `plan_exchange`, beside the next `ingest` and `plan`, and ids are known two steps
earlier. An evaluation step has `forward` in place of what follows `share_late`. `share_*` are of
sharded rows, `return_rows` is where homes alone keep the optimizer state.

Two schedules. *Overlapped*: three threads as above (`engine.pipeline`), and two waits in training:
for the step's rows before anything reads them, and, before `sync` of several ranks, for the issue
of all movement that was let go, since the ranks' fills use the group that `sync` uses and must lie
before it on all of them; what the host does for it lies before (`gather`) and after (`scatter`).
Mode `host`, which fetches rows that leave before, does that in between. *Serial*: the training
thread moves a step's rows itself, right before the step; the slow twin, with the same bits.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from distcache.data.batch import Batch
from distcache.planner.rank import Asked, RowRequest
from distcache.step_plan import Indices, StepPlan
from distcache.streams import COMMUNICATION, COMPUTE, COPY_IN, COPY_OUT, DeviceEvent, Streams

if TYPE_CHECKING:
    from distcache.engine.gradients import DeviceBags
    from distcache.engine.groups import GroupBags
    from distcache.store.rows import Gathered

HOST = "host"
"""The stream of a stage without device work."""

TRAINING_LANE, MOVEMENT_LANE = "training", "movement"


@dataclass(frozen=True)
class Stage:
    """A named part of a step, and the stream on which its device work runs."""

    name: str
    stream: str


GATHER, SCATTER = Stage("gather", HOST), Stage("scatter", HOST)
WRITE_BACK, FILL = Stage("write_back", COPY_OUT), Stage("fill", COPY_IN)
SHARE_EARLY, SHARE_LATE = Stage("share_early", COPY_IN), Stage("share_late", COMMUNICATION)
FORWARD_BACKWARD, FORWARD = Stage("forward_backward", COMPUTE), Stage("forward", COMPUTE)
SYNC, APPLY = Stage("sync", COMMUNICATION), Stage("apply", COMPUTE)
RETURN_ROWS = Stage("return_rows", COMMUNICATION)
SYNC_ALONE = Stage("sync", COMPUTE)
"""Of one rank alone, which has nobody to wait for."""

TRAINING = (SHARE_LATE, FORWARD_BACKWARD, FORWARD, SYNC, APPLY, RETURN_ROWS)
"""Stages of the training thread, whatever the schedule."""

WAIT = "wait"
"""Time that the training loop stood still for a step's plan or rows: the stall."""


class Span(NamedTuple):
    """One stage of one step: when it ran, in seconds of `time.perf_counter`, and on which lane.

    Lanes: `planner`, `reading`, `talking` and `movement` are threads beside training, `training` is
    the loop's own.
    """

    name: str
    lane: str
    step: int
    start: float
    end: float


class DeviceSpan(NamedTuple):
    """Where the device work of a stage began and ended, on its stream."""

    name: str
    lane: str
    start: DeviceEvent
    end: DeviceEvent


@dataclass
class MoveCounts:
    """Rows that this rank's home moved, and their bytes over the host link."""

    rows_fetched: int = 0
    rows_written_back: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0

    def add(self, other: MoveCounts) -> None:
        """Count what another one counted."""
        self.rows_fetched += other.rows_fetched
        self.rows_written_back += other.rows_written_back
        self.host_to_device_bytes += other.host_to_device_bytes
        self.device_to_host_bytes += other.device_to_host_bytes


class StepPipeline(Protocol):
    """The threads that plan and move the steps of a stream, as the training thread uses them."""

    def wait_until_issued(self) -> StepContext | None:
        """Wait until all released movement is issued; return the step waited for, if any."""
        ...

    def retire(self, context: StepContext) -> None:
        """Hand over a finished step, whose memory is freed beside training."""
        ...


@dataclass
class StepContext:
    """One step of a stream on its way through the stages; each fills in what later ones read.

    The planner makes it, the movement's thread gets it once it is planned, and the training thread
    once its rows have moved: at any time one thread alone has it, so nothing here is locked.
    """

    step: int
    """Position in the stream of planned steps (training and evaluation steps count alike)."""
    batch: Batch
    bags: list[GroupBags]
    """The local batch's ids by group, on the CPU."""
    requests: list[RowRequest] = field(default_factory=list)
    """By group, until the step is planned."""
    asked: list[Asked] = field(default_factory=list)
    """The rows of `requests` by region, until then."""
    plans: list[StepPlan] = field(default_factory=list)
    """By group."""
    move_after: int = -1
    """The step after whose `apply` the rows of all groups may move."""
    planning_bytes: int = 0
    stream: StepPipeline | None = None
    """Whose step this is; None for one that was planned in the training thread (L = 0)."""

    # --- from movement: copies on the device, made ahead -------------------------------------
    moved: bool = False
    """Whether its rows are on the device."""
    gathered: list[Gathered | None] = field(default_factory=list)
    leaving: list[Callable[[], None]] = field(default_factory=list)
    """What is left to do until the rows that leave are in the store, by group."""
    where: list[Indices] = field(default_factory=list)
    """The plans' index tensors on the device."""
    lookups: list[list[DeviceBags]] = field(default_factory=list)
    """The index tensors of the lookups of each micro-batch, by group."""
    dense: Tensor | None = None
    labels: Tensor | None = None
    made: list[Tensor] = field(default_factory=list)
    """What movement made on its stream and training reads on its own."""
    sharded: list[Tensor | None] = field(default_factory=list)
    """The rows of each group that came from their homes, `[N, D]`, as far as they have."""
    counts: list[MoveCounts] = field(default_factory=list)
    fill_bytes: int = 0
    fill_between_nodes: int = 0
    """Those of `fill_bytes` that went to ranks of other nodes."""

    # --- from training -----------------------------------------------------------------------
    leaves: list[Tensor] = field(default_factory=list)
    """By group, the rows that the step computes with, `[U + N, D]`."""
    applied: bool = False
    """Whether its gradients were applied, so that rows which came from their homes are old."""
    result: Any = None
    """What the door makes of the step."""

    # --- where on the device it is, and what took how long -----------------------------------
    after: DeviceEvent = None
    """What the next stage's device work comes after."""
    free: DeviceEvent = None
    """Where on the device the step before it ended."""
    timed: bool = True
    """Whether its stages are timed (`Streams.is_timed`)."""
    marks: list[DeviceSpan] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)

    def note(self, name: str, lane: str, began: float) -> None:
        """A stage that began then, on the host alone, is over."""
        self.spans.append(Span(name, lane, self.step, began, time.perf_counter()))

    def waited(self, began: float) -> None:
        """Training has stood still for this step since `began`."""
        if self.timed:
            self.waits.append(Span(WAIT, TRAINING_LANE, self.step, began, time.perf_counter()))


DelayHook = Callable[[], object]
"""Called before every stage and hand-over, in every thread."""


class stage_scope:  # noqa: N801 - reads as `with stage_scope(stage, context, ...):`
    """The time in which `stage` of `context` runs; an error is noted with stage and step.

    Its device work runs on the stage's stream, after that of the stage before. A class and not a
    generator: this is entered six times a step, and costs half as much.
    """

    def __init__(
        self, stage: Stage, context: StepContext, lane: str, streams: Streams, delay_hook: DelayHook
    ) -> None:
        self._stage, self._context, self._lane, self._streams = stage, context, lane, streams
        delay_hook()

    def __enter__(self) -> None:
        streams, stream = self._streams, self._stage.stream
        self._began = time.perf_counter()
        # Else work is done in program order, or by the host alone: there is nothing to mark.
        self._marks = streams.ordered and stream != HOST
        if self._marks:
            streams.wait_events(stream, (self._context.after,))
            self._on = streams.use(stream)
            self._on.__enter__()
            self._start = streams.record_event(stream, timed=True) if self._context.timed else None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        name, context, streams = self._stage.name, self._context, self._streams
        end = None
        if self._marks:
            if error is None:
                end = streams.record_event(self._stage.stream, context.timed)
            self._on.__exit__(kind, error, trace)
        if error is not None:
            if isinstance(error, Exception):
                error.add_note(f"in stage {name} of step {context.step}")
            return
        if context.timed:
            context.note(name, self._lane, self._began)
        if end is not None:
            context.after = end
            if context.timed:
                context.marks.append(DeviceSpan(name, self._lane, self._start, end))


# -----------------------------------------------------------------------------
# What stages took, and how much of that training did not wait for.

Watcher = Callable[[int, str, Sequence[Span]], None]
"""Takes a step's number in its stream, its kind, and its spans, waits included."""


class StageClock:
    """Host seconds spent in each stage and hidden behind training, over `steps` training steps:
    on a device the timed ones.

    Hidden is what a stage of the planner or the movement took while the loop did not stand still
    for that step: all of it when nothing waited, none when all was waited for.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.watchers: list[Watcher] = []
        self._lap: tuple[int, dict[str, float], dict[str, float]] = (0, {}, {})

    def add(self, step: int, kind: str, spans: Sequence[Span], waits: Sequence[Span]) -> None:
        """Take in one step: `spans` of its stages, and the `waits` of the loop for it."""
        for watcher in self.watchers:
            watcher(step, kind, [*spans, *waits])
        if kind != "train":
            return
        self.steps += 1
        for name, lane, _, start, end in spans:
            took = hidden = end - start
            self.seconds[name] += took
            if lane != TRAINING_LANE:
                for wait in waits:  # which do not overlap one another
                    if wait.start < end and start < wait.end:
                        hidden -= min(end, wait.end) - max(start, wait.start)
                self.hidden[name] += hidden
        for wait in waits:
            self.seconds[WAIT] += wait.end - wait.start

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage, and of the loop's `wait`."""
        return _mean_ms(self.seconds, self.steps, {})

    def hidden_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage beside training that nothing waited for."""
        return _mean_ms(self.hidden, self.steps, {})

    def lap(self) -> dict[str, Any]:
        """What stages took since the last lap, or the beginning, for `Parallel.progress`.

        The hidden share counts planning and movement, wherever they ran: what ran in the loop, as
        with the serial schedule, was waited for. Nothing where no step was timed since then.
        """
        before, seconds, hid = self._lap
        if not (count := self.steps - before):
            return {}
        self._lap = (self.steps, dict(self.seconds), dict(self.hidden))
        took, hidden = _mean_ms(self.seconds, count, seconds), _mean_ms(self.hidden, count, hid)
        own = {WAIT, *(stage.name for stage in TRAINING)}
        beside = sum(ms for name, ms in took.items() if name not in own)
        return {
            "stage_ms": took,
            "stage_hidden_ms": hidden,
            "stall_ms": took.get(WAIT, 0.0),
            "hidden_share": sum(hidden.values()) / beside if beside > 0 else None,
        }


def _mean_ms(
    seconds: Mapping[str, float], steps: int, before: Mapping[str, float]
) -> dict[str, float]:
    """Milliseconds per step of what was added to `before` in `steps` steps."""
    return {
        name: 1e3 * (total - before.get(name, 0.0)) / max(1, steps)
        for name, total in seconds.items()
    }


def record(clock: StageClock, context: StepContext, streams: Streams) -> None:
    """Let `clock` know of a step that is through all stages, on the device too.

    On a device a stage took what its work took there; the step stalled from the end of the step
    before it until its rows had arrived. The clock does not hear of a step that is not timed.
    """
    if not context.timed:
        return
    spans, waits = context.spans, context.waits
    if context.marks:
        times = {}
        for mark in context.marks:
            start, end = streams.event_time(mark.start), streams.event_time(mark.end)
            times[mark.name] = Span(mark.name, mark.lane, context.step, start or 0.0, end or 0.0)
        spans = [times.get(span.name, span) for span in spans]
        free, filled = streams.event_time(context.free), times.get(FILL.name)
        if free is not None and filled is not None:
            waits = [Span(WAIT, TRAINING_LANE, context.step, free, max(free, filled.end))]
    clock.add(context.step, context.batch.kind, spans, waits)
