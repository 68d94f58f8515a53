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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distcache.data.criteo_folder import (
    HASHED_BYTES,
    IDS,
    NAME,
    Manifest,
    PreprocessSettings,
    describe_array,
    find_damage,
    hash_block,
    hash_blocks,
    read_manifest,
)
from distcache.data.criteo_tables import (
    Part,
    PartReport,
    Run,
    TableTask,
    assemble_part,
    build_table,
    make_arrays,
    parse_part,
    part_file,
    read_rows,
    table_folder,
    write_runs,
)
from distcache.data.criteo_text import MAX_LINE
from distcache.data.files import (
    BadLines,
    InputFile,
    find_files,
    inspect,
    read_json,
    unpack,
    write_json,
)
from distcache.errors import ConfigError, DataError, MemoryTooSmallError
from distcache.versions import installed

logger = logging.getLogger(__name__)

_WORK_FORMAT = 3
"""Version of the files of unfinished work. No other version is continued."""


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

    def bad_lines(self) -> BadLines:
        """The malformed lines of all parts; DataError for the first where they are not skipped."""
        bad, before = BadLines(self.settings.on_bad_line, "on_bad_line"), Counter[int]()
        for _, part in sorted(self.parts.items()):
            for line, why in part.bad:
                bad.add(self.files[part.file].path, before[part.file] + line, why)
            bad.count += part.bad_lines - len(part.bad)
            before[part.file] += part.lines
        return bad


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
    shutil.rmtree(work.settings.work, ignore_errors=True)
    return manifest


def finish_work(work: Work) -> Manifest:
    """All stages, each going on where it was stopped."""
    open_work(work)
    parse(work)
    split_samples(work)
    table_rows = count_tables(work)
    assemble(work, table_rows)
    manifest = settle_arrays(work, table_rows)
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
    path = work.settings.work / "plan.json"
    known = read_json(path)
    version = None if known is None else known.get("format")
    if known is not None and version != _WORK_FORMAT:
        raise ConfigError(
            f"output={work.output} holds unfinished work of format {version!r}, and this version "
            f"of distcache continues format {_WORK_FORMAT}: name another folder, or remove "
            f"{work.output}"
        )
    if known is not None and known != plan:
        raise ConfigError(
            f"output={work.output} holds the unfinished work of another job, or the input has "
            f"changed since: name another folder, or remove {work.output}"
        )
    (work.settings.work / "parts").mkdir(parents=True, exist_ok=True)
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
    reports = (work.settings.work / "parts").glob("*-*.json")
    work.parts = {path.stem: PartReport(**read_json(path)) for path in reports}
    if work.parts:
        logger.info("going on: %d parts are parsed already", len(work.parts))
    given_up: list[PartReport] = []
    parts = itertools.takewhile(lambda part: not given_up, _unparsed(work))
    total = sum(file.bytes for file in work.files)
    done = sum(part.read_bytes for part in work.parts.values())
    with work.progress("parse", total, "B", done) as bar:
        for part, report in work.pool.run(partial(parse_part, work.settings), parts):
            work.parts[report.name] = report
            work.text_bytes += report.text_bytes
            if report.bad and work.settings.on_bad_line == "error":
                given_up.append(report)
            if work.files[part.file].gzip:
                part.text.path.unlink()
            bar.update(part.read_bytes)
    work.bad_lines()


def _unparsed(work: Work) -> Iterator[Part]:
    """Every part that is to be parsed; text of gzip files is unpacked when it is asked for."""
    size = work.settings.part
    for number, file in enumerate(work.files):
        names = (f"{number:04d}-{index:07d}" for index in itertools.count())
        if not file.gzip:
            for start, name in zip(range(0, file.bytes, size), names, strict=False):
                stop = min(start + size, file.bytes)
                if name not in work.parts:
                    yield Part(number, name, file, start, stop, stop - start)
            continue
        count = part_file(work.settings, f"{number:04d}", ".count")  # of a file that was read
        if read_json(count) == sum(part.file == number for part in work.parts.values()):
            continue
        texts, found = (part_file(work.settings, name, ".text") for name in names), 0
        for path, read in unpack(file, texts, size, MAX_LINE):
            found += 1
            if path.stem in work.parts:
                path.unlink()
            else:
                text = inspect(path)
                yield Part(number, path.stem, text, 0, text.bytes, read)
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
            f"held-out ones of split={work.settings.split} ({work.bad_lines().example()}): give "
            "more data, or split=none"
        )
    logger.info("%s samples, of which %s train", f"{samples:,}", f"{count:,}")
    work.samples, work.train_samples = samples, count


def count_tables(work: Work) -> list[int]:
    """Counts of every table over the training samples, and the vocabularies; rows of the tables."""
    reports = [table_folder(work.settings, table) / "report.json" for table in range(IDS)]
    todo = [table for table in range(IDS) if read_json(reports[table]) is None]
    tasks = _training_runs(work) if todo else []
    with work.progress("count", IDS, "table", IDS - len(todo)) as bar:
        chosen = [task for task in tasks if task.table in todo]
        for _ in work.pool.run(partial(build_table, work.settings), chosen):
            bar.update(1)
    return [read_json(report) for report in reports]


def _training_runs(work: Work) -> list[TableTask]:
    """Runs of each table over the training samples, and how many of them lack an id."""
    tasks = [TableTask(table, [], 0) for table in range(IDS)]
    for name, first in work.firsts.items():
        report, path = work.parts[name], part_file(work.settings, name, ".runs")
        lengths, missing, left = report.lengths, report.missing, work.train_samples - first
        if left <= 0:
            break
        if left < report.samples:  # the part in which the held-out samples begin
            path = work.settings.work / "boundary"
            pieces = read_rows(part_file(work.settings, name, ".rows"))
            lengths, missing = write_runs(pieces, path, left)
        starts = [0, *np.cumsum(lengths).tolist()]
        for task, (start, stop), absent in zip(tasks, pairwise(starts), missing, strict=True):
            task.runs.append(Run(path, start, stop))
            task.missing += absent
    return tasks


def assemble(work: Work, table_rows: list[int]) -> None:
    """Write every part's samples to their place in the arrays."""
    settings = work.settings
    tasks = [
        (name, first, work.parts[name].samples)
        for name, first in work.firsts.items()
        if part_file(settings, name, ".rows").exists()
    ]
    if len(tasks) == len(work.firsts):  # none is written; what else is there was not finished
        make_arrays(settings, work.samples, table_rows)
    done = work.samples - sum(samples for *_, samples in tasks)
    with work.progress("write", work.samples, "sample", done) as bar:
        for task, _ in work.pool.run(partial(assemble_part, settings, table_rows), tasks):
            bar.update(task[2])


def settle_arrays(work: Work, table_rows: list[int]) -> Manifest:
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
    skipped = work.bad_lines()
    skipped.report()
    settings = work.settings
    return Manifest(
        samples=work.samples,
        train_samples=work.train_samples,
        table_rows=tuple(table_rows),
        mode=settings.mode,
        multi_hot=None if settings.multi_hot is None else tuple(settings.multi_hot),
        arrays=arrays,
        inputs=[{"name": file.path.name, "bytes": file.bytes} for file in work.files],
        skipped=skipped.summary(),
        settings=settings.identity(),
        versions={n: installed(n) or "unknown" for n in ("distcache", "numpy", "pyarrow")},
    ).with_fingerprint()


@contextmanager
def alone(work: Work) -> Iterator[None]:
    """Keep other processes from the same work. Raises ConfigError while one is at it, and for an
    output folder that holds something else or cannot be written."""
    ours = (work.settings.work / "plan.json", work.output / NAME)  # a manifest: of a damaged result
    try:
        used = work.output.is_dir() and any(entry.name != "work" for entry in work.output.iterdir())
        if used and not any(path.exists() for path in ours):
            raise ConfigError(f"output={work.output} is not empty: name a new folder")
        work.settings.work.mkdir(parents=True, exist_ok=True)
        lock = (work.settings.work / "lock").open("w")
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


class Pool(AbstractContextManager["Pool"]):
    """`workers` processes; with one worker, this process alone."""

    def __init__(self, workers: int) -> None:
        self._most, self._executor = 2 * workers, None
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))

    def __exit__(self, *exception: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple]:
        """(task, result) of each task as they finish.

        At most two tasks a worker are in work or waiting. After a failure, which is raised, no task
        is started.
        """
        if self._executor is None:
            yield from ((task, function(task)) for task in tasks)
            return
        tasks, waiting = iter(tasks), {}
        try:
            while True:
                for task in itertools.islice(tasks, self._most - len(waiting)):
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
