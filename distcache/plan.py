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

from distcache.cli.compose import read_line
from distcache.cli.plan_report import REPORT, write_plan
from distcache.cli.plan_run import Options, Plan, Request, make_plan, measured_here, parse_request
from distcache.cli.run import open_folder, set_up_logging, take_over_ctrl_c
from distcache.errors import DistcacheError

log = logging.getLogger("distcache.plan")

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    take_over_ctrl_c()
    set_up_logging()
    try:
        line = read_line("plan", Options, given)
        if line is None:
            return 0
        request = parse_request(line)
        plan, text = _plan(request, given)
        sys.stdout.write(f"\n{text}")
        sys.stdout.flush()
        log.info("the report is in %s", request.output)
        return 0 if plan.here.best is not None else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except DistcacheError as error:
        log.error("%s", error)
        return 1


def _plan(request: Request, given: Sequence[str]) -> tuple[Plan, str]:
    """What is predicted, written to the request's folder, and the text for the terminal."""
    new = open_folder(request.output, "output")
    if (request.output / REPORT).exists():
        log.warning("output=%s holds a plan, which this one overwrites", request.output)
    try:
        plan = make_plan(measured_here(request) if request.options.measure else request)
        return plan, write_plan(plan, ["python", "-m", "distcache.plan", *given])
    finally:
        if new:
            with suppress(OSError):  # nothing was written to it
                request.output.rmdir()


if __name__ == "__main__":
    sys.exit(main())
