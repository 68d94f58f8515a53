"""The picture of a plan: bytes and step time by number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distcache.cli.figures import new_figure
from distcache.cli.plan_tables import LABELS
from distcache.cost.sweep import Crossover, Point
from distcache.cost.traffic import (
    MIXED,
    REPLICATED,
    ROW_WISE,
    ROW_WISE_DEDUP,
    ROW_WISE_IDS,
    SHARDED,
    TABLE_WISE,
)

_STYLES = {
    ROW_WISE_DEDUP: ("#56B4E9", "", "-", 7.0),
    ROW_WISE_IDS: ("#E69F00", "", "-", 7.0),
    MIXED: ("#009E73", "^", "-", 3.5),
    ROW_WISE: ("#CC79A7", "v", "--", 1.6),
    TABLE_WISE: ("#555555", "D", "--", 1.6),
    REPLICATED: ("#D55E00", "s", "-", 1.6),
    SHARDED: ("#0072B2", "o", "-", 1.6),
}
"""Colour (Okabe & Ito), mark, line and its width of each layout, in the order of drawing: what may
lie under another line is wider."""


def plot_sweep(
    path: Path, points: Sequence[Point], crossings: Sequence[Crossover], objective: str
) -> bool:
    """Two panels, bytes and time, over ranks; both axes logarithmic. False without matplotlib.

    Hollow marks: does not fit. Vertical lines: the winner by `objective` changes.
    """
    figure = new_figure(13, 6)
    if figure is None:
        return False
    panels = figure.subplots(1, 2)
    titles = {
        "bytes": ("Rows and row gradients sent", "KiB per rank and step", 1 / 1024),
        "time": ("Predicted step time", "milliseconds", 1e3),
    }
    for panel, (key, (title, unit, scale)) in zip(panels, titles.items(), strict=True):
        for name, style in _STYLES.items():
            _line(panel, points, name, (key, scale), style)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        worlds = [point.world_size for point in points]
        panel.set_xticks(worlds, [f"{world:,}" for world in worlds])
        panel.set(title=title, xlabel="ranks (logarithmic)", ylabel=f"{unit} (logarithmic)")
        panel.grid(True, which="major", alpha=0.3)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        if key == objective:
            for crossing in crossings:
                panel.axvline(crossing.at, color="black", linewidth=1, linestyle=(0, (2, 3)))
                panel.annotate(
                    f"{LABELS[crossing.new]} from {crossing.at:,.{0 if crossing.at >= 10 else 1}f}",
                    (crossing.at, 0.99),
                    (-3, 0),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    rotation=90,
                    ha="right",
                    va="top",
                    fontsize=8,
                )
    handles, labels = panels[1].get_legend_handles_labels()
    by_name = dict(zip(labels, handles, strict=True))
    named = [name for name in LABELS.values() if name in by_name]
    figure.legend(
        [by_name[name] for name in named],
        named,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        title="hollow: does not fit; wide and pale: yardsticks"
        + ("; dotted: the winner changes" if crossings else ""),
    )
    figure.savefig(path, dpi=110)
    return True


def _line(
    panel: Any,
    points: Sequence[Point],
    name: str,
    what: tuple[str, float],
    style: tuple[str, str, str, float],
) -> None:
    """One layout's line, where it has values above 0."""
    key, scale = what
    colour, mark, line, width = style
    found = [(point.world_size, point.of(name)) for point in points]
    shown = [(w, p.cost[key] * scale, p.refused is None) for w, p in found if p and p.cost[key] > 0]
    if not shown:
        return
    panel.plot(
        [w for w, _, _ in shown],
        [value for _, value, _ in shown],
        color=colour,
        linestyle=line,
        linewidth=width,
        alpha=1.0 if mark else 0.4,
        marker=mark,
        markersize=4 + width,
        label=LABELS[name],
    )
    hollow = [(w, value) for w, value, fits in shown if not fits]
    panel.plot(
        [w for w, _ in hollow],
        [value for _, value in hollow],
        linestyle="none",
        marker=mark or "o",
        markersize=4 + width,
        markerfacecolor="white",
        markeredgecolor=colour,
    )
