"""Slots: how many a rank has, what they hold, what is dirty, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distcache.cache import FOREIGN, FREE, DeviceCache, StateSlots
from distcache.errors import MemoryTooSmallError, PlanError
from distcache.layout import RowKind
from distcache.popularity.slots import cache_bytes, cache_slots
from distcache.store import memory as available

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DIM = 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def kind_of(state_width: int, dtype: torch.dtype = torch.float64) -> RowKind:
    return RowKind(DIM, state_width, dtype, dtype)


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
    return DeviceCache(10, kind_of(request.param), device)


def fill(cache: DeviceCache, slots: Tensor, rows: Tensor, version: int = 0) -> None:
    cache.fill(slots, rows, *rows_of(rows, version, cache.state_width))


def write(cache: DeviceCache, slots, weight, state) -> None:
    """Change rows in place, as an optimizer does."""
    at = torch.as_tensor(slots).to(cache.device)
    cache.weight.index_copy_(0, at, weight.to(cache.device))
    if cache.state is not None:
        cache.state.index_copy_(0, at, state.to(cache.device))
    cache.mark_dirty(slots)


def assert_rows(cache: DeviceCache, slots: Tensor, rows: Tensor, version: int) -> None:
    """Slots hold these rows' values, in weight and state."""
    weight, state = cache.kind.parts(cache.read(slots))
    want, want_state = rows_of(rows, version, cache.state_width)
    assert weight.device.type == cache.device.type
    assert torch.equal(weight.cpu(), want)
    assert torch.equal(cache.gather(slots).cpu(), want)
    assert (state is None) == (want_state is None)
    assert state is None or torch.equal(state.cpu(), want_state)


def test_a_new_cache_is_empty_and_numpy_indices_are_copied(cache: DeviceCache) -> None:
    assert cache.slots == 10 and cache.weight.shape == (10, DIM)
    assert type(cache.weight) is Tensor and not cache.weight.requires_grad
    assert cache.slot_row.tolist() == [FREE] * 10 and cache.slot_row.dtype == np.int64
    assert not cache.dirty.any() and len(cache.dirty_slots()) == 0
    assert cache.device_bytes == 10 * (DIM + cache.state_width) * 8
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


def test_refusals_name_slot_and_row_and_change_nothing(cache: DeviceCache) -> None:
    fill(cache, ints(3, 4), ints(30, 40))
    for method in ("fill", "read", "gather", "mark_dirty", "evict", "clean"):
        for bad in (-1, 10, 1 << 40):
            rows = ints(30, 60)
            args = {"fill": (rows, *rows_of(rows, 1, cache.state_width)), "evict": (rows,)}
            with pytest.raises(PlanError, match=f"slot {bad} is outside \\[0, 10\\)"):
                getattr(cache, method)(ints(3, bad), *args.get(method, ()))
    with pytest.raises(PlanError, match=r"slot 4 still holds row 40.*row 60"):
        fill(cache, ints(5, 4), ints(50, 60), 1)
    with pytest.raises(PlanError, match="slot 4 holds row 40, but row 41"):
        cache.evict(ints(3, 4), ints(30, 41))
    with pytest.raises(PlanError, match="slot 6 is free, but row 60"):
        cache.evict(ints(3, 6), ints(30, 60))
    with pytest.raises(PlanError, match="slot 6 holds no row: nothing to change"):
        cache.mark_dirty(ints(3, 6))
    with pytest.raises(PlanError, match="slot 6 holds no row: nothing to read"):
        cache.gather(ints(6))
    assert cache.slot_row.tolist() == [FREE] * 3 + [30, 40] + [FREE] * 5
    assert_rows(cache, ints(3, 4), ints(30, 40), 0)
    assert not cache.dirty.any()
    cache.mark_dirty(ints(4))
    with pytest.raises(PlanError, match="slot 6 is free, but row 60"):
        cache.evict(ints(3, 4, 6), ints(30, 40, 60))
    assert cache.slot_row.tolist() == [FREE] * 3 + [30, 40] + [FREE] * 5
    assert cache.dirty_slots().tolist() == [4]


@pytest.mark.parametrize("validate", [False, True])
def test_slots_that_plans_name_are_looked_at_by_the_loops_alone(validate: bool) -> None:
    """Plans number slots by int32, of which no pass of its own asks whether they are inside."""
    cache = DeviceCache(10, kind_of(0), "cpu", validate=validate)
    fill(cache, ints(3, 4), ints(30, 40))
    for bad in (-1, 10, (1 << 31) - 1):
        slots, rows = ints(5, bad).int(), ints(50, 60)
        for own in (0, 1):  # the other is of another home
            with pytest.raises(PlanError, match=f"slot {bad} is outside \\[0, 10\\)"):
                cache.fill(slots, rows[own : own + 1], *rows_of(rows, 0, 0), first=own)
        with pytest.raises(PlanError, match=f"slot {bad} is outside \\[0, 10\\)"):
            cache.evict(ints(3, bad).int(), ints(30, 60))
        assert cache.slot_row.tolist() == [FREE] * 3 + [30, 40] + [FREE] * 5


def test_memory_that_is_not_there_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DeviceCache(4, kind_of(2, torch.float32), "cpu")
    fill_bits = cache.weight.clone()
    with monkeypatch.context() as patch:
        patch.setattr(available, "available_memory", lambda: 6 * 4 * 100 - 1)
        says = r"a cache of 100 slots x \(4 \+ 2 .*\(2400 bytes\).*\(2399 bytes\).*cache.rows"
        with pytest.raises(MemoryTooSmallError, match=says):
            cache.ensure(100)
        assert cache.slots == 4 and torch.equal(cache.weight, fill_bits)
        cache.ensure(99)

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("out of memory. Tried\nlong story")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(MemoryTooSmallError) as caught:
        DeviceCache(1 << 20, kind_of(4, torch.float32), "cpu")
    for part in ("cpu did not give 32.00 MiB (33554432 bytes)", "1048576 slots", "cache.rows"):
        assert part in str(caught.value)
    assert "long story" not in str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@examples(60)
@given(st.data())
def test_against_a_dictionary(device: str, data: st.DataObject) -> None:
    """Random fills, writes and evictions: the cache is a dictionary slot -> (row, version)."""
    state_width = data.draw(st.sampled_from([0, 3]))
    cache = DeviceCache(6, kind_of(state_width), device)
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
    cache = DeviceCache(4, RowKind(2, 0, torch.float32, torch.float32), "cpu")
    one, two = torch.ones(2, 2), torch.full((2, 2), 2.0)
    cache.fill(ints(1, 0), ints(7), one, None, first=1)
    cache.mark_dirty(ints(0))
    cache.fill(ints(1, 2), ints(), two, None)
    assert cache.slot_row.tolist() == [7, FOREIGN, FOREIGN, FREE]
    assert cache.dirty.tolist() == [True, False, False, False]
    assert cache.gather(ints(0, 1, 2))[:, 0].tolist() == [1.0, 2.0, 2.0]
    with pytest.raises(PlanError, match="slot 0 still holds row 7"):
        cache.fill(ints(0), ints(9), one[:1], None)


WIDTH = 3
SLOTS = StateSlots(first=6, count=3, tail=9)
"""Three homes with three replicated slots each, of which this one is the last, and sharded slots
from 9 on."""


@pytest.mark.parametrize("width", [0, WIDTH])
def test_state_comes_with_own_and_sharded_rows_alone(width: int) -> None:
    assert SLOTS.rows(13) == 3 + 4
    assert SLOTS.of(np.array([6, 8, 9, 12])).tolist() == [0, 2, 3, 6]
    inner = StateSlots(first=3, count=3, tail=9)
    for first in (3, 5, 9, 11):
        assert inner.start(slice(first, first + 1)) == inner.of(np.array([first]))[0]
    cache = DeviceCache(13, kind_of(width), "cpu", state_slots=SLOTS)
    assert cache.weight.shape == (13, DIM) and (width == 0 or cache.state.shape == (7, width))
    assert cache.device_bytes == (13 * DIM + 7 * width) * 8
    slots, rows, own = ints(0, 3, 7, 6), ints(50, 53, 71, 60), rows_of(ints(71, 60), 0, width)[1]
    cache.fill(slots, np.array([71, 60]), rows_of(rows, 0, 0)[0], own, first=2)
    fill(cache, ints(12, 9), ints(92, 95))
    assert torch.equal(cache.gather(slots), rows_of(rows, 0, 0)[0])
    assert_rows(cache, ints(6, 9, 7, 12), ints(60, 95, 71, 92), 0)
    cache.mark_dirty(ints(0, 6, 12))
    left, leaving = cache.evict(ints(6, 7, 12), ints(60, 71, 92))
    assert left.tolist() == [6, 12] and leaving.tolist() == [60, 92]
    weight, state = cache.kind.parts(cache.read(left))
    want, want_state = rows_of(leaving, 0, width)
    assert torch.equal(weight, want) and (width == 0 or torch.equal(state, want_state))


ONE = [(1000, 16, 0)]
TWO = [(3000, 16, 16), (1000, 4, 1)]  # 128 and 20 bytes a row in float32
MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "itemsize", "world_size", "expected", "slots"),
    [
        (ONE, 4, 1, (), [1000]),  # a toy table is cached whole
        (TWO, 4, 3, (), [3000, 1002]),
        ([(10 * MIB, 16, 16)], 4, 1, (), [262_144]),  # 32 MiB at 128 bytes, not 157,287
        ([(10 * MIB, 16, 16)], 8, 1, (), [157_287]),  # 1.5 %, not 32 MiB at 256 bytes
        ([(100 * MIB, 16, 16)], 4, 1, (), [1_572_864]),
        ([(100 * MIB, 16, 16)], 4, 1, (1e6,), [1_572_864]),
        ([(100 * MIB, 16, 16)], 4, 1, (2e6,), [2_400_000]),  # 1.2 times what steps name
        ([(100 * MIB, 16, 16), (1000, 4, 0)], 4, 2, (2e6, 5000.0), [2_400_000, 1000]),
    ],
)
def test_default(groups, itemsize, world_size, expected, slots) -> None:
    """1.5 % of the rows, at least 32 MiB of them, and room for the steps that are known."""
    assert cache_slots(None, None, None, groups, itemsize, world_size, expected) == slots
    given = cache_slots(None, 0.015, None, groups, itemsize, world_size)
    assert given == cache_slots(None, 0.015, None, groups, itemsize, world_size, expected)


def hundred(world_size: int = 1) -> tuple[list, int, int]:
    """Groups, bytes of an element, ranks: 100 rows."""
    return [(100, 4, 0)], 4, world_size


@pytest.mark.parametrize(
    ("key", "value", "of", "expected"),
    [
        *(("ratio", 0.015, (ONE, 4, w), [n]) for w, n in ((1, 15), (2, 16), (4, 16), (7, 21))),
        ("ratio", 0.015, (TWO, 4, 1), [45, 15]),  # of each group
        *(("ratio", 0.015, ([(10, 16, 0)], 4, w), [w]) for w in (1, 4)),
        ("ratio", 0.015, ([(3, 16, 0)], 4, 4), [4]),
        *(("ratio", r, hundred(), [n]) for r, n in ((1.0, 100), (1, 100), (0.07, 7), (0.29, 29))),
        ("ratio", 1.0, hundred(3), [102]),
        *(("ratio", r, hundred(), [n]) for r, n in ((0.071, 8), (1e-9, 1))),  # as it was typed
        *(("rows", r, (ONE, 4, w), [n]) for r, w, n in ((100, 1, 100), (100, 3, 102), (1, 4, 4))),
        ("rows", 400, (TWO, 4, 1), [300, 100]),
        ("rows", 400, (TWO, 4, 7), [301, 105]),
        ("rows", 401, (TWO, 4, 1), [301, 101]),
        ("rows", 4000, (TWO, 4, 1), [3000, 1000]),
        *(("bytes", b, (ONE, 4, w), [n]) for b, w, n in ((6400, 1, 100), (6400, 3, 99), (1, 3, 3))),
        ("bytes", 6463, (ONE, 4, 1), [100]),
        ("bytes", 6400, (ONE, 8, 1), [50]),
        # 3/4 of 40,960 bytes at 128, 1/4 at 20: 240 and 512 slots
        ("bytes", 40_960, (TWO, 4, 1), [240, 512]),
        ("bytes", 40_960, (TWO, 4, 100), [200, 500]),
        # a quarter of 200,000 is 50,000, but the narrow group's 1,000 rows need 20,000; the wide
        # one gets the 180,000 that are left: 1406 slots
        ("bytes", 200_000, (TWO, 4, 1), [1406, 1000]),
        ("bytes", 3000 * 128 + 1000 * 20, (TWO, 4, 1), [3000, 1000]),
    ],
)
def test_slots_of_what_is_given(key, value, of, expected, caplog) -> None:
    given_ = {"rows": None, "ratio": None, "bytes": None} | {key: value}
    assert cache_slots(*given_.values(), *of) == expected
    assert "capped" not in caplog.text


@pytest.mark.parametrize(
    ("rows", "budget"), [(4001, None), (1 << 50, None), (None, 404_001), (None, 1 << 60)]
)
def test_larger_than_the_tables_is_capped_and_said(rows, budget, caplog) -> None:
    with caplog.at_level(logging.WARNING, "distcache"):
        assert cache_slots(rows, None, budget, TWO, 4, 1) == [3000, 1000]
    assert "cache larger than the tables: capped" in caplog.text
    assert str(rows or budget) in caplog.text
    assert cache_slots(9999, None, None, [(10, 4, 0), (1, 8, 0)], 4, 4) == [12, 4]  # whole blocks


GROUPS = st.lists(
    st.tuples(st.integers(1, 5000), st.sampled_from([4, 16, 128]), st.sampled_from([0, 1, 16])),
    min_size=1,
    max_size=4,
)


@examples(100)
@given(GROUPS, st.integers(1, 9), st.sampled_from(["rows", "ratio", "bytes"]), st.data())
def test_properties(groups, world_size, key, data) -> None:
    """Multiples of W, between W and all rows; enough for what was asked; bytes are a bound."""
    strategies = {
        "rows": st.integers(1, 20_000),
        "ratio": st.floats(1e-6, 1.0),
        "bytes": st.integers(1, 1 << 23),
    }
    value = data.draw(strategies[key])
    args = {"rows": None, "ratio": None, "bytes": None} | {key: value}
    slots = cache_slots(**args, groups=groups, itemsize=4, world_size=world_size)
    full = [-(-v // world_size) * world_size for v, _, _ in groups]
    assert len(slots) == len(groups)
    for count, most in zip(slots, full, strict=True):
        assert count % world_size == 0 and world_size <= count <= most
    total = sum(v for v, _, _ in groups)
    if key == "rows":
        assert sum(slots) >= min(value, total)
        assert sum(slots) < value + len(groups) * (world_size + 1)
    if key == "ratio":
        pairs = zip(slots, groups, strict=True)
        assert all(count >= value * v * (1 - 1e-12) for count, (v, _, _) in pairs)
    if key == "bytes":
        used = cache_bytes(slots, groups, 4)
        # one more round of W slots of a group, or a byte lost per division, is all that is left
        slack = [(dim + state) * 4 * world_size for _, dim, state in groups]
        assert used <= max(value, 0) + sum(
            s for s, c in zip(slack, slots, strict=True) if c == world_size
        )
        if slots != full:
            assert used > value - sum(s + 1 for s in slack)
