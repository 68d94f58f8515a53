"""Command lines, statistics and reports that all benchmarks share.

A benchmark is a dataclass of options, a function from options to records, and sections that make
tables from records. `run_bench` prints a Markdown report. With `out=` it writes the report, and the
records as JSON lines beside it. Both begin with machine, versions, commit and command.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from distcache.cli.run import (
    Table,
    describe_environment,
    machine_text,
    markdown_table,
    set_up_logging,
)
from distcache.comm.rendezvous import find_place
from distcache.errors import ConfigError, DistcacheError

Record = dict[str, Any]
Spread = dict[str, float | int | None]
OptionsT = TypeVar("OptionsT")
Name = TypeVar("Name")
Result = TypeVar("Result")

# Options that name places on this machine; a report leaves them out.
PLACES = ("out", "folder", "against")

# -----------------------------------------------------------------------------
# Command lines: `key=value`, checked against a dataclass.


def option(
    default: Any, help: str, minimum: float | None = None, choices: Sequence[str] = ()
) -> Any:
    """Declare a dataclass field with the type of `default` and a sentence for `--help`.

    `minimum` is the smallest permitted number. `choices` are the permitted values; a list may name
    each of them once.
    """
    metadata = {"help": help, "minimum": minimum, "choices": choices}
    return field(default=default, metadata=metadata)


def parse(cls: type[OptionsT], arguments: Sequence[str]) -> tuple[OptionsT, tuple[str, ...]]:
    """Return an instance of `cls` and the arguments that are Hydra overrides.

    An override is an argument with a dot in its key (`cache.lookahead=4`). An option with a tuple
    as its default takes a comma-separated list. Raises ConfigError that names the key.
    """
    declared: dict[str, Field] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    overrides: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r} is not key=value: --help shows the keys")
        if "." in key:
            overrides.append(argument)
            continue
        if key not in declared:
            close = difflib.get_close_matches(key, declared, n=2)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else f"keys: {', '.join(declared)}"
            )
            raise ConfigError(f"{argument}: no such key: {hint}")
        values[key] = _parse_option(declared[key], text)
    return cls(**values), tuple(overrides)


def _parse_option(declared: Field, text: str) -> Any:
    """Return the value of an option; raise ConfigError if its type or limits forbid it."""
    name = declared.name
    minimum = declared.metadata["minimum"]
    choices = declared.metadata["choices"]
    is_list = isinstance(declared.default, tuple)
    texts = [part.strip() for part in text.split(",") if part.strip()] if is_list else [text]
    if not texts:
        raise ConfigError(f"{name}={text}: give at least one value, separated by commas")
    default = declared.default[0] if is_list else declared.default
    items = [_parse_value(name, item, default) for item in texts]
    if minimum is not None and min(items) < minimum:
        raise ConfigError(f"{name}={min(items)} must be at least {minimum}")
    if choices and not set(items) <= set(choices):
        raise ConfigError(f"{name}={text}: choose from {', '.join(choices)}")
    if choices and len(set(items)) < len(items):
        raise ConfigError(f"{name}={text} names one value twice")
    return tuple(items) if is_list else items[0]


def _parse_value(key: str, text: str, default: Any) -> Any:
    """Return one value of the type of `default`."""
    try:
        return type(default)(text)
    except ValueError as error:
        kind = type(default).__name__
        raise ConfigError(f"{key}={text} is not a value of type {kind}") from error


def usage(cls: type, module: str, purpose: str) -> str:
    """Return the text of `--help`."""
    lines = [f"python -m {module} [key=value ...]", "", purpose, ""]
    for f in fields(cls):
        choices = f.metadata["choices"]
        names = f" (of {', '.join(choices)})" if choices else ""
        lines.append(f"  {f.name + '=' + show_value(f.default):34} {f.metadata['help']}{names}")
    return "\n".join(lines) + "\n"


def show_value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(show_value, value))
    return str(value)


# -----------------------------------------------------------------------------
# Statistics of contenders that take turns.


def take_turns(
    contenders: Mapping[Name, Callable[[int], Result]],
    repetitions: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[Name, list[Result]]:
    """Call each contender with every repetition's number and return the results of each.

    `prepare` is called before each repetition.
    """
    names = list(contenders)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for repetition in range(repetitions):
        prepare()
        # The order rotates, so that no contender always follows the same other one.
        start = repetition % max(len(names), 1)
        for name in [*names[start:], *names[:start]]:
            results[name].append(contenders[name](repetition))
    return results


def spread(values: Sequence[float]) -> Spread:
    """Return minimum, quartiles, median, maximum and count; None for each of no values."""
    names = ("min", "q1", "median", "q3", "max")
    if not len(values):
        return {**dict.fromkeys(names), "count": 0}
    cuts = np.percentile(np.asarray(values, dtype=np.float64), [0, 25, 50, 75, 100])
    return {**dict(zip(names, cuts.tolist(), strict=True)), "count": len(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return one ratio per repetition."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def ratio_record(
    numerator: str, denominator: str, values: Mapping[str, Sequence[float]], **more: Any
) -> Record:
    """Return the record of two contenders' ratio, from the `values` of each by repetition."""
    quotients = ratios(values[numerator], values[denominator])
    record: Record = {"kind": "ratio", "numerator": numerator, "denominator": denominator}
    return {**record, **more, "repetitions": quotients, "ratio": spread(quotients)}


def medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key over the mappings that have it."""
    names = dict.fromkeys(name for value in values for name in value)
    return {name: float(np.median([v[name] for v in values if name in v])) for name in names}


def show_spread(digits: int = 2, scale: float = 1.0) -> Callable[[Spread], str]:
    """Return a formatter of spreads: `median [q1, q3]`, each times `scale`."""

    def show(values: Spread) -> str:
        if values["median"] is None:
            return "-"
        cuts = (scale * float(values[name] or 0.0) for name in ("median", "q1", "q3"))
        median, low, high = (f"{cut:,.{digits}f}" for cut in cuts)
        return f"{median} [{low}, {high}]"

    return show


def show_range(digits: int = 2) -> Callable[[Spread], str]:
    """Return a formatter of spreads: `minimum to maximum`."""
    return lambda values: f"{values['min']:,.{digits}f} to {values['max']:,.{digits}f}"


# -----------------------------------------------------------------------------
# Tables.


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        get: a key of the row's record, or a function of the record. None is shown as `-`.
        show: a format such as `,.2f`, or a function of the value.
    """

    title: str
    get: str | Callable[[Any], Any]
    show: str | Callable[[Any], str] = ""

    def cell(self, row: Any) -> str:
        """Return the text of this column in a row."""
        value = self.get(row) if callable(self.get) else row.get(self.get)
        if value is None:
            return "-"
        return self.show(value) if callable(self.show) else format(value, self.show)


@dataclass(frozen=True)
class Section:
    """The specification of a table.

    Attributes:
        rows: the kind of record that makes a row, or a function from all records to rows.
        columns: the columns, or a function from all records to them.
    """

    title: str
    note: str
    rows: str | Callable[[Sequence[Record]], Sequence[Any]]
    columns: Sequence[Column] | Callable[[Sequence[Record]], Sequence[Column]]

    def table(self, records: Sequence[Record]) -> Table:
        """Return the table of these records."""
        rows = self.rows(records) if callable(self.rows) else of_kind(records, self.rows)
        columns = self.columns(records) if callable(self.columns) else self.columns
        cells = [tuple(column.cell(row) for column in columns) for row in rows]
        return Table(self.title, self.note, tuple(column.title for column in columns), cells)


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]


def pivot(
    title: str,
    note: str,
    values: Callable[[Record], Mapping[str, Any]],
    name_title: str,
    show: str | Callable[[Any], str] = ".2f",
) -> Section:
    """Return a section with a column for each record of kind `mode` and a row for each name.

    `values` returns one record's values by name; a record without values gets no column.
    `name_title` is the title of the column of names.
    """

    def records_with_values(records: Sequence[Record]) -> list[Record]:
        return [record for record in of_kind(records, "mode") if values(record)]

    def rows(records: Sequence[Record]) -> list[str]:
        selected = records_with_values(records)
        return list(dict.fromkeys(name for record in selected for name in values(record)))

    def columns(records: Sequence[Record]) -> list[Column]:
        named = [
            Column(record["mode"], lambda name, r=record: values(r).get(name), show)
            for record in records_with_values(records)
        ]
        return [Column(name_title, str), *named]

    return Section(title, note, rows, columns)


RATIO_COLUMNS = (
    Column("pair", lambda record: f"{record['numerator']} / {record['denominator']}"),
    Column("ratio", "ratio", show_spread(3)),
    Column("range", "ratio", show_range(3)),
)
RATIOS = Section(
    "Ratios",
    "Of the median steps of two turns over the same batches: median [quartiles] over the "
    "repetitions, and the range.",
    "ratio",
    RATIO_COLUMNS,
)


def tables_of(sections: Sequence[Section], records: Sequence[Record]) -> list[Table]:
    """Return the tables that have rows."""
    tables = [section.table(records) for section in sections]
    return [table for table in tables if table.rows]


# -----------------------------------------------------------------------------
# Runs.


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        options: the dataclass of its keys, which include `out`.
        measure: the function from options and Hydra overrides to records; all ranks call it.
        takes_overrides: True if it accepts Hydra overrides.
    """

    title: str
    options: type
    measure: Callable[[Any, tuple[str, ...]], list[Record]]
    sections: Sequence[Section]
    takes_overrides: bool = False

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the benchmark; see `run_bench`."""
        return run_bench(self, arguments)

    def describe(self) -> tuple[str, str]:
        """Return name and docstring of the benchmark's module, which may run as `__main__`."""
        module: Any = getattr(self.measure, "__globals__")  # noqa: B009
        return module["__spec__"].name, module["__doc__"]


def run_bench(bench: Bench, arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark with `arguments` (None: of the process); rank 0 prints and writes the report.

    Return the exit code: 1 for an error that names its remedy, 130 after Ctrl-C.
    """
    words = tuple(sys.argv[1:] if arguments is None else arguments)
    place = find_place()
    set_up_logging("INFO", place.rank, place.world_size)
    module, purpose = bench.describe()
    log = logging.getLogger(f"distcache.{module}")
    if "--help" in words or "-h" in words:
        sys.stdout.write(usage(bench.options, module, purpose))
        return 0
    threads = torch.get_num_threads()
    try:
        options: Any
        options, overrides = parse(bench.options, words)
        if overrides and not bench.takes_overrides:
            raise ConfigError(f"{overrides[0]}: no such key, --help shows the keys")
        if options.out and not options.out.endswith(".md"):
            raise ConfigError(f"out={options.out} must end in .md: the JSON lines go beside it")
        # The header is taken before the benchmark changes threads.
        head = header(module, words, asdict(options), place.world_size)
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


def header(module: str, arguments: Sequence[str], settings: Record, world_size: int) -> Record:
    """Return the first record: machine, versions, commit, command, load and settings."""
    launcher = ["python"]
    if world_size > 1:
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(world_size)]
    prefixes = tuple(f"{key}=" for key in PLACES)
    words = [word for word in arguments if not word.startswith(prefixes)]
    return {
        "kind": "environment",
        **describe_environment(world_size),
        "command": [*launcher, "-m", module, *words],
        "load_average": list(os.getloadavg()),
        "settings": {key: value for key, value in settings.items() if key not in PLACES},
    }


def to_markdown(bench: Bench, head: Record, records: Sequence[Record]) -> str:
    """Return the whole report as Markdown."""
    settings = ", ".join(f"{key}={show_value(value)}" for key, value in head["settings"].items())
    load = ", ".join(f"{load:.2f}" for load in head["load_average"])
    command = f"`{' '.join(head['command'])}`"
    parts = [f"# {bench.title}", command, f"{machine_text(head)} Load before: {load}."]
    parts.append(f"Settings: {settings}.")
    for table in tables_of(bench.sections, records):
        parts.append(f"## {table.title}\n\n{table.note}\n\n{markdown_table(table)}")
    return "\n\n".join(parts) + "\n"


def write_report(bench: Bench, head: Record, records: Sequence[Record], out: Path) -> None:
    """Write `out` (a `.md` file) and the JSON lines beside it; raise ConfigError on failure."""
    lines = "".join(json.dumps(record) + "\n" for record in [head, *records])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".jsonl").write_text(lines)
        out.write_text(to_markdown(bench, head, records))
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror})") from error
