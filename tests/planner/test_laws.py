"""The planner's laws over random id streams: no stale read, no lost update, any C, L, P, W; rows
that are sharded come once, from their homes, over which rows and their traffic lie evenly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import BODIES, make_layout, sharded_streams, streams, using
from shard_model import replay
from simulator import PlannerSettings, simulate

from distcache.errors import PlanError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner, Parts
from distcache.planner.rank import HomePart, RankPlanner, next_move_after
from distcache.planner.threads import Threads
from distcache.planner.victims import POLICIES, Policy
from distcache.step_plan import StepPlan, check_plan, check_plan_fully

LAGS = st.one_of(st.just([]), st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=14, max_size=14))
"""How many steps later than it may each step moves; none: at once."""


@examples(6000)
@given(streams(), st.sampled_from(BODIES))
def test_no_stale_read_and_no_lost_update(case: tuple, body: str) -> None:
    with using(body):
        replay(*case)


@pytest.mark.timeout(900)  # in full, more than any other test takes
@examples(3000)
@given(sharded_streams(), LAGS, st.sampled_from(BODIES))
def test_every_sharded_row_comes_once_and_up_to_date(case: tuple, lag: list, body: str) -> None:
    with using(body):
        replay(*case, lag)


def stream_of(world: int, steps: int, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        [(rng.random(12) ** 2 * 60).astype(np.int64) for _ in range(world)] for _ in range(steps)
    ]


@pytest.mark.parametrize("hot", [0, 6])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_tight_caches_evict_and_rows_travel_both_ways(world: int, hot: int) -> None:
    """What the random streams are meant to reach is reached."""
    replicated = hot * world
    config = PlannerSettings(
        replicated + 36, 3, 2, hot=np.arange(hot, dtype=np.int64), replicated=replicated
    )
    counts = replay(stream_of(world, 20), make_layout(60, world), config)
    assert min(counts.early, counts.late, counts.fetched, counts.evicted) > 0 or world > 1
    assert min(counts.early, counts.late, counts.fetched) > 0


def test_without_prefetch_every_row_may_travel_with_movement() -> None:
    """With P = 0 movement comes after the step before: no row is changed in between."""
    config = PlannerSettings(36, 3, 0, hot=np.empty(0, np.int64))
    counts = replay(stream_of(2, 12), make_layout(60, 2), config)
    assert counts.late == 0 < counts.early


def decided(plan: StepPlan) -> dict[str, Any]:
    """What a plan says, whose tensors that a device reads lie in its arena, with gaps."""
    own = {name: value for name, value in vars(plan).items() if name != "arena"}
    for name in ("positions", "order", "slots", "touched", "source_rows"):
        assert np.shares_memory(own[name].numpy(), plan.arena.numpy()), name
    return own


@pytest.mark.parametrize(("shelves", "bits"), [(0, 0), (4, 3)])
def test_plans_are_the_same_for_every_number_of_threads(shelves: int, bits: int) -> None:
    """And where a step is decided while another one is taken in."""
    sizes, steps, world, ahead = np.array([3, 4000, 50, 900, 1]), 12, 2, 2
    layout = RowLayout(
        [TableSpec(f"t{i}", rows, 4, (f"f{i}",)) for i, rows in enumerate(sizes)], world
    )
    rng = np.random.default_rng(bits)
    ids = [
        [[(rng.random(60) ** 3 * rows).astype(np.int64) for rows in sizes] for _ in range(world)]
        for _ in range(steps)
    ]
    starts = 60 * np.arange(5)
    pieces = np.stack((starts, starts + 60, layout.offsets[:-1], sizes, np.full(5, 60)))

    def plans(count: int, decide: bool, sharing: bool = True) -> Iterator[StepPlan]:
        """`sharing`: all of each step; or more of one than of the next, as its size would have
        it."""
        threads, parts = Threads(count), Parts(400, layout.local_rows, shelves, bits)
        homes = [HomePlanner(layout, home, 400, 1, parts=parts) for home in range(world)]
        ranks = [RankPlanner(layout, None, (parts, None), threads) for _ in range(world)]
        after, waiting = -1, deque()
        for home in homes:
            home.threads = threads
        for step, by_rank in enumerate(ids):
            threads.least_s = 1e-12 if sharing else (1e-12, 2e-6, 1.0)[step % 3]
            asked = [
                rank.request(np.concatenate(own), pieces)
                for rank, own in zip(ranks, by_rank, strict=True)
            ]
            waiting.append(asked)
            for home in homes:
                named = [request.replicated for request in asked]
                counts = np.stack([of.counts[home.home] for of in named])
                rows = [of.rows[home.home] for of in named]
                home.ingest(step, "train", rows, counts, decide and step >= ahead)
            if step < ahead:
                continue
            decided = [home.plan() for home in homes]
            after = next_move_after(step - ahead, 1, [of.latest_use for of in decided], after)
            for rank, request in enumerate(waiting.popleft()):
                told = [HomePart(of.told, of.replies[rank], len(of.fetch)) for of in decided]
                yield ranks[rank].assemble(request, told, decided[rank], after)
        threads.close()

    every = (1, False), (1, True), (2, False), (3, True), (3, True, False)
    for one, *others in zip(*(plans(*how) for how in every), strict=True):
        check_plan_fully(one, 800)
        own = decided(one)
        for other in others:
            for name, value in own.items():
                again = getattr(other, name)
                assert torch.equal(value, again) if torch.is_tensor(value) else value == again


def test_a_step_out_of_order_is_refused() -> None:
    home = HomePlanner(make_layout(10, 1), 0, 5, 1)
    home.ingest(0, "train", [np.array([1, 2])])
    home.plan()
    with pytest.raises(PlanError, match="steps come in order"):
        home.ingest(0, "train", [np.array([2, 3])])
    home.ingest(1, "train", [np.array([2, 3])])
    with pytest.raises(PlanError, match="steps come in order"):
        home.ingest(0, "train", [np.array([2, 3])])
    with pytest.raises(PlanError, match="step 3 does not follow 1"):
        home.ingest(3, "train", [np.array([2, 3])])


@pytest.mark.parametrize(
    "policy", [*map(Policy, POLICIES), Policy(tail="lru"), Policy(tail="frequency")], ids=str
)
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
    layout, rows = make_layout(1000 * world, world), np.arange(1000 * world)
    homes = layout.home(rows)
    assert (np.sort(homes.reshape(-1, world), axis=1) == np.arange(world)).all()
    for home in range(world):
        mine = rows[homes == home]
        assert (layout.row(home, layout.local(mine)) == mine).all()


IDS, ROWS, WORLDS = 6000, 4_000_000, (2, 3, 4, 8, 16, 32, 64)


def ids_of(kind: str, world: int, seed: int) -> list[np.ndarray]:
    """A step of `IDS` ids of each rank."""
    rng = np.random.default_rng([seed, world])
    if kind == "strided":  # as plain row % W would send to one rank
        first = np.arange(world * IDS // 2) * world
        return [rng.choice(first, IDS) for _ in range(world)]
    if kind == "sorted":
        return np.split(np.sort(rng.integers(0, ROWS, world * IDS)), world)
    return [(ROWS * rng.random(IDS) ** 4).astype(np.int64) for _ in range(world)]


def ratio(by_rank: np.ndarray) -> float:
    """The largest amount of a rank over the mean."""
    return float(by_rank.max() / by_rank.mean())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["strided", "sorted", "skewed"])
def test_loads_lie_evenly_over_the_homes(kind: str, world: int) -> None:
    """All bytes of a step go by how many rows each rank names at each home, and how many homes have
    in all."""
    layout = make_layout(max(ROWS, world * world * IDS), world)
    asked, rows = np.zeros((world, world)), np.zeros(world)
    for step in range(3):
        named = [np.unique(ids) for ids in ids_of(kind, world, step)]
        union, traffic = np.unique(np.concatenate(named), return_counts=True)
        assert traffic.max() / traffic.sum() <= 1 / (5 * world), "one row has too much of it"
        asked += [np.bincount(layout.home(own), minlength=world) for own in named]
        rows += np.bincount(layout.home(union), minlength=world)
    np.fill_diagonal(asked, 0)  # what a rank keeps
    loads = {"rows of a home": rows, "to homes": asked.sum(1), "from homes": asked.sum(0)}
    for what, by_rank in loads.items():
        assert ratio(by_rank) <= 1.2, what


@pytest.mark.parametrize("world", WORLDS)
def test_no_stride_has_few_homes(world: int) -> None:
    layout, count = make_layout(2**34, world), 1000 * world
    strides = [*range(1, 200), 301, 447, 545, 903, 1806, 1871, 1889, 2709, 4096, 10**5, 2**17]
    for stride in strides:
        homes = np.bincount(layout.home(np.arange(count) * stride), minlength=world)
        assert ratio(homes) <= 1.2, stride


def sharded_plans() -> list[StepPlan]:
    """Plans of the second step of four ranks, which request some rows alone and share others."""
    config = PlannerSettings(60, 3, 2, hot=np.empty(0, np.int64))
    rng = np.random.default_rng(1)
    stream = [[rng.permutation(40)[:24] for _ in range(4)] for _ in range(2)]
    return list(simulate(make_layout(40, 4), config, stream))[1]


COUNTS = "counts of a transfer"
BREAKS = [
    ("receive_counts", lambda counts: (0, *counts[1:]), COUNTS),
    ("send_counts", lambda counts: (0, *counts[1:]), COUNTS),
    ("slots", lambda slots: torch.cat((torch.tensor([1 << 20]), slots[1:])), "nobody asked for"),
    ("slots", lambda slots: torch.cat((slots[1:2], slots[1:])), "to a rank twice or never"),
    ("places", lambda places: torch.cat((places[1:2], places[1:])), "arrives twice or never"),
]
"""A field of the late transfer, a change of its value, and the law that this breaks."""


@pytest.mark.parametrize(("name", "change", "law"), BREAKS)
def test_a_broken_plan_of_sharded_rows_is_refused(name: str, change: Callable, law: str) -> None:
    plan = sharded_plans()[0]
    late = replace(plan.shard.late, **{name: change(getattr(plan.shard.late, name))})
    broken = replace(plan, shard=replace(plan.shard, late=late))
    with pytest.raises(PlanError, match=law):
        check_plan_fully(broken, 60)
    if law == COUNTS:  # the cheap laws alone find wrong counts
        with pytest.raises(PlanError, match=law):
            check_plan(broken)


def test_not_every_row_sent_is_refused() -> None:
    plan = sharded_plans()[0]
    late = plan.shard.late
    first = late.send_counts[0] - 1
    short = replace(late, slots=late.slots[1:], send_counts=(first, *late.send_counts[1:]))
    with pytest.raises(PlanError, match="not every row is sent once"):
        check_plan(replace(plan, shard=replace(plan.shard, late=short)))
