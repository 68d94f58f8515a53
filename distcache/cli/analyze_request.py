"""The command line of `distcache.analyze`: its own keys, and overrides of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from distcache.bench.options import option, parse, usage
from distcache.errors import ConfigError
from distcache.planner.cases import Case
from distcache.planner.policy import DEFAULT, POLICIES, TAILS, Policy

PURPOSE = """Count the lookups of a data source and say which cache serves them.

  data=..., data.path=..., cache.rows=..., model.embedding_dim=..., optim=..., key=value
                                     overrides as of distcache.train, whose run is predicted
"""
_PREFIX = "analyze."
_BARE = ("simulate", "trace")
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Options:
    """The own keys, as they are typed."""

    target_hit_rate: float = option(0.95, "share of the lookups that the cache shall serve")
    sample: str = option("auto", "share of the training steps to count, in (0, 1]; auto: all, or "
                         "as many as have 300 M lookups, but 1 to 10 %")  # fmt: skip
    memory: str = option("4g", "bytes for counts; below 8 per row, large tables are sketched")
    output: str = option("", "folder of the report; empty: runs/analyze-<time>")
    replay: int = option(20_000_000, "lookups of the run that are replayed through the planner")
    world_sizes: tuple[int, ...] = option((1,), "ranks; the advice is for the first")
    policies: tuple[str, ...] = option(("lookahead", "lru"), "simulate=true: which policies, or "
                                       "all; lookahead-lfu is lookahead with tail=lfu")  # fmt: skip
    sizes: tuple[float, ...] = option((0.005, 0.015, 0.05), "simulate=true: cache sizes: shares "
                                      "of the rows, or above 1 rows per rank")  # fmt: skip
    lookaheads: tuple[int, ...] = option((8,), "simulate=true: windows of lookahead, in steps")
    ids_per_step: int = option(0, "trace=<file>: ids of a step; 0: those of a line, or row")
    trace_rows: int = option(0, "trace=<file>: rows of its table; 0: the largest id + 1")
    simulate: bool = option(False, "without analyze.: replay policies x sizes x windows x ranks")
    trace: str = option("", "without analyze.: a file of ids to simulate, in place of the data")


@dataclass(frozen=True)
class Request:
    """What to do. `sample` None: auto; `memory` in bytes; `policies` without their windows."""

    options: Options
    sample: float | None
    memory: int
    output: Path
    policies: tuple[Policy, ...]
    overrides: tuple[str, ...]


def help_text() -> str:
    """The text of `--help`."""
    lines = usage(Options, "distcache.analyze", PURPOSE).splitlines()
    own = [f"  {name}=" for name in Options.__dataclass_fields__ if name not in _BARE]
    shown = []
    for line in lines:
        mine = any(line.startswith(start) for start in own)
        shown.append(f"  {_PREFIX}{line[2:]}" if mine else line)
    return "\n".join(shown) + "\n"


def parse_request(arguments: Sequence[str]) -> Request:
    """The request of a command line; ConfigError, naming the key, for what makes no sense."""
    given: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.startswith(_PREFIX) and key.removeprefix(_PREFIX) not in _BARE:
            given[key.removeprefix(_PREFIX)] = value.strip("[]") if value else value
        elif equals and key in _BARE:
            given[key] = value
        elif key in ("run.dir", "parallel", "parallel.mode") and equals:
            raise ConfigError(f"{argument}: nothing is trained here: leave it out")
        elif argument.startswith("-"):
            raise ConfigError(f"{argument}: no such flag: --help shows the keys")
        else:
            overrides.append(argument)
    try:
        options: Any = parse(Options, given)
    except ConfigError as error:
        bare = str(error).startswith(_BARE)
        raise ConfigError(str(error) if bare else f"{_PREFIX}{error}") from None
    return _checked(options, tuple(overrides))


def _checked(options: Options, overrides: tuple[str, ...]) -> Request:
    if not 0 < options.target_hit_rate < 1:
        raise ConfigError(
            f"analyze.target_hit_rate={options.target_hit_rate}: give a share of the lookups "
            "above 0 and below 1, such as 0.95"
        )
    least = {"replay": 1, "ids_per_step": 0, "trace_rows": 0}
    for key, bound in least.items():
        if getattr(options, key) < bound:
            raise ConfigError(f"analyze.{key}={getattr(options, key)}: give at least {bound}")
    for key, bound in (("world_sizes", 1), ("lookaheads", 0)):
        if min(getattr(options, key)) < bound:
            raise ConfigError(f"analyze.{key}={getattr(options, key)}: give numbers from {bound}")
    for size in options.sizes:
        if size <= 0 or (size > 1 and size != int(size)):
            raise ConfigError(
                f"analyze.sizes={size}: give shares of the rows in (0, 1], or whole rows"
            )
    _check_simulation(options)
    if options.trace and overrides:
        raise ConfigError(
            f"{overrides[0]} speaks of a data source, and trace={options.trace} takes its place: "
            "leave one of them out"
        )
    name = f"runs/analyze-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return Request(
        options,
        _sample(options.sample),
        _bytes(options.memory),
        Path(options.output or name),
        tuple(policy_named(name) for name in _names(options.policies)),
        overrides,
    )


def _check_simulation(options: Options) -> None:
    """Keys of a simulation, where there is none."""
    if options.trace and not options.simulate:
        raise ConfigError(
            f"trace={options.trace} is a trace to simulate: give simulate=true as well"
        )
    for key in ("policies", "sizes", "lookaheads"):
        default = Options.__dataclass_fields__[key].default
        if not options.simulate and getattr(options, key) != default:
            raise ConfigError(
                f"analyze.{key} says what simulate=true replays: give that as well, or leave "
                f"analyze.{key} out"
            )


def policy_named(name: str) -> Policy:
    """`lookahead`, `lookahead-lfu`, `lru`, ...; with `+admission`. Raises ConfigError."""
    plain, _, admission = name.partition("+")
    policy, _, tail = plain.partition("-")
    known = admission in ("", "admission") and policy in POLICIES
    if not known or (tail and (policy != "lookahead" or tail not in TAILS)):
        choices = [*POLICIES, *(f"lookahead-{tail}" for tail in TAILS)]
        raise ConfigError(
            f"analyze.policies={name} is unknown: choose among {', '.join(choices)}, or all, each "
            "maybe with +admission"
        )
    return Policy(policy, tail or DEFAULT.tail, bool(admission))


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


def _names(policies: Sequence[str]) -> Sequence[str]:
    if tuple(policies) != ("all",):
        return policies
    return (*(f"lookahead-{tail}" for tail in TAILS), *(p for p in POLICIES if p != "lookahead"))


def _sample(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"analyze.sample={text}: give auto, or a share of the steps above 0 and at most 1"
        )
    return share


def _bytes(text: str) -> int:
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or (unit and unit not in _UNITS) or int(number) < 1:
        raise ConfigError(f"analyze.memory={text}: give bytes, such as 4000000000 or 4g")
    return int(number) * _UNITS.get(unit, 1)
