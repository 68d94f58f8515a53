"""A plan: its command line, this machine measured, and the predictions over ranks that it asks for.

`python -m distcache.cli.plan_run <JSON>` is one rank of the measurement, which writes its numbers.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from distcache.cli.compose import Line
from distcache.cli.run import leave, output_folder, run_job, set_up_logging, train_command
from distcache.comm.rendezvous import end_with_agent, find_place
from distcache.comm.world import World, close_world, open_world
from distcache.config import option
from distcache.config.checks import (
    byte_count,
    check_section,
    check_table_rows,
    one_of,
    refuse_if,
)
from distcache.config.tree import OptimConfig
from distcache.data.criteo_folder import PRESETS as TABLES
from distcache.errors import DistcacheError
from distcache.layout import TableSpec, group_tables, stored_dtype
from distcache.models import build_model
from distcache.optim import RowUpdate, row_update
from distcache.planner.victims import auto_lookahead
from distcache.popularity.slots import cache_slots, given_rows
from distcache.popularity.statistics import read_statistics
from distcache.sizing.cluster import (
    DEVICES,
    FILE,
    HOST,
    Cluster,
    HostTimes,
    device_compute,
    parse_link,
    read_cluster,
    write_cluster,
)
from distcache.sizing.cost import OBJECTIVES, Point, Settings, compare
from distcache.sizing.demand import Demand, TableSource, counted_sources, demand_at, zipf_sources
from distcache.sizing.measure import measure, measure_host
from distcache.store.rows import ACCESS, ZERO_COPY

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
    data_type: str = option(
        "FP32", "of rows as stored, cached and moved", choice=("FP32", "FP16", "BF16")
    )
    batch: int = option(2048, "samples of one rank and step (b)", least=1)
    optim: OptimConfig = field(default_factory=OptimConfig)
    dense_parameters: int = option(-1, "of the dense part; -1: those of the default DLRM")
    world_size: int = option(8, "ranks (W)", least=1)
    nodes: int = option(1, "nodes that they are on, as many on each", least=1)
    inside: Any = option(
        "nvlink4", "link between ranks of a node; by name, or '{bandwidth: 25e9, latency: 5e-6}'"
    )
    between: Any = option("400gbe", "link from a node to others, one network card of it")
    cards: int = option(0, "network cards of a node; 0: one per rank", least=0)
    host: Any = option("pcie5", "link of a rank to its host's memory")
    access: str = option("staged", f"way of rows over it: {', '.join(ACCESS)}", choice=ACCESS)
    device: str = option("h100", f"what computes: {', '.join(DEVICES)}", choice=tuple(DEVICES))
    device_memory: str = option("", "bytes of a device, such as 80GB; empty: the device's")
    measure: bool = option(False, "measure inside, host and compute on this machine")
    measure_ranks: int = option(2, "measure=true: local ranks that measure", least=1)
    cache_rows: int = option(
        0, "slots of a rank; 0: by cache_ratio, or without it as distcache.train chooses", least=0
    )
    cache_ratio: Any = option(None, "slots of a rank as a share of all rows", share="(0, 1]")
    state: str = option(
        "auto", "optimizer state of replicated rows: auto, replicated or home", choice=_STATES
    )
    replicated_rows: Any = option(None, "mixed with these rows, {t_cat_0: 1000}; null: the best")
    objective: str = option(
        "time", "what the winner has least of: time or bytes", choice=OBJECTIVES
    )
    lookahead: Any = option(
        "auto", "window L of the planner, steps; auto: as a run chooses it", counted=0
    )
    prefetch: int = option(1, "steps P that movement runs ahead", least=0)
    steps: int = option(0, "of a run from an empty cache; 0: once the cache is warm", least=0)
    most_ranks: int = option(1024, "the sweep goes over 1, 2, 4, ... ranks up to this", least=1)
    output: str = option("", "folder of the report; empty: runs/plan-<time>")


@dataclass(frozen=True)
class Request:
    """Input of the predictions. `cluster`: the requested one, its link `between` nodes as of one
    rank with a card of its own; `settings`: without slots; `replicated_rows`: {table: K} or None
    for the best."""

    options: Options
    sources: tuple[TableSource, ...]
    update: RowUpdate
    cluster: Cluster
    settings: Settings
    replicated_rows: dict[str, int] | None
    output: Path

    def on(self, world: int, nodes: int) -> tuple[Demand, Cluster, Settings]:
        """Demand, cluster and settings of W = `world` ranks on so many nodes, `batch` samples on
        each."""
        options, local, between = self.options, world // nodes, self.cluster.between
        if between is not None:
            between = between.shared(max(local / (options.cards or local), 1.0))
        cluster = replace(self.cluster, ranks=world, nodes=nodes, between=between)
        widths = [self.update.state_width(source.table.dim) for source in self.sources]
        demand = demand_at(self.sources, widths, options.batch, world)
        groups = [(g.rows, g.dim, g.state_width) for g in demand.groups]
        rows, ratio = options.cache_rows or None, options.cache_ratio
        expected = self._expected_rows(world)
        slots = cache_slots(rows, ratio, None, groups, ITEMSIZE, world, expected)
        return demand, cluster, replace(self.settings, slots=tuple(slots))

    def _expected_rows(self, world: int) -> list[float]:
        """Distinct rows of each group that P + 2 steps of so many ranks are expected to name."""
        samples = self.options.batch * world * (self.options.prefetch + 2)
        named = [source.curve.expected(samples * source.lookups) for source in self.sources]
        groups = group_tables([source.table for source in self.sources])
        return [sum(named[table] for table in members) for members in groups]


def widest(sources: Sequence[TableSource]) -> TableSource:
    """The table whose rows are most of a step's elements."""
    return max(sources, key=lambda source: source.lookups * source.table.dim)


def host_of(options: Options, host_times: HostTimes) -> HostTimes:
    """Return `host_times` for the requested access: with `zero_copy` the device itself gathers and
    scatters rows."""
    return replace(host_times, row_s=0.0) if options.access == ZERO_COPY else host_times


def parse_request(line: Line[Options]) -> Request:
    """The request of a command line; ConfigError, naming the key, for what makes no sense."""
    options, given = line.values, line.given
    check_section("", options)
    refuse_if(
        options.cache_rows and options.cache_ratio is not None,
        f"cache_rows={options.cache_rows} and cache_ratio={options.cache_ratio} contradict each "
        "other: give one of them",
    )
    timed = ["host"] + ["inside"] * (options.measure_ranks > 1)  # one rank has no link to time
    for key in timed:
        refuse_if(
            options.measure and key in given,
            f"{key}={getattr(options, key)} and measure=true, which times this machine's: leave "
            "one out",
        )
    measured = options.measure and "device_memory" not in given and "device" not in given
    sources, update = tuple(_sources(options, given)), row_update(options.optim.name, 0.0)
    tables = [source.table for source in sources]
    memory = None if measured else int(DEVICES[options.device][0])
    if options.device_memory:
        memory = byte_count("device_memory", options.device_memory)
        refuse_if(
            memory < _LEAST_MEMORY,
            f"device_memory={options.device_memory}: give bytes, at least {_LEAST_MEMORY:,.0f}, "
            "such as 80GB",
        )
    if (rows := options.replicated_rows) is not None:
        known = isinstance(rows, dict) and all(type(k) is int and k >= 0 for k in rows.values())
        how = "give the rows of each table, '{t_cat_0: 1000}'"
        refuse_if(not known, f"replicated_rows={rows}: {how}")
        counts = given_rows(rows, tables, "replicated_rows")
        rows = {table.name: count for table, count in zip(tables, counts, strict=True)}
    links = [parse_link(key, getattr(options, key)) for key in ("host", "inside", "between")]
    dims, parameters = [table.dim for table in tables], options.dense_parameters
    outputs = float(sum(dims))
    if parameters < 0:  # what the layers of the default model take and give, and pairs of vectors
        parameters, layers = default_parameters(dims), dense_layers(round(sum(dims) / len(dims)))
        outputs += sum(map(sum, layers)) + len(dims) * (len(dims) + 1) / 2
    dim, window = widest(sources).table.dim, options.lookahead
    state = update.state_width(dim)
    compute = device_compute(options.device, dim, state, parameters, outputs)
    shape = (options.world_size, *links, options.nodes, memory)
    cluster = Cluster(*shape, compute, host_times=host_of(options, HOST))
    if window == "auto":
        ids = options.batch * sum(source.lookups for source in sources)
        window = auto_lookahead(ids, options.prefetch)
    place = update.state_place if options.state == "auto" else options.state
    how = (window, options.prefetch, options.steps or None, ITEMSIZE, parameters)
    output = output_folder(options.output, "runs/plan-")
    return Request(options, sources, update, cluster, Settings((), place, *how), rows, output)


def _sources(options: Options, given: Collection[str]) -> list[TableSource]:
    """The tables, from statistics or sizes. ConfigError where they contradict each other."""
    rows = tuple(options.table_rows or ())
    if options.preset:
        sizes = f"preset={options.preset} and table_rows={options.table_rows}"
        refuse_if("table_rows" in given, f"{sizes}: give one of them")
        known = {f"criteo_{name}": rows for name, rows in TABLES.items()}
        one_of("preset", options.preset, list(known))
        rows = known[options.preset]
    if options.statistics:
        for key in ("zipf", "bag_size"):
            refuse_if(
                key in given,
                f"{key}={getattr(options, key)} and statistics={options.statistics}: the "
                f"statistics say how rows are looked up: leave {key} out",
            )
        statistics = read_statistics(options.statistics, "statistics")
        refuse_if(
            rows and tuple(rows) != statistics.table_rows,
            f"statistics={options.statistics} are of tables with {list(statistics.table_rows)} "
            f"rows (fingerprint {statistics.fingerprint}), but {list(rows)} are asked for: count "
            "this data with python -m distcache.analyze, or leave table_rows and preset out",
        )
        names = [table.table for table in statistics.tables]
        return counted_sources(statistics, _tables(options, names, statistics.table_rows))
    ways = "statistics=<folder>, preset=criteo_kaggle, or table_rows=[1000,50]"
    refuse_if(not rows, f"no tables: give {ways}")
    check_table_rows("table_rows", list(rows))
    tables = _tables(options, [f"t_cat_{index}" for index in range(len(rows))], rows)
    each = [_each(key, getattr(options, key), len(rows), 0) for key in ("bag_size", "zipf")]
    return zipf_sources(tables, *each)


def _tables(options: Options, names: Sequence[str], rows: Sequence[int]) -> list[TableSpec]:
    """The tables of so many rows, as wide and stored as is asked for."""
    stored, dims = stored_dtype(options.data_type), _each("width", options.width, len(rows), 1)
    each = zip(names, rows, dims, strict=True)
    return [TableSpec(name, count, dim, (name,), dtype=stored) for name, count, dim in each]


def _each(key: str, values: Sequence[Any], count: int, least: int) -> list[Any]:
    """One value for each of `count` tables, all of them at least `least`."""
    refuse_if(
        len(values) not in (1, count),
        f"{key} has {len(values)} entries for {count} tables: give one for all, or one each",
    )
    refuse_if(min(values) < least, f"{key}={min(values)}: give at least {least}")
    return list(values) * (count if len(values) == 1 else 1)


# -----------------------------------------------------------------------------
# This machine, timed by local ranks of their own: links, row operations and the dense part.

log = logging.getLogger("distcache.plan")

DENSE_FEATURES = 13


def measured_here(request: Request) -> Request:
    """The request with what this machine reaches, by as many local ranks as it asks for."""
    options, ranks = request.options, request.options.measure_ranks
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "log"
        want = {"width": widest(request.sources).table.dim, "tables": len(request.sources)}
        want |= {"batch": options.batch, "optim": options.optim.name, "out": folder}
        want |= {"table_rows": [source.curve.table_rows for source in request.sources]}
        command = train_command(ranks, [json.dumps(want)], "distcache.cli.plan_run")
        code = run_job(command, ranks, said)
        if code or not (Path(folder) / FILE).exists():
            raise DistcacheError(
                f"measure=true: {ranks} local ranks ended with exit code {code}:\n"
                f"{said.read_text()[-2000:]}"
            )
        found = read_cluster(folder)
    names = ("host", "compute", "collective_s", "overlap")
    measured = {name: getattr(found, name) for name in names}
    measured |= {"inside": found.inside} if ranks > 1 else {}  # one rank has no link to measure
    measured["host_times"] = host_of(options, found.host_times)
    return replace(request, cluster=replace(request.cluster, **measured))


def main() -> int:
    """One rank of the measurement; its exit code.

    Its argument says what to measure: for `batch` samples with `tables` vectors of `width` elements
    and the optimizer `optim`, over tables of `table_rows`; rank 0 writes the cluster of these ranks
    into the folder `out`.
    """
    end_with_agent()
    want, place = json.loads(sys.argv[1]), find_place()
    set_up_logging("INFO", place.rank, place.world_size)
    world: World | None = None
    try:
        world = open_world()
        widths = [want["width"]] * want["tables"]
        model = build_model("dlrm", DENSE_FEATURES, widths, *dense_layers(want["width"]))
        update, shape = row_update(want["optim"], 0.0), (want["batch"], DENSE_FEATURES, sum(widths))
        found = measure(world, want["width"], update, model.to(world.device), shape)
        host_times = measure_host(world, want["table_rows"], want["batch"], want["width"])
        if world.is_first:
            write_cluster(replace(found, host_times=host_times), Path(want["out"]))
        close_world(world)
        return 0
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    finally:
        if world is not None:
            close_world(world, orderly=False)


def dense_layers(width: int) -> tuple[Sequence[int], Sequence[int]]:
    """Layers of the dense part that is measured: DLRM's of experiment criteo_kaggle."""
    return (512, 256, 64, width), (512, 256, 1)


def default_parameters(dims: Sequence[int]) -> int:
    """Parameters of the DLRM that `measure=true` times, over tables of the mean width."""
    width = max(1, round(sum(dims) / len(dims)))
    with torch.device("meta"):
        model: Any = build_model("dlrm", DENSE_FEATURES, [width] * len(dims), *dense_layers(width))
    return sum(parameter.numel() for parameter in model.parameters())


# -----------------------------------------------------------------------------
# The predictions of a request: the cluster that was asked for, and the sweep over ranks.

ITEMSIZE = 4
"""Bytes of an element: float32."""


@dataclass(frozen=True)
class Plan:
    """All predictions. `here`: for the requested cluster; `points`: the sweep;
    `warnings`: what the predictions cannot know."""

    request: Request
    here: Point
    points: list[Point]
    warnings: list[str]


def make_plan(request: Request) -> Plan:
    """Predict everything. Raises ConfigError for a world that is none."""
    options, objective = request.options, request.options.objective
    asked = request.on(options.world_size, options.nodes)
    here = compare(*asked, objective, request.replicated_rows)
    worlds = [1 << power for power in range(options.most_ranks.bit_length())]
    local = options.world_size // options.nodes  # or the power of two below it, on each node
    nodes = [max(1, world >> local.bit_length() - 1) for world in worlds]
    points = [compare(*request.on(*of), objective) for of in zip(worlds, nodes, strict=True)]
    most, warnings = max(worlds[-1], options.world_size), []
    if short := sum(s.lookups * options.batch * most > s.curve.lookups for s in request.sources):
        warnings.append(
            f"the statistics count fewer lookups than one step of {most} ranks makes in "
            f"{short} of {len(request.sources)} tables: their distinct rows of all ranks are "
            "a lower bound there; count more samples"
        )
    return Plan(request, here, points, warnings)


if __name__ == "__main__":
    leave(main())
