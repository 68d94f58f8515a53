"""MB/s of `distcache.preprocess`, its memory, and the time to the first batch of its result:
`python -m distcache.bench.preprocess`.

Lines are generated into a folder of their own, which is removed at the end. Every job is one
process tree of its own, as a user starts it.
"""

from __future__ import annotations

import gzip
import logging
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distcache.bench.command import Bench, run_bench
from distcache.bench.criteo_lines import write_lines
from distcache.bench.memory_watch import MemoryWatch
from distcache.bench.options import at_least, option
from distcache.bench.report import (
    Record,
    Table,
)
from distcache.data.criteo import BatchSettings, CriteoArrays
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.preprocess")

MODULE = "distcache.bench.preprocess"
PURPOSE = "MB/s of text, memory, and time to the first batch of distcache.preprocess."
JOBS = {
    "hash": ["mode=hash", "rows=kaggle"],
    "vocabulary": ["mode=vocabulary", "min_count=2"],
    "multi_hot": ["mode=hash", "rows=kaggle", "--multi-hot"],
    "gzip": ["mode=hash", "rows=kaggle"],
}


@dataclass(frozen=True)
class PreprocessOptions:
    """The keys of the command line."""

    bytes: int = option(2_000_000_000, "bytes of text to generate")
    jobs: tuple[str, ...] = option(("hash", "vocabulary"), f"among {', '.join(JOBS)}")
    repetitions: int = option(3, "runs of each job")
    workers: int = option(0, "processes of a job; 0: as many as it chooses")
    folder: str = option("", "where the files go meanwhile; empty: the system's folder for such")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, bytes=self.bytes, repetitions=self.repetitions)
        for job in self.jobs:
            if job not in JOBS:
                raise ConfigError(f"jobs={job} is unknown: choose among {', '.join(JOBS)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench("Preprocessing", MODULE, PURPOSE, PreprocessOptions, measure, tables)
    return run_bench(bench, arguments)


def measure(options: PreprocessOptions) -> list[Record]:
    """The records, from files in a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="criteo-", dir=options.folder or None) as folder:
        return measure_in(Path(folder), options)


def measure_in(folder: Path, options: PreprocessOptions) -> list[Record]:
    """Generate the text, run every job in turns, and time a first batch of each result."""
    text = folder / "train.txt"
    began = time.perf_counter()
    lines = write_lines(text, options.bytes)
    size, seconds = text.stat().st_size, time.perf_counter() - began
    records: list[Record] = [
        {"kind": "text", "bytes": size, "lines": lines, "seconds": seconds},
    ]
    packed = folder / "train.txt.gz"
    if "gzip" in options.jobs:
        with text.open("rb") as plain, gzip.open(packed, "wb", compresslevel=1) as file:
            shutil.copyfileobj(plain, file, 1 << 20)
    for repetition in range(options.repetitions):
        for job in options.jobs:
            source = packed if job == "gzip" else text
            record = run_job(job, source, folder / "out", options.workers)
            record |= {"repetition": repetition, "text_bytes": size}
            records.append(record | first_batch(folder / "out"))
            shutil.rmtree(folder / "out")
    return records


def run_job(job: str, source: Path, out: Path, workers: int) -> Record:
    """One job: its seconds, core seconds of all its processes, and memory."""
    command = [sys.executable, "-m", "distcache.preprocess", f"input={source}", f"output={out}"]
    command += JOBS[job] + ([f"workers={workers}"] if workers else [])
    before, began = _children(), time.perf_counter()
    with MemoryWatch() as memory:
        done = subprocess.run(command, capture_output=True, text=True)
    seconds, cpu_s = time.perf_counter() - began, _children() - before
    if done.returncode:
        raise ConfigError(f"the job {job} failed: {done.stderr.strip().splitlines()[-1]}")
    log.info("%s: %s", job, " | ".join(done.stdout.strip().splitlines()[-2:]))
    return {
        "kind": "job",
        "job": job,
        "seconds": seconds,
        "core_seconds": cpu_s,
        "peak_bytes": memory.peak,
        "peak_own_bytes": memory.peak_own,
        "output_bytes": sum(path.stat().st_size for path in out.rglob("*.npy")),
    }


def first_batch(folder: Path) -> Record:
    """Milliseconds from nothing to a loaded batch, and for one more."""
    began = time.perf_counter()
    source = CriteoArrays(folder, BatchSettings(global_batch_size=2048))
    source.train_batch(0, 0, 1).loaded()
    first = time.perf_counter()
    source.train_batch(1, 0, 1).loaded()
    second = time.perf_counter()
    return {"first_batch_ms": 1e3 * (first - began), "next_batch_ms": 1e3 * (second - first)}


def tables(records: Sequence[Record]) -> list[Table]:
    """The tables of the report."""
    text = next(record for record in records if record["kind"] == "text")
    rows = []
    for record in records:
        if record["kind"] != "job":
            continue
        mega = record["text_bytes"] / 1e6
        rows.append(
            (
                record["job"],
                f"{record['seconds']:.1f}",
                f"{mega / record['seconds']:.0f}",
                f"{record['core_seconds']:.1f}",
                f"{mega / record['core_seconds']:.0f}",
                f"{record['peak_bytes'] / 2**20:,.0f}",
                f"{record['peak_own_bytes'] / 2**20:,.0f}",
                f"{record['output_bytes'] / 1e6:,.0f}",
                f"{record['first_batch_ms']:.0f}",
            )
        )
    note = (
        f"{text['bytes'] / 1e6:,.0f} MB of text, {text['lines']:,} lines. A job is the whole "
        "command: start, parsing, counts or vocabulary, arrays, checksums, and everything on the "
        "disk (fsync). Core seconds are those of all its processes, so MB/s per core does not "
        "depend on what else ran. Memory is the peak over all its processes together (shared "
        "pages counted once), and without pages of files. The first batch is of 2,048 samples, "
        "from opening the folder, right after the job (its files are in the page cache)."
    )
    columns = ("job", "s", "MB/s", "core s", "MB/s per core", "memory MiB", "own MiB")
    columns += ("output MB", "first batch ms")
    return [Table("Jobs", note, columns, rows)]


def _children() -> float:
    usage_ = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage_.ru_utime + usage_.ru_stime


if __name__ == "__main__":
    sys.exit(main())
