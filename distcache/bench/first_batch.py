"""Time to the first batch of preprocessed arrays of any length, and what is read for it:
`python -m distcache.bench.first_batch`.

The arrays are sparse files: they have their full length and nothing in them, so that billions of
samples take no disk. Nothing of them is in memory when a folder is opened.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import (
    Record,
    Table,
)
from distcache.data.criteo import BatchSettings, CriteoArrays
from distcache.data.criteo_text import IDS, INTEGERS
from distcache.data.raw.settings import TERABYTE_ROWS, ArrayFile, Manifest, write_manifest
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.first_batch")

MODULE = "distcache.bench.first_batch"
PURPOSE = "Time to the first batch of preprocessed arrays, by their length."


@dataclass(frozen=True)
class FirstBatchOptions:
    """The keys of the command line."""

    samples: tuple[int, ...] = option((1_000_000, 50_000_000, 2_000_000_000), "samples of a folder")
    batch: int = option(2048, "samples of a batch")
    repetitions: int = option(7, "openings of each folder")
    folder: str = option("", "where the files go meanwhile; empty: the system's folder for such")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, repetitions=self.repetitions)
        if not self.samples or min(self.samples) < 7:
            raise ConfigError(f"samples={list(self.samples)}: give numbers of at least 7")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench(
        "Time to the first batch", MODULE, PURPOSE, FirstBatchOptions, measure, tables, "WARNING"
    )
    return run_bench(bench, arguments)


def make_sparse_folder(folder: Path, samples: int) -> int:
    """A folder as distcache.preprocess leaves it, of `samples` samples that are all zero, without
    counts; the bytes that its files seem to have. Raises OSError where the disk has no such files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays, total = {}, 0
    shapes = {"labels": (samples,), "dense": (samples, INTEGERS), "ids": (samples, IDS)}
    for name, dtype in (("labels", np.uint8), ("dense", np.float32), ("ids", np.int32)):
        path, shape, kind = folder / f"{name}.npy", shapes[name], np.dtype(dtype)
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": kind.str, "fortran_order": False, "shape": shape}
            )
            size = file.tell() + kind.itemsize * int(np.prod(shape))
            file.truncate(size)
        arrays[path.name] = ArrayFile(kind.str, shape, size, "not taken")
        total += size
    manifest = Manifest(
        samples=samples,
        train_samples=samples * 6 // 7,
        table_rows=TERABYTE_ROWS,
        mode="hash",
        multi_hot=None,
        arrays=arrays,
        inputs=[],
        skipped={"count": 0, "first": []},
        settings={},
        versions={},
    )
    write_manifest(folder, manifest.with_fingerprint())
    return total


def mapped_bytes(folder: Path) -> int:
    """Bytes of the folder's files that this process has in its memory maps now."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(".npy") and str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def forget(folder: Path) -> None:
    """Have the system drop the files' pages from memory."""
    for path in folder.glob("*.npy"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def measure(options: FirstBatchOptions) -> list[Record]:
    """Open every folder in both orders, in turns, cold each time."""
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="sparse-", dir=options.folder or None) as home:
        sizes = {n: make_sparse_folder(Path(home, str(n)), n) for n in options.samples}
        for repetition in range(options.repetitions):
            for samples, size in sizes.items():
                for shuffle in (True, False):
                    found = first_batches(Path(home, str(samples)), options.batch, shuffle)
                    about = {"samples": samples, "file_bytes": size, "shuffle": shuffle}
                    records.append({"kind": "opening", "repetition": repetition} | about | found)
    return records


def first_batches(folder: Path, batch: int, shuffle: bool) -> Record:
    """Milliseconds from nothing to a loaded batch and for one more, and what they took."""
    forget(folder)
    tracemalloc.start()
    try:
        began = time.perf_counter()
        source = CriteoArrays(folder, BatchSettings(batch, shuffle=shuffle))
        source.train_batch(0, 0, 1).loaded()
        first = time.perf_counter()
        source.train_batch((source.steps_per_epoch or 1) - 1, 0, 1).loaded()
        second = time.perf_counter()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {
        "first_batch_ms": 1e3 * (first - began),
        "next_batch_ms": 1e3 * (second - first),
        "allocated_bytes": peak,
        "mapped_bytes": mapped_bytes(folder),
    }


def tables(records: Sequence[Record]) -> list[Table]:
    """The table of the report."""
    rows = []
    for samples, shuffle in dict.fromkeys((r["samples"], r["shuffle"]) for r in records):
        some = [r for r in records if (r["samples"], r["shuffle"]) == (samples, shuffle)]
        first, last = ([r[key] for r in some] for key in ("first_batch_ms", "next_batch_ms"))
        rows.append(
            (
                f"{samples:,}",
                f"{some[0]['file_bytes'] / 1e9:,.1f}",
                "shuffled" if shuffle else "in order",
                f"{median(first):.1f}",
                f"{max(first):.1f}",
                f"{median(last):.1f}",
                f"{max(r['allocated_bytes'] for r in some) / 2**20:.1f}",
                f"{max(r['mapped_bytes'] for r in some) / 2**20:.1f}",
            )
        )
    note = (
        "From opening the folder to a loaded batch (ids, dense features, labels), then to the last "
        "batch of the epoch. The files are sparse and dropped from memory before each "
        "opening: the times have the page faults in them, but no seconds of a disk. Memory is the "
        "most that Python objects and arrays took, and the pages of the files that were mapped "
        "after both batches. Measuring memory is in the times."
    )
    columns = ("samples", "files GB", "order", "first batch ms, median", "most")
    columns += ("last batch ms", "allocated MiB", "mapped MiB")
    return [Table("Opening", note, columns, rows)]


if __name__ == "__main__":
    sys.exit(main())
