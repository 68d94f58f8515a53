"""Plan: `python -m distcache.plan preset=criteo_kaggle world_size=8 [key=value ...]`.

1. The command line says what the tables, the batch and the cluster are.
2. With `measure=true` links and row operations of this machine are timed.
3. Every layout is predicted for that cluster, and for 1, 2, 4, ... ranks.
4. Report, picture, records and the overrides that choose the winner are written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress

from distcache.cli.compose import Line, run_command
from distcache.cli.plan_report import REPORT, write_plan
from distcache.cli.plan_run import Options, make_plan, measured_here, parse_request
from distcache.cli.run import open_folder

log = logging.getLogger("distcache.plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    return run_command("plan", Options, run, arguments)


def run(line: Line[Options], command: Sequence[str]) -> int:
    """Predict, write and say; 1 where no layout fits."""
    request = parse_request(line)
    new = open_folder(request.output, "output")
    if (request.output / REPORT).exists():
        log.warning("output=%s holds a plan, which this one overwrites", request.output)
    try:
        plan = make_plan(measured_here(request) if request.options.measure else request)
        sys.stdout.write(f"\n{write_plan(plan, command)}")
    finally:
        if new:
            with suppress(OSError):  # nothing was written to it
                request.output.rmdir()
    sys.stdout.flush()
    log.info("the report is in %s", request.output)
    return 0 if plan.here.best is not None else 1


if __name__ == "__main__":
    sys.exit(main())
