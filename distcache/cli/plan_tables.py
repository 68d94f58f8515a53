"""The tables of a plan, as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Table
from distcache.cli.analyze_tables import human_bytes
from distcache.cost.links import Cluster
from distcache.cost.predict import Prediction
from distcache.cost.sweep import Crossover, Point
from distcache.cost.traffic import (
    MIXED,
    REPLICATED,
    ROW_WISE,
    ROW_WISE_DEDUP,
    ROW_WISE_IDS,
    SHARDED,
    TABLE_WISE,
    YARDSTICKS,
)

LABELS = {
    SHARDED: "sharded",
    REPLICATED: "replicated",
    MIXED: "mixed",
    TABLE_WISE: "hybrid table-wise",
    ROW_WISE: "hybrid row-wise",
    ROW_WISE_IDS: "row-wise, per lookup",
    ROW_WISE_DEDUP: "row-wise, deduplicated",
}
"""How tables and pictures call the layouts."""

_BEST = "best"


def label(prediction: Prediction) -> str:
    """A layout's name; of `mixed` with how many rows are replicated."""
    if prediction.placement != MIXED:
        return LABELS[prediction.placement]
    return f"mixed, K = {sum(prediction.replicated_rows.values()):,}"


def traffic_table(point: Point) -> Table:
    """What each layout sends and holds."""
    rows = []
    for p in point.predictions:
        traffic = p.traffic
        rows.append(
            (
                label(p),
                f"{p.rank_rows:,.0f}",
                f"{p.world_rows:,.0f}",
                "-" if p.hits is None else f"{p.hits.rate:.4f}",
                _kib(p.collective_bytes),
                _kib(p.inside),
                _kib(p.between),
                _kib(traffic.dense_bytes),
                _kib(traffic.host_in),
                _kib(traffic.host_out),
                human_bytes(p.device_bytes),
                _mark(p, point),
            )
        )
    refused = "".join(f" {label(p)}: {p.refused}." for p in point.predictions if p.refused)
    return Table(
        f"Rows and bytes at {point.world_size} ranks",
        "Per step: distinct rows of a rank and of all ranks, and the hit rate of distinct rows. "
        "Per rank and step, KiB: rows and row gradients sent (`collective_bytes`), of which inside "
        "the node and between nodes; dense gradients; rows over the host link, in and out. Device "
        "memory of a rank for rows, state and buffers. Yardsticks, whose rows travel unpooled, are "
        f"none that distcache.train has.{refused}",
        (
            *("layout", "rows, rank", "rows, all", "hit rate", "sent KiB", "inside", "between"),
            *("dense", "host in", "host out", "device", ""),
        ),
        rows,
    )


def time_table(point: Point) -> Table:
    """What a step of each layout takes."""
    rows = []
    for p in point.predictions:
        t = p.time
        seconds = (t.total, t.dense, t.sparse, t.exposed, t.waiting, t.hidden, t.host)
        rows.append((label(p), *(f"{1e3 * s:,.3f}" for s in seconds), _mark(p, point)))
    return Table(
        f"Step time at {point.world_size} ranks",
        "Milliseconds: step = dense part + rows looked up, copied and updated + collectives that "
        "compute waits for + what network and host link take longer than that. Beside compute: "
        "collectives that may hide, and the host link.",
        (
            *("layout", "step", "dense part", "rows", "exposed", "waiting"),
            *("may hide", "host link", ""),
        ),
        rows,
    )


def sweep_table(points: Sequence[Point], objective: str) -> Table:
    """Cost by number of ranks; the winner marked by a star."""
    names = [name for name in LABELS if any(point.of(name) for point in points)]
    scale, digits = (1e3, 3) if objective == "time" else (1 / 1024, 0)
    rows = []
    for point in points:
        cells = []
        for name in names:
            p = point.of(name)
            if p is None:
                cells.append("-")
                continue
            star = "*" if point.best is p else ""
            text = f"{p.cost[objective] * scale:,.{digits}f}{star}"
            cells.append(f"({text})" if p.refused else text)
        cluster = f"{point.world_size:,}", f"{point.cluster.nodes:,}"
        rows.append((*cluster, *cells))
    unit = "milliseconds of a step" if objective == "time" else "KiB sent per rank and step"
    return Table(
        "By number of ranks",
        f"The objective, {unit}, with the same batch, slots and device on every rank, and as many "
        "ranks on a node as asked for. *: the winner; (...): does not fit, and cannot win.",
        ("ranks", "nodes", *(LABELS[name] for name in names)),
        rows,
    )


def crossover_text(found: Sequence[Crossover], points: Sequence[Point]) -> str:
    """The crossovers in sentences."""
    if not found:
        best = next((p.best for p in points if p.best is not None), None)
        if best is None:
            return "Nothing fits at any number of ranks."
        return f"No crossover: {LABELS[best.placement]} wins wherever something fits."
    lines = [
        f"{LABELS[c.old]} gives way to {LABELS[c.new]} between {c.before:,} and {c.after:,} ranks "
        f"(at about {c.at:,.{0 if c.at >= 10 else 1}f})"
        for c in found
    ]
    return "Crossovers: " + "; ".join(lines) + "."


def cluster_table(cluster: Cluster) -> Table:
    """The cluster that was described or measured."""
    rows = [("ranks, nodes", f"{cluster.ranks:,}, {cluster.nodes:,}")]
    links = (("inside", cluster.inside), ("between", cluster.between), ("host", cluster.host))
    for key, link in links:
        if link is not None:
            text = f"{link.bandwidth / 1e9:,.2f} GB/s, {1e6 * link.latency:,.1f} us per message"
            rows.append((key, f"{text} ({link.name})"))
    compute = cluster.compute
    rows += [
        ("to start a collective", f"{1e6 * cluster.collective_s:,.1f} us"),
        ("a lookup, forward and backward", f"{1e9 * compute.lookup_s:,.2f} ns"),
        ("a row updated", f"{1e9 * compute.update_s:,.2f} ns"),
        ("a row copied", f"{1e9 * compute.copy_s:,.2f} ns"),
        ("a sample in the dense part", f"{1e9 * compute.sample_s:,.1f} ns"),
        ("movement that may hide does", f"{100 * cluster.overlap:.0f} %"),
        (
            "device memory",
            "not limited" if cluster.device_memory is None else human_bytes(cluster.device_memory),
        ),
    ]
    return Table("The cluster", "Links of one rank, in one direction.", ("what", "value"), rows)


def _mark(prediction: Prediction, point: Point) -> str:
    if prediction.refused:
        return "does not fit"
    if prediction.placement in YARDSTICKS:
        return "yardstick"
    return _BEST if prediction is point.best else ""


def _kib(nbytes: float) -> str:
    return f"{nbytes / 1024:,.1f}"
