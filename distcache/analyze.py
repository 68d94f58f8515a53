"""Analyze: `python -m distcache.analyze data=... [data.path=...] [key=value ...]`.

1. The configuration is composed and checked, as for the run that is asked about.
2. The data is read once, ids alone, and its lookups are counted.
3. The run's first steps are replayed through its planner, at many cache sizes.
4. Report, pictures and statistics are written; the terminal gets a table and the advice.

With `simulate=true` policies, sizes, windows and ranks are replayed too, from the data or from a
file of ids (`trace=`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from distcache.cli.analyze_report import write_report, write_simulation
from distcache.cli.analyze_run import AnalyzeConfig, analyze, check_line, simulate_trace
from distcache.cli.compose import (
    Line,
    checked_config,
    compose_overrides,
    override,
    run_command,
)
from distcache.cli.run import open_folder
from distcache.comm.rendezvous import Place
from distcache.popularity.statistics import write_statistics

log = logging.getLogger("distcache.analyze")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code, 130 (143) where Ctrl-C (SIGTERM) ended the reading."""
    said = "interrupted before there was anything to report"
    return run_command("analyze", AnalyzeConfig, run, arguments, said)


def run(line: Line[AnalyzeConfig], command: Sequence[str]) -> int:
    """Find everything out, write and say it."""
    check_line(line)
    output = Path(line.values.output or f"runs/analyze-{datetime.now():%Y-%m-%d_%H-%M-%S}")
    open_folder(output, "output")
    text, stopped_by = _run(line, output, command)
    sys.stdout.write(f"\n{text}")
    sys.stdout.flush()
    log.info("the report is in %s", output)
    return 128 + stopped_by if stopped_by else 0


def _run(line: Line[AnalyzeConfig], output: Path, command: Sequence[str]) -> tuple[str, int | None]:
    """Find everything out and write it; the text for the terminal, and what cut it short."""
    wanted, overrides = line.values, line.overrides
    if wanted.trace:
        found = simulate_trace(wanted.trace, wanted.analyze)
        return write_simulation(found, output, command), None
    if not any(word.startswith("cache.statistics=") for word in overrides):
        # Where statistics are not given, they are those that are counted now.
        overrides = (*overrides, override("cache.statistics", output))
    config = checked_config(compose_overrides(overrides), Place())
    if config.cache.statistics != str(output):
        log.warning(
            "cache.statistics=%s is not read here: what is predicted starts from an empty cache, "
            "and policies by popularity get that of the replayed steps",
            config.cache.statistics,
        )
    analysis = analyze(wanted.analyze, wanted.simulate, config)
    text = write_report(analysis, output, command)
    write_statistics(output, analysis.counted.statistics)
    log.info("for training by popularity: cache.statistics=%s", output)
    return text, analysis.stopped_by


if __name__ == "__main__":
    sys.exit(main())
