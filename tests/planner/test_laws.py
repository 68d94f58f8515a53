"""The planner's laws over random id streams: no stale read, no lost update, any C, L, P, W."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import make_layout, streams
from planner_bodies import BODIES, using
from planner_twins import by_hash, by_index, by_unique
from simulator import PlannerSettings, simulate

from distcache.errors import StepTooLargeError
from distcache.layout import RowLayout
from distcache.planner.home import HomePlanner
from distcache.planner.policy import POLICIES, Policy
from distcache.step_plan import check_plan_fully


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest):
    """Each body of the loops in turn."""
    with using(request.param):
        yield


class Versions:
    """A cache and a store that hold, for every row, how many updates it has seen.

    Movement of step s runs as early as its plan allows: right after `apply` of `move_after`.
    """

    def __init__(self, layout: RowLayout, slots: int) -> None:
        self.layout = layout
        self.store = np.zeros(layout.rows, np.int64)
        self.cache_row = np.full(slots, -1, np.int64)
        self.cache = np.zeros(slots, np.int64)

    def move(self, plans: list, busy: dict[int, set[int]]) -> None:
        own = [(p.evict_slots.numpy(), p.evict_rows.numpy()) for p in plans]
        touched = set(plans[0].fetch_slots.tolist()).union(*(e[0].tolist() for e in own))
        for step in range(plans[0].move_after + 1, plans[0].step):
            assert not touched & busy[step], "movement touches a slot of a step not yet applied"
        for slots, rows in own:
            assert (self.cache_row[slots] == rows).all()
            self.store[rows] = self.cache[slots]
            self.cache_row[slots] = -1
        fetched = np.concatenate([p.fetch_rows.numpy() for p in plans])
        slots = plans[0].fetch_slots.numpy()
        assert (self.cache_row[slots] == -1).all()
        self.cache_row[slots] = fetched
        self.cache[slots] = self.store[fetched]


def replay(rows_by_step: list, layout: RowLayout, config: PlannerSettings) -> int:
    """Run a stream with eager movement; returns the number of misses. Fails on any lost update."""
    plans_by_step = list(simulate(layout, config, rows_by_step))
    truth = np.zeros(layout.rows, np.int64)
    slots = -(-config.slots // layout.world_size) * layout.world_size
    machine = Versions(layout, slots)
    busy = {p[0].step: set(p[0].slots.tolist()) for p in plans_by_step}
    moved = 0
    for step, plans in enumerate(plans_by_step):
        while moved < len(plans_by_step) and plans_by_step[moved][0].move_after < step:
            machine.move(plans_by_step[moved], busy)
            moved += 1
        assert moved > step, "a step would run before its rows may move"
        check_step(plans, rows_by_step[step], layout, slots)
        used = plans[0].slots.numpy()
        named = machine.cache_row[used]
        assert (machine.cache[used] == truth[named]).all(), "stale row"
        machine.cache[used] += 1
        truth[named] += 1
    for slot, row in enumerate(machine.cache_row):
        if row >= 0:
            machine.store[row] = machine.cache[slot]
    expected = np.zeros(layout.rows, np.int64)
    for rows in rows_by_step:
        expected[np.unique(np.concatenate(rows))] += 1
    assert (machine.store == expected).all(), "a lost update"
    return sum(p[0].misses for p in plans_by_step)


def check_step(plans: list, rows: list, layout: RowLayout, slots: int) -> None:
    """Canonical order, labels and sources of one step against a plain computation."""
    everything = np.concatenate(rows)
    seen = list(dict.fromkeys(everything.tolist()))
    canonical = [
        row for home in range(layout.world_size) for row in seen
        if layout.home(np.array([row]))[0] == home
    ]  # fmt: skip
    for rank, plan in enumerate(plans):
        check_plan_fully(plan, slots)
        assert [canonical[i] for i in plan.positions] == rows[rank].tolist()
        assert plan.distinct == len(canonical)
        missed = set(plan.fetch.tolist())
        assert plan.lookup_hits == sum(i not in missed for i in plan.positions.tolist())
        assert (plan.slots == plans[0].slots).all() and plan.move_after == plans[0].move_after
        assert (plan.slots[plan.home_slice(rank)] // (slots // layout.world_size) == rank).all()
        part = canonical[plan.home_slice(rank)]
        start = 0
        for source, count in enumerate(plan.source_counts):
            mine = [part[i] for i in plan.source_rows[start : start + count]]
            named = set(rows[source].tolist())
            assert mine == [row for row in part if row in named]
            start += count


@examples(400)
@given(streams(), st.sampled_from(BODIES))
def test_no_stale_read_and_no_lost_update(case: tuple, body: str) -> None:
    with using(body):
        replay(*case)


@pytest.mark.slow
@examples(6000)
@given(streams(), st.sampled_from(BODIES))
def test_no_stale_read_and_no_lost_update_campaign(case: tuple, body: str) -> None:
    with using(body):
        replay(*case)


@pytest.mark.usefixtures("body")
def test_step_larger_than_the_cache_is_refused_with_numbers() -> None:
    layout = make_layout(100, 1)
    stream = [[np.arange(5)], [np.arange(11)]]
    plans = simulate(layout, PlannerSettings(10, 0, 0), stream)
    assert next(plans)[0].misses == 5
    with pytest.raises(StepTooLargeError, match=r"step 1: home rank 0 has 11 .* for 10 slots"):
        next(plans)


def test_plans_are_a_pure_function_of_the_stream() -> None:
    rng = np.random.default_rng(3)
    stream = [[rng.integers(0, 50, 9) for _ in range(3)] for _ in range(20)]
    first, second = (
        list(simulate(make_layout(50, 3), PlannerSettings(33, 4, 2), stream)) for _ in range(2)
    )
    for plans, twins in zip(first, second, strict=True):
        for plan, twin in zip(plans, twins, strict=True):
            for name, value in vars(plan).items():
                same = getattr(twin, name)
                assert torch.equal(value, same) if torch.is_tensor(value) else value == same


def test_a_cache_as_large_as_the_tables_keeps_no_growing_record() -> None:
    layout = make_layout(40, 1)
    stream = [[np.arange(40)] for _ in range(300)]
    misses = [plans[0].misses for plans in simulate(layout, PlannerSettings(40, 2, 1), stream)]
    assert sum(misses) == 40
    planner = HomePlanner(layout, 0, 40, 1)
    for step in range(300):
        planner.ingest(step, "train", [np.arange(40)])
        planner.plan()
    assert planner._table._idle.hints <= 5 * 40


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("world", [1, 3])
def test_restore_goes_on_from_what_the_device_holds(world: int) -> None:
    layout = make_layout(30, world)
    home = HomePlanner(layout, world - 1, 8, 1)
    rows = layout.row(world - 1, np.arange(9, dtype=np.int64))
    held = np.full(8, -1, np.int64)
    held[2:7] = rows[:5]
    home.restore(held, 17)
    home.ingest(18, "train", [rows[3:9]] + [np.empty(0, np.int64)] * (world - 1))
    decision = home.plan()
    assert decision.fetch_rows.tolist() == rows[5:9].tolist()
    assert decision.slots[:2].tolist() == [5 + 8 * (world - 1), 6 + 8 * (world - 1)]
    assert set(decision.evict_rows.tolist()) <= set(rows[:3].tolist())
    assert len(decision.evict_rows) == 1


POLICIES_TO_RESTORE = [Policy(name) for name in POLICIES]
POLICIES_TO_RESTORE += [Policy(tail=tail) for tail in ("lru", "frequency")]


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("policy", POLICIES_TO_RESTORE, ids=str)
def test_restore_forgets_how_far_planning_was_ahead(policy: Policy) -> None:
    rng = np.random.default_rng(5)
    stream = [rng.integers(0, 40, 6) for _ in range(60)]
    layout = make_layout(40, 1)
    classes = rng.integers(0, 20, 40).astype(np.uint8)
    far, near = (HomePlanner(layout, 0, 20, 1, policy, classes) for _ in range(2))
    held = np.full(20, -1, np.int64)
    for home, last in ((far, 25), (near, 12)):
        for step in range(last + 9):
            home.ingest(step, "train", [stream[step]])
        for _ in range(13):
            decision = home.plan()
            if home is near:
                held[decision.evict_slots] = -1
                held[decision.slots[decision.fetch]] = decision.fetch_rows
        for _ in range(12, last):
            home.plan()
    for home in (far, near):
        home.restore(held, 12)
    for step in range(13, len(stream)):
        for home in (far, near):
            home.ingest(step, "train", [stream[-step]])
        if step > 15:
            one, other = far.plan(), near.plan()
            assert one.slots.tolist() == other.slots.tolist()
            assert one.evict_rows.tolist() == other.evict_rows.tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_run_of_world_size_rows_visits_every_home_once(world: int) -> None:
    layout = make_layout(1000 * world, world)
    rows = np.arange(1000 * world)
    homes = layout.home(rows).reshape(-1, world)
    assert (np.sort(homes, axis=1) == np.arange(world)).all()
    for home in range(world):
        mine = rows[layout.home(rows) == home]
        assert (layout.row(home, layout.local(mine)) == mine).all()
    strided = layout.home(np.arange(0, 1000 * world, world))
    assert np.bincount(strided, minlength=world).max() <= 1.2 * 1000 / world


@examples(200)
@given(st.lists(st.integers(0, 2**40), max_size=200), st.integers(1, 50))
def test_distinct_bodies_agree(values: list[int], modulus: int) -> None:
    for rows in (np.array(values, np.int64), np.array(values, np.int64) % modulus):
        expected, labels = by_unique(rows)
        first, inverse = by_hash(rows)
        assert rows[first].tolist() == expected.tolist()
        assert inverse.tolist() == labels.tolist()
    first, inverse = by_index(rows, np.full(modulus, 7, np.int32))
    assert rows[first].tolist() == expected.tolist() and inverse.tolist() == labels.tolist()
