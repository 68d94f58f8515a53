"""What the planner does with drawn rows: a small copy of a run from its first step on.

Where popularity must be learnt, rows are kept that a planner who knew it would not keep, and the
other way round. How often depends on all of the policy, so the policy itself decides here: a share
R of the rows, drawn by their popularity, and R times the slots (Waldspurger et al., "Cache modeling
and optimization using miniature simulations", USENIX ATC 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distcache.errors import StepTooLargeError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner
from distcache.replay import HomeRun

USES = 400_000
"""Uses of rows that are drawn at most."""

_SLOTS = 1000
"""Slots that the copy has at least; it has fewer steps where it would have fewer slots."""

_SURE = 8.0
"""Rows are drawn with at most so many uses in a step: as good as always named."""


@dataclass(frozen=True)
class Miniature:
    """Over `steps` steps, scaled up: rows fetched `again`, as they had left."""

    steps: int
    again: float


def miniature(
    rows: np.ndarray, chance: np.ndarray, slots: float, ahead: tuple[int, int], steps: int
) -> Miniature | None:
    """The default policy over at most `steps` steps from an empty cache of `slots` slots.

    `rows[i]` rows are touched by a step with probability `chance[i]` each, independently; float64
    `[k]`; `ahead`: L and P. The same input gives the same counts. None where a step has more rows
    than slots.
    """
    rate = np.minimum(-np.log1p(-np.minimum(chance, 1.0 - 1e-12)), _SURE)
    uses = float(rows @ rate)
    least = min(_SLOTS / slots, 1.0)
    steps = int(min(steps, max(USES / (least * uses), 1.0)))
    share = min(USES / (steps * uses), 1.0)
    drawn = _draw(rows * share, rate, steps)
    try:
        again = _fetched_again(drawn, max(round(slots * share), 1), ahead)
    except StepTooLargeError:
        return None
    return Miniature(steps, again / share)


def _draw(rows: np.ndarray, rate: np.ndarray, steps: int) -> list[np.ndarray]:
    """Distinct rows of every step, numbered 0, 1, ...; int64.

    A row that each step names a Poisson number of times, `rate` on average, is named at all with
    its Q, each time independently. Of buckets of less than a row, every so many have one.
    """
    rng = np.random.default_rng(0)
    ends = np.floor(np.cumsum(rows) + 0.5)
    whole = np.diff(ends, prepend=0.0)
    number = rng.poisson(whole * rate * steps)
    bucket = np.repeat(np.arange(len(rows)), number)
    row = (ends - whole)[bucket] + np.floor(rng.random(len(bucket)) * whole[bucket])
    step = rng.integers(0, steps, len(bucket))
    _, row = np.unique(row, return_inverse=True)
    order = np.lexsort((row, step))
    row, step = row[order], step[order]
    first = np.append(True, (np.diff(row) != 0) | (np.diff(step) != 0))[: len(row)]
    row, step = row[first], step[first]
    return np.split(row, np.searchsorted(step, np.arange(1, steps)))


def _fetched_again(drawn: list[np.ndarray], slots: int, ahead: tuple[int, int]) -> int:
    """Rows that one home's planner fetches after the first time."""
    window, prefetch = ahead
    total = max((int(rows.max()) + 1 for rows in drawn if len(rows)), default=1)
    layout = RowLayout([TableSpec("drawn", total, 1, ("drawn",))], 1)
    run = HomeRun(HomePlanner(layout, 0, slots, prefetch))
    steps = run.over((("train", rows) for rows in drawn), window)
    fetched = sum(len(decision.fetch) for decision, _ in steps)
    return fetched - len(np.unique(np.concatenate(drawn)))
