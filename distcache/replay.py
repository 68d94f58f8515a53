"""What a cache would do and send: a trace through cases, beside Belady's MIN."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from distcache.compiled import array, compiled, i8, in4, in8, out1, out4, types
from distcache.errors import ConfigError, StepTooLargeError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomeDecision, HomePlanner
from distcache.planner.victims import Policy
from distcache.popularity.slots import StepCurves
from distcache.popularity.statistics import GroupPopularity, Statistics, TableCounts, row_classes
from distcache.trace import HomeTrace, Trace


@dataclass(frozen=True)
class Case:
    """One configuration. `policy` None: Belady's MIN, the offline optimum; `slots`: C per rank of
    each group; `lookahead` L, `prefetch` P and `world_size` W, as in training."""

    policy: Policy | None
    slots: tuple[int, ...]
    lookahead: int = 8
    prefetch: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        if not self.slots or min(self.slots) < 1:
            raise ConfigError(f"slots {self.slots}: give at least one for each group of tables")
        for name, least in (("lookahead", 0), ("prefetch", 0), ("world_size", 1)):
            if getattr(self, name) < least:
                value = f"{name.replace('_', ' ')} {getattr(self, name)}"
                raise ConfigError(f"{value} must be at least {least}")

    @property
    def home_slots(self) -> tuple[int, ...]:
        """Slots of one home in each group: ceil(C / W)."""
        return tuple(-(-slots // self.world_size) for slots in self.slots)

    @property
    def label(self) -> str:
        """The policy in words, for tables."""
        if self.policy is None:
            return "MIN"
        if self.policy.uses_window:
            return f"lookahead {self.lookahead}, {self.policy.tail}"
        return self.policy.name


@dataclass(frozen=True)
class GroupCounts:
    """Counts of one group over all training steps and homes.

    `lookups_hit`: ids whose row was cached when planned; `distinct`: distinct rows, summed over
    steps; `fetched` and `written_back`: rows moved for training steps, as `rows_fetched` and
    `rows_written_back` of `summary.json`.
    """

    ids: int = 0
    lookups_hit: int = 0
    distinct: int = 0
    fetched: int = 0
    written_back: int = 0


def _over_groups(name: str) -> property:
    """A count of `GroupCounts`, summed over the groups of an outcome."""
    return property(lambda outcome: sum(getattr(group, name) for group in outcome.groups))


@dataclass(frozen=True)
class Outcome:
    """What a case came to: the counts of `GroupCounts` by group and, by the same names, of all.

    `refused`: why training would refuse it, with nothing counted then; `tight_steps`: steps that
    found too few unheld slots, whose moves start later than P allows.
    """

    case: Case
    steps: int
    groups: tuple[GroupCounts, ...]
    refused: str | None = None
    tight_steps: int = 0

    ids = _over_groups("ids")
    lookups_hit = _over_groups("lookups_hit")
    distinct = _over_groups("distinct")
    fetched = _over_groups("fetched")
    written_back = _over_groups("written_back")

    @property
    def hit_rate(self) -> float | None:
        """Share of distinct rows found cached, `hit_rate` of `summary.json`; None without any."""
        return 1 - self.fetched / self.distinct if self.distinct else None

    @property
    def hit_rate_lookups(self) -> float | None:
        """Share of lookups whose row was cached; None without any."""
        return self.lookups_hit / self.ids if self.ids else None

    def bytes_moved(self, row_bytes: Sequence[int]) -> tuple[int, int]:
        """Bytes fetched, and written back, without what a checkpoint writes; `row_bytes`: of a row
        and its optimizer state, by group."""
        pairs = list(zip(self.groups, row_bytes, strict=True))
        return sum(g.fetched * n for g, n in pairs), sum(g.written_back * n for g, n in pairs)


# -----------------------------------------------------------------------------
# Belady's MIN over a whole trace: the fewest rows that any policy could fetch.
#
# L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
# Journal 5(2), 1966, at the granularity of batches: all rows of a step are in the cache in that
# step, and what stays between steps are those whose next use is nearest. No policy that must have
# a step's rows resident, whatever it knows, fetches fewer.


def belady(home: HomeTrace, slots: int) -> np.ndarray:
    """What MIN does at one home, with `slots` slots, which every step must fit; int64 `[steps, 3]`:
    rows fetched, ids that find their row cached, and rows evicted, as late as can be: in the step
    that needs their room.

    Rows with the same next use leave in the reverse of the order in which they were used last; any
    other choice among them fetches as many. Time O(n) for n distinct rows of all steps, and a scan
    over steps for the farthest; memory 4 n bytes, 9 for each row and 4 for each step.
    """
    counts = np.zeros((home.steps, 3), dtype=np.int64)
    next_use = np.empty(len(home.numbers), np.int32)
    name_next(home.starts, home.numbers, np.full(len(home.names), home.steps, np.int32), next_use)
    link, cached = np.full(len(home.names), -1, np.int32), np.zeros(len(home.names), np.uint8)
    heads = np.full(home.steps + 1, -1, np.int32)
    run_min(home.starts, home.numbers, home.counts, next_use, slots, heads, link, cached, counts)
    return counts


@compiled(types.void(in8, in4, out4, out4))
def name_next(
    starts: np.ndarray, numbers: np.ndarray, seen: np.ndarray, next_use: np.ndarray
) -> None:
    """Write to `next_use` the step that uses each entry of `numbers` next, the number of steps for
    none. `seen` int32 `[D]`, all the number of steps, is scratch."""
    for back in range(len(starts) - 1):
        step = len(starts) - 2 - back
        for i in range(starts[step], starts[step + 1]):
            row = numbers[i]
            next_use[i] = seen[row]
            seen[row] = step


@compiled(types.void(in8, in4, in4, in4, i8, out4, out4, out1, array(i8, True, 2)))
def run_min(
    starts: np.ndarray,
    numbers: np.ndarray,
    counts: np.ndarray,
    next_use: np.ndarray,
    slots: int,
    heads: np.ndarray,
    link: np.ndarray,
    cached: np.ndarray,
    out: np.ndarray,
) -> None:
    """The loop of MIN: cached rows lie in one list for each next use.

    `heads` int32 `[steps + 1]` and `link` int32 `[D]`: first row of each list and the one after
    each row, -1 for none; `cached` uint8 `[D]`. A step's hits are the whole list of that step.
    Writes `out` int64 `[steps, 3]`: rows fetched, ids that hit, rows evicted.
    """
    steps = len(starts) - 1
    size = 0  # rows cached
    far = 0  # no list beyond it has a row
    for step in range(steps):
        low, high = starts[step], starts[step + 1]
        fetched = hits = evicted = 0
        for i in range(low, high):
            if cached[numbers[i]]:
                hits += counts[i]
            else:
                fetched += 1
        heads[step] = -1
        size += fetched
        far = max(far, step)
        while size > slots:
            while heads[far] < 0:
                far -= 1
            row = heads[far]
            heads[far] = link[row]
            cached[row] = 0
            size -= 1
            evicted += 1
        for i in range(low, high):
            row, use = numbers[i], next_use[i]
            link[row] = heads[use]
            heads[use] = row
            cached[row] = 1
            far = max(far, use)
        out[step, 0] = fetched
        out[step, 1] = hits
        out[step, 2] = evicted


class HomeRun:
    """The planner of one home as training makes it, and which of its rows training has changed.

    Steps are ingested and decided in stream order, each L steps after it came; no tensors are made.
    """

    def __init__(self, planner: HomePlanner) -> None:
        self.planner = planner
        self._dirty = np.zeros(planner.slots, dtype=bool)

    def decide(self) -> tuple[HomeDecision, int]:
        """The oldest step, and how many dirty rows leave for it. Raises StepTooLargeError."""
        decision, first = self.planner.plan(), self.planner.own_slots.start
        leaving = decision.evict_slots - first
        count = int(np.count_nonzero(self._dirty[leaving]))
        self._dirty[leaving] = False
        if decision.kind == "train":
            self._dirty[decision.slots - first] = True
        return decision, count

    def over(
        self, steps: Iterable[tuple[str, np.ndarray]], lookahead: int
    ) -> Iterator[tuple[HomeDecision, int, np.ndarray]]:
        """What `decide` says of every step of a stream: its kind, and the distinct rows that it
        names at this home, local int64 `[n]`; and the canonical index of each of these."""
        waiting: deque[np.ndarray] = deque()
        for step, (kind, rows) in enumerate(steps):
            named, starts, places = self.planner.parts.divide(rows)
            self.planner.ingest(step, kind, [named], np.diff(starts)[None])
            waiting.append(places)
            if len(waiting) > lookahead:
                yield *self.decide(), waiting.popleft()
        while waiting:
            yield *self.decide(), waiting.popleft()


# -----------------------------------------------------------------------------
# What a cache would do: a trace through cases of policy, size, window, prefetch and ranks.
#
# Every case runs the planner that training runs, one for each home, over the distinct rows that the
# trace holds. The counts are those of a training run over the same steps, to the row.

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
    traces: what the planner of one home has in training. Raises ConfigError for a case that these
    traces, or this call, cannot serve.
    """
    traces = [trace] if isinstance(trace, Trace) else list(trace)
    for case in cases:
        if len(case.slots) != len(traces):
            raise ConfigError(f"{case} has slots for {len(case.slots)} groups, not {len(traces)}")
        for one in traces:
            one.of_world(case.world_size)
            if one.steps != traces[0].steps:
                raise ConfigError(
                    f"the groups' traces have {traces[0].steps} and {one.steps} steps: record them "
                    "together"
                )
        if popularity is None and case.policy is not None and case.policy.needs_popularity:
            raise ConfigError(
                f"the policy {case.label} ranks rows by statistics (cache.statistics), and none "
                "are given"
            )
    outcomes = []
    for case in cases:
        outcomes.append(_replay(traces, case, popularity))
        if progress is not None:
            progress(outcomes[-1])
    return outcomes


def refusal(traces: Sequence[Trace], case: Case) -> str | None:
    """Why training would refuse the case: the first step whose rows exceed a home's slots."""
    found: list[tuple[int, str]] = []
    for group, (trace, slots) in enumerate(zip(traces, case.home_slots, strict=True)):
        homes = np.stack([home.distinct for home in trace.of_world(case.world_size)])
        for step in np.flatnonzero((homes > slots).any(axis=0))[:1].tolist():
            home, need = int(homes[:, step].argmax()), int(homes.max()) * case.world_size
            text = (
                f"step {step}: home rank {home} of group {group} has {homes[home, step]} "
                f"distinct rows for {slots} slots; all steps fit in {need} slots per rank"
            )
            found.append((step, text))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _replay(traces: Sequence[Trace], case: Case, popularity: Popularity | None) -> Outcome:
    """One case over all groups."""
    refused, groups = refusal(traces, case), []
    if refused is not None:
        return Outcome(case, 0, tuple(GroupCounts() for _ in traces), refused)
    training = traces[0].training
    tight = np.zeros(len(training), dtype=bool)
    for group, (trace, slots) in enumerate(zip(traces, case.home_slots, strict=True)):
        classes = None
        if case.policy is not None and popularity is not None:
            classes = popularity(case, group)
        counted: Counter[str] = Counter()
        sizes = enumerate(np.diff(trace.offsets).tolist())
        specs = [TableSpec(f"t_{table}", rows, 1, (str(table),)) for table, rows in sizes]
        layout, known = RowLayout(specs, case.world_size), GroupPopularity(classes)
        for number, home in enumerate(trace.of_world(case.world_size)):
            if case.policy is None:
                counted.update(_least(home, training, slots))
                continue
            own = known.classes_at(layout, number)
            planner = HomePlanner(layout, number, slots, case.prefetch, case.policy, own)
            try:
                counts, latest = _count_home(home, training, planner, case.lookahead)
            except StepTooLargeError as error:  # of one part of the home
                return Outcome(case, 0, tuple(GroupCounts() for _ in traces), str(error))
            counted.update(counts)
            tight |= (latest >= np.arange(trace.steps) - case.prefetch) & (latest >= 0)
        groups.append(GroupCounts(trace.ids, **counted))
    steps = int(training.sum())
    return Outcome(case, steps, tuple(groups), None, int(tight[training].sum()))


def _count_home(
    home: HomeTrace, training: np.ndarray, planner: HomePlanner, window: int
) -> tuple[dict[str, int], np.ndarray]:
    """The counts of `GroupCounts`, and the latest last use among the victims of each step (int32
    `[steps]`, -1 for none), of a planner over the trace of its home."""
    latest = np.full(home.steps, -1, dtype=np.int32)
    counts: Counter[str] = Counter()
    run, local = HomeRun(planner), planner.layout.local(home.names)

    def named() -> Iterator[tuple[str, np.ndarray]]:
        for step in range(home.steps):
            rows = home.numbers[home.starts[step] : home.starts[step + 1]]
            yield "train" if training[step] else "eval", local[rows]

    for decision, leaving, places in run.over(named(), window):
        step = decision.step
        latest[step] = decision.latest_use
        if not training[step]:
            continue
        named_by = home.counts[home.starts[step] : home.starts[step + 1]]
        lookups = np.empty_like(named_by)
        lookups[places] = named_by
        counts["distinct"] += len(lookups)
        counts["fetched"] += len(decision.fetch)
        counts["lookups_hit"] += int(lookups.sum()) - int(lookups[decision.fetch].sum())
        counts["written_back"] += leaving
    return counts, latest


def _least(home: HomeTrace, training: np.ndarray, slots: int) -> dict[str, int]:
    """The counts of MIN at one home; all rows that leave count as written back."""
    counts, names = belady(home, slots), ("fetched", "lookups_hit", "written_back")
    of_training = dict(zip(names, counts[training].sum(axis=0).tolist(), strict=True))
    return of_training | {"distinct": int(home.distinct[training].sum())}


# -----------------------------------------------------------------------------
# Popularity classes counted from a trace itself: what statistics of that very data say.


def popularity_of(traces: Sequence[Trace]) -> Popularity:
    """The `popularity` for `replay`: classes of every row, uint8 `[V]`, by case and group.

    Counts are of the training steps. For `static` the hottest rows are pinned, as many as training
    pins with these counts.
    """
    known = []
    for trace in traces:
        rows, counts = trace.row_counts()
        total, distinct = int(counts.sum()), int(np.count_nonzero(counts))
        table = TableCounts("trace", trace.rows, total, distinct, counts, rows)
        known.append(Statistics((table,), "ids", int(trace.training.sum())))

    @cache
    def of(group: int, pinned: int) -> np.ndarray:
        return row_classes(known[group], [0], [pinned])

    def classes(case: Case, group: int) -> np.ndarray | None:
        if case.policy is None or not case.policy.needs_popularity:
            return None
        pinned = 0
        if case.policy.ranking == "static":
            step, ahead = StepCurves.of(known[group], [0], 1), case.prefetch + 1
            (pinned,) = step.pinned(case.slots[group], ahead, case.world_size)
        return of(group, pinned)

    return classes
