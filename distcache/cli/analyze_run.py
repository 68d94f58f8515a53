"""An analysis: its command line, how the hit rate grows with the cache, what is replayed."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distcache.cli.compose import Line
from distcache.cli.run import progress_bar
from distcache.config import option
from distcache.config.checks import check_section, one_of, refuse_if
from distcache.config.tree import Config
from distcache.data.batch import BatchCheck
from distcache.errors import ConfigError
from distcache.planner.victims import DEFAULT, POLICIES, TAILS, Policy
from distcache.popularity.curve import TableProfile, most_frequent
from distcache.popularity.slots import BY_CURVE
from distcache.replay import Case, Outcome, refusal, replay
from distcache.sizing.prediction import (
    Counted,
    RecordedRun,
    Sizes,
    configured_case,
    count_source,
    record_run,
    require_index,
    slots_of,
)
from distcache.sizing.resolve import request_of
from distcache.stopping import StopRequest
from distcache.trace import Trace
from distcache.trainer.build import build_source, build_tables
from distcache.trainer.schedule import make_schedule

log = logging.getLogger("distcache.analyze")

# -----------------------------------------------------------------------------
# The command line of `distcache.analyze`: its own keys, and overrides of the configuration.


DEFAULT_SIZES = (0.005, 0.015, 0.05)
"""Cache sizes that are simulated where nobody chose any, as shares of the rows."""


@dataclass
class Options:
    """Section `analyze`: what is counted, replayed and simulated."""

    target_hit_rate: Any = option(
        0.95, "share of the lookups that the cache shall serve", share="(0, 1)"
    )
    sample: Any = option(
        "auto",
        "share of the training steps to count, in (0, 1]; auto: all, or as many as have 300 M "
        "lookups, but 1 to 10 %",
        share="(0, 1]",
    )
    replay: int = option(
        20_000_000, "lookups of the run that are replayed through the planner", least=1
    )
    world_sizes: list[int] = option([1], "ranks; the advice is for the first")
    policies: list[str] = option(
        ["lookahead", "lru"],
        "simulate=true: which policies, or all; lookahead-lfu is lookahead with tail=lfu",
    )
    sizes: list[float] | None = option(
        None,
        "simulate=true: cache sizes: shares of the rows, or above 1 rows per rank; null: "
        f"{DEFAULT_SIZES}, or larger ones where a step needs them",
    )
    lookaheads: list[int] | None = option(
        None, "simulate=true: windows of lookahead, in steps; null: that of a run"
    )

    @property
    def chosen_policies(self) -> list[Policy]:
        """`policies` without their windows. Raises ConfigError for one that there is not."""
        known, found = [*(f"lookahead-{tail}" for tail in TAILS), *POLICIES], []
        every = [name for name in known if name != "lookahead"]
        for name in every if list(self.policies) == ["all"] else self.policies:
            one_of("analyze.policies", name, known)
            policy, _, tail = name.partition("-")
            found.append(Policy(policy, tail or DEFAULT.tail))
        return found


@dataclass
class AnalyzeConfig(Config):
    """The keys of the run that is predicted, and those of the analysis."""

    analyze: Options = field(default_factory=Options)
    simulate: bool = option(False, "replay policies x sizes x windows x ranks")
    output: str = option("", "folder of the report; empty: runs/analyze-<time>")


def check_line(line: Line[AnalyzeConfig]) -> None:
    """ConfigError, naming the key, for what makes no sense."""
    for key in ("run.dir", "parallel", "parallel.mode"):
        refuse_if(key in line.given, f"{key}: nothing is trained here: leave it out")
    options = line.values.analyze
    check_section("analyze", options)
    for key, bound in (("world_sizes", 1), ("lookaheads", 0)):
        given = getattr(options, key)
        wrong = given is not None and min(given, default=-1) < bound
        refuse_if(wrong, f"analyze.{key}={given}: give numbers from {bound}")
    for size in options.sizes or ():
        wrong = size <= 0 or (size > 1 and size != int(size))
        refuse_if(wrong, f"analyze.sizes={size}: give shares of the rows in (0, 1], or whole rows")
    simulate = line.values.simulate
    for key in ("policies", "sizes", "lookaheads"):
        refuse_if(
            f"analyze.{key}" in line.given and not simulate,
            f"analyze.{key} says what simulate=true replays: give that as well, or leave "
            f"analyze.{key} out",
        )
    _ = options.chosen_policies


CaseOf = Callable[[Sequence[int], int], Case]
"""The configured case with these slots per rank of each group, on so many ranks."""


def simulated(
    options: Options, prediction: RecordedRun, sizes: Sizes, case: CaseOf
) -> list[Outcome]:
    """What the policies, sizes, windows and ranks of `options` come to over the recorded steps,
    Belady's MIN first for each size and world."""
    cases, traces = list[Case](), prediction.traces
    chosen = options.sizes or fitting_sizes(traces, sizes)
    for world in options.world_sizes:
        for size in chosen:
            own = case(sizes.slots(size, world), world)
            cases.append(replace(own, policy=None, lookahead=0))
            for policy in options.chosen_policies:
                windows = options.lookaheads or [own.lookahead] if policy.uses_window else [0]
                cases += [replace(own, policy=policy, lookahead=steps) for steps in windows]
    with progress_bar("simulate", len(cases), "case") as bar:
        return replay(traces, cases, prediction.classes, lambda _: bar.update(1))


def fitting_sizes(traces: Sequence[Trace], sizes: Sizes) -> Sequence[float]:
    """`DEFAULT_SIZES`, from the smallest that holds every recorded step."""
    for least in GRID:
        cases = [Case(None, sizes.slots(least, w), world_size=w) for w in traces[0].homes]
        if not any(refusal(traces, case) for case in cases):
            break
    if least <= DEFAULT_SIZES[0]:
        return DEFAULT_SIZES
    # A step that fits to a row leaves no room for the next one: the smallest has a margin.
    smallest = rounded_up(_MARGIN * least)
    found = {smallest, rounded_up(2 * smallest), rounded_up(4 * smallest)}
    found |= {size for size in DEFAULT_SIZES if size > smallest}
    return sorted(found)[: len(DEFAULT_SIZES)]


# -----------------------------------------------------------------------------
# How the hit rate grows with the cache: replays by size, the best fixed set, and the target.

GRID = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes of the curve, as shares of the rows."""

_MARGIN = 1.5
"""Times the smallest size that holds a step: the smallest that is simulated by default."""

CLOSE = 0.99
"""Where the target is out of reach, this share of what the whole tables reach is aimed at."""

_TRIED = 513
"""Sizes, evenly spread by their logarithm, among which the target's is searched."""


@dataclass(frozen=True)
class SizePoint:
    """A cache of `ratio` of the rows: what the run comes to, and the best fixed set of as many rows
    of each group (`static`: share of lookups)."""

    ratio: float
    slots: tuple[int, ...]
    bytes: int
    estimate: Outcome
    static: float

    @property
    def rate(self) -> float:
        """Share of lookups served; below 0 where training would refuse the size."""
        found = self.estimate.hit_rate_lookups
        return -1.0 if found is None else found


@dataclass(frozen=True)
class Target:
    """The smallest cache, `point`, for a share of lookups: the `wanted` one, or where none reaches
    that `CLOSE` of what the `whole` tables on the device serve."""

    wanted: float
    whole: SizePoint
    point: SizePoint

    @property
    def reachable(self) -> bool:
        """Whether any cache reaches what was wanted."""
        return self.whole.rate >= self.wanted


@dataclass
class SizeSearch:
    """Replays of one policy by cache size, each size once, with `world_size` ranks."""

    prediction: RecordedRun
    sizes: Sizes
    profiles: Sequence[TableProfile]
    case: CaseOf
    world_size: int
    known: dict[tuple[int, ...], SizePoint] = field(default_factory=dict)

    def at(self, ratio: float) -> SizePoint:
        """The point of a cache of `ratio` of the rows."""
        slots = self.sizes.slots(ratio, self.world_size)
        if slots not in self.known:
            nbytes = self.sizes.bytes_of(slots, self.world_size)
            found = self.prediction.estimate(self.case(slots, self.world_size))
            fixed = rows_by_table(self.profiles, self.sizes.members, slots)
            curves = [profile.curve for profile in self.profiles]
            static = sum(c.held(c.counts, n) for c, n in zip(curves, fixed, strict=True))
            static /= sum(curve.lookups for curve in curves)
            self.known[slots] = SizePoint(ratio, slots, nbytes, found, static)
        return self.known[slots]

    def grid(self) -> list[SizePoint]:
        """The points of all sizes that training would not refuse, also those of the search."""
        for ratio in GRID:
            self.at(ratio)
        fits = [point for point in self.known.values() if point.estimate.refused is None]
        return sorted(fits, key=lambda point: point.slots)

    def target(self, wanted: float) -> Target:
        """The smallest cache that serves the share `wanted` of the lookups, to three digits."""
        whole = self.at(1.0)
        aim = wanted if whole.rate >= wanted else CLOSE * whole.rate
        tried = np.geomspace(1.0 / self.sizes.rows, 1.0, _TRIED).tolist()
        ratios = sorted(set(map(rounded_up, tried)))
        last = len(ratios) - 1  # the whole tables, which reach it
        ratio = ratios[bisect_left(ratios, aim, hi=last, key=lambda ratio: self.at(ratio).rate)]
        # By that number even where another gave the same slots before.
        point = replace(self.at(ratio), ratio=ratio)
        self.known[point.slots] = point
        return Target(wanted, whole, point)


def rows_by_table(
    profiles: Sequence[TableProfile], groups: Sequence[Sequence[int]], slots: Sequence[int]
) -> list[float]:
    """How many rows of each table are among the most frequent ones of its group of tables, as many
    as that has `slots`."""
    found = [0.0] * len(profiles)
    for members, count in zip(groups, slots, strict=True):
        curves = [profiles[table].curve for table in members]
        parts = most_frequent(curves, count, shared=True)
        for table, rows in zip(members, parts, strict=True):
            found[table] = rows
    return found


def rounded_up(ratio: float) -> float:
    """`ratio` to three digits, upwards, at most 1."""
    if ratio >= 1:
        return 1.0
    digits = 2 - math.floor(math.log10(ratio))
    return min(1.0, round(math.ceil(ratio * 10**digits - 1e-9) / 10**digits, digits))


@dataclass(frozen=True)
class Analysis:
    """All that was found out. `config`: of the run; `simulated`: empty without `simulate=true`;
    `files_order`: counted in the order of the files; `stopped_by`: the signal that cut it short,
    None for none."""

    options: Options
    config: Config
    counted: Counted
    sizes: Sizes
    prediction: RecordedRun
    estimates: list[Outcome]
    points: list[SizePoint]
    target: Target
    simulated: list[Outcome]
    files_order: bool
    stopped_by: int | None


def analyze(options: Options, simulate: bool, config: Config) -> Analysis:
    """Count and replay. Raises DataError for data without a lookup."""
    ranks = options.world_sizes
    source = build_source(config)
    tables = build_tables(config, source)
    check = BatchCheck(tables, source.features, config.data.on_bad_id)
    if config.cache.split != BY_CURVE:  # what is refused is refused before all the data is read
        slots_of(config, tables, ranks[0], None)
    require_index(tables, ranks)
    want = config.trainer
    schedule = make_schedule(source, 0, want.steps, want.eval_every, want.eval_steps)
    run_steps = schedule.steps or 0
    steps = source.steps_per_epoch or run_steps
    share = None if options.sample == "auto" else float(options.sample)
    counted = count_source(source, check, steps, share, progress_bar)
    sizes = Sizes(request_of(config, tables), counted.statistics)
    most = min(options.replay, counted.lookups) if counted.stopped_by else options.replay
    with progress_bar("record", None, "step") as bar, StopRequest() as stop:
        traces = record_run(source, check, schedule.order(), ranks, most, bar.update, stop)
    prediction = RecordedRun(traces, run_steps)
    if stop.signal:
        log.warning("stopped: the first %d steps of the run are replayed", prediction.recorded)

    def case(slots: Sequence[int], world: int) -> Case:
        return configured_case(config, source, tables, slots, world)

    estimates = []
    try:  # what training would refuse about the configured cache is said; all else is reported
        known = (counted.statistics, source)
        configured = [(slots_of(config, tables, w, *known), w) for w in ranks]
        estimates = [prediction.estimate(case(*one)) for one in configured]
    except ConfigError as error:
        log.warning("no run with the configured cache is predicted: %s", error)
    search = SizeSearch(prediction, sizes, counted.profiles, case, ranks[0])
    target = search.target(options.target_hit_rate)
    outcomes = simulated(options, prediction, sizes, case) if simulate else []
    replayed = (prediction, estimates, search.grid(), target, outcomes)
    ordered, by = hasattr(source, "in_file_order"), counted.stopped_by or stop.signal
    how = {"files_order": ordered, "stopped_by": by}
    return Analysis(options, config, counted, sizes, *replayed, **how)
