"""Medians with their spread; ratios are taken within a repetition, then summarised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
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


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """`names` from another start each turn, so that nobody always follows the same one."""
    start = turn % max(len(names), 1)
    return [*names[start:], *names[:start]]


def shown(values: dict[str, float | int | None], digits: int = 2) -> str:
    """`median [q1, q3]` of a `spread`."""
    if values["median"] is None:
        return "-"
    median, low, high = (f"{values[name]:,.{digits}f}" for name in ("median", "q1", "q3"))
    return f"{median} [{low}, {high}]"
