"""The tables of the kernels' report, made of its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Record, Table
from distcache.bench.spread import shown


def tables(records: Sequence[Record]) -> list[Table]:
    """Steps, ratios with their bars, pieces, choices, agreement, and who is left out."""
    kinds = ("contender", "ratio", "choice", "agreement", "left_out")
    of = {kind: [record for record in records if record["kind"] == kind] for kind in kinds}
    made = [_steps(of["contender"]), _ratios(of["ratio"]), _pieces(of["contender"])]
    made += [_choices(of["choice"]), _agreement(of["agreement"]), _left_out(of["left_out"])]
    return [table for table in made if table.rows]


def _steps(records: Sequence[Record]) -> Table:
    rows = [
        (
            f"{record['contender']}, {record['optimizer']}",
            shown(record["step_ms"], 3),
            f"{record['step_ms']['min']:.3f}",
            f"{record['ids']:,}",
            f"{record['distinct']:,}",
        )
        for record in records
    ]
    return Table(
        "Milliseconds of forward, backward and update",
        "Median [quartiles] over all timed steps. `triton` and `reference` are our bodies, with "
        "the copy of the step's rows that training makes.",
        ("tables", "step ms", "least", "ids", "distinct rows"),
        rows,
    )


def _ratios(records: Sequence[Record]) -> Table:
    rows = [
        (
            record["title"],
            shown(record["ratio"], 3),
            "-" if record["bar"] is None else f"at most {record['bar']:g}",
            "-" if record["bar"] is None else str(record["ratio"]["median"] <= record["bar"]),
        )
        for record in records
    ]
    return Table(
        "Ratios",
        "Of the median steps of two turns: median [quartiles] over the repetitions. The bars are "
        "for the kernels on a GPU.",
        ("pair", "ratio", "bar", "holds"),
        rows,
    )


def _pieces(records: Sequence[Record]) -> Table:
    rows = [
        (
            f"{record['contender']}, {record['optimizer']}: {name}",
            shown(piece["ms"], 3),
            f"{piece['bytes'] / 1e6:,.1f}",
            f"{piece['gb_per_s']:,.1f}",
        )
        for record in records
        for name, piece in record["pieces"].items()
    ]
    return Table(
        "Pieces",
        "Bytes are those that our operation reads and writes, each id's row counted, whether "
        "memory or a cache has it; others' pieces are given the same bytes for the same work.",
        ("piece", "ms", "MB", "GB/s"),
        rows,
    )


def _choices(records: Sequence[Record]) -> Table:
    names = list(dict.fromkeys(name for record in records for name in record["median_ms"]))
    rows = []
    for record in records:
        times = record["median_ms"]
        ours = {name: times[name] for name in ("triton", "reference") if name in times}
        rows.append(
            (
                f"{record['operation']}, {record['optimizer']}",
                *(f"{times[name]:.3f}" if name in times else "-" for name in names),
                min(ours, key=ours.__getitem__) if len(ours) > 1 else "-",
                record["on_gpu"],
            )
        )
    return Table(
        "Which body",
        "Median milliseconds of an operation by body, the faster of our two, and what "
        "`distcache.ops.ON_GPU` chooses on a GPU.",
        ("operation", *names, "faster", "chosen on a GPU"),
        rows,
    )


def _agreement(records: Sequence[Record]) -> Table:
    rows = [
        (
            f"{record['contender']} and {record['with']}, {record['optimizer']}",
            f"{record['weight_by_row']:.1e}",
            f"{record['pooled_by_bag']:.1e}",
        )
        for record in records
    ]
    return Table(
        "Agreement",
        "Largest difference after all steps, relative to the largest value.",
        ("tables", "weights", "last bags"),
        rows,
    )


def _left_out(records: Sequence[Record]) -> Table:
    rows = [(f"{r['contender']}, {r['optimizer']}", r["reason"]) for r in records]
    return Table("Left out", "What cannot run here.", ("tables", "why"), rows)
