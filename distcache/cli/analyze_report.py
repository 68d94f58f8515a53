"""What an analysis leaves: `report.md`, `report.json`, its tables, and one paragraph of advice."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distcache.cli.analyze_plots import plot_access, plot_drift, plot_misses
from distcache.cli.analyze_run import (
    CLOSE,
    GRID,
    Request,
    SizePoint,
    Target,
    cases_of,
    fitting_sizes,
)
from distcache.cli.run import describe_environment
from distcache.cli.tables import Table, markdown_table
from distcache.errors import DataError
from distcache.popularity.curve import TOP_SHARES, TableProfile, most_frequent
from distcache.replay import Case, Outcome, popularity_of, replay
from distcache.trace import read_steps, record_ids
from distcache.trainer.prediction import Counted, Estimate, Progress, RecordedRun, Sizes
from distcache.trainer.record import write_json

# -----------------------------------------------------------------------------
# The tables of an analysis, as rows of text.


def human_bytes(count: float) -> str:
    """A byte count in a unit that reads well."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, `-` for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def access_table(profiles: Sequence[TableProfile]) -> Table:
    """Who gets the lookups, table by table."""
    rows = []
    for profile in profiles:
        counts = profile.counts
        sign = "" if profile.distinct_error == 0 else "~"
        rows.append(
            (
                counts.feature,
                f"{counts.rows:,}",
                f"{counts.lookups:,}",
                f"{sign}{counts.distinct:,}",
                *("-" if profile.unused else percent(profile.top(s), 1) for s in TOP_SHARES),
                _zipf(profile),
            )
        )
    return Table(
        "Accesses of each table",
        "Lookups counted, distinct rows among them, share of the lookups (%) on the most frequent "
        "rows, and the exponent of Zipf's law (rank regression over rows with at least 30 lookups, "
        "Gabaix & Ibragimov 2011) with its standard error. `-`: nothing to tell it from; `alike`: "
        "rows differ by chance alone.",
        (
            "table",
            "rows",
            "lookups",
            "distinct",
            *(f"top {100 * share:g} %" for share in TOP_SHARES),
            "Zipf",
        ),
        rows,
    )


def use_table(
    profiles: Sequence[TableProfile], world_sizes: Sequence[int], advised: Sequence[int]
) -> Table:
    """What each table means for batches and caches."""
    rows = []
    worlds = sorted({1, *world_sizes})
    for profile, own in zip(profiles, advised, strict=True):
        counts = profile.counts
        distinct = (f"{profile.distinct_per_batch(world):,.1f}" for world in worlds)
        rows.append(
            (
                counts.feature,
                f"{profile.batch_lookups:,.1f}",
                *distinct,
                percent(profile.drift.kept(), 1),
                percent(profile.drift.kept_far(), 1),
                f"{own:,}",
                percent(own / counts.rows, 2),
            )
        )
    slices = ("distinct rows", *(f"of a rank of {world}" for world in worlds if world > 1))
    return Table(
        "Batches, drift, and each table's share of the cache",
        "Lookups of a global batch and the distinct rows expected in it (and in a rank's slice of "
        "it); what the hot rows of one part of the stream (1 % of the table's, at most a tenth of "
        "those that the part looks up) serve of the next part, and the first part's of the last, "
        "in % of what that part's own hot rows serve; and the rows of "
        "the advised cache that are this table's if it holds the most frequent ones, with their "
        "share of the table (%).",
        ("table", "lookups", *slices, "kept next", "kept far", "cache rows", "of the table"),
        rows,
    )


def size_table(points: Sequence[SizePoint], sizes: Sizes) -> Table:
    """Hit rates by cache size."""
    rows = []
    for point in points:
        found = point.estimate
        rows.append(
            (
                percent(sum(point.slots) / sizes.rows, 3),
                f"{sum(point.slots):,}",
                human_bytes(point.bytes),
                percent(found.hit_rate_lookups),
                percent(found.hit_rate),
                f"{(found.fetched or 0) / found.steps:,.1f}",
                percent(point.static),
                percent(point.static_distinct),
            )
        )
    label = points[0].estimate.case.label if points else ""
    return Table(
        "Hit rate by cache size",
        f"Slots per rank; what the run comes to with `{label}`: hits of lookups and of distinct "
        "rows (%), rows fetched per step, from an empty cache on; and the same two rates of the "
        "best fixed set of rows, were it cached from the start. Sizes that a step does not fit in "
        "are left out.",
        (
            "% of rows",
            "rows",
            "bytes",
            "hits of lookups",
            "of distinct rows",
            "fetched per step",
            "fixed set, lookups",
            "distinct",
        ),
        rows,
    )


def prediction_table(
    estimates: Sequence[Estimate], prediction: RecordedRun, expected: float
) -> Table:
    """What the configured run will measure, by number of ranks."""
    rows, refused = [], ""
    for found in estimates:
        start = (str(found.case.world_size), f"{sum(found.case.slots):,}")
        if found.refused is not None:
            rows.append((*start, "refused", *["-"] * 5))
            refused += f" Training would refuse {start[1]} slots: {found.refused}."
            continue
        rows.append(
            (
                *start,
                f"{found.hit_rate_lookups:.4f}",
                f"{found.hit_rate:.4f}",
                f"{expected:,.1f}",
                f"{(found.distinct or 0) / found.steps:,.1f}",
                f"{(found.fetched or 0) / found.steps:,.1f}",
                f"{(found.written_back or 0) / found.steps:,.1f}",
            )
        )
    steps = prediction.steps
    how = f"all {steps:,} steps were replayed"
    if prediction.recorded < steps:
        how = (
            f"the first {prediction.recorded:,} of {steps:,} steps were replayed, and the rest "
            "taken to go on as the last quarter of them"
        )
    return Table(
        "What training will measure with this configuration",
        "`hit_rate_lookups` and `hit_rate` (of distinct rows) of `summary.json`; distinct rows per "
        "step as expected from the counts alone, and as replayed; rows fetched and written back "
        f"per step. Through the planner that training runs: {how}.{refused}",
        (
            "ranks",
            "slots",
            "hit_rate_lookups",
            "hit_rate",
            "distinct, expected",
            "distinct, replayed",
            "fetched",
            "written back",
        ),
        rows,
    )


def simulation_table(outcomes: Sequence[Outcome], row_bytes: Sequence[int]) -> Table:
    """Policies x sizes x windows x ranks, beside the offline optimum of the same size."""
    least = {_key(o): o.fetched for o in outcomes if o.case.policy is None and o.refused is None}
    rows, refused = [], {}
    for outcome in outcomes:
        case = outcome.case
        start = (case.label, f"{sum(case.slots):,}", str(case.world_size))
        if outcome.refused is not None:
            rows.append((*start, "refused", *["-"] * 6))
            refused[_key(outcome)] = outcome.refused
            continue
        steps, optimum = max(outcome.steps, 1), least.get(_key(outcome))
        rows.append(
            (
                *start,
                percent(outcome.hit_rate_lookups),
                percent(outcome.hit_rate),
                f"{outcome.fetched / steps:,.1f}",
                f"{outcome.written_back / steps:,.1f}",
                human_bytes(outcome.host_to_device_bytes(row_bytes) / steps),
                human_bytes(outcome.device_to_host_bytes(row_bytes) / steps),
                f"{outcome.fetched / optimum:.3f}" if optimum else "-",
            )
        )
    return Table(
        "Simulated policies",
        "Hits of lookups and of distinct rows (%), and per step over all ranks: rows fetched and "
        "written back, bytes in and out; rows fetched relative to Belady's MIN over the whole "
        "trace (the offline optimum). No tensors are made, but plans are those of training."
        + "".join(
            f" Training would refuse {sum(k[0]):,} slots: {why}." for k, why in refused.items()
        ),
        (
            "policy",
            "slots per rank",
            "ranks",
            "hits of lookups",
            "of distinct rows",
            "fetched",
            "written back",
            "bytes in",
            "bytes out",
            "of MIN",
        ),
        rows,
    )


def _key(outcome: Outcome) -> tuple[tuple[int, ...], int]:
    return outcome.case.slots, outcome.case.world_size


def _zipf(profile: TableProfile) -> str:
    fit = profile.fit
    if profile.alike:
        return "alike"
    if fit.exponent is None or fit.error is None:
        return "-"
    return f"{fit.exponent:.2f} ± {fit.error:.2f}"


# -----------------------------------------------------------------------------
# One paragraph of advice from what was counted and replayed.

_MOSTLY = 0.5
"""Share of the rows, cached or in tables without hot rows, above which a cache is of little use."""


@dataclass(frozen=True)
class Advice:
    """The `text`; `paste`: keys to give to distcache.train; `table_rows`: of the advised cache, how
    many rows each table would have if its rows were the most frequent ones."""

    text: str
    paste: tuple[str, ...]
    table_rows: tuple[int, ...]


def advise(
    target: Target,
    profiles: Sequence[TableProfile],
    sizes: Sizes,
    optimizer: str,
    distinct: float,
) -> Advice:
    """What to do about `target`, for tables of these `sizes` with their optimizer state.

    `distinct`: rows of a step, the mean.
    """
    point = target.point
    rows = _split(profiles, sizes, point.slots)
    share = sum(point.slots) / sizes.rows
    parts = [*_odd_tables(profiles), _reach(target)]
    saved = sizes.bytes - point.bytes
    parts.append(
        f"That is {sum(point.slots):,} rows per rank, {share:.3%} of {sizes.rows:,}: "
        f"{human_bytes(point.bytes)} with the state of optim={optimizer}, where the whole "
        f"tables take {human_bytes(sizes.bytes)} on every rank; it saves "
        f"{human_bytes(saved)}, {saved / sizes.bytes:.1%}."
    )
    parts += _beside(target, sizes, distinct)
    if share > _MOSTLY:
        parts.append("That saves little: the lookups are spread over most of the rows.")
    largest = sorted(range(len(rows)), key=lambda table: -rows[table])[:3]
    named = ", ".join(
        f"{profiles[t].counts.feature} {rows[t] / max(sum(rows), 1):.0%}"
        for t in largest
        if rows[t]
    )
    if named:
        parts.append(f"Most of the cache goes to {named} (`cache rows` in the table).")
    alike = _alike(profiles)
    if alike is not None:
        parts.append(alike)
    paste = [f"cache.ratio={point.ratio:.12g}"]
    if len(sizes.groups) == 1:
        paste.append(f"cache.bytes={point.bytes}")
    return Advice(" ".join(parts), tuple(paste), rows)


def _beside(target: Target, sizes: Sizes, distinct: float) -> list[str]:
    """What a step takes on the device beside its slots, and whether rows can move ahead."""
    parts, case = [], target.point.estimate.case
    if len(sizes.groups) == 1:
        _, dim, _ = sizes.groups[0]
        parts.append(
            f"A step's copies of its {distinct:,.0f} rows, their gradients and sums take about "
            f"{human_bytes(round(3 * distinct * dim * sizes.itemsize))} beside it."
        )
    if case.prefetch == 0 and case.policy is not None and sum(case.slots) < 2 * distinct:
        parts.append(
            "It does not hold the rows of two steps, so rows move between the steps and not beside "
            f"them (P = 0): {math.ceil(2.2 * distinct):,} rows or more hide the movement."
        )
    return parts


def _reach(target: Target) -> str:
    """Which rate is reached, and why not the one that was wanted."""
    estimate, policy = target.point.estimate, target.point.estimate.case.label
    rate = f"{estimate.hit_rate_lookups:.2%} of the lookups"
    if target.point.ratio >= 1:
        start = f"Only the whole tables serve {rate}; no smaller cache does."
        return start if target.reachable else f"{_unreachable(target)} {start}"
    if target.reachable:
        return (
            f"For analyze.target_hit_rate={target.wanted:g}: cache.ratio={target.point.ratio:g} "
            f"serves {rate} over {estimate.steps:,} steps ({policy})."
        )
    return (
        f"{_unreachable(target)} {CLOSE:.0%} of that takes cache.ratio={target.point.ratio:g}, "
        f"which serves {rate} ({policy})."
    )


def _unreachable(target: Target) -> str:
    return (
        f"No cache serves analyze.target_hit_rate={target.wanted:g} of the lookups: the whole "
        f"tables on the device serve {target.whole.rate:.2%} over "
        f"{target.whole.estimate.steps:,} steps, because the first access to a row always misses; "
        "a longer run (trainer.steps, more epochs) comes closer."
    )


def _alike(profiles: Sequence[TableProfile]) -> str | None:
    """Why a cache will not help, where most rows are in tables without hot rows."""
    tables = [profile for profile in profiles if profile.alike]
    rows = sum(profile.counts.rows for profile in tables)
    share = rows / sum(profile.counts.rows for profile in profiles)
    if share <= _MOSTLY:
        return None
    lookups = sum(p.counts.lookups for p in tables) / sum(p.counts.lookups for p in profiles)
    return (
        f"A cache will not help: {len(tables)} table(s) with {share:.0%} of the rows and "
        f"{lookups:.0%} of the lookups are looked up uniformly (their rows differ by chance "
        "alone), so no rows are worth keeping, and a cache of some share of these rows serves "
        "about that share of their lookups. Keep the tables on the devices (parallel=hybrid or "
        "resident) if they fit; with parallel=data nearly every row of a step comes from the host."
    )


def _odd_tables(profiles: Sequence[TableProfile]) -> list[str]:
    """Tables without accesses, and those with one id."""
    found = []
    unused = [profile.counts.feature for profile in profiles if profile.unused]
    if unused:
        found.append(
            f"Nothing looks up {_listed(unused)}: such a table takes no slots; leave it out."
        )
    single = [profile.counts.feature for profile in profiles if profile.single]
    if single:
        found.append(
            f"All ids of {_listed(single)} are equal: one row serves every lookup, and the feature "
            "tells samples apart by nothing."
        )
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _split(profiles: Sequence[TableProfile], sizes: Sizes, slots: Sequence[int]) -> tuple[int, ...]:
    """The slots of every table if each group's hold its most frequent rows."""
    rows = [0] * len(profiles)
    for members, count in zip(sizes.members, slots, strict=True):
        curves = [profiles[table].curve for table in members]
        for table, part in zip(members, most_frequent(curves, count, shared=True), strict=True):
            rows[table] = round(part)
    return tuple(rows)


# -----------------------------------------------------------------------------
# What an analysis leaves: `report.md`, `report.json`, pictures, and a summary on the terminal.

_SHOWN = 26
"""Tables on the terminal, the largest first."""


@dataclass(frozen=True)
class Analysis:
    """All that was found out. `files_order`: counted in the order of the files; `simulated`: empty
    without `simulate=true`; `stopped_by`: the signal that cut it short, None for none."""

    request: Request
    counted: Counted
    sizes: Sizes
    prediction: RecordedRun
    estimates: tuple[Estimate, ...]
    points: tuple[SizePoint, ...]
    target: Target
    advice: Advice
    data: str
    files_order: bool
    simulated: tuple[Outcome, ...] = ()
    stopped_by: int | None = None


def write_report(analysis: Analysis, command: Sequence[str]) -> str:
    """Write everything into the folder of the request; the summary for the terminal."""
    out = analysis.request.output
    profiles = analysis.counted.profiles
    pictures = {
        "access.png": plot_access(out / "access.png", profiles),
        "misses.png": plot_misses(
            out / "misses.png",
            analysis.points,
            analysis.sizes.rows,
            analysis.simulated,
            analysis.target.point,
        ),
        "drift.png": plot_drift(out / "drift.png", profiles),
    }
    drawn = [name for name, done in pictures.items() if done]
    environment = describe_environment(1)
    write_json(out / "report.json", values(analysis, environment | {"command": [*command]}))
    (out / "report.md").write_text(markdown(analysis, environment, command, drawn))
    return terminal(analysis)


def markdown(
    analysis: Analysis, environment: dict[str, Any], command: Sequence[str], pictures: list[str]
) -> str:
    """The whole report."""
    advice, counted = analysis.advice, analysis.counted

    def shown(point: SizePoint) -> bool:
        """Not those that the search only passed by."""
        return point.ratio in GRID or point is analysis.target.point

    parts = [f"# Lookups of data={analysis.data}", f"`{' '.join(command)}`"]
    parts += ["## Advice", advice.text, "```\n" + "\n".join(advice.paste) + "\n```"]
    parts += ["## What was read", read_text(analysis)]
    tables = [
        access_table(counted.profiles),
        use_table(counted.profiles, analysis.request.options.world_sizes, advice.table_rows),
        prediction_table(analysis.estimates, analysis.prediction, counted.distinct_per_step()),
        size_table([point for point in analysis.points if shown(point)], analysis.sizes),
    ]
    if analysis.simulated:
        tables.append(simulation_table(analysis.simulated, analysis.sizes.row_bytes))
    parts += [section(table) for table in tables]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    return "\n\n".join([*parts, machine_text(environment)]) + "\n"


def section(table: Table) -> str:
    """A table under its title and note."""
    return f"## {table.title}\n\n{table.note}\n\n{markdown_table(table)}"


def machine_text(environment: dict[str, Any]) -> str:
    """Machine, versions and commit in a line or two."""
    hardware, commit = environment["hardware"], environment["commit"] or {}
    versions = [f"{name} {version}" for name, version in environment["versions"].items() if version]
    state = commit.get("commit", "unknown") + (" with changes" if commit.get("dirty") else "")
    return f"{hardware['cpu']}, {hardware['cores']} cores. {', '.join(versions)}. Commit: {state}."


def read_text(analysis: Analysis) -> str:
    """What was counted, in which order, how well, in how much memory."""
    counted = analysis.counted
    text = (
        f"{counted.samples:,} samples in {counted.steps:,} of {counted.all_steps:,} training steps "
        f"({counted.share:.1%}), {counted.lookups:,} lookups"
    )
    if counted.stopped_by:
        text += "; the reading was stopped, so this speaks of the first part of the data alone"
    parts = max((len(profile.drift.own) for profile in counted.profiles), default=0)
    order = "in the order of the files" if analysis.files_order else "in the order of training"
    text += f". They were read {order}, in {parts} parts. "
    sketched = [p for p in counted.profiles if not p.exact]
    memory = human_bytes(sum(profile.count_bytes for profile in counted.profiles))
    if not sketched:
        return f"{text}Every row was counted exactly, in {memory}."
    worst = max(sketched, key=lambda p: p.counts.error / max(p.counts.lookups, 1))
    text += (
        f"Counts took {memory} (analyze.memory={analysis.request.options.memory}), so "
        f"{len(sketched)} table(s) were counted with a frequent-items sketch: a count of "
        f"{worst.counts.feature} is at most {worst.counts.error:,} too small (of "
        f"{worst.counts.lookups:,} lookups), those of the other tables less; rows that it does not "
        "hold share the rest evenly. So these tables look flatter than they are: shares of the "
        "most frequent rows are at least, distinct rows per batch at most those shown. "
    )
    guessed = [p for p in sketched if p.distinct_error]
    if guessed:
        text += (
            f"Distinct rows of {len(guessed)} table(s) are estimates (HyperLogLog, standard error "
            f"{guessed[0].distinct_error:.2%})."
        )
    else:
        text += "Distinct rows are exact."
    return text


def terminal(analysis: Analysis) -> str:
    """A short table and the advice."""
    counted, rows = analysis.counted, []
    largest = sorted(range(len(counted.profiles)), key=lambda t: -counted.profiles[t].counts.rows)[
        :_SHOWN
    ]
    for place in sorted(largest):
        profile = counted.profiles[place]
        counts = profile.counts
        tops = (percent(profile.top(share), 1) for share in (0.01, 0.1))
        rows.append(
            (
                *(counts.feature, f"{counts.rows:,}", f"{counts.lookups:,}", *tops),
                f"{profile.distinct_per_batch():,.0f}",
                f"{analysis.advice.table_rows[place]:,}",
            )
        )
    columns = ("table", "rows", "lookups", "top 1 %", "top 10 %", "distinct/batch", "cache rows")
    lines = [aligned(columns, rows), "", read_text(analysis), "", analysis.advice.text, ""]
    if analysis.simulated:
        table = simulation_table(analysis.simulated, analysis.sizes.row_bytes)
        lines += [aligned(table.columns, table.rows), ""]
    lines += [f"  {key}" for key in analysis.advice.paste]
    return "\n".join(lines) + "\n"


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first to the left, the others to the right."""
    cells = [tuple(columns), *map(tuple, rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    shown = []
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        shown.append("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join(shown)


def values(analysis: Analysis, environment: dict[str, Any]) -> dict[str, Any]:
    """`report.json`."""
    counted, sizes, target = analysis.counted, analysis.sizes, analysis.target
    worlds = analysis.request.options.world_sizes
    return {
        "data": analysis.data,
        "environment": environment,
        "read": {
            "steps": counted.steps,
            "all_steps": counted.all_steps,
            "samples": counted.samples,
            "share": counted.share,
            "lookups": counted.lookups,
            "stopped": counted.stopped_by is not None,
            "in_order_of_files": analysis.files_order,
            "count_bytes": sum(profile.count_bytes for profile in counted.profiles),
        },
        "tables": [profile.values(sorted({1, *worlds})) for profile in counted.profiles],
        "advice": {
            "text": analysis.advice.text,
            "paste": analysis.advice.paste,
            "target_hit_rate": target.wanted,
            "reachable": target.reachable,
            "whole_tables_hit_rate": target.whole.rate,
            "hit_rate_lookups": target.point.rate,
            "ratio": target.point.ratio,
            "rows": sum(target.point.slots),
            "bytes": target.point.bytes,
            "all_bytes": sizes.bytes,
            "table_rows": analysis.advice.table_rows,
        },
        "prediction": {
            "steps": analysis.prediction.steps,
            "replayed_steps": analysis.prediction.recorded,
            "distinct_per_step_expected": counted.distinct_per_step(),
            "distinct_per_step_replayed": analysis.prediction.distinct_per_step,
            "cases": [_estimate(estimate) for estimate in analysis.estimates],
        },
        "sizes": [
            {
                **{"ratio": point.ratio, "bytes": point.bytes, **_estimate(point.estimate)},
                **{"static_lookups": point.static, "static_distinct": point.static_distinct},
            }
            for point in analysis.points
        ],
        "simulated": outcome_values(analysis.simulated, sizes.row_bytes),
    }


def outcome_values(outcomes: Sequence[Outcome], row_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Outcomes as JSON values."""
    names = ("steps", "refused", "hit_rate", "hit_rate_lookups", "ids", "lookups_hit")
    names = (*names, "distinct", "fetched", "written_back", "tight_steps", "seconds")
    return [
        {
            **_case(outcome.case),
            **{name: getattr(outcome, name) for name in names},
            "host_to_device_bytes": outcome.host_to_device_bytes(row_bytes),
            "device_to_host_bytes": outcome.device_to_host_bytes(row_bytes),
        }
        for outcome in outcomes
    ]


def _estimate(estimate: Estimate) -> dict[str, Any]:
    rest = {name: value for name, value in vars(estimate).items() if name != "case"}
    return _case(estimate.case) | rest


def _case(case: Case) -> dict[str, Any]:
    policy = None if case.policy is None else vars(case.policy)
    return vars(case) | {"label": case.label, "policy": policy}


# -----------------------------------------------------------------------------
# Simulation of a file of ids, in the place of a data source.

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
                read_steps(request.trace, options.ids_per_step or None),
                options.trace_rows or None,
                options.world_sizes,
                bar.update,
            )
    except DataError as error:
        raise DataError(f"trace: {error}; correct the file, or name another one") from error

    def slots(size: float, world: int) -> tuple[int, ...]:
        rows = size * trace.rows if size <= 1 else size
        return (max(1, min(trace.rows, int(np.ceil(rows)))),)

    chosen = replace(options, sizes=fitting_sizes(options.sizes, [trace], slots))
    cases = cases_of(request.policies, chosen, slots, lambda slots, world: 1)
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
