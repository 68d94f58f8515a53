"""What a cache would do: a trace through cases of policy, size, window, prefetch and ranks.

Every case runs the planner that training runs, one for each home, over the distinct rows that the
trace holds; nothing else is made, no tensors, groups or clock. The counts are those of a training
run over the same steps, to the row. `simulator` is the slow twin, which assembles whole plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.belady import belady
from distcache.planner.cases import Case, GroupCounts, Outcome
from distcache.planner.home import HomePlanner
from distcache.planner.policy import DEFAULT
from distcache.planner.trace import HomeTrace, Trace
from distcache.store.available import require_memory

Popularity = Callable[[Case, int], np.ndarray | None]
"""The popularity class of every row, uint8 `[V]`, for a case and the number of a group; None where
training would give the planner none."""


def replay(
    trace: Trace | Sequence[Trace],
    cases: Sequence[Case],
    popularity: Popularity | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """The outcome of each case over a trace: one for each group of tables, of the same steps.

    `popularity`: for policies that rank rows by statistics; `progress`: told of every outcome when
    it is there. A case that training would refuse is an outcome with `refused`. Memory beside the
    traces: 16 bytes or so per row that the trace names (`lfu`: 9 per row of the tables), and the
    slots' (`victims`). Raises ConfigError for a case that these traces, or this call, cannot serve.
    """
    traces = [trace] if isinstance(trace, Trace) else list(trace)
    for case in cases:
        _check(case, traces, popularity)
    outcomes = []
    for case in cases:
        outcomes.append(_replay(traces, case, popularity))
        if progress is not None:
            progress(outcomes[-1])
    return outcomes


@dataclass(frozen=True)
class _Place:
    """Where the rows of a home lie in its planner's index: `of` int64 `[D]`, by number, of `rows`.

    The rows that the trace names lie side by side, for speed, and decisions are the same. But the
    ranking `lfu` rounds counts by a hash of the row: it gets the places that training has.
    """

    of: np.ndarray
    rows: int

    @classmethod
    def make(cls, home: HomeTrace, trace: Trace, case: Case) -> _Place:
        if case.policy is None or case.policy.ranking != "lfu":
            return cls(np.arange(len(home.names)), max(len(home.names), 1))
        local_rows = -(-trace.rows // case.world_size)
        require_memory(
            9 * local_rows,
            f"the index of {case.label} over {local_rows} rows",
            "replay another policy, or more ranks",
        )
        return cls(home.names // case.world_size, local_rows)


def make_planner(
    home: HomeTrace, place: _Place, slots: int, case: Case, classes: np.ndarray | None
) -> HomePlanner:
    """The planner of one home as training makes it, a world of its own, for homes decide alone.

    `classes` uint8 `[V]`: of all rows, or None.
    """
    layout = RowLayout([TableSpec("trace", place.rows, 1, ("trace",))], 1)
    own = None
    if classes is not None:
        own = np.zeros(place.rows, np.uint8)
        own[place.of] = classes[home.names]
    return HomePlanner(layout, 0, slots, case.prefetch, case.policy or DEFAULT, own)


def _check(case: Case, traces: Sequence[Trace], popularity: Popularity | None) -> None:
    if len(case.slots) != len(traces):
        raise ConfigError(f"{case} has slots for {len(case.slots)} groups, not {len(traces)}")
    for trace in traces:
        trace.of_world(case.world_size)
        if trace.steps != traces[0].steps:
            raise ConfigError(
                f"the groups' traces have {traces[0].steps} and {trace.steps} steps: record them "
                "together"
            )
    if popularity is None and case.policy is not None and case.policy.needs_popularity:
        raise ConfigError(
            f"the policy {case.label} ranks rows by statistics (cache.statistics), and none are "
            "given"
        )


def refusal(traces: Sequence[Trace], case: Case) -> str | None:
    """Why training would refuse the case: the first step whose rows exceed a home's slots."""
    found = None
    for group, (trace, slots) in enumerate(zip(traces, case.home_slots, strict=True)):
        homes = np.stack([home.distinct for home in trace.of_world(case.world_size)])
        large = np.flatnonzero((homes > slots).any(axis=0))
        if len(large) and (found is None or large[0] < found[0]):
            step, home = int(large[0]), int(homes[:, large[0]].argmax())
            need = int(homes.max()) * case.world_size
            found = (
                step,
                (
                    f"step {step}: home rank {home} of group {group} has {homes[home, step]} "
                    f"distinct rows for {slots} slots; all steps fit in {need} slots per rank"
                ),
            )
    return None if found is None else found[1]


def _replay(traces: Sequence[Trace], case: Case, popularity: Popularity | None) -> Outcome:
    """One case over all groups."""
    started = time.perf_counter()
    refused = refusal(traces, case)
    if refused is not None:
        none = tuple(GroupCounts() for _ in traces)
        return Outcome(case, 0, none, refused, seconds=time.perf_counter() - started)
    tight = np.zeros(traces[0].steps, dtype=bool)
    groups = []
    for group, (trace, slots) in enumerate(zip(traces, case.home_slots, strict=True)):
        classes = None
        if case.policy is not None and popularity is not None:
            classes = popularity(case, group)
        counted = []
        for home in trace.of_world(case.world_size):
            if case.policy is None:
                counted.append(_least(home, trace.training, slots))
                continue
            place = _Place.make(home, trace, case)
            planner = make_planner(home, place, slots, case, classes)
            run = _HomeRun(home, place, trace.training, planner, case.lookahead)
            counted.append(run.run())
            late = run.latest_use >= np.arange(trace.steps) - case.prefetch
            tight |= late & (run.latest_use >= 0)
        groups.append(_summed(counted, trace))
    seconds = time.perf_counter() - started
    training = traces[0].training
    return Outcome(
        case, int(training.sum()), tuple(groups), None, int(tight[training].sum()), seconds
    )


def _summed(counted: Sequence[dict[str, int]], trace: Trace) -> GroupCounts:
    return GroupCounts(trace.ids, **{key: sum(c[key] for c in counted) for key in counted[0]})


class _HomeRun:
    """A planner over the trace of its home. `latest_use` int32 `[steps]`: latest last use among the
    victims of each step, -1 for none."""

    def __init__(
        self,
        home: HomeTrace,
        place: _Place,
        training: np.ndarray,
        planner: HomePlanner,
        window: int,
    ) -> None:
        self.home, self.place, self.training = home, place, training
        self.planner, self.window = planner, window
        self.latest_use = np.full(home.steps, -1, dtype=np.int32)
        self._dirty = None if training.all() else np.zeros(place.rows, dtype=bool)
        self._counts = dict.fromkeys(("lookups_hit", "distinct", "fetched", "written_back"), 0)

    def run(self) -> dict[str, int]:
        """Ingest and decide every step in the order of training; the counts of `GroupCounts`."""
        home, window = self.home, self.window
        for step in range(home.steps):
            kind = "train" if self.training[step] else "eval"
            self.planner.ingest(step, kind, [self._rows(step)])
            if step >= window:
                self._decide(step - window)
        for step in range(max(home.steps - window, 0), home.steps):
            self._decide(step)
        counts = self._counts
        left = counts["fetched"] - counts["written_back"]
        return {**counts, "left_dirty": left if self._dirty is None else int(self._dirty.sum())}

    def _rows(self, step: int) -> np.ndarray:
        """The distinct rows of a step, by their places; int64."""
        return self.place.of[self.home.numbers[self.home.starts[step] : self.home.starts[step + 1]]]

    def _decide(self, step: int) -> None:
        decision = self.planner.plan()
        self.latest_use[step] = decision.latest_use
        low, high = self.home.starts[step], self.home.starts[step + 1]
        leaving = len(decision.evict_rows)
        if self._dirty is not None:
            leaving = int(self._dirty[decision.evict_rows].sum())
            self._dirty[decision.evict_rows] = False
        if not self.training[step]:
            return
        if self._dirty is not None:
            self._dirty[self._rows(step)] = True
        counts, lookups = self._counts, self.home.counts[low:high]
        counts["distinct"] += len(lookups)
        counts["fetched"] += len(decision.fetch)
        counts["lookups_hit"] += int(lookups.sum()) - int(lookups[decision.fetch].sum())
        counts["written_back"] += leaving


def _least(home: HomeTrace, training: np.ndarray, slots: int) -> dict[str, int]:
    """The counts of MIN at one home; all rows that leave count as written back."""
    counts = belady(home, slots)
    return {
        "lookups_hit": int(counts.hits[training].sum()),
        "distinct": int(home.distinct[training].sum()),
        "fetched": int(counts.fetched[training].sum()),
        "written_back": int(counts.evicted[training].sum()),
        "left_dirty": int(counts.fetched.sum() - counts.evicted.sum()),
    }
