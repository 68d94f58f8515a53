"""The device cache: what it holds, what is dirty, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distcache.cache import FOREIGN, FREE, DeviceCache, StateSlots
from distcache.errors import MemoryTooSmallError, PlanError
from distcache.store import memory as available

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
DIM = 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows_of(rows: Tensor, version: int, state_width: int) -> tuple[Tensor, Tensor | None]:
    """Weight and state that tell row and version."""
    weight = (rows[:, None] * 1000 + version * 10 + torch.arange(DIM)).double()
    if not state_width:
        return weight, None
    return weight, (-rows[:, None] * 1000.0 - version - torch.arange(state_width)).double()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[0, 1, 8])
def cache(request: pytest.FixtureRequest, device: str) -> DeviceCache:
    return DeviceCache(10, DIM, request.param, torch.float64, device)


def fill(cache: DeviceCache, slots: Tensor, rows: Tensor, version: int = 0) -> None:
    cache.fill(slots, rows, *rows_of(rows, version, cache.state_width))


def assert_rows(cache: DeviceCache, slots: Tensor, rows: Tensor, version: int) -> None:
    """Slots hold these rows' values, in weight and state."""
    weight, state = cache.read(slots)
    want, want_state = rows_of(rows, version, cache.state_width)
    assert weight.device.type == cache.device.type
    assert torch.equal(weight.cpu(), want)
    assert torch.equal(cache.gather(slots).cpu(), want)
    if want_state is None:
        assert state is None
    else:
        assert torch.equal(state.cpu(), want_state)


def test_new_cache_is_empty(cache: DeviceCache) -> None:
    assert cache.slots == 10
    assert cache.weight.shape == (10, DIM)
    assert type(cache.weight) is Tensor and not cache.weight.requires_grad
    assert cache.slot_row.tolist() == [FREE] * 10 and cache.slot_row.dtype == np.int64
    assert not cache.dirty.any()
    assert cache.device_bytes == 10 * (DIM + cache.state_width) * 8
    assert len(cache.dirty_slots()) == 0


def write(cache: DeviceCache, slots, weight, state) -> None:
    """Change rows in place, as an optimizer does."""
    at = torch.as_tensor(slots).to(cache.device)
    cache.weight.index_copy_(0, at, weight.to(cache.device))
    if cache.state is not None:
        cache.state.index_copy_(0, at, state.to(cache.device))
    cache.mark_dirty(slots)


def test_numpy_indices_and_nothing_to_do(cache: DeviceCache) -> None:
    empty = np.empty(0, dtype=np.int64)
    cache.fill(empty, empty, *rows_of(torch.from_numpy(empty), 0, cache.state_width))
    write(cache, empty, *rows_of(torch.from_numpy(empty), 0, cache.state_width))
    assert cache.gather(empty).shape == (0, DIM)
    assert [len(part) for part in cache.evict(empty, empty)] == [0, 0]
    slots, rows = np.array([3, 4]), np.array([8, 9])
    cache.fill(slots, rows, *rows_of(torch.from_numpy(rows), 2, cache.state_width))
    assert_rows(cache, ints(3, 4), ints(8, 9), 2)
    slots[:] = 0
    assert cache.slot_row.tolist() == [FREE] * 3 + [8, 9] + [FREE] * 5


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40])
@pytest.mark.parametrize("method", ["fill", "read", "gather", "mark_dirty", "evict", "clean"])
def test_slot_out_of_range(cache: DeviceCache, method: str, bad: int) -> None:
    fill(cache, ints(0), ints(5))
    slots, rows = ints(0, bad), ints(5, 6)
    values = rows_of(rows, 1, cache.state_width)
    args = {"fill": (rows, *values), "evict": (rows,)}.get(method, ())
    with pytest.raises(PlanError, match=f"slot {bad} is outside \\[0, 10\\)"):
        getattr(cache, method)(slots, *args)
    assert_rows(cache, ints(0), ints(5), 0)
    assert cache.slot_row[0] == 5 and not cache.dirty.any()


def test_refusals_name_slot_and_row_and_change_nothing(cache: DeviceCache) -> None:
    fill(cache, ints(3, 4), ints(30, 40))
    new = rows_of(ints(50, 60), 1, cache.state_width)
    with pytest.raises(PlanError, match=r"slot 4 still holds row 40.*row 60"):
        cache.fill(ints(5, 4), ints(50, 60), *new)
    with pytest.raises(PlanError, match="slot 5 is given twice, to row 50"):
        cache.fill(ints(5, 5), ints(50, 60), *new)
    with pytest.raises(PlanError, match="slot 4 holds row 40, but row 41"):
        cache.evict(ints(3, 4), ints(30, 41))
    with pytest.raises(PlanError, match="slot 6 is free, but row 60"):
        cache.evict(ints(3, 6), ints(30, 60))
    with pytest.raises(PlanError, match="slot 6 holds no row: nothing to change"):
        cache.mark_dirty(ints(3, 6))
    with pytest.raises(PlanError, match="slot 6 holds no row: nothing to read"):
        cache.gather(ints(6))
    with pytest.raises(PlanError, match="slot 6 cannot hold row -3"):
        cache.fill(ints(5, 6), ints(50, -3), *new)
    with pytest.raises(PlanError, match="2 slots for 1 rows"):
        cache.evict(ints(3, 4), ints(30))
    assert cache.slot_row.tolist() == [FREE] * 3 + [30, 40] + [FREE] * 5
    assert_rows(cache, ints(3, 4), ints(30, 40), 0)
    assert not cache.dirty.any()


def test_wrong_index_and_value_forms(cache: DeviceCache) -> None:
    weight, state = rows_of(ints(1, 2), 0, cache.state_width)
    with pytest.raises(PlanError, match="slots must be int64"):
        cache.read(torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(PlanError, match="rows must be int64"):
        cache.fill(ints(1, 2), torch.tensor([[1], [2]]), weight, state)
    with pytest.raises(PlanError, match="weight for 2 slots"):
        cache.fill(ints(1, 2), ints(1, 2), weight[:, :3], state)
    with pytest.raises(PlanError, match="weight for 2 slots"):
        cache.fill(ints(1, 2), ints(1, 2), weight.float(), state)
    wrong = torch.zeros(2, cache.state_width + 1, dtype=torch.float64)
    with pytest.raises(PlanError, match="state for 2 slots"):
        cache.fill(ints(1, 2), ints(1, 2), weight, wrong)
    assert (cache.slot_row == FREE).all()


def test_host_memory_is_checked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DeviceCache(4, DIM, 2, torch.float32, "cpu")
    fill_bits = cache.weight.clone()
    monkeypatch.setattr(available, "available_memory", lambda: 6 * 4 * 100 - 1)
    with pytest.raises(MemoryTooSmallError) as caught:
        cache.ensure(100)
    assert cache.slots == 4 and torch.equal(cache.weight, fill_bits)
    for part in ("(2400 bytes)", "(2399 bytes)", "100 slots x (4 + 2 of state)", "cache.rows"):
        assert part in str(caught.value)
    cache.ensure(99)


def test_refusal_of_the_allocator_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("out of memory. Tried\nlong story")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(MemoryTooSmallError) as caught:
        DeviceCache(1 << 20, DIM, 4, torch.float32, "cpu")
    for part in ("cpu did not give 32.00 MiB (33554432 bytes)", "1048576 slots", "cache.rows"):
        assert part in str(caught.value)
    assert "long story" not in str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@examples(60)
@given(st.data())
def test_against_a_dictionary(device: str, data: st.DataObject) -> None:
    """Random fills, writes and evictions: the cache is a dictionary slot -> (row, version)."""
    state_width = data.draw(st.sampled_from([0, 3]))
    cache = DeviceCache(6, DIM, state_width, torch.float64, device)
    held: dict[int, tuple[int, int]] = {}
    dirty: set[int] = set()
    next_row = 0
    for version in range(1, data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["fill", "write", "evict", "clean", "ensure"]))
        pool = sorted(set(range(cache.slots)) - set(held)) if action == "fill" else sorted(held)
        slots = data.draw(st.permutations(pool))[: data.draw(st.integers(0, len(pool)))]
        at = ints(*slots)
        rows = ints(*(held[slot][0] for slot in slots if slot in held))
        if action == "fill":
            rows = ints(*range(next_row, next_row + len(slots)))
            next_row += len(slots)
            fill(cache, at, rows, version)
            held |= {slot: (int(row), version) for slot, row in zip(slots, rows, strict=True)}
        elif action == "write":
            write(cache, at, *rows_of(rows, version, state_width))
            held |= {slot: (held[slot][0], version) for slot in slots}
            dirty |= set(slots)
        elif action == "evict":
            out_slots, out_rows = cache.evict(at, rows)
            assert set(out_slots.tolist()) == dirty & set(slots)
            assert out_rows.tolist() == [held[slot][0] for slot in out_slots.tolist()]
            for slot in slots:
                del held[slot]
            dirty -= set(slots)
        elif action == "clean":
            cache.clean(at)
            dirty -= set(slots)
        else:
            cache.ensure(min(cache.slots + version, 20))
        assert cache.dirty_slots().tolist() == sorted(dirty)
        assert np.flatnonzero(cache.slot_row != FREE).tolist() == sorted(held)
        for slot, (row, then) in held.items():
            assert cache.slot_row[slot] == row
            assert_rows(cache, ints(slot), ints(row), then)


def test_rows_of_other_homes_come_and_go_without_a_name() -> None:
    cache = DeviceCache(4, 2, 0, torch.float32, "cpu")
    one, two = torch.ones(2, 2), torch.full((2, 2), 2.0)
    cache.fill(ints(0, 1), ints(7, FOREIGN), one, None)
    cache.mark_dirty(ints(0, 1))
    cache.fill(ints(1, 2), ints(FOREIGN, FOREIGN), two, None)
    assert cache.slot_row.tolist() == [7, FOREIGN, FOREIGN, FREE]
    assert cache.dirty.tolist() == [True, False, False, False]
    assert cache.gather(ints(0, 1, 2))[:, 0].tolist() == [1.0, 2.0, 2.0]
    with pytest.raises(PlanError, match="slot 0 still holds row 7"):
        cache.fill(ints(0), ints(9), one[:1], None)


# Optimizer state in some slots alone: those of the own home, and sharded ones.

WIDTH = 3
SLOTS = StateSlots(first=6, count=3, tail=9)
"""Three homes with three replicated slots each, of which this one is the last, and sharded slots
from 9 on."""


def values(rows: list[int], width: int, sign: int = 1) -> Tensor:
    return (sign * torch.tensor(rows, dtype=torch.float64)[:, None] * 10) + torch.arange(width)


@pytest.fixture(params=[0, WIDTH])
def partial(request: pytest.FixtureRequest) -> DeviceCache:
    """A cache with state in some slots alone."""
    return DeviceCache(13, DIM, request.param, torch.float64, "cpu", state_slots=SLOTS)


def state_of(cache: DeviceCache, rows: list[int]) -> Tensor | None:
    return values(rows, WIDTH, -1) if cache.state_width else None


def test_state_lies_once_for_each_slot_that_has_one() -> None:
    assert SLOTS.rows(13) == 3 + 4
    assert SLOTS.of(np.array([6, 8, 9, 12])).tolist() == [0, 2, 3, 6]
    cache = DeviceCache(13, DIM, WIDTH, torch.float64, "cpu", state_slots=SLOTS)
    assert cache.weight.shape == (13, DIM) and cache.state.shape == (7, WIDTH)
    assert cache.device_bytes == (13 * DIM + 7 * WIDTH) * 8


def test_own_rows_come_with_state_and_those_of_others_without(partial: DeviceCache) -> None:
    cache = partial
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


def test_parts_are_views_whose_changes_are_those_of_the_slots(partial: DeviceCache) -> None:
    cache = partial
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
