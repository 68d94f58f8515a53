"""What an analysis leaves: `report.md`, `report.json`, pictures, and a summary on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distcache.bench.report import Table, markdown_table
from distcache.cli.analyze_advice import Advice
from distcache.cli.analyze_plots import plot_access, plot_drift, plot_misses
from distcache.cli.analyze_request import Request
from distcache.cli.analyze_sizes import GRID, SizePoint, Target
from distcache.cli.analyze_tables import (
    access_table,
    human_bytes,
    percent,
    prediction_table,
    simulation_table,
    size_table,
    use_table,
)
from distcache.cli.environment import describe_environment
from distcache.metrics.record import write_json
from distcache.planner.cases import Case, Outcome
from distcache.run.counting import Counted
from distcache.run.prediction import Estimate, Prediction, Sizes

_SHOWN = 26
"""Tables on the terminal, the largest first."""


@dataclass(frozen=True)
class Analysis:
    """All that was found out. `files_order`: counted in the order of the files; `simulated`: empty
    without `simulate=true`; `stopped_by`: the signal that cut it short, None for none."""

    request: Request
    counted: Counted
    sizes: Sizes
    prediction: Prediction
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
