"""MB/s of `distcache.preprocess`, its memory, and the time to the first batch of its result:
`python -m benchmarks.preprocess`.

Lines are generated into a folder of their own, which is removed at the end. Every job is one
process tree of its own, as a user starts it.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import resource
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

from benchmarks.options import option
from benchmarks.report import Bench, Column, Record, Section, run_bench
from benchmarks.turns import take_turns
from distcache.data.criteo import CriteoArrays, CriteoSpec
from distcache.data.criteo_folder import KAGGLE_ROWS
from distcache.data.samplers import mix64
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.preprocess")

JOBS = {
    "hash": ["mode=hash", "rows=kaggle"],
    "vocabulary": ["mode=vocabulary", "min_count=2"],
    "multi_hot": ["mode=hash", "rows=kaggle", "multi_hot=true"],
    "gzip": ["mode=hash", "rows=kaggle"],
}

_LINES = 200_000
_FOUR_DIGITS = np.array([f"{i:04x}".encode() for i in range(1 << 16)], dtype="S4").view("<u4")
_OFTEN_MISSING = (18, 19, 21, 24, 25)
_CSV = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
_WATCH_S = 0.1
_PSS = re.compile(r"^(Pss|Pss_Anon):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class PreprocessOptions:
    """The keys of the command line."""

    bytes: int = option(2_000_000_000, "bytes of text to generate", least=1)
    jobs: tuple[str, ...] = option(("hash", "vocabulary"), "what runs", among=tuple(JOBS))
    repetitions: int = option(3, "runs of each job", least=1)
    workers: int = option(0, "processes of a job; 0: as many as it chooses")
    folder: str = option("", "where the files go meanwhile; empty: the system's folder for such")
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def measure(options: PreprocessOptions, overrides: tuple[str, ...] = ()) -> list[Record]:
    """Generate the text, run every job in turns, and time a first batch of each result."""
    with tempfile.TemporaryDirectory(prefix="criteo-", dir=options.folder or None) as name:
        folder = Path(name)
        text, packed = folder / "train.txt", folder / "train.txt.gz"
        lines, size = write_lines(text, options.bytes), text.stat().st_size
        records: list[Record] = [{"kind": "text", "bytes": size, "lines": lines}]
        if "gzip" in options.jobs:
            with text.open("rb") as plain, gzip.open(packed, "wb", compresslevel=1) as file:
                shutil.copyfileobj(plain, file, 1 << 20)

        def run(job: str, repetition: int) -> None:
            source, out = packed if job == "gzip" else text, folder / "out"
            record = run_job(job, source, out, options.workers)
            record |= {"repetition": repetition, "text_bytes": size}
            records.append(record | {"first_batch_ms": first_batch_ms(out)})
            shutil.rmtree(out)

        take_turns({job: partial(run, job) for job in options.jobs}, options.repetitions)
        return records


def run_job(job: str, source: Path, out: Path, workers: int) -> Record:
    """One job: its seconds, core seconds of all its processes, and memory."""
    command = [sys.executable, "-m", "distcache.preprocess", f"input={source}", f"output={out}"]
    command += JOBS[job] + ([f"workers={workers}"] if workers else [])
    before, began, peak, own = _children(), time.perf_counter(), 0, 0
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=said, stderr=said, text=True)
        while child.poll() is None:
            taken = memory_taken()
            peak, own = max(peak, taken[0]), max(own, taken[1])
            time.sleep(_WATCH_S)
        seconds, cpu_s = time.perf_counter() - began, _children() - before
        said.seek(0)
        lines = said.read().strip().splitlines()
    if child.returncode:
        raise ConfigError(f"the job {job} failed: {lines[-1]}")
    log.info("%s: %s", job, " | ".join(lines[-2:]))
    return {
        "kind": "job",
        "job": job,
        "seconds": seconds,
        "core_seconds": cpu_s,
        "peak_bytes": peak,
        "peak_own_bytes": own,
        "output_bytes": sum(path.stat().st_size for path in out.rglob("*.npy")),
    }


def first_batch_ms(folder: Path) -> float:
    """Milliseconds from nothing to a loaded batch."""
    began = time.perf_counter()
    CriteoArrays(CriteoSpec(folder)).train_batch(0, 0, 1).loaded()
    return 1e3 * (time.perf_counter() - began)


def write_lines(path: Path, size: int, seed: int = 0) -> int:
    """Write at least `size` bytes of made-up Criteo lines; how many lines.

    A quarter of the labels is 1; a fifth of the integers and 3 % of the ids are missing (40 % in
    five tables, as in Criteo Kaggle). Ids are ranks of a log-uniform law (Zipf's with exponent
    1) up to the table's rows, hashed to 32 bits.
    """
    random, lines = np.random.default_rng(seed), 0
    with path.open("wb") as file:
        while file.tell() < size:
            count = min(_LINES, max(1000, (size - file.tell()) // 200))
            pyarrow.csv.write_csv(_table(random, count), file, _CSV)
            lines += count
    return lines


def _table(random: np.random.Generator, count: int) -> pa.Table:
    columns = [pa.array((random.random(count) < 0.256).astype(np.uint8))]
    for index in range(13):
        values = np.floor(np.exp(random.random(count) * (2 + index % 5 * 2))).astype(np.int64) - 2
        columns.append(pa.array(values, mask=random.random(count) < 0.2))
    for table, rows in enumerate(KAGGLE_ROWS):
        ranks = np.minimum(rows ** random.random(count), rows - 1).astype(np.uint64)
        hashed = mix64(ranks + np.uint64(table << 40)) >> np.uint64(32)
        missing = random.random(count) < (0.4 if table in _OFTEN_MISSING else 0.03)
        columns.append(_hexadecimal(hashed.astype(np.uint32), missing))
    return pa.table(columns, names=[f"c{index}" for index in range(40)])


def _hexadecimal(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Eight digits for each of `values`, nothing for missing ones."""
    words = np.empty((len(values), 2), dtype="<u4")
    words[:, 0], words[:, 1] = _FOUR_DIGITS[values >> 16], _FOUR_DIGITS[values & 0xFFFF]
    offsets = np.concatenate(([0], np.cumsum(np.where(missing, 0, 8)))).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(words[~missing].tobytes())]
    return pa.Array.from_buffers(pa.utf8(), len(values), buffers)


def descendants(process: int) -> set[int]:
    """Process ids of all children of a process, and theirs."""
    found: set[int] = set()
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            direct = {int(word) for word in children.read_text().split()}
        except OSError:
            continue
        found |= direct.union(*(descendants(child) for child in direct))
    return found


def memory_taken() -> tuple[int, int]:
    """Bytes that this process and its children take together, shared pages divided among those that
    share them, and without pages of files, which the system takes back when it needs them.

    Linux alone: elsewhere they are 0.
    """
    taken = np.zeros(2, dtype=np.int64)
    for process in {os.getpid()} | descendants(os.getpid()):
        try:
            found = dict(_PSS.findall(Path(f"/proc/{process}/smaps_rollup").read_text()))
        except OSError:  # it has ended
            continue
        taken += [int(found.get(key, 0)) << 10 for key in ("Pss", "Pss_Anon")]
    return int(taken[0]), int(taken[1])


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _speed(seconds: str) -> Column:
    title = "MB/s" if seconds == "seconds" else "MB/s per core"
    return Column(title, lambda record: record["text_bytes"] / 1e6 / record[seconds], ".0f")


SECTIONS = (
    Section(
        "Jobs",
        "A job is the whole command: start, parsing, counts or vocabulary, arrays, checksums, and "
        "everything on the disk (fsync). Core seconds are those of all its processes, so MB/s per "
        "core does not depend on what else ran. Memory is the peak over all its processes together "
        "(shared pages counted once), and without pages of files. The first batch is of 2,048 "
        "samples, from opening the folder, right after the job (its files are in the page cache).",
        "job",
        (
            Column("job", "job"),
            Column("text MB", lambda record: record["text_bytes"] / 1e6, ",.0f"),
            Column("s", "seconds", ".1f"),
            _speed("seconds"),
            Column("core s", "core_seconds", ".1f"),
            _speed("core_seconds"),
            Column("memory MiB", lambda record: record["peak_bytes"] / 2**20, ",.0f"),
            Column("own MiB", lambda record: record["peak_own_bytes"] / 2**20, ",.0f"),
            Column("output MB", lambda record: record["output_bytes"] / 1e6, ",.0f"),
            Column("first batch ms", "first_batch_ms", ".0f"),
        ),
    ),
)

BENCH = Bench("Preprocessing", PreprocessOptions, measure, SECTIONS)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
