"""`cache.split`: greedy against every possibility on tiny cases, and against a proportional split
in the fetched bytes of a replay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.planner.victims import Policy
from distcache.popularity.curve import Curve, StepCurves
from distcache.popularity.slots import (
    Budget,
    SlotPlan,
    cache_bytes,
    plan_slots,
    slots_by_curve,
    statistics_of,
)
from distcache.popularity.statistics import Statistics, TableCounts
from distcache.replay import Case, replay
from distcache.trace import record_ids


def counted(feature: str, counts: np.ndarray) -> TableCounts:
    return TableCounts.of(feature, np.asarray(counts, np.int64))


def step_of(*pairs: tuple[np.ndarray, float]) -> StepCurves:
    """Tables with these counts, and how many lookups of each a step makes."""
    curves = tuple(Curve.of(counted("x", counts)) for counts, _ in pairs)
    return StepCurves(curves, tuple(lookups for _, lookups in pairs))


def table(name: str, rows: int, dim: int = 4) -> TableSpec:
    return TableSpec(name, rows, dim, (f"{name}_0",))


def test_expected_rows_of_a_step_are_those_of_its_lookups() -> None:
    rng = np.random.default_rng(0)
    counts = rng.zipf(1.3, 400).clip(max=10**4)
    step = step_of((counts, 60))
    lookups = np.repeat(np.arange(400), counts)
    drawn = [len(np.unique(rng.choice(lookups, 60, replace=False))) for _ in range(1000)]
    spread = np.std(drawn) / np.sqrt(len(drawn))
    assert abs(np.mean(drawn) - step.expected) < 5 * spread
    assert max(drawn) <= step.least_slots(1) <= 70
    assert step.least_slots(4) % 4 == 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("world", [1, 2])
def test_greedy_is_the_best_of_all_splits_of_a_tiny_budget(seed: int, world: int) -> None:
    """No split of the budget misses less, but for less than what one more block of W rows saves:
    greedy fills a knapsack but for its last item."""
    rng = np.random.default_rng(seed)
    groups, row_bytes = [], (16, 48)
    for _ in row_bytes:
        few = (rng.integers(0, 9, rng.integers(2, 7)), 0.4)
        groups.append(step_of(few, (rng.integers(0, 40, 4), 0.2)))
    least = [group.least_slots(world) for group in groups]
    full = [-(-group.rows // world) * world for group in groups]
    floor = sum(c * size for c, size in zip(least, row_bytes, strict=True))
    budget = floor + int(rng.integers(0, 300))

    def misses(slots: tuple[int, ...]) -> float:
        return sum(g.misses(g.likeliest(c)) for c, g in zip(slots, groups, strict=True))

    def cost(slots: tuple[int, ...]) -> int:
        return sum(c * size for c, size in zip(slots, row_bytes, strict=True))

    ranges = [range(a, b + 1, world) for a, b in zip(least, full, strict=True)]
    possible = [slots for slots in itertools.product(*ranges) if cost(slots) <= budget]
    found = tuple(slots_by_curve(groups, row_bytes, budget, world))
    assert found in possible
    best = min(map(misses, possible))
    largest = max(float(q.max(initial=0)) for g in groups for q in g.use) * world
    assert misses(found) <= best + largest * len(groups)
    if world == 1:  # within what the unused bytes could still save, exactly
        each = zip(groups, row_bytes, strict=True)
        rate = max(float(np.concatenate(g.use).max(initial=0)) / size for g, size in each)
        assert misses(found) <= best + (budget - cost(found)) * rate + 1e-12


def zipf_ids(rng: np.random.Generator, rows: int, exponent: float, size: int) -> np.ndarray:
    share = 1.0 / np.arange(1, rows + 1) ** exponent
    order = np.random.default_rng(rows).permutation(rows)
    return order[rng.choice(rows, size, p=share / share.sum())]


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_fewer_bytes_are_fetched_than_with_a_proportional_split(policy: str) -> None:
    """Two widths, one steep and one flat: the wide steep table needs few of its many rows."""
    tables = [table("steep", 6000, 32), table("flat", 3000, 4)]
    exponents, batch = (1.6, 0.7), 64
    rng = np.random.default_rng(5)
    steps = [
        [zipf_ids(rng, t.rows, e, batch) for t, e in zip(tables, exponents, strict=True)]
        for _ in range(600)
    ]
    before, after = steps[:300], steps[300:]
    counts = [
        np.bincount(np.concatenate([step[i] for step in before]), minlength=t.rows)
        for i, t in enumerate(tables)
    ]
    each = (counted(t.features[0], own) for t, own in zip(tables, counts, strict=True))
    statistics = Statistics(tuple(each), "ids", 300 * batch, share=0.5)
    budget = Budget(None, None, 90_000, 4, 1, batch)

    def fetched_bytes(plan: SlotPlan) -> int:
        assert cache_bytes(plan.slots, [(6000, 32, 0), (3000, 4, 0)], 4) <= 90_000
        total = 0
        for index, (spec, slots) in enumerate(zip(tables, plan.slots, strict=True)):
            trace = record_ids((step[index] for step in after), spec.rows)
            (found,) = replay(trace, [Case(Policy(policy), (slots,), 8, 1)])
            total += found.fetched * spec.dim * 4
        return total

    proportional = plan_slots(tables, [0, 0], budget, "proportional", statistics)
    by_curve = plan_slots(tables, [0, 0], budget, "by_curve", statistics)
    assert by_curve.slots[1] > proportional.slots[1]
    assert fetched_bytes(by_curve) < 0.9 * fetched_bytes(proportional)


TABLES = [table("t_a", 100), table("t_b", 50), table("t_c", 30, 8)]


def plan_of(split, statistics=None, world: int = 1, batch: int = 4, **size) -> SlotPlan:
    given = {"rows": None, "ratio": None, "bytes": None} | size
    budget = Budget(**given, itemsize=4, world_size=world, batch=batch)
    return plan_slots(TABLES, [4, 4, 1], budget, split, statistics)


def some_statistics() -> Statistics:
    rng = np.random.default_rng(0)
    return Statistics(
        tuple(counted(t.features[0], rng.integers(0, 30, t.rows)) for t in TABLES), "ids", 500
    )


def test_rows_by_table_and_without_statistics() -> None:
    plan = plan_of({"t_a": 20, "t_b_0": 7, "t_c": 5}, world=3)
    assert plan == SlotPlan((27, 6), (20, 7, 5)), "t_b by its feature; slots up to a multiple of 3"
    assert plan_of({"t_a": 20, "t_c": 5}, rows=25).hot_rows == (20, 0, 5)
    assert plan_of("proportional", rows=36) == SlotPlan((30, 6), (0, 0, 0))


def test_hot_rows_are_the_likeliest_of_each_group() -> None:
    statistics = some_statistics()
    plan = plan_of("proportional", statistics, rows=36)
    assert plan.slots == (30, 6) and sum(plan.hot_rows[:2]) == 30 and plan.hot_rows[2] == 6
    use, rest = [], []
    for counted_table, hot in list(zip(statistics.tables, plan.hot_rows, strict=True))[:2]:
        curve = Curve.of(counted_table, 500)
        chance = np.repeat(curve.touched(4 * curve.per_sample), curve.rows.astype(int))
        use.append(chance[hot - 1])
        rest.append(chance[hot])
    assert min(use) > 0
    assert min(use) >= max(rest)


@pytest.mark.parametrize(
    ("split", "size", "message"),
    [
        ({"t_x": 3}, {}, r"t_x=3 names no table: choose from t_a, t_b, t_c"),
        ({"t_a": 101}, {}, r"t_a=101, but the table has 100 rows"),
        ({"t_a": -1}, {}, r"t_a=-1: give a whole number"),
        ({"t_a": 1.5}, {}, r"t_a=1\.5: give a whole number"),
        ({"t_a": 3, "t_a_0": 4}, {}, r"t_a_0=4 names the table that t_a names"),
        ({"t_a": 3}, {}, r"no row to the tables of width 8 \(t_c\)"),
        ({"t_a": 20, "t_c": 9}, {"rows": 28}, r"29 rows, more than cache\.rows=28"),
        ({"t_a": 20, "t_c": 9}, {"bytes": 963}, r"964 bytes, more than cache\.bytes=963"),
        ({"t_a": 20, "t_c": 9}, {"ratio": 0.5}, r"cache\.ratio=0\.5 .* contradict"),
        ("halves", {}, r"cache\.split=halves is unknown"),
        ("by_curve", {}, r"cache\.split=by_curve needs to know"),
    ],
)
def test_splits_that_do_not_fit_are_refused(split, size, message) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(split, **size)


def test_groups_too_small_for_a_step_are_refused() -> None:
    statistics = some_statistics()
    with pytest.raises(ConfigError, match=r"t_c_0, but a step is expected to need \d\d of their"):
        plan_of({"t_a": 100, "t_b": 50, "t_c": 9}, statistics, batch=40)
    with pytest.raises(ConfigError, match=r"set cache\.bytes=(\d+) or more") as refusal:
        plan_of("by_curve", statistics, bytes=100)
    enough = int(str(refusal.value).split("cache.bytes=")[1].split()[0])
    assert cache_bytes(plan_of("by_curve", statistics, bytes=enough).slots, SIZES, 4) <= enough
    with pytest.raises(ConfigError):
        plan_of("by_curve", statistics, bytes=enough - 1)


SIZES = [(150, 4, 4), (30, 8, 1)]


def test_statistics_by_feature_for_tables_of_several() -> None:
    a, b = counted("x", [3, 0, 1]), counted("y", [0, 0, 2])
    other = counted("z", [1, 1])
    both = TableSpec("both", 3, 4, ("x", "y"))
    found = statistics_of(
        Statistics((other, b, a), "ids", 9), [both, TableSpec("z", 2, 4, ("z",))], "here"
    )
    assert found.tables[0].dense().tolist() == [3, 0, 3] and found.tables[0].distinct == 2
    assert found.tables[0].lookups == 6 and found.tables[1] is other
    for wrong in (TableSpec("both", 4, 4, ("x", "y")), TableSpec("w", 3, 4, ("x", "w"))):
        with pytest.raises(ConfigError, match=r"here \(fingerprint [0-9a-f]{16}\).* fingerprint"):
            statistics_of(Statistics((other, b, a), "ids", 9), [wrong], "here")


@pytest.mark.parametrize("homes", [1, 4])
def test_pinned_rows_leave_room_for_those_of_the_next_steps(homes: int) -> None:
    rng = np.random.default_rng(2)
    step = step_of(*((rng.zipf(1.3, 4000).clip(max=10**4), 200) for _ in range(2)))
    for slots in (900, 2000, 8000):
        pinned = step.pinned(slots, 2, homes)
        others = 2 * step.misses(pinned)
        assert sum(pinned) + others <= slots
        assert slots == 8000 or sum(pinned) + others > 0.5 * slots
        assert pinned == step.likeliest(sum(pinned))
    assert step.pinned(10, 2, homes) == [0, 0], "a cache that holds no step pins nothing"
