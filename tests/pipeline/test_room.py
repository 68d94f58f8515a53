"""Steps that do not fit the cache: refused by name and number; and the warning before training."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import placement_of
from protocol_cases import CASE, TABLES, batches, caught, make, state, warnings
from ranks import Job

from distcache.comm.world import close_world, open_world
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.groups import (
    Placement,
    Region,
    TableSettings,
    enough_slots,
    make_groups,
    region_slots,
    smallest_cache_rows,
    too_large,
)
from distcache.engine.planning import StreamPlanner
from distcache.errors import ConfigError, StepTooLargeError
from distcache.layout import TableSpec
from distcache.popularity.slots import cache_slots
from distcache.sizing.resolve import expected_rows
from distcache.sizing.slots import warn_if_too_small


def attempt(world, rows: int, lookahead: int, placement: Placement) -> tuple:
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


def run(rank: int, size: int, kind: str) -> dict[int, tuple]:
    """Attempts with ever larger caches; where a number is named, with that, and one less before."""
    world, seen, rows = open_world("cpu", "gloo", 60), {}, 4
    placement = placement_of(kind, CASE)
    while rows:
        seen[rows] = attempt(world, rows, 2 * (rows % 2), placement)
        found = re.search(r"cache\.rows=(\d+) or more", seen[rows][1])
        named = int(found[1]) if found else 0
        if named - 1 > rows:
            seen[named - 1] = attempt(world, named - 1, 1, placement)
        rows = named
    close_world(world)
    return seen


RUNS = [(1, "replicated"), (3, "replicated"), (3, "sharded")]


@pytest.fixture(scope="module")
def by_run() -> dict[tuple, list]:
    """What every rank saw."""
    jobs = {of: Job(run, *of) for of in RUNS}
    return {of: [end.value for end in job.ends()] for of, job in jobs.items()}


@pytest.mark.parametrize("of", RUNS)
def test_the_number_that_is_named_holds_the_step_and_no_smaller_one(by_run, of: tuple) -> None:
    (size, kind), ranks = of, by_run[of]
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    assert all(rank == ranks[0] for rank in ranks)
    *_, last = seen = ranks[0].values()
    assert last[:2] == (6, "")
    homes, what = (1, "sharded rows") if kind == "sharded" else (size, "rows")
    for done, error, (rows, slots), _ in seen:
        if error:
            named = int(re.search(r"cache\.rows=(\d+) or more", error)[1])
            assert f": step {done} needs {rows} slots at home rank " in error and rows > slots
            assert f"distinct {what}, where {slots} are, of {slots * homes} on" in error
            assert "cache.replicated_rows" not in error
            assert ranks[0][named][0] > done, "the number that was named does not hold the step"
            assert ranks[0][named - 1][0] == done, "a smaller number holds the step as well"
    assert len(seen) >= 3
    if kind == "replicated" and size > 1:
        assert any("tables of width 4" in error for _, error, *_ in seen)


def test_the_steps_before_are_trained(by_run) -> None:
    """As many steps leave the same rows in every cache."""
    states: dict[tuple[int, int], set[str]] = {}
    for (size, _), ranks in by_run.items():
        for done, _, _, after in ranks[0].values():
            states.setdefault((size, done), set()).add(after)
    assert all(len(same) == 1 for same in states.values())


def tables(rows: list[int], dims: list[int]) -> list[TableSpec]:
    pairs = enumerate(zip(rows, dims, strict=True))
    return [TableSpec(f"t{i}", count, dim, (f"cat_{i}",)) for i, (count, dim) in pairs]


def named_rows(source: object, specs: list[TableSpec], batch: int) -> tuple[float, ...]:
    """What a step of `batch` samples is expected to name, by group."""
    return expected_rows(
        SimpleNamespace(data=SimpleNamespace(global_batch_size=batch)), source, specs, 1
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_warning_names_a_cache_that_holds_a_batch(world: int) -> None:
    rows, dims, batch = [5000, 300, 2000], [8, 8, 4], 256
    source = SyntheticSource(SyntheticSpec(rows, bag_size=[1, 2.0, 3], global_batch_size=batch))
    specs = tables(rows, dims)
    groups, expected = make_groups(specs, source.features, world), named_rows(source, specs, batch)
    sizes = [(group.layout.rows, group.dim, 0) for group in groups]

    def slots(count: int) -> list[int]:
        return cache_slots(count, None, None, sizes, 4, world)

    with warnings() as lines:
        assert warn_if_too_small(expected, groups, slots(200), batch)
    assert len(lines) == 1 and "likely too small" in lines[0]
    named = int(re.search(r"cache\.rows=(\d+)", lines[0])[1])
    assert not warn_if_too_small(expected, groups, slots(named), batch)
    assert warn_if_too_small(expected, groups, slots(named // 2), batch)
    most = np.zeros(len(groups), dtype=int)
    for step in range(10):
        ids = source.train_batch(step, 0, 1).ids
        edges = ids.offsets[:: ids.batch_size].tolist()
        for g, group in enumerate(groups):
            of_group = [
                np.unique(ids.values[edges[t] : edges[t + 1]].numpy()) + group.layout.offsets[place]
                for place, t in enumerate(group.tables)
            ]
            homes = group.layout.home(np.concatenate(of_group))
            most[g] = max(most[g], *np.bincount(homes, minlength=world))
    homes = [count // world for count in slots(named)]
    assert all(have >= need for have, need in zip(homes, most, strict=True))
    needed = smallest_cache_rows(groups, (most * world).tolist())
    assert needed <= named <= 1.5 * needed


@pytest.mark.parametrize("count", [0, 150, 400, 4000])
def test_the_warning_where_some_rows_are_replicated(count: int) -> None:
    world, batch = 2, 256
    source = SyntheticSource(SyntheticSpec([5000], bag_size=[6], global_batch_size=batch))
    (group,) = make_groups(tables([5000], [8]), source.features, world)
    group = replace(group, hot=np.arange(count))
    (total,) = expected = named_rows(source, tables([5000], [8]), batch)
    with warnings() as lines:
        assert warn_if_too_small(expected, [group], [40], batch)
    said = re.search(r"about (\d+) .* which has (\d+) slots; .* cache\.rows=(\d+)", lines[0])
    found = region_slots(group, 40)
    assert total / world <= int(said[1]) <= 1.2 * total / world
    assert int(said[2]) == found.replicated // world + found.sharded
    (enough,) = cache_slots(int(said[3]), None, None, [(5000, 8, 0)], 4, world)
    assert not warn_if_too_small(expected, [group], [enough], batch)


def test_more_slots_than_plans_can_number_are_refused() -> None:
    groups = make_groups([TableSpec("a", 2**33, 1, ("f",))], ["f"], 4)
    with pytest.raises(ConfigError, match="up to 2147483647"):
        StreamPlanner(None, groups, [None], [2**31], TableSettings())


def test_a_source_that_knows_nothing_is_not_warned_about() -> None:
    specs = tables([5], [4])
    expected = named_rows(object(), specs, 100)
    assert not warn_if_too_small(expected, make_groups(specs, ["cat_0"], 1), [1], 100)


def test_rows_that_no_cache_holds_beside_the_replicated_ones_are_told() -> None:
    """A group gets no more slots than it has rows, and half of them may be for replicated rows."""
    rows, world = 155, 4
    group = make_groups(tables([rows], [4]), ["cat_0"], world)[0]
    for hot, named in ((151, False), (8, True)):
        mixed = replace(group, hot=np.arange(hot))
        slots = cache_slots(10**6, None, None, [(rows, 4, 0)], 4, world)
        room = region_slots(mixed, slots[0] if not named else 20)
        counts = {True: room.sharded, False: room.replicated // world}
        regions = [Region(0, SimpleNamespace(slots=counts[of]), sharded=of) for of in counts]
        needs = np.full((world, 2), [90 if not named else 25, 1])
        text = str(too_large(3, "eval", [mixed], needs, regions))
        assert "cache.replicated_rows, cache.replicated_share" in text
        assert f"at home rank 0 for its distinct sharded rows, where {room.sharded} are" in text
        needs[2] = 1, 99
        other = str(too_large(4, "train", [mixed], needs, regions))
        assert other.startswith("step 4 needs 99 slots at home rank 2 for its distinct repl")
        assert ("no cache.rows holds this step" in text) != named
        found = re.search(r"cache\.rows=(\d+) or more", text)
        assert (found is not None) == named and text.startswith("step 3 (evaluation) needs")
        if found is not None:
            enough = cache_slots(int(found[1]), None, None, [(rows, 4, 0)], 4, world)
            assert region_slots(mixed, enough[0]).sharded >= 25


@examples(100)
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
