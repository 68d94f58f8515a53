"""Stages are data: what each does, to which step, on which stream; schedules loop over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from distcache.coordinator import Agreement, Control
from distcache.pipeline.access import Gathered
from distcache.pipeline.clock import WAIT, Span, StageClock, spanned
from distcache.pipeline.lookup import DeviceBags
from distcache.pipeline.planned import PlannedStep
from distcache.pipeline.rows import MoveCounts
from distcache.pipeline.shake import Shaker
from distcache.streams import COMMUNICATION, COMPUTE, Mark, Streams

TRAINING_LANE = "training"

EARLY = "forward_backward_hot"
"""The stage that computes what needs none of the rows that still move."""

TRAINING = (COMPUTE, COMMUNICATION)
"""Streams whose stages run in the training loop; those of all others are movement."""


@dataclass
class InFlight:
    """One step on its way through the stages; each stage fills in what the next ones read."""

    planned: PlannedStep
    moved: bool = False
    """Whether its rows are on the device."""
    gathered: list[Gathered | None] = field(default_factory=list)
    bags: list[DeviceBags] = field(default_factory=list)
    dense: Tensor | None = None
    labels: Tensor | None = None
    counts: list[MoveCounts] = field(default_factory=list)
    fill_bytes: int = 0
    fill_between_nodes: int = 0
    """Those of `fill_bytes` that went to ranks of other nodes."""
    sharded: list[Tensor | None] = field(default_factory=list)
    """The rows of each group that came from their homes, `[N, D]`, as far as they have."""
    leaves: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """This rank's row gradients by group, `[U, D]`, where they are not those of `leaves`."""
    sums: list[Tensor | None] = field(default_factory=list)
    sharded_sums: list[Tensor | None] = field(default_factory=list)
    """Of each group, the summed gradients of this home's sharded rows, `[H, D]`."""
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Buffers of the dense model, and their values before the step."""
    loss: Tensor | None = None
    logits: Tensor | None = None
    stop: bool = False
    control: Control | None = None
    agreement: Agreement | None = None
    after: Mark = field(default_factory=Mark)
    """What the next stage's device work comes after."""
    free: Mark = field(default_factory=Mark)
    """Where on the device the step before it ended."""
    marks: list[DeviceSpan] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Position in the stream of planned steps."""
        return self.planned.step

    @property
    def move_after(self) -> int:
        """The step after whose `apply` the rows of all groups may move."""
        return max((plan.move_after for plan in self.planned.plans), default=-1)


@dataclass(frozen=True)
class DeviceSpan:
    """Where the device work of a stage began and ended, on its stream."""

    name: str
    lane: str
    start: Mark
    end: Mark


@dataclass(frozen=True)
class Stage:
    """A named part of a step: `run` does it, `stream` says where it may run when overlapped."""

    name: str
    stream: str
    run: Callable[[InFlight], None]


def movement_of(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages that bring a step's rows to the device."""
    return tuple(stage for stage in stages if stage.stream not in TRAINING)


def run_stages(
    stages: Sequence[Stage],
    flight: InFlight,
    lane: str,
    streams: Streams,
    shake: Shaker | None = None,
    alone: bool = False,
) -> None:
    """Take `flight` through `stages`, in order; an error is noted with stage and step.

    The device work of a stage runs on its stream, after that of the stage before. `alone`: another
    thread takes the same step through other stages meanwhile; these neither follow nor precede.
    """
    for stage in stages:
        if shake is not None:
            shake()
        if not alone:
            streams.after(stage.stream, (flight.after,))
        try:
            with streams.on(stage.stream), spanned(flight.spans, stage.name, lane, flight.step):
                start = streams.mark(stage.stream)
                stage.run(flight)
                end = streams.mark(stage.stream)
        except Exception as error:
            error.add_note(f"in stage {stage.name} of step {flight.step}")
            raise
        if end.event is not None:
            if not alone:
                flight.after = end
            flight.marks.append(DeviceSpan(stage.name, lane, start, end))


class SerialSchedule:
    """One step after the other, one stage after the other: the slow twin of every overlap."""

    def __init__(self, stages: tuple[Stage, ...], streams: Streams, shake: Shaker | None) -> None:
        self._stages, self._streams, self._shake = stages, streams, shake

    def run(self, flight: InFlight) -> None:
        """Take a step through all stages."""
        run_stages(self._stages, flight, TRAINING_LANE, self._streams, self._shake)
        flight.moved = True


class OverlappedSchedule:
    """Movement runs beside training, on a thread of its own (`pipeline.movement`), up to P steps
    ahead; here is the rest of the same stages.

    Ranks talk over one device group, in one order (DESIGN, section 7): every fill that may run
    beside step t comes before the exchange of step t. So `settle` waits for those before the first
    stage that communicates.

    Stages of training that stand before movement run while the step's rows still move. Those that
    communicate right after it send what a step cannot begin without: the fills of later steps come
    after them in the ranks' order, so these move once `ahead` is called.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        streams: Streams,
        shake: Shaker | None,
        settle: Callable[[InFlight], None],
        arrive: Callable[[InFlight], None],
        ahead: Callable[[], None] = lambda: None,
    ) -> None:
        self._streams, self._shake = streams, shake
        self._settle, self._arrive, self._ahead = settle, arrive, ahead
        moves = [i for i, stage in enumerate(stages) if stage.stream not in TRAINING]
        self._early = stages[: moves[0]] if moves else ()
        own = tuple(s for s in stages[len(self._early) :] if s.stream in TRAINING)
        computing = [i for i, stage in enumerate(own) if stage.stream == COMPUTE]
        self._first, own = own[: computing[0]], own[computing[0] :]
        after = [i for i, stage in enumerate(own) if stage.stream == COMMUNICATION]
        cut = after[0] if after else len(own)
        self._alone, self._together = own[:cut], own[cut:]

    def run(self, flight: InFlight) -> None:
        """Take a step through the stages of the training loop."""
        run_stages(self._early, flight, TRAINING_LANE, self._streams, self._shake, alone=True)
        self._arrive(flight)
        if not flight.moved:
            raise RuntimeError(f"the rows of step {flight.step} have not moved")
        if self._first:  # they send rows that the step before has changed
            self._streams.after(self._first[0].stream, (flight.free,))
            run_stages(self._first, flight, TRAINING_LANE, self._streams, self._shake)
            self._ahead()
        run_stages(self._alone, flight, TRAINING_LANE, self._streams, self._shake)
        if self._together or self._first:  # which the next step begins with
            self._settle(flight)
        if self._together:
            run_stages(self._together, flight, TRAINING_LANE, self._streams, self._shake)


def record(clock: StageClock, flight: InFlight, streams: Streams, before: Mark) -> None:
    """Let `clock` know of a step that is through all stages, on the device too.

    On a device a stage took what its work took there; the step stalled from the end of the step
    before it (`before`), or of what it could compute early, until its rows had arrived.
    """
    spans, waits = flight.spans, flight.waits
    if flight.marks:
        times = {}
        for mark in flight.marks:
            start, end = streams.seconds(mark.start), streams.seconds(mark.end)
            times[mark.name] = Span(mark.name, mark.lane, flight.step, start or 0.0, end or 0.0)
        spans = [times.get(span.name, span) for span in spans]
        free, filled = streams.seconds(before), times.get("fill")
        if free is not None and EARLY in times:
            free = max(free, times[EARLY].end)
        if free is not None and filled is not None:
            waits = [Span(WAIT, TRAINING_LANE, flight.step, free, max(free, filled.end))]
    planned = flight.planned
    clock.add(flight.step, planned.batch.kind, [*planned.spans, *spans], waits)
