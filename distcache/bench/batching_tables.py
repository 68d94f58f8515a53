"""The tables of `distcache.bench.batching`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from distcache.bench.report import Record, Table

_SHARES = (
    "The most frequent rows of all tables together are hot; a sample is hot when all of its ids "
    "are. Rate: ids classified a second, reading them included; memory: of the hot set's bits and "
    "of the samples' places."
)
_RUNS = (
    "One epoch on one rank, from the same weights. Rows fetched and bytes over the host link are "
    "those of training steps, after the warm start; seconds of training steps, and of the whole "
    "run with classification, evaluations and fences. Medians over repetitions."
)


def tables(records: Sequence[Record]) -> list[Table]:
    """Share of hot samples by source and hot set; runs by source and batching."""
    return [_shares(records), _runs(records)]


def _shares(records: Sequence[Record]) -> Table:
    rows = [
        (
            record["source"],
            f"{record['samples']:,}",
            f"{100 * record['share']:g} %",
            f"{record['hot_rows']:,}",
            f"{100 * record['hot_lookups']:.2f} %",
            f"{100 * record['hot_samples']:.2f} %",
            f"{record['ids_per_second'] / 1e6:.1f} M ids/s",
            f"{record['bytes'] / 1e6:.2f} MB",
        )
        for record in records
        if record["kind"] == "hot_samples"
    ]
    columns = ("data", "samples", "rows hot", "hot rows", "hot lookups", "hot samples")
    return Table("Hot samples", _SHARES, (*columns, "rate", "memory"), rows)


def _runs(records: Sequence[Record]) -> Table:
    runs = [record for record in records if record["kind"] == "run"]
    rows = []
    for source, batching in dict.fromkeys((run["source"], run["batching"]) for run in runs):
        own = [run for run in runs if (run["source"], run["batching"]) == (source, batching)]
        first = own[0]
        rows.append(
            (
                f"{source} {batching}",
                _count(first["steps"]),
                _of_all(first["hot_steps"], first["steps"]),
                _count(first["rows_fetched"]),
                _count(first["hot_rows_fetched"]),
                f"{first['host_bytes'] / 1e6:.1f} MB",
                _seconds([run["train_s"] for run in own]),
                _seconds([run["wall_s"] for run in own]),
                _count(first["evaluations"]),
                _number(first["eval_auc"]),
                _number(first["eval_logloss"]),
            )
        )
    columns = ("data and batching", "steps", "hot steps", "rows fetched", "in hot steps")
    columns += ("host link", "training s", "all s", "evaluations", "AUC", "log loss")
    return Table("One epoch", _RUNS, columns, rows)


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _seconds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f}" if known else ""


def _of_all(part: int | None, whole: int) -> str:
    return "" if part is None else f"{part:,} ({100 * part / whole:.0f} %)"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.5f}"
