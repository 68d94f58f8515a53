"""Rate of the gathers and scatters between store and staging, beside torch's own:
`python -m distcache.bench.rows`.

Rows are drawn anew for every turn, so that they are not in the processor's cache; all contenders
take turns over the same rows, on one thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import (
    Record,
    Table,
)
from distcache.bench.spread import ratios, rotated, shown, spread
from distcache.ops.copies import put_rows, take_rows
from distcache.store.memory import require_memory

log = logging.getLogger("distcache.bench.rows")

MODULE = "distcache.bench.rows"
PURPOSE = "Rate of gathers and scatters of rows in host memory, beside torch's own."
PAIRS = (("gather", "index_select"), ("scatter", "index_copy_"))


@dataclass(frozen=True)
class RowsOptions:
    """The keys of the command line."""

    table_rows: int = option(4_000_000, "rows of the table")
    widths: tuple[int, ...] = option((16, 64, 128), "elements of a row, float32")
    counts: tuple[int, ...] = option((6_600, 26_000), "rows of one gather or scatter")
    repetitions: int = option(60, "turns of each")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, table_rows=self.table_rows, repetitions=self.repetitions)
        at_least(1, **{f"width {w}": w for w in self.widths})
        at_least(1, **{f"count {c}": c for c in self.counts})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench("Rows in host memory", MODULE, PURPOSE, RowsOptions, measure, tables, "INFO")
    return run_bench(bench, arguments)


def measure(options: RowsOptions) -> list[Record]:
    """A record for every width and count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _measure(options, width, count) for width in options.widths for count in options.counts
        ]
    finally:
        torch.set_num_threads(threads)


def _measure(options: RowsOptions, width: int, count: int) -> Record:
    total = options.table_rows * width * 4
    require_memory(total, f"{options.table_rows} rows of {width}", "lower table_rows or widths")
    rng = np.random.default_rng(width)
    table = torch.from_numpy(rng.random((options.table_rows, width), dtype=np.float32))
    block = torch.from_numpy(rng.random((count, width), dtype=np.float32))
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "gather": lambda at: take_rows(table.numpy(), at.numpy(), block.numpy()),
        "index_select": lambda at: torch.index_select(table, 0, at, out=block),
        "scatter": lambda at: put_rows(table.numpy(), at.numpy(), block.numpy()),
        "index_copy_": lambda at: table.index_copy_(0, at, block),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(options.repetitions + 2):
        for name in rotated(list(calls), repetition):
            # Rows of its own for each: nobody finds them in the cache.
            at = torch.from_numpy(rng.permutation(options.table_rows)[:count].copy())
            began = time.perf_counter()
            calls[name](at)
            if repetition >= 2:
                seconds[name].append(time.perf_counter() - began)
    nbytes = count * width * 4
    rates = {name: [nbytes / s / 1e9 for s in values] for name, values in seconds.items()}
    return {
        "kind": "rows",
        "width": width,
        "count": count,
        "gigabytes_per_second": {name: spread(values) for name, values in rates.items()},
        "ratio": {own: spread(ratios(rates[own], rates[other])) for own, other in PAIRS},
    }


def tables(records: Sequence[Record]) -> list[Table]:
    """One table: rates and their ratios."""
    rows = [
        (
            str(record["width"]),
            f"{record['count']:,}",
            *(shown(record["gigabytes_per_second"][name]) for pair in PAIRS for name in pair),
            *(shown(record["ratio"][own]) for own, _ in PAIRS),
        )
        for record in records
    ]
    return [
        Table(
            "GB/s on one thread",
            "Bytes of the rows, once. Median [quartiles] over the turns; ratios are of two calls "
            "in the same turn, above 1 where ours is faster.",
            (
                "width",
                "rows",
                *(name for pair in PAIRS for name in pair),
                *(f"{own} / {other}" for own, other in PAIRS),
            ),
            rows,
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
