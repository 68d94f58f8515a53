"""The benches of a part of a step and of preprocessing, at small sizes: what they measure is what
training does, and their numbers agree."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from benchmark_checks import of, read_report
from criteo_lines import read_plainly
from ranks import run_ranks

from benchmarks import kernels, planner, preprocess, rows
from benchmarks.planner import EXCHANGE, LOOPS, PARTS, YARDSTICK
from distcache import ops
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.ops import reference
from distcache.planner import loops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_kernels(device, tmp_path) -> None:
    out = tmp_path / "kernels.md"
    given = "tables=3 rows=50 width=8 batch=6 pooling=4 zipf=1.2 steps=2 lead=1 repetitions=2"
    assert kernels.main([*given.split(), "batches=2", f"device={device}", f"out={out}"]) == 0
    head, records = read_report(out, kernels.BENCH)
    names = [record["mode"] for record in of(records, "mode")]
    triton = ops.triton_bodies()
    runs = triton is not None and (device == "cuda" or triton.INTERPRETED)
    assert {"reference, sgd", "reference, adam"} <= set(names)
    assert ("triton, sgd" in names) == ("triton, adam" in names) == runs
    assert device == "cuda" or "fbgemm, adam" not in names, "FBGEMM has none on the CPU"
    assert head["settings"]["batch"] == 6 and head["command"][2] == "benchmarks.kernels"
    for record in of(records, "mode"):
        assert record["ids"] == 3 * 6 * 4 and 0 < record["distinct"] <= 72
        assert len(record["turn_medians_ms"]) == 2 and record["step_ms"]["count"] == 4
        assert all(ms > 0 for ms in record["stage_ms"].values())
        assert sum(record["stage_ms"].values()) <= record["step_ms"]["max"]
        assert set(record["stage_ms"]) <= set(record["bytes"])
    pairs = {f"{r['numerator']} / {r['denominator']}" for r in kernels._pairs(records)}
    assert "reference, adam / reference, sgd" in pairs
    assert not any("adam / fbgemm, sgd" in pair for pair in pairs)
    assert "| reference, sgd: lookup |" in out.read_text()


def test_work_of_kernels_is_a_plan_with_everything_cached() -> None:
    options = kernels.KernelOptions(tables=2, rows=30, width=4, batch=5, pooling=3, seed=7)
    work = kernels.make_work(options, 0, torch.device("cpu"))
    named = work.ids + torch.arange(2).repeat_interleave(15) * 30
    assert len(work.ids) == 30 and work.offsets.tolist() == list(range(0, 31, 3))
    table = torch.randn(options.capacity, 4)
    cache = torch.empty_like(table)
    slots = kernels.slots_of(options)
    cache[slots] = table
    leaf = cache[work.slots]
    assert torch.equal(leaf[work.positions], table[named])
    assert len(work.slots) == len(named.unique()) == len(work.segments) - 1
    gradient = reference.row_gradients(work.upstream, work.bag_of, work.order, work.segments)
    summed = torch.zeros_like(table).index_add_(0, named, work.upstream[work.bag_of])
    torch.testing.assert_close(gradient, summed[slots.argsort()[work.slots]])
    by_table = work.by_sample.view(5, 2, 4).transpose(0, 1).reshape(10, 4)
    assert torch.equal(by_table, work.upstream)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state", [0, 3])
def test_rows(device: str, state: int, tmp_path) -> None:
    out, threads = tmp_path / "rows.md", torch.get_num_threads()
    given = [f"device={device}", "table_rows=500", "widths=4,16", "counts=30,900"]
    assert rows.main([*given, "repetitions=3", f"state_width={state}", f"out={out}"]) == 0
    assert torch.get_num_threads() == threads
    _, records = read_report(out, rows.BENCH)
    copies = {
        f"{way}, {kind}" for way in ("fetch", "write back") for kind in ("staged", "zero_copy")
    }
    ours = {"gather", "index_select", "scatter", "index_copy_"}
    for part, names, where in ((rows.MEMORY, ours, "cpu"), (rows.DEVICE, copies, device)):
        found = of(records, part)
        assert [(r["width"], r["count"]) for r in found] == [(4, 30), (4, 500), (16, 30), (16, 500)]
        for record in found:
            rates = record["gigabytes_per_second"]
            assert set(rates) == names and record["device"] == where
            assert all(rate["count"] == 3 and rate["min"] > 0 for rate in rates.values())
            assert set(record["ratio"]) == {own for own, _ in rows.PAIRS[part]}
    assert "fetch, zero_copy / fetch, staged" in out.read_text()


def test_preprocessing(tmp_path) -> None:
    count = preprocess.write_lines(tmp_path / "a.txt", 700_000)
    text = (tmp_path / "a.txt").read_bytes()
    assert len(text) >= 700_000 and text.count(b"\n") == count
    labels, dense, ids, bad = read_plainly(text, None)
    assert not bad and 0.2 < labels.mean() < 0.3
    assert 0.02 < (ids[:, 0] == 0).mean() < 0.04 and 0.35 < (ids[:, 18] == 0).mean() < 0.45
    assert len(np.unique(ids[:, 2])) > len(np.unique(ids[:, 0])) > len(np.unique(ids[:, 8]))
    assert len(np.unique(ids[:, 8])) <= KAGGLE_ROWS[8] + 1
    assert (dense[:, 0] == 0).mean() > 0.2
    assert preprocess.write_lines(tmp_path / "b.txt", 700_000) == count
    assert (tmp_path / "b.txt").read_bytes() == text
    out, folder = tmp_path / "report.md", tmp_path / "files"
    folder.mkdir()
    given = ["bytes=300000", "jobs=vocabulary", "repetitions=2", f"folder={folder}", f"out={out}"]
    assert preprocess.main(given) == 0
    _, records = read_report(out, preprocess.BENCH)
    first, second = of(records, "job")
    assert first["job"] == "vocabulary" and first["core_seconds"] > 0
    assert first["peak_bytes"] > first["peak_own_bytes"] > 0
    assert first["output_bytes"] == second["output_bytes"] > 0
    assert str(tmp_path) not in out.read_text() and "MB/s per core" in out.read_text()
    assert not list(folder.iterdir())


PLANNER = ["size=small", "batch=96", "steps=3", "repetitions=2", "share=0.01"]


def test_planner(tmp_path) -> None:
    out = tmp_path / "planner.md"
    plain = [getattr(loops, name) for name in LOOPS]
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    assert planner.main([*PLANNER, f"out={out}"]) == 0
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert [getattr(loops, name) for name in LOOPS] == plain
    head, records = read_report(out, planner.BENCH)
    assert head["settings"]["batch"] == 96
    found = {rate["mode"]: rate for rate in planner.rates(records)}
    assert tuple(found) == ("plan, replicated", *planner.distinct_ways(1))
    for name, rate in found.items():
        turns = [turn for turn in of(records, "turn") if turn["mode"] == name]
        assert len(turns) == 2
        assert all(turn["ids_per_step"]["ids"] == 96 * 6 for turn in turns)
        own = [1e3 * 96 * 6 / turn["cpu_ms"]["own"] for turn in turns]
        assert rate["own"]["median"] == pytest.approx(np.median(own))
        wall = [1e3 * 96 * 6 / np.mean(turn["step_ms"]) for turn in turns]
        assert rate["wall"]["median"] == pytest.approx(np.median(wall))
    assert found[YARDSTICK]["ratio"]["median"] == 1
    (plan,) = [record for record in of(records, "mode") if "index_bytes" in record]
    assert tuple(plan["stage_ms"]) == tuple(name for *_, name in PARTS)
    for turn in of(records, "turn"):
        if turn["mode"] == plan["mode"]:
            assert 0 < sum(turn["stage_ms"].values()) <= np.mean(turn["step_ms"])
            assert turn["cpu_ms"]["own"] > 0 and turn["stage_ms"][EXCHANGE] > 0
    (inside,) = of(records, "loops")
    of_several = {"find_rows", "find_sorted"}
    assert set(inside["ms"]) == set(LOOPS) - of_several
    assert all(ms > 0 for ms in inside["ms"].values())
    numbers = plan["rows_per_step"]
    assert plan["steady_eviction"] is True and plan["slots"] == 2622
    assert plan["index_bytes"] <= 9 * (26213 + 1)
    assert numbers["distinct"] > numbers["misses"] == numbers["evictions"] > 0
    assert plan["sent_per_step"] == {"0": 0.0}


KINDS = ("replicated", "sharded", "mixed")


def two_ranks(rank, world_size, out):
    """Both ranks run the bench; the exit code."""
    words = (f"placements={','.join(KINDS)}", "pin=false", "cache.ratio=0.05", f"out={out}")
    return planner.main([*PLANNER, *words])


def test_two_ranks_plan_every_placement(tmp_path) -> None:
    out = tmp_path / "two.md"
    assert run_ranks(two_ranks, 2, str(out)) == [0, 0]
    head, records = read_report(out, planner.BENCH)
    assert head["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    found = {r["mode"].removeprefix("plan, "): r for r in of(records, "mode") if "slots" in r}
    assert tuple(found) == KINDS
    for record in found.values():
        assert record["world_size"] == 2 and record["steady_eviction"] is True
        numbers = record["rows_per_step"]
        assert numbers["misses"] == pytest.approx(2 * numbers["evictions"], rel=0.1)
        assert set(record["sent_per_step"]) == {"0", "1"}
    # Of sharded rows a rank learns about its own alone.
    sent = [sum(found[kind]["sent_per_step"].values()) for kind in ("sharded", "mixed")]
    assert 0 < sent[0] < sent[1] < sum(found["replicated"]["sent_per_step"].values())
    inside = {record["mode"]: set(record["ms"]) for record in of(records, "loops")}
    assert "find_sorted" in inside["plan, mixed"] and "find_rows" in inside["plan, replicated"]
