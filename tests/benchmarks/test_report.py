"""Options, turns, spreads, tables as specifications, the two files of a report, and what a bench
cannot measure; the benches of a part of a step and of preprocessing, at small sizes: what they
measure is what training does, and their numbers agree."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from benchmark_checks import check_spread, of, read_report
from criteo_lines import read_plainly
from launching import CHECKOUT
from ranks import run_ranks

from benchmarks import kernels, links, planner, preprocess, rows, step
from benchmarks.options import option, parse
from benchmarks.planner import EXCHANGE, LOOPS, PARTS, YARDSTICK
from benchmarks.report import Bench, Column, Section, pivoted, run_bench, tables_of
from benchmarks.setting import compose_setting
from benchmarks.turns import medians, ratio_record, shown, shown_range, spread, take_turns
from distcache import ops
from distcache.data.criteo_folder import KAGGLE_ROWS
from distcache.errors import ConfigError
from distcache.ops import reference

RECORDS = [
    {"kind": "number", "name": "a", "value": 1.26, "parts": {"x": 1.0}},
    {"kind": "number", "name": "b", "value": None, "parts": {"x": 2.0, "y": 3.0}},
    {"kind": "other", "name": "c", "value": 9.0, "parts": {}},
]
NAME = Column("name", "name")
SECTIONS = (
    Section("Numbers", "What.", "number", (NAME, Column("value", "value", ".1f"))),
    Section("None", "Nothing.", "none", (NAME,)),
    pivoted(("Parts", "Where."), "number", lambda r: r["parts"], ("part", lambda r: r["name"])),
)


@dataclass(frozen=True)
class Options:
    x: tuple[int, ...] = option((1, 2), "numbers", least=1)
    count: int = option(3, "how many")
    share: float = option(0.5, "a share")
    fast: bool = option(False, "in a hurry")
    kind: str = option("a", "a kind", among=("a", "b"))
    names: tuple[str, ...] = option(("a", "b"), "names", among=("a", "b", "c"))
    out: str = option("", "the report")


def measure(options: Options, overrides: tuple[str, ...]) -> list[dict]:
    """What the bench of these tests measures."""
    return RECORDS


BENCH = Bench("Title", Options, measure, SECTIONS)


def test_spread_and_ratios() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    check_spread(spread(values), values)
    assert spread([])["median"] is None and spread([])["count"] == 0
    assert shown()(spread([1.0, 2.0, 3.0])) == "2.00 [1.50, 2.50]"
    assert shown(1, 1e-3)(spread([1000.0, 2000.0, 3000.0])) == "2.0 [1.5, 2.5]"
    assert shown()(spread([])) == "-" and shown_range(1)(spread(values)) == "1.0 to 10.0"
    record = ratio_record("a", "b", {"a": [2.0, 9.0], "b": [4.0, 3.0]}, bar=2)
    assert record["repetitions"] == [0.5, 3.0] and record["bar"] == 2
    with pytest.raises(ValueError, match="zip"):
        ratio_record("a", "b", {"a": [1.0], "b": [1.0, 2.0]})
    assert medians([{"x": 1.0}, {"x": 3.0, "y": 5.0}]) == {"x": 2.0, "y": 5.0}


def test_everyone_begins_once_and_takes_every_turn() -> None:
    said: list[tuple] = []
    contenders = {
        name: lambda repetition, name=name: said.append((repetition, name)) or repetition
        for name in "abc"
    }
    found = take_turns(contenders, 4, lambda repetition: said.append((repetition, "before")))
    assert found == {name: [0, 1, 2, 3] for name in "abc"}
    turns = [[name for at, name in said if at == repetition] for repetition in range(4)]
    assert [turn[0] for turn in turns] == ["before"] * 4
    assert ["".join(turn[1:]) for turn in turns] == ["abc", "bca", "cab", "abc"]


def test_tables_are_made_of_their_specifications() -> None:
    numbers, parts = tables_of(SECTIONS, RECORDS)
    assert numbers.columns == ("name", "value") and numbers.rows == [("a", "1.3"), ("b", "-")]
    assert parts.columns == ("part", "a", "b")
    assert parts.rows == [("x", "1.00", "2.00"), ("y", "-", "3.00")]


def test_both_files_tell_the_same(tmp_path, capsys) -> None:
    out = tmp_path / "new" / "report.md"
    assert run_bench(BENCH, ["x=3,4", f"out={out}"]) == 0
    assert capsys.readouterr().out == out.read_text()
    head, records = read_report(out, BENCH)
    assert records == RECORDS and head["settings"]["x"] == [3, 4]
    text = out.read_text()
    assert "| a | 1.3 |" in text and "x=3,4" in text and str(tmp_path) not in text
    assert head["command"][-2].endswith("test_report") and head["command"][-1] == "x=3,4"


def test_help_shows_what_the_module_says(capsys) -> None:
    assert run_bench(BENCH, ["--help"]) == 0
    said = capsys.readouterr().out
    assert (__doc__ or "") in said and "  x=1,2" in said and "  out=" in said


def test_sizes_are_settings_of_the_package() -> None:
    kaggle = compose_setting("kaggle", ())
    assert (sum(kaggle.data.table_rows), len(kaggle.data.table_rows)) == (33_762_577, 26)
    terabyte = compose_setting("terabyte", ())
    assert sum(terabyte.data.table_rows) == 204_184_588
    dcnv2 = compose_setting("dcnv2", ())
    assert max(dcnv2.data.table_rows) == 625_000 and sum(dcnv2.data.bag_size) == 214
    small = compose_setting("small", ("cache.lookahead=3", "optim=adam"))
    assert (small.cache.lookahead, small.optim.name) == (3, "adam")


def test_values_take_the_type_of_their_default() -> None:
    given = ["count=4", "share=0.25", "fast=True", "names=c, b", "x=7", "a.b=1"]
    assert parse(Options, given) == (Options((7,), 4, 0.25, True, "a", ("c", "b")), ("a.b=1",))
    assert parse(Options, []) == (Options(), ())


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("cuont=4", "did you mean count"),
        ("count=many", "count=many"),
        ("fast=perhaps", "not true or false"),
        ("x=1,y", "x=y"),
        ("names=,", "at least one"),
        ("count", "not key=value"),
        ("x=0,3", "x=0 must be at least 1"),
        ("kind=c", "kind=c: choose from a, b"),
        ("names=a,d", "names=a,d: choose from a, b, c"),
        ("names=a,a", "names=a,a names one twice"),
    ],
)
def test_what_does_not_fit_is_named(argument, says) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(Options, [argument])


SMALL = "size=small batch=64"
REFUSED = (
    (kernels, "contenders=tf", "contenders=tf"),
    (kernels, "optimizers=lamb", "optimizers=lamb"),
    (kernels, "device=tpu", "device=tpu"),
    (kernels, "cache.rows=3", "cache.rows=3: no such key"),
    (links, "rate=0gbit", "rate=0gbit"),
    (links, "size=small", "give rate=none"),
    (links, "rate=none rate=1gbit", "once"),
    (planner, "size=small placements=sharded,spread", "placements=sharded,spread: choose from"),
    (planner, "size=small placements=mixed share=1.5", "share=1.5"),
    (planner, "size=small batch=5000 cache.ratio=0.01 repetitions=1", "slots"),
    (planner, "size=big", "size=big"),
    (planner, "size=small against=tests", "tests has no package distcache"),
    (preprocess, "jobs=other", "jobs=other"),
    (rows, "device=cpu repetitions=0", "repetitions=0"),
    (rows, "device=cpu widths=0", "widths=0"),
    (rows, "device=cpu state_width=-1", "state_width=-1"),
    (rows, "device=cpu parts=disk", "parts=disk"),
    (rows, "parts=memory table_rows=900000000000 widths=64", "900000000000 rows of 64"),
    (rows, "device=cuda parts=device", "cuda"),
    (step, f"{SMALL} modes=bag optimizer=rowwise_adagrad", "rowwise_adagrad"),
    (step, f"{SMALL} modes=fused optimizer=adam", "adam"),
    (step, f"{SMALL} modes=fused optimizer=adagrad optim.initial_accumulator=0.1", "accumulator"),
    (step, f"{SMALL} modes=bag trainer.dtype=float64", "float32"),
    (step, f"{SMALL} modes=data,uvm", "modes=uvm is FBGEMM's cache on a GPU: set device=cuda"),
    (step, f"{SMALL} modes=data ratio=0.001", "cache.rows="),
    (step, f"{SMALL} modes=data,resident widths=40000000", "modes=data,resident"),
    (step, f"{SMALL} warmup=50 warmup_most=10", "warmup_most=10"),
    (step, f"{SMALL} against=/nowhere modes=data", "against=/nowhere has no package distcache"),
    (step, f"{SMALL} against=. modes=mixed,fused", "modes=mixed,fused: against= takes data"),
)


@pytest.mark.parametrize(("bench", "words", "says"), REFUSED)
def test_what_cannot_be_measured_is_refused(capfd, bench, words, says):
    if says == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert bench.main(words.split()) == 1
    assert says in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


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
    plain = [getattr(*loop) for loop in LOOPS]
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    assert planner.main([*PLANNER, f"out={out}"]) == 0
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert [getattr(*loop) for loop in LOOPS] == plain
    head, records = read_report(out, planner.BENCH)
    assert head["settings"]["batch"] == 96
    found = {rate["mode"]: rate for rate in planner.rates(records)}
    plans = ("plan, replicated", "plan, replicated, no table stays")
    assert tuple(found) == (*plans, *planner.distinct_ways())
    for name, rate in found.items():
        turns = [turn for turn in of(records, "turn") if turn["mode"] == name]
        assert len(turns) == 2
        assert all(turn["ids_per_step"]["ids"] == 96 * 6 for turn in turns)
        own = [1e3 * 96 * 6 / turn["cpu_ms"]["own"] for turn in turns]
        assert rate["own"]["median"] == pytest.approx(np.median(own))
        wall = [1e3 * 96 * 6 / np.mean(turn["step_ms"]) for turn in turns]
        assert rate["wall"]["median"] == pytest.approx(np.median(wall))
    assert found[YARDSTICK]["ratio"]["median"] == 1
    plan, other = [record for record in of(records, "mode") if "index_bytes" in record]
    assert (plan["mode"], other["mode"]) == plans
    assert tuple(plan["stage_ms"]) == tuple(name for *_, name in PARTS)
    for turn in of(records, "turn"):
        if turn["mode"] == plan["mode"]:
            assert 0 < sum(turn["stage_ms"].values()) <= np.mean(turn["step_ms"])
            assert turn["cpu_ms"]["own"] > 0 and turn["stage_ms"][EXCHANGE] > 0
    inside, _ = of(records, "loops")
    assert set(inside["ms"]) == {name for _, name in LOOPS}
    assert all(ms > 0 for ms in inside["ms"].values())
    numbers = plan["rows_per_step"]
    assert plan["steady_eviction"] is True and plan["slots"] == 2622
    assert plan["index_bytes"] <= 9 * (26213 + 1)
    assert numbers["distinct"] > numbers["misses"] == numbers["evictions"] > 0
    assert plan["sent_per_step"] == {"0": 0.0}


def test_planning_threads_of_two_checkouts_take_turns(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, few = tmp_path / "planner.md", ("warmup=4", "planner_threads=2", "cache.ratio=0.2")
    assert planner.main([*PLANNER, *few, f"against={CHECKOUT}", f"out={out}"]) == 0
    _, records = read_report(out, planner.BENCH)
    two, one = of(records, "planning")
    assert (two["run"], one["run"]) == ("this, k = 2", "other")
    for run in (two, one):
        assert 0 < run["serial"]["min"] < run["cpu"]["max"] and run["reading"]["min"] > 0
    assert two["commit"] == one["commit"]


KINDS = ("replicated", "sharded", "mixed")


def two_ranks(rank, world_size, out):
    """Both ranks run the bench; the exit code."""
    words = (f"placements={','.join(KINDS)}", "pin=false", "cache.ratio=0.05", f"out={out}")
    return planner.main([*PLANNER, *words])


@pytest.mark.slow
def test_two_ranks_plan_every_placement(tmp_path) -> None:
    out = tmp_path / "two.md"
    assert run_ranks(two_ranks, 2, str(out)) == [0, 0]
    head, records = read_report(out, planner.BENCH)
    assert head["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    found = {r["mode"].removeprefix("plan, "): r for r in of(records, "mode") if "slots" in r}
    assert found.pop("replicated, no table stays")["world_size"] == 2
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
    assert "name_span" in inside["plan, mixed"] and "order_ids" in inside["plan, replicated"]
