"""A bench from its command line to its report: records as JSON lines, and Markdown made of them.

The tables of a report are specifications: which records are rows, and (title, getter, format) of
each column. Both files begin with the machine, the versions, the commit and the command.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.options import parse, show, usage
from distcache.cli.run import Table, describe_environment, markdown_table, set_up_logging
from distcache.comm.rendezvous import find_place
from distcache.errors import ConfigError, DistcacheError

Record = dict[str, Any]

_PLACES = ("out", "folder", "against")
"""Options that name places on this machine."""


class Column(NamedTuple):
    """A column. `get`: a key of the row, or a function of it; `show`: a format such as `,.2f`, or
    a function of the value. A value of None is shown as `-`."""

    title: str
    get: str | Callable[[Any], Any]
    show: str | Callable[[Any], str] = ""

    def cell(self, row: Any) -> str:
        """The text of this column in a row."""
        value = self.get(row) if callable(self.get) else row.get(self.get)
        if value is None:
            return "-"
        return self.show(value) if callable(self.show) else format(value, self.show)


@dataclass(frozen=True)
class Section:
    """The specification of a table. `rows`: the kind of record that makes a row, or what makes the
    rows of all records; `columns`: theirs, or what makes them of all records."""

    title: str
    note: str
    rows: str | Callable[[Sequence[Record]], Sequence[Any]]
    columns: Sequence[Column] | Callable[[Sequence[Record]], Sequence[Column]]

    def table(self, records: Sequence[Record]) -> Table:
        """The table of these records."""
        rows = self.rows(records) if callable(self.rows) else of_kind(records, self.rows)
        columns = self.columns(records) if callable(self.columns) else self.columns
        cells = [tuple(column.cell(row) for column in columns) for row in rows]
        return Table(self.title, self.note, tuple(column.title for column in columns), cells)


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]


def pivoted(
    text: tuple[str, str],
    kind: str,
    values: Callable[[Record], Mapping[str, Any]],
    columns: tuple[str, Callable[[Record], str]],
    show: str | Callable[[Any], str] = ".2f",
) -> Section:
    """A section with a row for each name in the records' values, and a column for each record.

    `text`: title and note; `values`: of a record of this kind, by name; those without any have no
    column. `columns`: the title of the names' column, and a record's title.
    """
    what, label = columns

    def found(records: Sequence[Record]) -> list[Record]:
        return [record for record in of_kind(records, kind) if values(record)]

    def column(record: Record) -> Column:
        return Column(label(record), lambda name: values(record).get(name), show)

    return Section(
        *text,
        lambda records: list(dict.fromkeys(name for r in found(records) for name in values(r))),
        lambda records: [Column(what, str), *map(column, found(records))],
    )


def tables_of(sections: Sequence[Section], records: Sequence[Record]) -> list[Table]:
    """The tables that have rows."""
    return [table for table in (s.table(records) for s in sections) if table.rows]


@dataclass(frozen=True)
class Bench:
    """A bench. `options`: the dataclass of its keys, with `out` among them; `measure`: from options
    and Hydra overrides (none unless `overrides`) to records, called on every rank."""

    title: str
    options: type
    measure: Callable[[Any, tuple[str, ...]], list[Record]]
    sections: Sequence[Section]
    overrides: bool = False

    def about(self) -> tuple[str, str]:
        """The name of the bench's module, also where that is `__main__`, and what it says."""
        module: Any = getattr(self.measure, "__globals__")  # noqa: B009
        return module["__spec__"].name, module["__doc__"]


def run_bench(bench: Bench, arguments: Sequence[str] | None = None) -> int:
    """Run it with `arguments` (None: the process's own); rank 0 prints and writes the report.

    Returns the exit code: 1 for an error that says what to change, 130 after Ctrl-C.
    """
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    place = find_place()
    set_up_logging("INFO", place.rank, place.world_size)
    module, purpose = bench.about()
    log = logging.getLogger(f"distcache.{module}")
    if "--help" in given or "-h" in given:
        sys.stdout.write(usage(bench.options, module, purpose))
        return 0
    threads = torch.get_num_threads()
    try:
        options: Any
        options, overrides = parse(bench.options, given)
        if overrides and not bench.overrides:
            raise ConfigError(f"{overrides[0]}: no such key, --help shows them")
        if options.out and not options.out.endswith(".md"):
            raise ConfigError(f"out={options.out} must end in .md: the JSON lines go beside it")
        head = header(module, given, asdict(options), place.world_size)
        torch.set_num_threads(getattr(options, "threads", 0) or threads)
        records = bench.measure(options, overrides)
        if place.rank == 0:
            sys.stdout.write(to_markdown(bench, head, records))
            if options.out:
                write_report(bench, head, records, Path(options.out))
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    except KeyboardInterrupt:
        log.error("interrupted")
        return 130
    finally:
        torch.set_num_threads(threads)
    return 0


def header(module: str, arguments: Sequence[str], settings: Record, world: int) -> Record:
    """The first record: machine, versions, commit, command, load and settings.

    Taken before the bench changes threads or affinity. Where files lie (`out`, `folder`, ...) says
    nothing elsewhere and is left out, as are the interpreter's and the checkout's paths.
    """
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(world)]
    here = tuple(f"{key}=" for key in _PLACES)
    return {
        "kind": "environment",
        **describe_environment(world),
        "command": [
            *(launcher if world > 1 else ["python"]),
            *("-m", module),
            *(word for word in arguments if not word.startswith(here)),
        ],
        "load_average": list(os.getloadavg()),
        "settings": {key: value for key, value in settings.items() if key not in _PLACES},
    }


def to_markdown(bench: Bench, head: Record, records: Sequence[Record]) -> str:
    """The whole report as Markdown."""
    parts = [f"# {bench.title}", markdown_table(machine_table(head))]
    for table in tables_of(bench.sections, records):
        parts.append(f"## {table.title}\n\n{table.note}\n\n{markdown_table(table)}")
    return "\n\n".join(parts) + "\n"


def machine_table(head: Record) -> Table:
    """Hardware, versions, commit and command."""
    hardware, commit = head["hardware"], head["commit"]
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB" for gpu in hardware["gpus"]]
    memory = hardware["memory_bytes"]
    versions = [f"{name} {v}" for name, v in head["versions"].items() if v is not None]
    state = "unknown"
    if commit is not None:
        state = commit["commit"] + (" with changes" if commit["dirty"] else "")
    rows = [
        ("CPU", f"{hardware['cpu']}, {hardware['cores']} cores, {head['threads']} torch threads"),
        ("memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"),
        ("GPU", "; ".join(gpus) or "none"),
        ("system", head["system"]),
        ("versions", ", ".join(versions)),
        ("commit", state),
        ("load before", ", ".join(f"{load:.2f}" for load in head["load_average"])),
        ("command", f"`{' '.join(head['command'])}`"),
        ("settings", ", ".join(f"{key}={show(value)}" for key, value in head["settings"].items())),
    ]
    return Table("", "", ("machine", "and run"), rows)


def write_report(bench: Bench, head: Record, records: Sequence[Record], out: Path) -> None:
    """Write `out` (a `.md` file) and the JSON lines beside it; ConfigError where it cannot be."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in [head, *records])
        )
        out.write_text(to_markdown(bench, head, records))
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror})") from error
