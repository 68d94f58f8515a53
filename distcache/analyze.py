"""Analyze: `python -m distcache.analyze data=... [data.path=...] [key=value ...]`.

1. The configuration is composed and checked, as for the run that is asked about.
2. The data is read once, ids alone, and its lookups are counted.
3. The run's first steps are replayed through its planner, at many cache sizes.
4. `report.md`, `report.json`, pictures and statistics are written; the terminal gets a table and
   the advice.

With `simulate=true` policies, sizes, windows and ranks are replayed too.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from distcache.cli.analyze_run import (
    CLOSE,
    GRID,
    Analysis,
    AnalyzeConfig,
    SizePoint,
    Target,
    analyze,
    check_line,
    rows_by_table,
)
from distcache.cli.compose import Line, checked_config, compose_overrides, override, run_command
from distcache.cli.run import (
    Table,
    describe_environment,
    draw,
    open_folder,
    output_folder,
    percent,
    plain_numbers,
    tidy,
    write_report,
)
from distcache.data.files import write_json
from distcache.errors import human_bytes
from distcache.popularity.curve import TOP_SHARES, TableProfile
from distcache.popularity.statistics import write_statistics
from distcache.replay import Outcome
from distcache.sizing.prediction import Sizes
from distcache.trainer.record import plain

log = logging.getLogger("distcache.analyze")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code, 130 (143) where Ctrl-C (SIGTERM) ended the reading."""
    said = "interrupted before there was anything to report"
    return run_command("analyze", AnalyzeConfig, run, arguments, said)


def run(line: Line[AnalyzeConfig], command: Sequence[str]) -> int:
    """Find everything out, write and say it."""
    check_line(line)
    output = output_folder(line.values.output, "runs/analyze-")
    with open_folder(output, "output"):
        return _run_into(output, line, command)


def _run_into(output: Path, line: Line[AnalyzeConfig], command: Sequence[str]) -> int:
    """Do what `run` does, with the files in a folder that is there."""
    wanted, overrides = line.values, line.overrides
    if not any(word.startswith("cache.statistics=") for word in overrides):
        # Where statistics are not given, they are those that are counted now.
        overrides = (*overrides, override("cache.statistics", output))
    config = checked_config(compose_overrides(overrides))
    if config.cache.statistics != str(output):
        log.warning(
            "cache.statistics=%s is not read here: what is predicted starts from an empty cache, "
            "and policies by popularity get that of the replayed steps",
            config.cache.statistics,
        )
    analysis = analyze(wanted.analyze, wanted.simulate, config)
    text = _report(analysis, output, command)
    write_statistics(output, analysis.counted.statistics)
    log.info("for training by popularity: cache.statistics=%s", output)
    sys.stdout.write(f"\n{text}")
    sys.stdout.flush()
    log.info("the report is in %s", output)
    return 128 + analysis.stopped_by if analysis.stopped_by else 0


# -----------------------------------------------------------------------------
# The tables of an analysis, as rows of text.


def access_table(profiles: Sequence[TableProfile]) -> Table:
    """Who gets the lookups, table by table."""

    def top(share: float, profile: TableProfile) -> str:
        return "-" if profile.unused else percent(profile.top(share), 1)

    def zipf(profile: TableProfile) -> str:
        fit = profile.fit
        if profile.curve.alike:
            return "alike"
        if fit.exponent is None or fit.error is None:
            return "-"
        return f"{fit.exponent:.2f} ± {fit.error:.2f}"

    return Table.of(
        "Accesses of each table",
        "Lookups counted, distinct rows among them, share of the lookups (%) on the most frequent "
        "rows, and the exponent of Zipf's law (rank regression over rows with at least 30 lookups, "
        "Gabaix & Ibragimov 2011) with its standard error. `-`: nothing to tell it from; `alike`: "
        "rows differ by chance alone.",
        [
            ("table", lambda p: p.counts.table),
            ("rows", lambda p: f"{p.counts.rows:,}"),
            ("lookups", lambda p: f"{p.counts.lookups:,}"),
            ("distinct", lambda p: f"{p.counts.distinct:,}"),
            *((f"top {100 * share:g} %", partial(top, share)) for share in TOP_SHARES),
            ("Zipf", zipf),
        ],
        profiles,
    )


def use_table(profiles: Sequence[TableProfile], advised: Sequence[int]) -> Table:
    """What each table means for batches and caches; `advised`: rows of each in the cache."""
    return Table.of(
        "Batches, drift, and each table's share of the cache",
        "Lookups of a global batch and the distinct rows expected in it; what the hot rows of one "
        "part of the stream (1 % of the table's, at most a tenth of those that the part looks up) "
        "serve of the next part, and the first part's of the last, in % of what that part's own "
        "hot rows serve; and the rows of the advised cache that are this table's if it holds the "
        "most frequent ones, with their share of the table (%).",
        [
            ("table", lambda pair: pair[0].counts.table),
            ("lookups", lambda pair: f"{pair[0].batch_lookups:,.1f}"),
            ("distinct rows", lambda pair: f"{pair[0].distinct_per_batch:,.1f}"),
            ("kept next", lambda pair: percent(pair[0].drift.kept(), 1)),
            ("kept far", lambda pair: percent(pair[0].drift.kept_far(), 1)),
            ("cache rows", lambda pair: f"{pair[1]:,}"),
            ("of the table", lambda pair: percent(pair[1] / pair[0].counts.rows, 2)),
        ],
        zip(profiles, advised, strict=True),
    )


def size_table(points: Sequence[SizePoint], sizes: Sizes) -> Table:
    """Hit rates by cache size."""
    label = points[0].estimate.case.label if points else ""
    return Table.of(
        "Hit rate by cache size",
        f"Slots per rank; what the run comes to with `{label}`: hits of lookups and of distinct "
        "rows (%), rows fetched per step, from an empty cache on; and the hits of lookups of the "
        "best fixed set of rows, were it cached from the start. Sizes that a step does not fit in "
        "are left out.",
        [
            ("% of rows", lambda p: percent(sum(p.slots) / sizes.rows, 3)),
            ("rows", lambda p: f"{sum(p.slots):,}"),
            ("bytes", lambda p: human_bytes(p.bytes)),
            ("hits of lookups", lambda p: percent(p.estimate.hit_rate_lookups)),
            ("of distinct rows", lambda p: percent(p.estimate.hit_rate)),
            ("fetched per step", lambda p: _per_step(p.estimate, "fetched")),
            ("fixed set", lambda p: percent(p.static)),
        ],
        points,
    )


_COUNTS = (
    ("slots per rank", lambda o: f"{sum(o.case.slots):,}"),
    ("ranks", lambda o: str(o.case.world_size)),
    ("hits of lookups", lambda o: percent(o.hit_rate_lookups)),
    ("of distinct rows", lambda o: percent(o.hit_rate)),
    ("fetched", lambda o: _per_step(o, "fetched")),
    ("written back", lambda o: _per_step(o, "written_back")),
)
"""Columns of what a case comes to."""


def prediction_table(analysis: Analysis) -> Table:
    """What the configured run will measure, by number of ranks."""
    prediction, expected = analysis.prediction, analysis.counted.distinct_per_step()
    how = f"all {prediction.steps:,} steps were replayed"
    if prediction.recorded < prediction.steps:
        part = f"the first {prediction.recorded:,} of {prediction.steps:,} steps were replayed"
        how = f"{part}, and the rest taken to go on as the last quarter of them"
    table = Table.of(
        "What training will measure with this configuration",
        "`hit_rate_lookups` and `hit_rate` (of distinct rows) of `summary.json`, %; rows fetched "
        "and written back per step; its distinct rows as expected from the counts alone, and as "
        f"replayed. Through the planner that training runs: {how}.",
        [
            *_COUNTS,
            ("distinct, expected", lambda e: f"{expected:,.1f}"),
            ("distinct, replayed", lambda e: _per_step(e, "distinct")),
        ],
        analysis.estimates,
    )
    return _refused(table, analysis.estimates, 2)


def _per_step(found: Outcome, name: str) -> str:
    """A count of a run divided by its steps."""
    return f"{(getattr(found, name) or 0) / max(found.steps, 1):,.1f}"


def _refused(table: Table, found: Sequence[Outcome], known: int) -> Table:
    """The table with nothing but its first `known` cells where training would refuse a case, and
    why."""
    rows, why = list(table.rows), dict[str, None]()
    for place, one in enumerate(found):
        if one.refused is not None:
            cells = ["refused", *"-" * (len(table.columns) - known - 1)]
            rows[place] = (*rows[place][:known], *cells)
            why[f" Training would refuse {sum(one.case.slots):,} slots: {one.refused}."] = None
    return Table(table.title, table.note + "".join(why), table.columns, rows)


def simulation_table(outcomes: Sequence[Outcome], row_bytes: Sequence[int]) -> Table:
    """Policies x sizes x windows x ranks, beside the offline optimum of the same size."""
    done = [o for o in outcomes if o.case.policy is None and o.refused is None]
    least = {(o.case.slots, o.case.world_size): o.fetched for o in done}

    def of_min(outcome: Outcome) -> str:
        optimum = least.get((outcome.case.slots, outcome.case.world_size))
        return f"{outcome.fetched / optimum:.3f}" if optimum else "-"

    def moved(way: int, outcome: Outcome) -> str:
        return human_bytes(outcome.bytes_moved(row_bytes)[way] / max(outcome.steps, 1))

    table = Table.of(
        "Simulated policies",
        "Hits of lookups and of distinct rows (%), and per step over all ranks: rows fetched and "
        "written back, bytes in and out; rows fetched relative to Belady's MIN over the whole "
        "trace (the offline optimum). No tensors are made, but plans are those of training.",
        [
            ("policy", lambda o: o.case.label),
            *_COUNTS,
            ("bytes in", partial(moved, 0)),
            ("bytes out", partial(moved, 1)),
            ("of MIN", of_min),
        ],
        outcomes,
    )
    return _refused(table, outcomes, 3)


# -----------------------------------------------------------------------------
# One paragraph of advice from what was counted and replayed.

_MOSTLY = 0.5
"""Share of the rows, cached or in tables without hot rows, above which a cache is of little use."""


class Advice(NamedTuple):
    """The `text`; `paste`: keys to give to distcache.train; `table_rows`: of the advised cache, how
    many rows each table would have if its rows were the most frequent ones."""

    text: str
    paste: list[str]
    table_rows: list[int]


def advise(analysis: Analysis) -> Advice:
    """What to do about the target."""
    target, sizes, profiles = analysis.target, analysis.sizes, analysis.counted.profiles
    point = target.point
    share, saved = sum(point.slots) / sizes.rows, sizes.bytes - point.bytes
    parts = [*_odd_tables(profiles), _reach(target)]
    parts.append(
        f"That is {sum(point.slots):,} rows per rank, {share:.3%} of {sizes.rows:,}: "
        f"{human_bytes(point.bytes)} with the state of optim={analysis.config.optim.name}, where "
        f"the whole tables take {human_bytes(sizes.bytes)} on every rank; it saves "
        f"{human_bytes(saved)}, {saved / sizes.bytes:.1%}."
    )
    parts += _beside(target, sizes, analysis.prediction.distinct_per_step)
    parts += holds_that_bind([point.estimate, *analysis.simulated])
    if share > _MOSTLY:
        parts.append("That saves little: the lookups are spread over most of the rows.")
    rows = [round(own) for own in rows_by_table(profiles, sizes.members, point.slots)]
    largest = sorted(range(len(rows)), key=lambda table: -rows[table])[:3]
    named = ", ".join(
        f"{profiles[t].counts.table} {rows[t] / max(sum(rows), 1):.0%}" for t in largest if rows[t]
    )
    if named:
        parts.append(f"Most of the cache goes to {named} (`cache rows` in the table).")
    parts += _alike(profiles)
    paste = [f"cache.ratio={point.ratio:.12g}"]
    if len(sizes.members) == 1:
        paste.append(f"cache.bytes={point.bytes}")
    return Advice(" ".join(parts), paste, rows)


def _beside(target: Target, sizes: Sizes, distinct: float) -> list[str]:
    """What a step of so many `distinct` rows takes on the device beside its slots, and whether rows
    can move ahead."""
    parts, case = [], target.point.estimate.case
    if len(sizes.members) == 1:
        row = sizes.request.tables[0].dim * sizes.request.itemsize
        copies = human_bytes(round(3 * distinct * row))
        rows = f"A step's copies of its {distinct:,.0f} rows, their gradients and sums"
        parts.append(f"{rows} take about {copies} beside it.")
    if case.prefetch == 0 and case.policy is not None and sum(case.slots) < 2 * distinct:
        parts.append(
            "It does not hold the rows of two steps, so rows move between the steps and not beside "
            f"them (P = 0): {math.ceil(2.2 * distinct):,} rows or more hide the movement."
        )
    return parts


_LARGE_STEP = 0.25
"""Share of the slots that a step's rows take from which on the holds of P + 1 steps bind."""


def holds_that_bind(outcomes: Sequence[Outcome]) -> list[str]:
    """What to say of slots so few that holding those of the P + 1 steps on their way costs fetches
    at any window (measured in docs/results/policies.md): once for each number of slots."""
    said: dict[int, str] = {}
    for outcome in outcomes:
        case, slots = outcome.case, sum(outcome.case.slots)
        window = case.policy is not None and case.policy.uses_window
        if outcome.refused or not (window and case.prefetch):
            continue
        shares = zip(outcome.groups, case.slots, strict=True)
        share = max(group.distinct / (room * outcome.steps) for group, room in shares)
        if share >= _LARGE_STEP:
            said[slots] = (
                f"With {slots:,} slots a step's rows are {share:.0%} of them, and the holds of "
                "moving ahead bind: no deeper window fetches less. More slots do, or "
                "cache.prefetch=0, where rows move between the steps."
            )
    return list(said.values())


def _reach(target: Target) -> str:
    """Which rate is reached, and why not the one that was wanted."""
    point, whole = target.point, target.whole
    estimate, policy = point.estimate, point.estimate.case.label
    rate = f"{estimate.hit_rate_lookups:.2%} of the lookups"
    start = ""
    if not target.reachable:
        start = (
            f"No cache serves analyze.target_hit_rate={target.wanted:g} of the lookups: the whole "
            f"tables on the device serve {whole.rate:.2%} over {whole.estimate.steps:,} steps, "
            "because the first access to a row always misses; a longer run (trainer.steps, more "
            "epochs) comes closer. "
        )
    if point.ratio >= 1:
        return f"{start}Only the whole tables serve {rate}; no smaller cache does."
    size = f"cache.ratio={point.ratio:g}"
    if not target.reachable:
        return f"{start}{CLOSE:.0%} of that takes {size}, which serves {rate} ({policy})."
    wanted = f"For analyze.target_hit_rate={target.wanted:g}: {size}"
    return f"{wanted} serves {rate} over {estimate.steps:,} steps ({policy})."


def _alike(profiles: Sequence[TableProfile]) -> list[str]:
    """Why a cache will not help, where most rows are in tables without hot rows."""
    tables = [profile for profile in profiles if profile.curve.alike]
    share = sum(p.counts.rows for p in tables) / sum(p.counts.rows for p in profiles)
    if share <= _MOSTLY:
        return []
    lookups = sum(p.counts.lookups for p in tables) / sum(p.counts.lookups for p in profiles)
    return [
        f"A cache will not help: {len(tables)} table(s) with {share:.0%} of the rows and "
        f"{lookups:.0%} of the lookups are looked up uniformly (their rows differ by chance "
        "alone), so no rows are worth keeping, and a cache of some share of these rows serves "
        "about that share of their lookups. Keep the tables on the devices (parallel=hybrid or "
        "resident) if they fit; with parallel=data nearly every row of a step comes from the host."
    ]


def _odd_tables(profiles: Sequence[TableProfile]) -> list[str]:
    """Tables without accesses, and those with one id."""

    def listed(names: Sequence[str]) -> str:
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    found = []
    if unused := [profile.counts.table for profile in profiles if profile.unused]:
        found += [f"Nothing looks up {listed(unused)}: such a table takes no slots; leave it out."]
    if single := [profile.counts.table for profile in profiles if profile.single]:
        found += [f"All ids of {listed(single)} are equal: one row serves every lookup, and the"]
        found += ["feature tells samples apart by nothing."]
    return found


# -----------------------------------------------------------------------------
# The pictures of an analysis: access curves, misses by cache size, drift.

_MARKS, _LINES = "osD^vP*Xh<>", ("-", "--", "-.", ":")


def _styled(profiles: Sequence[TableProfile]) -> Iterator[tuple[TableProfile, dict[str, Any]]]:
    """The tables, the largest first, each with a line of its own."""
    ordered = sorted(profiles, key=lambda profile: -profile.counts.rows)
    for place, profile in enumerate(ordered):
        rows = profile.counts.rows
        size = tqdm.format_sizeof(rows) if rows >= 1000 else str(rows)
        style = {"color": _colour(place, len(ordered)), "linestyle": _LINES[place % len(_LINES)]}
        style |= {"marker": _MARKS[place % len(_MARKS)], "markersize": 4}
        yield profile, style | {"label": f"{profile.counts.table} ({size})"}


def _colour(place: int, count: int) -> Any:
    """A colour of its own for each of `count` lines, from dark to bright."""
    from matplotlib import colormaps

    return colormaps["turbo"](0.05 + 0.9 * place / max(count - 1, 1))


def _legend(figure: Any, panel: Any) -> None:
    """Beside the panels, in a size that holds all entries."""
    drawn, labels = panel.get_legend_handles_labels()
    where = {"loc": "outside right upper", "title": "table (rows)"}
    figure.legend(drawn, labels, fontsize=7.5 if len(labels) > 16 else 9, **where)


def plot_access(figure: Any, profiles: Sequence[TableProfile]) -> None:
    """Share of a table's lookups on the most frequent share of its rows."""
    panel = figure.subplots()
    used = [profile for profile in profiles if not profile.unused]
    for place, (profile, style) in enumerate(_styled(used)):
        rows = profile.counts.rows
        points = np.unique(np.ceil(np.geomspace(1, max(rows, 1), 200)))
        shares = [100 * profile.curve.top(point) for point in points]
        panel.plot(100 * points / rows, shares, markevery=(place % 5, 25), linewidth=1.5, **style)
    panel.set_xscale("log")
    panel.set(
        title="Access curves: lookups served by the most frequent rows of each table",
        xlabel="most frequent rows, % of the table's rows (logarithmic)",
        ylabel="share of the table's lookups, %",
        ylim=(0, 102),
    )
    tidy(panel)
    _legend(figure, panel)


def plot_misses(
    figure: Any,
    total_rows: int,
    outcomes: Sequence[Outcome],
    points: Sequence[SizePoint],
    advised: SizePoint,
) -> None:
    """Share of lookups that miss by cache size: the configured policy over the run, the best fixed
    set, and the simulated policies at their first number of ranks."""
    panel = figure.subplots()
    run = f"{points[0].estimate.case.label} (the run, replayed)" if points else ""
    fixed = "best fixed set, always cached (from counts)"
    lines: dict[str, list[tuple[Sequence[int], float]]] = {  # slots, and the share that hits
        run: [(point.slots, point.rate) for point in points],
        fixed: [(point.slots, point.static) for point in points],
    }
    styles: list[dict[str, Any]] = [{"color": "#0072b2", "linewidth": 2}]
    styles += [{"color": "#d55e00", "linestyle": "--"}]
    for outcome in outcomes:
        world, rate = outcome.case.world_size, outcome.hit_rate_lookups
        if world == outcomes[0].case.world_size and rate is not None:
            name = f"{outcome.case.label}{f', {world} ranks' if world > 1 else ''} (simulated)"
            lines.setdefault(name, []).append((outcome.case.slots, rate))
    for place in range(len(lines) - len(styles)):
        style = {"color": _colour(place, len(lines) - 2), "linestyle": ":", "linewidth": 1.3}
        styles.append(style | {"marker": _MARKS[(place + 2) % len(_MARKS)], "markersize": 5})
    for (name, found), style in zip(lines.items(), styles, strict=True):
        pairs = [(100 * sum(slots) / total_rows, 100 * (1 - hits)) for slots, hits in found]
        if shown := sorted(pair for pair in pairs if pair[1] > 1e-3):
            panel.plot(*zip(*shown, strict=True), label=name, **style)
    name = f"advised: {sum(advised.slots):,} rows per rank"
    at = 100 * sum(advised.slots) / total_rows
    panel.axvline(at, color="#555555", linewidth=1, label=name)
    panel.set(xscale="log", yscale="log")
    plain_numbers(panel)
    panel.set(
        title="Lookups that miss, by cache size",
        xlabel="cached rows per rank, % of all rows (logarithmic)",
        ylabel="share of the lookups that miss, % (logarithmic)",
    )
    tidy(panel)
    drawn = panel.get_legend_handles_labels()
    figure.legend(*drawn, loc="outside lower center", ncols=2, fontsize=9)


def plot_drift(figure: Any, profiles: Sequence[TableProfile]) -> None:
    """What the first part's hot rows, and those of the part before, serve of each later part."""

    def kept(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
        pairs = zip(parts, wholes, strict=True)
        return [100 * part / whole if whole else float("nan") for part, whole in pairs]

    left, right = figure.subplots(1, 2, sharey=True)
    for profile, style in _styled(profiles):
        drift, parts = profile.drift, np.arange(2, len(profile.drift.own) + 1)
        left.plot(parts, kept(drift.next, drift.own[1:]), linewidth=1.4, **style)
        right.plot(parts, kept(drift.far[1:], drift.own[1:]), linewidth=1.4, **style)
    left.set(title="hot rows of the part before")
    left.set(ylabel="lookups served, % of what the part's own hot rows serve")
    right.set(title="hot rows of the first part")
    left.set_ylim(bottom=min(left.get_ylim()[0], 90))  # a little drift shall look little
    for panel in (left, right):
        panel.set(xlabel="part of the stream")
        panel.xaxis.get_major_locator().set_params(integer=True)
        tidy(panel)
    figure.suptitle("Drift: how the hot rows of one part of the stream serve another")
    _legend(figure, left)


# -----------------------------------------------------------------------------
# What an analysis leaves: `report.md`, `report.json`, pictures, and a summary on the terminal.


def _report(analysis: Analysis, out: Path, command: Sequence[str]) -> str:
    """Write everything into the folder `out`; the summary for the terminal."""
    profiles, rows = analysis.counted.profiles, analysis.sizes.rows
    parted = [profile for profile in profiles if len(profile.drift.own) > 1]
    misses = (rows, analysis.simulated, analysis.points, analysis.target.point)
    pictures = {
        "access": draw(out / "access.png", (11, 6.5), plot_access, profiles),
        "misses": draw(out / "misses.png", (9, 7), plot_misses, *misses),
        "drift": bool(parted) and draw(out / "drift.png", (13, 6), plot_drift, parted),
    }
    advice, sizes = advise(analysis), analysis.sizes
    tables = [access_table(profiles)]
    tables.append(use_table(profiles, advice.table_rows))
    # Not those sizes that the search only passed by.
    shown = [p for p in analysis.points if p.ratio in GRID or p is analysis.target.point]
    tables += [prediction_table(analysis), size_table(shown, sizes)]
    if analysis.simulated:
        tables.append(simulation_table(analysis.simulated, sizes.row_bytes))
    parts = [f"# Lookups of data={analysis.config.data.name}", "## Advice", advice.text]
    parts.append("```\n" + "\n".join(advice.paste) + "\n```")
    parts += ["## What was read", read_text(analysis), *(table.section for table in tables)]
    parts += [f"![{name}]({name}.png)" for name, drawn in pictures.items() if drawn]
    environment = describe_environment(1) | {"command": [*command]}
    found = values(analysis, advice) | {"environment": environment}
    write_json(out / "report.json", plain(found))
    write_report(out / "report.md", parts, environment)
    return terminal(analysis, advice)


def read_text(analysis: Analysis) -> str:
    """What was counted, in which order."""
    counted = analysis.counted
    text = f"{counted.samples:,} samples in {counted.steps:,} of {counted.all_steps:,} training "
    text += f"steps ({counted.share:.1%}), {counted.lookups:,} lookups"
    if counted.stopped_by:
        text += "; the reading was stopped, so this speaks of the first part of the data alone"
    parts = max((len(profile.drift.own) for profile in counted.profiles), default=0)
    order = "in the order of the files" if analysis.files_order else "in the order of training"
    return f"{text}. They were read {order}, in {parts} parts. Every row was counted."


def terminal(analysis: Analysis, advice: Advice) -> str:
    """A short table and the advice."""
    pairs = zip(analysis.counted.profiles, advice.table_rows, strict=True)
    columns = [
        ("table", lambda pair: pair[0].counts.table),
        ("rows", lambda pair: f"{pair[0].counts.rows:,}"),
        ("lookups", lambda pair: f"{pair[0].counts.lookups:,}"),
        ("top 1 %", lambda pair: percent(pair[0].top(0.01), 1)),
        ("top 10 %", lambda pair: percent(pair[0].top(0.1), 1)),
        ("distinct/batch", lambda pair: f"{pair[0].distinct_per_batch:,.0f}"),
        ("cache rows", lambda pair: f"{pair[1]:,}"),
    ]
    table = Table.of("", "", columns, pairs)
    lines = [table.aligned, "", read_text(analysis), "", advice.text, ""]
    if analysis.simulated:
        lines += [simulation_table(analysis.simulated, analysis.sizes.row_bytes).aligned, ""]
    return "\n".join([*lines, *(f"  {key}" for key in advice.paste)]) + "\n"


_MOVED = ("host_to_device_bytes", "device_to_host_bytes")


def values(analysis: Analysis, advice: Advice) -> dict[str, Any]:
    """`report.json`."""
    counted, sizes, target = analysis.counted, analysis.sizes, analysis.target
    return {
        "data": analysis.config.data.name,
        "read": _values(counted, "steps all_steps samples share lookups")
        | {"stopped": counted.stopped_by is not None, "in_order_of_files": analysis.files_order},
        "tables": [profile.values() for profile in counted.profiles],
        "advice": {
            **advice._asdict(),
            "target_hit_rate": target.wanted,
            "reachable": target.reachable,
            "whole_tables_hit_rate": target.whole.rate,
            "hit_rate_lookups": target.point.rate,
            "ratio": target.point.ratio,
            "rows": sum(target.point.slots),
            "bytes": target.point.bytes,
            "all_bytes": sizes.bytes,
        },
        "prediction": {
            "steps": analysis.prediction.steps,
            "replayed_steps": analysis.prediction.recorded,
            "distinct_per_step_expected": counted.distinct_per_step(),
            "distinct_per_step_replayed": analysis.prediction.distinct_per_step,
            "cases": [_outcome(estimate) for estimate in analysis.estimates],
        },
        "sizes": [
            _values(point, "ratio bytes static") | _outcome(point.estimate)
            for point in analysis.points
        ],
        "simulated": [
            _outcome(outcome) | dict(zip(_MOVED, outcome.bytes_moved(sizes.row_bytes), strict=True))
            for outcome in analysis.simulated
        ],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    case, names = outcome.case, "steps refused hit_rate hit_rate_lookups ids lookups_hit distinct"
    policy = None if case.policy is None else vars(case.policy)
    about = vars(case) | {"label": case.label, "policy": policy}
    return about | _values(outcome, f"{names} fetched written_back tight_steps")


def _values(of: object, names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names.split()}


if __name__ == "__main__":
    sys.exit(main())
