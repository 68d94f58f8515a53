"""The command line of the analysis: what it leaves, what it advises, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from analyses import SMALL, refused, run

from distcache.analyze import main
from distcache.cli import analyze_run
from distcache.cli.analyze_run import AnalyzeConfig, SizeSearch, check_line, rounded_up
from distcache.cli.compose import read_line
from distcache.config.tree import CacheConfig
from distcache.data.synthetic import SyntheticSource
from distcache.engine.placing import CacheRequest
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.optim import row_update
from distcache.planner.victims import Policy
from distcache.popularity.curve import Curve, Drift, TableProfile, ZipfFit
from distcache.popularity.statistics import TableCounts, read_statistics
from distcache.replay import Case
from distcache.store import memory as available
from distcache.trainer.prediction import Estimate, Sizes


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
    assert table["lookups"] == 60 * 256 and table["exact"]
    assert abs(table["zipf"]["exponent"] - 1.05) < 1.5 * table["zipf"]["error"]
    shares = list(table["top_shares"].values())
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1
    assert len(table["drift"]["own"]) == 8 and 0.5 < table["drift"]["kept"] <= 1.05
    rates = [point["hit_rate_lookups"] for point in report["sizes"]]
    assert rates[0] < rates[-1] == pytest.approx(advice["whole_tables_hit_rate"])


def test_a_sample_and_a_sketch_say_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    report = run(tmp_path, *SMALL, "analyze.sample=0.25", "analyze.memory=90000")
    shown = capsys.readouterr().out
    assert report["read"]["steps"] == 15 and report["read"]["share"] == 0.25
    assert "15 of 60 training steps (25.0%)" in shown
    large, _, small = report["tables"]
    assert not large["exact"] and small["exact"] and "frequent-items sketch" in shown
    assert large["count_bytes"] <= 90_000 and large["count_error"] > 0
    assert f"at most {large['count_error']:,} too small" in shown
    counts = read_statistics(tmp_path / "out").tables[0]
    assert counts.error == large["count_error"] and counts.distinct == large["distinct"]
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


def write_clicks(folder: Path) -> tuple[str, ...]:
    """Parquet with a table that nothing looks up, one with one id, and a plain one."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    count = 1200
    ids = (300 * np.random.default_rng(0).random(count) ** 3).astype(np.int64)
    none = arrow.array([[]] * count, arrow.list_(arrow.int64()))
    columns = {"label": [0, 1] * (count // 2), "never": none, "always": [7] * count, "plain": ids}
    parquet.write_table(arrow.table(columns), folder / "clicks.parquet")
    return (
        *("data=parquet", f"data.path={folder / 'clicks.parquet'}", "cache.ratio=0.5"),
        *("data.id_columns=[never,always,plain]", "data.table_rows=[50,100,300]"),
        "data.global_batch_size=64",
    )


def test_odd_tables_are_named(tmp_path: Path) -> None:
    report = run(tmp_path, *write_clicks(tmp_path))
    unused, single, plain = report["tables"]
    assert unused["lookups"] == 0 and unused["distinct"] == 0
    assert single["distinct"] == 1 and single["zipf"]["exponent"] is None
    assert plain["lookups"] > 0
    text = report["advice"]["text"]
    assert "Nothing looks up t_never" in text and "All ids of t_always are equal" in text


@pytest.mark.parametrize(
    ("ratio", "up"), [(0.012345, 0.0124), (0.0124, 0.0124), (0.99951, 1.0), (3e-5, 3e-5), (1, 1)]
)
def test_sizes_have_three_digits(ratio: float, up: float) -> None:
    assert rounded_up(ratio) == up


class Served:
    """A `Prediction` of 40 rows, of which a cache of 30 serves less than one of 29."""

    def estimate(self, case: Case) -> Estimate:
        """See `RecordedRun.estimate`."""
        rate = 0.5 if case.slots[0] == 30 else case.slots[0] / 40
        return Estimate(case, 1, hit_rate=rate, hit_rate_lookups=rate)


@pytest.mark.parametrize("wanted", [0.3, 0.725, 0.74, 0.75, 0.9])
def test_the_target_has_three_digits_where_few_sizes_differ(wanted: float) -> None:
    """Many shares give the same slots: the search ends, and names the one that it asked for."""
    request = CacheRequest(CacheConfig(), row_update("sgd", 0.0), 1, 4, 8, 1, "bytes")
    sizes = Sizes([TableSpec("a", 40, 4, ("a",))], request)
    counts = np.ones(40, np.int64)
    table = TableCounts("a", 40, 40, 40, counts)
    profile = TableProfile(table, Curve.of(table), ZipfFit(None, None, 0), Drift(40), 0.0, 4.0, 0)
    search = SizeSearch(Served(), sizes, [profile], lambda slots: Case(Policy(), tuple(slots)), 1)
    target = search.target(wanted)
    assert target.point.rate >= wanted
    assert rounded_up(target.point.ratio) == target.point.ratio
    assert sizes.slots(target.point.ratio, 1) == target.point.slots
    assert target.point in search.grid()


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, *SMALL)
    assert "no plots: matplotlib is not installed" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.png"))
    assert ".png" not in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("reading", [True, False])
def test_ctrl_c_reports_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, reading: bool
) -> None:
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


def test_data_without_a_lookup(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    said = refused(capsys, *SMALL, "data.bag_size=0", f"output={tmp_path}")
    assert "look up no id at all" in said and "data.bag_size" in said
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    source = ("data=criteo", f"data.path={empty}", f"output={tmp_path}")
    assert "empty.txt is empty" in refused(capsys, *source)


def test_memory_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(available, "available_memory", lambda: 100_000)
    said = refused(capsys, *SMALL, f"output={tmp_path}")
    assert "counts of all lookups" in said and "lower analyze.memory" in said


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("analyze.target_hit_rate=1", "analyze.target_hit_rate=1.0: give a share"),
        ("analyze.sample=1.5", "analyze.sample=1.5: give auto, or a share"),
        ("analyze.sample=some", "analyze.sample=some: give auto"),
        ("analyze.memory=4x", "analyze.memory=4x: give a number of bytes"),
        ("analyze.memory=100", "analyze.memory=100 is too little"),
        ("analyze.replay=0", "analyze.replay=0 is out of range"),
        ("analyze.policies=[lru]", "analyze.policies says what simulate=true replays"),
        (
            "simulate=true analyze.policies=best",
            "analyze.policies=best is unknown: choose among lookahead",
        ),
        ("simulate=true analyze.policies=lru-lfu", "analyze.policies=lru-lfu is unknown"),
        ("analyze.sizes=0", "analyze.sizes=0.0: give shares"),
        ("analyze.sizes=1.5", "analyze.sizes=1.5: give shares"),
        ("analyze.world_sizes=0", "analyze.world_sizes="),
        (
            "analyze.hit_rate=1",
            "analyze.hit_rate: no such key: did you mean analyze.target",
        ),
        ("run.dir=here", "run.dir: nothing is trained"),
        ("trace=x.txt", "trace=x.txt is a trace to simulate: give simulate=true"),
        ("--simulate", "--simulate: write simulate=..."),
        ("analyze.output=x", "analyze.output: no such key: did you mean output?"),
        ("analyze.replay=many", "analyze.replay=many: give a whole number"),
        ("data.nonsense=1", "nonsense"),
        ("cache.ratio=2", "cache.ratio=2"),
    ],
)
def test_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture, word: str, named: str
) -> None:
    assert named in refused(capsys, f"output={tmp_path}", *SMALL, *word.split())


def test_help_names_every_key(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for key in ("analyze.target_hit_rate=0.95", "analyze.sample=auto", "simulate=false", "trace="):
        assert key in shown


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capsys, *SMALL, f"output={tmp_path / 'file/out'}")
    assert "output=" in said and "name another folder" in said
    with pytest.raises(ConfigError, match="nothing is trained"):
        check_line(read_line("analyze", AnalyzeConfig, ["parallel=host"]))
