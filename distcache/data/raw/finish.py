"""From parsed parts to the finished arrays: the split, counts and vocabularies, assembly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from distcache.data.criteo_text import IDS, id_dtype
from distcache.data.raw.assemble import (
    AssembleTask,
    assemble_part,
    is_assembled,
    make_arrays,
    settle,
)
from distcache.data.raw.checksum import HASHED_BYTES, hash_blocks, hash_tasks
from distcache.data.raw.count import ENTRY_BYTES, Run
from distcache.data.raw.manifest import Manifest, describe_array
from distcache.data.raw.part_files import write_runs
from distcache.data.raw.settings import WORKER_BYTES
from distcache.data.raw.tables import TableReport, TableTask, build_table, read_table_report
from distcache.data.raw.work import Work, skipped_lines
from distcache.errors import DataError

logger = logging.getLogger(__name__)


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
        skipped = skipped_lines(work)
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
        settle(work.folder / "arrays" / name, work.output / name)
    tasks = [task for name in names for task in hash_tasks(work.output / name)]
    hashes: dict[tuple[str, int], bytes] = {}
    total = sum((work.output / name).stat().st_size for name in names)
    with work.progress("check", total, "B", 0) as bar:
        for task, digests in work.pool.run(hash_blocks, tasks):
            hashes[task.path, task.start] = digests
            bar.update(min(task.blocks * HASHED_BYTES, Path(task.path).stat().st_size - task.start))
    arrays = {
        name: describe_array(
            work.output / name,
            [hashes[task.path, task.start] for task in hash_tasks(work.output / name)],
        )
        for name in names
    }
    skipped = skipped_lines(work)
    if skipped["count"]:
        logger.warning("left out %s malformed lines; the first:", skipped["count"])
        for line in skipped["first"]:
            logger.warning("  %s", line)
    settings = work.settings
    return Manifest(
        samples=plan.samples,
        train_samples=plan.train_samples,
        table_rows=tuple(report.rows for report in tables),
        mode=settings.mode,
        multi_hot=None if settings.multi_hot is None else tuple(settings.multi_hot),
        arrays=arrays,
        inputs=_inputs(work),
        skipped=skipped,
        settings=settings.identity(),
        versions=_versions(),
    ).with_fingerprint()


def _inputs(work: Work) -> list[dict[str, object]]:
    """Name, bytes, lines and samples of each file."""
    lines, samples = [0] * len(work.files), [0] * len(work.files)
    for key, report in work.parts.items():
        lines[key[0]] += report.lines
        samples[key[0]] += report.samples
    return [
        {"name": file.path.name, "bytes": file.bytes, "lines": n, "samples": good}
        for file, n, good in zip(work.files, lines, samples, strict=True)
    ]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("distcache", "numpy", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
