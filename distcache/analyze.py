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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tqdm import tqdm

from distcache.cli.analyze_report import Analysis, advise, simulate_trace, write_report
from distcache.cli.analyze_run import (
    AnalyzeConfig,
    Request,
    SizeSearch,
    cases_of,
    fitting_sizes,
    parse_request,
)
from distcache.cli.compose import checked_config, compose_overrides, override, read_line
from distcache.cli.run import open_folder, set_up_logging, take_over_ctrl_c
from distcache.comm.rendezvous import Place
from distcache.config.tree import Config
from distcache.errors import ConfigError, DistcacheError
from distcache.popularity.slots import BY_CURVE
from distcache.popularity.statistics import write_statistics
from distcache.replay import Case, replay
from distcache.trainer.build import build_source, build_tables
from distcache.trainer.prediction import (
    CheckedSource,
    RecordedRun,
    Sizes,
    configured_case,
    count_source,
    record_run,
    slots_of,
)
from distcache.trainer.schedule import make_schedule
from distcache.trainer.trainer import StopRequest

log = logging.getLogger("distcache.analyze")

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code, 130 (143) where Ctrl-C (SIGTERM) ended the reading."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    take_over_ctrl_c()
    set_up_logging()
    try:
        line = read_line("analyze", AnalyzeConfig, given)
        if line is None:
            return 0
        request = parse_request(line)
        open_folder(request.output, "output")
        command = ["python", "-m", "distcache.analyze", *given]
        stopped_by = None
        if request.trace:
            text = simulate_trace(request, progress_bar, command)
        else:
            config = checked_config(compose_overrides(with_statistics(request)), Place())
            analysis = analyze(request, config)
            stopped_by = analysis.stopped_by
            text = write_report(analysis, command)
            write_statistics(request.output, analysis.counted.statistics)
            log.info("for training by popularity: cache.statistics=%s", request.output)
        sys.stdout.write(f"\n{text}")
        sys.stdout.flush()
        log.info("the report is in %s", request.output)
        return 128 + stopped_by if stopped_by else 0
    except KeyboardInterrupt:
        log.error("interrupted before there was anything to report")
        return INTERRUPTED
    except DistcacheError as error:
        log.error("%s", error)
        return 1


def analyze(request: Request, config: Config) -> Analysis:
    """Count, replay and advise. Raises DataError for data without a lookup."""
    options, ranks = request.options, request.options.world_sizes
    source = build_source(config)
    tables = build_tables(config, source)
    checked = CheckedSource(source, tables, config.data.on_bad_id)
    if config.cache.split != BY_CURVE:  # what is refused is refused before all the data is read
        slots_of(config, tables, ranks[0], None)
    want = config.trainer
    schedule = make_schedule(source, 0, want.steps, want.eval_every, want.eval_steps)
    run_steps = schedule.steps or 0
    steps = source.steps_per_epoch or run_steps
    counted = count_source(checked, steps, request.sample, request.memory, progress_bar)
    if config.cache.statistics != str(request.output):
        log.warning(
            "cache.statistics=%s is not read here: what is predicted starts from an empty cache, "
            "and policies by popularity get that of the replayed steps",
            config.cache.statistics,
        )
    sizes = Sizes.of(config, tables, counted.statistics)
    most = min(options.replay, counted.lookups) if counted.stopped_by else options.replay
    with progress_bar("record", None, "step") as bar, StopRequest() as stop:
        traces = record_run(checked, tables, schedule, ranks, most, bar.update, stop)
    prediction = RecordedRun(traces, run_steps)
    if stop.requested:
        log.warning("stopped: the first %d steps of the run are replayed", prediction.recorded)

    def case(slots: Sequence[int], world: int = ranks[0]) -> Case:
        return configured_case(config, checked, tables, slots, world)

    estimates = []
    with logged_refusal():
        known = (counted.statistics, checked)
        configured = [(slots_of(config, tables, w, *known), w) for w in ranks]
        estimates = [prediction.estimate(case(*one)) for one in configured]
    search = SizeSearch(prediction, sizes, counted.profiles, case, ranks[0])
    target = search.target(options.target_hit_rate)
    outcomes = []
    if request.simulate:
        chosen = replace(options, sizes=fitting_sizes(options.sizes, traces, sizes.slots))
        cases = cases_of(request.policies, chosen, sizes.slots, lambda *of: case(*of).prefetch)
        with progress_bar("simulate", len(cases), "case") as bar:
            outcomes = replay(traces, cases, prediction.classes, lambda _: bar.update(1))
    return Analysis(
        request=request,
        counted=counted,
        sizes=sizes,
        prediction=prediction,
        estimates=tuple(estimates),
        points=tuple(search.grid()),
        target=target,
        advice=advise(
            target, counted.profiles, sizes, config.optim.name, prediction.distinct_per_step
        ),
        data=config.data.name,
        files_order=checked.keeps_order,
        simulated=tuple(outcomes),
        stopped_by=counted.stopped_by or stop.signal,
    )


def with_statistics(request: Request) -> list[str]:
    """The overrides; where statistics are not given, they are those that are counted now."""
    given = any(word.startswith("cache.statistics=") for word in request.overrides)
    own = override("cache.statistics", request.output)
    return [*request.overrides, *([] if given else [own])]


@contextmanager
def logged_refusal() -> Iterator[None]:
    """What training would refuse about the configured cache is said; all else is reported."""
    try:
        yield
    except ConfigError as error:
        log.warning("no run with the configured cache is predicted: %s", error)


@contextmanager
def progress_bar(stage: str, total: int | None, unit: str) -> Iterator[tqdm]:
    """A bar with rate and remaining time on stderr; a line every ten seconds where no one looks."""
    often = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=total, desc=stage, unit=unit, unit_scale=True, mininterval=often, maxinterval=often
    ) as bar:
        yield bar


if __name__ == "__main__":
    sys.exit(main())
