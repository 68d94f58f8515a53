"""What `distcache.analyze` predicts is what a training run measures, on four kinds of data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import ROWS, make_lines, write_lines
from source_runs import summaries

from distcache.analyze import main
from distcache.cli.compose import compose_overrides, to_config
from distcache.trainer.build import build_source, build_tables
from distcache.trainer.prediction import Sizes, slots_of

TINY = ("model.dense_arch=[8,4]", "model.over_arch=[8,1]", "model.embedding_dim=4")
SYNTHETIC = (
    *("data=synthetic", "data.table_rows=[20000,3000,50]", "data.bag_size=[1,2,1]"),
    *("data.global_batch_size=256", "trainer.steps=40", "cache.ratio=0.1"),
)


def predict(overrides: tuple[str, ...], folder: Path, *more: str) -> dict:
    """`prediction` of the report of an analysis with these overrides."""
    out = folder / "analysis"
    assert main([*TINY, *overrides, *more, f"output={out}"]) == 0
    return json.loads((out / "report.json").read_text())["prediction"]


def check(prediction: dict, found: list[dict], within: float) -> None:
    """Every case is as the summary of a training run with as many ranks."""
    assert len(prediction["cases"]) == len(found)
    for case, summary in zip(prediction["cases"], found, strict=True):
        assert summary["world_size"] == case["world_size"]
        distinct = summary["rows_fetched"] / (1 - summary["hit_rate"]) / summary["steps"]
        assert prediction["distinct_per_step_expected"] == pytest.approx(distinct, rel=0.02)
        assert prediction["distinct_per_step_replayed"] == pytest.approx(distinct, rel=within)
        for key in ("hit_rate", "hit_rate_lookups"):
            assert case[key] == pytest.approx(summary[key], rel=within)
        assert case["fetched"] == pytest.approx(summary["rows_fetched"], rel=within)
        assert 0 < summary["hit_rate"] < 1 and summary["rows_written_back"] > 0


def train(overrides: tuple[str, ...], folder: Path, ranks: int = 1) -> dict:
    return summaries([[*TINY, *overrides]], folder, ranks)[0]


EXACT = 1e-9
"""A replay of the whole run counts what the run counts."""


def test_synthetic_at_one_and_two_ranks(tmp_path: Path) -> None:
    found = [train(SYNTHETIC, tmp_path, ranks) for ranks in (1, 2)]
    check(predict(SYNTHETIC, tmp_path, "analyze.world_sizes=1,2"), found, EXACT)


def test_other_policies_and_auto(tmp_path: Path) -> None:
    for more in (("cache.policy=lru",), ("cache.tail=lfu", "cache.lookahead=3", "optim=adam")):
        run = (*SYNTHETIC, *more)
        check(predict(run, tmp_path), [train(run, tmp_path)], EXACT)


def test_bytes_of_rows_whose_state_lies_at_home(tmp_path: Path) -> None:
    """With a share of the state on each of two ranks, the same bytes hold more rows."""
    run = (*SYNTHETIC, "cache.ratio=null", "cache.bytes=96000", "optim=adam")
    found = [train(run, tmp_path, ranks) for ranks in (1, 2)]
    assert [summary["cache_rows"] for summary in found] == [2000, 3000]
    prediction = predict(run, tmp_path, "analyze.world_sizes=1,2")
    assert [case["slots"] for case in prediction["cases"]] == [[2000], [3000]]
    check(prediction, found, EXACT)
    config = to_config(compose_overrides([*TINY, *run]))
    tables = build_tables(config, build_source(config))
    sizes = Sizes.of(config, tables)
    for size, slots in ((1, (2000,)), (2, (3000,))):  # so the advised bytes give the advised rows
        cache = replace(config.cache, bytes=sizes.bytes_of(slots, size))
        assert slots_of(replace(config, cache=cache), tables, size, None) == slots


WIDE = (*SYNTHETIC, "model=dcn_v2", "model.table_dims=[4,8,4]", "data.samples=10240")


def test_splits_of_the_cache(tmp_path: Path) -> None:
    """The slots are those of the run, not a share of the rows: given, or by what is counted."""
    given = (*WIDE[:-1], "cache.ratio=null", "cache.split={t_cat_0:1500,t_cat_1:600,t_cat_2:50}")
    prediction = predict(given, tmp_path)
    assert prediction["cases"][0]["slots"] == [1550, 600]
    check(prediction, [train(given, tmp_path)], EXACT)
    predict(WIDE, tmp_path)
    counts = f"cache.statistics={tmp_path / 'analysis'}"
    by_curve = (*WIDE, counts, "cache.split=by_curve", "cache.warm_start=0")
    prediction, found = predict(by_curve, tmp_path), train(by_curve, tmp_path)
    assert prediction["cases"][0]["slots"] != [2005, 300]  # as cache.split=proportional
    assert sum(prediction["cases"][0]["slots"]) == found["cache_rows"]
    check(prediction, [found], EXACT)


def test_a_split_that_training_refuses(tmp_path: Path, capsys) -> None:
    wrong = [*TINY, *SYNTHETIC, "cache.ratio=null", "cache.split={t_cat_0:9,other:9}"]
    assert main([*wrong, f"output={tmp_path / 'wrong'}"]) == 1
    told = capsys.readouterr().err
    assert "other=9 names no table" in told and "count" not in told.splitlines()[0]
    predict(WIDE, tmp_path)
    small = (
        f"cache.statistics={tmp_path / 'analysis'}",
        "cache.split=by_curve",
        "cache.ratio=0.01",
    )
    assert predict((*WIDE, *small), tmp_path)["cases"] == []
    told = capsys.readouterr().err
    assert "no run with the configured cache is predicted: cache.split=by_curve: a step" in told


def test_a_replayed_beginning_stands_for_the_run(tmp_path: Path) -> None:
    run = (*SYNTHETIC, "trainer.steps=200", "data.table_rows=[2000,300,50]", "cache.ratio=0.4")
    prediction = predict(run, tmp_path, "analyze.replay=150000")
    assert prediction["replayed_steps"] == 147 < prediction["steps"] == 200
    check(prediction, [train(run, tmp_path)], 0.02)


def test_criteo_lines_and_folders(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "train.txt", make_lines(3000, seed=4))
    rows = f"data.table_rows={list(ROWS)}"
    run = ("data=criteo", f"data.path={text}", rows, "data.global_batch_size=128")
    run = (*run, "cache.ratio=0.17", "trainer.eval_every=7", "trainer.eval_steps=2")
    check(predict(run, tmp_path), [train(run, tmp_path)], EXACT)


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    users = (3000 * rng.random(6000) ** 3).astype(np.int64)
    items = [(800 * rng.random(n) ** 2).astype(np.int64) for n in rng.integers(0, 4, 6000)]
    columns = {"label": rng.integers(0, 2, 6000), "user": users, "items": items}
    for part, span in enumerate(np.array_split(np.arange(6000), 3)):
        table = arrow.table({k: [v[i] for i in span] for k, v in columns.items()})
        parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=500)
    run = (
        *("data=parquet", f"data.path='{tmp_path}/*.parquet'", "data.id_columns=[user,items]"),
        *("data.table_rows=[3000,800]", "data.global_batch_size=200", "cache.ratio=0.3"),
    )
    check(predict(run, tmp_path), [train(run, tmp_path)], EXACT)


def test_interactions(tmp_path: Path, shared_data: Path) -> None:
    lines = (shared_data / "amazon_book_interactions.txt").read_text().splitlines()[:1500]
    path = tmp_path / "clicks.txt"
    path.write_text("\n".join(lines) + "\n")
    run = (
        *("data=interactions", f"data.path={path}", "data.on_bad_line=skip"),
        *("data.global_batch_size=512", "data.negatives=1", "cache.ratio=0.1", "optim=adagrad"),
    )
    check(predict(run, tmp_path), [train(run, tmp_path)], EXACT)
