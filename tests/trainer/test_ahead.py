"""How far ahead `auto` goes, and what a number that memory cannot hold gets to hear."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from toy_parallel import TABLES, toy_config

from distcache.errors import MemoryTooSmallError
from distcache.planner.victims import WINDOW_BYTES, auto_lookahead
from distcache.trainer import plan_cache as ahead
from distcache.trainer.plan_cache import resolve_ahead, resolve_prefetch, step_bytes

BETWEEN = 5
"""Steps beside L and P: one trains, two have plans and have not moved, one waits for its place in
their queue, and one beyond the window has been read."""


class Known:
    """A source whose steps have 10 ids per sample and table, and 12 distinct rows per table."""

    dense_features = 3

    def lookups_per_sample(self, table: int) -> float:
        return 10.0

    def expected_distinct(self, table: int, lookups: int) -> float:
        return 12.0


def ahead_of(world, slots=(1000,), source=None, **changes) -> tuple[int, int]:
    source = source or Known()
    found = resolve_ahead(toy_config(**changes), world, source, TABLES)
    return found.cache.lookahead, resolve_prefetch(found, source, TABLES, slots)


def test_auto_and_numbers_where_all_fits(world) -> None:
    assert ahead_of(world) == (64, 1)
    assert ahead_of(world, cache__lookahead=3, cache__prefetch=5) == (3, 5)
    assert ahead_of(world, cache__lookahead=0) == (0, 1)
    assert ahead_of(world, source=object()) == (64, 1)


def test_auto_is_the_largest_window_whose_ids_stay_small(world) -> None:
    least = {8: 10, 16: 18, 32: 34, 64: 66}  # L + P + 1
    for window, steps in least.items():
        ids = WINDOW_BYTES // 8 // steps
        assert auto_lookahead(ids, 1) == window
        assert auto_lookahead(ids + 1, 1) == max(8, window // 2)
    assert auto_lookahead(WINDOW_BYTES, 0) == 8
    first = SimpleNamespace(ids_per_step=400_000)  # of a user's loader
    assert ahead_of(world, source=first) == (16, 1)
    assert ahead_of(world, source=first, cache__prefetch=5) == (8, 5)


@pytest.mark.parametrize("change", [{"parallel__mode": "resident"}, {"cache__policy": "lru"}])
def test_where_no_window_decides_what_leaves_auto_is_small(world, change) -> None:
    assert ahead_of(world, **change)[0] == 8


@pytest.mark.parametrize(("slots", "prefetch"), [(24, 0), (47, 0), (48, 1), (500, 1)])
def test_slots_for_two_steps_let_rows_move_one_step_ahead(world, slots, prefetch) -> None:
    assert ahead_of(world, slots=(slots,)) == (64, prefetch)


@pytest.mark.parametrize(
    ("steps", "expected"), [(20, (16, 1)), (8, (7, 1)), (1, (0, 1)), (0, (0, 0))]
)
def test_auto_takes_what_memory_holds(world, monkeypatch, steps, expected) -> None:
    each = step_bytes(Known(), TABLES, 16, world)
    monkeypatch.setattr(ahead, "available_memory", lambda: 2 * (steps + BETWEEN) * each)
    assert ahead_of(world) == expected


def test_a_number_that_memory_does_not_hold_is_refused_with_what_fits(world, monkeypatch) -> None:
    each = step_bytes(Known(), TABLES, 16, world)
    assert each == 16 * (2 * 10 * 64 + 4 * 4)
    monkeypatch.setattr(ahead, "available_memory", lambda: 2 * (6 + BETWEEN) * each)
    assert ahead_of(world, cache__lookahead=5, cache__prefetch=1) == (5, 1)
    assert ahead_of(world, cache__prefetch=4) == (2, 4)
    with pytest.raises(MemoryTooSmallError) as caught:
        ahead_of(world, cache__lookahead=30)
    assert "cache.lookahead=30: 31 steps ahead" in str(caught.value)
    assert "6 do: lower cache.lookahead" in str(caught.value)
    with pytest.raises(MemoryTooSmallError, match=r"cache.lookahead=6, cache.prefetch=3: 9 steps"):
        ahead_of(world, cache__lookahead=6, cache__prefetch=3)


@pytest.mark.parametrize(
    ("backend", "gpus", "steps"),
    [("gloo", 1, 20), ("gloo", 2, 45), ("gloo", 4, 95), ("nccl", 1, 95)],
)
def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch, backend, gpus, steps) -> None:
    monkeypatch.setattr(ahead, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200_000, 1 << 40))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world = SimpleNamespace(device=torch.device("cuda", 0), local_size=4, backend=backend)
    assert ahead._room(1000, world) == steps
