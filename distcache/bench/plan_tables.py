"""The tables of the planner's report, made of its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Record, Table
from distcache.bench.spread import shown

YARDSTICK = "np.unique"
"""The contender that every rate is compared with."""


def tables(records: Sequence[Record]) -> list[Table]:
    """The report's tables, of nothing but its records."""

    def of(kind: str) -> list[Record]:
        return [record for record in records if record["kind"] == kind]

    rates = [
        (
            record["contender"],
            shown({**record["ids_per_second"], **_millions(record["ids_per_second"])}),
            shown(record["ratio"]),
        )
        for record in of("rate")
    ]
    index = [
        (
            _run(record),
            f"{record['bytes_per_row']:.2f}",
            f"{record['slots']:,}",
            f"{record['distinct_per_step']:,.0f}",
            f"{record['misses_per_step']:,.0f}",
            f"{record['evictions_per_step']:,.0f}",
            "yes" if record["steady_eviction"] else "no",
        )
        for record in of("index")
    ]
    return [
        Table(
            "Ids per second on one core",
            "Median [quartiles] over the repetitions, in millions; the ratio is taken within each "
            "repetition. A plan is requests, ingest, plan, assembly and the laws' cheap checks of "
            "all ranks; W ranks plan side by side, each on a core of its own.",
            ("contender", "M ids/s", f"of {YARDSTICK}"),
            rates,
        ),
        Table(
            "Where the time goes",
            "Mean milliseconds per step and rank.",
            *_by_name(of("parts"), "part"),
        ),
        Table(
            "Inside: the loops",
            "Mean milliseconds per step and rank of `distcache/planner/loops.py`, from steps of "
            "their own. `find_rows` and `group` of homes are in request, `name_rows` and `group` "
            "of previous uses in ingest, `order_ids` in assemble, the others in plan.",
            *_by_name(of("loops"), "loop"),
        ),
        Table(
            "With the exchange",
            "One process and core for each rank, over gloo on this machine. Ids per second count "
            "all cores' time, so they compare with those above; milliseconds are the first rank's "
            "means per step, waits for the others included.",
            ("run", "M ids/s", "MB sent per rank and step"),
            [
                (
                    _run(record),
                    shown({**record["ids_per_second"], **_millions(record["ids_per_second"])}),
                    f"{record['planning_bytes'] / 1e6:.2f}",
                )
                for record in of("exchange")
            ],
        ),
        Table("Where the time goes with it", "As above.", *_by_name(of("exchange"), "part")),
        Table(
            "Until the loops are there",
            "Seconds in a fresh process, when its first planner is made: with an empty cache "
            "folder (once per installation), then again.",
            ("loops", "import of Numba", "loops"),
            [
                (record["loops"], f"{record['import_s']:.2f}", f"{record['loops_s']:.2f}")
                for record in of("start")
            ],
        ),
        Table(
            "Index and stream",
            "The index is that of a node, all its homes together; rows are means per step.",
            ("run", "B per row", "slots", "distinct", "misses", "evictions", "steady"),
            index,
        ),
    ]


def _millions(values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] / 1e6 for name in ("min", "q1", "median", "q3", "max")}


def _run(record: Record) -> str:
    return f"W = {record['world_size']}, {record['body']}"


def _by_name(records: Sequence[Record], what: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of `ms`: a row for each name, a column for each run."""
    names = dict.fromkeys(name for record in records for name in record["ms"])
    rows = [
        (name, *(f"{r['ms'][name]:.2f}" if name in r["ms"] else "-" for r in records))
        for name in names
    ]
    return (what, *map(_run, records)), rows
