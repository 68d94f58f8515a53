"""An analysis: its command line, how the hit rate grows with the cache, files of ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from distcache.cli.compose import Line
from distcache.config import option
from distcache.config.checks import at_least, byte_count
from distcache.config.tree import Config
from distcache.errors import ConfigError
from distcache.planner.victims import DEFAULT, POLICIES, TAILS, Policy
from distcache.popularity.curve import StaticSet, StepCurves, TableProfile
from distcache.replay import Case
from distcache.trace import Trace
from distcache.trainer.prediction import Estimate, RecordedRun, Sizes

# -----------------------------------------------------------------------------
# The command line of `distcache.analyze`: its own keys, and overrides of the configuration.


DEFAULT_SIZES = (0.005, 0.015, 0.05)
"""Cache sizes that are simulated where nobody chose any, as shares of the rows."""


@dataclass
class Options:
    """Section `analyze`: what is counted, replayed and simulated."""

    target_hit_rate: float = option(0.95, "share of the lookups that the cache shall serve")
    sample: Any = option(
        "auto",
        "share of the training steps to count, in (0, 1]; auto: all, or as many as have 300 M "
        "lookups, but 1 to 10 %",
    )
    memory: str = option("4g", "bytes for counts; below 8 per row, large tables are sketched")
    replay: int = option(20_000_000, "lookups of the run that are replayed through the planner")
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
    lookaheads: list[int] = option([8], "simulate=true: windows of lookahead, in steps")
    ids_per_step: int = option(0, "trace=<file>: ids of a step; 0: those of a line, or row")
    trace_rows: int = option(0, "trace=<file>: rows of its table; 0: the largest id + 1")


@dataclass
class AnalyzeConfig(Config):
    """The keys of the run that is predicted, and those of the analysis."""

    analyze: Options = field(default_factory=Options)
    simulate: bool = option(False, "replay policies x sizes x windows x ranks")
    trace: str = option("", "a file of ids to simulate, in place of the data")
    output: str = option("", "folder of the report; empty: runs/analyze-<time>")


@dataclass(frozen=True)
class Request:
    """What to do. `trace`: a file of ids, empty without; `sample` None: auto; `memory` in bytes;
    `policies` without their windows; `overrides`: of the run that is predicted."""

    options: Options
    simulate: bool
    trace: str
    sample: float | None
    memory: int
    output: Path
    policies: tuple[Policy, ...]
    overrides: tuple[str, ...]


def parse_request(line: Line[AnalyzeConfig]) -> Request:
    """The request of a command line; ConfigError, naming the key, for what makes no sense."""
    for key in sorted(line.given.intersection(("run.dir", "parallel", "parallel.mode"))):
        raise ConfigError(f"{key}: nothing is trained here: leave it out")
    values, options = line.values, line.values.analyze
    if not 0 < options.target_hit_rate < 1:
        raise ConfigError(
            f"analyze.target_hit_rate={options.target_hit_rate}: give a share of the lookups "
            "above 0 and below 1, such as 0.95"
        )
    for key, bound in (("replay", 1), ("ids_per_step", 0), ("trace_rows", 0)):
        at_least(f"analyze.{key}", getattr(options, key), bound)
    for key, bound in (("world_sizes", 1), ("lookaheads", 0)):
        if min(getattr(options, key), default=-1) < bound:
            raise ConfigError(f"analyze.{key}={getattr(options, key)}: give numbers from {bound}")
    for size in options.sizes or ():
        if size <= 0 or (size > 1 and size != int(size)):
            raise ConfigError(
                f"analyze.sizes={size}: give shares of the rows in (0, 1], or whole rows"
            )
    _check_simulation(line)
    if values.trace and line.overrides:
        raise ConfigError(
            f"{line.overrides[0]} speaks of a data source, and trace={values.trace} takes its "
            "place: leave one of them out"
        )
    name = f"runs/analyze-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return Request(
        options,
        values.simulate,
        values.trace,
        _sample(options.sample),
        _memory(options.memory),
        Path(values.output or name),
        tuple(policy_named(name) for name in _names(options.policies)),
        line.overrides,
    )


def _check_simulation(line: Line[AnalyzeConfig]) -> None:
    """Keys of a simulation, where there is none."""
    if line.values.simulate:
        return
    if line.values.trace:
        raise ConfigError(
            f"trace={line.values.trace} is a trace to simulate: give simulate=true as well"
        )
    for key in ("policies", "sizes", "lookaheads"):
        if f"analyze.{key}" in line.given:
            raise ConfigError(
                f"analyze.{key} says what simulate=true replays: give that as well, or leave "
                f"analyze.{key} out"
            )


def policy_named(name: str) -> Policy:
    """`lookahead`, `lookahead-lfu`, `lru`, ... Raises ConfigError."""
    policy, _, tail = name.partition("-")
    if policy not in POLICIES or (tail and (policy != "lookahead" or tail not in TAILS)):
        choices = [*POLICIES, *(f"lookahead-{tail}" for tail in TAILS)]
        raise ConfigError(
            f"analyze.policies={name} is unknown: choose among {', '.join(choices)}, or all"
        )
    return Policy(policy, tail or DEFAULT.tail)


def cases_of(
    policies: Sequence[Policy],
    options: Options,
    slots: Callable[[float, int], tuple[int, ...]],
    prefetch: Callable[[tuple[int, ...], int], int],
) -> list[Case]:
    """Policies x sizes x windows x ranks, Belady's MIN first for each size and number of ranks.

    `slots`: those of every group for a size and a number of ranks; `prefetch`: P of a run with
    these slots and ranks.
    """
    cases = []
    for world in options.world_sizes:
        for size in (slots(size, world) for size in options.sizes):
            ahead = prefetch(size, world)
            cases.append(Case(None, size, 0, ahead, world))
            for policy in policies:
                windows = options.lookaheads if policy.uses_window else (0,)
                cases += [Case(policy, size, window, ahead, world) for window in windows]
    return cases


def fitting_sizes(
    chosen: Sequence[float] | None,
    traces: Sequence[Trace],
    slots: Callable[[float, int], tuple[int, ...]],
) -> tuple[float, ...]:
    """The sizes `chosen`; where nobody chose any, `DEFAULT_SIZES` from the smallest that holds
    every recorded step.

    `traces`: one of each group, whose steps say how many slots a home needs; `slots` as for
    `cases_of`.
    """
    if chosen is not None:
        return tuple(chosen)
    sizes = DEFAULT_SIZES

    def holds(size: float) -> bool:
        return all(
            max(int(home.distinct.max(initial=0)) for home in homes) * world <= count
            for world in traces[0].homes
            for homes, count in zip(
                (trace.homes[world] for trace in traces), slots(size, world), strict=True
            )
        )

    least = next((size for size in GRID if holds(size)), 1.0)
    if least <= sizes[0]:
        return sizes
    # A step that fits to a row leaves no room for the next one: the smallest has a margin.
    smallest = rounded_up(_MARGIN * least)
    found = {smallest, rounded_up(2 * smallest), rounded_up(4 * smallest)}
    found |= {size for size in sizes if size > smallest}
    return tuple(sorted(found)[: len(sizes)])


def _memory(text: str) -> int:
    count = byte_count("analyze.memory", text)
    if not count:
        raise ConfigError(f"analyze.memory={text}: give bytes, such as 4000000000 or 4g")
    return count


def _names(policies: Sequence[str]) -> Sequence[str]:
    if tuple(policies) != ("all",):
        return policies
    return (*(f"lookahead-{tail}" for tail in TAILS), *(p for p in POLICIES if p != "lookahead"))


def _sample(text: Any) -> float | None:
    if text == "auto":
        return None
    try:
        share = float(text)
    except (ValueError, TypeError):
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"analyze.sample={text}: give auto, or a share of the steps above 0 and at most 1"
        )
    return share


# -----------------------------------------------------------------------------
# How the hit rate grows with the cache: replays by size, the best fixed set, and the target.

GRID = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes of the curve, as shares of the rows."""

_MARGIN = 1.5
"""Times the smallest size that holds a step: the smallest that is simulated by default."""

CLOSE = 0.99
"""Where the target is out of reach, this share of what the whole tables reach is aimed at."""

_HALVINGS = 9
"""Of the logarithm of the size, while the target's size is searched."""


@dataclass(frozen=True)
class SizePoint:
    """A cache of `ratio` of the rows: what the run comes to, and the best fixed set of as many rows
    of each group (`static`: share of lookups, `static_distinct`: of a batch's distinct rows)."""

    ratio: float
    slots: tuple[int, ...]
    bytes: int
    estimate: Estimate
    static: float
    static_distinct: float

    @property
    def rate(self) -> float:
        """Share of lookups served; below 0 where training would refuse the size."""
        found = self.estimate.hit_rate_lookups
        return -1.0 if found is None else found


@dataclass(frozen=True)
class Target:
    """The smallest cache for a share of lookups. `whole`: with all rows on the device; `aim`: what
    was searched for, lower than `wanted` where no cache reaches that; `point`: the cache."""

    wanted: float
    aim: float
    whole: SizePoint
    point: SizePoint

    @property
    def reachable(self) -> bool:
        """Whether any cache reaches what was wanted."""
        return self.whole.rate >= self.wanted


class SizeSearch:
    """Replays of one policy by cache size, each size once."""

    def __init__(
        self,
        prediction: RecordedRun,
        sizes: Sizes,
        profiles: Sequence[TableProfile],
        case: Callable[[Sequence[int]], Case],
        world_size: int,
    ) -> None:
        """`case`: the configured case with these slots per rank."""
        self._prediction, self._sizes, self._case = prediction, sizes, case
        self._world = world_size
        self._static = [
            StaticSet.of(
                StepCurves(
                    tuple(profiles[table].curve for table in members),
                    tuple(profiles[table].batch_lookups for table in members),
                )
            )
            for members in sizes.members
        ]
        self._known: dict[tuple[int, ...], SizePoint] = {}

    def at(self, ratio: float) -> SizePoint:
        """The point of a cache of `ratio` of the rows."""
        slots = self._sizes.slots(ratio, self._world)
        if slots not in self._known:
            self._known[slots] = SizePoint(
                ratio,
                slots,
                self._sizes.bytes_of(slots, self._world),
                self._prediction.estimate(self._case(slots)),
                _joint(self._static, slots, StaticSet.lookup_rate, "lookups"),
                _joint(self._static, slots, StaticSet.hit_rate, "touched"),
            )
        return self._known[slots]

    def _named(self, ratio: float) -> SizePoint:
        """The point of `ratio`, by that number even where another gave the same slots before."""
        point = replace(self.at(ratio), ratio=ratio)
        self._known[point.slots] = point
        return point

    def grid(self) -> list[SizePoint]:
        """The points of all sizes that training would not refuse, also those of the search."""
        for ratio in GRID:
            self.at(ratio)
        fits = [point for point in self._known.values() if point.estimate.refused is None]
        return sorted(fits, key=lambda point: point.slots)

    def target(self, wanted: float) -> Target:
        """The smallest cache that serves the share `wanted` of the lookups, to three digits."""
        whole = self.at(1.0)
        aim = wanted if whole.rate >= wanted else CLOSE * whole.rate
        low, high = math.log(1.0 / self._sizes.rows), 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.at(math.exp(middle)).rate >= aim:
                high = middle
            else:
                low = middle
        point = self._named(rounded_up(math.exp(high)))
        while point.rate < aim and point.ratio < 1:  # where a larger cache serves a little less
            point = self._named(rounded_up(1.05 * point.ratio))
        return Target(wanted, aim, whole, point)


def rounded_up(ratio: float) -> float:
    """`ratio` to three digits, upwards, at most 1."""
    if ratio >= 1:
        return 1.0
    digits = 2 - math.floor(math.log10(ratio))
    return min(1.0, round(math.ceil(ratio * 10**digits - 1e-9) / 10**digits, digits))


def _joint(
    sets: Sequence[StaticSet],
    slots: Sequence[int],
    rate: Callable[[StaticSet, float], float],
    weight: str,
) -> float:
    """A rate over all groups, each with its own slots."""
    weights = [float(getattr(one, weight)[-1]) for one in sets]
    rates = [rate(one, count) for one, count in zip(sets, slots, strict=True)]
    return sum(w * r for w, r in zip(weights, rates, strict=True)) / max(sum(weights), 1e-300)
