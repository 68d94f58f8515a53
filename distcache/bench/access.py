"""Rows between host store and device, through staging buffers and in place (`store.access`):
`python -m distcache.bench.access device=cuda`.

Both ways take turns over the same rows, drawn anew for every turn; a turn ends when the rows are
there. Staged ones are gathered with as many threads as training has beside the device. On the CPU,
which is for trying the bench, both copy within one memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import Record, Table
from distcache.bench.spread import ratios, rotated, shown, spread
from distcache.comm.world import World, close_world, open_world
from distcache.engine.movement import Access, InPlace, Staged
from distcache.layout import RowLayout, TableSpec
from distcache.store.rows import ACCESS, STAGED, ZERO_COPY, RowStore
from distcache.streams import COPY_IN, COPY_OUT, Streams

MODULE = "distcache.bench.access"
PURPOSE = "Rate of rows between host store and device, staged and in place."
FETCH, PUT = "fetch", "write back"


@dataclass(frozen=True)
class AccessOptions:
    """The keys of the command line."""

    device: str = option("auto", "auto, cuda or cpu, as trainer.device")
    table_rows: int = option(4_000_000, "rows of the store")
    widths: tuple[int, ...] = option((16, 64, 128), "elements of a row, float32")
    state_width: int = option(0, "elements of optimizer state of a row")
    counts: tuple[int, ...] = option((1_000, 6_600, 26_000), "rows of one step")
    repetitions: int = option(60, "turns of each")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, table_rows=self.table_rows, repetitions=self.repetitions)
        at_least(0, state_width=self.state_width)
        at_least(1, widths=min(self.widths), counts=min(self.counts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    title = "Rows between store and device"
    return run_bench(
        Bench(title, MODULE, PURPOSE, AccessOptions, measure, tables, "INFO"), arguments
    )


def measure(options: AccessOptions) -> list[Record]:
    """A record for every width and count."""
    world = open_world(options.device)
    try:
        return [
            record
            for width in options.widths
            for record in _of_width(options, world, width, np.random.default_rng(width))
        ]
    finally:
        close_world(world)


def _of_width(
    options: AccessOptions, world: World, width: int, rng: np.random.Generator
) -> list[Record]:
    layout = RowLayout([TableSpec("rows", options.table_rows, width, ("rows",))], 1)
    store = RowStore.create(layout, options.state_width, torch.float32, world)
    streams = Streams(world.device)
    try:
        widths = (width, options.state_width)
        ways: dict[str, Access] = {
            STAGED: Staged(store, world.device, widths, streams, 0),
            ZERO_COPY: InPlace(store.open_to(world.device), streams.wait),
        }
        return [_measure(options, ways, streams, width, count, rng) for count in options.counts]
    finally:
        store.close()


def _measure(
    options: AccessOptions,
    ways: dict[str, Access],
    streams: Streams,
    width: int,
    count: int,
    rng: np.random.Generator,
) -> Record:
    device, count = streams.device, min(count, options.table_rows)
    block = torch.zeros(count, width, device=device)
    state = None
    if options.state_width:
        state = torch.zeros(count, options.state_width, device=device)
    calls: dict[tuple[str, str], Callable[[Tensor], object]] = {}
    for name, way in ways.items():
        calls[FETCH, name] = lambda rows, way=way: _fetch(way, rows, streams)
        calls[PUT, name] = lambda rows, way=way: _put(way, rows, block, state, streams)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for repetition in range(options.repetitions + 2):
        rows = torch.from_numpy(rng.permutation(options.table_rows)[:count].copy())
        for key in rotated(list(calls), repetition):
            began = time.perf_counter()
            calls[key](rows)
            if repetition >= 2:
                seconds[key].append(time.perf_counter() - began)
    nbytes = count * (width + options.state_width) * 4
    rates = {key: [nbytes / s / 1e9 for s in values] for key, values in seconds.items()}
    return {
        "kind": "access",
        "device": device.type,
        "width": width,
        "count": count,
        "gigabytes_per_second": {f"{d}, {way}": spread(v) for (d, way), v in rates.items()},
        "ratio": {
            direction: spread(ratios(rates[direction, ZERO_COPY], rates[direction, STAGED]))
            for direction in (FETCH, PUT)
        },
    }


def _fetch(way: Access, rows: Tensor, streams: Streams) -> None:
    """Bring rows to the device, and wait for them."""
    gathered = way.gather(rows)
    with streams.on(COPY_IN):
        for values in gathered.read():
            if values is not None:
                values.to(streams.device, non_blocking=True)
        gathered.release()
        streams.wait(streams.mark(COPY_IN))


def _put(way: Access, rows: Tensor, weight: Tensor, state: Tensor | None, streams: Streams) -> None:
    """Bring rows to the store, and wait until they are there."""
    with streams.on(COPY_OUT):
        way.put(rows, weight, state)
        way.settle()


def tables(records: Sequence[Record]) -> list[Table]:
    """One table: rates and their ratios."""
    names = [f"{direction}, {way}" for direction in (FETCH, PUT) for way in ACCESS]
    rows = [
        (
            record["device"],
            str(record["width"]),
            f"{record['count']:,}",
            *(shown(record["gigabytes_per_second"][name]) for name in names),
            *(shown(record["ratio"][direction]) for direction in (FETCH, PUT)),
        )
        for record in records
    ]
    return [
        Table(
            "GB/s",
            "Bytes of the rows, once, from the call until they are there. Median [quartiles] over "
            "the turns; ratios are of two calls in the same turn, above 1 where rows read or "
            "written in place are faster.",
            (
                "device",
                "width",
                "rows",
                *names,
                *(f"{d}: {ZERO_COPY} / {STAGED}" for d in (FETCH, PUT)),
            ),
            rows,
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
