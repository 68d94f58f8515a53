"""One preprocessing job, from text to a folder of arrays, in bounded memory, restartable.

Read `preprocess` as a table of contents: parts of the text are parsed, the samples split, tables
counted and numbered, parts written to their place, and everything described in a manifest.
Everything unfinished lies in `work/` of the output folder and is found again by the same command:
`plan.json` says what the work is of, parts and tables are complete when they have their name.
Nothing here imports torch: the work is done in many small processes.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from distcache.data.files import InputFile, Spool, find_files, read_json, write_json
from distcache.data.raw.parts import (
    SHOWN,
    PartReport,
    PartTask,
    id_dtype,
    parse_part,
    read_report,
    write_runs,
)
from distcache.data.raw.settings import (
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
from distcache.data.raw.tables import (
    ENTRY_BYTES,
    AssembleTask,
    Run,
    TableReport,
    TableTask,
    assemble_part,
    build_table,
    is_assembled,
    make_arrays,
    read_table_report,
)
from distcache.errors import ConfigError, DataError, MemoryTooSmallError
from distcache.versions import installed

logger = logging.getLogger(__name__)

_VERSIONS = ("distcache", "numpy", "pyarrow")
"""Distributions that the manifest names."""


class Bar(Protocol):
    """What a progress bar offers."""

    def update(self, n: float = 1) -> object:
        """Go `n` units on."""


Progress = Callable[[str, int, str, int], AbstractContextManager[Bar]]
"""A progress bar for (stage, total, unit, what of the total was done before)."""


@dataclass
class Work:
    """A job's state: settings, inputs, parts by (file, part), and bytes of text parsed now."""

    settings: PreprocessSettings
    files: list[InputFile]
    progress: Progress
    pool: Pool
    parts: dict[tuple[int, int], PartReport] = field(default_factory=dict)
    text_bytes: int = 0

    @property
    def output(self) -> Path:
        """The folder that the result goes to."""
        return Path(self.settings.output)

    @property
    def folder(self) -> Path:
        """The folder of all unfinished work."""
        return self.output / "work"

    def part_folder(self, key: tuple[int, int]) -> Path:
        """Where a part lies when it is complete."""
        return self.folder / "parts" / part_name(key)

    def bad_lines(self) -> list[str]:
        """`file:line: reason` of the malformed lines that the parts quote, in order."""
        found, before = [], {}
        for key, part in sorted(self.parts.items()):
            first, name = before.get(key[0], 1), self.files[key[0]].path
            found += [f"{name}:{first + line}: {reason}" for line, reason in part.bad]
            before[key[0]] = first + part.lines
        return found

    def skipped(self) -> dict[str, Any]:
        """How many malformed lines were left out, and the first ten."""
        count = sum(part.bad_lines for part in self.parts.values())
        return {"count": count, "first": self.bad_lines()[:SHOWN]}


def part_name(key: tuple[int, int]) -> str:
    """The folder name of part (file, part)."""
    return f"{key[0]:04d}-{key[1]:07d}"


def part_key(name: str) -> tuple[int, int]:
    """The (file, part) of a folder name."""
    file, part = map(int, name.split("-"))
    return file, part


def preprocess(settings: PreprocessSettings, progress: Progress) -> Manifest:
    """Do the job, or what is left of it; a finished one is recognised.

    One with files that are missing or cut is made again. Raises DataError for malformed input,
    ConfigError for an output folder that holds something else or cannot be written.
    """
    began, cpu_s = time.perf_counter(), core_seconds()
    files = find_files("input", settings.input, "a file of Criteo lines")
    if settings.split == "last_file" and len(files) == 1:
        raise DataError(
            f"split=last_file holds out {files[0].path}, the only file of input, and leaves "
            "nothing to train: give more files, or split=seventh or none"
        )
    pool = Pool(settings.workers_for(), Path(settings.output) / "work" / "workers")
    work = Work(settings, files, progress, pool)
    manifest = finished_work(work)
    if manifest is not None:
        logger.info(
            "%s is complete already: nothing to do (verify=true compares checksums too)",
            settings.output,
        )
    else:
        with alone(work):
            manifest = finished_work(work)  # by a process that was at it until now
            if manifest is None:
                open_work(work)
                clear_damaged(work)
                with pool:
                    manifest = finish_work(work)
        _say_rate(work, time.perf_counter() - began, core_seconds() - cpu_s)
    shutil.rmtree(work.folder, ignore_errors=True)
    return manifest


def finish_work(work: Work) -> Manifest:
    """All stages, each going on where it was stopped."""
    parse(work)
    plan = split_samples(work)
    tables = count_tables(work, plan)
    assemble(work, plan, tables)
    manifest = settle_arrays(work, plan, tables)
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


def clear_damaged(work: Work) -> None:
    """Remove a result of which a file is missing or cut: its manifest first, so that nobody takes
    it for whole. The unfinished work that replaces it is there already, and goes on from here."""
    if not (work.output / NAME).exists():
        return
    manifest = read_manifest(work.output)
    logger.warning(
        "output=%s is damaged, so all of it is made again: %s",
        work.output,
        find_damage(work.output, manifest),
    )
    (work.output / NAME).unlink()
    for name in manifest.arrays:
        (work.output / name).unlink(missing_ok=True)


def open_work(work: Work) -> None:
    """Begin, or go on where an earlier run of the same job was stopped."""
    plan = {
        "settings": work.settings.identity(),
        "inputs": [[str(f.path), f.bytes, f.mtime_ns] for f in work.files],
    }
    path = work.folder / "plan.json"
    known = read_json(path)
    if known is not None:
        if known != plan:
            raise ConfigError(
                f"output={work.output} holds the unfinished work of another job, or the input has "
                f"changed since: name another folder, or remove {work.folder}"
            )
        for partial in (work.folder / "parts").glob("*.partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        return
    (work.folder / "parts").mkdir(parents=True, exist_ok=True)
    write_json(path, plan)


def parse(work: Work) -> None:
    """Parse every part that is not complete; `work.parts` has the reports of all then."""
    settings = work.settings
    spool = Spool(work.folder / "spool", settings.part, 2 * work.pool.workers)
    work.parts = _known_parts(work)
    if work.parts:
        logger.info("going on: %d parts are parsed already", len(work.parts))
    failed: list[tuple[tuple[int, int], PartReport]] = []

    def tasks() -> Iterator[PartTask]:
        for key, file, start, stop, read in _ranges(work, spool):
            if failed:
                return
            parts = str(work.folder / "parts")
            skip = settings.on_bad_line == "skip"
            rows = settings.table_rows
            yield PartTask(part_name(key), file, start, stop, parts, rows, skip, read)

    def ended(task: PartTask) -> None:
        if task.file.path.parent == spool.folder:
            spool.finished(task.file)

    total = sum(file.bytes for file in work.files)
    with work.progress("parse", total, "B", _parsed_bytes(work, spool)) as bar:
        for task, report in work.pool.run(parse_part, tasks(), on_end=ended):
            key = part_key(task.name)
            if report.complete:
                work.parts[key] = report
                work.text_bytes += report.text_bytes
            else:
                failed.append((key, report))
            bar.update(task.read_bytes)
    if failed:
        # Its number in the file counts the lines of the parts before it.
        key, report = min(failed, key=lambda entry: entry[0])
        work.parts = {at: part for at, part in work.parts.items() if at < key} | {key: report}
        raise DataError(
            f"{work.bad_lines()[-len(report.bad)]}; correct the line, or leave such lines out with "
            "on_bad_line=skip"
        )


def _known_parts(work: Work) -> dict[tuple[int, int], PartReport]:
    """The parts whose folders are complete."""
    found = {}
    for entry in (work.folder / "parts").iterdir():
        report = None if ".partial" in entry.name else read_report(entry)
        if report is not None:
            found[part_key(entry.name)] = report
    return found


def _parsed_bytes(work: Work, spool: Spool) -> int:
    """Bytes of the input that are not read again; a gzip file is read again unless all is done."""
    done, size = 0, work.settings.part
    for number, file in enumerate(work.files):
        if file.gzip:
            pieces = spool.known_pieces(number)
            whole = pieces is not None and all((number, at) in work.parts for at in range(pieces))
            done += file.bytes if whole else 0
        else:
            starts = (at * size for key, at in work.parts if key == number)
            done += sum(min(size, file.bytes - start) for start in starts)
    return done


def _ranges(work: Work, spool: Spool) -> Iterator[tuple[tuple[int, int], InputFile, int, int, int]]:
    """(key, file, start, stop, bytes of the input) of every part that is to be parsed."""
    size = work.settings.part
    packed = []
    for number, file in enumerate(work.files):
        if file.gzip:
            pieces = spool.known_pieces(number)
            if pieces is None or any((number, at) not in work.parts for at in range(pieces)):
                packed.append((number, file))
            continue
        for index in range(-(-file.bytes // size)):
            start, stop = index * size, min((index + 1) * size, file.bytes)
            if (number, index) not in work.parts:
                yield (number, index), file, start, stop, stop - start
    if packed:
        threads = min(len(packed), work.pool.workers)
        pieces = spool.pieces(packed, lambda *key: key in work.parts, threads)
        for number, index, piece, read in pieces:
            yield (number, index), piece, 0, piece.bytes, read


def core_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def _say_rate(work: Work, seconds: float, cpu_s: float) -> None:
    """Log the rate of the whole job: text by time, and by processor time of all its processes."""
    if not work.text_bytes:
        return
    logger.info(
        "%s of text in %.1f s: %s/s; %s/s per core (%.1f core seconds)",
        amount(work.text_bytes),
        seconds,
        amount(work.text_bytes / seconds),
        amount(work.text_bytes / max(cpu_s, 1e-9)),
        cpu_s,
    )


def amount(count: float) -> str:
    """A number of bytes with three digits or more, in B, kB or MB (powers of 1,000)."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class SamplePlan:
    """Where each part's samples go: parts in order of time, and the place of its first sample."""

    keys: list[tuple[int, int]]
    firsts: list[int]
    samples: int
    train_samples: int


def split_samples(work: Work) -> SamplePlan:
    """The order of all samples and how many of them train. Raises DataError for too few."""
    keys, firsts, samples, before_last = sorted(work.parts), [], 0, 0
    for key in keys:
        if key[0] == len(work.files) - 1 and not before_last:
            before_last = samples
        firsts.append(samples)
        samples += work.parts[key].samples
    train = {"seventh": samples * 6 // 7, "last_file": before_last, "none": samples}
    count = train[work.settings.split]
    if count == 0:
        skipped = work.skipped()
        first = f", the first {skipped['first'][0]}" if skipped["count"] else ""
        raise DataError(
            f"input: {samples} good lines in {len(work.files)} file(s), none of them before the "
            f"held-out ones of split={work.settings.split} ({skipped['count']} malformed lines"
            f"{first}): give more data, or split=none"
        )
    logger.info("%s samples, of which %s train", f"{samples:,}", f"{count:,}")
    return SamplePlan(keys, firsts, samples, count)


def count_tables(work: Work, plan: SamplePlan) -> list[TableReport]:
    """Counts of every table over the training samples, and the vocabularies."""
    runs, missing = _training_runs(work, plan)
    settings = work.settings
    arrays = work.folder / "arrays"
    for name in ("counts", "vocabulary"):
        (arrays / name).mkdir(parents=True, exist_ok=True)
    rows = settings.table_rows or [None] * IDS
    most = max(1 << 16, WORKER_BYTES // 2 // ENTRY_BYTES)
    tasks = []
    for table in range(IDS):
        tasks.append(
            TableTask(
                table=table,
                runs=runs[table],
                missing=missing[table],
                most=most,
                rows=rows[table],
                min_count=settings.min_count,
                bag=settings.multi_hot[table] if settings.multi_hot else 1,
                folder=str(table_folder(work, table)),
                counts_path=str(arrays / f"counts/cat_{table}.npy"),
                vocabulary_path=str(arrays / f"vocabulary/cat_{table}.npy"),
            )
        )
    todo = [task for task in tasks if read_table_report(Path(task.folder)) is None]
    # Counting bags takes a table's counts twice, in memory.
    largest = max((task.rows or 0 for task in todo if task.bag > 1), default=0)
    at_once = settings.workers_for(WORKER_BYTES + 16 * largest) if largest else None
    with work.progress("count", IDS, "table", IDS - len(todo)) as bar:
        for _ in work.pool.run(build_table, todo, at_once):
            bar.update(1)
    found = [read_table_report(Path(task.folder)) for task in tasks]
    return [report for report in found if report is not None]


def table_folder(work: Work, table: int) -> Path:
    """Work files of one table."""
    return work.folder / "tables" / f"{table:02d}"


def _training_runs(work: Work, plan: SamplePlan) -> tuple[list[list[Run]], list[int]]:
    """Runs of each table over the training samples, and how many of them lack an id."""
    runs: list[list[Run]] = [[] for _ in range(IDS)]
    missing = np.zeros(IDS, dtype=np.int64)
    for key, first in zip(plan.keys, plan.firsts, strict=True):
        report, folder = work.parts[key], work.part_folder(key)
        lengths, absent = report.lengths, report.missing
        left = plan.train_samples - first
        if left <= 0:
            break
        if left < report.samples and not is_assembled(folder):
            target = work.folder / "boundary"  # the part in which the held-out samples begin
            target.mkdir(exist_ok=True)
            lengths, absent = write_runs(folder, target, left, np.dtype(report.id_dtype))
            folder = target
        ends = np.cumsum(lengths)
        for table, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
            runs[table].append(Run(str(folder), report.id_dtype, end - length, length))
        missing += absent
    return runs, missing.tolist()


def assemble(work: Work, plan: SamplePlan, tables: Sequence[TableReport]) -> None:
    """Write every part's samples to their place in the arrays."""
    arrays = work.folder / "arrays"
    hashed = work.settings.table_rows is not None
    dtype = id_dtype([report.rows for report in tables])
    if not (work.folder / "arrays-made").exists():
        make_arrays(arrays, plan.samples, dtype)
        (work.folder / "arrays-made").touch()
    vocabularies = [] if hashed else [(str(table_folder(work, r.table)), r) for r in tables]
    tasks = [
        AssembleTask(str(work.part_folder(key)), work.parts[key], first, str(arrays), vocabularies)
        for key, first in zip(plan.keys, plan.firsts, strict=True)
    ]
    done = {task.folder: task.report.samples for task in tasks if is_assembled(Path(task.folder))}
    with work.progress("write", plan.samples, "sample", sum(done.values())) as bar:
        for task, _ in work.pool.run(assemble_part, tasks):
            bar.update(0 if task.folder in done else task.report.samples)


def settle_arrays(work: Work, plan: SamplePlan, tables: Sequence[TableReport]) -> Manifest:
    """Hash the arrays, move them to their places, and describe everything."""
    names = ["labels.npy", "dense.npy", "ids.npy"]
    names += [f"counts/cat_{table}.npy" for table in range(IDS)]
    if work.settings.mode == "vocabulary":
        names += [f"vocabulary/cat_{table}.npy" for table in range(IDS)]
    for name in names:
        made, target = work.folder / "arrays" / name, work.output / name
        if made.exists() or not target.exists():  # else a run that was stopped here moved it
            target.parent.mkdir(parents=True, exist_ok=True)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            shutil.move(made, target)
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
    if skipped["count"]:
        logger.warning("left out %s malformed lines; the first:", skipped["count"])
        for line in skipped["first"]:
            logger.warning("  %s", line)
    settings = work.settings
    lines, samples = [0] * len(work.files), [0] * len(work.files)
    for key, report in work.parts.items():
        lines[key[0]] += report.lines
        samples[key[0]] += report.samples
    return Manifest(
        samples=plan.samples,
        train_samples=plan.train_samples,
        table_rows=tuple(report.rows for report in tables),
        mode=settings.mode,
        multi_hot=None if settings.multi_hot is None else tuple(settings.multi_hot),
        arrays=arrays,
        inputs=[
            {"name": file.path.name, "bytes": file.bytes, "lines": n, "samples": good}
            for file, n, good in zip(work.files, lines, samples, strict=True)
        ],
        skipped=skipped,
        settings=settings.identity(),
        versions={name: installed(name) or "unknown" for name in _VERSIONS},
    ).with_fingerprint()


_POLL_S = 0.05
_STARTING_S = 1.0
"""A process that was killed while it started another one holds its lock for a moment."""
_LEAVING_S = 10.0
"""How long workers of a killed run may take to end; they look for their parent twice a second."""


@contextmanager
def alone(work: Work) -> Iterator[None]:
    """Keep other processes from the same work. Raises ConfigError while one is at it, and for an
    output folder that holds something else."""
    with _lock_file(work) as lock, (work.folder / "workers").open("a") as workers:
        if not _locked(lock, _STARTING_S):
            raise ConfigError(
                f"output={work.output}: another process is working on it: wait for it, or name "
                "another folder"
            )
        if not _locked(workers, _LEAVING_S):
            raise ConfigError(
                f"output={work.output}: workers of a run that was killed are still there after "
                f"{_LEAVING_S:g} s: end these processes, then start again"
            )
        fcntl.flock(workers, fcntl.LOCK_UN)  # for the workers of this run
        yield


def _lock_file(work: Work) -> IO[str]:
    """The opened lock in the work folder, which is made where it may be. Raises ConfigError."""
    ours = (work.folder / "plan.json", work.output / NAME)  # a manifest: of a damaged result
    try:
        used = work.output.is_dir() and any(entry.name != "work" for entry in work.output.iterdir())
        if used and not any(path.exists() for path in ours):
            raise ConfigError(f"output={work.output} is not empty: name a new folder")
        work.folder.mkdir(parents=True, exist_ok=True)
        return (work.folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"output={work.output} cannot be made a folder, or written ({error.strerror}: "
            f"{error.filename}): name a new folder in a place that you may write to"
        ) from error


def _locked(file: IO[str], seconds: float) -> bool:
    """Whether this process got the file's lock for itself within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(_POLL_S)


_held: IO[str] | None = None
"""A worker's lock, held until it ends."""


class Pool:
    """`workers` processes, started at the first task; with one worker, this process alone.

    They hold `lock` shared for as long as they live, so that who has it alone knows that none of
    them is left.
    """

    def __init__(self, workers: int, lock: Path | None = None) -> None:
        self.workers, self._lock = workers, lock
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        function: Callable[[Any], Any],
        tasks: Iterable[Any],
        at_once: int | None = None,
        on_end: Callable[[Any], None] = lambda task: None,
    ) -> Iterator[tuple[Any, Any]]:
        """(task, result) of each task as they finish.

        At most `at_once` tasks are in work or waiting, by default two a worker. After a failure
        no task is started, and of the failures that come to light the one of the earliest task is
        raised. `on_end` hears of a task at once when it is over, maybe in another thread.
        """
        if self.workers == 1:
            for task in tasks:
                try:
                    result = function(task)
                finally:
                    on_end(task)
                yield task, result
            return
        yield from self._spread(function, tasks, at_once or 2 * self.workers, on_end)

    def _spread(
        self,
        function: Callable[[Any], Any],
        tasks: Iterable[Any],
        at_once: int,
        on_end: Callable[[Any], None],
    ) -> Iterator[tuple[Any, Any]]:
        waiting: dict[Future, tuple[int, Any]] = {}
        failures: list[tuple[int, BaseException]] = []
        drawn, more = enumerate(tasks), True
        try:
            while more or waiting:
                while more and len(waiting) < at_once:
                    number, task = next(drawn, (-1, None))
                    more = number >= 0
                    if more:
                        future = self._submit(function, task)
                        future.add_done_callback(lambda _, task=task: on_end(task))
                        waiting[future] = number, task
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    number, task = waiting.pop(future)
                    error = future.exception()
                    if error is not None:
                        failures.append((number, error))
                        more = False
                    elif not failures:
                        yield task, future.result()
            if failures:
                raise _explained(min(failures, key=lambda failure: failure[0])[1])
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, function: Callable[[Any], Any], task: Any) -> Future:
        """A task's future; one that has failed already where a worker died since the last task."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                self.workers, context, _start_worker, (os.getpid(), self._lock)
            )
        try:
            return self._executor.submit(function, task)
        except BrokenProcessPool as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed


def _explained(error: BaseException) -> BaseException:
    """`error`, or what the death of a worker probably means."""
    if isinstance(error, BrokenProcessPool):
        return MemoryTooSmallError(
            "a worker process was killed, most likely for want of memory: give fewer workers "
            "(workers=...), and run the same command again to go on"
        )
    return error


def _start_worker(parent: int, lock: Path | None) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone."""
    global _held
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if lock is not None:
        _held = lock.open("a")
        fcntl.flock(_held, fcntl.LOCK_SH)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
