"""The state of one preprocessing job: what it is of, and what has been parsed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from distcache.data.files import InputFile
from distcache.data.raw.part import SHOWN, PartReport
from distcache.data.raw.pool import Pool
from distcache.data.raw.settings import PreprocessSettings
from distcache.errors import DataError


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


def bad_line(work: Work, key: tuple[int, int], report: PartReport) -> DataError:
    """The error of the first malformed line of a part, after all parts before it."""
    line, reason = report.bad[0]
    first = 1 + sum(part.lines for at, part in work.parts.items() if at[0] == key[0] and at < key)
    return DataError(
        f"{work.files[key[0]].path}:{first + line}: {reason}; correct the line, or leave such "
        "lines out with on_bad_line=skip"
    )


def skipped_lines(work: Work) -> dict[str, Any]:
    """How many malformed lines were left out, and the first ten: `file:line: reason`."""
    first, total, before = [], 0, {}
    for key in sorted(work.parts):
        report = work.parts[key]
        lines = before.get(key[0], 1)
        name = work.files[key[0]].path
        first += [f"{name}:{lines + line}: {reason}" for line, reason in report.bad]
        before[key[0]] = lines + report.lines
        total += report.bad_lines
    return {"count": total, "first": first[:SHOWN]}


def part_name(key: tuple[int, int]) -> str:
    """The folder name of part (file, part)."""
    return f"{key[0]:04d}-{key[1]:07d}"
