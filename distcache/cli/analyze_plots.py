"""The pictures of an analysis: access curves, misses by cache size, drift."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distcache.cli.analyze_run import SizePoint
from distcache.cli.run import new_figure
from distcache.popularity.curve import TableProfile
from distcache.replay import Outcome

log = logging.getLogger(__name__)

_MARKS = "osD^vP*Xh<>"
_LINES = ("-", "--", "-.", ":")


def plot_access(path: Path, profiles: Sequence[TableProfile]) -> bool:
    """Share of a table's lookups on the most frequent share of its rows."""
    figure = new_figure(11, 6.5)
    if figure is None:
        return False
    panel = figure.subplots()
    used = [profile for profile in profiles if not profile.unused]
    ordered = sorted(used, key=lambda profile: -profile.counts.rows)
    least = 1.0
    for place, profile in enumerate(ordered):
        rows = profile.counts.rows
        first = 1 / rows
        points = np.unique(np.ceil(np.geomspace(1, max(rows, 1), 200)))
        shares = [100 * profile.curve.top(point) for point in points]
        least = min(least, first)
        panel.plot(
            100 * points / rows,
            shares,
            color=_colour(place, len(ordered)),
            linestyle=_LINES[place % len(_LINES)],
            marker=_MARKS[place % len(_MARKS)],
            markevery=(place % 5, 25),
            markersize=4,
            linewidth=1.5,
            label=f"{profile.counts.feature} ({_count(rows)})",
        )
    panel.set_xscale("log")
    panel.set_xlim(100 * max(least, 1e-7), 110)
    panel.set_ylim(0, 102)
    panel.set(
        title="Access curves: lookups served by the most frequent rows of each table",
        xlabel="most frequent rows, % of the table's rows (logarithmic)",
        ylabel="share of the table's lookups, %",
    )
    _tidy(panel)
    _legend(figure, panel, "table (rows)", len(ordered))
    figure.savefig(path, dpi=110)
    return True


def _simulated(
    outcomes: Sequence[Outcome], total_rows: int
) -> dict[str, list[tuple[float, float]]]:
    """(size, misses), both in %, of each policy at the first number of ranks."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        world = outcome.case.world_size
        if world != outcomes[0].case.world_size or outcome.hit_rate_lookups is None:
            continue
        worlds = f", {world} ranks" if world > 1 else ""
        size = 100 * sum(outcome.case.slots) / total_rows
        miss = 100 * (1 - outcome.hit_rate_lookups)
        lines.setdefault(f"{outcome.case.label}{worlds}", []).append((size, miss))
    return lines


def plot_misses(
    path: Path,
    points: Sequence[SizePoint],
    total_rows: int,
    outcomes: Sequence[Outcome],
    advised: SizePoint | None = None,
) -> bool:
    """Share of lookups that miss by cache size: the configured policy over the run, the best fixed
    set, and the simulated policies at their first number of ranks."""
    figure = new_figure(9, 7)
    if figure is None:
        return False
    panel = figure.subplots()
    lowest, highest = 100.0, 0.0
    if points:
        sizes = [100 * sum(point.slots) / total_rows for point in points]
        static = [100 * max(1 - point.static, 0.0) for point in points]
        missed = [100 * (1 - point.rate) for point in points]
        label = f"{points[0].estimate.case.label} (the run, replayed)"
        panel.plot(sizes, missed, color="#0072b2", linewidth=2, label=label)
        if advised is not None:
            panel.axvline(
                100 * sum(advised.slots) / total_rows,
                color="#555555",
                linewidth=1,
                label=f"advised: {sum(advised.slots):,} rows per rank",
            )
        shown = [(size, value) for size, value in zip(sizes, static, strict=True) if value > 1e-3]
        if shown:
            panel.plot(
                *zip(*shown, strict=True),
                color="#d55e00",
                linestyle="--",
                label="best fixed set, always cached (from counts)",
            )
        seen = [*missed, *(value for _, value in shown)]
        lowest, highest = min(lowest, *seen), max(highest, *seen)
    lines = _simulated(outcomes, total_rows)
    seen = [miss for pairs in lines.values() for _, miss in pairs]
    lowest, highest = min([lowest, *seen]), max([highest, *seen])
    for place, (label, pairs) in enumerate(lines.items()):
        panel.plot(
            *zip(*sorted(pairs), strict=True),
            color=_colour(place, len(lines)),
            linestyle=":",
            marker=_MARKS[(place + 2) % len(_MARKS)],
            markersize=5,
            linewidth=1.3,
            label=f"{label} (simulated)",
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(max(lowest / 1.3, 1e-3), min(max(1.3 * highest, 1e-2), 130))
    _plain_numbers(panel)
    panel.set(
        title="Lookups that miss, by cache size",
        xlabel="cached rows per rank, % of all rows (logarithmic)",
        ylabel="share of the lookups that miss, % (logarithmic)",
    )
    _tidy(panel)
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=110)
    return True


def plot_drift(path: Path, profiles: Sequence[TableProfile]) -> bool:
    """What the first part's hot rows, and those of the part before, serve of each later part."""
    seen = [profile for profile in profiles if len(profile.drift.own) > 1]
    figure = new_figure(13, 6) if seen else None
    if figure is None:
        return False
    left, right = figure.subplots(1, 2, sharey=True)
    ordered = sorted(seen, key=lambda profile: -profile.counts.rows)
    for place, profile in enumerate(ordered):
        drift = profile.drift
        style = {
            "color": _colour(place, len(ordered)),
            "linestyle": _LINES[place % len(_LINES)],
            "marker": _MARKS[place % len(_MARKS)],
            "markersize": 4,
            "linewidth": 1.4,
        }
        parts = np.arange(2, len(drift.own) + 1)
        label = f"{profile.counts.feature} ({_count(profile.counts.rows)})"
        left.plot(parts, _kept(drift.next, drift.own[1:]), **style, label=label)
        right.plot(parts, _kept(drift.far[1:], drift.own[1:]), **style)
    left.set(
        title="hot rows of the part before",
        xlabel="part of the stream",
        ylabel="lookups served, % of what the part's own hot rows serve",
    )
    right.set(title="hot rows of the first part", xlabel="part of the stream")
    left.set_ylim(bottom=min(left.get_ylim()[0], 90))  # a little drift shall look little
    for panel in (left, right):
        panel.xaxis.get_major_locator().set_params(integer=True)
        _tidy(panel)
    figure.suptitle("Drift: how the hot rows of one part of the stream serve another")
    _legend(figure, left, "table (rows)", len(ordered))
    figure.savefig(path, dpi=110)
    return True


def _kept(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    pairs = zip(parts, wholes, strict=True)
    return [100 * part / whole if whole else float("nan") for part, whole in pairs]


def _colour(place: int, count: int) -> Any:
    """A colour of its own for each of `count` lines, from dark to bright."""
    from matplotlib import colormaps

    return colormaps["turbo"](0.05 + 0.9 * place / max(count - 1, 1))


def _count(rows: int) -> str:
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if rows >= unit:
            return f"{rows / unit:.3g} {name}"
    return str(rows)


def _legend(figure: Any, panel: Any, title: str, entries: int) -> None:
    """Beside the panels, in a size that holds all entries."""
    small = 7.5 if entries > 16 else 9
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title=title, fontsize=small)


def _plain_numbers(panel: Any) -> None:
    """Numbers such as 0.5 and 20 on logarithmic axes, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def _tidy(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)
