"""One preprocessing job, from text to a folder of arrays; read `preprocess` as a table of contents.

Everything unfinished lies in `work/` of the output folder and is found again by the same command:
`plan.json` says what the work is of, parts and tables are complete when they have their name.
"""

from __future__ import annotations

import fcntl
import json
import logging
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from distcache.data.files import InputFile, find_files
from distcache.data.raw import finish
from distcache.data.raw.manifest import NAME, Manifest, read_manifest, write_manifest
from distcache.data.raw.part import PartReport, PartTask, parse_part, read_report
from distcache.data.raw.pool import Pool
from distcache.data.raw.settings import PreprocessSettings
from distcache.data.raw.spool import Spool
from distcache.data.raw.work import Progress, Work, bad_line, part_name
from distcache.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_STARTING_S = 1.0
"""A process that was killed while it started another one holds its lock for a moment."""
_LEAVING_S = 10.0
"""How long workers of a killed run may take to end; they look for their parent twice a second."""


def preprocess(settings: PreprocessSettings, progress: Progress) -> Manifest:
    """Do the job, or what is left of it; a finished one is recognised.

    Raises DataError for malformed input, ConfigError for an output folder that holds something
    else.
    """
    began, cpu_s = time.perf_counter(), core_seconds()
    files = find_files("input", settings.input, "a file of Criteo lines")
    pool = Pool(settings.workers_for(), Path(settings.output) / "work" / "workers")
    work = Work(settings, files, progress, pool)
    manifest = finished_work(work)
    if manifest is not None:
        logger.info("%s is complete already: nothing to do", settings.output)
    else:
        with alone(work):
            manifest = finished_work(work)  # by a process that was at it until now
            if manifest is None:
                open_work(work)
                with pool:
                    manifest = finish_work(work)
        _say_rate(work, time.perf_counter() - began, core_seconds() - cpu_s)
    shutil.rmtree(work.folder, ignore_errors=True)
    return manifest


def finish_work(work: Work) -> Manifest:
    """All stages, each going on where it was stopped."""
    parse(work)
    plan = finish.split_samples(work)
    tables = finish.count_tables(work, plan)
    finish.assemble(work, plan, tables)
    manifest = finish.settle_arrays(work, plan, tables)
    write_manifest(work.output, manifest)
    return manifest


@contextmanager
def alone(work: Work) -> Iterator[None]:
    """Keep other processes from the same work. Raises ConfigError while one is at it, and for an
    output folder that holds something else."""
    used = work.output.is_dir() and any(entry.name != "work" for entry in work.output.iterdir())
    if used and not (work.folder / "plan.json").exists():
        raise ConfigError(f"output={work.output} is not empty: name a new folder")
    work.folder.mkdir(parents=True, exist_ok=True)
    with (work.folder / "lock").open("w") as lock, (work.folder / "workers").open("a") as workers:
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


def finished_work(work: Work) -> Manifest | None:
    """The result where it is complete. Raises ConfigError where it is that of another job."""
    if not (work.output / NAME).exists():
        return None
    manifest = read_manifest(work.output)
    wanted = [(f.path.name, f.bytes) for f in work.files]
    same = [(entry["name"], entry["bytes"]) for entry in manifest.inputs] == wanted
    if not same or manifest.settings != work.settings.identity():
        raise ConfigError(
            f"output={work.output} holds the result of another job: name another folder, or "
            "remove it"
        )
    return manifest


def open_work(work: Work) -> None:
    """Begin, or go on where an earlier run of the same job was stopped."""
    plan = {
        "settings": work.settings.identity(),
        "inputs": [[str(f.path), f.bytes, f.mtime_ns] for f in work.files],
    }
    path = work.folder / "plan.json"
    if path.exists():
        if json.loads(path.read_text()) != plan:
            raise ConfigError(
                f"output={work.output} holds the unfinished work of another job, or the input has "
                f"changed since: name another folder, or remove {work.folder}"
            )
        for partial in (work.folder / "parts").glob("*.partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        return
    (work.folder / "parts").mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(plan))
    partial.rename(path)


def parse(work: Work) -> None:
    """Parse every part that is not complete; `work.parts` has the reports of all then."""
    settings = work.settings
    spool = Spool(work.folder / "spool", settings.part, 2 * work.pool.workers)
    known = {key: report for key in _known_parts(work) if (report := _report(work, key))}
    work.parts = dict(known)
    if known:
        logger.info("going on: %d parts are parsed already", len(known))
    failed: list[tuple[tuple[int, int], PartReport]] = []
    keys: dict[str, tuple[int, int]] = {}

    def tasks() -> Iterator[PartTask]:
        for key, file, start, stop, read in _ranges(work, spool):
            if failed:
                return
            keys[part_name(key)] = key
            parts = str(work.folder / "parts")
            skip = settings.on_bad_line == "skip"
            rows = settings.table_rows
            yield PartTask(part_name(key), file, start, stop, parts, rows, skip, read)

    def ended(task: PartTask) -> None:
        if task.file.path.parent == spool.folder:
            spool.finished(task.file)

    with work.progress("parse", sum(file.bytes for file in work.files), "B") as bar:
        for task, report in work.pool.run(parse_part, tasks(), on_end=ended):
            key = keys[task.name]
            if report.complete:
                work.parts[key] = report
                work.text_bytes += report.text_bytes
            else:
                failed.append((key, report))
            bar.update(task.read_bytes)
    if failed:
        raise bad_line(work, *min(failed, key=lambda entry: entry[0]))


def _known_parts(work: Work) -> list[tuple[int, int]]:
    """Keys of the parts whose folders are there."""
    names = [entry.name for entry in (work.folder / "parts").iterdir()]
    keys = [tuple(map(int, name.split("-"))) for name in names if ".partial" not in name]
    return sorted((key[0], key[1]) for key in keys)


def _report(work: Work, key: tuple[int, int]) -> PartReport | None:
    return read_report(work.part_folder(key))


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
