"""Ids counted per second on one core, exactly or sketched: `python -m distcache.bench.counting`.

Ids lie in memory and come in batches of tables, as a source gives them; drawing them is not timed.
All contenders take turns over the same batches, on one thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import Record, Table
from distcache.bench.spread import rotated, shown, spread
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.data.synthetic import ZipfTables
from distcache.popularity.counters import TableCounter, make_counters

log = logging.getLogger("distcache.bench.counting")

MODULE = "distcache.bench.counting"
PURPOSE = "Ids counted per second on one core, and the memory that it takes."


@dataclass(frozen=True)
class CountingOptions:
    """The keys of the command line."""

    table_rows: tuple[int, ...] = option(
        KAGGLE_ROWS, "rows of the tables; default: Criteo Kaggle's"
    )
    zipf: tuple[float, ...] = option((1.05, 0.8, 0.0), "Zipf exponents of the ids")
    batch: int = option(2048, "samples of a batch, one id for each table")
    batches: int = option(200, "batches of one turn")
    sketch: tuple[int, ...] = option((16_000_000, 1_000_000), "bytes for sketched counts")
    repetitions: int = option(5, "turns of each")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, batches=self.batches, repetitions=self.repetitions)
        at_least(1, **{f"table_rows {rows}": rows for rows in self.table_rows})
        at_least(0, **{f"zipf {a}": a for a in self.zipf})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench("Counting of lookups", MODULE, PURPOSE, CountingOptions, measure, tables)
    return run_bench(bench, arguments)


def measure(options: CountingOptions) -> list[Record]:
    """A record for every exponent and contender."""
    records = []
    for exponent in options.zipf:
        log.info("zipf %s", exponent)
        batches = draw(options, exponent)
        records += _measure(options, exponent, batches)
    return records


def draw(options: CountingOptions, exponent: float) -> list[list[np.ndarray]]:
    """Batches: the ids of every table, int64 `[batch]`."""
    zipf = ZipfTables(options.table_rows, exponent, 0)
    count = len(options.table_rows)
    sizes = np.full(count, options.batch)
    rng, batches = np.random.default_rng(0), []
    for _ in range(options.batches):
        ids = zipf.draw_ids(rng.random(count * options.batch), sizes)
        batches.append(np.split(ids, count))
    return batches


def _measure(
    options: CountingOptions, exponent: float, batches: Sequence[Sequence[np.ndarray]]
) -> list[Record]:
    names = [str(table) for table in range(len(options.table_rows))]

    def counters(memory: int) -> Callable[[], list[TableCounter]]:
        return lambda: make_counters(names, options.table_rows, memory)

    exact = 8 * sum(options.table_rows)
    contenders = {"exact": counters(exact)}
    for memory in options.sketch:
        contenders[f"sketch, {memory:,} B"] = counters(memory)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    facts: dict[str, Record] = {}
    ids = len(batches) * len(names) * options.batch
    for repetition in range(options.repetitions + 1):
        for name in rotated(list(contenders), repetition):
            tables_ = contenders[name]()
            began = time.process_time()
            run(tables_, batches)
            seconds = time.process_time() - began
            if repetition:  # the first turn touches the memory and compiles
                rates[name].append(ids / seconds / 1e6)
            facts[name] = _facts(tables_)
    return [
        {
            "kind": "counting",
            "contender": name,
            "zipf": exponent,
            "ids": ids,
            "million_ids_per_cpu_second": spread(rates[name]),
            **facts[name],
        }
        for name in contenders
    ]


def run(counters: Sequence[TableCounter], batches: Sequence[Sequence[np.ndarray]]) -> None:
    """Count all batches, in eight parts."""
    part = -(-len(batches) // 8)
    for number, batch in enumerate(batches, start=1):
        for counter, ids in zip(counters, batch, strict=True):
            counter.add(ids)
        if number % part == 0 or number == len(batches):
            for counter in counters:
                counter.close_part()


def _facts(counters: Sequence[TableCounter]) -> Record:
    """Memory, and the largest error of a count as a share of its table's lookups."""
    results = [counter.result() for counter in counters]
    return {
        "count_bytes": sum(counter.bytes for counter in counters),
        "sketched_tables": sum(result.ids is not None for result in results),
        "largest_error": max(result.error / max(result.lookups, 1) for result in results),
    }


def tables(records: Sequence[Record]) -> list[Table]:
    """One table."""
    rows = [
        (
            record["contender"],
            f"{record['zipf']:g}",
            shown(record["million_ids_per_cpu_second"], 1),
            f"{record['count_bytes'] / 2**20:,.1f}",
            str(record["sketched_tables"]),
            f"{100 * record['largest_error']:.4f}",
        )
        for record in records
    ]
    note = (
        f"{records[0]['ids']:,} ids a turn. Millions of ids per second of one core's time, median "
        "[quartiles] over the turns, with everything that an analysis does between reading and "
        "report: bounds, counts, distinct rows, and the hot sets of eight parts. Memory: of the "
        "counts, 8 bytes a row where they are exact. Error: by how much a count may be too small, "
        "the largest of all tables, % of the table's lookups."
    )
    columns = ("counting", "Zipf", "M ids/s per core", "MiB", "sketched tables", "error %")
    return [Table("Ids per second on one core", note, columns, rows)]


if __name__ == "__main__":
    sys.exit(main())
