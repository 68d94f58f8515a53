"""One part of the text, parsed: arrays of its samples and counts of its ids, as raw files.

A part is complete when its folder has its final name; `report.json` in it says what it holds.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from distcache.data.criteo_text import CriteoRows, dense_of, id_dtype, parse_block
from distcache.data.files import InputFile
from distcache.data.raw.columns import parse_columns
from distcache.data.raw.part_files import PartWriter, write_runs
from distcache.data.raw.text import Block, read_range, whole_lines
from distcache.errors import DataError

BLOCK_BYTES = 4 << 20
"""Bytes of text that are parsed at once."""
SHOWN = 10
"""Malformed lines that a report quotes."""


@dataclass(frozen=True)
class PartTask:
    """Lines that begin in [start, stop) of `file`, to be parsed into `folder`/`name`.

    `table_rows`: rows that ids are hashed to, or None to keep values. `read_bytes`: of the input
    that this part stands for (compressed ones where the input is gzip).
    """

    name: str
    file: InputFile
    start: int
    stop: int
    folder: str
    table_rows: tuple[int, ...] | None
    skip_bad: bool
    read_bytes: int


@dataclass(frozen=True)
class PartReport:
    """What a part holds. `bad`: line (from 0 in the part) and reason of the first malformed ones.

    `lengths`: distinct ids of each table, `missing`: samples without an id of each table.
    A part with `complete` false was given up at its first malformed line.
    """

    name: str
    text_bytes: int
    lines: int
    samples: int
    bad_lines: int
    bad: list[tuple[int, str]]
    id_dtype: str
    lengths: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    complete: bool = True


def parse_part(task: PartTask) -> PartReport:
    """Parse a part into its folder. Raises DataError for a file that changed meanwhile."""
    parser = _Parser(task)
    partial = Path(task.folder, f"{task.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with PartWriter(partial, id_dtype(task.table_rows)) as part:
        for rows in parser.rows():
            part.add(rows)
    if parser.bad and not task.skip_bad:
        shutil.rmtree(partial)
        return parser.report(complete=False)
    lengths, missing = write_runs(partial, partial, part.samples, part.dtype)
    report = parser.report(
        samples=part.samples,
        id_dtype=part.dtype.str,
        lengths=lengths,
        missing=missing,
    )
    (partial / "report.json").write_text(json.dumps(asdict(report)))
    partial.rename(Path(task.folder, task.name))
    return report


def read_report(folder: Path) -> PartReport | None:
    """The report of a complete part; None where there is none."""
    try:
        return PartReport(**json.loads((folder / "report.json").read_text()))
    except FileNotFoundError:
        return None


class _Parser:
    """Parses a part block by block, and notes malformed lines."""

    def __init__(self, task: PartTask) -> None:
        self.task = task
        rows = task.table_rows
        self.table_rows = None if rows is None else np.array(rows, dtype=np.int64)
        self.text_bytes = self.lines = self.bad_lines = 0
        self.bad: list[tuple[int, str]] = []

    def rows(self) -> Iterator[CriteoRows]:
        """Rows of each block, `integers` as dense features; ends at the first malformed line
        unless they are skipped."""
        task = self.task
        chunks = read_range(task.file, task.start, task.stop, BLOCK_BYTES)
        for block in whole_lines(chunks):
            self.text_bytes += len(block.text)
            rows = None if block.too_long else parse_columns(block.text, self.table_rows)
            if rows is None:
                rows, lines = self._exactly(block)
                self.lines += lines
            else:
                self.lines += len(rows.labels)
            if self.bad and not task.skip_bad:
                return
            yield rows

    def _exactly(self, block: Block) -> tuple[CriteoRows, int]:
        """The rows of a block that has something odd in it, and its number of lines."""

        def on_error(line: int, error: DataError) -> None:
            if len(self.bad) < SHOWN:
                self.bad.append((self.lines + line, str(block.explain(line, error))))
            self.bad_lines += 1

        rows, lines = parse_block(block.text, self.table_rows, on_error)
        return CriteoRows(rows.labels, dense_of(rows.integers), rows.ids, rows.missing), lines

    def report(
        self,
        samples: int = 0,
        id_dtype: str = "",
        lengths: list[int] | None = None,
        missing: list[int] | None = None,
        complete: bool = True,
    ) -> PartReport:
        """The report of what was parsed."""
        return PartReport(
            name=self.task.name,
            text_bytes=self.text_bytes,
            lines=self.lines,
            samples=samples,
            bad_lines=self.bad_lines,
            bad=self.bad,
            id_dtype=id_dtype,
            lengths=lengths or [],
            missing=missing or [],
            complete=complete,
        )
