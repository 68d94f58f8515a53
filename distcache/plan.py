"""Plan: `python -m distcache.plan preset=criteo_kaggle world_size=8 [key=value ...]`.

1. The command line says what the tables, the batch and the cluster are.
2. With `measure=true` links and row operations of this machine are timed.
3. Every layout is predicted for that cluster, and for 1, 2, 4, ... ranks.
4. `report.md`, `predictions.jsonl`, `cluster.json` and `overrides.txt`, the overrides that choose
   the winner, are written.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from distcache.cli.compose import Line, run_command
from distcache.cli.plan_run import Options, Plan, make_plan, measured_here, parse_request
from distcache.cli.run import Table, describe_environment, open_folder, write_report
from distcache.errors import human_bytes
from distcache.sizing.cluster import Cluster, write_cluster
from distcache.sizing.cost import Point, Prediction, crossovers
from distcache.sizing.traffic import CACHED, HYBRID, MIXED, REPLICATED, SHARDED
from distcache.trainer.record import plain

log = logging.getLogger("distcache.plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    return run_command("plan", Options, run, arguments)


def run(line: Line[Options], command: Sequence[str]) -> int:
    """Predict, write and say; 1 where no layout fits."""
    request = parse_request(line)
    plan = make_plan(measured_here(request) if request.options.measure else request)
    with open_folder(request.output, "output"):
        if (request.output / REPORT).exists():
            log.warning("output=%s holds a plan, which this one overwrites", request.output)
        text = write_plan(plan, command)
    sys.stdout.write(f"\n{text}")
    sys.stdout.flush()
    log.info("the report is in %s", request.output)
    return 0 if plan.here.best is not None else 1


# -----------------------------------------------------------------------------
# The tables of a plan, as rows of text.


LAYOUTS = (SHARDED, REPLICATED, MIXED, *HYBRID)


def name_of(layout: str) -> str:
    """Return the name of a layout in tables."""
    return f"hybrid {layout.replace('_', '-')}" if layout in HYBRID else layout


def label(prediction: Prediction) -> str:
    """A layout's name; of `mixed` with how many rows are replicated."""
    if prediction.placement != MIXED:
        return name_of(prediction.placement)
    return f"mixed, K = {sum(prediction.replicated_rows.values()):,}"


def traffic_table(point: Point) -> Table:
    """Return the table of bytes that each layout sends and holds."""
    refused = "".join(f" {label(p)}: {p.refused}." for p in point.predictions if p.refused)
    return Table.of(
        f"Rows and bytes at {point.cluster.ranks} ranks",
        "Per step: distinct rows of a rank and of all ranks, and the hit rate of distinct rows. "
        "Per rank and step, KiB: rows and row gradients sent (`collective_bytes`), of which inside "
        "the node and between nodes; dense gradients; rows over the host link, in and out. Device "
        f"memory of a rank for rows, state and buffers.{refused}",
        [
            ("layout", label),
            ("rows, rank", lambda _: f"{point.demand.rank_rows:,.0f}"),
            ("rows, all", lambda _: f"{point.demand.world_rows:,.0f}"),
            ("hit rate", lambda p: "-" if p.hits is None else f"{p.hits.rate:.4f}"),
            ("sent KiB", lambda p: _kib(p.traffic.collective_bytes)),
            ("inside", lambda p: _kib(p.traffic.by_link(point.cluster)[0])),
            ("between", lambda p: _kib(p.traffic.by_link(point.cluster)[1])),
            ("dense", lambda p: _kib(p.traffic.dense_bytes)),
            ("host in", lambda p: _kib(p.traffic.host_in)),
            ("host out", lambda p: _kib(p.traffic.host_out)),
            ("device", lambda p: human_bytes(p.device_bytes)),
            ("", partial(_mark, point)),
        ],
        point.predictions,
    )


def time_table(point: Point) -> Table:
    """Return the table of step times of all layouts."""

    def ms(name: str, prediction: Prediction) -> str:
        seconds = vars(prediction.time) | prediction.time.threads._asdict()
        return f"{1e3 * seconds[name]:,.3f}"

    titles = {
        **{"total": "step", "dense": "dense part", "sparse": "rows", "exposed": "exposed"},
        **{"waiting": "waiting", "hidden": "may hide", "host": "host link"},
        **{"launch": "launch", "planner": "planner", "mover": "mover"},
    }
    return Table.of(
        f"Step time at {point.cluster.ranks} ranks",
        "Milliseconds: step = dense part + rows looked up, copied and updated + collectives that "
        "compute waits for (exposed) + what network, host link or a thread of the host take "
        "longer than that (waiting). Beside compute: collectives that may hide, the host link, and "
        "three threads of the host: one launches kernels, one plans, one moves rows. A step is as "
        "long as the part that binds it.",
        [
            ("layout", label),
            *((title, partial(ms, name)) for name, title in titles.items()),
            ("binds", lambda p: p.time.binds),
            ("", partial(_mark, point)),
        ],
        point.predictions,
    )


def sweep_table(points: Sequence[Point], objective: str) -> Table:
    """Cost by number of ranks; the winner marked by a star."""
    names = [name for name in LAYOUTS if any(point.of(name) for point in points)]
    scale, digits = (1e3, 3) if objective == "time" else (1 / 1024, 0)

    def cell(name: str, point: Point) -> str:
        p = point.of(name)
        if p is None:
            return "-"
        text = f"{p.cost[objective] * scale:,.{digits}f}{'*' if point.best is p else ''}"
        return f"({text})" if p.refused else text

    unit = "milliseconds of a step" if objective == "time" else "KiB sent per rank and step"
    return Table.of(
        "By number of ranks",
        f"The objective, {unit}, with the same batch, slots and device on every rank, and as many "
        "ranks on a node as asked for. *: the winner; (...): does not fit, and cannot win.",
        [
            ("ranks", lambda point: f"{point.cluster.ranks:,}"),
            ("nodes", lambda point: f"{point.cluster.nodes:,}"),
            *((name_of(name), partial(cell, name)) for name in names),
        ],
        points,
    )


def crossover_text(points: Sequence[Point]) -> str:
    """The crossovers in sentences."""
    found = crossovers(points)
    winners = [name_of(p.best.placement) for p in points if p.best is not None]
    if not winners:
        return "Nothing fits at any number of ranks."
    if not found:
        return f"No crossover: {winners[0]} wins wherever something fits."
    lines = [
        f"{name_of(c.old)} gives way to {name_of(c.new)} between {c.before:,} and {c.after:,} ranks"
        for c in found
    ]
    return "Crossovers: " + "; ".join(lines) + "."


def cluster_table(cluster: Cluster) -> Table:
    """The cluster that was described or measured."""
    rows = [
        (f"{part} {name}".rstrip(), f"{value:,.4g}" if isinstance(value, float) else str(value))
        for part, own in asdict(cluster).items()
        for name, value in (own if isinstance(own, dict) else {"": own}).items()
    ]
    note = (
        "As `cluster.json` has it (`distcache.sizing.cluster.Cluster`): seconds, bytes, bytes per "
        "second. Links are of one rank, in one direction; presets are raw figures: software "
        "reaches less. `host_times` is what the threads of a rank's host take."
    )
    return Table("The cluster", note, ("what", "value"), rows)


def _mark(point: Point, prediction: Prediction) -> str:
    if prediction.refused:
        return "does not fit"
    return "best" if prediction is point.best else ""


def _kib(nbytes: float) -> str:
    return f"{nbytes / 1024:,.1f}"


# -----------------------------------------------------------------------------
# What a plan leaves: `report.md`, `predictions.jsonl`, `overrides.txt` and `cluster.json`.

OVERRIDES, REPORT = "overrides.txt", "report.md"

_WIDTH = 110
"""Columns of text on the terminal."""


def write_plan(plan: Plan, command: Sequence[str]) -> str:
    """Write everything into the folder of the request; the summary for the terminal."""
    out = plan.request.output
    environment = describe_environment(1) | {"command": [*command]}
    overrides = overrides_of(plan)
    (out / OVERRIDES).unlink(missing_ok=True)  # of a plan before, into the same folder
    if overrides:
        (out / OVERRIDES).write_text("".join(f"{line}\n" for line in overrides))
    write_cluster(plan.here.cluster, out)
    with (out / "predictions.jsonl").open("w") as lines:
        for record in [{"kind": "environment", **environment}, *records(plan)]:
            lines.write(json.dumps(plain(record)) + "\n")
    tables = [traffic_table(plan.here), time_table(plan.here)]
    tables.append(sweep_table(plan.points, plan.request.options.objective))
    crossings = crossover_text(plan.points)
    paste = [*overrides, f"# python -m distcache.train $(cat {OVERRIDES}) ..."]
    parts = ["# Predicted layouts", "## Advice", advice(plan)]
    parts += ["```\n" + "\n".join(paste) + "\n```"]
    parts += [f"Note: {warning}." for warning in plan.warnings]
    parts += [*(table.section for table in tables), crossings]
    parts += [cluster_table(plan.here.cluster).section]
    parts.append(f"Dense part: {plan.request.settings.dense_parameters:,} parameters.")
    write_report(out / REPORT, parts, environment)
    shown = [f"{t.title}\n{textwrap.fill(t.note, _WIDTH)}\n\n{t.aligned}" for t in tables]
    shown += [crossings, *(f"note: {warning}" for warning in plan.warnings), advice(plan)]
    return "\n\n".join(shown) + "\n"


def overrides_of(plan: Plan) -> list[str]:
    """The overrides of `distcache.train` that choose the winner; none where nothing fits."""
    best, options = plan.here.best, plan.request.options
    if best is None:
        return []
    if best.placement not in CACHED:
        return ["parallel=hybrid", f"parallel.sharding={best.placement}"]
    # All three keys are set, because an experiment may bring a size and only one may be given.
    sizes: dict[str, Any] = dict.fromkeys(("ratio", "rows", "bytes"), "null")
    if options.cache_rows:
        sizes["rows"] = options.cache_rows
    elif options.cache_ratio is not None:
        sizes["ratio"] = options.cache_ratio
    lines = ["parallel=data", *(f"cache.{key}={value}" for key, value in sizes.items())]
    lines.append(f"cache.placement={best.placement}")
    if best.placement == MIXED:
        pairs = ",".join(f"{name}:{count}" for name, count in best.replicated_rows.items())
        lines.append(f"cache.replicated_rows={{{pairs}}}")
        if options.statistics:
            lines.append(f"cache.statistics={options.statistics}")
    return [*lines, f"cache.state={plan.request.settings.state}"]


def advice(plan: Plan) -> str:
    """Return the recommendation in a few sentences."""
    best, options = plan.here.best, plan.request.options
    if best is None:
        return "Nothing fits: give more cache rows or device memory, or a smaller batch."
    name = label(best)
    sent = best.traffic.collective_bytes / 1024
    cost = f"{1e3 * best.time.total:,.3f} ms a step, {sent:,.0f} KiB sent"
    ranks, least = plan.here.cluster.ranks, options.objective
    text = f"At {ranks} ranks {name} has the least {least}: {cost} per rank."
    text += f" What binds its step: {best.time.binds}."
    if best.placement == MIXED and not options.statistics:
        text += (
            " K counts the most frequent rows of a table: without cache.statistics training takes "
            "them from its first batches."
        )
    return text


def records(plan: Plan) -> list[dict[str, Any]]:
    """One for each layout and number of ranks; `asked`: whether those are what was asked for."""
    points = [plan.here, *plan.points]
    found = [
        {"kind": "prediction", "asked": point is plan.here, **_record(prediction, point)}
        for point in points
        for prediction in point.predictions
    ]
    return found + [{"kind": "crossover", **own._asdict()} for own in crossovers(plan.points)]


def _record(prediction: Prediction, point: Point) -> dict[str, Any]:
    hits, traffic = prediction.hits, prediction.traffic
    inside, between = traffic.by_link(point.cluster)
    return {
        "placement": prediction.placement,
        "world_size": point.cluster.ranks,
        "nodes": point.cluster.nodes,
        "best": prediction is point.best,
        "refused": prediction.refused,
        "replicated_rows": prediction.replicated_rows,
        "rank_rows": point.demand.rank_rows,
        "world_rows": point.demand.world_rows,
        "hit_rate": None if hits is None else hits.rate,
        "rows_fetched": None if hits is None else hits.fetched,
        "rows_written_back": None if hits is None else hits.written_back,
        "collective_bytes": prediction.traffic.collective_bytes,
        "inside_bytes": inside,
        "between_bytes": between,
        "inter_node_bytes": traffic.inter_node_bytes(point.cluster),
        "dense_collective_bytes": traffic.dense_bytes,
        "host_to_device_bytes": traffic.host_in,
        "device_to_host_bytes": traffic.host_out,
        "device_bytes": prediction.device_bytes,
        "exchanges": [vars(exchange) for exchange in traffic.exchanges],
        "seconds": vars(prediction.time) | {"threads": prediction.time.threads._asdict()},
    }


if __name__ == "__main__":
    sys.exit(main())
