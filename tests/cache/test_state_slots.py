"""A cache with optimizer state in some slots alone: those of the own home, and sharded ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from distcache.cache import FOREIGN, DeviceCache, StateSlots
from distcache.errors import PlanError

DIM, WIDTH = 4, 3
SLOTS = StateSlots(first=6, count=3, tail=9)
"""Three homes with three replicated slots each, of which this one is the last, and sharded slots
from 9 on."""


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def values(rows: list[int], width: int, sign: int = 1) -> Tensor:
    return (sign * torch.tensor(rows, dtype=torch.float64)[:, None] * 10) + torch.arange(width)


@pytest.fixture(params=[0, WIDTH])
def cache(request: pytest.FixtureRequest) -> DeviceCache:
    return DeviceCache(13, DIM, request.param, torch.float64, "cpu", state_slots=SLOTS)


def state_of(cache: DeviceCache, rows: list[int]) -> Tensor | None:
    return values(rows, WIDTH, -1) if cache.state_width else None


def test_state_lies_once_for_each_slot_that_has_one() -> None:
    assert SLOTS.rows(13) == 3 + 4
    assert SLOTS.of(np.array([6, 8, 9, 12])).tolist() == [0, 2, 3, 6]
    cache = DeviceCache(13, DIM, WIDTH, torch.float64, "cpu", state_slots=SLOTS)
    assert cache.weight.shape == (13, DIM) and cache.state.shape == (7, WIDTH)
    assert cache.device_bytes == (13 * DIM + 7 * WIDTH) * 8


def test_own_rows_come_with_state_and_those_of_others_without(cache: DeviceCache) -> None:
    slots, rows = ints(0, 7, 3, 6), [50, 71, 53, 60]
    names = np.array([FOREIGN, 71, FOREIGN, 60])
    cache.fill(slots, names, values(rows, DIM), state_of(cache, [71, 60]))
    cache.fill(ints(12, 9), ints(92, 95), values([92, 95], DIM), state_of(cache, [92, 95]))
    assert torch.equal(cache.gather(slots), values(rows, DIM))
    weight, state = cache.read(ints(6, 9, 7, 12))
    assert torch.equal(weight, values([60, 95, 71, 92], DIM))
    if cache.state_width:
        assert torch.equal(state, values([60, 95, 71, 92], WIDTH, -1))
    else:
        assert state is None
    cache.mark_dirty(ints(0, 6, 12))
    left, leaving = cache.evict(ints(6, 7, 12), ints(60, 71, 92))
    assert left.tolist() == [6, 12] and leaving.tolist() == [60, 92]
    weight, state = cache.read(left)
    assert torch.equal(weight, values([60, 92], DIM))
    if state is not None:
        assert torch.equal(state, values([60, 92], WIDTH, -1))


def test_parts_are_views_whose_changes_are_those_of_the_slots(cache: DeviceCache) -> None:
    cache.fill(ints(6, 8), ints(60, 80), values([60, 80], DIM), state_of(cache, [60, 80]))
    cache.fill(ints(10), ints(100), values([100], DIM), state_of(cache, [100]))
    for part, slot in ((slice(6, 9), 8), (slice(9, 13), 10)):
        weight, state = cache.part(part)
        assert len(weight) == part.stop - part.start
        weight[slot - part.start] += 1000
        if state is not None:
            assert len(state) == len(weight)
            state[slot - part.start] -= 1000
    weight, state = cache.read(ints(6, 8, 10))
    shift = torch.tensor([0.0, 1000, 1000], dtype=torch.float64)[:, None]
    assert torch.equal(weight, values([60, 80, 100], DIM) + shift)
    if state is not None:
        assert torch.equal(state, values([60, 80, 100], WIDTH, -1) - shift)


def test_state_for_rows_of_other_homes_is_refused() -> None:
    cache = DeviceCache(13, DIM, WIDTH, torch.float64, "cpu", state_slots=SLOTS)
    names = np.array([FOREIGN, 60])
    with pytest.raises(PlanError, match=r"state for .* must be \(\(1, 3\)"):
        cache.fill(ints(0, 6), names, values([0, 60], DIM), values([0, 60], WIDTH))
    assert (cache.slot_row < 0).all()


def test_a_cache_of_sharded_slots_alone_or_of_one_home() -> None:
    none_here = StateSlots(first=2, count=2, tail=4)
    assert none_here.rows(4) == 2 and none_here.of(np.array([2, 3])).tolist() == [0, 1]
    every = StateSlots(first=0, count=4, tail=4)
    assert every.rows(4) == 4 and every.of(np.arange(4)).tolist() == [0, 1, 2, 3]
