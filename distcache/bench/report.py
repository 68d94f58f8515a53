"""What a bench leaves: records as JSON lines, and a Markdown report whose tables are made of them.

Both begin with the machine, the versions, the commit and the command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcache.bench.options import show
from distcache.cli.run import describe_environment
from distcache.errors import ConfigError

Record = dict[str, Any]

_PLACES = ("out", "folder", "book", "interactions", "criteo")
"""Options that name places on this machine."""


@dataclass(frozen=True)
class Table:
    """A table of a report; cells are text, `note` says what the numbers mean."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Report:
    """One run of a bench. `settings`: every option; `tables` makes the tables from `records`."""

    title: str
    module: str
    arguments: tuple[str, ...]
    settings: dict[str, Any]
    records: list[Record]
    tables: Callable[[Sequence[Record]], list[Table]]


def header(module: str, arguments: Sequence[str], settings: dict[str, Any], world: int) -> Record:
    """The first record: machine, versions, commit, command, load and settings.

    Taken before the bench changes threads or affinity. Where files lie (`out`, `folder`, ...) says
    nothing elsewhere and is left out.
    """
    record = {"kind": "environment", **describe_environment(world)}
    # Without the interpreter's and the checkout's paths, which say nothing elsewhere.
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(world)]
    record["command"] = [*(launcher if world > 1 else ["python"]), "-m", module]
    record["command"] += [a for a in arguments if not a.startswith(tuple(f"{k}=" for k in _PLACES))]
    record["load_average"] = list(os.getloadavg())
    record["settings"] = {k: value for k, value in settings.items() if k not in _PLACES}
    return record


def to_lines(report: Report, head: Record) -> str:
    """The JSON lines: the header, then every record."""
    return "".join(json.dumps(record) + "\n" for record in [head, *report.records])


def to_markdown(report: Report, head: Record) -> str:
    """The whole report as Markdown."""
    parts = [f"# {report.title}", markdown_header(head)]
    for table in report.tables(report.records):
        parts.append(f"## {table.title}\n\n{table.note}\n\n{markdown_table(table)}")
    return "\n\n".join(parts) + "\n"


def markdown_header(head: Record) -> str:
    """Hardware, versions, commit and command as a table."""
    hardware, commit = head["hardware"], head["commit"]
    gpus = [f"{gpu['name']}, {_gib(gpu['memory_bytes'])}" for gpu in hardware["gpus"]]
    versions = [f"{name} {v}" for name, v in head["versions"].items() if v is not None]
    state = "unknown"
    if commit is not None:
        state = commit["commit"] + (" with changes" if commit["dirty"] else "")
    rows = [
        ("CPU", f"{hardware['cpu']}, {hardware['cores']} cores, {head['threads']} torch threads"),
        ("memory", _gib(hardware["memory_bytes"])),
        ("GPU", "; ".join(gpus) or "none"),
        ("system", head["system"]),
        ("versions", ", ".join(versions)),
        ("commit", state),
        ("load before", ", ".join(f"{load:.2f}" for load in head["load_average"])),
        ("command", f"`{' '.join(head['command'])}`"),
        ("settings", ", ".join(f"{key}={show(value)}" for key, value in head["settings"].items())),
    ]
    return markdown_table(Table("", "", ("machine", "and run"), rows))


def markdown_table(table: Table) -> str:
    """The rows of a table as Markdown; all columns but the first are aligned to the right."""
    marks = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [table.columns, tuple(marks), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(report: Report, head: Record, out: Path) -> tuple[Path, Path]:
    """Write `out` (a `.md` file) and the JSON lines beside it (`.jsonl`); both paths.

    Raises ConfigError where that is not possible.
    """
    lines = out.with_suffix(".jsonl")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines.write_text(to_lines(report, head))
        out.write_text(to_markdown(report, head))
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror})") from error
    return out, lines


def check_out(out: str) -> Path | None:
    """The path of `out=`, or None for an empty one; ConfigError unless it ends in `.md`."""
    if not out:
        return None
    if not out.endswith(".md"):
        raise ConfigError(f"out={out} must end in .md: the JSON lines go beside it")
    return Path(out)


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
