"""What `distcache.analyze` predicts is what training measures, and it counts as preprocessing does,
on all kinds of data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from batch_sources import columns, write
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from source_runs import NET, configured, summaries

from distcache.analyze import main
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.popularity.statistics import read_statistics, vocabulary_of
from distcache.sizing.prediction import Sizes, slots_of
from distcache.sizing.resolve import request_of
from distcache.trainer.build import build_source, build_tables

SYNTHETIC = (
    *("data=synthetic", "data.table_rows=[20000,3000,50]", "data.bag_size=[1,2,1]"),
    *("data.global_batch_size=256", "trainer.steps=40", "cache.ratio=0.1"),
)
WIDE = (*SYNTHETIC, "model=dcn_v2", "model.table_dims=[4,8,4]", "data.samples=10240")
EXACT = 1e-9
"""A replay of the whole run counts what the run counts."""


def predict(overrides: tuple[str, ...], folder: Path, *more: str) -> dict:
    """`prediction` of the report of an analysis with these overrides."""
    out = folder / "analysis"
    assert main([*NET, *overrides, *more, f"output={out}"]) == 0
    return json.loads((out / "report.json").read_text())["prediction"]


def train(overrides: tuple[str, ...], folder: Path, ranks: int = 1) -> dict:
    return summaries([[*NET, *overrides]], folder, ranks)[0]


def check(overrides: tuple[str, ...], folder: Path, *more: str, within: float = EXACT) -> dict:
    """What is predicted, where every case is as the summary of training with as many ranks."""
    prediction = predict(overrides, folder, *more)
    for case in prediction["cases"]:
        summary = train(overrides, folder, case["world_size"])
        distinct = summary["rows_fetched"] / (1 - summary["hit_rate"]) / summary["steps"]
        assert prediction["distinct_per_step_expected"] == pytest.approx(distinct, rel=0.02)
        assert prediction["distinct_per_step_replayed"] == pytest.approx(distinct, rel=within)
        for key in ("hit_rate", "hit_rate_lookups"):
            assert case[key] == pytest.approx(summary[key], rel=within)
        assert case["fetched"] == pytest.approx(summary["rows_fetched"], rel=within)
        assert sum(case["slots"]) == summary["cache_rows"]
        assert 0 < summary["hit_rate"] < 1 and summary["rows_written_back"] > 0
    return prediction


TWO = "analyze.world_sizes=1,2"


def test_bytes_of_rows_whose_state_lies_at_home(tmp_path: Path) -> None:
    """With a share of the state on each of two ranks, the same bytes hold more rows."""
    run = (*SYNTHETIC, "cache.ratio=null", "cache.bytes=96000", "optim=adam")
    assert [case["slots"] for case in check(run, tmp_path, TWO)["cases"]] == [[2000], [3000]]
    config = configured(*NET, *run)
    tables = build_tables(config, build_source(config))
    sizes = Sizes(request_of(config, tables))
    for size, slots in ((1, (2000,)), (2, (3000,))):  # so the advised bytes give the advised rows
        cache = replace(config.cache, bytes=sizes.bytes_of(slots, size))
        assert slots_of(replace(config, cache=cache), tables, size, None) == slots


def test_splits_of_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The slots are those of the run, not a share of the rows: given, or by what is counted."""
    given = (*WIDE[:-1], "cache.ratio=null", "cache.split={t_cat_0:1500,t_cat_1:600,t_cat_2:50}")
    assert check(given, tmp_path)["cases"][0]["slots"] == [1550, 600]
    predict(WIDE, tmp_path)
    by_curve = (f"cache.statistics={tmp_path / 'analysis'}", "cache.split=by_curve")
    found = check((*WIDE, *by_curve, "cache.warm_start=0"), tmp_path)
    assert found["cases"][0]["slots"] != [2005, 300]  # as cache.split=proportional
    # What training refuses is told: before anything is counted, where that needs no counts.
    wrong = [*NET, *SYNTHETIC, "cache.ratio=null", "cache.split={t_cat_0:9,other:9}"]
    capsys.readouterr()
    assert main([*wrong, f"output={tmp_path / 'wrong'}"]) == 1
    told = capsys.readouterr().err
    assert "other=9 names no table" in told and "count" not in told.splitlines()[0]
    assert predict((*WIDE, *by_curve, "cache.ratio=0.01"), tmp_path)["cases"] == []
    told = capsys.readouterr().err
    assert "no run with the configured cache is predicted: cache.split=by_curve: a step" in told


def test_a_replayed_beginning_stands_for_the_run(tmp_path: Path) -> None:
    run = (*SYNTHETIC, "trainer.steps=200", "data.table_rows=[2000,300,50]", "cache.ratio=0.4")
    found = check(run, tmp_path, "analyze.replay=150000", within=0.02)
    assert found["replayed_steps"] == 147 < found["steps"] == 200


def criteo(folder: Path, shared: Path) -> tuple[str, ...]:
    text = write_lines(folder / "train.txt", make_lines(3000, seed=4))
    return (
        *("data=criteo", f"data.path={text}", f"data.table_rows={list(ROWS)}", "cache.ratio=0.17"),
        *("data.global_batch_size=128", "trainer.eval_every=7", "trainer.eval_steps=2"),
        "cache.policy=lru",
    )


def parquet(folder: Path, shared: Path) -> tuple[str, ...]:
    for part in range(3):
        write(folder / f"{part}.parquet", columns(700, seed=part), 200)
    return (
        *("data=parquet", f"data.path='{folder}/*.parquet'", "data.id_columns=[a,b,c]"),
        *("data.label_column=y", "data.dense_columns=[z]", "data.table_rows=[50,1000,7]"),
        *("data.global_batch_size=50", "cache.ratio=0.13", "optim=adam"),
        *("cache.tail=lfu", "cache.lookahead=3"),
    )


def interactions(folder: Path, shared: Path) -> tuple[str, ...]:
    lines = (shared / "amazon_book_interactions.txt").read_text().splitlines()[:1500]
    (folder / "clicks.txt").write_text("\n".join(lines) + "\n")
    return (
        *("data=interactions", f"data.path={folder / 'clicks.txt'}", "data.on_bad_line=skip"),
        *("data.global_batch_size=512", "data.negatives=1", "cache.ratio=0.1", "optim=adagrad"),
    )


@pytest.mark.parametrize("make", [criteo, parquet, interactions])
def test_kinds_of_data_and_policies(tmp_path: Path, shared_data: Path, make: Callable) -> None:
    check(make(tmp_path, shared_data), tmp_path)


@pytest.mark.parametrize(
    ("mode", "multi_hot"), [("hash", (3, 1, 2, *[1] * 23)), ("vocabulary", None)]
)
def test_counts_of_preprocessing_are_those_of_an_analysis(
    tmp_path: Path, mode: str, multi_hot: tuple[int, ...] | None
) -> None:
    text = write_lines(tmp_path / "a.txt", make_lines(700))
    folder = tmp_path / "made"
    preprocessed(text, folder, mode=mode, multi_hot=multi_hot)
    words = ("data=criteo", f"data.path={folder}", "data.global_batch_size=64", "cache.ratio=0.5")
    assert main([*words, f"output={tmp_path / 'out'}"]) == 0
    counted, given = read_statistics(tmp_path / "out"), read_statistics(folder)
    assert counted.fingerprint == given.fingerprint
    assert counted.samples == given.samples == 600
    for one, other in zip(counted.tables, given.tables, strict=True):
        assert (one.lookups, one.distinct) == (other.lookups, other.distinct)
        assert one.dense().tolist() == other.dense().tolist()
    assert json.loads((tmp_path / "out/report.json").read_text())["read"]["in_order_of_files"]


def test_the_same_vocabulary_and_others(tmp_path: Path) -> None:
    days = [write_lines(tmp_path / f"{d}.txt", make_lines(300, seed=d)) for d in (0, 1)]
    hashed = []
    for number, day in enumerate(days):
        preprocessed(day, tmp_path / f"h{number}")
        hashed.append(CriteoArrays(CriteoSpec(tmp_path / f"h{number}")))
    text = CriteoSource(CriteoSpec(days[0], ROWS))
    assert len({vocabulary_of(source) for source in (*hashed, text)}) == 1
    assert read_statistics(tmp_path / "h0").vocabulary == vocabulary_of(text)
    preprocessed(days[0], tmp_path / "bags", multi_hot=[2] * 26)
    for number, day in enumerate([*days, days[0]]):
        preprocessed(day, tmp_path / f"v{number}", mode="vocabulary")
    made = [CriteoArrays(CriteoSpec(tmp_path / name)) for name in ("bags", "v0", "v1", "v2")]
    names = [vocabulary_of(source) for source in (text, *made)]
    assert names[2] == names[4] and len(set(names)) == 4

    def name(**values: float) -> str:
        return vocabulary_of(SyntheticSource(SyntheticSpec([10, 20], **values)))

    assert name() == name(samples=100) == name(bag_size=3)
    assert len({name(), name(seed=1), name(zipf=0.8)}) == 3
