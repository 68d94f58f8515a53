"""The command line of the analysis: simulated policies, of the data and of a file of ids."""

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
from distcache.cli.compose import read_line
from distcache.planner.victims import Policy
from distcache.replay import Case, replay
from distcache.trace import Trace, record_ids


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
        lambda slots, world: int(slots[0] > 5),
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
    assert {case["label"] for case in report["simulated"]} == {"MIN", "lookahead 8, lfu", "lru"}
    assert "of MIN" in capsys.readouterr().out
    said = refused(capsys, *words, "optim=adam", f"output={tmp_path}")
    assert "optim=adam speaks of a data source" in said


@pytest.mark.parametrize(
    ("text", "named"),
    [("1 2\n3 -4\n", "line 2: '-4'"), ("1 2.5\n", "line 1: '2.5'"), ("", "no ids")],
)
def test_a_bad_trace(tmp_path: Path, capsys: pytest.CaptureFixture, text: str, named: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(text)
    said = refused(capsys, "simulate=true", f"trace={path}", f"output={tmp_path / 'o'}")
    assert "trace: " in said and named in said and "name another one" in said


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
