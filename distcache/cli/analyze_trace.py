"""Simulation of a file of ids, in the place of a data source."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from distcache.cli.analyze_plots import plot_misses
from distcache.cli.analyze_report import aligned, machine_text, outcome_values, section
from distcache.cli.analyze_request import Request, cases_of
from distcache.cli.analyze_tables import simulation_table
from distcache.cli.environment import describe_environment
from distcache.errors import DataError
from distcache.metrics.record import write_json
from distcache.planner.replay import replay
from distcache.planner.trace_sources import read_steps, record_ids
from distcache.popularity.of_trace import popularity_of
from distcache.run.counting import Progress

log = logging.getLogger(__name__)

_ROW_BYTES = 4
"""A file of ids says nothing of widths: bytes are those of one float32 element of each row."""


def simulate_trace(request: Request, progress: Progress, command: Sequence[str]) -> str:
    """Replay the file of ids, write the report, and return what to print.

    Raises DataError for ids that are negative or no integers, naming place and value.
    """
    options = request.options
    try:
        with progress("read", None, "id") as bar:
            trace = record_ids(
                read_steps(options.trace, options.ids_per_step or None),
                options.trace_rows or None,
                options.world_sizes,
                bar.update,
            )
    except DataError as error:
        raise DataError(f"trace: {error}; correct the file, or name another one") from error

    def slots(size: float, world: int) -> tuple[int, ...]:
        rows = size * trace.rows if size <= 1 else size
        return (max(1, min(trace.rows, int(np.ceil(rows)))),)

    cases = cases_of(request.policies, options, slots, lambda slots, world: 1)
    with progress("simulate", len(cases), "case") as bar:
        outcomes = replay(trace, cases, popularity_of([trace]), lambda _: bar.update(1))
    table = simulation_table(outcomes, [_ROW_BYTES])
    read = (
        f"{trace.ids:,} ids in {trace.steps:,} steps, of {trace.rows:,} rows; bytes are those of "
        "one float32 element of each row."
    )
    environment = describe_environment(1)
    out = request.output
    drawn = plot_misses(out / "misses.png", [], trace.rows, outcomes)
    write_json(
        out / "report.json",
        {
            "environment": environment | {"command": [*command]},
            "read": {"ids": trace.ids, "steps": trace.steps, "rows": trace.rows},
            "simulated": outcome_values(outcomes, [_ROW_BYTES]),
        },
    )
    parts: list[Any] = ["# A simulated trace", f"`{' '.join(command)}`", read, section(table)]
    parts += ["![misses](misses.png)"] if drawn else []
    (out / "report.md").write_text("\n\n".join([*parts, machine_text(environment)]) + "\n")
    return f"{read}\n\n{aligned(table.columns, table.rows)}\n"
