"""The planner's bench at a small size: it plans as training does, and its numbers agree."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from benchmark_checks import of, read_report
from ranks import run_ranks

from benchmarks import planner
from benchmarks.planner import EXCHANGE, LOOPS, PARTS, YARDSTICK, distinct_ways, main, rates
from distcache.planner import loops

ARGUMENTS = ["size=small", "batch=96", "steps=3", "repetitions=2", "share=0.01"]
KINDS = ("replicated", "sharded", "mixed")
WAYS = tuple(distinct_ways(1))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The header and records of one run."""
    out = tmp_path_factory.mktemp("bench") / "planner.md"
    plain = [getattr(loops, name) for name in LOOPS]
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    assert main([*ARGUMENTS, f"out={out}"]) == 0
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert [getattr(loops, name) for name in LOOPS] == plain
    return read_report(out, planner.BENCH)


def test_rates_and_ratios_are_of_the_turns(report):
    head, records = report
    assert head["settings"]["batch"] == 96
    found = {rate["mode"]: rate for rate in rates(records)}
    assert tuple(found) == ("plan, replicated", *WAYS)
    for name, rate in found.items():
        turns = [turn for turn in of(records, "turn") if turn["mode"] == name]
        assert len(turns) == 2
        assert all(turn["ids_per_step"]["ids"] == 96 * 6 for turn in turns)
        own = [1e3 * 96 * 6 / turn["cpu_ms"]["own"] for turn in turns]
        assert rate["own"]["median"] == pytest.approx(np.median(own))
        wall = [1e3 * 96 * 6 / np.mean(turn["step_ms"]) for turn in turns]
        assert rate["wall"]["median"] == pytest.approx(np.median(wall))
    assert found[YARDSTICK]["ratio"]["median"] == 1


def test_parts_lie_within_the_steps(report):
    _, records = report
    (plan,) = [record for record in of(records, "mode") if record["mode"] == "plan, replicated"]
    assert tuple(plan["stage_ms"]) == tuple(name for *_, name in PARTS)
    for turn in of(records, "turn"):
        if turn["mode"] == plan["mode"]:
            assert 0 < sum(turn["stage_ms"].values()) <= np.mean(turn["step_ms"])
            assert turn["cpu_ms"]["own"] > 0 and turn["stage_ms"][EXCHANGE] > 0
    (inside,) = of(records, "loops")
    of_several = {"find_rows", "find_sorted"}
    assert set(inside["ms"]) == set(LOOPS) - of_several
    assert all(ms > 0 for ms in inside["ms"].values())


def test_index_and_eviction(report):
    _, records = report
    (plan,) = [record for record in of(records, "mode") if "index_bytes" in record]
    rows = plan["rows_per_step"]
    assert plan["steady_eviction"] is True and plan["slots"] == 2622
    assert plan["index_bytes"] <= 9 * (26213 + 1)
    assert rows["distinct"] > rows["misses"] == rows["evictions"] > 0
    assert plan["sent_per_step"] == {"0": 0.0}


def two_ranks(rank, world_size, out):
    """Both ranks run the bench; the exit code."""
    words = (f"placements={','.join(KINDS)}", "pin=false", "cache.ratio=0.05", f"out={out}")
    return main([*ARGUMENTS, *words])


def test_two_ranks_plan_every_placement(tmp_path):
    out = tmp_path / "two.md"
    assert run_ranks(two_ranks, 2, str(out)) == [0, 0]
    head, records = read_report(out, planner.BENCH)
    assert head["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    found = {r["mode"].removeprefix("plan, "): r for r in of(records, "mode") if "slots" in r}
    assert tuple(found) == KINDS
    for record in found.values():
        assert record["world_size"] == 2 and record["steady_eviction"] is True
        rows = record["rows_per_step"]
        assert rows["misses"] == pytest.approx(2 * rows["evictions"], rel=0.1)
        assert set(record["sent_per_step"]) == {"0", "1"}
    # Of sharded rows a rank learns about its own alone.
    sent = [sum(found[kind]["sent_per_step"].values()) for kind in ("sharded", "mixed")]
    assert 0 < sent[0] < sent[1] < sum(found["replicated"]["sent_per_step"].values())
    inside = {record["mode"]: set(record["ms"]) for record in of(records, "loops")}
    assert "find_sorted" in inside["plan, mixed"] and "find_rows" in inside["plan, replicated"]
