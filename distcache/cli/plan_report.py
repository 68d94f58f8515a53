"""What a plan leaves: `report.md`, `predictions.jsonl`, `plan.png`, `overrides.txt` and
`cluster.json`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from distcache.bench.report import Table, markdown_table
from distcache.cli.analyze_report import aligned, machine_text, section
from distcache.cli.environment import describe_environment
from distcache.cli.plan_plots import plot_sweep
from distcache.cli.plan_predict import Plan
from distcache.cli.plan_tables import (
    cluster_table,
    crossover_text,
    label,
    sweep_table,
    time_table,
    traffic_table,
)
from distcache.cost.description import write_cluster
from distcache.cost.links import PRESETS, SOURCES
from distcache.cost.predict import Prediction
from distcache.cost.sweep import Point
from distcache.cost.traffic import CACHED, MIXED
from distcache.metrics.record import plain

OVERRIDES, REPORT = "overrides.txt", "report.md"

_WIDTH = 110
"""Columns of text on the terminal."""


def write_plan(plan: Plan, command: Sequence[str]) -> str:
    """Write everything into the folder of the request; the summary for the terminal."""
    out, objective = plan.request.output, plan.request.options.objective
    drawn = plot_sweep(out / "plan.png", plan.points, plan.crossovers, objective)
    environment = describe_environment(1)
    overrides = overrides_of(plan)
    (out / OVERRIDES).unlink(missing_ok=True)  # of a plan before, into the same folder
    if overrides:
        (out / OVERRIDES).write_text("".join(f"{line}\n" for line in overrides))
    write_cluster(plan.cluster, out)
    with (out / "predictions.jsonl").open("w") as lines:
        about = {"kind": "environment", **environment, "command": [*command]}
        for record in [about, *records(plan)]:
            lines.write(json.dumps(plain(record)) + "\n")
    (out / REPORT).write_text(markdown(plan, environment, command, drawn))
    return terminal(plan)


def overrides_of(plan: Plan) -> list[str]:
    """The overrides of `distcache.train` that choose the winner; none where nothing fits."""
    best, options = plan.here.best, plan.request.options
    if best is None:
        return []
    if best.placement not in CACHED:
        return ["parallel=hybrid", f"parallel.sharding={best.placement}"]
    size = f"cache.rows={options.cache_rows}"
    if not options.cache_rows:
        size = f"cache.ratio={options.cache_ratio}"
    # A size that an experiment brings is taken back: only one may be given.
    lines = ["parallel=data", "cache.ratio=null", "cache.rows=null", "cache.bytes=null"]
    lines = [line for line in lines if not size.startswith(line.removesuffix("null"))]
    lines += [size, f"cache.placement={best.placement}"]
    if best.placement == MIXED:
        pairs = ",".join(f"{name}:{count}" for name, count in best.replicated_rows.items())
        lines.append(f"cache.replicated_rows={{{pairs}}}")
        if options.statistics:
            lines.append(f"cache.statistics={options.statistics}")
    return [*lines, f"cache.state={plan.request.state}"]


def advice(plan: Plan) -> str:
    """What to do, in a few sentences."""
    best, options = plan.here.best, plan.request.options
    if best is None:
        return "Nothing fits: give more cache rows or device memory, or a smaller batch."
    name = label(best)
    cost = f"{1e3 * best.time.total:,.3f} ms a step, {best.collective_bytes / 1024:,.0f} KiB sent"
    ranks, least = plan.here.world_size, options.objective
    text = f"At {ranks} ranks {name} has the least {least}: {cost} per rank."
    if best.placement == MIXED and not options.statistics:
        text += (
            " K counts the most frequent rows of a table: without cache.statistics training takes "
            "them from its first batches."
        )
    return text


def records(plan: Plan) -> list[dict[str, Any]]:
    """One for each layout and number of ranks; `asked`: whether those are what was asked for."""
    found = [_record(p, plan.here, True) for p in plan.here.predictions]
    found += [_record(p, point, False) for point in plan.points for p in point.predictions]
    pairs = [{"kind": "crossover", **vars(crossing)} for crossing in plan.crossovers]
    return [*found, *pairs]


def _record(prediction: Prediction, point: Point, asked: bool) -> dict[str, Any]:
    hits, traffic = prediction.hits, prediction.traffic
    return {
        "kind": "prediction",
        "asked": asked,
        "placement": prediction.placement,
        "world_size": point.world_size,
        "nodes": point.cluster.nodes,
        "best": prediction is point.best,
        "refused": prediction.refused,
        "replicated_rows": prediction.replicated_rows,
        "rank_rows": prediction.rank_rows,
        "world_rows": prediction.world_rows,
        "hit_rate": None if hits is None else hits.rate,
        "rows_fetched": None if hits is None else hits.fetched,
        "rows_written_back": None if hits is None else hits.written_back,
        "collective_bytes": prediction.collective_bytes,
        "inside_bytes": prediction.inside,
        "between_bytes": prediction.between,
        "inter_node_bytes": traffic.inter_node_bytes(point.cluster),
        "dense_collective_bytes": traffic.dense_bytes,
        "host_to_device_bytes": traffic.host_in,
        "device_to_host_bytes": traffic.host_out,
        "device_bytes": prediction.device_bytes,
        "exchanges": [vars(exchange) for exchange in traffic.exchanges],
        "seconds": vars(prediction.time),
    }


def markdown(plan: Plan, environment: dict[str, Any], command: Sequence[str], drawn: bool) -> str:
    """The whole report."""
    objective = plan.request.options.objective
    paste = f"python -m distcache.train $(cat {OVERRIDES}) ..."
    parts = ["# Predicted layouts", f"`{' '.join(command)}`", "## Advice", advice(plan)]
    parts += ["```\n" + "\n".join([*overrides_of(plan), f"# {paste}"]) + "\n```"]
    parts += [f"Note: {warning}." for warning in plan.warnings]
    tables = [traffic_table(plan.here), time_table(plan.here), sweep_table(plan.points, objective)]
    parts += [section(table) for table in tables]
    parts.append(crossover_text(plan.crossovers, plan.points))
    parts += ["![bytes and step time by ranks](plan.png)"] if drawn else []
    parts += [section(cluster_table(plan.here.cluster)), sources_text(plan)]
    parts.append(f"Dense part: {plan.dense_parameters:,} parameters.")
    return "\n\n".join([*parts, machine_text(environment)]) + "\n"


def sources_text(plan: Plan) -> str:
    """Where the presets in use come from."""
    cluster = plan.here.cluster
    names = {link.name for link in (cluster.inside, cluster.between, cluster.host) if link}
    rows = [(name, SOURCES[name]) for name in PRESETS if name in names]
    if not rows:
        return "Links were measured or given."
    text = markdown_table(Table("", "", ("preset", "source"), rows))
    return f"Presets are raw figures; software reaches less.\n\n{text}"


def terminal(plan: Plan) -> str:
    """What is shown: three tables, crossovers, advice."""
    objective, parts = plan.request.options.objective, []
    tables = [traffic_table(plan.here), time_table(plan.here), sweep_table(plan.points, objective)]
    for table in tables:
        about = textwrap.fill(table.note, _WIDTH)
        parts.append(f"{table.title}\n{about}\n\n{aligned(table.columns, table.rows)}")
    parts.append(crossover_text(plan.crossovers, plan.points))
    parts += [f"note: {warning}" for warning in plan.warnings]
    return "\n\n".join([*parts, advice(plan)]) + "\n"
