"""Statistics on disk and shared by a node; `cache.split` against every possibility on tiny cases,
and in the fetched bytes of a replay; classes and pins counted from a trace."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulator import record_ids

from distcache.config.tree import CacheConfig
from distcache.errors import ConfigError, DataError, MemoryTooSmallError
from distcache.layout import RowLayout, TableSpec
from distcache.optim import row_update
from distcache.planner.victims import PINNED, Policy
from distcache.popularity.curve import Curve
from distcache.popularity.slots import (
    StepCurves,
    cache_bytes,
    slots_by_curve,
    statistics_of,
)
from distcache.popularity.statistics import (
    Popularity,
    Statistics,
    TableCounts,
    read_statistics,
    row_classes,
    share_popularity,
    write_statistics,
)
from distcache.replay import Case, popularity_of, replay
from distcache.sizing.slots import CacheRequest, SlotPlan
from distcache.store import memory as available
from distcache.trace import Trace


@pytest.fixture
def statistics() -> Statistics:
    dense = TableCounts("a", 4, 111, 3, np.array([1, 100, 0, 10], dtype=np.uint32))
    sparse = TableCounts("b", 10, 12, 2, np.array([5, 5]), np.array([3, 9]))
    return Statistics((dense, sparse), "ids", 100)


def test_what_is_written_is_read(tmp_path: Path, statistics: Statistics) -> None:
    write_statistics(tmp_path, statistics)
    found = read_statistics(tmp_path)
    assert found.fingerprint == statistics.fingerprint
    assert (found.samples, found.vocabulary) == (100, "ids")
    nothing = np.empty(0)
    for one, other in zip(found.tables, statistics.tables, strict=True):
        assert one.dense().tolist() == other.dense().tolist()
        plain = [replace(table, counts=nothing, ids=None) for table in (one, other)]
        assert str(plain[0]) == str(plain[1])
    assert found.tables[0].order.tolist() == [1, 3, 0]
    assert found.tables[1].order[:1].tolist() == [3]
    tables = [TableSpec("a", 4, 4, ("a",)), TableSpec("b", 10, 4, ("b",))]
    assert statistics_of(found, tables, "here", "ids").fingerprint == found.fingerprint
    others = TableSpec("b", 10, 4, ("c",)), TableSpec("b", 11, 4, ("b",))
    for wrong in (*((tables[0], one) for one in others), tables):
        with pytest.raises(ConfigError, match=f"(?s){statistics.fingerprint}.*: fingerprint"):
            statistics_of(statistics, wrong, "here", "hash" if wrong is tables else "ids")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(3), "has 3 entries"),
        (np.array([1, -1, 0, 2]), "other entries than counts"),
        (np.ones(4), "other entries than counts"),
    ],
)
def test_missing_and_damaged_statistics(tmp_path, statistics, values, message) -> None:
    with pytest.raises(ConfigError, match=r"holds neither statistics\.json nor manifest"):
        read_statistics(tmp_path)
    write_statistics(tmp_path, statistics)
    np.save(tmp_path / "counts/0.npy", values)
    with pytest.raises(DataError, match=f"{message}.*count again"):
        read_statistics(tmp_path)


def test_classes_rise_with_counts(statistics: Statistics) -> None:
    classes = row_classes(statistics, [0, 1], [1, 0])
    assert classes.dtype == np.uint8 and len(classes) == 14
    assert classes[:4].tolist() == [1, PINNED, 0, 1 + round(8 * np.log2(10))]
    assert np.flatnonzero(classes[4:]).tolist() == [3, 9]


SHARED = [TableSpec("a", 5, 4, ("a_0",)), TableSpec("b", 601, 4, ("b_0",))]


def some() -> Statistics:
    counts = [np.array([3, 0, 9, 0, 9]), np.random.default_rng(0).zipf(1.4, 601).clip(max=999) - 1]
    tables = [TableCounts.of(t.name, own) for t, own in zip(SHARED, counts, strict=True)]
    return Statistics(tuple(tables), "ids", 500)


@pytest.mark.parametrize("homes", [1, 3, 4])
def test_each_home_reads_the_classes_of_its_rows(world, homes: int) -> None:
    statistics, layout = some(), RowLayout(SHARED, homes)
    popularity = Popularity(statistics, (2, 40), classes=True, pinned_rows=(1, 30))
    (shared,) = share_popularity(world, [layout], [(0, 1)], popularity)
    expected = row_classes(statistics, [0, 1], [1, 30])
    assert np.array_equal(shared.classes, expected)
    assert shared.hot is None
    every = np.arange(layout.local_rows)
    for home in range(homes):
        rows = layout.row(home, every)
        padded = np.append(expected, np.zeros(homes, np.uint8))  # the last index may be of no row
        assert np.array_equal(shared.classes_at(layout, home), padded[rows])


def test_hot_rows_are_the_likeliest_of_the_group(world) -> None:
    statistics, layout = some(), RowLayout(SHARED, 1)
    popularity = Popularity(statistics, (3, 300), warm_start=0.5)
    (shared,) = share_popularity(world, [layout], [(0, 1)], popularity)
    counts = np.concatenate([table.dense() for table in statistics.tables])
    known = shared.hot[shared.hot >= 0]
    assert set(known[known < 5].tolist()) == {0, 2, 4}
    assert len(known) == 3 + min(300, statistics.tables[1].distinct)
    assert (np.diff(counts[known]) <= 0).all(), "per step and sample a count is a likelihood"
    assert (shared.hot[len(known) :] == -1).all()
    nothing = share_popularity(world, [layout], [(0, 1)], replace(popularity, warm_start=0.0))
    assert nothing[0].hot is None and nothing[0].classes is None


def test_a_node_without_memory_for_the_classes_says_so(world, monkeypatch) -> None:
    monkeypatch.setattr(available, "available_memory", lambda: 605)
    with pytest.raises(MemoryTooSmallError, match=r"popularity of the rows.*cache\.warm_start=0"):
        share_popularity(
            world, [RowLayout(SHARED, 1)], [(0, 1)], Popularity(some(), (0, 0), classes=True)
        )


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
    rows = [sum(curve.table_rows for curve in group.tables) for group in groups]
    full = [-(-count // world) * world for count in rows]
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
    each = []
    for index, spec in enumerate(tables):
        ids = np.concatenate([step[index] for step in before])
        each.append(counted(spec.features[0], np.bincount(ids, minlength=spec.rows)))
    statistics = Statistics(tuple(each), "ids", 300 * batch)

    def fetched_bytes(plan: SlotPlan) -> int:
        assert cache_bytes(plan.slots, [(6000, 32, 0), (3000, 4, 0)], 4) <= 90_000
        total = 0
        for index, (spec, slots) in enumerate(zip(tables, plan.slots, strict=True)):
            trace = record_ids((step[index] for step in after), spec.rows)
            (found,) = replay(trace, [Case(Policy(policy), (slots,), 8, 1)])
            total += found.fetched * spec.dim * 4
        return total

    proportional, by_curve = (
        request_of(tables, "sgd", batch, split=split, bytes=90_000).plan(1, statistics)
        for split in ("proportional", "by_curve")
    )
    assert by_curve.slots[1] > proportional.slots[1]
    assert fetched_bytes(by_curve) < 0.9 * fetched_bytes(proportional)


TABLES = [table("t_a", 100), table("t_b", 50), table("t_c", 30, 8)]


def plan_of(split, statistics=None, world: int = 1, batch: int = 4, **size) -> SlotPlan:
    return request_of(TABLES, "adagrad", batch, split=split, **size).plan(world, statistics)


def request_of(tables, optimizer: str, batch: int, **keys) -> CacheRequest:
    own = CacheConfig(**{"rows": None, "ratio": None, "bytes": None} | keys)
    return CacheRequest(tables, own, row_update(optimizer, 0.0), batch, 4, 8, 1, "bytes")


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
    for one, hot in zip(statistics.tables[:2], plan.hot_rows[:2], strict=True):
        curve = Curve.of(one, 500)
        chance = np.repeat(curve.touched(4 * curve.per_sample), curve.rows.astype(int))
        use.append(chance[hot - 1])
        rest.append(chance[hot])
    assert min(use) > 0 and min(use) >= max(rest)


@pytest.mark.parametrize(
    ("split", "size", "message"),
    [
        ({"t_x": 3}, {}, r"t_x=3 names no table: choose from t_a, t_b, t_c"),
        ({"t_a": 101}, {}, r"t_a=101, but the table has 100 rows"),
        ({"t_a": 3, "t_a_0": 4}, {}, r"t_a_0=4 names the table that t_a names"),
        ({"t_a": 3}, {}, r"no row to the tables of width 8 \(t_c\)"),
        ({"t_a": 20, "t_c": 9}, {"rows": 28}, r"29 rows, more than cache\.rows=28"),
        ({"t_a": 20, "t_c": 9}, {"bytes": 1215}, r"1216 bytes, more than cache\.bytes=1215"),
        ({"t_a": 20, "t_c": 9}, {"ratio": 0.5}, r"cache\.ratio=0\.5 .* contradict"),
    ],
)
def test_splits_that_do_not_fit_are_refused(split, size, message) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(split, **size)


def test_groups_too_small_for_a_step_are_refused() -> None:
    statistics = some_statistics()
    with pytest.raises(ConfigError, match=r"t_c, but a step is expected to need \d\d of their"):
        plan_of({"t_a": 100, "t_b": 50, "t_c": 9}, statistics, batch=40)
    with pytest.raises(ConfigError, match=r"set cache\.bytes=(\d+) or more") as refusal:
        plan_of("by_curve", statistics, bytes=100)
    enough = int(str(refusal.value).split("cache.bytes=")[1].split()[0])
    assert cache_bytes(plan_of("by_curve", statistics, bytes=enough).slots, SIZES, 4) <= enough
    with pytest.raises(ConfigError):
        plan_of("by_curve", statistics, bytes=enough - 1)


SIZES = [(150, 4, 4), (30, 8, 8)]


def test_statistics_by_feature_for_tables_of_several() -> None:
    a, b = counted("x", [3, 0, 1]), counted("y", [0, 0, 2])
    other = counted("z", [1, 1])
    both = TableSpec("both", 3, 4, ("x", "y"))
    found = statistics_of(
        Statistics((other, b, a), "ids", 9), [both, TableSpec("z", 2, 4, ("z",))], "here"
    )
    assert found.tables[0].dense().tolist() == [3, 0, 3] and found.tables[0].distinct == 2
    assert found.tables[0].lookups == 6 and found.tables[1] is other
    shared = [TableSpec(name, 3, 4, (f"x@{name}",)) for name in ("deep", "wide")]
    found = statistics_of(Statistics((a,), "ids", 9), shared, "here")
    assert found.tables == (a, a)
    for wrong in (TableSpec("both", 4, 4, ("x", "y")), TableSpec("w", 3, 4, ("x", "w"))):
        with pytest.raises(
            ConfigError, match=r"here are .*\(fingerprint [0-9a-f]{16}\); .* fingerprint"
        ):
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


@pytest.fixture(scope="module", params=[1, 2])
def trace(request: pytest.FixtureRequest) -> Trace:
    rng = np.random.default_rng(0)
    stream = [(rng.random(60) ** 4 * 500).astype(np.int64) for _ in range(40)]
    return record_ids(stream, 520, worlds=(request.param,))


def case_of(name: str, trace: Trace, slots: int = 120, prefetch: int = 1) -> Case:
    (world,) = trace.homes
    return Case(Policy(name), (slots,), 0, prefetch, world)


def test_classes_are_counts_and_pins_the_hottest(trace: Trace) -> None:
    rows, counts = trace.row_counts()
    dense = np.zeros(520, np.int64)
    dense[rows] = counts
    popularity = popularity_of([trace])
    assert popularity(case_of("lru", trace), 0) is None
    plain = popularity(case_of("frequency", trace), 0)
    assert plain is not None and plain.dtype == np.uint8 and plain.shape == (520,)
    seen = dense > 0
    assert (plain[~seen] == 0).all()
    assert plain[seen].tolist() == (1 + np.rint(8 * np.log2(dense[seen]))).tolist()
    pinned = popularity(case_of("static", trace, 300), 0)
    assert pinned is not None
    hot = pinned == PINNED
    assert (pinned[~hot] == plain[~hot]).all() and hot.any()
    assert dense[hot].min() >= dense[~hot].max()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_pins_leave_room_for_the_other_rows(trace: Trace, prefetch: int) -> None:
    popularity, pinned = popularity_of([trace]), []
    for slots in (160, 300, 2000):
        case = case_of("static", trace, slots, prefetch)
        (outcome,) = replay(trace, [case], popularity)
        assert outcome.refused is None and outcome.tight_steps == 0
        pinned.append(int((popularity(case, 0) == PINNED).sum()))
    assert pinned == sorted(pinned) and pinned[-1] == len(trace.row_counts()[0])
    (world,) = trace.homes
    largest = max(home.distinct.max() for home in trace.homes[world])
    too_small = case_of("static", trace, int(largest) * world)
    assert not (popularity(too_small, 0) == PINNED).any()
