"""The command line of the cost model: what it leaves, what it refuses, what training takes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import environment
from launching import run as run_command
from node_cases import open_nodes
from ranks import run_ranks

from distcache import plan as command
from distcache.analyze import main as analyze
from distcache.cli.compose import checked_config, compose_overrides, read_line
from distcache.cli.plan_run import Options, Request, default_parameters, make_plan
from distcache.cli.plan_run import parse_request as parse_line
from distcache.comm.world import close_world
from distcache.layout import TableSpec
from distcache.models import build_model
from distcache.optim import row_update
from distcache.plan import main
from distcache.sizing.cluster import HOST, PRESETS, Cluster, read_cluster
from distcache.sizing.measure import measure
from distcache.sizing.resolve import request_of
from distcache.sizing.traffic import CACHED, HYBRID

TABLES = ("table_rows=[20000,3000,40]", "batch=128", "cache_ratio=0.2", "width=8")
SMALL = (*TABLES, "most_ranks=16", "world_size=4")


def run(folder: Path, *arguments: str, code: int = 0) -> list[dict]:
    """The records of a plan that goes well; `code`: 1 where nothing fits."""
    assert main([*arguments, f"output={folder}"]) == code
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def parse_request(words: list[str]) -> Request:
    """The request of a command line."""
    return parse_line(read_line("plan", Options, words))


def asked(records: list[dict]) -> dict[str, dict]:
    """The predictions at the ranks asked for, by placement."""
    return {r["placement"]: r for r in records if r["kind"] == "prediction" and r["asked"]}


def test_everything_is_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    records = run(tmp_path, *SMALL, "nodes=2", "optim=adagrad")
    shown, report = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    found = asked(records)
    assert set(found) == {*CACHED, *HYBRID}
    assert [r["placement"] for r in found.values() if r["best"]] != []
    for name in ("sharded", "replicated", "mixed, K = ", "hybrid table-wise", "hybrid row-wise"):
        assert name in shown and name in report
    assert "| inside name | nvlink4 |" in report
    sweep = [r for r in records if r["kind"] == "prediction" and not r["asked"]]
    assert sorted({r["world_size"] for r in sweep}) == [1, 2, 4, 8, 16]
    assert {r["nodes"] for r in sweep if r["world_size"] == 16} == {8}  # two ranks on each
    for record in found.values():
        between = record["collective_bytes"] - record["inside_bytes"]
        assert between == pytest.approx(record["between_bytes"])
        between += record["dense_collective_bytes"] / 2
        assert record["inter_node_bytes"] == pytest.approx(between)
    assert found["sharded"]["collective_bytes"] < found["table_wise"]["collective_bytes"]
    assert records[0]["kind"] == "environment" and records[0]["command"][2] == "distcache.plan"


def test_training_takes_the_overrides(tmp_path: Path) -> None:
    run(tmp_path, *SMALL, "objective=bytes")
    lines = (tmp_path / "overrides.txt").read_text().splitlines()
    assert "cache.placement=sharded" in lines and "cache.ratio=0.2" in lines
    config = checked_config(compose_overrides(lines))
    assert config.cache.placement == "sharded" and config.cache.ratio == 0.2
    small = "data.table_rows=[20000,3000,40] data.global_batch_size=64 trainer.steps=3"
    more = f"trainer.eval_steps=0 run.dir={tmp_path}/run run.save=false"
    words = [*(tmp_path / "overrides.txt").read_text().split(), *small.split(), *more.split()]
    train = [sys.executable, "-m", "distcache.train", *words]  # as $(cat overrides.txt) gives them
    done = run_command(train, env=environment(), capture_output=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 3


def test_the_default_cache_of_a_plan_is_that_of_training(tmp_path: Path) -> None:
    """Small tables are cached whole, so that every cached layout fits."""
    tables, ranks = ("table_rows=[20000,3000,40]", "batch=128", "width=8"), "most_ranks=2"
    found = asked(run(tmp_path, *tables, ranks, "world_size=8"))
    assert not [name for name in CACHED if found[name]["refused"]]
    lines = (tmp_path / "overrides.txt").read_text().split()
    assert {"cache.ratio=null", "cache.rows=null", "cache.bytes=null"} <= {*lines}
    # Of 600,000 rows in 72 bytes 32 MiB hold fewer, and of 40,000,000 rows 1.5 % are more.
    for rows in ([20_000, 3_000, 40], [600_000], [40_000_000]):
        counts = ",".join(map(str, rows))
        words = [f"table_rows=[{counts}]", "batch=128", "width=16", "optim=adagrad"]
        _, _, settings = parse_request(words).on(1, 1)
        few = f"data.table_rows=[{counts}] data.global_batch_size=128 optim=adagrad"
        config = checked_config(compose_overrides([*few.split(), "model.embedding_dim=16"]))
        features = [TableSpec(f"t_{at}", count, 16, (f"f_{at}",)) for at, count in enumerate(rows)]
        assert settings.slots == request_of(config, features).plan(1, None).slots


@pytest.mark.parametrize("placement", [*CACHED, "table_wise", "row_wise"])
def test_every_choice_is_a_configuration(placement: str) -> None:
    request = parse_request([*SMALL, "replicated_rows={t_cat_0: 7, t_cat_1: 5}", "state=home"])
    plan = make_plan(request)
    best = plan.here.of(placement)
    plan = replace(plan, here=replace(plan.here, best=best))
    config = checked_config(compose_overrides(command.overrides_of(plan)))
    if placement in CACHED:
        assert (config.parallel.mode, config.cache.placement) == ("data", placement)
        assert config.cache.state == "home"
    else:
        assert (config.parallel.mode, config.parallel.sharding) == ("hybrid", placement)
    rows = {"t_cat_0": 7, "t_cat_1": 5} if placement == "mixed" else None
    assert config.cache.replicated_rows == rows
    assert "ms a step" in command.advice(plan)


def test_statistics_are_as_good_as_the_law(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = ["data=synthetic", "data.table_rows=[20000,3000,40]", "data.global_batch_size=512"]
    assert analyze([*data, "trainer.steps=100", f"output={tmp_path}/skew"]) == 0
    by_law = asked(run(tmp_path / "a", *SMALL, "lookahead=8"))
    rest = [word for word in SMALL if not word.startswith("table_rows")]
    known = f"statistics={tmp_path}/skew"
    by_counts = asked(run(tmp_path / "b", known, *rest, "lookahead=8"))
    for key in ("rank_rows", "world_rows"):
        assert by_counts["sharded"][key] == pytest.approx(by_law["sharded"][key], rel=0.01)
    law, counted = by_law["replicated"]["hit_rate"], by_counts["replicated"]["hit_rate"]
    assert law < counted < law + 0.05  # sorting a sample's counts makes them look steeper
    for line in (tmp_path / "b/overrides.txt").read_text().splitlines():
        assert line.split("=")[0].split(".")[0] in ("parallel", "cache")
    assert main([known, "table_rows=[20000,3000,41]"]) == main([known, "zipf=1.0"]) == 1
    said = capsys.readouterr().err
    assert "[20000, 3000, 40] rows (fingerprint " in said and "[20000, 3000, 41] are asked" in said
    assert "leave zipf out" in said
    few = run(tmp_path / "c", known, "width=8", "batch=4096", "world_size=2", "most_ranks=64")
    assert few and "a lower bound there" in (tmp_path / "c/report.md").read_text()


TABLE = " ".join(SMALL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no tables: give statistics=<folder>, preset=criteo_kaggle, or table_rows"),
        ("preset=criteo_mars", "preset=criteo_mars is unknown: did you mean criteo_kaggle"),
        ("preset=criteo_kaggle table_rows=[5]", "give one of them"),
        ("cache.ratio=0.1", "cache.ratio: no such key: did you mean cache_ratio"),
        ("bacth=4", "did you mean batch"),
        (f"{TABLE} statistics=nowhere", "statistics=nowhere holds neither"),
        (f"{TABLE} host=floppy", "host=floppy: no such link: give a preset"),
        (f"{TABLE} nodes=3", "nodes=3 does not divide world_size=4"),
        (f"{TABLE} replicated_rows={{t_dog:1}}", "t_dog=1 names no table: choose from t_cat_0"),
        (f"{TABLE} replicated_rows={{t_cat_2:41}}", "t_cat_2=41, but the table has 40 rows"),
        (f"{TABLE} replicated_rows={{t_cat_2:-1}}", "give the rows of each table"),
        (f"{TABLE} inside={{bandwidth:0}}", "inside.bandwidth=0.0: it must be above 0: give"),
        (f"{TABLE} replicated_rows=many", "replicated_rows=many: give the rows of each table"),
        (f"{TABLE} objective=money", "objective=money is unknown: choose time or bytes"),
        (f"{TABLE} device=abacus", "device=abacus is unknown: choose a100"),
        (f"{TABLE} device_memory=lots", "device_memory=lots: give bytes, such as"),
        (f"{TABLE} device_memory=80", "device_memory=80: give bytes, at least 1,000, such as 80GB"),
        (f"{TABLE} measure=true inside=pcie4", "inside=pcie4 and measure=true, which times"),
        (f"{TABLE} measure=true host=pcie4", "host=pcie4 and measure=true, which times"),
        (f"{TABLE} optim.name=sgdd", "optim=sgdd is unknown: did you mean sgd"),
        (f"{TABLE} optim=adamm", "no such optim: did you mean optim=adam?"),
        (f"{TABLE} experiment=criteo_kaggle", "experiment: no such key"),
        (f"{TABLE} width=[8,16]", "width has 2 entries for 3 tables"),
        (f"{TABLE} bag_size=-1", "bag_size=-1.0: give at least 0"),
        (f"{TABLE} table_rows=[5,0,1]", "give a list of whole numbers, each at least 1"),
        (f"{TABLE} batch=0", "batch=0 is out of range"),
        (
            f"{TABLE} planner_threads=2",
            "planner_threads: this key was removed (a prediction has",
        ),
        (f"{TABLE} access=away", "access=away is unknown: choose staged or zero_copy"),
        (f"{TABLE} cache_ratio=2", "cache_ratio=2 is a share: give a number above 0 and"),
        (f"{TABLE} state=away", "state=away is unknown: choose auto, replicated or home"),
        (f"{TABLE} cache_rows=4 cache_ratio=0.1", "cache_rows=4 and cache_ratio=0.1 contradict"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, arguments: str, said: str) -> None:
    assert main([*arguments.split(), f"output={tmp_path / 'new'}"]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_small_cache_fits_nothing_that_is_replicated(tmp_path: Path, capsys) -> None:
    tables = [argument for argument in TABLES if not argument.startswith("cache_ratio")]
    records = run(tmp_path, *tables, "world_size=8", "cache_rows=120", "most_ranks=8")
    found = asked(records)
    assert "a step may name" in found["replicated"]["refused"]
    assert not found["replicated"]["best"]
    assert (tmp_path / "overrides.txt").exists()
    assert "holds a plan" not in capsys.readouterr().err
    nothing = run(tmp_path, *TABLES, "world_size=8", "device_memory=1k", "most_ranks=8", code=1)
    assert f"output={tmp_path} holds a plan, which this one overwrites" in capsys.readouterr().err
    assert all(record["refused"] for record in asked(nothing).values())
    assert not (tmp_path / "overrides.txt").exists(), "that of the plan before"


def test_widths_that_fbgemm_has_not_are_not_for_hybrid(tmp_path: Path) -> None:
    tables = [argument for argument in TABLES if not argument.startswith("width")]
    found = asked(run(tmp_path, *tables, "width=10", "world_size=2", "most_ranks=2"))
    for layout, record in found.items():
        odd = "width 10 is no multiple of 4" in (record["refused"] or "")
        assert odd == (layout in ("table_wise", "row_wise")), layout


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (main, "criteo_kaggle criteo_terabyte h100 measure= most_ranks=1024"),
        (analyze, "analyze.target_hit_rate=0.95 analyze.sample=auto simulate=false output="),
    ],
)
def test_help_names_every_key(main, words: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words.split())


def test_cards_are_shared_by_the_ranks_of_a_node() -> None:
    for words, ranks in ((["cards=1"], 4), ([], 1)):
        _, there, _ = parse_request([*SMALL, *words]).on(4, 1)
        assert there.between.bandwidth == PRESETS["400gbe"].bandwidth / ranks


def test_the_default_dense_part_is_that_of_the_experiment() -> None:
    model = build_model("dlrm", 13, [16] * 26, [512, 256, 64, 16], [512, 256, 1])
    assert default_parameters([16] * 26) == sum(p.numel() for p in model.parameters())


def measured(rank: int, size: int, sizes: tuple[int, ...]) -> Cluster:
    world = open_nodes(rank, sizes)
    model = build_model("dlrm", 13, [8] * 3, [16, 8], [8, 1])
    found = measure(world, 8, row_update("adagrad", 0.1), model, (16, 13, 24))
    close_world(world)
    return found


@pytest.mark.parametrize(
    "sizes", [pytest.param((2,), marks=pytest.mark.slow), (2, 2), (1, 1), (1, 2)]
)
def test_ranks_measure_the_same_machine(sizes: tuple[int, ...]) -> None:
    """And what is between nodes of equal size."""
    found = run_ranks(measured, sum(sizes), sizes)
    assert len({repr(own) for own in found}) == 1  # or ranks would choose differently
    cluster = found[0]
    assert cluster.host.bandwidth > 1e6 and min(vars(cluster.compute).values()) > 0
    assert cluster.ranks == sum(sizes) and cluster.overlap == cluster.collective_s == 0.0
    assert cluster.host_times == HOST
    alike = len(set(sizes)) == 1
    assert cluster.nodes == (len(sizes) if alike else 1)
    assert (cluster.between is not None) == (alike and len(sizes) > 1)
    alone = sizes == (1, 1)
    assert (cluster.inside.bandwidth == 1e12) == alone
    for link in filter(None, (cluster.between, None if alone else cluster.inside)):
        assert link.bandwidth > 1e5 and link.latency > 0 and link.name == "measured"


def test_one_rank_measures_alone(tmp_path: Path, forked_jobs: None) -> None:
    small = ("world_size=1", "most_ranks=2")
    records = run(tmp_path, *TABLES, "measure=true", "measure_ranks=1", *small)
    found = asked(records)["sharded"]["seconds"]
    assert found["total"] > 0 and min(found["threads"].values()) > 0
    assert "| host name | measured |" in (tmp_path / "report.md").read_text()
    times = read_cluster(tmp_path).host_times
    assert times.name == "measured"
    assert min(times.launch_s, times.id_s, times.row_s, times.step_s) > 0


@pytest.mark.parametrize(
    ("batch", "binds"), [(256, "launch"), (131072, "planner"), (1048576, "planner")]
)
def test_the_host_is_in_every_step_and_the_part_that_binds_is_shown(
    tmp_path: Path, capsys, batch: int, binds: str
) -> None:
    """The fixed time binds steps of few samples, the planner those of many one-hot ids."""
    words = ("preset=criteo_kaggle", "width=8", f"batch={batch}", "world_size=1", "most_ranks=1")
    records = run(tmp_path, *words)
    seconds = asked(records)["sharded"]["seconds"]
    assert read_cluster(tmp_path).host_times == HOST
    assert seconds["binds"] == binds and seconds["total"] == seconds["threads"][binds]
    best = next(r for r in records if r.get("asked") and r["best"])
    shown = capsys.readouterr().out
    assert f"What binds its step: {best['seconds']['binds']}." in shown
    assert f"| {binds} |" in (tmp_path / "report.md").read_text()


def test_rows_that_a_device_reads_itself_take_no_thread(tmp_path: Path) -> None:
    staged, direct = (
        asked(run(tmp_path, *TABLES, "world_size=2", "most_ranks=1", f"access={way}"))["sharded"]
        for way in ("staged", "zero_copy")
    )
    assert direct["seconds"]["threads"]["mover"] < staged["seconds"]["threads"]["mover"]
    assert direct["collective_bytes"] == staged["collective_bytes"]
