"""Every victim is the right one, whatever the policy, and finding it does not scan the cache."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_streams import BODIES, PYTHON, make_layout, streams, using
from policy_reference import Reference, resident

from distcache.errors import ConfigError
from distcache.planner import loops
from distcache.planner.home import HomePlanner, Parts
from distcache.planner.victims import PINNED, POLICIES, RESIDENT, TAILS, ByCount, Policy
from distcache.popularity.statistics import GroupPopularity

ALL = [Policy(name) for name in POLICIES] + [Policy(tail=tail) for tail in TAILS if tail != "lfu"]


def check_home(case: tuple, home: int, restore_after: int) -> None:
    """One home's decisions against the slow twin, with a restore on the way."""
    stream, layout, config = case
    named = [np.unique(np.concatenate(step)) for step in stream]
    named = [rows[layout.home(rows) == home] for rows in named]
    sets = [set(layout.local(rows).tolist()) for rows in named]
    classes = config.popularity
    if classes is not None:
        classes = GroupPopularity(classes).classes_at(layout, home)
    slots = -(-config.slots // layout.world_size)
    parts = Parts(slots, layout.local_rows, config.shelves, config.bits)
    how = (config.policy, classes, home * slots, parts)
    planner = HomePlanner(layout, home, slots, config.prefetch, *how)
    part, number = (of.tolist() for of in parts.parts_of(np.arange(layout.local_rows)))
    where = (part.__getitem__, np.diff(parts.edges).tolist(), number.__getitem__)
    where += (resident(config.policy, layout, home, slots),)
    twin = Reference(config.policy, slots, config.lookahead, config.prefetch, classes, *where)
    slot_row, ingested = np.full(slots, -1), 0
    for now in range(len(stream)):
        for step in range(ingested, min(now + config.lookahead + 1, len(stream))):
            rows, starts, _ = parts.divide(layout.local(named[step]))
            planner.ingest(step, "train", [rows], np.diff(starts)[None])
            ingested = step + 1
        decision = planner.plan()
        evicted, fetched = (
            layout.local(rows).tolist() for rows in (decision.evict_rows, decision.fetch_rows)
        )
        twin.check(now, evicted, fetched, sets)
        slot_row[decision.evict_slots - home * slots] = -1
        slot_row[decision.slots[decision.fetch] - home * slots] = decision.fetch_rows
        if now == restore_after:
            planner.restore(slot_row, now)
            twin.restore(set(layout.local(slot_row[slot_row >= 0]).tolist()), now)
            ingested = now + 1


@examples(6000)
@given(streams(80), st.sampled_from(BODIES), st.integers(-40, 40))
def test_every_victim_is_the_one_that_the_slow_twin_picks(
    case: tuple, body: str, restore_after: int
) -> None:
    with using(body):
        for home in range(case[1].world_size):
            check_home(case, home, restore_after)


def skewed(rows: int, count: int, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Steps of `count` ids, the lower the more frequent."""
    rng = np.random.default_rng(seed)
    return [(rng.random(count) ** 4 * rows).astype(np.int64) for _ in range(steps)]


def home_of(policy: Policy, rows: int, slots: int, pinned: int = 0) -> HomePlanner:
    """A planner with P = 1 that knows that lower rows are more frequent."""
    classes = np.clip(200 - 20 * np.log2(1 + np.arange(rows)), 0, 254).astype(np.uint8)
    classes[:pinned] = PINNED
    return HomePlanner(make_layout(rows, 1), 0, slots, 1, policy, classes, parts=Parts(slots, rows))


def decisions(home: HomePlanner, stream: list[np.ndarray], window: int = 4) -> list:
    """All steps planned, `window` known beyond each."""
    out = []
    for step, ids in enumerate(stream):
        home.ingest(step, "train", [ids])
        if step >= window:
            out.append(home.plan())
    return out


class Counted(np.ndarray):
    """A table that counts whose last use is read."""

    reads = 0

    def __getitem__(self, at: tuple[int, int]) -> object:
        Counted.reads += at[1] == loops.LAST
        return super().__getitem__(at)


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_work_is_in_proportion_to_the_rows_of_the_steps(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few slots are looked at beside those that leave, and lists are as many as at first."""
    plain = loops.leave.py_func
    monkeypatch.setattr(Counted, "reads", 0)
    steps, slots = 200, 1500
    home = home_of(policy, 7500, slots, pinned=60)
    with using(PYTHON), monkeypatch.context() as patch:
        patch.setattr(loops, "leave", lambda of, *more: plain(of.view(Counted), *more))
        made = decisions(home, skewed(7500, 150, steps))
    left = sum(len(one.evict_rows) for one in made)
    assert left > slots, "the cache never turned over"
    assert left <= Counted.reads <= 4 * left
    assert home._home.table.shape[1] <= slots + 2000


@pytest.mark.parametrize("world", [1, 3])
def test_rows_of_small_tables_come_once(world: int) -> None:
    """Of 8 W slots or more for each row of theirs; a larger table's come again and again."""
    layout = make_layout(5020, world, [4, 5010])
    stream = [ids + 4 for ids in skewed(5000, 70, 120)]
    small = np.r_[np.arange(4), np.arange(5010, 5020)]
    fetched: dict[str, list[int]] = {}
    for rule in RESIDENT:
        found: list[int] = []
        for home in range(world):
            planner = HomePlanner(layout, home, -(-112 // world), 1, Policy(resident=rule))
            local = [np.r_[ids, small[step % 14 :: 29]] for step, ids in enumerate(stream)]
            local = [np.unique(layout.local(ids[layout.home(ids) == home])) for ids in local]
            for decision in decisions(planner, local):
                found += decision.fetch_rows.tolist()
        fetched[rule] = [found.count(row) for row in small]
    assert set(fetched["auto"]) == {1} and max(fetched["none"]) > 1


def test_python_calls_do_not_grow_with_the_window() -> None:
    def calls(window: int) -> int:
        home, found = home_of(Policy(), 4000, 700), [0]
        stream = skewed(4000, 600, 3 * window + 30)
        decisions(home, stream[:-1], window)

        def count(frame: object, event: str, argument: object) -> None:
            found[0] += event == "call"

        sys.setprofile(count)
        try:
            home.ingest(len(stream) - 1, "train", [stream[-1]])
            home.plan()
        finally:
            sys.setprofile(None)
        return found[0]

    assert calls(64) <= calls(16)


def test_counts_grow_with_uses_and_halve_with_time() -> None:
    policy = Policy("lfu", half_life=200, resident="none")
    home = home_of(policy, 400, 400)
    for step in range(1500):
        home.ingest(step, "train", [np.arange(400) if step % 4 == 0 else np.arange(200)])
        home.plan()
    ranking = home._ranking
    counts = ranking.values[home._home.index[0, :, loops.HELD] % 256] / 256
    often, seldom = counts[:200].mean(), counts[200:].mean()
    every_step = 1 / (1 - 2 ** (-1 / 200))
    assert abs(often / every_step - 1) < 0.1 and abs(seldom / every_step * 4 - 1) < 0.1
    home.ingest(1899, "train", [np.arange(400)])  # the steps between named no row
    home.plan()
    aged = ranking.values[home._home.index[0, :200, loops.HELD] % 256].mean() / 256
    assert abs(aged / (often / 4 + 1) - 1) < 0.1


def test_a_stream_that_goes_on_earlier_has_no_negative_keys() -> None:
    """Steps planned ahead and dropped have moved the clock of `lfu` on, at another rate."""
    ranking = ByCount(10, None)
    for step in range(20):
        ranking.learn(1 if step < 18 else 10, step)
    for step in range(3, 9):
        ranking.learn(10, step)
        assert ranking.base >= 0


def test_a_row_costs_eight_bytes_and_one_for_its_popularity() -> None:
    layout, classes = make_layout(100, 2), np.zeros(50, np.uint8)
    for policy, popularity, each in (
        (Policy(tail="lru"), None, 8),
        (Policy(), None, 8),
        (Policy("frequency"), classes, 9),
        (Policy("lfu"), classes, 9),
    ):
        assert HomePlanner(layout, 0, 5, 1, policy, popularity).index_bytes == each * 50


def test_what_a_policy_needs_is_named() -> None:
    layout = make_layout(10, 1)
    for policy, key in ((Policy("static"), "policy=static"), (Policy(tail="frequency"), "tail=fr")):
        with pytest.raises(ConfigError, match=rf"cache.{key}.* cache.statistics=<folder>"):
            HomePlanner(layout, 0, 5, 1, policy)
    for field, value in (("name", "mru"), ("tail", "fifo"), ("half_life", 0), ("half_life", "x")):
        with pytest.raises(ConfigError, match=f"{value}"):
            replace(Policy(), **{field: value})
