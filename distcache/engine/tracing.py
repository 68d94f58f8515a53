"""A trace: one file with all ranks' stages on one clock, of a run or of a loop of one's own."""

from __future__ import annotations

import fileinput
import gzip
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distcache.comm.link import run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.engine.step import WAIT, Span, Watcher
from distcache.errors import ConfigError

# -----------------------------------------------------------------------------
# One rank's part of a trace: its stages as lines of trace events, written as they come.
#
# The format is Chrome's trace events (a process per rank, a thread per lane), which ui.perfetto.dev
# and chrome://tracing read.

logger = logging.getLogger(__name__)

LANES = ("training", "movement", "planner", "reading", "talking")
"""Lanes in the order in which they are shown."""


def part_of(folder: Path, rank: int) -> Path:
    """The part of a rank: a trace of its own, which wants no closing bracket."""
    return folder / f"trace.rank{rank}.json"


def remove_trace(folder: Path) -> None:
    """Remove the trace, and the parts of one, that a run before left in `folder`."""
    for path in (*folder.glob("trace.json*"), *folder.glob("trace.rank*.json")):
        path.unlink(missing_ok=True)


class TracePart:
    """A watcher that appends every span of this rank to a file; memory does not grow with them.

    A file that cannot be written any more ends the trace, with a warning, not the run.
    """

    def __init__(self, folder: Path, rank: int, start_s: float) -> None:
        """Begin the part in `folder`, whose times count from `start_s` of the system's clock, of
        which spans have `time.perf_counter`. Raises OSError where that is not possible."""
        self._before_s = time.time() - time.perf_counter() - start_s
        folder.mkdir(parents=True, exist_ok=True)
        self._file = part_of(folder, rank).open("w", encoding="utf-8")
        self._file.write("[\n")
        self._broken = False
        # From 1 on: viewers take process 0 for the machine's idle one. Some viewers want thread
        # numbers that no two processes share.
        self._process = rank + 1
        self._threads = {lane: self._process * len(LANES) + at for at, lane in enumerate(LANES)}
        where = {"name": f"rank {rank} on {os.uname().nodename}"}
        self._write([self._about("process_name", 0, where)])
        self._write([self._about("process_sort_index", 0, {"sort_index": rank})])
        for index, (lane, thread) in enumerate(self._threads.items()):
            self._write([self._about("thread_name", thread, {"name": lane})])
            self._write([self._about("thread_sort_index", thread, {"sort_index": index})])

    def __call__(self, step: int, kind: str, spans: Sequence[Span]) -> None:
        """Take in the spans of a step; see `engine.step.Watcher`."""
        self._write([self._event(span, kind) for span in spans])

    def _event(self, span: Span, kind: str) -> dict[str, Any]:
        return {
            "name": f"{span.name} {span.step}",
            "cat": span.name,
            "ph": "X",
            "ts": round(1e6 * (span.start + self._before_s), 3),
            "dur": round(1e6 * (span.end - span.start), 3),
            "pid": self._process,
            "tid": self._threads[span.lane],
            "args": {"step": span.step, "kind": kind},
            # chrome://tracing's red
            **({"cname": "terrible"} if span.name == WAIT else {}),
        }

    def _about(self, name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": self._process, "tid": thread, "args": args}

    def _write(self, events: Sequence[dict[str, Any]]) -> None:
        if self._broken:
            return
        try:
            self._file.writelines(json.dumps(e, separators=(",", ":")) + ",\n" for e in events)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._broken = True
        logger.warning("the trace of this rank ends here: %s", error)

    def close(self) -> None:
        """End the part; safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            self._stop(error)


# -----------------------------------------------------------------------------
# The whole: one file with all ranks' stages on one clock, for Perfetto or Chrome.
#
# Each rank writes a part beside its steps; rank 0 joins the parts when all have ended. After an
# error no rank waits for another one that may have failed: the parts stay, and can be opened.

LARGE_BYTES = 64 << 20
"""Parts of more bytes than this become `trace.json.gz`."""


@contextmanager
def tracing(
    world: World,
    folder: Path,
    watch: Callable[[Watcher], None],
    asked: tuple[str, str] = ("trainer.trace=true", "run.dir"),
) -> Iterator[None]:
    """Trace the steps that `watch` tells of meanwhile into `folder`; entered and left by all ranks.

    Leaves `trace.json` (or `trace.json.gz`); after an error on one of several ranks the parts.
    `asked`: what a user gave for a trace, and for its folder. Raises ConfigError where a part
    cannot be written.
    """
    parts: list[TracePart] = []

    def begin() -> None:
        try:
            parts.append(TracePart(folder, world.rank, start_s))
        except OSError as error:
            raise ConfigError(
                f"{asked[0]} cannot write into {folder} ({error.strerror}): name another "
                f"{asked[1]}, or leave the trace out"
            ) from error

    def prepared() -> float:
        remove_trace(folder)  # a part that a trace before left would be taken for one of this
        return time.time()

    start_s = run_on_rank0(world, prepared)
    try:
        run_on_all_ranks(world, begin)
    except BaseException:
        for part in parts:
            part.close()
        raise
    (part,) = parts
    watch(part)
    try:
        yield
    except BaseException:
        part.close()
        if world.size == 1:  # nobody else may still write
            collect(folder, 1)
        raise
    run_on_all_ranks(world, part.close)
    if world.is_first:
        collect(folder, world.size)


def collect(folder: Path, size: int) -> None:
    """Join the events of `size` ranks' parts in `folder` as one JSON array, which is whole or not
    there, and remove them, or leave them where it cannot be written; rank 0 alone."""
    parts, separator = [part_of(folder, rank) for rank in range(size)], "[\n"
    try:
        packed = sum(part.stat().st_size for part in parts) > LARGE_BYTES
        path = folder / ("trace.json.gz" if packed else "trace.json")
        partial = path.with_name(path.name + ".partial")
        with gzip.open(partial, "wt", 3) if packed else partial.open("w", encoding="utf-8") as file:
            with fileinput.input(parts, encoding="utf-8") as lines:
                for line in lines:
                    if line.endswith(",\n"):  # else it is the bracket, or was being written
                        file.write(separator + line[:-2])
                        separator = ",\n"
            file.write("\n]\n")
        partial.replace(path)
        for part in parts:
            part.unlink()
    except OSError as error:
        logger.warning("the trace is not joined, its parts stay in %s: %s", folder, error)
        return
    told = "trace of %d rank(s): %s (%.1f MiB), for ui.perfetto.dev"
    logger.info(told, len(parts), path, path.stat().st_size / 2**20)
