"""Steps that do not fit the cache: refused by name and number; and the warning before training."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ends import Job
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import placement_of
from protocol_cases import CASE, TABLES, batches, caught, make, state, warnings

from distcache.comm.world import close_world, open_world
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.groups import (
    Placement,
    enough_slots,
    make_groups,
    region_slots,
    smallest_cache_rows,
    too_large,
    warn_if_too_small,
)
from distcache.engine.planning import Region
from distcache.errors import StepTooLargeError
from distcache.layout import TableSpec
from distcache.popularity.slots import cache_slots


def attempt(
    world, rows: int, lookahead: int, placement: Placement
) -> tuple[int, str, tuple[int, int], str]:
    """Train with `cache.rows=rows`: steps done, the error, its numbers, the state after it."""
    groups = make_groups(TABLES, CASE.features, world.size)
    sizes = [(group.layout.rows, group.dim, 1) for group in groups]
    slots = cache_slots(rows, None, None, sizes, 4, world.size)
    mode = make(world, lookahead, 1, slots=slots, placement=placement)
    done, numbers = [], (0, 0)

    def go() -> None:
        nonlocal numbers
        try:
            for step in mode.stream(batches(world, range(6))):
                done.append(mode.train_step(step).loss)
        except StepTooLargeError as error:
            numbers = error.rows, error.slots
            raise

    error = caught(go)
    after = state(mode)
    mode.close()
    return len(done), error, numbers, after


def run(rank: int, size: int, kind: str = "replicated") -> list:
    world = open_world("cpu", "gloo", 60)
    seen, rows, placement = [], 4, Placement(kind)
    while True:
        seen.append((rows, *attempt(world, rows, 2 * (rows % 2), placement)))
        named = re.search(r"cache\.rows=(\d+) or more", seen[-1][2])
        if named is None:
            break
        if int(named[1]) - 1 > rows:
            less = int(named[1]) - 1
            seen.append((less, *attempt(world, less, 1, placement)))
        rows = int(named[1])
    close_world(world)
    return seen


@pytest.fixture(scope="module")
def by_world() -> dict[int, list]:
    """By world size, what every rank saw with ever larger caches; below 0: of sharded rows."""
    jobs = {size: Job(run, size) for size in (1, 2, 3)}
    jobs |= {-size: Job(run, size, "sharded") for size in (2, 3)}
    return {size: [end.value for end in job.ends()] for size, job in jobs.items()}


@pytest.mark.parametrize("key", [1, 2, 3, -2, -3])
def test_the_number_that_is_named_is_the_smallest_that_works(by_world, key: int) -> None:
    ranks, size = by_world[key], abs(key)
    assert all(isinstance(rank, list) for rank in ranks), ranks
    assert all(rank == ranks[0] for rank in ranks)
    seen = {rows: (done, error, numbers) for rows, done, error, numbers, _ in ranks[0]}
    assert max(seen) == ranks[0][-1][0] and seen[max(seen)][:2] == (6, "")
    for rows, (done, error, numbers) in seen.items():
        if not error:
            continue
        named = int(re.search(r"cache\.rows=(\d+) or more", error)[1])
        kind, homes = ("sharded ", 1) if key < 0 else ("", size)
        assert f"StepTooLargeError: step {done} needs {numbers[0]} distinct {kind}rows of" in error
        assert f"which has {numbers[1]} slots of {numbers[1] * homes} on" in error
        assert numbers[0] > numbers[1]
        assert seen[named][0] > done, "the number that was named does not hold the step"
        if rows == named - 1:
            continue
        assert seen[named - 1][0] == done, "a smaller number holds the step as well"
    assert len(seen) >= 3
    assert any("tables of width 4" in error for _, error, _ in seen.values()) or key in (1, -2, -3)


def test_the_steps_before_are_trained(by_world) -> None:
    for ranks in by_world.values():
        states: dict[int, set[str]] = {}
        for _, done, _, _, after in ranks[0]:
            states.setdefault(done, set()).add(after)
        assert all(len(same) == 1 for same in states.values())


def tables(rows: list[int], dims: list[int]) -> list[TableSpec]:
    pairs = enumerate(zip(rows, dims, strict=True))
    return [TableSpec(f"t{i}", count, dim, (f"cat_{i}",)) for i, (count, dim) in pairs]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_warning_names_a_cache_that_holds_a_batch(world: int) -> None:
    rows, dims, batch = [5000, 300, 2000], [8, 8, 4], 256
    source = SyntheticSource(SyntheticSpec(rows, bag_size=[1, 2.0, 3], global_batch_size=batch))
    groups = make_groups(tables(rows, dims), source.features, world)
    sizes = [(group.layout.rows, group.dim, 0) for group in groups]

    def slots(count: int) -> list[int]:
        return cache_slots(count, None, None, sizes, 4, world)

    with warnings() as lines:
        assert warn_if_too_small(source, groups, slots(200), batch)
    assert len(lines) == 1 and "likely too small" in lines[0]
    named = int(re.search(r"cache\.rows=(\d+)", lines[0])[1])
    assert not warn_if_too_small(source, groups, slots(named), batch)
    assert warn_if_too_small(source, groups, slots(named // 2), batch)
    most = np.zeros(len(groups), dtype=int)
    for step in range(10):
        ids = source.train_batch(step, 0, 1).ids
        edges = ids.offsets[:: ids.batch_size].tolist()
        for g, group in enumerate(groups):
            named_rows = [
                np.unique(ids.values[edges[t] : edges[t + 1]].numpy()) + group.layout.offsets[place]
                for place, t in enumerate(group.tables)
            ]
            homes = group.layout.home(np.concatenate(named_rows))
            most[g] = max(most[g], *np.bincount(homes, minlength=world))
    homes = [count // world for count in slots(named)]
    assert all(have >= need for have, need in zip(homes, most, strict=True))
    needed = smallest_cache_rows(groups, (most * world).tolist())
    assert needed <= named <= 1.5 * needed


@pytest.mark.parametrize("count", [0, 150, 400, 4000])
def test_the_warning_where_some_rows_are_replicated(count: int) -> None:
    """All rows must fit, and the sharded ones that a batch has if it names all replicated ones."""
    world, batch = 2, 256
    source = SyntheticSource(SyntheticSpec([5000], bag_size=[6], global_batch_size=batch))
    (group,) = make_groups(tables([5000], [8]), source.features, world)
    group = replace(group, hot=np.arange(count))
    total = source.expected_distinct(0, round(batch * source.lookups_per_sample(0)))
    with warnings() as lines:
        assert warn_if_too_small(source, [group], [40], batch)
    said = re.search(
        r"about (\d+) (.*) of one home .* has (\d+) slots; .* cache\.rows=(\d+)", lines[0]
    )
    assert said is not None
    needs, has, named = (int(said[place]) for place in (1, 3, 4))
    found = region_slots(group, 40)
    if said[2] == "sharded rows or more":
        assert count and has == found.sharded and needs >= (total - count) / world
    else:
        assert said[2] == "distinct rows" and needs >= total / world
        assert has == found.replicated // world + found.sharded
    (enough,) = cache_slots(named, None, None, [(5000, 8, 0)], 4, world)
    assert not warn_if_too_small(source, [group], [enough], batch)
    assert warn_if_too_small(source, [group], [enough - 2 * world], batch)


def test_a_source_that_knows_nothing_is_not_warned_about() -> None:
    groups = make_groups(tables([5], [4]), ["cat_0"], 1)
    assert not warn_if_too_small(object(), groups, [1], 100)


def refuse(rank: int, size: int) -> list[list]:
    """Runs in ever larger mixed caches, first with many and then with few replicated rows: steps
    done, the error, the state after it, and what as many steps leave in a cache that holds all.
    Then in one of as many rows as the error before names."""
    world, seen = open_world("cpu", "gloo", 60), []
    groups = make_groups(TABLES, CASE.features, world.size)
    sizes = [(group.layout.rows, group.dim, 1) for group in groups]
    named, tries = 0, [(0.4, 20), (0.4, 40), (0.4, 60), (0.02, 12), (0.02, 60)]
    while tries:
        share, count = tries.pop(0)
        placement = placement_of("mixed home", CASE, share)
        slots = (count, 12) if count else tuple(cache_slots(named, None, None, sizes, 4, size))
        mode, done = make(world, 2, 1, slots=slots, placement=placement), []

        def go(mode=mode, done=done) -> None:
            for step in mode.stream(batches(world, range(6))):
                done.append(mode.train_step(step).loss)

        error = caught(go)
        after = state(mode)
        mode.close()
        roomy = make(world, 2, 1, slots=(72, 12))
        for step in roomy.stream(batches(world, range(len(done)))):
            roomy.train_step(step)
        seen.append([len(done), error, after, state(roomy)])
        roomy.close()
        found = re.search(r"cache\.rows=(\d+) or more", error)
        if found is not None:
            named = int(found[1])
            tries.insert(0, (share, 0))
    close_world(world)
    return seen


def test_a_mixed_cache_names_the_region_that_is_too_small() -> None:
    ranks = [end.value for end in Job(refuse, 3).ends()]
    assert ranks[1] == ranks[2] == ranks[0], ranks
    steps, kinds = [], set()
    for place, (done, error, after, expected) in enumerate(ranks[0]):
        steps.append(done)
        assert after == expected, "the steps before are not as they were trained"
        if not error:
            continue
        found = re.search(
            rf"StepTooLargeError: step {done} needs (\d+) distinct (sharded|replicated) rows of "
            r"home rank \d, which has (\d+) slots of (\d+) on each device",
            error,
        )
        needs, has, of = (int(found[group]) for group in (1, 3, 4))
        assert needs > has and of == has * (3 if found[2] == "replicated" else 1)
        assert "cache.replicated_rows, cache.replicated_share" in error
        kinds.add(found[2])
        assert ranks[0][place + 1][0] > done, "the number that was named does not hold the step"
    assert max(steps) == 6 and min(steps) < 6
    assert kinds == {"sharded", "replicated"}


def test_rows_that_no_cache_holds_beside_the_replicated_ones_are_told() -> None:
    """A group gets no more slots than it has rows, and half of them may be for replicated rows."""
    rows, world = 155, 4
    group = make_groups(tables([rows], [4]), ["cat_0"], world)[0]
    for hot, named in ((151, False), (8, True)):
        mixed = replace(group, hot=np.arange(hot))
        slots = cache_slots(10**6, None, None, [(rows, 4, 0)], 4, world)
        room = region_slots(mixed, slots[0] if not named else 20)
        region = Region(0, SimpleNamespace(slots=room.sharded), sharded=True)
        needs = np.full((world, 1), 90 if not named else 25)
        text = str(too_large(3, "eval", [mixed], needs, [region]))
        assert ("no cache.rows holds this step" in text) != named
        found = re.search(r"cache\.rows=(\d+) or more", text)
        assert (found is not None) == named and text.startswith("step 3 (evaluation) needs")
        if found is not None:
            enough = cache_slots(int(found[1]), None, None, [(rows, 4, 0)], 4, world)
            assert region_slots(mixed, enough[0]).sharded >= 25


@given(
    st.integers(1, 5),
    st.integers(1, 200),
    st.sets(st.integers(0, 199)),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_from_the_number_named_on_mixed_homes_have_room(
    world: int, rows: int, hot: set[int], replicated: int, sharded: int
) -> None:
    group = make_groups(tables([rows], [4]), ["cat_0"], world)[0]
    chosen = np.array(sorted(row for row in hot if row < rows), dtype=np.int64)
    group = replace(group, hot=chosen)
    hottest = np.bincount(group.layout.home(chosen), minlength=world).max()
    near, far = min(replicated, int(hottest)), min(sharded, group.layout.local_rows)
    least = enough_slots(group, near, far)
    given_rooms = [region_slots(group, count) for count in range(1, least + 3 * world + 5)]
    hold = [room.replicated // world >= near and room.sharded >= far for room in given_rooms]
    assert all(hold[least - 1 :]), "more slots hold less"
    assert least <= 2 * world or not all(hold[least - 2 * world - 1 :]), "fewer would do"
