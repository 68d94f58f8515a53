"""The command line of the analysis: what it leaves, advises, replays, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from simulator import record_ids
from source_runs import summaries

from distcache.analyze import holds_that_bind, main
from distcache.cli import analyze_run
from distcache.cli.analyze_run import (
    SizeSearch,
    rounded_up,
)
from distcache.data.synthetic import SyntheticSource
from distcache.planner.victims import Policy
from distcache.popularity.curve import Curve
from distcache.popularity.statistics import TableCounts, read_statistics
from distcache.replay import Case, GroupCounts, Outcome, replay
from distcache.sizing.prediction import RecordedRun
from distcache.store import memory as available

SMALL = (
    *("data=synthetic", "data.table_rows=[20000,3000,40]", "data.global_batch_size=256"),
    *("trainer.steps=60", "cache.ratio=0.1"),
)


def run(folder: Path, *arguments: str) -> dict:
    """The report of an analysis that goes well."""
    out = folder / "out"
    assert main([*arguments, f"output={out}"]) == 0
    return json.loads((out / "report.json").read_text())


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """What is said of a command line that does not work."""
    assert main(list(arguments)) == 1
    return capsys.readouterr().err


def test_everything_is_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    report = run(tmp_path, *SMALL, "optim=adagrad", "analyze.target_hit_rate=0.8")
    out, shown = tmp_path / "out", capsys.readouterr().out
    for name in ("access", "misses", "drift"):
        picture = (out / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
        assert f"({name}.png)" in (out / "report.md").read_text()
    advice = report["advice"]
    assert advice["text"] in shown and advice["text"] in (out / "report.md").read_text()
    assert all(key in shown for key in advice["paste"])
    assert f"cache.ratio={advice['ratio']:g} serves" in advice["text"]
    named = re.search(r"`([\w ]+)` in the table", advice["text"])
    assert named and re.search(rf"^table .* {named[1]}$", shown, re.MULTILINE)
    assert f"| {named[1]} |" in (out / "report.md").read_text()
    assert advice["reachable"] and 0.8 <= advice["hit_rate_lookups"] < 0.82
    assert advice["bytes"] == advice["rows"] * 2 * 16 * 4  # Adagrad: a sum for every element
    assert advice["all_bytes"] == 23_040 * 2 * 16 * 4
    assert f"cache.bytes={advice['bytes']}" in advice["paste"]
    assert sum(advice["table_rows"]) == pytest.approx(advice["rows"], abs=2)
    table = report["tables"][0]
    assert table["lookups"] == 60 * 256
    assert abs(table["zipf"]["exponent"] - 1.05) < 1.5 * table["zipf"]["error"]
    shares = list(table["top_shares"].values())
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1
    assert len(table["drift"]["own"]) == 8 and 0.5 < table["drift"]["kept"] <= 1.05
    rates = [point["hit_rate_lookups"] for point in report["sizes"]]
    assert rates[0] < rates[-1] == pytest.approx(advice["whole_tables_hit_rate"])


def test_a_sample_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = run(tmp_path, *SMALL, "analyze.sample=0.25")
    shown = capsys.readouterr().out
    assert report["read"]["steps"] == 15 and report["read"]["share"] == 0.25
    assert "15 of 60 training steps (25.0%)" in shown
    counts = read_statistics(tmp_path / "out").tables[0]
    assert counts.distinct == report["tables"][0]["distinct"]
    assert report["prediction"]["replayed_steps"] == 60


def test_a_target_out_of_reach(tmp_path: Path) -> None:
    report = run(tmp_path, *SMALL, "analyze.target_hit_rate=0.999")
    advice = report["advice"]
    assert not advice["reachable"]
    whole = advice["whole_tables_hit_rate"]
    first = sum(table["distinct"] for table in report["tables"]) / report["read"]["lookups"]
    assert 1 - whole >= first  # a first access misses for each of its lookups in the batch
    assert f"the whole tables on the device serve {whole:.2%}" in advice["text"]
    assert "first access to a row always misses" in advice["text"]
    assert 0.99 * whole <= advice["hit_rate_lookups"] < whole


def test_uniform_ids_need_no_cache(tmp_path: Path) -> None:
    report = run(tmp_path, *SMALL, "data.zipf=0", "data.table_rows=[2000,500]", "trainer.steps=400")
    assert all(table["rows_alike"] for table in report["tables"])
    text = report["advice"]["text"]
    assert "A cache will not help" in text and "uniformly" in text and "parallel=hybrid" in text
    assert "That saves little" in text


def test_odd_tables_are_named(tmp_path: Path) -> None:
    odd = ("data.table_rows=[50,100]", "data.bag_size=[0,1]", "data.zipf=60")
    report = run(tmp_path, *SMALL, *odd)
    unused, single = report["tables"]
    assert unused["lookups"] == 0 and unused["distinct"] == 0
    assert single["distinct"] == 1 and single["zipf"]["exponent"] is None
    text = report["advice"]["text"]
    assert "Nothing looks up t_cat_0" in text and "All ids of t_cat_1 are equal" in text


@pytest.mark.parametrize("wanted", [0.3, 0.725, 0.74, 0.75, 0.9, 1.0])
def test_the_target_has_three_digits_where_few_sizes_differ(wanted: float) -> None:
    """Many shares give the same slots: the search ends, and names the one that it asked for.

    Of 40 rows, of which a cache of 30 serves less than one of 29.
    """

    def estimate(case: Case) -> Outcome:
        rate = 0.5 if case.slots[0] == 30 else case.slots[0] / 40
        return Outcome(case, 1, (GroupCounts(1, rate, 1, 1 - rate),))

    def slots(ratio: float, world: int) -> tuple[int, ...]:
        return (math.ceil(40 * ratio),)

    sizes = SimpleNamespace(rows=40, members=[[0]], slots=slots, bytes_of=lambda *_: 0)
    curve = Curve.of(TableCounts("a", 40, 40, 40, np.ones(40, np.int64)))
    profile, replayed = SimpleNamespace(curve=curve, batch_lookups=4.0), SimpleNamespace()
    replayed.estimate = estimate
    search = SizeSearch(replayed, sizes, [profile], lambda s, w: Case(Policy(), tuple(s)), 1)
    target = search.target(wanted)
    assert target.point.rate >= wanted
    assert rounded_up(target.point.ratio) == target.point.ratio
    assert sizes.slots(target.point.ratio, 1) == target.point.slots
    assert target.point in search.grid()


def test_without_matplotlib(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, *SMALL)
    assert "no plots: matplotlib is not installed" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.png"))
    assert ".png" not in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("reading", [True, False])
def test_ctrl_c_reports_what_there_is(tmp_path, monkeypatch, capsys, reading: bool) -> None:
    """While the data is read, and while the run's first steps are recorded."""
    where, name = (SyntheticSource, "train_batch") if reading else (analyze_run, "record_run")
    whole = getattr(where, name)

    def press(*arguments):
        if not reading or arguments[1] == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*arguments)

    monkeypatch.setattr(where, name, press)
    assert main([*SMALL, f"output={tmp_path}"]) == 130
    report, shown = json.loads((tmp_path / "report.json").read_text()), capsys.readouterr()
    steps = 21 if reading else 60
    assert report["read"]["stopped"] == reading and report["read"]["steps"] == steps
    assert read_statistics(tmp_path).samples == steps * 256
    if reading:
        assert "stopped: the report is of the 21 of 60 steps read" in shown.err
        assert "the reading was stopped" in shown.out
    else:
        assert report["prediction"]["replayed_steps"] == 4
        assert "stopped: the first 4 steps of the run are replayed" in shown.err


def test_data_and_memory_that_are_not_there(tmp_path, monkeypatch, capsys) -> None:
    said = refused(capsys, *SMALL, "data.bag_size=0", f"output={tmp_path}")
    assert "look up no id at all" in said and "data.bag_size" in said
    (tmp_path / "file").write_text("")
    source = ("data=criteo", f"data.path={tmp_path / 'file'}", f"output={tmp_path}")
    assert "file is empty" in refused(capsys, *source)
    said = refused(capsys, *SMALL, f"output={tmp_path / 'file/out'}")
    assert "output=" in said and "name another folder" in said
    monkeypatch.setattr(available, "available_memory", lambda: 100_000)
    said = refused(capsys, *SMALL, f"output={tmp_path}")
    assert "a planner of a replay, whose home has 23,040 rows: needed 270.00 KiB" in said
    assert "for more ranks (analyze.world_sizes)" in said
    said = refused(capsys, *SMALL, "analyze.world_sizes=[4]", f"output={tmp_path}")
    assert "counts of all lookups" in said and "count where the tables fit" in said


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("analyze.target_hit_rate=1", "target_hit_rate=1 is a share: give a number above 0 and"),
        ("analyze.sample=1.5", "analyze.sample=1.5 is a share: give a number above 0 and at most"),
        ("analyze.sample=some", "analyze.sample=some is a share: give a number"),
        ("analyze.memory=4g", "analyze.memory: this key was removed (every row is counted"),
        ("analyze.replay=0", "analyze.replay=0 is out of range"),
        ("analyze.policies=[lru]", "analyze.policies says what simulate=true replays"),
        ("simulate=true analyze.policies=best", "policies=best is unknown: choose lookahead"),
        ("simulate=true analyze.policies=lru-lfu", "analyze.policies=lru-lfu is unknown"),
        ("analyze.sizes=0", "analyze.sizes=0.0: give shares"),
        ("analyze.sizes=1.5", "analyze.sizes=1.5: give shares"),
        ("analyze.world_sizes=0", "analyze.world_sizes="),
        ("analyze.hit_rate=1", "analyze.hit_rate: no such key: did you mean analyze.target"),
        ("run.dir=here", "run.dir: nothing is trained"),
        ("parallel=host", "parallel: nothing is trained"),
        ("analyze.output=x", "analyze.output: no such key: did you mean output?"),
        ("analyze.replay=many", "analyze.replay=many: give a whole number"),
        ("data.nonsense=1", "nonsense"),
        ("cache.ratio=2", "cache.ratio=2"),
    ],
)
def test_what_makes_no_sense(tmp_path, capsys, word: str, named: str) -> None:
    assert named in refused(capsys, f"output={tmp_path}", *SMALL, *word.split())


def test_default_sizes_fit_the_data(tmp_path: Path) -> None:
    """Two small tables, most of whose rows a step names: nothing that is simulated is refused."""
    report = run(tmp_path, *SMALL, "data.table_rows=[300,40]", "simulate=true")
    simulated = report["simulated"]
    assert simulated and all(case["refused"] is None for case in simulated)
    assert len({tuple(case["slots"]) for case in simulated}) > 1


def test_simulation_of_the_data(tmp_path: Path) -> None:
    words = ("analyze.policies=all", "analyze.sizes=0.001,0.1,4000", "analyze.world_sizes=1,2")
    cases = run(tmp_path, *SMALL, "simulate=true", *words, "analyze.lookaheads=2,8")["simulated"]
    assert len(cases) == 2 * 3 * (1 + 3 * 2 + 4)
    assert {case["world_size"] for case in cases} == {1, 2} and cases[0]["label"] == "MIN"
    small = [case for case in cases if case["slots"][0] < 300]
    assert len(small) == 22 and all("distinct rows" in case["refused"] for case in small)
    done = [case for case in cases if case["refused"] is None]
    least = {(str(c["slots"]), c["world_size"]): c["fetched"] for c in done if c["label"] == "MIN"}
    for case in done:
        assert case["fetched"] >= least[str(case["slots"]), case["world_size"]]
        assert 0 < case["hit_rate"] < 1
    text = (tmp_path / "out/report.md").read_text()
    assert "## Simulated policies" in text and "Training would refuse" in text


@pytest.mark.parametrize(("share", "ahead", "binds"), [(0.4, 1, 1), (0.4, 0, 0), (0.1, 1, 0)])
def test_holds_that_bind_are_told(share: float, ahead: int, binds: int) -> None:
    """Where a step's rows are much of the slots, P costs fetches at any window; P = 0 does not."""
    rng = np.random.default_rng(1)
    ids = [(2000 * rng.random(150) ** 1.5).astype(np.int64) for _ in range(150)]
    slots = int(np.mean([len(np.unique(step)) for step in ids]) / share)
    windows = [Case(Policy(), (slots,), window, ahead) for window in (8, 150)]
    least, *outcomes = replay(record_ids(ids, 2000), [Case(None, (slots,), 0, ahead), *windows])
    told = holds_that_bind([least, *outcomes])
    assert len(told) == binds
    assert (outcomes[-1].fetched > 1.05 * least.fetched) == bool(binds)
    for text in told:
        assert text.startswith(f"With {slots:,} slots a step's rows are 40% of them, and the holds")


def test_the_report_says_which_holds_bind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ("data.table_rows=[2000]", "data.zipf=0.5", "data.global_batch_size=150")
    run(tmp_path, "data=synthetic", *words, "trainer.steps=120", "simulate=true",
        "analyze.sizes=350", "cache.prefetch=1")  # fmt: skip
    for told in ((tmp_path / "out/report.md").read_text(), capsys.readouterr().out):
        assert "With 350 slots a step's rows are 4" in told
        assert "no deeper window fetches less. More slots do, or cache.prefetch=0" in told


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("policy", [Policy(), Policy("lfu"), Policy("static"), Policy("lru")])
def test_more_slots_than_rows(world: int, policy: Policy) -> None:
    rng = np.random.default_rng(0)
    steps = [(4000 * rng.random(50) ** 2).astype(np.int64) for _ in range(40)]
    trace = record_ids(steps, 4000, (world,))
    most = max(len(home.names) for home in trace.of_world(world))
    prediction = RecordedRun([trace], 40)
    for slots in (3999, world * most, world * most - world, 300):
        case = Case(policy, (slots,), 4, 1, world)
        found = prediction.estimate(case)
        (plain,) = replay(trace, [case], prediction.classes)
        assert found.case == case and found.hit_rate == plain.hit_rate
        assert found.fetched == plain.fetched and found.written_back == plain.written_back


RUN = (
    *("data=synthetic", "data.table_rows=[3000,500,40]", "data.global_batch_size=64"),
    *("model=dcn_v2", "model.table_dims=[16,16,32]", "model.dense_arch=[8,4]"),
    *("model.over_arch=[8,1]", "model.cross_layers=1", "model.cross_rank=2", "trainer.steps=30"),
)


def simulated(folder: Path, *words: str) -> dict[tuple[str, int], float]:
    """Rows fetched per step by policy and slots over all groups."""
    given = [*RUN, "simulate=true", "analyze.policies=[lookahead]"]
    cases = run(folder, *given, *words)["simulated"]
    return {(case["label"], sum(case["slots"])): case["fetched"] for case in cases}


def test_each_size_has_its_own_prefetch(tmp_path: Path) -> None:
    up = simulated(tmp_path / "up", "analyze.sizes=[0.05,0.5]")
    down = simulated(tmp_path / "down", "analyze.sizes=[0.5,0.05]")
    assert up == down and len(up) == 4


def test_statistics_are_those_that_are_counted(tmp_path: Path) -> None:
    words = ("cache.tail=frequency", "cache.split=by_curve", "analyze.sizes=[0.3]")
    found = simulated(tmp_path, *words)
    (least,) = (key for key in found if key[0] == "MIN")
    ((label, slots),) = found.keys() - {least}
    assert "lfu" in label  # analyze.policies=[lookahead] has the default tail
    same = ("cache.split=by_curve", "cache.ratio=0.3", "cache.warm_start=0")
    counted = f"cache.statistics={tmp_path / 'out'}"
    (summary,) = summaries([[*RUN, *same, counted]], tmp_path / "run")
    assert summary["cache_rows"] == slots
    assert summary["rows_fetched"] == pytest.approx(found[label, slots])
    assert found[least] <= found[label, slots]
