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

    return [
        Table(
            "Ids per second on one core",
            "Median [quartiles] over the repetitions, in millions; the ratio is taken within each "
            "repetition. A plan is requests, ingest, plan, assembly and the laws' cheap checks of "
            "all ranks; W ranks plan side by side, each on a core of its own. The last column "
            "counts only the time that the thread had its core.",
            ("contender", "M ids/s", f"of {YARDSTICK}", "M ids per CPU second"),
            [
                (r["contender"], _rate(r), shown(r["ratio"]), _rate(r, "ids_per_cpu_second"))
                for r in of("rate")
            ],
        ),
        Table(
            "Where the time goes",
            "Mean milliseconds per step and rank.",
            *_by_name(of("parts"), "part"),
        ),
        Table(
            "Inside: the loops",
            "Mean milliseconds per step and rank of `distcache/planner/loops.py` and "
            "`region_loops.py`, from steps of their own. `find_rows` and `group` of homes are in "
            "request, `name_rows` and `group` of previous uses in ingest, `want` in ingest and "
            "plan, `find_sorted` (hot rows) in request and ingest, `order_ids` and `divide` "
            "(sharded rows) in assemble, the others in plan.",
            *_by_name(of("loops"), "loop"),
        ),
        *_exchange(of("exchange")),
        Table(
            "Until the loops are there",
            "Seconds in a fresh process, when its first planner is made: with an empty cache "
            "folder (once per installation), then again.",
            ("loops", "import of Numba", "loops"),
            [(r["loops"], f"{r['import_s']:.2f}", f"{r['loops_s']:.2f}") for r in of("start")],
        ),
        Table(
            "Index and stream",
            "The index is that of a node, all its homes together; rows are means per step.",
            ("run", "B per row", "slots", "distinct", "misses", "evictions", "steady"),
            [_index(record) for record in of("index")],
        ),
    ]


def _exchange(records: Sequence[Record]) -> list[Table]:
    rates = [(run_name(r), _rate(r), _rate(r, "ids_per_cpu_second"), *_sent(r)) for r in records]
    return [
        Table(
            "With the exchange",
            "One process and core for each rank, over gloo on this machine. Ids per second count "
            "all cores' time, waits included, so they compare with those above; ids per CPU second "
            "count what the ranks' processes, with gloo's threads, used of them. Bytes are of "
            "integers (headers, requests, decisions): the mean of all ranks, and of one rank.",
            ("run", "M ids/s", "M ids per CPU second", "bytes sent per rank and step", "the most"),
            rates,
        ),
        Table(
            "Where the time goes with it",
            "Mean milliseconds per step of the first rank, waits for the others included.",
            *_by_name(records, "part"),
        ),
    ]


def _sent(record: Record) -> tuple[str, str]:
    """Bytes of planning that a rank sends for a step: of the mean rank, and of that with most."""
    return f"{record['planning_bytes']:,.0f}", f"{max(record['planning_bytes_by_rank']):,.0f}"


def _index(record: Record) -> tuple[str, ...]:
    means = [f"{record[f'{name}_per_step']:,.0f}" for name in ("distinct", "misses", "evictions")]
    steady = "yes" if record["steady_eviction"] else "no"
    return (
        run_name(record),
        f"{record['bytes_per_row']:.2f}",
        f"{record['slots']:,}",
        *means,
        steady,
    )


def _rate(record: Record, key: str = "ids_per_second") -> str:
    values = record[key]
    return shown({**values, **_millions(values)})


def _millions(values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] / 1e6 for name in ("min", "q1", "median", "q3", "max")}


def run_name(record: Record) -> str:
    """Placement, number of ranks and body of a record."""
    return f"{record['placement']}, W = {record['world_size']}, {record['body']}"


def _by_name(records: Sequence[Record], what: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of `ms`: a row for each name, a column for each run."""
    names = dict.fromkeys(name for record in records for name in record["ms"])
    rows = [
        (name, *(f"{r['ms'][name]:.2f}" if name in r["ms"] else "-" for r in records))
        for name in names
    ]
    return (what, *map(run_name, records)), rows
