"""What a cache would do: a trace through cases of policy, size, window, prefetch and ranks.

Every case runs the planner that training runs, one for each home, over the distinct rows that the
trace holds; nothing else is made, no tensors, groups or clock. The counts are those of a training
run over the same steps, to the row. `simulator` is the slow twin, which assembles whole plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.belady import belady
from distcache.planner.cases import Case, GroupCounts, Outcome
from distcache.planner.home import HomePlanner
from distcache.planner.policy import Policy
from distcache.planner.trace import HomeTrace, Trace

Popularity = Callable[[Case, int], np.ndarray]
"""The popularity class of every row, uint8 `[V]`, for a case and the number of a group."""


def replay(
    trace: Trace | Sequence[Trace],
    cases: Sequence[Case],
    popularity: Popularity | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """The outcome of each case over a trace: one for each group of tables, of the same steps.

    `popularity`: for policies that rank rows by statistics; `progress`: told of every outcome when
    it is there. A case that training would refuse is an outcome with `refused`. Memory beside the
    traces: 8 bytes or so per row that the trace names, and the slots' (`victims`). Raises
    ConfigError for a case that these traces, or this call, cannot serve.
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


def miss_curve(
    trace: Trace, sizes: Sequence[int], case: Case, popularity: Popularity | None = None
) -> list[float | None]:
    """Rows fetched / distinct rows for each cache size in `sizes` (C of one group), with all else
    as in `case`; None where training would refuse the size."""
    cases = [
        Case(case.policy, (size,), case.lookahead, case.prefetch, case.world_size) for size in sizes
    ]
    return [
        None if outcome.refused or not outcome.distinct else outcome.fetched / outcome.distinct
        for outcome in replay(trace, cases, popularity)
    ]


def make_planner(
    layout: RowLayout, slots: int, prefetch: int, policy: Policy, popularity: np.ndarray | None
) -> HomePlanner:
    """The planner of one home, as training makes it; `layout` has the home's rows alone."""
    if policy.name not in ("lookahead", "lru") or policy.ranking != "lru" or policy.admission:
        raise ConfigError(f"the policy {policy} cannot be planned yet")
    return HomePlanner(layout, 0, slots, prefetch, policy.uses_window)


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
        if case.policy is not None and case.policy.needs_popularity and popularity is not None:
            classes = popularity(case, group)
        counted = []
        for home in trace.of_world(case.world_size):
            if case.policy is None:
                counted.append(_least(home, trace.training, slots))
                continue
            own = None if classes is None else classes[home.names]
            planner = make_planner(_alone(home), slots, case.prefetch, case.policy, own)
            run = _HomeRun(home, trace.training, planner, case)
            counted.append(run.run())
            tight |= run.latest_use >= np.arange(trace.steps) - case.prefetch
        groups.append(_summed(counted, trace))
    seconds = time.perf_counter() - started
    training = traces[0].training
    return Outcome(
        case, int(training.sum()), tuple(groups), None, int(tight[training].sum()), seconds
    )


def _alone(home: HomeTrace) -> RowLayout:
    """A home's rows by number, as a world of its own: homes decide alone."""
    return RowLayout([TableSpec("trace", max(len(home.names), 1), 1, ("trace",))], 1)


def _summed(counted: Sequence[dict[str, int]], trace: Trace) -> GroupCounts:
    return GroupCounts(trace.ids, **{key: sum(c[key] for c in counted) for key in counted[0]})


class _HomeRun:
    """A planner over the trace of its home. `latest_use` int32 `[steps]`: latest last use among the
    victims of each step, -1 for none."""

    def __init__(
        self, home: HomeTrace, training: np.ndarray, planner: HomePlanner, case: Case
    ) -> None:
        self.home, self.training, self.planner, self.case = home, training, planner, case
        self.latest_use = np.full(home.steps, -1, dtype=np.int32)
        self._dirty = None if training.all() else np.zeros(len(home.names), dtype=bool)
        self._counts = dict.fromkeys(("lookups_hit", "distinct", "fetched", "written_back"), 0)

    def run(self) -> dict[str, int]:
        """Ingest and decide every step in the order of training; the counts of `GroupCounts`."""
        home, window = self.home, self.case.lookahead
        for step in range(home.steps):
            numbers = home.numbers[home.starts[step] : home.starts[step + 1]].astype(np.int64)
            kind = "train" if self.training[step] else "eval"
            self.planner.ingest(step, kind, [numbers])
            if step >= window:
                self._decide(step - window)
        for step in range(max(home.steps - window, 0), home.steps):
            self._decide(step)
        counts = self._counts
        left = counts["fetched"] - counts["written_back"]
        return {**counts, "left_dirty": left if self._dirty is None else int(self._dirty.sum())}

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
            self._dirty[self.home.numbers[low:high]] = True
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
