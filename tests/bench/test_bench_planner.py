"""The planner's bench at a small size: it plans as training does, and its numbers agree."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from bench_checks import check_spread, of, read_report
from simulator import simulate

from distcache.bench import plan_runs
from distcache.bench.plan_ids import by_rank, compose_plan
from distcache.bench.plan_placements import PlacedGroup, Placer, hot_ids
from distcache.bench.plan_runs import PlanningRun, distinct_contenders, evictions, timed_loops
from distcache.bench.plan_tables import tables
from distcache.bench.planner import main
from distcache.comm.rendezvous import Place
from distcache.engine.groups import RegionSlots, make_groups
from distcache.layout import TableSpec
from distcache.planner import loops
from distcache.replay import PlannerSettings
from distcache.step_plan import check_plan_fully
from distcache.trainer.plan_cache import window_steps

KINDS = ("replicated", "sharded", "mixed")
ARGUMENTS = ["size=small", "batch=96", "steps=3", "repetitions=2", "share=0.01"]
ARGUMENTS.append("placements=replicated,sharded,mixed")
PARTS = {"request", "ingest", "plan", "assemble", "check"}
BODIES = ("compiled",)
RUNS = {
    (kind, world, body)
    for kind in KINDS
    for world in (1, 2)
    for body in BODIES
    if kind == "replicated" or world > 1
}


def run_of(record: dict) -> tuple:
    return record["placement"], record["world_size"], record["body"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The header and records of one run."""
    out = tmp_path_factory.mktemp("bench") / "planner.md"
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    assert main([*ARGUMENTS, f"out={out}"]) == 0
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, cores)
    return read_report(out, tables)


def test_rates_and_ratios_are_of_the_turns(report):
    head, records = report
    assert head["settings"]["batch"] == 96
    turns = of(records, "turn")
    by_name: dict[str, list[float]] = {}
    on_core: dict[str, list[float]] = {}
    for turn in sorted(turns, key=lambda turn: turn["repetition"]):
        assert turn["ids"] == 3 * 96 * 6
        assert turn["seconds"] > 0
        on_core.setdefault(turn["contender"], []).append(turn["ids"] / turn["cpu_seconds"])
        by_name.setdefault(turn["contender"], []).append(turn["ids"] / turn["seconds"])
    assert {f"plan, {kind}, W = {world}, {body}" for kind, world, body in RUNS} <= set(by_name)
    found = {f"distinct by {how}, {body}" for how in ("index", "hash") for body in BODIES}
    assert found | {"np.unique"} <= set(by_name)
    for rate in of(records, "rate"):
        own, unique = by_name[rate["contender"]], by_name["np.unique"]
        assert len(own) == 2
        check_spread(rate["ids_per_second"], own)
        check_spread(rate["ids_per_cpu_second"], on_core[rate["contender"]])
        check_spread(rate["ratio"], [a / b for a, b in zip(own, unique, strict=True)])
    assert len(of(records, "rate")) == len(by_name)


def test_parts_sum_to_the_turns(report):
    _, records = report
    assert {run_of(parts) for parts in of(records, "parts")} == RUNS
    for parts in of(records, "parts"):
        world = parts["world_size"]
        assert set(parts["ms"]) == PARTS
        name = f"plan, {parts['placement']}, W = {world}, {parts['body']}"
        turns = [t["seconds"] for t in of(records, "turn") if t["contender"] == name]
        np.testing.assert_allclose(
            sum(parts["ms"].values()), 1e3 * sum(turns) / (2 * 3 * world), rtol=1e-9
        )
    for inside in of(records, "loops"):
        assert {"name_rows", "look_up", "fill", "order_ids"} <= set(inside["ms"])
        assert ("find_rows" in inside["ms"]) == (inside["world_size"] > 1)
        assert ("divide" in inside["ms"]) == (inside["placement"] != "replicated")
        assert all(ms > 0 for ms in inside["ms"].values())


def test_the_exchange_is_timed_by_rank(report):
    _, records = report
    exchanges = of(records, "exchange")
    assert [run_of(r) for r in exchanges] == [(kind, 2, body) for kind in KINDS for body in BODIES]
    for record in exchanges:
        assert record["world_size"] == 2 and record["steady_eviction"] is True
        assert record["ids"] == 3 * 96 * 6
        rates = [record["ids"] / (2 * seconds) for seconds in record["seconds"]]
        assert len(rates) == 2
        check_spread(record["ids_per_second"], rates)
        on_cores = [record["ids"] / seconds for seconds in record["cpu_seconds"]]
        check_spread(record["ids_per_cpu_second"], on_cores)
        assert set(record["ms"]) == PARTS | {"exchange"}
        assert sum(record["ms"].values()) * 3 * 2 <= 1e3 * sum(record["seconds"])
        assert record["planning_bytes"] == sum(record["planning_bytes_by_rank"]) / 2
    sent = {run_of(record): record["planning_bytes_by_rank"] for record in exchanges}
    # Of sharded rows a rank learns about its own alone.
    means = [np.mean(sent[kind, 2, "compiled"]) for kind in ("sharded", "mixed", "replicated")]
    assert 0 < means[0] < means[1] < means[2]


def test_compiling_is_reported_apart_from_loading(report):
    _, records = report
    assert [record["loops"] for record in of(records, "start")] == ["compiled", "loaded from disk"]
    assert all(r["import_s"] > 0 and r["loops_s"] > 0 for r in of(records, "start"))


def test_index_and_eviction(report):
    _, records = report
    assert {run_of(index) for index in of(records, "index")} == RUNS
    for index in of(records, "index"):
        assert index["steady_eviction"] is True
        assert index["rows"] == 26213
        hot = 9 * (0.01 * 26213 + 2) if index["placement"] == "mixed" else 0
        assert index["index_bytes"] <= 9 * (index["rows"] + index["world_size"]) + hot
        assert index["misses_per_step"] == index["evictions_per_step"] > 0
        assert index["steps"] == 3 * 2 + 3


def placed(world: int, kind: str = "replicated") -> PlacedGroup:
    """300 rows in 100 slots for the replicated ones, or 20 hot ones, and 60 for sharded ones."""
    group = make_groups([TableSpec("t", 300, 4, ("f",))], ["f"], world)[0]
    if kind == "replicated":
        return PlacedGroup(group, RegionSlots(100))
    hot = np.arange(0, 300, 15) if kind == "mixed" else np.empty(0, np.int64)
    own = 20 * world if kind == "mixed" else 0
    return PlacedGroup(replace(group, hot=hot), RegionSlots(own, 60))


@pytest.mark.parametrize(
    ("kind", "world"),
    [("replicated", 1), ("replicated", 2), *((k, w) for k in ("sharded", "mixed") for w in (2, 3))],
)
def test_plans_are_those_of_the_simulator(kind, world):
    of = placed(world, kind)
    random = np.random.default_rng(0)
    steps = [random.integers(0, 300, (1, 40)) for _ in range(12)]
    run = PlanningRun(of, lookahead=2, prefetch=1)
    got = [plans for rows in steps for plans in [run.step(by_rank(rows, world))] if plans]
    hot, slots = of.group.hot, of.slots
    settings = PlannerSettings(slots.all, 2, 1, hot=hot, replicated=slots.replicated)
    streamed = [by_rank(rows, world) for rows in steps]
    expected = list(simulate(of.group.layout, settings, streamed))
    assert len(got) == 12 - 2
    for plans, others in zip(got, expected, strict=False):
        for plan, other in zip(plans, others, strict=True):
            check_plan_fully(plan, slots.all)
            assert equal_plans(plan, other)
    assert run.counts["misses"] == sum(plans[0].all_misses for plans in got)
    assert run.counts["evictions"] == sum(map(evictions, got)) > 0
    per_home = slots.sharded + slots.replicated // world
    assert run.slots == (per_home if hot is not None else 100 // world) * world


def equal_plans(one: object, other: object) -> bool:
    """Whether two plans are the same, field by field."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if hasattr(one, "__dict__"):
        return all(equal_plans(value, vars(other)[name]) for name, value in vars(one).items())
    return one == other


def test_hot_ids_are_the_most_frequent_of_the_first_steps():
    config = compose_plan("small", 96, (), Place())
    placer = Placer(config, 0.01)
    tables, steps = placer.tables, window_steps(config.cache)
    hot = hot_ids(placer.source, tables, steps, 0.01)
    uses: dict[tuple[int, int], int] = {}
    for step in range(steps):
        ids = placer.source.train_batch(step, 0, 1).ids.values.view(len(tables), -1)
        for table, values in enumerate(ids.tolist()):
            for value in values:
                uses[table, value] = uses.get((table, value), 0) + 1
    chosen = {(table, row) for table, rows in enumerate(hot) for row in rows.tolist()}
    assert len(chosen) == round(0.01 * sum(table.rows for table in tables))
    assert all((np.diff(rows) > 0).all() for rows in hot)
    least = min(uses[key] for key in chosen)
    assert least >= max(count for key, count in uses.items() if key not in chosen) > 0


def test_timing_inside_changes_nothing_and_ends():
    runs = [PlanningRun(placed(1), 1, 1) for _ in range(2)]
    before = dict(vars(loops))
    random = np.random.default_rng(1)
    for step in range(8):
        rows = by_rank(random.integers(0, 300, (1, 60)), 1)
        plain = runs[0].step(rows)
        with timed_loops() as seconds:
            watched = runs[1].step(rows)
        assert set(seconds) >= ({"name_rows", "look_up"} if step else {"name_rows"})
        for one, other in zip(plain, watched, strict=True):
            assert torch.equal(one.slots, other.slots)
            assert torch.equal(one.evict_slots, other.evict_slots)
    assert dict(vars(loops)) == before


def test_all_contenders_find_the_same_number_of_rows():
    ids = np.random.default_rng(2).integers(0, 50, 400)
    for name, find in distinct_contenders(50, BODIES).items():
        found = find(ids)
        assert len(found[0] if isinstance(found, tuple) else found) == len(np.unique(ids)), name
        wall, cpu = plan_runs.run_distinct(find, [ids, ids])
        assert wall > 0 and cpu > 0


def test_samples_are_split_over_ranks_in_order():
    rows = np.arange(15).reshape(3, 5)
    first, second = by_rank(rows, 2)
    assert first.tolist() == [0, 1, 5, 6, 10, 11]
    assert second.tolist() == [2, 3, 4, 7, 8, 9, 12, 13, 14]


def test_what_cannot_be_measured_is_refused(capsys):
    assert main(["size=small", "data.bag_size=3"]) == 1
    assert main(["size=small", "placements=sharded,spread"]) == 1
    assert "placements=spread: choose from replicated, sharded, mixed" in capsys.readouterr().err
    assert main(["size=small", "placements=mixed", "share=1.5"]) == 1
    assert "share=1.5" in capsys.readouterr().err
    assert main(["size=small", "batch=5000", "cache.ratio=0.01", "repetitions=1"]) == 1
    assert "slots" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "worlds=1,2" in capsys.readouterr().out
