"""Steps that do not fit the cache: refused by name and number; and the warning before training."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ends import Job
from protocol_cases import CASE, TABLES, batches, caught, make, state, warnings

from distcache.cache.size import cache_slots
from distcache.comm.world import close_world, open_world
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import StepTooLargeError
from distcache.layout import TableSpec
from distcache.pipeline.groups import make_groups
from distcache.pipeline.room import smallest_cache_rows, warn_if_too_small


def attempt(world, rows: int, lookahead: int) -> tuple[int, str, tuple[int, int], str]:
    """Train with `cache.rows=rows`: steps done, the error, its numbers, the state after it."""
    groups = make_groups(TABLES, CASE.features, world.size)
    sizes = [(group.layout.rows, group.dim, 1) for group in groups]
    mode = make(world, lookahead, 1, slots=cache_slots(rows, None, None, sizes, 4, world.size))
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


def run(rank: int, size: int) -> list:
    world = open_world("cpu", "gloo", 60)
    seen, rows = [], 4
    while True:
        seen.append((rows, *attempt(world, rows, lookahead=2 * (rows % 2))))
        named = re.search(r"cache\.rows=(\d+) or more", seen[-1][2])
        if named is None:
            break
        if int(named[1]) - 1 > rows:
            seen.append((int(named[1]) - 1, *attempt(world, int(named[1]) - 1, 1)))
        rows = int(named[1])
    close_world(world)
    return seen


@pytest.fixture(scope="module")
def by_world() -> dict[int, list]:
    """By world size, what every rank saw with ever larger caches."""
    jobs = {size: Job(run, size) for size in (1, 2, 3)}
    return {size: [end.value for end in job.ends()] for size, job in jobs.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_number_that_is_named_is_the_smallest_that_works(by_world, size: int) -> None:
    ranks = by_world[size]
    assert all(isinstance(rank, list) for rank in ranks), ranks
    assert all(rank == ranks[0] for rank in ranks)
    seen = {rows: (done, error, numbers) for rows, done, error, numbers, _ in ranks[0]}
    assert max(seen) == ranks[0][-1][0] and seen[max(seen)][:2] == (6, "")
    for rows, (done, error, numbers) in seen.items():
        if not error:
            continue
        named = int(re.search(r"cache\.rows=(\d+) or more", error)[1])
        assert f"StepTooLargeError: step {done} needs {numbers[0]} distinct rows of" in error
        assert f"which has {numbers[1]} slots of {numbers[1] * size} on" in error
        assert numbers[0] > numbers[1]
        assert seen[named][0] > done, "the number that was named does not hold the step"
        if rows == named - 1:
            continue
        assert seen[named - 1][0] == done, "a smaller number holds the step as well"
    assert len(seen) >= 3
    assert any("tables of width 4" in error for _, error, _ in seen.values()) or size == 1


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
    needed = smallest_cache_rows(groups, most.tolist())
    assert needed <= named <= 1.5 * needed


def test_a_source_that_knows_nothing_is_not_warned_about() -> None:
    groups = make_groups(tables([5], [4]), ["cat_0"], 1)
    assert not warn_if_too_small(object(), groups, [1], 100)
