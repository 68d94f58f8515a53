"""The planner's bench at a small size: it plans as training does, and its numbers agree."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from bench_checks import check_spread, of, read_report

from distcache.bench import plan_runs
from distcache.bench.plan_runs import PlanningRun, distinct_contenders, inner_parts
from distcache.bench.plan_tables import tables
from distcache.bench.planner import by_rank, main
from distcache.layout import RowLayout, TableSpec
from distcache.planner import home as home_module
from distcache.planner.simulator import PlannerSettings, simulate
from distcache.step_plan import check_plan_fully

ARGUMENTS = ["size=small", "batch=96", "steps=3", "repetitions=2"]
PARTS = {"request", "ingest", "plan", "assemble", "check"}


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
    for turn in sorted(turns, key=lambda turn: turn["repetition"]):
        assert turn["ids"] == 3 * 96 * 6
        assert turn["seconds"] > 0
        by_name.setdefault(turn["contender"], []).append(turn["ids"] / turn["seconds"])
    assert {"plan, W = 1", "plan, W = 2", "np.unique", "by_index", "by_hash"} <= set(by_name)
    for rate in of(records, "rate"):
        own, unique = by_name[rate["contender"]], by_name["np.unique"]
        assert len(own) == 2
        check_spread(rate["ids_per_second"], own)
        check_spread(rate["ratio"], [a / b for a, b in zip(own, unique, strict=True)])
    assert len(of(records, "rate")) == len(by_name)


def test_parts_sum_to_the_turns(report):
    _, records = report
    for parts in of(records, "parts"):
        world = parts["world_size"]
        assert set(parts["ms"]) == PARTS
        turns = [
            t["seconds"] for t in of(records, "turn") if t["contender"] == f"plan, W = {world}"
        ]
        np.testing.assert_allclose(
            sum(parts["ms"].values()), 1e3 * sum(turns) / (2 * 3 * world), rtol=1e-9
        )
        assert parts["inside_ms"]["argsort"] > 0
    for inside in of(records, "inside"):
        assert set(inside["ms"]) == {"distinct", "window", "victims", "filing"}


def test_index_and_eviction(report):
    _, records = report
    for index in of(records, "index"):
        assert index["steady_eviction"] is True
        assert index["rows"] == 26213
        assert index["index_bytes"] <= 8 * (index["rows"] + index["world_size"])
        assert index["misses_per_step"] == index["evictions_per_step"] > 0
        assert index["steps"] == 3 * 2 + 3


@pytest.mark.parametrize("world", [1, 2])
def test_plans_are_those_of_the_simulator(world):
    layout = RowLayout([TableSpec("t", 300, 4, ("f",))], world)
    random = np.random.default_rng(0)
    steps = [random.integers(0, 300, (1, 40)) for _ in range(12)]
    run = PlanningRun(layout, 100, lookahead=2, prefetch=1)
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
    runs = [PlanningRun(layout, 100, lookahead=1, prefetch=1) for _ in range(2)]
    original = home_module.by_index
    random = np.random.default_rng(1)
    for step in range(8):
        rows = by_rank(random.integers(0, 300, (1, 60)), 1)
        plain = runs[0].step(rows)
        with inner_parts(runs[1]) as seconds:
            watched = runs[1].step(rows)
        assert set(seconds) == (
            {"distinct", "window", "victims", "filing"}
            if step
            else {
                "distinct",
                "window",
            }
        )
        for one, other in zip(plain, watched, strict=True):
            assert torch.equal(one.slots, other.slots)
            assert torch.equal(one.evict_slots, other.evict_slots)
    assert home_module.by_index is original
    assert "take" not in vars(runs[1].homes[0]._table)
    assert "_refer" not in vars(runs[1].homes[0])


def test_all_contenders_find_the_same_number_of_rows():
    ids = np.random.default_rng(2).integers(0, 50, 400)
    for name, find in distinct_contenders(50).items():
        found = find(ids)
        assert len(found[0] if isinstance(found, tuple) else found) == len(np.unique(ids)), name
        assert plan_runs.run_distinct(find, [ids, ids]) > 0


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
