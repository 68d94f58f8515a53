"""Rate of `distcache.preprocess`, its memory, and the time to the first batch of its result:
`python -m benchmarks.preprocess`.

Lines are generated into a folder of their own, which is removed at the end. Every job is one
process tree of its own, as a user starts it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from benchmarks.report import Bench, Column, Record, Section, option, take_turns
from distcache.data.criteo import CriteoArrays, CriteoSpec
from distcache.data.criteo_folder import KAGGLE_ROWS
from distcache.data.samplers import mix64
from distcache.errors import ConfigError

JOBS = {
    "hash": ["mode=hash", "rows=kaggle"],
    "vocabulary": ["mode=vocabulary", "min_count=2"],
    "multi_hot": ["mode=hash", "rows=kaggle", "multi_hot=true"],
}

LINES_PER_BLOCK = 200_000
FOUR_DIGITS = np.array([f"{i:04x}".encode() for i in range(1 << 16)], dtype="S4").view("<u4")
OFTEN_MISSING = (18, 19, 21, 24, 25)
CSV_OPTIONS = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
WATCH_S = 0.1
PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class PreprocessOptions:
    """Keys of the command line."""

    bytes: int = option(2_000_000_000, "bytes of text to generate", minimum=1)
    jobs: tuple[str, ...] = option(("hash", "vocabulary"), "kinds of job", choices=tuple(JOBS))
    repetitions: int = option(3, "runs of each job", minimum=1)
    workers: int = option(0, "processes of a job; 0: as many as it chooses")
    folder: str = option("", "where the files go meanwhile; empty: the system's folder for such")
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def measure(options: PreprocessOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Generate the text, run every job in turns, and time a first batch of each result."""
    with tempfile.TemporaryDirectory(prefix="criteo-", dir=options.folder or None) as name:
        folder = Path(name)
        text = folder / "train.txt"
        out = folder / "out"
        lines = write_lines(text, options.bytes)
        size = text.stat().st_size
        records: list[Record] = [{"kind": "text", "bytes": size, "lines": lines}]

        def run(job: str, repetition: int) -> None:
            record = run_job(job, text, out, options.workers)
            record |= {"repetition": repetition, "text_bytes": size}
            records.append(record | {"first_batch_ms": first_batch_ms(out)})
            shutil.rmtree(out)

        take_turns({job: partial(run, job) for job in options.jobs}, options.repetitions)
        return records


def run_job(job: str, source: Path, out: Path, workers: int) -> Record:
    """Run one job; return its seconds, core seconds of all its processes, and memory."""
    command = [sys.executable, "-m", "distcache.preprocess", f"input={source}", f"output={out}"]
    command += JOBS[job] + ([f"workers={workers}"] if workers else [])
    start = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)  # the usage of this job and its workers alone
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise ConfigError(f"the job {job} failed: its log is above")
    return {
        "kind": "job",
        "job": job,
        "seconds": seconds,
        "core_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss << 10,
        "output_bytes": sum(path.stat().st_size for path in out.rglob("*.npy")),
    }


def first_batch_ms(folder: Path) -> float:
    """Return milliseconds from opening the folder to a loaded batch."""
    start = time.perf_counter()
    CriteoArrays(CriteoSpec(folder)).train_batch(0, 0, 1).loaded()
    return 1e3 * (time.perf_counter() - start)


def write_lines(path: Path, size: int, seed: int = 0) -> int:
    """Write at least `size` bytes of generated Criteo lines; return their number.

    A quarter of the labels is 1; a fifth of the integers and 3 % of the ids are missing (40 % in
    five tables, as in Criteo Kaggle). Ids are ranks of a log-uniform law (Zipf's with exponent
    1) up to the table's rows, hashed to 32 bits.
    """
    random = np.random.default_rng(seed)
    lines = 0
    with path.open("wb") as file:
        while file.tell() < size:
            count = min(LINES_PER_BLOCK, max(1000, (size - file.tell()) // 200))
            pyarrow.csv.write_csv(generate_table(random, count), file, CSV_OPTIONS)
            lines += count
    return lines


def generate_table(random: np.random.Generator, count: int) -> pa.Table:
    """Return `count` lines as a table of labels, integers and hexadecimal ids."""
    columns = [pa.array((random.random(count) < 0.256).astype(np.uint8))]
    for index in range(13):
        values = np.floor(np.exp(random.random(count) * (2 + index % 5 * 2))).astype(np.int64) - 2
        columns.append(pa.array(values, mask=random.random(count) < 0.2))
    for table, rows in enumerate(KAGGLE_ROWS):
        ranks = np.minimum(rows ** random.random(count), rows - 1).astype(np.uint64)
        hashed = mix64(ranks + np.uint64(table << 40)) >> np.uint64(32)
        missing = random.random(count) < (0.4 if table in OFTEN_MISSING else 0.03)
        columns.append(to_hexadecimal(hashed.astype(np.uint32), missing))
    return pa.table(columns, names=[f"c{index}" for index in range(40)])


def to_hexadecimal(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Return eight digits for each of `values`, an empty string for missing ones."""
    words = np.empty((len(values), 2), dtype="<u4")
    words[:, 0] = FOUR_DIGITS[values >> 16]
    words[:, 1] = FOUR_DIGITS[values & 0xFFFF]
    offsets = np.concatenate(([0], np.cumsum(np.where(missing, 0, 8)))).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(words[~missing].tobytes())]
    return pa.Array.from_buffers(pa.utf8(), len(values), buffers)


def rate_column(title: str, seconds: str) -> Column:
    """Return the column of megabytes of text per second."""
    return Column(title, lambda record: record["text_bytes"] / 1e6 / record[seconds], ".0f")


SECTIONS = (
    Section(
        "Jobs",
        "A job is the whole command: start, parsing, counts or vocabulary, arrays, checksums, and "
        "everything on the disk (fsync). Core seconds are those of all its processes, so MB/s per "
        "core does not depend on what else ran. Memory is the peak of its largest process. "
        "The first batch is of 2,048 samples, from opening the folder; its files are in the page "
        "cache.",
        "job",
        (
            Column("job", "job"),
            Column("text MB", lambda record: record["text_bytes"] / 1e6, ",.0f"),
            Column("s", "seconds", ".1f"),
            rate_column("MB/s", "seconds"),
            Column("core s", "core_seconds", ".1f"),
            rate_column("MB/s per core", "core_seconds"),
            Column("memory MiB", lambda record: record["peak_bytes"] / 2**20, ",.0f"),
            Column("output MB", lambda record: record["output_bytes"] / 1e6, ",.0f"),
            Column("first batch ms", "first_batch_ms", ".0f"),
        ),
    ),
)

BENCH = Bench("Preprocessing", PreprocessOptions, measure, SECTIONS)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
