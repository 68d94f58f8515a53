"""Rates of writing and reading checkpoints beside plain files of the same sizes, and the cost of a
write in the background for training: `python -m benchmarks.checkpoint`, or under torchrun for
several ranks (then without training).
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import (
    RATIO_COLUMNS,
    Bench,
    Column,
    Record,
    Section,
    option,
    ratio_record,
    show_spread,
    spread,
    take_turns,
)
from benchmarks.turns import compose_setting, opened_world
from distcache.checkpoint.files import (
    CHECKPOINTS,
    file_world,
    make_checkpoint_folder,
    write_checkpoint,
)
from distcache.checkpoint.saver import Keeping, Saver
from distcache.checkpoint.state import (
    Identity,
    Start,
    TrainerState,
    capture,
    load_checkpoint,
    most_bytes,
    read_start,
)
from distcache.checkpoint.writer import BLOCK_BYTES
from distcache.comm.link import run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.engine.gradients import BUSY
from distcache.parallel.base import Parallel
from distcache.trainer import build
from distcache.trainer.trainer import identity_of

log = logging.getLogger("distcache.benchmarks.checkpoint")


@dataclass(frozen=True)
class CheckpointOptions:
    """Keys of the command line."""

    rows: int = option(800_000, "rows of the largest of three tables, of all ranks", minimum=8)
    width: int = option(64, "of the tables", minimum=4)
    batch: int = option(2048, "samples of a step", minimum=1)
    repetitions: int = option(4, "turns of each", minimum=1)
    steps: int = option(30, "steps of a turn without a write, and as many first ones", minimum=1)
    threads: int = option(1, "of torch")
    folder: str = option("", "where the files go meanwhile; empty: the system's folder for such")
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def measure(options: CheckpointOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Time files, then steps; called by all ranks."""
    rows = [options.rows, options.rows // 4, options.rows // 100]
    settings = (
        f"data.table_rows={rows}",
        f"data.global_batch_size={options.batch}",
        f"model.embedding_dim={options.width}",
        f"model.dense_arch=[512,256,{options.width}]",
        "cache.ratio=0.02",
        "optim=adagrad",
        "trainer.resume=never",
        f"trainer.threads={options.threads}",
    )
    config = compose_setting("small", [*settings, *overrides])
    with opened_world("cpu") as world:
        source = build.build_source(config)
        tables = build.build_tables(config, source)
        model = build.build_dense(config, tables, source.dense_features)
        mode = build.build_parallel(config, world, tables, model, source)
        identity = identity_of(config, world, source, tables)
        header = {"run": identity}
        try:
            with (
                scratch(world, options.folder) as home,
                file_world(world, most_bytes(identity)) as files,
            ):
                records = rates(Files(mode, files, home, header, identity), options.repetitions)
                if world.size == 1:
                    records += beside((mode, files, home, header), source, options)
        finally:
            mode.close()
    return records


@contextmanager
def scratch(world: World, folder: str) -> Any:
    """Make a folder for the files of all ranks, and remove it at the end."""
    name = run_on_rank0(world, lambda: tempfile.mkdtemp(prefix="checkpoint-", dir=folder or None))
    try:
        yield Path(name)
    finally:
        if world.is_first:
            shutil.rmtree(name, ignore_errors=True)


# -----------------------------------------------------------------------------
# Files.


@dataclass
class Files:
    """A checkpoint of `mode`, and a plain file of each rank with its share of as many bytes."""

    mode: Parallel
    world: World
    home: Path
    header: Record
    identity: Identity

    def __post_init__(self) -> None:
        self.folder = self.home / CHECKPOINTS / "step_00000001"
        self.plain = self.home / f"plain{self.world.rank}"
        self.nbytes = sum(value.nbytes for value in self.mode.state_dict().values())
        self.buffer = np.random.default_rng(0).integers(256, size=BLOCK_BYTES, dtype=np.uint8)

    def timed(self, work: Callable[[], None], paths: Sequence[Path]) -> float:
        """Return the seconds of all ranks' `work`, with `paths` dropped from the page cache."""
        files = [file for path in paths for file in [path, *path.glob("*")] if file.is_file()]
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        run_on_all_ranks(self.world, lambda: None)
        began = time.perf_counter()
        work()
        run_on_all_ranks(self.world, lambda: None)
        return time.perf_counter() - began

    def save(self) -> None:
        """Write a checkpoint."""
        values = capture(self.mode, {}, False)
        header = self.header | TrainerState(1).header()
        write_checkpoint(self.folder, values, header, self.world)

    def restore(self) -> None:
        """Read it again and compare its checksums."""
        start = read_start(self.folder, self.identity, self.world)
        load_checkpoint(start, self.mode, self.world)

    def write(self) -> None:
        """Write the plain file."""
        share = self.nbytes // self.world.size
        with self.plain.open("wb") as file:
            for start in range(0, share, BLOCK_BYTES):
                file.write(self.buffer[: share - start])
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> None:
        """Read it again."""
        with self.plain.open("rb", buffering=0) as file:
            while file.readinto(memoryview(self.buffer)):
                pass


def rates(files: Files, repetitions: int) -> list[Record]:
    """Return gigabytes per second of each operation, and the ratios."""
    writers = {"save": files.save, "plain write": files.write}
    readers = {"restore": files.restore, "plain read": files.read}
    rates_of: dict[str, list[float]] = {}
    size = files.nbytes
    for repetition in range(repetitions):
        log.info("files, repetition %d", repetition)
        files.plain.unlink(missing_ok=True)
        make_checkpoint_folder(files.world, files.folder)
        for part, paths in ((writers, []), (readers, [files.folder, files.plain])):
            order = list(part)[:: 1 if repetition % 2 else -1]
            for name in order:
                seconds = files.timed(part[name], paths)
                rates_of.setdefault(name, []).append(size / 1e9 / seconds)
    files.plain.unlink()
    common = {"ranks": files.world.size, "gigabytes": size / 1e9}
    records = [
        {"kind": "rate", "operation": name, **common, "rate": spread(values)}
        for name, values in rates_of.items()
    ]
    for ours, plain in (("save", "plain write"), ("restore", "plain read")):
        records.append(ratio_record(ours, plain, rates_of, target="at least 0.70"))
    return records


# -----------------------------------------------------------------------------
# Steps beside a write.


def beside(
    parts: tuple[Parallel, World, Path, Record], source: Any, options: CheckpointOptions
) -> list[Record]:
    """Time steps without and with a write in the background, in turns of one stream."""
    mode, files, home, header = parts
    stream = mode.stream(source.train_batch(step, 0, 1) for step in range(1_000_000))
    mode.set_lr(0.01, 0.01)
    saver_arguments = (home, Start()), mode, files, header, lambda state: {}, Keeping()
    steps_done: list[int] = []
    pauses: list[float] = []
    writes: list[float] = []

    def step() -> float:
        began = time.perf_counter()
        batch_step = next(stream)
        mode.train_step(batch_step)
        steps_done.append(batch_step.batch.index)
        return 1e3 * (time.perf_counter() - began)

    def alone(_: int) -> list[float]:
        return [step() for _ in range(options.steps)]

    def with_write(_: int) -> list[float]:
        log.info("a write beside step %d", steps_done[-1])
        began = time.perf_counter()
        saver.write(TrainerState(steps_done[-1] + 1), {})
        pauses.append(1e3 * (time.perf_counter() - began))
        times = [step()]
        while saver.asks(1)[0] & BUSY:
            times.append(step())
        writes.append(time.perf_counter() - began)
        return times

    with Saver(*saver_arguments) as saver:
        alone(0)
        turns = take_turns({"alone": alone, "beside a write": with_write}, options.repetitions)
    stream.close()
    records: list[Record] = []
    for name, times in turns.items():
        steps = [ms for turn in times for ms in turn]
        records.append({"kind": "step", "operation": name, "ms": spread(steps)})
        records[-1]["p99"] = float(np.percentile(steps, 99))
    records[-1] |= {"pause_ms": spread(pauses), "write_s": spread(writes)}
    medians = {name: [float(np.median(turn)) for turn in times] for name, times in turns.items()}
    ratio = ratio_record("beside a write", "alone", medians, target="at most 1.05")
    return [*records, ratio]


SECTIONS = (
    Section(
        "Files",
        "Gigabytes a second, median [quartiles] over the turns: writing with fsync, reading cold "
        "(`posix_fadvise`). Plain: as many processes write the same bytes from memory in blocks of "
        "16 MiB, and read them into one buffer. Copy, checksum: one core copies each block and "
        "takes its CRC-32.",
        "rate",
        (
            Column("operation", "operation"),
            Column("ranks", "ranks"),
            Column("GB", "gigabytes", ".2f"),
            Column("GB/s", "rate", show_spread()),
        ),
    ),
    Section(
        "Steps",
        "Milliseconds of a step on one rank: median [quartiles] over all steps of the turns. The "
        "pause is the time of the step boundary at which a write begins.",
        "step",
        (
            Column("training", "operation"),
            Column("steps", lambda record: record["ms"]["count"], ","),
            Column("ms", "ms", show_spread()),
            Column("p99 ms", "p99", ".1f"),
            Column("pause ms", "pause_ms", show_spread(1)),
            Column("write s", "write_s", show_spread()),
        ),
    ),
    Section(
        "Ratios",
        "Within a turn: median [quartiles] over the repetitions, and the range. Files: of rates, "
        "beside the slower of plain files and one core's copy and checksum too; steps: of medians.",
        "ratio",
        (*RATIO_COLUMNS, Column("target", "target")),
    ),
)

BENCH = Bench("Checkpoints", CheckpointOptions, measure, SECTIONS, takes_overrides=True)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
