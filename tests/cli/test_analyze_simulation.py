"""What analyze replays: policies of the data, or of a file of ids, as a run with the keys would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from analyses import SMALL, refused, run

from distcache.cli.analyze_run import (
    DEFAULT_SIZES,
    AnalyzeConfig,
    binding_holds,
    cases_of,
    policy_named,
)
from distcache.cli.compose import compose_overrides, read_line, to_config
from distcache.comm.world import close_world, open_world
from distcache.planner.victims import Policy
from distcache.replay import Case, replay
from distcache.trace import Trace, record_ids
from distcache.trainer.prediction import RecordedRun
from distcache.trainer.trainer import train


def test_policies_and_cases() -> None:
    assert policy_named("lookahead-frequency") == Policy("lookahead", "frequency")
    words = ["simulate=true", "analyze.policies=all", "analyze.lookaheads=[2,8]"]
    line = read_line("analyze", AnalyzeConfig, [*words, "analyze.world_sizes=1,3"])
    options = line.values.analyze
    assert len(options.chosen_policies) == 7
    cases = cases_of(
        options,
        DEFAULT_SIZES,
        lambda size, world: (int(1000 * size),),
        lambda slots, world: (9, int(slots[0] > 5)),
    )
    sizes = len(DEFAULT_SIZES)
    assert len(cases) == 2 * sizes * (1 + 3 * 2 + 4)
    assert all(case.prefetch == (case.slots[0] > 5) for case in cases)
    assert {case.prefetch for case in cases} == {0, 1}
    assert cases[0].policy is None and {case.world_size for case in cases} == {1, 3}


def test_default_sizes_fit_the_data(tmp_path: Path) -> None:
    """Two small tables, most of whose rows a step names: nothing that is simulated is refused."""
    report = run(tmp_path, *SMALL, "data.table_rows=[300,40]", "simulate=true")
    simulated = report["simulated"]
    assert simulated and all(case["refused"] is None for case in simulated)
    assert len({tuple(case["slots"]) for case in simulated}) > 1


def test_simulation_of_the_data(tmp_path: Path) -> None:
    report = run(
        tmp_path, *SMALL, "simulate=true", "analyze.policies=all", "analyze.sizes=0.001,0.1,4000",
        "analyze.world_sizes=1,2",
    )  # fmt: skip
    cases = report["simulated"]
    assert len(cases) == 2 * 3 * 8
    small = [case for case in cases if case["slots"][0] < 300]
    assert len(small) == 16 and all("distinct rows" in case["refused"] for case in small)
    done = [case for case in cases if case["refused"] is None]
    least = {(str(c["slots"]), c["world_size"]): c["fetched"] for c in done if c["label"] == "MIN"}
    for case in done:
        assert case["fetched"] >= least[str(case["slots"]), case["world_size"]]
        assert 0 < case["hit_rate"] < 1
    text = (tmp_path / "out/report.md").read_text()
    assert "## Simulated policies" in text and "Training would refuse" in text


def test_simulation_of_a_file_of_ids(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(0)
    ids = (1000 * rng.random((50, 40)) ** 3).astype(np.int64)
    np.save(tmp_path / "ids.npy", ids)
    words = ("simulate=true", f"trace={tmp_path / 'ids.npy'}", "analyze.sizes=0.1,1.0")
    report = run(tmp_path, *words)
    assert report["read"] == {"ids": 2000, "steps": 50, "rows": int(ids.max()) + 1}
    assert {case["label"] for case in report["simulated"]} == {"MIN", "lookahead 64, lfu", "lru"}
    assert "of MIN" in capsys.readouterr().out
    said = refused(capsys, *words, "optim=adam", f"output={tmp_path}")
    assert "optim=adam speaks of a data source" in said
    bad = tmp_path / "ids.txt"
    bad.write_text("1 2\n3 -4\n")
    said = refused(capsys, "simulate=true", f"trace={bad}", f"output={tmp_path / 'o'}")
    assert "trace: " in said and "line 2: '-4'" in said and "name another one" in said


def recorded(share: float, steps: int = 150) -> tuple[Trace, int]:
    """A stream of ids that come again at random, and slots of which a step's rows are `share`."""
    rng = np.random.default_rng(1)
    ids = [(2000 * rng.random(150) ** 1.5).astype(np.int64) for _ in range(steps)]
    return record_ids(ids, 2000), int(np.mean([len(np.unique(step)) for step in ids]) / share)


@pytest.mark.parametrize(
    ("share", "ahead", "binds"), [(0.4, 1, True), (0.4, 0, False), (0.1, 1, False)]
)
def test_holds_that_bind_are_told(share: float, ahead: int, binds: bool) -> None:
    """Where a step's rows are much of the slots, P costs fetches at any window; P = 0 does not."""
    trace, slots = recorded(share)
    cases = [Case(None, (slots,), 0, ahead)]
    cases += [Case(Policy(), (slots,), window, ahead) for window in (4, 8)]
    outcomes = replay(trace, cases)
    found = binding_holds([trace], outcomes, lambda *_: None)
    assert len(found) == binds
    for hold in found:
        assert hold.rows == pytest.approx(share * slots, rel=0.02)
        assert hold.fetched > 1.05 and hold.without == pytest.approx(1.0, abs=0.005)
        deepest = replay(trace, [Case(Policy(), (slots,), trace.steps, ahead)])[0]
        assert hold.fetched == pytest.approx(deepest.fetched / outcomes[0].fetched, abs=0.01)


def test_the_report_says_which_holds_bind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ("data.table_rows=[2000]", "data.zipf=0.5", "data.global_batch_size=150")
    run(tmp_path, "data=synthetic", *words, "trainer.steps=120", "simulate=true",
        "analyze.sizes=350", "cache.prefetch=1")  # fmt: skip
    text, shown = (tmp_path / "out/report.md").read_text(), capsys.readouterr().out
    for told in (text, shown):
        assert "the holds of moving ahead bind: with cache.prefetch=1 a window of 64" in told
        assert "No deeper window helps there; more slots do." in told


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
    *("model.over_arch=[8,1]", "model.cross_layers=1", "model.cross_rank=2"),
    *("trainer.steps=30", "trainer.device=cpu", "trainer.log_level=ERROR", "run.save=false"),
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
    found = simulated(tmp_path / "counted", *words)
    ((label, slots), fetched) = next(item for item in found.items() if item[0][0] != "MIN")
    assert "lfu" in label  # analyze.policies=[lookahead] has the default tail
    wanted = (*RUN, "cache.split=by_curve", "cache.ratio=0.3", "cache.warm_start=0")
    folder = tmp_path / "run"
    folder.mkdir()
    world = open_world("cpu", timeout_s=60)
    try:
        words = [*wanted, f"cache.statistics={tmp_path / 'counted/out'}"]
        summary = train(to_config(compose_overrides(words)), world, folder).summary
    finally:
        close_world(world)
    assert summary["cache_rows"] == slots
    assert summary["rows_fetched"] == pytest.approx(fetched)
    least = next(value for (name, _), value in found.items() if name == "MIN")
    assert least <= fetched
