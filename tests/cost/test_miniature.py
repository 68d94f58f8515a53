"""A small copy of a run, beside the planner on all of its rows."""

from __future__ import annotations

import numpy as np
import pytest

from distcache.cost import traffic as module
from distcache.cost.traffic import miniature

ROWS = np.array([1.0, 3.0, 50.0, 400.0, 3000.0, 20000.0])
CHANCE = np.array([1.0, 0.9, 0.3, 0.05, 0.02, 0.001])
AHEAD = (4, 1)


def test_a_share_of_the_rows_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = miniature(ROWS, CHANCE, 1500, AHEAD, 200)
    monkeypatch.setattr(module, "USES", module.USES // 50)
    part = miniature(ROWS, CHANCE, 1500, AHEAD, 200)
    assert whole is not None and part is not None
    assert 0 < part.steps <= whole.steps == 200
    again = miniature(ROWS, CHANCE, 1500, AHEAD, part.steps)
    monkeypatch.undo()
    whole = miniature(ROWS, CHANCE, 1500, AHEAD, part.steps)
    assert again == part and whole is not None and part.again != whole.again
    assert part.again == pytest.approx(whole.again, rel=0.1)


def test_rows_drawn_are_those_of_their_chances() -> None:
    rate = np.minimum(-np.log1p(-np.minimum(CHANCE, 1 - 1e-12)), 8.0)
    drawn = module._draw(ROWS, rate, 300)
    assert len(drawn) == 300
    assert all((np.diff(rows) > 0).all() for rows in drawn)
    assert np.mean([len(rows) for rows in drawn]) == pytest.approx(ROWS @ CHANCE, rel=0.02)
    seen = ROWS @ (1 - (1 - CHANCE) ** 300)
    assert len(np.unique(np.concatenate(drawn))) == pytest.approx(seen, rel=0.02)


def test_nothing_comes_again_where_nothing_leaves() -> None:
    found = miniature(ROWS, CHANCE, 30_000, AHEAD, 100)
    assert found is not None and found.again == 0


def test_steps_that_do_not_fit_have_no_miniature() -> None:
    assert miniature(ROWS, CHANCE, 60, AHEAD, 100) is None
