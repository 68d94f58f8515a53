"""The planner's bench at a small size: it plans as training does, and its numbers agree."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from bench_checks import check_spread, of, read_report

from distcache.bench import plan_runs
from distcache.bench.plan_ids import by_rank
from distcache.bench.plan_runs import PlanningRun, distinct_contenders, timed_loops
from distcache.bench.plan_tables import tables
from distcache.bench.planner import main
from distcache.layout import RowLayout, TableSpec
from distcache.planner.bodies import NAMES, bodies
from distcache.planner.simulator import PlannerSettings, simulate
from distcache.step_plan import check_plan_fully

ARGUMENTS = ["size=small", "batch=96", "steps=3", "repetitions=2"]
PARTS = {"request", "ingest", "plan", "assemble", "check"}
BODIES = ("compiled", "numpy")
RUNS = {(world, body) for world in (1, 2) for body in BODIES}


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
    assert {f"plan, W = {world}, {body}" for world, body in RUNS} <= set(by_name)
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
    assert {(p["world_size"], p["body"]) for p in of(records, "parts")} == RUNS
    for parts in of(records, "parts"):
        world = parts["world_size"]
        assert set(parts["ms"]) == PARTS
        name = f"plan, W = {world}, {parts['body']}"
        turns = [t["seconds"] for t in of(records, "turn") if t["contender"] == name]
        np.testing.assert_allclose(
            sum(parts["ms"].values()), 1e3 * sum(turns) / (2 * 3 * world), rtol=1e-9
        )
    for inside in of(records, "loops"):
        asked = {"find_rows"} if inside["world_size"] > 1 else set()
        assert set(inside["ms"]) == set(NAMES) - {"find_rows"} | asked
        assert all(ms > 0 for ms in inside["ms"].values())


def test_the_exchange_is_timed_by_rank_and_both_bodies_send_the_same(report):
    _, records = report
    exchanges = of(records, "exchange")
    assert [record["body"] for record in exchanges] == list(BODIES)
    for record in exchanges:
        assert record["world_size"] == 2 and record["steady_eviction"] is True
        assert record["ids"] == 3 * 96 * 6
        rates = [record["ids"] / (2 * seconds) for seconds in record["seconds"]]
        assert len(rates) == 2
        check_spread(record["ids_per_second"], rates)
        on_cores = [record["ids"] / seconds for seconds in record["cpu_seconds"]]
        check_spread(record["ids_per_cpu_second"], on_cores)
        assert set(record["ms"]) == PARTS | {"exchange of requests", "exchange of decisions"}
        assert sum(record["ms"].values()) * 3 * 2 <= 1e3 * sum(record["seconds"])
    assert exchanges[0]["planning_bytes"] == exchanges[1]["planning_bytes"] > 0


def test_compiling_is_reported_apart_from_loading(report):
    _, records = report
    assert [record["loops"] for record in of(records, "start")] == ["compiled", "loaded from disk"]
    assert all(r["import_s"] > 0 and r["loops_s"] > 0 for r in of(records, "start"))


def test_index_and_eviction(report):
    _, records = report
    assert {(i["world_size"], i["body"]) for i in of(records, "index")} == RUNS
    for index in of(records, "index"):
        assert index["steady_eviction"] is True
        assert index["rows"] == 26213
        assert index["index_bytes"] <= 9 * (index["rows"] + index["world_size"])
        assert index["misses_per_step"] == index["evictions_per_step"] > 0
        assert index["steps"] == 3 * 2 + 3


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("world", [1, 2])
def test_plans_are_those_of_the_simulator(world, body):
    layout = RowLayout([TableSpec("t", 300, 4, ("f",))], world)
    random = np.random.default_rng(0)
    steps = [random.integers(0, 300, (1, 40)) for _ in range(12)]
    run = PlanningRun(layout, 100, lookahead=2, prefetch=1, body=body)
    got = [plans for rows in steps for plans in [run.step(by_rank(rows, world))] if plans]
    settings = PlannerSettings(slots=100, lookahead=2, prefetch=1)
    expected = list(simulate(layout, settings, [by_rank(rows, world) for rows in steps]))
    assert len(got) == 12 - 2
    for plans, others in zip(got, expected, strict=False):
        for plan, other in zip(plans, others, strict=True):
            check_plan_fully(plan, 100)
            assert torch.equal(plan.slots, other.slots)
            assert torch.equal(plan.evict_rows, other.evict_rows)
            assert torch.equal(plan.positions, other.positions)
            assert plan.move_after == other.move_after
    assert run.counts["misses"] == sum(plans[0].misses for plans in got)
    assert run.counts["evictions"] > 0


def test_timing_inside_changes_nothing_and_ends():
    layout = RowLayout([TableSpec("t", 300, 4, ("f",))], 1)
    runs = [PlanningRun(layout, 100, 1, 1, body) for body in BODIES]
    before, original = bodies(), runs[1].bodies
    random = np.random.default_rng(1)
    for step in range(8):
        rows = by_rank(random.integers(0, 300, (1, 60)), 1)
        plain = runs[0].step(rows)
        with timed_loops(runs[1]) as seconds:
            watched = runs[1].step(rows)
        first = {"name_rows", "group", "want"}
        assert set(seconds) >= (set(NAMES) - {"find_rows", "live", "count_uses"} if step else first)
        for one, other in zip(plain, watched, strict=True):
            assert torch.equal(one.slots, other.slots)
            assert torch.equal(one.evict_slots, other.evict_slots)
    assert bodies() is before and runs[1].bodies is original


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
    assert main(["size=small", "batch=5000", "cache.ratio=0.01", "repetitions=1"]) == 1
    assert "slots" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "worlds=1,2" in capsys.readouterr().out
