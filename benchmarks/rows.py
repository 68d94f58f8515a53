"""Rate of rows copied, on one thread in host memory beside torch's own, and between host store and
device, through staging buffers and in place (`store.access`): `python -m benchmarks.rows`.

Rows are drawn anew for every turn, so that they are not in the processor's cache; a copy to a
device ends when the rows are there. Between host and device, staged rows are gathered with as many
threads as training has. On the CPU, for trying the bench, both ways copy within one memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import option
from benchmarks.ranks import opened_world
from benchmarks.report import Bench, Column, Record, Section, run_bench
from benchmarks.turns import ratios, shown, spread, take_turns
from distcache.engine.movement import Access, Staged
from distcache.layout import RowLayout, TableSpec
from distcache.ops.reference import put_rows, take_rows
from distcache.store.memory import require_memory
from distcache.store.rows import DirectRows, RowStore
from distcache.streams import COPY_IN, COPY_OUT, Streams

MEMORY, DEVICE = "memory", "device"

PAIRS = {
    MEMORY: (("gather", "index_select"), ("scatter", "index_copy_")),
    DEVICE: (
        ("fetch, zero_copy", "fetch, staged"),
        ("write back, zero_copy", "write back, staged"),
    ),
}
"""Copies that compare with others, by part."""

_FIRST = 2
"""Turns that do not count."""

Calls = dict[str, Callable[[Tensor], object]]
Copies = tuple[Callable[[int], Calls], int, str]
"""The calls for a number of rows; elements of a row; the device."""


@dataclass(frozen=True)
class RowsOptions:
    """The keys of the command line."""

    parts: tuple[str, ...] = option((MEMORY, DEVICE), "what is copied", among=(MEMORY, DEVICE))
    device: str = option("auto", "auto, cuda or cpu, as trainer.device")
    table_rows: int = option(4_000_000, "rows of the table or store", least=1)
    widths: tuple[int, ...] = option((16, 64, 128), "elements of a row, float32", least=1)
    state_width: int = option(0, "elements of optimizer state of a row, to a device", least=0)
    counts: tuple[int, ...] = option((1_000, 6_600, 26_000), "rows of one copy", least=1)
    repetitions: int = option(60, "turns of each", least=1)
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def measure(options: RowsOptions, overrides: tuple[str, ...] = ()) -> list[Record]:
    """A record for every part, width and count."""
    records = []
    for part in options.parts:
        for width in options.widths:
            rng = np.random.default_rng(width)
            with ExitStack() as stack:
                calls_of, elements, device = MAKERS[part](options, width, stack)
                for count in (min(count, options.table_rows) for count in options.counts):
                    record = {"kind": part, "device": device, "width": width, "count": count}
                    record |= _measure(
                        options, calls_of(count), rng, (count, elements), PAIRS[part]
                    )
                    records.append(record)
    return records


def in_memory(options: RowsOptions, width: int, stack: ExitStack) -> Copies:
    """The package's gathers and scatters of host rows beside torch's, on one thread."""
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    rows = options.table_rows
    require_memory(4 * rows * width, f"{rows} rows of {width}", "lower table_rows or widths")
    table = torch.from_numpy(np.random.default_rng(0).random((rows, width), dtype=np.float32))

    def calls(count: int) -> Calls:
        block = torch.zeros(count, width)
        return {
            "gather": lambda at: take_rows(table.numpy(), at.numpy(), block.numpy()),
            "index_select": lambda at: torch.index_select(table, 0, at, out=block),
            "scatter": lambda at: put_rows(table.numpy(), at.numpy(), block.numpy()),
            "index_copy_": lambda at: table.index_copy_(0, at, block),
        }

    return calls, width, "cpu"


def to_device(options: RowsOptions, width: int, stack: ExitStack) -> Copies:
    """Rows between a host store and the device, staged and in place."""
    world, state = stack.enter_context(opened_world(options.device)), options.state_width
    layout = RowLayout([TableSpec("rows", options.table_rows, width, ("rows",))], 1)
    store = RowStore(layout, state, torch.float32, world)
    stack.callback(store.close)
    streams = Streams(world.device)
    ways: dict[str, Access] = {
        "staged": Staged(store, world.device, streams, 0),
        "zero_copy": store.open_to(world.device),
    }

    def calls(count: int) -> Calls:
        block = torch.zeros(count * store.kind.nbytes, dtype=torch.uint8, device=world.device)
        found: Calls = {
            f"fetch, {name}": partial(_fetch, way, streams) for name, way in ways.items()
        }
        for name, way in ways.items():
            found[f"write back, {name}"] = partial(_put, way, streams, block)
        return found

    return calls, width + state, world.device.type


MAKERS = {MEMORY: in_memory, DEVICE: to_device}


def _measure(
    options: RowsOptions,
    calls: Calls,
    rng: np.random.Generator,
    shape: tuple[int, int],
    pairs: Sequence[tuple[str, str]],
) -> Record:
    """GB/s of each call for rows and elements of a `shape`, and the ratios of `pairs`."""

    def turn(call: Callable[[Tensor], object], repetition: int) -> float:
        # Rows of its own for each: nobody finds them in the cache.
        at = torch.from_numpy(rng.permutation(options.table_rows)[: shape[0]].copy())
        began = time.perf_counter()
        call(at)
        return 4e-9 * shape[0] * shape[1] / (time.perf_counter() - began)

    contenders = {name: partial(turn, call) for name, call in calls.items()}
    found = take_turns(contenders, options.repetitions + _FIRST)
    rates = {name: values[_FIRST:] for name, values in found.items()}
    return {
        "gigabytes_per_second": {name: spread(values) for name, values in rates.items()},
        "ratio": {own: spread(ratios(rates[own], rates[other])) for own, other in pairs},
    }


def _fetch(way: Access, streams: Streams, rows: Tensor) -> None:
    """Bring rows to the device, and wait for them."""
    gathered = way.gather(rows)
    with streams.use(COPY_IN):
        for values in gathered.read():
            if values is not None:
                values.to(streams.device, non_blocking=True)
        gathered.release()
        streams.synchronize(streams.record_event(COPY_IN))


def _put(way: Access, streams: Streams, block: Tensor, rows: Tensor) -> None:
    """Bring rows to the store, and wait until they are there; `block`: their bytes."""
    with streams.use(COPY_OUT):
        way.put(rows, block)()
        for mark in way.marks() if isinstance(way, DirectRows) else ():
            streams.synchronize(mark)


def _section(title: str, note: str, part: str) -> Section:
    """The table of one part."""
    columns = [Column("device", "device"), Column("width", "width"), Column("rows", "count", ",")]
    for name in (name for pair in PAIRS[part] for name in pair):
        rate = partial(lambda name, record: record["gigabytes_per_second"][name], name)
        columns.append(Column(name, rate, shown()))
    for own, other in PAIRS[part]:
        ratio = partial(lambda own, record: record["ratio"][own], own)
        columns.append(Column(f"{own} / {other}", ratio, shown()))
    note += " Median [quartiles] over the turns; ratios are of two calls in the same turn, above 1 "
    return Section(title, note + "where the first is faster.", part, columns)


SECTIONS = (
    _section("GB/s on one thread", "Bytes of the rows, once.", MEMORY),
    _section("GB/s", "Bytes of the rows, once, from the call until they are there.", DEVICE),
)

BENCH = Bench("Rows copied", RowsOptions, measure, SECTIONS)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
