"""One rank's part of a trace: its stages as lines of trace events, written as they come.

The format is Chrome's trace events (a process per rank, a thread per lane), which ui.perfetto.dev
and chrome://tracing read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distcache.comm.shared_clock import SharedClock
from distcache.pipeline.clock import WAIT, Span

logger = logging.getLogger(__name__)

LANES = ("training", "movement", "planner")
"""Lanes in the order in which they are shown."""

_MOST_LANES = 10


def open_path(folder: Path, rank: int) -> Path:
    """The part of a rank that still writes it."""
    return folder / f"trace.rank{rank}.open"


def done_path(folder: Path, rank: int) -> Path:
    """The part of a rank that has ended."""
    return folder / f"trace.rank{rank}.done"


def remove_trace(folder: Path) -> None:
    """Remove the trace, and the parts of one, that a run before left in `folder`."""
    patterns = ("trace.json", "trace.json.gz", "trace.rank*.open", "trace.rank*.done")
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)


class TracePart:
    """A watcher that appends every span of this rank to a file; memory does not grow with them.

    A file that cannot be written any more ends the trace, with a warning, not the run.
    """

    def __init__(self, folder: Path, rank: int, clock: SharedClock) -> None:
        """Begin the part in `folder`. Raises OSError where that is not possible."""
        self.folder, self.rank, self.clock = folder, rank, clock
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_path(folder, rank).open("w", encoding="utf-8")
        self._lanes: dict[str, int] = {}
        self._broken = False
        # From 1 on: viewers take process 0 for the machine's idle one.
        self._process = rank + 1
        where = {"name": f"rank {rank} on {os.uname().nodename}"}
        self._write([self._about("process_name", 0, where)])
        self._write([self._about("process_sort_index", 0, {"sort_index": rank})])

    def __call__(self, step: int, kind: str, spans: Sequence[Span]) -> None:
        """Take in the spans of a step; see `pipeline.clock.Watcher`."""
        self._write([line for span in spans for line in self._lines(span, kind)])

    def _lines(self, span: Span, kind: str) -> Iterator[dict[str, Any]]:
        if span.lane not in self._lanes:
            yield from self._new_lane(span.lane)
        event = {
            "name": f"{span.name} {span.step}",
            "cat": span.name,
            "ph": "X",
            "ts": round(1e6 * self.clock.since_start(span.start), 3),
            "dur": round(1e6 * span.seconds, 3),
            "pid": self._process,
            "tid": self._lanes[span.lane],
            "args": {"step": span.step, "kind": kind},
        }
        if span.name == WAIT:
            event["cname"] = "terrible"  # chrome://tracing's red
        yield event

    def _new_lane(self, lane: str) -> Iterator[dict[str, Any]]:
        others = len(LANES) + sum(name not in LANES for name in self._lanes)
        index = LANES.index(lane) if lane in LANES else others
        # Some viewers want thread numbers that no two processes share.
        thread = self._lanes[lane] = self._process * _MOST_LANES + index
        yield self._about("thread_name", thread, {"name": lane})
        yield self._about("thread_sort_index", thread, {"sort_index": index})

    def _about(self, name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": self._process, "tid": thread, "args": args}

    def _write(self, events: Sequence[dict[str, Any]]) -> None:
        if self._broken:
            return
        try:
            self._file.writelines(json.dumps(e, separators=(",", ":")) + "\n" for e in events)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._broken = True
        logger.warning("the trace of this rank ends here: %s", error)

    def close(self) -> None:
        """End the part: rank 0 may take it now; safe to call twice."""
        try:
            self._file.close()
        except OSError as error:
            self._stop(error)
        # Gone where rank 0 did not wait for it any longer.
        with contextlib.suppress(FileNotFoundError):
            open_path(self.folder, self.rank).replace(done_path(self.folder, self.rank))
