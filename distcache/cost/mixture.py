"""How popular the rows behind small counts are: those seen a few times, and those not seen yet.

A row that was counted c times is not one that is used c times as a rule: of rows counted once most
are used less often, and some of those not counted will be used. What all counts say together is
the mixture of rates that makes them likeliest (Kiefer and Wolfowitz 1956; found by EM, Laird 1978).
"""

from __future__ import annotations

import numpy as np

from distcache.cost.demand import Reuse, TableDemand

FEW = 32
"""Rows counted more often are taken to be as popular as their counts say (within 18 %)."""

_PER_OCTAVE = 4
_ROUNDS = 400
_LEAST = 1e-3
"""Rates on a grid, so many per doubling; rounds of EM; shares of a count's rows below which a rate
is left out."""


def with_mixture(
    table: TableDemand, uses: np.ndarray, counted: float, by_step: bool = False
) -> Reuse | None:
    """A table's rows as a cache will meet them, over `counted` steps as many as were counted.

    `uses` float64 `[k]`: how often the rows of each bucket were counted, whole numbers; by lookup,
    or `by_step`: in how many of the `counted` steps. Rows counted c <= `FEW` times (of steps: in
    half of them at most) have the rates m that those counts leave likely, by Poisson's law with
    mean m (of steps: binomial with Q = 1 - exp(-m / S)). As likelihoods are highest where as many
    rows have each count as there are, the rows that `counted` steps of the mixture touch, the sum
    of 1 - (1 - Q)^S, are as many as were counted, and so are those of fewer steps. All rows of the
    table take part, for how many were not counted is known; Q is scaled so that a step touches what
    it did. None where there are no such rows.
    """
    few = min(FEW, int(counted / 2)) if by_step else FEW
    low, kept = np.flatnonzero(uses <= few), np.flatnonzero(uses > few)
    touched = float(table.count[low] @ table.world[low])
    if few < 1 or not touched:
        return None
    seen = float(table.count.sum())
    rows = np.append(table.count[low], max(table.rows - seen, 0.0))
    counts = np.append(np.rint(uses[low]), 0.0).astype(np.int64)
    start = np.append(table.start[low], seen)
    end = np.append(table.end[low], max(float(table.rows), seen))
    rates = _rates(table.rows, few, counted, by_step)
    chance = -np.expm1(-rates / counted)
    kernel = _binomial(few, counted, chance) if by_step else _poisson(few, rates)
    shares = _posterior(np.bincount(counts, rows, few + 1), kernel)[counts]
    shares[shares < _LEAST] = 0.0
    shares /= shares.sum(axis=1, keepdims=True)
    bucket, rate = np.nonzero(shares * rows[:, None])
    count, found = rows[bucket] * shares[bucket, rate], chance[rate]
    return Reuse(
        np.concatenate((table.count[kept], count)),
        np.concatenate((table.world[kept], found * (touched / float(count @ found)))),
        np.concatenate((table.start[kept], start[bucket])),
        np.concatenate((table.end[kept], end[bucket])),
    )


def _rates(rows: int, few: int, counted: float, by_step: bool) -> np.ndarray:
    """Expected counts, up to those of the rows counted `few` times; float64 `[m]`, rising. With the
    lowest, all rows of the table together would be counted once."""
    top = -counted * np.log1p(-few / counted) if by_step else float(few)
    number = int(np.ceil(_PER_OCTAVE * np.log2(max(top * rows, 2.0))))
    return top * 2.0 ** (-np.arange(number, -1, -1) / _PER_OCTAVE)


def _log_factorials(few: int) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, few + 1)))))


def _poisson(few: int, rates: np.ndarray) -> np.ndarray:
    """Probability of the counts 0 to `few` by rate; float64 `[few + 1, m]`."""
    counts = np.arange(few + 1)[:, None]
    return np.exp(counts * np.log(rates) - rates - _log_factorials(few)[:, None])


def _binomial(few: int, steps: float, chance: np.ndarray) -> np.ndarray:
    """The same of steps that a row is named in, up to a factor of each count."""
    counts = np.arange(few + 1)[:, None]
    ways = np.cumprod(np.append(1.0, (steps - np.arange(few)) / np.arange(1, few + 1)))
    return ways[:, None] * np.exp(counts * np.log(chance) + (steps - counts) * np.log1p(-chance))


def _posterior(rows: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Shares `[few + 1, m]` of the rates among rows of each count, of which there are `rows`."""
    weights = np.full(kernel.shape[1], 1.0 / kernel.shape[1])
    share = rows / rows.sum()
    for _ in range(_ROUNDS):
        weights *= (share / np.maximum(kernel @ weights, 1e-300)) @ kernel
        weights /= weights.sum()
    joint = kernel * weights
    return joint / np.maximum(joint.sum(axis=1, keepdims=True), 1e-300)
