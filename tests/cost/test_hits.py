"""Hit rates from popularity, against the planner's own decisions on drawn rows; the miniature."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import demand, draw, layout

from distcache.cost import traffic as module
from distcache.cost.traffic import expected_hits, miniature
from distcache.planner.victims import DEFAULT
from distcache.replay import Case, replay
from distcache.trace import record_ids

WORLD, STEPS = 2, 120


@pytest.fixture(scope="module")
def trace():
    """Drawn rows, all ranks' one after the other."""
    steps = [np.concatenate(step) for step in draw(WORLD, STEPS, 11)]
    return record_ids(steps, layout(WORLD).rows, (WORLD,))


@pytest.mark.parametrize("slots", [700, 1000, 2000, 5340])
def test_fetched_rows_are_about_those_of_the_planner(trace, slots: int) -> None:
    case = Case(DEFAULT, (slots // WORLD * WORLD,), 8, 1, WORLD)
    counted = replay(trace, [case])[0]
    assert counted.refused is None
    found = expected_hits(demand(WORLD).groups[0], slots, 8, 1, STEPS)
    assert found.touched == pytest.approx(counted.distinct / STEPS, rel=0.01)
    assert found.fetched == pytest.approx(counted.fetched / STEPS, rel=0.03)
    assert found.written_back == pytest.approx(
        counted.written_back / STEPS, abs=0.03 * found.fetched
    )
    assert 0 < found.rate < 1


def test_what_holds_everything_misses_only_what_is_new() -> None:
    groups = demand(WORLD).groups
    everything = float(sum(group.rows for group in groups))
    cold = expected_hits(groups[0], everything, 8, 1, 50)
    met = groups[0].tables
    seen = sum(float(t.count @ (1 - (1 - t.world) ** 50)) for t in met)
    assert cold.fetched == pytest.approx(seen / 50)
    assert cold.written_back == pytest.approx(0, abs=1e-9)
    warm = expected_hits(groups[0], everything, 8, 1)
    assert warm.fetched == pytest.approx(0, abs=1e-9) and warm.rate == pytest.approx(1)


def test_more_slots_and_longer_windows_miss_less() -> None:
    groups = demand(WORLD).groups
    by_slots = [expected_hits(groups[0], c, 8, 1).fetched for c in (300, 600, 1200, 2400, 4800)]
    assert by_slots == sorted(by_slots, reverse=True)
    assert expected_hits(groups[0], 900, 0, 1).fetched > expected_hits(groups[0], 900, 4, 1).fetched


def test_nothing_touched_is_nothing_missed() -> None:
    hot, _ = demand(WORLD).groups[0].split([0.0, 0.0, 0.0])
    found = expected_hits(hot, 0, 8, 1)
    assert (found.touched, found.fetched, found.rate) == (0.0, 0.0, 1.0)


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
