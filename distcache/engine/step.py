"""Stages are data: what each does, to which step, on which stream; schedules loop over them."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from distcache.comm.link import CollectiveCounters, Link
from distcache.data.batch import Batch, JaggedIds
from distcache.engine.gradients import Agreement, Control
from distcache.engine.groups import GroupBags
from distcache.engine.lookup import DeviceBags, to_device, transfer_to_device
from distcache.engine.movement import Gathered, GroupRows, MoveCounts
from distcache.ops.copies import put
from distcache.planner.assemble import Request
from distcache.planner.loops import occurrences
from distcache.step_plan import StepPlan
from distcache.streams import COMMUNICATION, COMPUTE, Mark, Streams

# -----------------------------------------------------------------------------
# What stages took, and how much of that training did not wait for.

WAIT = "wait"
"""Time that the training loop stood still for a step's plan or rows: the stall."""


@dataclass(frozen=True)
class Span:
    """One stage of one step: when it ran, in seconds of `time.perf_counter`, and on which lane.

    Lanes: `planner` and `movement` are threads beside training, `training` is the loop's own.
    """

    name: str
    lane: str
    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@contextmanager
def spanned(spans: list[Span], name: str, lane: str, step: int) -> Iterator[None]:
    """Append the span of what runs inside to `spans`, if it ends well."""
    started = time.perf_counter()
    yield
    spans.append(Span(name, lane, step, started, time.perf_counter()))


Watcher = Callable[[int, str, Sequence[Span]], None]
"""Takes a step's number in its stream, its kind, and its spans, waits included."""


class StageClock:
    """Host seconds spent in each stage and hidden behind training, over `steps` training steps.

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
        for span in spans:
            self.seconds[span.name] += span.seconds
            if span.lane != "training":
                self.hidden[span.name] += span.seconds - _overlap(span, waits)
        self.seconds[WAIT] += sum(wait.seconds for wait in waits)

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage, and of the loop's `wait`."""
        return self._per_step(self.seconds)

    def hidden_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage beside training that nothing waited for."""
        return self._per_step(self.hidden)

    def lap(self) -> tuple[dict[str, float], dict[str, float]]:
        """`mean_ms` and `hidden_ms` of the steps since the last lap, or since the beginning."""
        steps, seconds, hidden = self._lap
        self._lap = (self.steps, dict(self.seconds), dict(self.hidden))
        count = self.steps - steps
        return _mean_ms(self.seconds, count, seconds), _mean_ms(self.hidden, count, hidden)

    def _per_step(self, seconds: dict[str, float]) -> dict[str, float]:
        return _mean_ms(seconds, self.steps, {})


def _mean_ms(seconds: dict[str, float], steps: int, before: dict[str, float]) -> dict[str, float]:
    """Milliseconds per step of what was added to `before` in `steps` steps."""
    return {
        name: 1e3 * (total - before.get(name, 0.0)) / max(1, steps)
        for name, total in seconds.items()
    }


def _overlap(span: Span, waits: Iterable[Span]) -> float:
    """Seconds of `span` that lie inside `waits`, which do not overlap one another."""
    return sum(max(0.0, min(span.end, w.end) - max(span.start, w.start)) for w in waits)


# -----------------------------------------------------------------------------
# Random delays at every hand-over between threads: a debugging mode that shakes out races.


class Shaker:
    """Called before every stage and hand-over, in every thread: sleeps up to `most_ms`, or not.

    Two calls in three return at once, so that threads run in bursts as well as one by one. The
    delays of a thread depend on `seed` and the thread's name; results must depend on none.
    """

    def __init__(self, most_ms: float, seed: int = 0) -> None:
        self._most_s, self._seed = most_ms / 1e3, seed
        self._local = threading.local()

    def __call__(self) -> None:
        draw = getattr(self._local, "draw", None)
        if draw is None:
            draw = self._local.draw = random.Random(
                f"{self._seed} {threading.current_thread().name}"
            )
        if draw.random() < 1 / 3:
            time.sleep(draw.random() * self._most_s)


def shaker(most_ms: float, seed: int = 0) -> Shaker | None:
    """A Shaker, or None for no delays."""
    return Shaker(most_ms, seed) if most_ms > 0 else None


# -----------------------------------------------------------------------------
# A step in two parts, one of hot samples and one of the others, whose gradients are added.
#
# The parts of FAE's hot and cold batches (Adnan et al., VLDB 2022) without its reordering of
# samples:
# the hot part, all of whose rows were cached before, computes while the cold part's rows arrive.
# Which samples are hot depends on their ids alone, so a step's bits are the same for every cache;
# up
# to the order of summation they are those of the step as a whole.

HotSamples = Callable[[JaggedIds], np.ndarray]
"""Which samples of a local batch have hot ids alone: bool `[b]`."""


@dataclass(frozen=True)
class StepPart:
    """Some samples of a local batch, which may be none.

    `samples`: int64 `[p]`, ascending; `dense` and `labels`: theirs; for each group `bags`, and a
    plan of this part alone: `positions`, `order`, `segments` and `slots` speak of the R rows that
    it names, and `touched` int64 `[R]` says which leaf rows of the step these are; the slot of a
    sharded row is -1. The plan's other fields are the step's. `early`: whether all its rows are
    cached before the step's move.
    """

    samples: Tensor
    dense: Tensor
    labels: Tensor
    bags: list[GroupBags]
    plans: list[StepPlan]
    early: bool


def split_step(
    batch: Batch, bags: Sequence[GroupBags], plans: Sequence[StepPlan], hot: HotSamples
) -> tuple[StepPart, StepPart]:
    """The hot and the cold part of a planned step. NumPy: it runs beside training."""
    is_hot = hot(batch.ids)
    return tuple(_part(batch, bags, plans, chosen) for chosen in (is_hot, ~is_hot))  # type: ignore[return-value]


def _part(
    batch: Batch, bags: Sequence[GroupBags], plans: Sequence[StepPlan], chosen: np.ndarray
) -> StepPart:
    pairs = [_part_of_group(b, p, chosen) for b, p in zip(bags, plans, strict=True)]
    early = all(_all_here(part, plan) for (_, part), plan in zip(pairs, plans, strict=True))
    samples = np.flatnonzero(chosen)
    return StepPart(
        samples=torch.from_numpy(samples),
        dense=torch.from_numpy(batch.dense.numpy()[samples]),
        labels=torch.from_numpy(batch.labels.numpy()[samples]),
        bags=[part for part, _ in pairs],
        plans=[plan for _, plan in pairs],
        early=early,
    )


def _all_here(part: StepPlan, plan: StepPlan) -> bool:
    """Whether none of a part's rows is fetched, or comes from its home in every step."""
    touched = part.touched.numpy()
    if len(touched) and touched[-1] >= plan.distinct:
        return False
    return not np.isin(touched, plan.fetch.numpy(), assume_unique=True).any()


def _part_of_group(
    bags: GroupBags, plan: StepPlan, chosen: np.ndarray
) -> tuple[GroupBags, StepPlan]:
    """The bags of the chosen samples (bool `[b]`), and the plan of the rows that they name."""
    lengths = np.diff(bags.offsets.numpy())
    kept_bags = np.tile(chosen, len(lengths) // max(len(chosen), 1))
    kept = np.repeat(kept_bags, lengths)
    own = lengths[kept_bags]
    offsets = np.zeros(len(own) + 1, dtype=np.int64)
    np.cumsum(own, out=offsets[1:])
    positions = plan.positions.numpy()[kept]
    ids = occurrences(positions.astype(np.int32), None, plan.leaf_rows)
    place = np.empty(plan.leaf_rows, dtype=np.int64)
    place[ids.touched] = np.arange(len(ids.touched))
    part = GroupBags(
        features=bags.features,
        rows=bags.rows[kept],
        offsets=torch.from_numpy(offsets),
        weights=_of(bags.weights, kept),
        scale=_of(bags.scale, kept_bags),
    )
    tensors = (place[positions], ids.order, ids.touched, ids.segments)
    names = ("positions", "order", "touched", "segments")
    of_part = dict(zip(names, map(torch.from_numpy, tensors), strict=True))
    slots = np.full(plan.leaf_rows, -1, dtype=np.int64)  # sharded rows have no slot of their own
    slots[: plan.distinct] = plan.slots.numpy()
    own = torch.from_numpy(slots[ids.touched])
    return part, replace(plan, slots=own, shard=None, **of_part)


def _of(values: Tensor | None, kept: np.ndarray) -> Tensor | None:
    return None if values is None else torch.from_numpy(values.numpy()[kept])


# -----------------------------------------------------------------------------
# What goes into the planner of a stream, waits in it and comes out.


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
class Waiting:
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
    training steps, see `pipeline.split`; `early`: sharded rows may travel before their step."""

    lookahead: int
    prefetch: int
    dtype: torch.dtype
    validate: bool = False
    fingerprint: int = 0
    prepare: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    hot: HotSamples | None = None
    early: bool = False


# -----------------------------------------------------------------------------
# Stages are data: what each does, to which step, on which stream; schedules loop over them.

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


# -----------------------------------------------------------------------------
# The stages that bring a step's rows to the device, for all groups of a model.

T = TypeVar("T")


class Movement:
    """`stages`: write_back, gather and fill, in the order in which they must run; with sharded rows
    `share_early` after them, which sends those that no step on its way changes to who reads them.

    The ranks' fills go over the device group of `link`, with counters of their own: what a step's
    fill sent is counted with the step, when that is run.
    """

    def __init__(
        self,
        rows: Sequence[GroupRows],
        link: Link,
        streams: Streams,
        with_batch: bool,
        dtype: torch.dtype = torch.float32,
        early: bool = False,
    ) -> None:
        """`with_batch`: the step's batch goes to the device along with its rows, and its dense
        features and labels become `dtype`; `early`: plans have rows that travel early."""
        self._rows, self._with_batch, self._dtype = list(rows), with_batch, dtype
        self._streams = streams
        self._sent = CollectiveCounters(link.world.nodes, link.world.rank)
        self._link = Link(link.world, link.group, self._sent, "the device group (moving rows)")
        self.stages = (
            Stage("write_back", "copy_out", self._write_back),
            Stage("gather", "host", self._gather),
            Stage("fill", "copy_in", self._fill),
        )
        if early:
            self.stages += (Stage("share_early", "copy_in", self._share_early),)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_back(self, flight: InFlight) -> None:
        flight.counts = [MoveCounts() for _ in self._rows]
        for rows, plan, counts in self._each(flight, flight.counts):
            rows.write_back(plan, counts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _gather(self, flight: InFlight) -> None:
        flight.gathered = [
            rows.gather(plan, counts) for rows, plan, counts in self._each(flight, flight.counts)
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill(self, flight: InFlight) -> None:
        self._sent.reset()
        for rows, plan, values in self._each(flight, flight.gathered):
            rows.fill(plan, values, self._link)
        self._count(flight)
        flight.gathered = []
        if self._with_batch:
            self._send_batch(flight)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _share_early(self, flight: InFlight) -> None:
        self._sent.reset()
        flight.sharded = []
        for rows, plan in zip(self._rows, flight.planned.plans, strict=True):
            if plan.shard is None or plan.shard.early is None:
                flight.sharded.append(None)
                continue
            transfer = plan.shard.early
            there = transfer_to_device(transfer, self._link.world.device)
            came = rows.send_rows(transfer, there, self._link, f"early rows {plan.step}")
            out = came.new_empty((plan.shard.rows, came.shape[1]))
            put(out, there.places, came)
            self._streams.hand_over((out,), COMPUTE)
            flight.sharded.append(out)
        self._count(flight)

    def _count(self, flight: InFlight) -> None:
        """What was sent since the counters were reset is the step's."""
        flight.fill_bytes += self._sent.collective_bytes
        flight.fill_between_nodes += self._sent.inter_node_bytes

    def _send_batch(self, flight: InFlight) -> None:
        """The batch's tensors to the device, where the compute stream reads them."""
        planned, device = flight.planned, self._link.world.device
        flight.bags = [
            DeviceBags(bags, plan, device)
            for bags, plan in zip(planned.bags, planned.plans, strict=True)
        ]
        batch, dtype = planned.batch, self._dtype
        flight.dense = to_device(batch.dense.to(dtype), device)
        flight.labels = to_device(batch.labels.to(dtype), device)
        sent = [tensor for bags in flight.bags for tensor in bags.tensors()]
        self._streams.hand_over((*sent, flight.dense, flight.labels), COMPUTE)

    def _each(
        self, flight: InFlight, values: Iterable[T]
    ) -> Iterator[tuple[GroupRows, StepPlan, T]]:
        return zip(self._rows, flight.planned.plans, values, strict=True)
