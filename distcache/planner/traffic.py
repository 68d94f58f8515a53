"""What a stream of ids makes ranks send, without tensors: the real planner, and counts of rows.

The planners of all homes run in one process as in training; of their decisions only numbers of
rows from rank to rank are kept, so that many ranks take no longer per id than few. `simulator`
assembles whole plans instead: the slow twin, whose counts are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.errors import ConfigError
from distcache.layout import RowLayout
from distcache.planner.assemble import Request, next_move_after
from distcache.planner.home import HomeDecision, HomePlanner
from distcache.planner.simulator import PlannerSettings, SimulatedWorld


@dataclass(frozen=True)
class RegionCounts:
    """The replicated, or the sharded, rows of a step. All int64.

    `asked` `[W, W]`: distinct rows that each rank (first index) names at each home; `rows` `[W]`:
    distinct rows of each home; `fetched`, `written_back` `[W]`: of them, rows that it reads from
    its store, and dirty rows that leave for them; `late` `[W, W]`: sharded rows that each home
    (first index) sends to each rank after the step before.
    """

    asked: np.ndarray
    rows: np.ndarray
    fetched: np.ndarray
    written_back: np.ndarray
    late: np.ndarray


@dataclass(frozen=True)
class StepCounts:
    """A step of one group. `ids`: of all ranks; `replicated` or `sharded` is None where the group
    has no such rows."""

    step: int
    kind: str
    ids: int
    move_after: int
    replicated: RegionCounts | None
    sharded: RegionCounts | None

    @property
    def regions(self) -> list[RegionCounts]:
        """Those that there are."""
        return [region for region in (self.replicated, self.sharded) if region is not None]


def count_traffic(
    layout: RowLayout,
    settings: PlannerSettings,
    steps: Iterable[Sequence[np.ndarray]],
    kinds: Iterable[str] | None = None,
) -> Iterator[StepCounts]:
    """Counts of every step; each of `steps` gives the rows (int64 `[n]`) that each rank names.

    `kinds`: `train` or `eval` for each step; None: all train. Raises StepTooLargeError as training
    would, and ConfigError for a step of another number of ranks than the layout has.
    """
    planner = TrafficPlanner(layout, settings)
    kind_of = None if kinds is None else iter(kinds)
    for rows in steps:
        yield from planner.add(rows, "train" if kind_of is None else next(kind_of))
    yield from planner.finish()


@dataclass(frozen=True)
class _Asked:
    """What ranks named in a step, int64 `[W, W]` (rank, home); `sharded` None: there is none."""

    replicated: np.ndarray
    sharded: np.ndarray | None

    @classmethod
    def of(cls, requests: Sequence[Request], hot: np.ndarray | None) -> _Asked:
        near = np.array([request.counts for request in requests], dtype=np.int64)
        if hot is None:
            return cls(near, None)
        far = [[len(rows) for rows in request.sharded] for request in requests]
        return cls(near, np.array(far, dtype=np.int64))


@dataclass(frozen=True)
class _Step:
    """An ingested step that is not decided yet."""

    kind: str
    ids: int
    asked: _Asked


class _DirtySlots:
    """Which slots of a planner hold rows that a training step has changed."""

    def __init__(self, planner: HomePlanner) -> None:
        self._first, self._dirty = planner.own_slots.start, np.zeros(planner.slots, dtype=bool)

    def leave(self, decision: HomeDecision) -> int:
        """Rows that are written back for a step; those that it uses are dirty from then on."""
        leaving = decision.evict_slots - self._first
        count = int(self._dirty[leaving].sum())
        self._dirty[leaving] = False
        if decision.kind == "train":
            self._dirty[decision.slots - self._first] = True
        return count


class TrafficPlanner:
    """All homes of a world, step by step: what `count_traffic` runs over a stream."""

    def __init__(self, layout: RowLayout, settings: PlannerSettings) -> None:
        self._layout, self._settings = layout, settings
        self._ingested, self._decided, self._before = 0, 0, -1
        self._world = SimulatedWorld(layout, settings)
        self._dirty = {
            planner: _DirtySlots(planner)
            for planner in (*self._world.replicated, *self._world.sharded)
        }
        self._waiting: deque[_Step] = deque()

    def add(self, rows: Sequence[np.ndarray], kind: str = "train") -> list[StepCounts]:
        """Ingest the next step, as in `count_traffic`; the step that this decides, if any."""
        step, world = self._ingested, self._layout.world_size
        if len(rows) != world:
            raise ConfigError(f"step {step} has ids of {len(rows)} ranks, the layout is of {world}")
        requests = self._world.ingest(step, rows, kind)
        asked = _Asked.of(requests, self._settings.hot)
        self._waiting.append(_Step(kind, sum(map(len, rows)), asked))
        self._ingested += 1
        return [self._decide()] if len(self._waiting) > self._settings.lookahead else []

    def finish(self) -> list[StepCounts]:
        """The steps that were left at the end of the stream."""
        return [self._decide() for _ in range(len(self._waiting))]

    def _decide(self) -> StepCounts:
        """Decide the oldest step."""
        about, step = self._waiting.popleft(), self._decided
        self._decided += 1
        near = [(planner, planner.plan()) for planner in self._world.replicated]
        far = [(planner, planner.plan()) for planner in self._world.sharded]
        uses = [decision.latest_use for _, decision in (*near, *far)]
        self._before = next_move_after(step, self._settings.prefetch, uses, self._before)
        late = self._before if self._settings.early else _ALL_LATE
        replicated = self._counts(near, about.asked.replicated, None) if near else None
        sharded = None
        if far and about.asked.sharded is not None:
            sharded = self._counts(far, about.asked.sharded, late)
        return StepCounts(step, about.kind, about.ids, self._before, replicated, sharded)

    def _counts(
        self,
        region: Sequence[tuple[HomePlanner, HomeDecision]],
        asked: np.ndarray,
        move_after: int | None,
    ) -> RegionCounts:
        """Of one region; `move_after` None: no rows of it travel."""
        decisions, late = [decision for _, decision in region], np.zeros_like(asked)
        if move_after is not None:
            for home, decision in enumerate(decisions):
                going = (decision.previous > move_after)[np.concatenate(decision.replies)]
                bounds = np.concatenate(([0], np.cumsum(asked[:, home])))
                late[home] = np.diff(np.concatenate(([0], np.cumsum(going)))[bounds])
        return RegionCounts(
            asked,
            np.array([len(decision.slots) for decision in decisions]),
            np.array([len(decision.fetch) for decision in decisions]),
            np.array([self._dirty[planner].leave(decision) for planner, decision in region]),
            late,
        )


_ALL_LATE = -2
"""A `move_after` after which every row was named."""
