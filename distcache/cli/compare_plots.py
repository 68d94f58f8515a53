"""The comparison as one picture of four panels: losses, throughput, device memory, bytes."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distcache.cli.compare_runs import ModeRun, spread
from distcache.cli.figures import new_figure

log = logging.getLogger(__name__)

COLOURS = {
    "data": "#0072b2",
    "hybrid": "#d55e00",
    "resident": "#009e73",
    "host": "#7f5aa2",
    "replicated": "#56b4e9",
    "sharded": "#e69f00",
    "mixed": "#cc79a7",
    "auto": "#7a7a00",
    "table_wise": "#9c3d00",
    "row_wise": "#6e6e6e",
    "column_wise": "#8c6d5a",
}
LINKS = (
    ("host_to_device_bytes", "host to device,\nall ranks"),
    ("device_to_host_bytes", "device to host,\nall ranks"),
    ("collective_bytes", "rows and their\ngradients,\nper rank"),
    ("dense_collective_bytes", "dense\ngradients,\nper rank"),
    ("planning_bytes", "planning"),
)
MEMORY = (
    ("embedding_device_bytes", "embeddings"),
    ("peak_device_bytes", "peak"),
)


def plot(path: Path, modes: dict[str, list[ModeRun]]) -> bool:
    """Draw the picture; False, with a warning, where matplotlib is missing or nothing ran."""
    if not modes:
        return False
    figure = new_figure(13, 9)
    if figure is None:
        return False
    panels = figure.subplots(2, 2)
    draw_losses(panels[0][0], modes)
    draw_throughput(panels[0][1], modes)
    draw_bars(panels[1][0], modes, MEMORY, 2**20, "device memory per rank, MiB", _total)
    draw_bars(panels[1][1], modes, LINKS, 2**10, "KiB per step by link", _per_step)
    figure.savefig(path, dpi=110)
    return True


def draw_losses(panel: Any, modes: dict[str, list[ModeRun]]) -> None:
    """Losses over each other, in dashes that interleave: equal curves look like one of all."""
    dash = 5.0
    for order, (mode, runs) in enumerate(modes.items()):
        losses = sorted(runs[0].losses().items())
        steps, values = [step for step, _ in losses], [value for _, value in losses]
        style: Any = "solid"
        if len(modes) > 1:
            style = (-order * dash, (dash, dash * (len(modes) - 1)))
        panel.plot(steps, values, color=_colour(mode), linestyle=style, linewidth=2)
        panel.plot([], [], color=_colour(mode), linewidth=2, label=mode)  # a solid legend
    panel.set(title="training loss", xlabel="step", ylabel="mean loss of the global batch")
    panel.legend()
    _tidy(panel)


def draw_throughput(panel: Any, modes: dict[str, list[ModeRun]]) -> None:
    """Samples per second; the lines span the noise range of the step time."""
    told = False
    for place, (mode, runs) in enumerate(modes.items()):
        rates = [value for run in runs if (value := run.number("samples_per_second")) is not None]
        if not rates:
            continue
        rate = statistics.median(rates)
        panel.bar(place, rate, 0.6, color=_colour(mode))
        scatter, batch = spread(runs), runs[0].number("global_batch_size")
        if scatter is not None and batch:
            told = True
            ends = [1000 * batch / scatter.high, 1000 * batch / scatter.low]
            panel.vlines(place, *ends, color="black", linewidth=1.5)
            panel.hlines(ends, place - 0.08, place + 0.08, color="black", linewidth=1.5)
        size = 8 if len(modes) > 4 else 10  # the bars are narrower then
        panel.text(
            place, 0.02 * rate, f"{rate:,.0f}", ha="center", va="bottom", color="white", size=size
        )
    panel.set_xticks(range(len(modes)), list(modes))
    panel.yaxis.set_major_formatter("{x:,.0f}")
    noise = "the line spans the noise" if told else "noise unknown: too few steps"
    panel.set(title=f"throughput ({noise})", ylabel="samples/s")
    _tidy(panel)


def draw_bars(
    panel: Any,
    modes: dict[str, list[ModeRun]],
    keys: Sequence[tuple[str, str]],
    unit: float,
    title: str,
    read: Callable[[ModeRun, str], float | None],
) -> None:
    """A group of bars per key, a bar per mode; logarithmic where values lie far apart."""
    width, upright = 0.8 / len(modes), len(keys) * len(modes) <= 12
    seen = []
    for order, (mode, runs) in enumerate(modes.items()):
        for place, (key, _) in enumerate(keys):
            value = read(runs[0], key)
            x = place + (order - (len(modes) - 1) / 2) * width
            if not value:
                text = "n/a" if value is None else "0"
                panel.annotate(
                    text,
                    (x, 0.01),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    color=_colour(mode),
                    fontsize=8,
                    rotation=0 if upright else 90,
                )
                continue
            seen.append(value / unit)
            label = mode if place == 0 else None
            panel.bar(x, value / unit, 0.92 * width, color=_colour(mode), label=label)
            panel.annotate(
                _short(value / unit),
                (x, value / unit),
                xytext=(0, 2 if upright else 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                rotation=0 if upright else 90,
            )
    far = bool(seen) and max(seen) > 20 * min(seen)
    if far:
        panel.set_yscale("log")
        panel.set_ylim(min(seen) / 4, max(seen) * 3)
    else:
        panel.margins(y=0.15)
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set_xlim(-0.5, len(keys) - 0.5)
    panel.set_xticks(range(len(keys)), [label for _, label in keys])
    panel.set(title=f"{title}{' (logarithmic)' if far else ''}")
    _tidy(panel)


def _total(run: ModeRun, key: str) -> float | None:
    return run.number(key)


def _per_step(run: ModeRun, key: str) -> float | None:
    return run.per_step(key)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _colour(mode: str) -> str:
    return COLOURS.get(mode, "#555555")


def _tidy(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
