"""The tables of the policies' report, made of its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Record, Table

NEAR_MIN = 1.05
"""Most that lookahead may fetch, of MIN, where its window holds a cache's worth of rows."""

NEAR_BEST = 1.01
"""Most that lookahead with the tail frequency may fetch, of the best policy without a window."""

_LEAST_WINDOW = 8
"""The second bar is for L from here on."""


def tables(records: Sequence[Record]) -> list[Table]:
    """The traces, one table for each with all policies, and the two bars."""
    of = {
        kind: [r for r in records if r["kind"] == kind] for kind in ("trace", "outcome", "skipped")
    }
    made = [_traces(of["trace"])]
    for trace in of["trace"]:
        name = trace["trace"]
        made.append(_policies(name, [r for r in of["outcome"] if r["trace"] == name]))
    made += [
        _near_min(of["trace"], of["outcome"]),
        _near_best(of["outcome"]),
        _under_drift(of["outcome"]),
        Table(
            "Left out",
            "Traces that could not be had.",
            ("trace", "why"),
            [(record["trace"], record["reason"]) for record in of["skipped"]],
        ),
    ]
    return [table for table in made if table.rows]


def _traces(records: Sequence[Record]) -> Table:
    rows = [
        (
            r["trace"],
            f"{r['rows']:,}",
            f"{r['named_rows']:,}",
            f"{r['steps']:,}",
            f"{r['ids']:,}",
            f"{r['distinct_per_step']:,.0f}",
            f"{r['largest_step']:,}",
            f"{r['bytes'] / 2**20:,.0f}",
        )
        for r in records
    ]
    columns = ("trace", "rows", "named", "steps", "lookups", "distinct", "at most", "MiB")
    note = (
        "`named`: rows that the trace looks up at all; `distinct`: mean distinct rows of a step; "
        "`at most`: those of the largest; `MiB`: the recorded trace."
    )
    return Table("Traces", note, columns, rows)


def _policies(name: str, records: Sequence[Record]) -> Table:
    sizes = list(dict.fromkeys(record["size"] for record in records))
    labels = list(dict.fromkeys(record["label"] for record in records))
    of = {(record["label"], record["size"]): record for record in records}
    columns = ["policy"]
    for size in sizes:
        columns += [f"{size:g} %: hits", "fetched", "of MIN"]
    rows = []
    for label in labels:
        found = [of[label, size] for size in sizes]
        cells = [cell for record in found for cell in _cells(record)]
        rates = [r["ids_per_second"] for r in found if r["ids_per_second"]]
        rows.append((label, *cells, f"{sum(rates) / len(rates) / 1e6:,.0f}" if rates else "-"))
    note = (
        "For each cache size, in % of the rows: share of a step's distinct rows found cached, rows "
        "fetched over the trace in thousands, and their ratio to MIN. The number after `lookahead` "
        "is L, the word its tail. A dash: training would refuse it, for a step has more distinct "
        "rows than the cache has slots. Last: millions of lookups replayed per second and core, "
        "mean over the sizes."
    )
    return Table(name, note, (*columns, "M ids/s"), rows)


def _cells(record: Record) -> tuple[str, str, str]:
    if record["refused"]:
        return "-", "-", "-"
    ratio = record["ratio_to_min"]
    return (
        f"{record['hit_rate']:.3f}",
        f"{record['rows_fetched'] / 1e3:,.0f}",
        "-" if ratio is None else f"{ratio:.3f}",
    )


def _near_min(traces: Sequence[Record], records: Sequence[Record]) -> Table:
    """The first bar: lookahead whose window holds at least as many rows as the cache."""
    held = {trace["trace"]: trace["window_rows"] for trace in traces}
    rows = []
    for r in records:
        if r["policy"] != "lookahead" or r["ratio_to_min"] is None:
            continue
        window = held[r["trace"]][str(r["lookahead"])]
        if window >= r["slots"]:
            met = "yes" if r["ratio_to_min"] <= NEAR_MIN else "no"
            ratio = f"{r['ratio_to_min']:.3f}"
            rows.append((*_named(r), f"{window:,.0f}", f"{r['slots']:,}", ratio, met))
    note = (
        f"Wherever the window holds at least as many distinct rows as the cache has slots (mean "
        f"over the trace); the bar is {NEAR_MIN} of MIN."
    )
    columns = ("trace", "size", "policy", "rows in the window", "slots", "of MIN", "met")
    return Table("Lookahead beside MIN", note, columns, rows)


def _named(record: Record) -> tuple[str, str, str]:
    return record["trace"], f"{record['size']:g} %", record["label"]


def _near_best(records: Sequence[Record]) -> Table:
    """The second bar: lookahead with the same statistics beside the policies without a window."""
    rows = []
    for r in records:
        if r["tail"] != "frequency" or r["lookahead"] < _LEAST_WINDOW or not r["rows_fetched"]:
            continue
        others = [
            o
            for o in records
            if (o["trace"], o["size"]) == (r["trace"], r["size"])
            and o["policy"] not in ("lookahead", "MIN")
            and o["rows_fetched"]
        ]
        if others:
            best = min(others, key=lambda other: other["rows_fetched"])
            ratio = r["rows_fetched"] / best["rows_fetched"]
            met = "yes" if ratio <= NEAR_BEST else "no"
            rows.append((*_named(r), best["label"], f"{ratio:.3f}", met))
    note = (
        f"Rows fetched with the tail frequency and L of at least {_LEAST_WINDOW}, of the best "
        f"policy without a window on the same trace and size; the bar is {NEAR_BEST}."
    )
    columns = ("trace", "size", "policy", "best other", "of it", "met")
    return Table("Lookahead beside the best other policy", note, columns, rows)


def _under_drift(records: Sequence[Record]) -> Table:
    """Each tail of lookahead beside the policy of the same name, under drift."""
    rows = []
    for r in records:
        if r["trace"] != "drift" or r["policy"] != "lookahead" or not r["rows_fetched"]:
            continue
        for o in records:
            same = all(r[key] == o[key] for key in ("trace", "size", "admission"))
            if same and o["policy"] == r["tail"] and o["rows_fetched"]:
                ratio = r["rows_fetched"] / o["rows_fetched"]
                met = "yes" if ratio <= 1 else "no"
                rows.append((*_named(r), o["label"], f"{ratio:.3f}", met))
    note = "On the drifting trace: rows fetched, of the policy that is the tail alone; at most 1."
    columns = ("trace", "size", "policy", "its tail alone", "of it", "met")
    return Table("Lookahead beside its tail, under drift", note, columns, rows)
