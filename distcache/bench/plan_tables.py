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
    parts = [
        (f"W = {record['world_size']}", name, f"{ms:.2f}")
        for record in of("parts")
        for name, ms in {**record["ms"], **_inside(record, of("inside"))}.items()
    ]
    index = [
        (
            f"W = {record['world_size']}",
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
            "Mean milliseconds per step and rank. `distinct` (in ingest), `window` (in ingest and "
            "plan), `victims` and `filing` (in plan) and `argsort` (in assemble) are inside the "
            "others, from steps of their own.",
            ("ranks", "part", "ms"),
            parts,
        ),
        Table(
            "Index and stream",
            "The index is that of a node, all its homes together; rows are means per step.",
            ("ranks", "B per row", "slots", "distinct", "misses", "evictions", "steady"),
            index,
        ),
    ]


def _millions(values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] / 1e6 for name in ("min", "q1", "median", "q3", "max")}


def _inside(record: Record, inside: Sequence[Record]) -> dict[str, float]:
    """The parts inside others of one world."""
    found = dict(record["inside_ms"])
    for other in inside:
        if other["world_size"] == record["world_size"]:
            found |= other["ms"]
    return {f"- {name}": ms for name, ms in found.items()}
