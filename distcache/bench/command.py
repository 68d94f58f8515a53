"""The command line of a bench that runs in one process; most take no Hydra overrides."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distcache.bench.options import parse, split_arguments, usage
from distcache.bench.report import (
    Record,
    Report,
    Table,
    check_out,
    header,
    to_markdown,
    write_report,
)
from distcache.cli.run import set_up_logging
from distcache.errors import ConfigError, DistcacheError


@dataclass(frozen=True)
class Bench:
    """A bench: `options` is the dataclass of its keys, with `out` among them; `measure` takes one
    and gives the records of which `tables` makes the report; with `overrides` it takes the Hydra
    overrides too."""

    title: str
    module: str
    purpose: str
    options: type
    measure: Callable[..., list[Record]]
    tables: Callable[[Sequence[Record]], list[Table]]
    log_level: str = "INFO"
    overrides: bool = False


def run_bench(bench: Bench, arguments: Sequence[str] | None = None) -> int:
    """Run it with `arguments` (None: the process's own), print and write the report; exit code."""
    given = tuple(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(bench.log_level)
    if "--help" in given or "-h" in given:
        sys.stdout.write(usage(bench.options, bench.module, bench.purpose))
        return 0
    try:
        line = split_arguments(given)
        if line.overrides and not bench.overrides:
            raise ConfigError(f"{line.overrides[0]}: no such key, --help shows them")
        options: Any = parse(bench.options, line.given)
        out = check_out(options.out)
        settings = asdict(options)
        head = header(bench.module, given, settings, 1)
        more = [line.overrides] if bench.overrides else []
        records = bench.measure(options, *more)
        report = Report(bench.title, bench.module, given, settings, records, bench.tables)
        sys.stdout.write(to_markdown(report, head))
        if out is not None:
            write_report(report, head, out)
    except DistcacheError as error:
        logging.getLogger(bench.module).error("%s", error)
        return 1
    return 0
