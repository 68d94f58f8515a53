"""Medians of any number of durations, in memory that stays the same."""

from __future__ import annotations

import random

import numpy as np

from distcache.parallel.base import Durations


def test_exact_while_all_are_kept_and_without_the_first() -> None:
    found, values = Durations(skip=3, keep=100), [9.0, 9.0, 9.0]
    assert found.percentiles((50,)) is None
    for value in values:
        assert not found.add(value)
    assert found.percentiles((50,)) is None and found.count == 0
    values = [random.Random(1).random() for _ in range(100)]
    assert all(found.add(value) for value in values)
    assert found.percentiles((50, 90)) == np.percentile(values, (50, 90)).tolist()
    assert (found.count, found.skipped) == (100, [9.0, 9.0, 9.0])


def test_beyond_that_a_uniform_sample() -> None:
    """Values 0 to N - 1, so that a value is its own place among all; in rising order, as when a
    run grows slower, and in random order."""
    keep, many = 1_000, 50_000
    shuffled = list(range(many))
    random.Random(2).shuffle(shuffled)
    for values in (range(many), shuffled):
        found = Durations(skip=0, keep=keep)
        for value in values:
            found.add(float(value))
        assert len(found.kept) == keep and len(set(found.kept)) == keep
        assert (found.count, found.total) == (many, many * (many - 1) / 2)
        for share in (0.5, 0.9):
            deviation = (share * (1 - share) / keep) ** 0.5
            (place,) = found.percentiles((100 * share,))
            assert abs(place / many - share) < 4 * deviation
        eighths = np.histogram(found.kept, 8, (0, many))[0]
        assert np.abs(eighths - keep / 8).max() < 4 * (keep / 8 * 7 / 8) ** 0.5
