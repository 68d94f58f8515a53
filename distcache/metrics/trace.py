"""`trainer.trace=true`: one file with all ranks' stages on one clock, for Perfetto or Chrome.

Each rank writes a part beside its steps; rank 0 joins the parts at the end of the run, whatever
ended it, and removes them. No rank waits for another one that may have failed: parts are renamed
when they are whole, and rank 0 takes the others as they are after a few seconds.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from distcache.comm.agree import together
from distcache.comm.shared_clock import SharedClock, share_clock
from distcache.comm.world import World
from distcache.errors import ConfigError
from distcache.metrics.trace_part import TracePart, done_path, open_path
from distcache.parallel.base import Parallel

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
"""Parts of more bytes than this become `trace.json.gz`."""

_END_S = 60.0
"""Longest wait for the parts of other ranks after an orderly end, seconds."""

_FAILED_S = 5.0
"""The same after an error: others may have gone without a word."""

_POLL_S = 0.05


@contextmanager
def tracing(world: World, folder: Path, mode: Parallel) -> Iterator[None]:
    """Trace what `mode` does meanwhile into `folder`; entered by all ranks.

    Leaves `trace.json` (or `trace.json.gz`), also after an error or a Ctrl-C. Raises ConfigError
    where a part cannot be written.
    """
    clock = share_clock(world)
    part = _begin(world, folder, clock)
    clocks = together(world, lambda: clock)
    mode.watch(part)
    patience = _FAILED_S
    try:
        yield
        patience = _END_S
    finally:
        part.close()
        if world.is_first:
            collect(folder, world.size, about(clocks), patience)
        elif patience == _FAILED_S:
            # Rank 0 may be on its way: torchrun ends it soon after this rank is gone.
            _until(lambda: not done_path(folder, world.rank).exists(), patience)


def _begin(world: World, folder: Path, clock: SharedClock) -> TracePart:
    """This rank's part; called by all ranks. Raises ConfigError."""
    parts: list[TracePart] = []

    def open_part() -> None:
        try:
            parts.append(TracePart(folder, world.rank, clock))
        except OSError as error:
            raise ConfigError(
                f"trainer.trace=true cannot write into {folder} ({error.strerror}): name another "
                "run.dir, or leave the trace out"
            ) from error

    together(world, open_part)
    return parts[0]


def about(clocks: Sequence[SharedClock]) -> dict[str, Any]:
    """What the file says of itself: whose clock it is on, and how well each rank knows it."""
    asked = {
        f"rank {rank}": {"offset_s": clock.offset_s, "error_s": clock.error_s}
        for rank, clock in enumerate(clocks)
        if clock.error_s > 0
    }
    for rank, values in asked.items():
        logger.info(
            "trace: %s is on another machine, its clock %+.6f s from rank 0's, known to %.6f s",
            rank,
            -values["offset_s"],
            values["error_s"],
        )
    return {
        "clock": "rank 0's time.perf_counter, from the start of the trace; host time of stages",
        "clocks_asked_over_the_network": asked,
        "steps": "batches of the stream, evaluation included, from 0 in each process",
    }


def collect(folder: Path, size: int, header: dict[str, Any], patience_s: float) -> Path | None:
    """Join the parts of `size` ranks in `folder` into the trace, and remove them; rank 0 alone.

    Waits up to `patience_s` for parts that are still written, then takes what there is. None, and
    the parts stay, where the file cannot be written.
    """
    _until(lambda: all(done_path(folder, rank).exists() for rank in range(size)), patience_s)
    parts: list[Path] = []
    for rank in range(size):
        found = [path(folder, rank) for path in (done_path, open_path)]
        existing = [path for path in found if path.exists()]
        parts += existing[:1]
        if not existing:
            logger.warning("the trace lacks rank %d, which left no part in %s", rank, folder)
        elif existing[0] != found[0]:
            logger.warning("the trace of rank %d is not whole: it did not end in order", rank)
    try:
        size_bytes = sum(part.stat().st_size for part in parts)
        path = folder / ("trace.json.gz" if size_bytes > LARGE_BYTES else "trace.json")
        join(parts, path, header)
        for part in parts:
            part.unlink()
    except OSError as error:
        logger.warning("the trace is not joined, its parts stay in %s: %s", folder, error)
        return None
    shown = f"{path.stat().st_size / 2**20:.1f} MiB"
    logger.info("trace of %d rank(s): %s (%s), for ui.perfetto.dev", len(parts), path, shown)
    return path


def join(parts: Sequence[Path], path: Path, header: dict[str, Any]) -> None:
    """Write the events of `parts` as one JSON object, so that `path` is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    with _opened(partial, packed=path.suffix == ".gz") as file:
        opening = {"displayTimeUnit": "ms", "otherData": header}
        file.write(json.dumps(opening)[:-1] + ', "traceEvents": [')
        separator = "\n"
        for part in parts:
            for line in _whole_lines(part):
                file.write(separator + line)
                separator = ",\n"
        file.write("\n]}\n")
    partial.replace(path)


def _opened(path: Path, packed: bool) -> IO[str]:
    if packed:
        return gzip.open(path, "wt", compresslevel=3, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _whole_lines(part: Path) -> Iterator[str]:
    """The lines of a part without their ends; not one that was being written."""
    with part.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line[:-1]


def _until(reached: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not reached() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
