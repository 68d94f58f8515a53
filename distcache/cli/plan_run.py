"""A plan: its command line, and the predictions over ranks that it asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from distcache.cli.compose import Line
from distcache.cli.plan_measure import DENSE_FEATURES, dense_layers
from distcache.config import option
from distcache.config.checks import at_least, byte_count
from distcache.config.tree import OptimConfig
from distcache.cost.cluster import DEVICES, Cluster, Compute, Link, device_compute, parse_link
from distcache.cost.demand import Demand, TableSource, counted_sources, demand_at, zipf_sources
from distcache.cost.predict import (
    OBJECTIVES,
    Crossover,
    Point,
    Prediction,
    Settings,
    compare,
    crossovers,
    powers_of_two,
    predict,
    ranks_per_node,
    sweep,
    winner,
)
from distcache.cost.traffic import MIXED
from distcache.data.raw.settings import PRESETS as TABLES
from distcache.errors import ConfigError
from distcache.models import build_model
from distcache.optim import RowUpdate, row_update
from distcache.popularity.slots import cache_slots
from distcache.popularity.statistics import read_statistics
from distcache.trainer.measure import Measured

# -----------------------------------------------------------------------------
# The command line of `distcache.plan`: its keys, checked, and what they describe.

_STATES = ("auto", "replicated", "home")
_LEAST_MEMORY = 1e3
"""Bytes of a device; fewer were meant to be of another unit."""


@dataclass
class Options:
    """The keys of `distcache.plan`."""

    statistics: str = option("", "folder of distcache.analyze or distcache.preprocess")
    preset: str = option("", f"table sizes: {', '.join(f'criteo_{name}' for name in TABLES)}")
    table_rows: list[int] | None = option(None, "rows of each table, [1000,50]")
    zipf: list[float] = option([1.05], "exponent of each table, or one for all")
    bag_size: list[float] = option([1.0], "ids of a sample in each table, or one for all")
    width: list[int] = option([16], "width D of each table, or one for all")
    batch: int = option(2048, "samples of one rank and step (b)")
    optim: OptimConfig = field(default_factory=OptimConfig)
    dense_parameters: int = option(-1, "of the dense part; -1: those of the default DLRM")
    world_size: int = option(8, "ranks (W)")
    nodes: int = option(1, "nodes that they are on, as many on each")
    inside: Any = option(
        "nvlink4", "link between ranks of a node; by name, or '{bandwidth: 25e9, latency: 5e-6}'"
    )
    between: Any = option("400gbe", "link from a node to others, one network card of it")
    cards: int = option(0, "network cards of a node; 0: one per rank")
    host: Any = option("pcie5", "link of a rank to its host's memory")
    device: str = option("h100", f"what computes: {', '.join(DEVICES)}")
    device_memory: str = option("", "bytes of a device, such as 80g; empty: the device's")
    measure: bool = option(False, "measure inside, host and compute on this machine")
    measure_ranks: int = option(2, "measure=true: local ranks that measure")
    cache_rows: int = option(0, "slots of a rank; 0: by cache_ratio")
    cache_ratio: float = option(0.015, "slots of a rank as a share of all rows")
    state: str = option("auto", "optimizer state of replicated rows: auto, replicated or home")
    replicated_rows: Any = option(None, "mixed with these rows, {t_cat_0: 1000}; null: the best")
    objective: str = option("time", "what the winner has least of: time or bytes")
    lookahead: int = option(8, "window L of the planner, steps")
    prefetch: int = option(1, "steps P that movement runs ahead")
    steps: int = option(0, "of a run from an empty cache; 0: once the cache is warm")
    most_ranks: int = option(1024, "the sweep goes over 1, 2, 4, ... ranks up to this")
    output: str = option("", "folder of the report; empty: runs/plan-<time>")


@dataclass(frozen=True)
class Request:
    """What to predict. `between`: of one rank with a card of its own; `device_memory` in bytes,
    None: not limited; `replicated_rows`: {table: K} or None for the best."""

    options: Options
    sources: tuple[TableSource, ...]
    update: RowUpdate
    inside: Link
    between: Link
    host: Link
    device_memory: int | None
    replicated_rows: dict[str, int] | None
    output: Path

    @property
    def state(self) -> str:
        """Where the optimizer state of replicated rows lies: `replicated` or `home`."""
        given = self.options.state
        return self.update.state_place if given == "auto" else given

    @property
    def state_widths(self) -> list[int]:
        """S of each table's rows."""
        return [self.update.state_width(source.dim) for source in self.sources]


def parse_request(line: Line[Options]) -> Request:
    """The request of a command line; ConfigError, naming the key, for what makes no sense."""
    options, given = line.values, line.given
    least = {"batch": 1, "world_size": 1, "nodes": 1, "cache_rows": 0, "lookahead": 0}
    least |= {"prefetch": 0, "steps": 0, "most_ranks": 1, "cards": 0, "measure_ranks": 1}
    for key, bound in least.items():
        at_least(key, getattr(options, key), bound)
    if options.world_size % options.nodes:
        raise ConfigError(
            f"nodes={options.nodes} does not divide world_size={options.world_size}: every node "
            "has as many ranks; give numbers that do"
        )
    _check_choices(options, given)
    measured = options.measure and "device_memory" not in given and "device" not in given
    memory = None if measured else int(DEVICES[options.device][0])
    if options.device_memory:
        memory = _device_memory(options.device_memory)
    name = f"runs/plan-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return Request(
        options,
        tuple(_sources(options, given)),
        row_update(options.optim.name, 0.0),
        parse_link("inside", options.inside),
        parse_link("between", options.between),
        parse_link("host", options.host),
        memory,
        _replicated(options.replicated_rows),
        Path(options.output or name),
    )


def _check_choices(options: Options, given: Collection[str]) -> None:
    """Raise ConfigError for a name that is none, and for keys that exclude each other."""
    if options.objective not in OBJECTIVES:
        raise ConfigError(f"objective={options.objective}: choose {' or '.join(OBJECTIVES)}")
    if options.state not in _STATES:
        raise ConfigError(f"state={options.state} is unknown: choose {', '.join(_STATES)}")
    if options.device not in DEVICES:
        raise ConfigError(
            f"device={options.device} is unknown: choose {', '.join(DEVICES)}, or measure=true"
        )
    if options.cache_rows and "cache_ratio" in given:
        raise ConfigError(
            f"cache_rows={options.cache_rows} and cache_ratio={options.cache_ratio} contradict "
            "each other: give one of them"
        )
    timed = ["host"] + ["inside"] * (options.measure_ranks > 1)  # one rank has no link to time
    for key in timed:
        if options.measure and key in given:
            raise ConfigError(
                f"{key}={getattr(options, key)} and measure=true, which times this machine's: "
                "leave one out"
            )


def _sources(options: Options, given: Collection[str]) -> list[TableSource]:
    """The tables, from statistics or sizes. ConfigError where they contradict each other."""
    rows = _sizes(options, given)
    if options.statistics:
        for key in ("zipf", "bag_size"):
            if key in given:
                raise ConfigError(
                    f"{key}={getattr(options, key)} and statistics={options.statistics}: the "
                    f"statistics say how rows are looked up: leave {key} out"
                )
        statistics = read_statistics(options.statistics, "statistics")
        if rows and tuple(rows) != statistics.table_rows:
            raise ConfigError(
                f"statistics={options.statistics} are of tables with "
                f"{list(statistics.table_rows)} rows (fingerprint {statistics.fingerprint}), but "
                f"{list(rows)} are asked for: count this data with python -m distcache.analyze, "
                "or leave table_rows and preset out"
            )
        dims = _each("width", options.width, len(statistics.tables))
        return counted_sources(statistics, dims)
    if not rows:
        raise ConfigError(
            "no tables: give statistics=<folder>, preset=criteo_kaggle, or table_rows=[1000,50]"
        )
    count = len(rows)
    for size in rows:
        if size < 1:
            raise ConfigError(f"table_rows={list(rows)}: a table has at least 1 row")
    for key, values in (("bag_size", options.bag_size), ("zipf", options.zipf)):
        if min(values) < 0:
            raise ConfigError(f"{key}={min(values)}: give at least 0")
    return zipf_sources(
        rows,
        _each("width", options.width, count),
        _each("bag_size", options.bag_size, count),
        _each("zipf", options.zipf, count),
    )


def _sizes(options: Options, given: Collection[str]) -> tuple[int, ...]:
    if options.preset and "table_rows" in given:
        raise ConfigError(
            f"preset={options.preset} and table_rows={options.table_rows}: give one of them"
        )
    if options.preset:
        name = options.preset.removeprefix("criteo_")
        if name not in TABLES:
            known = ", ".join(f"criteo_{name}" for name in TABLES)
            raise ConfigError(f"preset={options.preset} is unknown: choose {known}")
        return TABLES[name]
    return tuple(options.table_rows or ())


def _each(key: str, values: Sequence[Any], count: int) -> list[Any]:
    """One value for each of `count` tables."""
    if len(values) not in (1, count):
        raise ConfigError(
            f"{key} has {len(values)} entries for {count} tables: give one for all, or one each"
        )
    if key == "width" and min(values) < 1:
        raise ConfigError(f"width={min(values)}: give at least 1")
    return list(values) * (count if len(values) == 1 else 1)


def _replicated(rows: Any) -> dict[str, int] | None:
    if rows is None:
        return None
    whole = isinstance(rows, dict) and all(type(count) is int for count in rows.values())
    if not whole:
        raise ConfigError(
            f"replicated_rows={rows}: give the rows of each table, '{{t_cat_0: 1000}}'"
        )
    return {str(name): count for name, count in rows.items()}


def _device_memory(text: str) -> int:
    count = byte_count("device_memory", text, kilo=1000)
    if count < _LEAST_MEMORY:
        raise ConfigError(
            f"device_memory={text}: give bytes, at least {_LEAST_MEMORY:,.0f}, such as 80g"
        )
    return count


# -----------------------------------------------------------------------------
# The predictions of a request: the cluster that was asked for, and the sweep over ranks.

ITEMSIZE = 4
"""Bytes of an element: float32."""


@dataclass(frozen=True)
class Plan:
    """What was predicted. `here`: for `cluster`, which was asked for; `points`: the sweep;
    `dense_parameters` of the dense part; `measured`: this machine, None: presets; `warnings`."""

    request: Request
    cluster: Cluster
    here: Point
    points: tuple[Point, ...]
    crossovers: tuple[Crossover, ...]
    dense_parameters: int
    measured: Measured | None
    warnings: tuple[str, ...]


class Worlds:
    """Demand, cluster and settings of a request at any number of ranks."""

    def __init__(self, request: Request, measured: Measured | None, on_cpu: bool) -> None:
        self.request, self.measured, self.on_cpu = request, measured, on_cpu
        options = request.options
        self.dense = options.dense_parameters
        if self.dense < 0:
            self.dense = default_parameters([source.dim for source in request.sources])
        widest = max(request.sources, key=lambda source: source.lookups * source.dim)
        state = request.update.state_width(widest.dim)
        self.compute: Compute = (
            device_compute(options.device, widest.dim, state, self.dense)
            if measured is None
            else measured.compute
        )

    def at(self, world: int) -> tuple[Demand, Cluster, Settings]:
        """Those of W = `world` ranks, `batch` samples on each, as many to a node as asked for."""
        request, options = self.request, self.request.options
        local = ranks_per_node(world, options.world_size // options.nodes)
        return self._of(world, world // local, request)

    def here(self) -> tuple[Demand, Cluster, Settings]:
        """Those that were asked for."""
        options = self.request.options
        return self._of(options.world_size, options.nodes, self.request)

    def _of(self, world: int, nodes: int, request: Request) -> tuple[Demand, Cluster, Settings]:
        options = request.options
        each = (request.sources, request.state_widths, options.batch)
        demand = demand_at(*each, world, world // nodes)
        groups = [(g.rows, g.dim, g.state_width) for g in demand.groups]
        rows = options.cache_rows or None
        ratio = None if rows else options.cache_ratio
        slots = cache_slots(rows, ratio, None, groups, ITEMSIZE, world)
        settings = Settings(
            tuple(slots),
            request.state,
            options.lookahead,
            options.prefetch,
            options.steps or None,
            ITEMSIZE,
            self.dense,
        )
        return demand, self._cluster(world, nodes), settings

    def _cluster(self, world: int, nodes: int) -> Cluster:
        request = self.request
        local = world // nodes
        between = request.between.shared(max(local / (request.options.cards or local), 1.0))
        cluster = Cluster(
            world,
            request.host,
            request.inside,
            between,
            nodes,
            request.device_memory,
            self.compute,
        )
        if self.measured is None:
            return cluster
        found = self.measured
        return replace(
            cluster,
            host=replace(request.host, bandwidth=found.host, latency=0.0, name="measured"),
            inside=request.inside  # one rank has no link to measure
            if found.inside is None
            else replace(
                request.inside,
                bandwidth=found.inside,
                latency=found.latency_s / (request.options.measure_ranks - 1),
                name="measured",
            ),
            collective_s=0.0,
            overlap=0.0 if self.on_cpu else 1.0,
        )


def make_plan(request: Request, measured: Measured | None, on_cpu: bool) -> Plan:
    """Predict everything. Raises ConfigError for K beyond a table, or a world that is none."""
    worlds, options = Worlds(request, measured, on_cpu), request.options
    demand, cluster, settings = worlds.here()
    here = compare(demand, cluster, settings, options.objective)
    if request.replicated_rows is not None:
        own = predict(MIXED, demand, cluster, settings, request.replicated_rows)
        others = tuple(p for p in here.predictions if p.placement != MIXED)
        ordered = _ordered((*others, own))
        here = replace(here, predictions=ordered, best=winner(ordered, options.objective))
    points = sweep(powers_of_two(options.most_ranks), worlds.at, options.objective)
    return Plan(
        request,
        cluster,
        here,
        tuple(points),
        tuple(crossovers(points, options.objective)),
        worlds.dense,
        measured,
        tuple(_warnings(request, [*points, here])),
    )


def default_parameters(dims: Sequence[int]) -> int:
    """Parameters of the DLRM that `measure=true` times, over tables of the mean width."""
    width = max(1, round(sum(dims) / len(dims)))
    with torch.device("meta"):
        model: Any = build_model("dlrm", DENSE_FEATURES, [width] * len(dims), *dense_layers(width))
    return sum(parameter.numel() for parameter in model.parameters())


def _ordered(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """`mixed` third again."""
    rest = [p for p in predictions if p.placement != MIXED]
    mixed = [p for p in predictions if p.placement == MIXED]
    return (*rest[:2], *mixed, *rest[2:])


def _warnings(request: Request, points: Sequence[Point]) -> list[str]:
    """What the predictions cannot know."""
    found = []
    most = max(point.world_size for point in points)
    short = [
        source.name
        for source in request.sources
        if source.counted is not None
        and source.lookups * request.options.batch * most > source.counted
    ]
    if short:
        found.append(
            f"the statistics count fewer lookups than one step of {most} ranks makes in "
            f"{len(short)} of {len(request.sources)} tables: their distinct rows of all ranks are "
            "a lower bound there; count more samples"
        )
    return found
