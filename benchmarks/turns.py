"""Interleaved measurement: contenders in turns, medians with their spread, ratios within a turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.report import Column, Section

Name = TypeVar("Name")
Result = TypeVar("Result")
Spread = dict[str, float | int | None]


def take_turns(
    contenders: Mapping[Name, Callable[[int], Result]],
    repetitions: int,
    before: Callable[[int], object] = lambda repetition: None,
) -> dict[Name, list[Result]]:
    """What each contender gives in every repetition; each time another one begins, so that nobody
    always follows the same one. `before`: called ahead of each repetition."""
    names = list(contenders)
    found: dict[Name, list[Result]] = {name: [] for name in names}
    for repetition in range(repetitions):
        before(repetition)
        start = repetition % max(len(names), 1)
        for name in [*names[start:], *names[:start]]:
            found[name].append(contenders[name](repetition))
    return found


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles, least and largest of `values`, and how many; None where there are none."""
    names = ("min", "q1", "median", "q3", "max")
    if not len(values):
        return {**dict.fromkeys(names), "count": 0}
    cuts = np.percentile(np.asarray(values, dtype=np.float64), [0, 25, 50, 75, 100])
    return {
        **{name: float(cut) for name, cut in zip(names, cuts, strict=True)},
        "count": len(values),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio per repetition."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def ratio_record(
    above: str, below: str, values: Mapping[str, Sequence[float]], **more: Any
) -> dict[str, Any]:
    """The record of two contenders' ratio, from the `values` of each by repetition."""
    found = ratios(values[above], values[below])
    pair = {"kind": "ratio", "numerator": above, "denominator": below, **more}
    return {**pair, "repetitions": found, "ratio": spread(found)}


def medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each key over those that have it."""
    names = dict.fromkeys(name for value in values for name in value)
    return {name: float(np.median([v[name] for v in values if name in v])) for name in names}


def shown(digits: int = 2, scale: float = 1.0) -> Callable[[Spread], str]:
    """How a `spread` is shown: `median [q1, q3]`, each times `scale`."""

    def show(values: Spread) -> str:
        if values["median"] is None:
            return "-"
        cuts = (scale * float(values[name] or 0.0) for name in ("median", "q1", "q3"))
        median, low, high = (f"{cut:,.{digits}f}" for cut in cuts)
        return f"{median} [{low}, {high}]"

    return show


def shown_range(digits: int = 2) -> Callable[[Spread], str]:
    """How the range of a `spread` is shown: `least to largest`."""
    return lambda values: f"{values['min']:,.{digits}f} to {values['max']:,.{digits}f}"


RATIO_COLUMNS = (
    Column("pair", lambda record: f"{record['numerator']} / {record['denominator']}"),
    Column("ratio", "ratio", shown(3)),
    Column("range", "ratio", shown_range(3)),
)
"""Those of `ratio_record`s."""

RATIOS = Section(
    "Ratios",
    "Of the median steps of two turns over the same batches: median [quartiles] over the "
    "repetitions, and the range.",
    "ratio",
    RATIO_COLUMNS,
)
"""The table of `ratio_record`s."""
