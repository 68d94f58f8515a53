"""All homes of a world in one process: whole plans, without devices, groups or a clock.

The slow twin of `distcache.replay`, whose counts are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.data.batch import slice_bounds
from distcache.layout import RowLayout
from distcache.planner.home import HomePlanner, Parts
from distcache.planner.rank import HomePart, RankPlanner, RowRequest, next_move_after
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.planner.shard import ShardParts, nothing, replies_to_all
from distcache.planner.victims import DEFAULT, Policy
from distcache.popularity.statistics import GroupPopularity
from distcache.replay import HomeRun
from distcache.step_plan import StepPlan
from distcache.trace import Recorder, Trace


@dataclass(frozen=True)
class PlannerSettings:
    """C per rank, L, P, and the policy; `popularity` uint8 `[V]`: a class for each row.

    `hot`: the rows that are replicated where others are sharded, int64 `[K]`, ascending (None: all
    are); `replicated`: how many of the slots are theirs, a multiple of W, 0 where there are none;
    `early`: sharded rows may travel before their step; homes have 2^`shelves` shelves in 2^`bits`
    parts.
    """

    slots: int
    lookahead: int
    prefetch: int
    policy: Policy = DEFAULT
    popularity: np.ndarray | None = None
    hot: np.ndarray | None = None
    replicated: int = 0
    early: bool = True
    shelves: int = 0
    bits: int = 0


def simulate(
    layout: RowLayout, settings: PlannerSettings, steps: Iterable[Sequence[np.ndarray]]
) -> Iterator[list[StepPlan]]:
    """Plans of all ranks for a stream of steps; each step gives one row array per rank.

    Yields, for each step, the plan of every rank. Raises StepTooLargeError as training would.
    """
    world = SimulatedWorld(layout, settings)
    for rows in steps:
        yield from world.add(rows)
    yield from world.finish()


class SimulatedWorld:
    """The planners of all homes, for `replicated` and for `sharded` rows, each by home; empty where
    there are no such rows. `written`: rows written back for the last step, of both, by home."""

    def __init__(self, layout: RowLayout, settings: PlannerSettings) -> None:
        self._layout, self._settings = layout, settings
        self._step, self._move_after, self._waiting = 0, -1, list[list[RowRequest]]()
        world, hot = layout.world_size, settings.hot
        self.replicated, self.sharded = list[HomeRun](), list[HomeRun]()
        if hot is None:
            self.replicated = self._homes(-(-settings.slots // world))
        else:
            tail = settings.slots - settings.replicated
            self.sharded = self._homes(tail, first_slot=settings.replicated)
            if settings.replicated:
                self.replicated = self._homes(settings.replicated // world, hot)
        self.written: list[np.ndarray] = []
        parts = [of[0].planner.parts if of else None for of in (self.replicated, self.sharded)]
        among = None if hot is None else ReplicatedRows(layout, hot)
        self._ranks = [RankPlanner(layout, among, parts) for _ in range(world)]

    def _homes(
        self, slots: int, hot: np.ndarray | None = None, first_slot: int | None = None
    ) -> list[HomeRun]:
        """A planner for each home, of `slots` slots; `hot`: for these rows alone."""
        layout, settings, found = self._layout, self._settings, list[HomeRun]()
        own = layout if hot is None else ReplicatedRows(layout, hot)
        for home in range(layout.world_size):
            classes = GroupPopularity(settings.popularity).classes_at(layout, home)
            if classes is not None and isinstance(own, ReplicatedRows):
                classes = own.rated(home, layout, classes)
            parts = Parts(slots, own.most_rows, settings.shelves, settings.bits)
            common = (settings.prefetch, settings.policy, classes, first_slot, parts)
            found.append(HomeRun(HomePlanner(own, home, slots, *common)))
        return found

    def add(self, rows: Sequence[np.ndarray], kind: str = "train") -> list[list[StepPlan]]:
        """Bring the rows of the next step, by rank, to their homes; the step that this decides."""
        requests = [rank.request(of) for rank, of in zip(self._ranks, rows, strict=True)]
        both = (self.replicated, self.sharded)
        for runs, region in zip(both, ("replicated", "sharded"), strict=True):
            asked = [getattr(request, region) for request in requests]
            for home, run in enumerate(runs):
                counts = np.stack([of.counts[home] for of in asked])
                run.planner.ingest(self._step, kind, [of.rows[home] for of in asked], counts)
        self._waiting.append(requests)
        self._step += 1
        due = len(self._waiting) > self._settings.lookahead
        return [self._plan(self._waiting.pop(0))] if due else []

    def finish(self) -> Iterator[list[StepPlan]]:
        """The steps that were left at the end of the stream."""
        while self._waiting:
            yield self._plan(self._waiting.pop(0))

    def _plan(self, requests: list[RowRequest]) -> list[StepPlan]:
        """Decide the oldest ingested step, of which all ranks' requests are given."""
        both = [[run.decide() for run in runs] for runs in (self.replicated, self.sharded)]
        shared, own = ([decision for decision, _ in found] for found in both)
        self.written = [np.array([written for _, written in found]) for found in both]
        step, uses = (shared or own)[0].step, [d.latest_use for d in (*shared, *own)]
        after = next_move_after(step, self._settings.prefetch, uses, self._move_after)
        self._move_after = after
        shared = shared or [nothing((step, "train"), len(requests))] * len(requests)
        told = [replies_to_all(decision) for decision in own]
        sizes = [sum(map(len, of)) for of in ([d.slots for d in own], [d.fetch for d in own])]
        plans = []
        for rank, request in enumerate(requests):
            parts, tail = [HomePart(d.told, d.replies[rank], len(d.fetch)) for d in shared], None
            if own:
                replies = tuple(home[rank] for home in told)
                tail = ShardParts(own[rank], replies, *sizes, self._settings.early)
            plans.append(self._ranks[rank].assemble(request, parts, shared[rank], after, tail))
        return plans


def record_ids(
    steps: Iterable[np.ndarray],
    rows: int,
    worlds: Sequence[int] = (1,),
    most_bytes: int | None = None,
) -> Trace:
    """The trace of steps of ids, int64 `[n]`, of one table of `rows` rows: each of W ranks takes a
    contiguous part of a step."""
    recorder = Recorder(np.array([0, rows]), worlds, most_bytes)
    for ids in steps:
        recorder.add(lambda *place, ids=ids: ids[slice(*slice_bounds(len(ids), *place))])
        if recorder.full:
            break
    return recorder.finish()
