"""One preprocessing job, from text to a folder of arrays, in bounded memory, restartable.

Read `preprocess` as a table of contents: parts of the text are parsed, the samples split, tables
counted and numbered, parts written to their place, and everything described in a manifest.
Everything unfinished lies in `work/` of the output folder and is found again by the same command:
`plan.json` says what the work is of, parts and tables are complete when they have their report, and
a part whose samples are gone is in the arrays. Nothing here imports torch: the work is done in many
small processes.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distcache.data.criteo_folder import (
    HASHED_BYTES,
    IDS,
    NAME,
    WORKER_BYTES,
    Manifest,
    PreprocessSettings,
    describe_array,
    find_damage,
    hash_block,
    hash_blocks,
    read_manifest,
)
from distcache.data.criteo_tables import (
    AssembleTask,
    PartReport,
    PartTask,
    Run,
    TableReport,
    TableTask,
    assemble_part,
    build_table,
    first_rows,
    make_arrays,
    parse_part,
    read_rows,
    read_table_report,
    write_runs,
)
from distcache.data.criteo_text import MAX_LINE, id_dtype
from distcache.data.files import (
    SHOWN,
    BadLines,
    InputFile,
    find_files,
    read_json,
    unpack,
    write_json,
)
from distcache.errors import ConfigError, DataError, MemoryTooSmallError
from distcache.versions import installed

logger = logging.getLogger(__name__)

_WORK_FORMAT = 2
"""Of the unfinished work, which another version does not take up."""


Progress = Callable[[str, int, str, int], AbstractContextManager[Any]]
"""A progress bar, with `update(n)`, for (stage, total, unit, what of it was done before)."""


@dataclass
class Work:
    """A job's state: settings, inputs, complete parts by name, and bytes of text parsed now; then
    `firsts`: the place of each part's first sample, in order of time, of all and training ones."""

    settings: PreprocessSettings
    files: list[InputFile]
    progress: Progress
    pool: Pool
    parts: dict[str, PartReport] = field(default_factory=dict)
    text_bytes: int = 0
    firsts: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    train_samples: int = 0

    @property
    def output(self) -> Path:
        """The folder that the result goes to."""
        return Path(self.settings.output)

    @property
    def folder(self) -> Path:
        """The folder of all unfinished work."""
        return self.output / "work"

    def part_file(self, name: str, suffix: str = "") -> Path:
        """A file of the part `name`."""
        return self.folder / "parts" / f"{name}{suffix}"

    def bad_lines(self) -> list[str]:
        """`file:line: reason` of the malformed lines that the parts quote, in order."""
        found, before = [], {}
        for _, part in sorted(self.parts.items()):
            first, name = before.get(part.file, 1), self.files[part.file].path
            found += [f"{name}:{first + line}: {reason}" for line, reason in part.bad]
            before[part.file] = first + part.lines
        return found

    def skipped(self) -> BadLines:
        """The malformed lines that were left out."""
        bad = BadLines("skip")
        bad.count = sum(part.bad_lines for part in self.parts.values())
        bad.first = self.bad_lines()[:SHOWN]
        return bad


def part_name(file: int, index: int) -> str:
    """The name of a part of an input file; names sort as the text goes."""
    return f"{file:04d}-{index:07d}"


def preprocess(settings: PreprocessSettings, progress: Progress) -> Manifest:
    """Do the job, or what is left of it; a finished one is recognised.

    One with files that are missing or cut is made again. Raises DataError for malformed input,
    ConfigError for an output folder that holds something else or cannot be written.
    """
    began = time.perf_counter()
    files = find_files("input", settings.input, "a file of Criteo lines")
    if settings.split == "last_file" and len(files) == 1:
        raise DataError(
            f"split=last_file holds out {files[0].path}, the only file of input, and leaves "
            "nothing to train: give more files, or split=seventh or none"
        )
    work = Work(settings, files, progress, Pool(settings.workers_for()))
    manifest = finished_work(work)
    if manifest is not None:
        logger.info(
            "%s is complete already: nothing to do (verify=true compares checksums too)",
            settings.output,
        )
    else:
        with alone(work), work.pool:
            # By a process that was at it until now, or now by this one.
            manifest = finished_work(work) or finish_work(work)
        seconds, megabytes = time.perf_counter() - began, work.text_bytes / 1e6
        if megabytes:
            rate = megabytes / seconds
            logger.info("%.1f MB of text in %.1f s: %.1f MB/s", megabytes, seconds, rate)
    shutil.rmtree(work.folder, ignore_errors=True)
    return manifest


def finish_work(work: Work) -> Manifest:
    """All stages, each going on where it was stopped."""
    open_work(work)
    parse(work)
    split_samples(work)
    tables = count_tables(work)
    assemble(work, tables)
    manifest = settle_arrays(work, tables)
    write_json(work.output / NAME, asdict(manifest))
    return manifest


def finished_work(work: Work) -> Manifest | None:
    """The result where it is complete; None where there is none, or a file of it is missing or
    cut. Raises ConfigError where it is that of another job."""
    if not os.path.exists(work.output / NAME):
        return None
    try:
        manifest = read_manifest(work.output)
    except DataError as error:
        what = str(error).removeprefix("data.path: ")
        raise ConfigError(
            f"output={work.output}: {what}; remove the folder, or name another"
        ) from error
    wanted = [(f.path.name, f.bytes) for f in work.files]
    same = [(entry["name"], entry["bytes"]) for entry in manifest.inputs] == wanted
    if not same or manifest.settings != work.settings.identity():
        raise ConfigError(
            f"output={work.output} holds the result of another job: name another folder, or "
            "remove it"
        )
    return manifest if find_damage(work.output, manifest) is None else None


def open_work(work: Work) -> None:
    """Begin, or go on where an earlier run of the same job was stopped.

    A result of which a file is missing or cut is removed, its manifest first, so that nobody takes
    it for whole.
    """
    plan = {
        "format": _WORK_FORMAT,
        "settings": work.settings.identity(),
        "inputs": [[str(f.path), f.bytes, f.mtime_ns] for f in work.files],
    }
    path = work.folder / "plan.json"
    known = read_json(path)
    if known is not None and known != plan:
        raise ConfigError(
            f"output={work.output} holds the unfinished work of another job, or the input has "
            f"changed since: name another folder, or remove {work.output}"
        )
    (work.folder / "parts").mkdir(parents=True, exist_ok=True)
    write_json(path, plan)
    if (work.output / NAME).exists():
        manifest = read_manifest(work.output)
        logger.warning(
            "output=%s is damaged, so all of it is made again: %s",
            work.output,
            find_damage(work.output, manifest),
        )
        for name in (NAME, *manifest.arrays):
            (work.output / name).unlink(missing_ok=True)


def parse(work: Work) -> None:
    """Parse every part that is not complete; `work.parts` has the reports of all then."""
    reports = (work.folder / "parts").glob("*-*.json")
    work.parts = {path.stem: PartReport(**read_json(path)) for path in reports}
    if work.parts:
        logger.info("going on: %d parts are parsed already", len(work.parts))
    failed: list[PartReport] = []
    tasks = itertools.takewhile(lambda task: not failed, _unparsed(work))
    total = sum(file.bytes for file in work.files)
    done = sum(part.read_bytes for part in work.parts.values())
    with work.progress("parse", total, "B", done) as bar:
        for task, report in work.pool.run(parse_part, tasks):
            if report.complete:
                work.parts[report.name] = report
                work.text_bytes += report.text_bytes
            else:
                failed.append(report)
            if work.files[task.file].gzip:
                task.text.path.unlink()
            bar.update(task.read_bytes)
    if failed:
        # Its number in the file counts the lines of the parts before it.
        first = min(failed, key=lambda report: report.name)
        work.parts = {name: part for name, part in work.parts.items() if name < first.name}
        work.parts[first.name] = first
        raise DataError(
            f"{work.bad_lines()[-len(first.bad)]}; correct the line, or leave such lines out with "
            "on_bad_line=skip"
        )


def _unparsed(work: Work) -> Iterator[PartTask]:
    """Every part that is to be parsed; text of gzip files is unpacked when it is asked for."""
    settings, parts, size = work.settings, str(work.folder / "parts"), work.settings.part
    how = (parts, settings.table_rows, settings.on_bad_line == "skip")
    for number, file in enumerate(work.files):

        def done(index: int, number: int = number) -> bool:
            return part_name(number, index) in work.parts

        if not file.gzip:
            for index, start in enumerate(range(0, file.bytes, size)):
                stop, name = min(start + size, file.bytes), part_name(number, index)
                if not done(index):
                    yield PartTask(number, name, file, start, stop, stop - start, *how)
            continue
        count = work.part_file(f"{number:04d}", ".count")  # how many, of a file that was read
        known = read_json(count)
        if known is None or not all(map(done, range(known))):
            at, found = work.part_file(f"{number:04d}"), 0
            for text, read in unpack(file, at, size, MAX_LINE, done):
                name, found = part_name(number, found), found + 1
                if text is not None:
                    yield PartTask(number, name, text, 0, text.bytes, read, *how)
            write_json(count, found)


def split_samples(work: Work) -> None:
    """The order of all samples and how many of them train. Raises DataError for too few."""
    samples = before_last = 0
    for name, part in sorted(work.parts.items()):
        work.firsts[name] = samples
        samples += part.samples
        if part.file < len(work.files) - 1:
            before_last = samples
    train = {"seventh": samples * 6 // 7, "last_file": before_last, "none": samples}
    count = train[work.settings.split]
    if count == 0:
        raise DataError(
            f"input: {samples} good lines in {len(work.files)} file(s), none of them before the "
            f"held-out ones of split={work.settings.split} ({work.skipped().example()}): give more "
            "data, or split=none"
        )
    logger.info("%s samples, of which %s train", f"{samples:,}", f"{count:,}")
    work.samples, work.train_samples = samples, count


def count_tables(work: Work) -> list[TableReport]:
    """Counts of every table over the training samples, and the vocabularies."""
    settings = work.settings
    rows, bag = settings.table_rows or [None] * IDS, settings.multi_hot or [1] * IDS
    todo = [table for table in range(IDS) if read_table_report(table_folder(work, table)) is None]
    runs, missing = _training_runs(work) if todo else ([], [])
    tasks = [
        TableTask(
            table=table,
            runs=runs[table],
            missing=missing[table],
            rows=rows[table],
            min_count=settings.min_count,
            bag=bag[table],
            folder=str(table_folder(work, table)),
            output=str(work.output),
        )
        for table in todo
    ]
    # Counting bags takes a table's counts twice, in memory.
    largest = max((task.rows or 0 for task in tasks if task.bag > 1), default=0)
    at_once = settings.workers_for(WORKER_BYTES + 16 * largest) if largest else None
    with work.progress("count", IDS, "table", IDS - len(todo)) as bar:
        for _ in work.pool.run(build_table, tasks, at_once):
            bar.update(1)
    found = [read_table_report(table_folder(work, table)) for table in range(IDS)]
    return [report for report in found if report is not None]


def table_folder(work: Work, table: int) -> Path:
    """Work files of one table."""
    return work.folder / "tables" / f"{table:02d}"


def _training_runs(work: Work) -> tuple[list[list[Run]], list[int]]:
    """Runs of each table over the training samples, and how many of them lack an id."""
    runs: list[list[Run]] = [[] for _ in range(IDS)]
    missing = np.zeros(IDS, dtype=np.int64)
    for name, first in work.firsts.items():
        report, path = work.parts[name], work.part_file(name)
        lengths, absent, dtype = report.lengths, report.missing, report.id_dtype
        left = work.train_samples - first
        if left <= 0:
            break
        if left < report.samples:
            training = first_rows(read_rows(work.part_file(name, ".rows")), left)
            path = work.folder / "boundary"  # of the part in which the held-out samples begin
            lengths, absent, wide = write_runs(training, path, np.dtype(dtype))
            dtype = wide.str
        ends = np.cumsum(lengths)
        for table, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
            runs[table].append(Run(str(path), dtype, end - length, length))
        missing += absent
    return runs, missing.tolist()


def assemble(work: Work, tables: list[TableReport]) -> None:
    """Write every part's samples to their place in the arrays."""
    made = work.folder / "arrays.json"
    if read_json(made) is None:  # none that an older result or a run killed meanwhile has left
        make_arrays(work.output, work.samples, id_dtype([report.rows for report in tables]))
        write_json(made, work.samples)
    words = [] if work.settings.table_rows else [(table_folder(work, r.table), r) for r in tables]
    files = {name: work.part_file(name, ".rows") for name in work.firsts}
    tasks = [
        AssembleTask(files[name], work.parts[name].samples, first, work.output, words)
        for name, first in work.firsts.items()
        if files[name].exists()
    ]
    done = work.samples - sum(task.samples for task in tasks)
    with work.progress("write", work.samples, "sample", done) as bar:
        for task, _ in work.pool.run(assemble_part, tasks):
            bar.update(task.samples)


def settle_arrays(work: Work, tables: list[TableReport]) -> Manifest:
    """Bring the arrays to the disk, hash them, and describe everything."""
    names = ["labels.npy", "dense.npy", "ids.npy"]
    for kind in ("counts", "vocabulary") if work.settings.mode == "vocabulary" else ("counts",):
        names += [f"{kind}/cat_{table}.npy" for table in range(IDS)]
    for name in names:
        with (work.output / name).open("rb") as file:
            os.fsync(file.fileno())
    blocks = {name: hash_blocks(work.output / name) for name in names}
    hashes: dict[tuple[str, int], bytes] = {}
    total = sum((work.output / name).stat().st_size for name in names)
    with work.progress("check", total, "B", 0) as bar:
        for block, digest in work.pool.run(hash_block, itertools.chain(*blocks.values())):
            hashes[block] = digest
            bar.update(min(HASHED_BYTES, Path(block[0]).stat().st_size - block[1]))
    arrays = {
        name: describe_array(work.output / name, [hashes[block] for block in blocks[name]])
        for name in names
    }
    skipped = work.skipped()
    skipped.report()
    settings = work.settings
    lines, samples = [0] * len(work.files), [0] * len(work.files)
    for part in work.parts.values():
        lines[part.file] += part.lines
        samples[part.file] += part.samples
    return Manifest(
        samples=work.samples,
        train_samples=work.train_samples,
        table_rows=tuple(report.rows for report in tables),
        mode=settings.mode,
        multi_hot=None if settings.multi_hot is None else tuple(settings.multi_hot),
        arrays=arrays,
        inputs=[
            {"name": file.path.name, "bytes": file.bytes, "lines": n, "samples": good}
            for file, n, good in zip(work.files, lines, samples, strict=True)
        ],
        skipped=skipped.summary(),
        settings=settings.identity(),
        versions={n: installed(n) or "unknown" for n in ("distcache", "numpy", "pyarrow")},
    ).with_fingerprint()


@contextmanager
def alone(work: Work) -> Iterator[None]:
    """Keep other processes from the same work. Raises ConfigError while one is at it, and for an
    output folder that holds something else or cannot be written."""
    ours = (work.folder / "plan.json", work.output / NAME)  # a manifest: of a damaged result
    try:
        used = work.output.is_dir() and any(entry.name != "work" for entry in work.output.iterdir())
        if used and not any(path.exists() for path in ours):
            raise ConfigError(f"output={work.output} is not empty: name a new folder")
        work.folder.mkdir(parents=True, exist_ok=True)
        lock = (work.folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"output={work.output} cannot be made a folder, or written ({error.strerror}: "
            f"{error.filename}): name a new folder in a place that you may write to"
        ) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers do not inherit it
        except OSError as error:
            raise ConfigError(
                f"output={work.output}: another process is working on it: wait for it, or name "
                "another folder"
            ) from error
        yield


class Pool:
    """`workers` processes; with one worker, this process alone."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        if self.workers > 1:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                self.workers, context, _start_worker, (os.getpid(),)
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self, function: Callable[[Any], Any], tasks: Iterable[Any], at_once: int | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """(task, result) of each task as they finish.

        At most `at_once` tasks are in work or waiting, by default two a worker. After a failure,
        which is raised, no task is started.
        """
        if self._executor is None:
            for task in tasks:
                yield task, function(task)
            return
        tasks, most = iter(tasks), at_once or 2 * self.workers
        waiting: dict[Future, Any] = {}
        try:
            while True:
                for task in itertools.islice(tasks, most - len(waiting)):
                    waiting[self._executor.submit(function, task)] = task
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool as error:
            raise MemoryTooSmallError(
                "a worker process was killed, most likely for want of memory: give fewer workers "
                "(workers=...), and run the same command again to go on"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


_PR_SET_PDEATHSIG = 1


def _start_worker(parent: int) -> None:
    """A worker leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
