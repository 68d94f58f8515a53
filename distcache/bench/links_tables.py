"""The tables of the report on links, made of its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Record, Table
from distcache.bench.spread import shown
from distcache.comm.link import DENSE, PLANNING, ROWS


def tables(records: Sequence[Record]) -> list[Table]:
    """Batches, links, results by kind of batches, exchanging stages, and rates left out."""
    results = [record for record in records if record["kind"] == "result"]
    refused = [record for record in records if record["kind"] == "refused"]
    kinds = dict.fromkeys(record["batches"] for record in results)
    return [
        _batches([record for record in records if record["kind"] == "batches"]),
        _links([record for record in records if record["kind"] == "link"]),
        *(_results(kind, [r for r in results if r["batches"] == kind]) for kind in kinds),
        *([_stages(results)] if any(record["stages"] for record in results) else []),
        *([_refused(refused)] if refused else []),
    ]


def _batches(records: Sequence[Record]) -> Table:
    return Table(
        "Batches",
        "Of a rank and step. Distinct rows are expected ones: with the tables here, whose largest "
        "are scaled down, and with the whole ones. Pooled vectors are what table-wise sharding "
        "sends, distinct rows what a sharded cache does.",
        ("batches", "ids", "pooled vectors", "rows", "distinct", "whole rows", "distinct of whole"),
        [
            (
                record["batches"],
                *(f"{record[key]:,}" for key in ("ids", "pooled", "rows")),
                f"{record['distinct']:,.0f}",
                f"{record['whole_rows']:,}",
                f"{record['whole_distinct']:,.0f}",
            )
            for record in records
        ],
    )


def _links(records: Sequence[Record]) -> Table:
    return Table(
        "Links",
        "Measured over gloo between the two ranks before training: a broadcast of 32 MiB, an "
        "all-to-all of as much in both directions at once (each rank's), and one of 4 KiB. Nodes: "
        "what the ranks agreed on.",
        ("rate", "broadcast Gb/s", "all-to-all Gb/s", "smallest exchange ms", "nodes"),
        [
            (
                record["rate"],
                f"{record['broadcast_bits_per_second'] / 1e9:.2f}",
                f"{record['all_to_all_bits_per_second'] / 1e9:.2f}",
                f"{1e3 * record['latency_s']:.2f}",
                str(record["nodes"]),
            )
            for record in records
        ],
    )


def _results(kind: str, records: Sequence[Record]) -> Table:
    yard = records[0]["mode"]
    columns = ("rate", "contender", "samples/s", f"/ {yard}", "range", "rows MB", "dense MB")
    columns += ("planning MB", "exchange ms", "hidden")
    rows = []
    for record in records:
        sent, ratio = record["sent_per_step"], record["ratio"]
        rows.append(
            (
                record["rate"],
                _name(record),
                shown(record["samples_per_second"], 0),
                shown(ratio, 2),
                f"{ratio['min']:.2f} to {ratio['max']:.2f}",
                *(f"{sent[key] / 1e6:.2f}" for key in (ROWS, DENSE, PLANNING)),
                "-" if record["exchange_ms"] is None else f"{record['exchange_ms']:.0f}",
                _share(record["exchange_hidden"]),
            )
        )
    note = (
        f"Samples per second by the median step of a turn, and the ratio to {yard} within a turn: "
        "median [quartiles] over the turns, and the range; more than 1 is faster. Bytes sent per "
        "rank and step. Exchange: rank 0's time per step in stages that exchange rows and "
        "gradients, dense ones and waits for the other rank included; hidden is the share that "
        "training did not wait for. TorchRec's exchange is not timed apart."
    )
    return Table(f"Batches: {kind}", note, columns, rows)


def _stages(records: Sequence[Record]) -> Table:
    timed = [record for record in records if record["stages"]]
    names = list(dict.fromkeys(name for record in timed for name in record["stages"]))
    rows = []
    for record in timed:
        cells = []
        for name in names:
            stage = record["stages"].get(name)
            hidden = None if stage is None else stage["hidden"] / stage["ms"]
            cells.append("-" if stage is None else f"{stage['ms']:.1f} [{_share(hidden)}]")
        early = record["early_rows"]
        rows.append((record["batches"], record["rate"], _name(record), _share(early), *cells))
    return Table(
        "Exchange by stage",
        "Rank 0's milliseconds per step, in brackets the hidden share; medians over the turns. "
        "Early rows: the share of the sharded rows that came to a rank before their step.",
        ("batches", "rate", "contender", "early rows", *names),
        rows,
    )


def _name(record: Record) -> str:
    """The contender; of `auto`, with what it chose."""
    chosen = record["placement"]
    return f"auto ({chosen})" if record["mode"] == "auto" else record["mode"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _refused(records: Sequence[Record]) -> Table:
    rows = [(record["rate"], record["why"].replace("\n", " ")) for record in records]
    return Table("Left out", "Rates that this machine does not permit.", ("rate", "why"), rows)
